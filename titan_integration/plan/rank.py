"""One rank of a torchtitan job, built under the fake process group on the meta device, and its step."""

from __future__ import annotations

import copy
import dataclasses
import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.tools import utils as titan_utils

from gtp_dtensor import finalize_grads, set_requires_gradient_sync
from gtp_dtensor.members import model_members, model_runtimes
from gtp_dtensor.weight import ShardedWeight
from titan_integration.dims import GTPParallelDims
from titan_integration.experts import check_experts
from titan_integration.families import Family, families
from titan_integration.float8 import converters_by_us
from titan_integration.gradients import clip_exactly
from titan_integration.parallelize import parallelize
from titan_integration.pipeline import pipeline
from titan_integration.settings import check_gtp_job, gtp_config
from titan_integration.spec import train_spec
from titan_integration.train import with_job_config

from .device import meta_stands_for_gpu
from .record import COMPUTE_SHARDS, GRADIENTS, OPTIMIZER, PARAMETERS, Recorder
from .values import check_readable, check_values

_CONVERTERS = ("quantize.linear.mx", "quantize.grouped_mm.mx")
_NUM_WARM_UP_STEPS = 2  # the schedule is learned in the first, the microbatch's turn in the second


def read_job(toml: str, options: Sequence[str] = ()):
    """torchtitan's JobConfig of a TOML with options (``--gtp.look_ahead=2``) that override it.

    Raises:
        ValueError, NotImplementedError: a wrong value, or a key that a plan does not serve; names it.
    """
    check_readable(toml)
    job_config = ConfigManager().parse_args(with_job_config([f"--job.config_file={toml}", *options]))
    check_values(job_config)
    parallelism = job_config.parallelism
    served = families()
    if job_config.model.name not in served:
        raise ValueError(f"model.name = {job_config.model.name!r}: choose one of {', '.join(served)}")
    flavors = served[job_config.model.name].flavors
    if job_config.model.flavor not in flavors:
        raise ValueError(f"model.flavor = {job_config.model.flavor!r}: choose one of {', '.join(flavors)}")
    unplanned = [name for name in job_config.model.converters if name not in _CONVERTERS]
    refused = [
        (parallelism.context_parallel_degree > 1, "parallelism.context_parallel_degree", "set it to 1"),
        (bool(unplanned), f"model.converters = {unplanned}", f"plan with {' and '.join(_CONVERTERS)}, or in bf16"),
        (job_config.gtp.linear_backend != "torch", "[gtp] linear_backend", "set it to 'torch'"),
        (job_config.optimizer.name == "Muon", "optimizer.name = 'Muon'", "plan with 'AdamW'"),
    ]
    for wrong, key, remedy in refused:
        if wrong:
            raise NotImplementedError(f"{key} is not planned yet: {remedy}")
    return job_config


def with_degrees(job_config, **degrees: int):
    """A copy of ``job_config`` with other degrees: tp, gtp, ep, etp, egtp, pp, dp_replicate; dp_shard takes the
    rest."""
    changed = copy.deepcopy(job_config)
    parallelism, gtp = changed.parallelism, changed.gtp
    keys = {
        "tp": "tensor_parallel_degree",
        "ep": "expert_parallel_degree",
        "etp": "expert_tensor_parallel_degree",
        "pp": "pipeline_parallel_degree",
        "dp_replicate": "data_parallel_replicate_degree",
    }
    for name, key in keys.items():
        if name in degrees:
            setattr(parallelism, key, degrees[name])
    parallelism.data_parallel_shard_degree = -1
    gtp.tensor_parallel_num_weight_shards = parallelism.tensor_parallel_degree * degrees.get("gtp", 1)
    gtp.expert_tensor_parallel_num_weight_shards = parallelism.expert_tensor_parallel_degree * degrees.get("egtp", 1)
    return changed


