"""Routed experts under GTP: their forward, their `GTPStyle`, and what torchtitan's tensor parallelism of MoE misses."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import parallelize_module
from torchtitan.models.llama4.infra.parallelize import apply_moe_ep_tp
from torchtitan.models.moe import moe as moe_module
from torchtitan.models.moe.moe import GroupedExperts, MoE
from torchtitan.models.moe.utils import _permute, _unpermute

from gtp_dtensor import GTPStyle, grouped_linear
from titan_integration.settings import gtp_config

EXPERTS = "layers.*.moe.experts"
# Small and used once a layer: sharded, each would cost a collective that nothing hides.
ROUTER_GATES = "layers.*.moe.router.gate.*"
_EP = "parallelism.expert_parallel_degree"


def moe_layers(model: nn.Module) -> list[MoE]:
    """The MoE layers of a model or of a pipeline stage, in order."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def drop_token_counts(model_parts: list[nn.Module]) -> None:
    """Forgets the tokens per expert since the last optimizer step, which would move the expert bias in the next one."""
    for model in model_parts:
        for moe in moe_layers(model):
            moe.tokens_per_expert.zero_()


@contextmanager
def other_experts_stay_eager() -> Iterator[None]:
    """While it is open, torchtitan may compile its function for experts; after, it is what it was.

    torchtitan replaces that function in its module, for every model of the process and for good. Our experts have a
    forward of their own, and a model that is built later may want it eager.
    """
    original = moe_module._run_experts_grouped_mm
    try:
        yield
    finally:
        moe_module._run_experts_grouped_mm = original


