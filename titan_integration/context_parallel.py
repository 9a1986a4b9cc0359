"""Context parallelism: torchtitan's where the attention has a rule, a short one of our own on CPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

import torch
import torch.distributed._functional_collectives as functional_collectives
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer
from torchtitan.distributed.context_parallel import apply_cp_to_attention_module
from torchtitan.models.attention import ScaledDotProductAttentionWrapper

_DEGREE = "parallelism.context_parallel_degree"
_BALANCER = "parallelism.context_parallel_load_balancer"


def check_context_parallel(job_config, attn_type: str, on_cpu: bool, serves_flex: bool = True) -> None:
    """Refuses context parallelism that would fail in the first step.

    Args:
        job_config: torchtitan's JobConfig.
        attn_type: the attention of the model flavor: "sdpa", "flex" or "varlen".
        on_cpu: whether there is no accelerator.
        serves_flex: whether torchtitan's model takes flex attention with context parallelism: of ours, llama3 only.

    Raises:
        NotImplementedError: the attention has no context-parallel rule here, or none with this load balancer.
        ValueError: a sequence that the axes do not divide.
    """
    parallelism, seq_len = job_config.parallelism, job_config.training.seq_len
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    balancer = parallelism.context_parallel_load_balancer
    if cp == 1:
        return
    served = {"sdpa": ("headtail", None)}
    if serves_flex and not on_cpu:
        served["flex"] = ("headtail", "ptrr", None)
    if attn_type not in served:
        raise NotImplementedError(
            f"{_DEGREE} = {cp} (axis cp) with attention {attn_type!r} of flavor {job_config.model.flavor!r}: it has no "
            f"context-parallel rule {'without an accelerator' if on_cpu else 'in torchtitan for this model'}; use a flavor with attention "
            f"{' or '.join(map(repr, served))}, or set {_DEGREE} to 1 (the same ranks fit "
            f"parallelism.data_parallel_shard_degree x {cp})"
        )
    if balancer not in served[attn_type]:
        raise NotImplementedError(
            f"{_BALANCER} = {balancer!r} with attention {attn_type!r} and {_DEGREE} = {cp} (axis cp) is not served; use "
            f"{' or '.join(map(repr, served[attn_type]))}"
        )
    # Each rank takes a piece of the head and one of the tail; tensor parallelism then shards what the rank has.
    divisor = tp * cp * (1 if balancer is None else 2)
    if seq_len % divisor:
        lower = seq_len // divisor * divisor
        raise ValueError(
            f"training.seq_len = {seq_len} is not divisible by {divisor}, which axis cp of size {cp} (load balancer "
            f"{balancer!r}) and axis tp of size {tp} need; use {f'{lower} or ' if lower else ''}{lower + divisor}"
        )


class GatherKVAttention(nn.Module):
    """Causal attention of this rank's queries on the keys and values of the whole sequence.

    torch's context parallelism knows only CUDA's attention kernels. Inputs are (batch, heads, this rank's positions,
    head dim); keys and values, whose number of heads may be smaller, are gathered over the axis, and their gradients
    are reduce-scattered. The head dim of the values may be another than that of queries and keys.

    Attributes:
        _mesh: the 1-D mesh `cp`.
        _balanced: whether the sequence lies in torch's head-and-tail order, as torchtitan's load balancer cuts it.
    """

    _mesh: DeviceMesh
    _balanced: bool

    @classmethod
    def take_over(cls, attention: nn.Module, cp_mesh: DeviceMesh, balanced: bool) -> None:
        """Makes one of `attention`, torchtitan's, in place: tensor parallelism may have put hooks on it."""
        if type(attention) is not ScaledDotProductAttentionWrapper:
            raise TypeError(f"no context parallelism on CPUs for attention by {type(attention).__name__}")
        attention.__class__ = cls
        attention._mesh, attention._balanced = cp_mesh, balanced

    def _positions(self, num_local: int) -> torch.Tensor:
        """Positions in the sequence, int64 of shape (ranks, num_local): row r is what rank r holds."""
        num_ranks = self._mesh.size()
        order = torch.arange(num_ranks * num_local)
        if self._balanced:
            order = _HeadTailLoadBalancer(num_ranks * num_local, num_ranks, "cpu")._generate_indices()[0].long()
        return order.view(num_ranks, num_local)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
    ) -> torch.Tensor:
        """Attention output of the shape of `q`."""
        both = functional_collectives.all_gather_tensor_autograd(torch.cat((k, v), -1), 2, self._mesh.get_group())
        k, v = functional_collectives.wait_tensor(both).split((k.shape[-1], v.shape[-1]), -1)
        mask = None
        if is_causal:
            positions = self._positions(q.shape[2])
            mask = positions[self._mesh.get_local_rank()][:, None] >= positions.flatten()[None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)


def apply_context_parallel(
    attention_modules: Sequence[nn.Module], cp_mesh: DeviceMesh, attn_type: str, job_config, on_cpu: bool
) -> None:
    """Makes the attention of every block work on a sequence that is cut over `cp_mesh`."""
    if not on_cpu:
        apply_cp_to_attention_module(attention_modules, cp_mesh, attn_type)
        return
    balanced = job_config.parallelism.context_parallel_load_balancer is not None
    for attention in attention_modules:
        GatherKVAttention.take_over(attention, cp_mesh, balanced)


@contextmanager
def titan_context_parallel_on_cpu(infra: ModuleType, job_config) -> Iterator[None]:
    """While it is open, torchtitan's parallelize function in module `infra` applies our CPU rule in place of torch's."""
    original = infra.apply_cp_to_attention_module

    def apply(attention_modules: Sequence[nn.Module], cp_mesh: DeviceMesh, attention_type: str) -> None:
        apply_context_parallel(attention_modules, cp_mesh, attention_type, job_config, on_cpu=True)

    infra.apply_cp_to_attention_module = apply
    try:
        yield
    finally:
        infra.apply_cp_to_attention_module = original