@dataclass
class Rank:
    """One built rank.

    Attributes:
        job_config: of the job.
        dims: its degrees.
        model_args: of the whole model, as built.
        parts: its model, or its stages of a pipeline.
        schedule: the pipeline's; None without.
        optimizers: of the parts.
        num_flops_per_token: torchtitan's count for the model-flops utilization.
        num_parameters: of the whole model.
    """

    job_config: object
    dims: GTPParallelDims
    model_args: object
    parts: list[nn.Module]
    schedule: object | None
    optimizers: object
    num_flops_per_token: int
    num_parameters: int

    @property
    def tokens_per_microbatch(self) -> int:
        """Of this rank's model replica: shared by tp ranks and pipeline stages."""
        size = self.job_config.training.local_batch_size
        if self.schedule is not None:
            size = self.job_config.parallelism.pipeline_parallel_microbatch_size
        return size * self.job_config.training.seq_len

    def sharded_weights(self) -> list[ShardedWeight]:
        """Of all parts."""
        members = dict.fromkeys(member for part in self.parts for member in model_members(part))
        return [member for member in members if isinstance(member, ShardedWeight)]

    @property
    def is_fused(self) -> bool:
        """Whether the optimizer is one kernel a parameter."""
        return self.job_config.optimizer.implementation == "fused"


def model_args_of(family: Family, job_config, num_layers: int | None = None):
    """The arguments of the model as on a GPU: grouped GEMMs stay, and attention is one fused kernel.

    Args:
        family: of the model.
        job_config: the job.
        num_layers: instead of the flavor's.
    """
    args = copy.deepcopy(family.flavors[job_config.model.flavor])
    if num_layers is not None:
        args.n_layers = num_layers
    moe = getattr(args, "moe_args", None)
    is_grouped = moe is not None and moe.use_grouped_mm
    if getattr(args, "attn_type", "sdpa") != "sdpa":
        args.attn_type, args.attn_mask_type = "sdpa", "causal"
    args.update_from_config(job_config)
    if moe is not None:
        args.moe_args.use_grouped_mm = is_grouped
    return args


def build_rank(job_config, world: int, num_layers: int | None = None) -> Rank:
    """The rank that this process is in :func:`~.device.fake_world`.

    Raises:
        ValueError, NotImplementedError: the job cannot run so; names the key.
    """
    family = families()[job_config.model.name]
    num_experts = family.num_experts(job_config.model.flavor)
    dims = GTPParallelDims.from_job_config(job_config, world, has_experts=num_experts > 0)
    if not dims.gtp_enabled:
        raise ValueError(
            "gtp = egtp = 1: GTP is off, and torchtitan's own job is not planned here; set [gtp] "
            "tensor_parallel_num_weight_shards above parallelism.tensor_parallel_degree"
        )
    check_gtp_job(job_config)
    check_experts(job_config, num_experts)
    gtp_config(job_config)
    spec = train_spec(family)
    args = model_args_of(family, job_config, num_layers)
    with meta_stands_for_gpu():
        dims.build_mesh()
        with torch.device("meta"), titan_utils.set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
            model = spec.model_cls(args)
        with converters_by_us():
            build_model_converters(job_config, dims).convert(model)
        num_parameters, num_flops = args.get_nparams_and_flops(model, job_config.training.seq_len)
        schedule = None
        if dims.pp_enabled:
            loss = build_cross_entropy_loss(job_config)
            built = pipeline(model, dims, job_config, torch.device("meta"), args, spec.parallelize_fn, loss)
            schedule, parts = built[:2]
        else:
            parts = [parallelize(family, model, dims, job_config)]
        for part in parts:
            part.to_empty(device="meta").train()
        section = dataclasses.replace(job_config.optimizer)
        if section.implementation == "fused":  # which is no kernel of the meta device; see RankStep
            section.implementation = "foreach"
        optimizers = spec.build_optimizers_fn(parts, section, dims)
    return Rank(job_config, dims, args, parts, schedule, optimizers, num_flops, num_parameters)


