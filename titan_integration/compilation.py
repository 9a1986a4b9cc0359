"""`[compile]` under GTP: torchtitan's own function compiles each transformer block; see gtp_dtensor/compiled.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

_COMPONENTS = ("model", "loss")
_BACKENDS = ("inductor", "aot_eager", "eager")
_SPLIT_BACKWARDS = ("interleavedzerobubble", "zbvzerobubble", "dualpipev")  # schedules by torch's names, any case


def compiles_model(job_config) -> bool:
    """Whether `[compile]` is on for the model."""
    return job_config.compile.enable and "model" in job_config.compile.components


def check_compile(job_config) -> None:
    """Refuses what `[compile]` cannot do under GTP, or would ignore.

    Raises:
        ValueError: a component that does not exist.
        NotImplementedError: a backend or a pipeline schedule that does not work; names what does.
    """
    section, parallelism = job_config.compile, job_config.parallelism
    if not section.enable:
        return
    unknown = [name for name in section.components if name not in _COMPONENTS]
    if unknown or not section.components:
        raise ValueError(
            f"compile.components = {section.components} with compile.enable = true: torchtitan compiles nothing for "
            f"{unknown or 'an empty list'}; name one or both of {', '.join(_COMPONENTS)}, or set compile.enable to false"
        )
    if not compiles_model(job_config):
        return
    if section.backend not in _BACKENDS:
        raise NotImplementedError(
            f"compile.backend = {section.backend!r} is not supported together with gtp; use one of {', '.join(_BACKENDS)}"
        )
    if parallelism.pipeline_parallel_degree == 1:
        return
    if parallelism.pipeline_parallel_schedule_csv:
        raise NotImplementedError(
            "parallelism.pipeline_parallel_schedule_csv with compile.enable = true is not supported together with gtp: "
            "a compiled backward cannot be split, and a schedule from a file may do so; name '1F1B' or 'Interleaved1F1B' "
            "as parallelism.pipeline_parallel_schedule, or compile the loss only (compile.components)"
        )
    if parallelism.pipeline_parallel_schedule.lower() in _SPLIT_BACKWARDS:
        raise NotImplementedError(
            f"parallelism.pipeline_parallel_schedule = {parallelism.pipeline_parallel_schedule!r} with compile.enable = "
            "true: it splits backwards, which compiled code cannot; use '1F1B' or 'Interleaved1F1B', or compile the loss "
            "only (compile.components)"
        )


def is_by_operator(ac_config) -> bool:
    """Whether activation checkpointing chooses single operators."""
    return ac_config.mode == "selective" and ac_config.selective_ac_option == "op"


def checkpoint_by_operator(model: nn.Module, ac_config, saved: Collection) -> None:
    """torchtitan's selective checkpointing by operator for blocks that will be compiled: there a sharded linear is one
    operator of ours, which its own policy does not know. As there, every second linear is saved, and every operator in
    `saved`.

    Of a block with experts torchtitan compiles the parts, and the policy meets what their compiled code calls. The output
    of a linear is no tensor of the program there: inductor overwrites it in place once it is used. So it is not saved.

    Raises:
        ValueError: per_op_sac_force_recompute_mm_shapes_by_fqns names what is no linear.
    """
    for name, block in model.layers.named_children():
        recomputed = _shapes(block, f"layers.{name}", ac_config.per_op_sac_force_recompute_mm_shapes_by_fqns)
        wrapped = checkpoint_wrapper(
            block,
            context_fn=_contexts(saved, recomputed, saves_linears=not getattr(block, "moe_enabled", False)),
            preserve_rng_state=ac_config.preserve_rng_state,
            determinism_check=ac_config.determinism_check,
            early_stop=ac_config.early_stop,
            debug=ac_config.debug,
        )
        model.layers.register_module(name, wrapped)


def _shapes(block: nn.Module, prefix: str, patterns: list[str]) -> set[torch.Size]:
    """(out, in), of a tensor-parallel rank, of the linears whose names contain one of `patterns`."""
    shapes = set()
    for name, module in block.named_modules():
        if any(pattern in f"{prefix}.{name}" for pattern in patterns):
            if not isinstance(module, nn.Linear):
                raise ValueError(
                    f"activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns: {prefix}.{name} is a "
                    f"{type(module).__name__}; name linears"
                )
            weight = module.weight
            shapes.add(weight.to_local().shape if isinstance(weight, DTensor) else weight.shape)
    return shapes


def _contexts(saved: Collection, recomputed: set[torch.Size], saves_linears: bool) -> Callable:
    linears = {torch.ops.gtp.linear.default: 2, torch.ops.aten.mm.default: 1}  # which argument has the weight's shape

    def contexts() -> tuple:
        num_linears = Counter()  # by whether they are recomputed

        def policy(context, function, *args, **kwargs) -> CheckpointPolicy:
            # A copy to the host (numbers of tokens) is never made twice: it stops the host.
            is_read = function == torch.ops.aten._to_copy.default and str(kwargs.get("device")) == "cpu"
            if is_read and args[0].device.type != "cpu":
                return CheckpointPolicy.MUST_SAVE
            if function == torch.ops.gtp.linear.default and not saves_linears:
                return CheckpointPolicy.PREFER_RECOMPUTE
            keeps = function in saved
            if function in linears:
                shape = args[linears[function]].shape
                if (shape if function == torch.ops.gtp.linear.default else shape[::-1]) in recomputed:
                    return CheckpointPolicy.PREFER_RECOMPUTE
                num_linears[context.is_recompute] += 1
                keeps = num_linears[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts


class _Waited(torch.autograd.Function):
    """A tensor that a collective brings, complete: the same memory, with its gradient's way back."""

    @staticmethod
    def forward(ctx, x: AsyncCollectiveTensor) -> torch.Tensor:
        complete = x.trigger_wait()
        return complete.view_as(complete)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return grad


def wait_before_blocks(model: nn.Module) -> None:
    """Let no `AsyncCollectiveTensor` enter compiled blocks: torch 2.13 takes the tensor inside for it, and its gradient then
    passes by the operators that made it. Under tensor parallelism the embedding gives one."""

    def wait(module: nn.Module, args: tuple, output: torch.Tensor) -> torch.Tensor:
        return _Waited.apply(output) if isinstance(output, AsyncCollectiveTensor) else output

    if model.tok_embeddings is not None:  # of a pipeline the first stage has it
        model.tok_embeddings.register_forward_hook(wait)