def _in_a_loop(module: GroupedExperts, x: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """One expert after the other, in the dtype of `x`."""
    splits = num_tokens.tolist()
    num_padding = x.shape[0] - sum(splits)  # expert parallelism pads the end, too
    x = x[: x.shape[0] - num_padding]
    hidden = F.silu(grouped_linear(module, "w1", x, splits=splits)) * grouped_linear(module, "w3", x, splits=splits)
    out = grouped_linear(module, "w2", hidden, splits=splits)
    return F.pad(out, (0, 0, 0, num_padding))


def _grouped(module: GroupedExperts, x: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """torch's grouped GEMM, in bfloat16."""
    offsets = torch.cumsum(num_tokens, dim=0, dtype=torch.int32)
    hidden = F.silu(grouped_linear(module, "w1", x, offsets=offsets))
    hidden = hidden * grouped_linear(module, "w3", x, offsets=offsets)
    return grouped_linear(module, "w2", hidden, offsets=offsets).type_as(x)


def forward_experts(module: GroupedExperts, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
    """The forward of torchtitan's `GroupedExperts`, one gathered weight at a time.

    Args:
        module: its weights w1, w3 of shape (experts, hidden, dim) and w2 of shape (experts, dim, hidden).
        x: tokens of shape (T, dim), grouped by expert.
        num_tokens_per_expert: integers, one for each expert of this rank.

    Returns:
        Shape and dtype of `x`; a part of a sum over the etp axis where there is one.
    """
    if not module.use_grouped_mm:
        return _in_a_loop(module, x, num_tokens_per_expert)
    num_local = num_tokens_per_expert.shape[0]
    if num_local < module.num_experts:  # under expert parallelism, which has padded each expert's tokens
        return _grouped(module, x, num_tokens_per_expert)
    shape, x, indices, num_tokens_per_expert = _permute(x, num_tokens_per_expert, 1, num_local)
    return _unpermute(_grouped(module, x, num_tokens_per_expert), shape, indices)


class QuantizedGroupedExperts(GroupedExperts):
    """torchtitan's experts whose grouped GEMMs read quantized numbers; see `grouped_converters`."""

    forward = forward_experts


def own_patterns(model: nn.Module, patterns: Iterable[str], of_experts: bool) -> list[str]:
    """Those that name a weight of a model's or a stage's routed experts, or one of the others."""
    names = (name.replace("_checkpoint_wrapped_module.", "") for name, _ in model.named_parameters())
    names = [name for name in names if fnmatch.fnmatchcase(name, f"{EXPERTS}.*") == of_experts]
    return [pattern for pattern in patterns if any(fnmatch.fnmatchcase(name, pattern) for name in names)]


def own_overrides(model: nn.Module, job_config, of_experts: bool) -> dict[str, str]:
    """Those of `[gtp] wire_format_overrides` for a model's or a stage's routed experts, or for its other weights."""
    overrides = job_config.gtp.wire_format_overrides
    return {pattern: overrides[pattern] for pattern in own_patterns(model, overrides, of_experts)}


def apply_expert_style(model: nn.Module, parallel_dims, job_config) -> None:
    """`GTPStyle` on the routed experts of a model or a pipeline stage, on the axis `egtp`; nothing where it has none."""
    if not moe_layers(model):
        return
    classes = {type(module) for module in model.modules() if isinstance(module, GroupedExperts)}
    style = GTPStyle(
        gtp_config(job_config),
        modules=[EXPERTS],
        exclude=own_patterns(model, job_config.gtp.exclude, of_experts=True),
        wire_format_overrides=own_overrides(model, job_config, of_experts=True),
        min_numel=job_config.gtp.min_numel,
        replicate_mesh=parallel_dims.get_optional_mesh("dp_replicate"),
        optimizer_shard_mesh=parallel_dims.get_optional_mesh("expert_optimizer_shard"),
        is_expert=True,
        forwards=dict.fromkeys(classes, forward_experts),
    )
    parallelize_module(model, parallel_dims.get_mesh("egtp"), style)


def check_experts(job_config, num_experts: int) -> None:
    """Refuses what cannot work with routed experts under GTP.

    Args:
        job_config: torchtitan's JobConfig.
        num_experts: of each MoE layer; 0 for a model without.

    Raises:
        ValueError, NotImplementedError: names the key and what would work.
    """
    parallelism = job_config.parallelism
    if not num_experts:
        return
    if parallelism.expert_parallel_comm_backend != "standard":
        raise NotImplementedError(
            f"parallelism.expert_parallel_comm_backend = {parallelism.expert_parallel_comm_backend!r} is not supported "
            "together with gtp: its experts have a forward of their own; set it to 'standard'"
        )
    ep = parallelism.expert_parallel_degree
    if num_experts % ep:
        working = " or ".join(str(size) for size in range(1, num_experts + 1) if num_experts % size == 0)
        raise ValueError(
            f"{_EP} = {ep} (axis ep) does not divide the {num_experts} experts of each MoE layer; set it to {working}"
        )
    schedule = parallelism.pipeline_parallel_schedule
    if ep > 1 and parallelism.pipeline_parallel_degree > 1 and schedule.lower() == "dualpipev":
        raise NotImplementedError(
            f"parallelism.pipeline_parallel_schedule = {schedule!r} with {_EP} = {ep} is not supported together with gtp: "
            "it runs a forward and a backward at once; use 'ZBVZeroBubble'"
        )


def apply_expert_and_tensor_parallel(model: nn.Module, parallel_dims) -> None:
    """torchtitan's EP, ETP and TP of all MoE layers, with gradients that are right under TP."""
    tp_mesh, ep_mesh = parallel_dims.get_optional_mesh("tp"), parallel_dims.get_optional_mesh("ep")
    apply_moe_ep_tp(
        model,
        tp_mesh=tp_mesh,
        ep_mesh=ep_mesh,
        etp_mesh=parallel_dims.get_optional_mesh("etp"),
        ep_etp_mesh=parallel_dims.get_optional_mesh(["ep", "etp"]),
    )
    if tp_mesh is None:
        return
    splits_tokens = ep_mesh is not None and not parallel_dims.etp_enabled
    for moe in moe_layers(model):
        if splits_tokens or not moe.score_before_experts:
            moe.router.gate.register_forward_hook(_sum_gradients(tp_mesh))
        if splits_tokens:
            _TokensOfOwnSequence(tp_mesh).apply(moe)


def _sum_gradients(tp_mesh: DeviceMesh) -> Callable[[nn.Module, tuple, torch.Tensor], torch.Tensor]:
    """A forward hook after torchtitan's on a router's gate: sums the gradient of its output over tp.

    torchtitan 0.2.2 takes the gradient of the scores, and so of the gate and of its input, as complete on each tp rank.
    But scores multiply the experts' output, of which each tp rank has a part of a sum, or they are used for this rank's
    part of the tokens only. (Where scores multiply the experts' input and every rank uses all, they are complete.)
    """

    def hook(gate: nn.Module, inputs: tuple, scores: torch.Tensor) -> torch.Tensor:
        replicated = DTensor.from_local(scores, tp_mesh, (Replicate(),), run_check=False)
        return replicated.to_local(grad_placements=(Partial(),))

    return hook


class _TokensOfOwnSequence:
    """Hooks by which a tp rank routes the tokens of its piece of the sequence.

    Where ep is borrowed from tp, torchtitan 0.2.2 deals (batch x sequence) tokens out to tp ranks in flat slices, and
    keeps of the gradient of the layer's input the rank's piece of the *sequence*, as if every rank had it all. With more
    than one sample those are different tokens, and the others' gradients are lost. So the tokens are brought into an
    order in which the flat slice is the piece of the sequence.
    """

    def __init__(self, tp_mesh: DeviceMesh) -> None:
        self._num_pieces = tp_mesh.size()
        self._order: torch.Tensor | None = None  # of the forward in progress: token at each place, int64 (tokens,)
        self._top_k = 1

    def apply(self, moe: MoE) -> None:
        """After torchtitan's styles."""
        self._top_k = moe.router.top_k
        moe.register_forward_pre_hook(self._note_shape)
        moe.reorderer.register_forward_pre_hook(self._by_piece, prepend=True)
        moe.reorderer.register_forward_hook(self._as_they_were)

    def _note_shape(self, moe: nn.Module, inputs: tuple) -> None:
        batch, seq_len, _ = inputs[0].shape
        tokens = torch.arange(batch * seq_len, device=inputs[0].device)
        self._order = tokens.view(batch, self._num_pieces, -1).transpose(0, 1).flatten()

    def _by_piece(self, reorderer: nn.Module, inputs: tuple) -> tuple:
        """(scores, experts), both (tokens, top_k)."""
        return tuple(tensor[self._order] for tensor in inputs)

    def _as_they_were(self, reorderer: nn.Module, inputs: tuple, outputs: tuple) -> tuple:
        """The middle one are places of (token, choice) pairs, int64."""
        scores, places, num_tokens_per_expert = outputs
        places = self._order[places // self._top_k] * self._top_k + places % self._top_k
        return scores, places, num_tokens_per_expert