class RankStep:
    """The step of one rank, as the trainer makes it.

    Args:
        rank: that makes it.
        num_microbatches: without a pipeline; with one, the schedule has its own.
    """

    def __init__(self, rank: Rank, num_microbatches: int = 1) -> None:
        self.rank = rank
        self.num_microbatches = num_microbatches
        job = rank.job_config
        self._loss = build_cross_entropy_loss(job)
        size = job.training.local_batch_size
        if rank.schedule is not None:
            size = job.parallelism.pipeline_parallel_microbatch_size
        self._shape = (size, job.training.seq_len)
        self._loss_parallel = rank.dims.tp_enabled and not job.parallelism.disable_loss_parallel

    def record(self) -> Recorder:
        """The events and the memory of a step in the middle of training."""
        for _ in range(_NUM_WARM_UP_STEPS):
            with meta_stands_for_gpu():
                self._passes(None)
                self.rank.optimizers.step()
                self.rank.optimizers.zero_grad()
        gc.collect()
        recorder = Recorder()
        self._name_axes(recorder)
        self._note_what_lies_there(recorder)
        with meta_stands_for_gpu(recorder), recorder:
            self._passes(recorder)
            recorder.memory.move((_local(p.grad) for p in self._parameters() if p.grad is not None), GRADIENTS)
            recorder.mark("optimizer")
            self._optimizer_step(recorder)
            recorder.mark("end")
        self.rank.optimizers.zero_grad()
        return recorder

    def _parameters(self) -> list[nn.Parameter]:
        return [param for part in self.rank.parts for param in part.parameters()]

    def _name_axes(self, recorder: Recorder) -> None:
        for name, mesh in self.rank.dims.get_all_one_dimensional_meshes().items():
            recorder.axes.setdefault(tuple(dist.get_process_group_ranks(mesh.get_group())), name)

    def _note_what_lies_there(self, recorder: Recorder) -> None:
        memory = recorder.memory
        memory.move((_local(param) for param in self._parameters()), PARAMETERS)
        memory.move((buffer for part in self.rank.parts for buffer in part.buffers() if buffer.is_meta), PARAMETERS)
        for optimizer in self.rank.optimizers:
            for state in optimizer.state.values():
                tensors = [_local(value) for value in state.values() if isinstance(value, torch.Tensor)]
                memory.move((tensor for tensor in tensors if tensor.is_meta), OPTIMIZER)
        for weight in self.rank.sharded_weights():
            memory.move(_compute_shards(weight), COMPUTE_SHARDS)

    def _note_kept_back(self, recorder: Recorder | None) -> None:
        """Sums of gradients that wait for the last microbatch."""
        if recorder is not None:
            for runtime in (runtime for part in self.rank.parts for runtime in model_runtimes(part)):
                recorder.memory.move(runtime.reducer.kept_back.values(), GRADIENTS)

    # ---- passes

    def _passes(self, recorder: Recorder | None) -> None:
        if self.rank.schedule is not None:
            self._pipeline(recorder)
            return
        (model,) = self.rank.parts
        for number in range(self.num_microbatches):
            set_requires_gradient_sync(model, number == self.num_microbatches - 1)
            _mark(recorder, f"forward {number}")
            loss = self._forward(model, self._ids(), is_last=True)
            _mark(recorder, f"backward {number}")
            self._backward(loss)
            del loss
            self._note_kept_back(recorder)
        self._finish(recorder)

    def _finish(self, recorder: Recorder | None) -> None:
        _mark(recorder, "finish")
        for part in self.rank.parts:
            finalize_grads(part)
        clip_exactly(self._parameters(), self.rank.job_config.training.max_norm, None)

    def _ids(self) -> torch.Tensor:
        return torch.empty(self._shape, dtype=torch.int64, device="meta")

    def _train_context(self):
        from torchtitan.distributed.utils import get_train_context

        return get_train_context(self._loss_parallel)()

    def _forward(self, part: nn.Module, given: torch.Tensor, is_last: bool) -> torch.Tensor:
        with self._train_context():
            out = part(given)
            return self._loss(out, self._ids()) / 1.0 if is_last else out

    def _backward(self, out: torch.Tensor, grad: torch.Tensor | None = None) -> None:
        with self._train_context():
            out.backward(grad)

    def _pipeline(self, recorder: Recorder | None) -> None:
        """The actions of this rank, in the order of torch's schedule. What comes from other stages is there at once:
        when it really comes, ``pipeline.py`` tells."""
        schedule = self.rank.schedule
        stages = [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages
        by_index = {stage.stage_index: stage for stage in stages}
        for part in self.rank.parts:
            set_requires_gradient_sync(part, False)
        live: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for action in pipeline_actions(schedule)[self.rank.dims.get_mesh("pp").get_local_rank()]:
            stage, key = by_index[action.stage], (action.stage, action.microbatch)
            _mark(recorder, f"{action.kind} {action.stage} {action.microbatch}")
            if action.kind == "forward":
                given = self._ids() if stage.is_first else self._hidden()
                live[key] = given, self._forward(stage.submod, given, stage.is_last)
            else:
                given, out = live.pop(key)
                grad = None if stage.is_last else torch.empty_like(out)
                self._backward(out, grad)
                del given, out, grad
                self._note_kept_back(recorder)
        self._finish(recorder)

    @property
    def _hidden_shape(self) -> tuple[int, int, int]:
        batch, tokens = self._shape
        return batch, tokens // self.rank.dims.tp, self.rank.model_args.dim  # under tp a piece of the sequence

    @property
    def hidden_bytes(self) -> int:
        """That a pipeline's stage gives to the next."""
        return math.prod(self._hidden_shape) * gtp_config(self.rank.job_config).param_dtype.itemsize

    def _hidden(self) -> torch.Tensor:
        dtype = gtp_config(self.rank.job_config).param_dtype
        return torch.empty(self._hidden_shape, dtype=dtype, device="meta", requires_grad=True)

    def _optimizer_step(self, recorder: Recorder) -> None:
        if not self.rank.is_fused:
            self.rank.optimizers.step()
            return
        for optimizer in self.rank.optimizers:
            touched = []
            for param, state in optimizer.state.items():
                if param.grad is not None:
                    tensors = [_local(value) for value in (param, *state.values()) if isinstance(value, torch.Tensor)]
                    touched += [_local(param.grad), *(t for t in tensors if t.is_meta for _ in range(2))]
            recorder.kernel("fused_optimizer", touched)


@dataclass(frozen=True)
class Action:
    """Of a pipeline: "forward" or "backward" of one microbatch by one stage."""

    kind: str
    stage: int
    microbatch: int


def pipeline_actions(schedule) -> dict[int, list[Action]]:
    """What each rank of axis pp does, in order, by torch's own schedule."""
    order = getattr(schedule, "pipeline_order", None) or schedule._get_pipeline_order()
    kinds = {"F": "forward", "B": "backward"}
    actions = {}
    for rank, steps in order.items():
        actions[rank] = []
        for step in steps:
            if step is None:
                continue
            kind = kinds.get(step.computation_type.value)
            if step.computation_type.value in ("I", "W", "OVERLAP_F_B"):
                raise NotImplementedError(
                    f"parallelism.pipeline_parallel_schedule = {type(schedule).__name__!r} splits backwards, which is "
                    "not planned yet; use '1F1B' or 'Interleaved1F1B'"
                )
            if kind is not None:  # others tell a runtime what to move, which these tell already
                # Counted, not read: torch's table of 1F1B numbers the last stage's microbatches from 1.
                number = sum((one.kind, one.stage) == (kind, step.stage_index) for one in actions[rank])
                actions[rank].append(Action(kind, step.stage_index, number))
    return actions


def _mark(recorder: Recorder | None, name: str) -> None:
    if recorder is not None:
        recorder.mark(name)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "_local_tensor", tensor)


def _compute_shards(weight: ShardedWeight) -> list[torch.Tensor]:
    if weight.quantized is not None:
        return [part for parts in weight.quantized.parts.values() for part in parts]
    return [] if weight._copy is None else [weight._copy]
