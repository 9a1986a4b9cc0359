"""`[gtp] linear_backend = "transformer_engine"`: the linears of a model become TransformerEngine's.

Names of weights stay, and only delayed scaling has state of its own: checkpoints of either backend load with the other.

Each block computes in a `te.autocast` region of its own: inside activation checkpointing, which re-runs a block outside of
any region around the model. Delayed scaling has one region around the whole model besides: scales move on where the
outermost region ends.

Tensor parallelism is torchtitan's: a linear that it has cut hands its part of the weight to TE's, and the hooks that bring
inputs and outputs into place. TE's own sequence parallelism would cut the first dim, and torchtitan cuts the second.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard
from torchtitan.tools.logging import logger

from titan_integration.settings import degrees

TORCH, TRANSFORMER_ENGINE = BACKENDS = ("torch", "transformer_engine")
RECIPES = ("bf16", "delayed", "current", "block")
_SERVED_MODELS = ("llama3",)
_OUTPUT = "output"  # as torchtitan's converters are told to leave it out: logits want high precision
_BLOCK = 16  # features that an FP8 GEMM counts in


def transformer_engine() -> ModuleType:
    """The library.

    Raises:
        ImportError: it is missing, or older than 2.19; names what is there.
    """
    found = "none"
    try:
        import transformer_engine
        import transformer_engine.pytorch as te

        found = getattr(transformer_engine, "__version__", "an unknown version")
        import transformer_engine.pytorch.distributed_weight  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"[gtp] linear_backend = {TRANSFORMER_ENGINE!r} needs TransformerEngine 2.19 or later, found {found} ({error}): "
            f"install it, or set linear_backend = {TORCH!r}"
        ) from error
    return te


def uses_transformer_engine(job_config) -> bool:
    """Whether the job's linears are TransformerEngine's."""
    return job_config.gtp.linear_backend == TRANSFORMER_ENGINE


def check_linear_backend(job_config) -> None:
    """Refuses what the linear backend cannot do in this job.

    Raises:
        ValueError: a backend or recipe that does not exist, or keys that contradict each other.
        NotImplementedError: a combination that does not work yet.
        ImportError: TransformerEngine is missing or too old.
    """
    section = job_config.gtp
    if section.linear_backend not in BACKENDS:
        raise ValueError(f"[gtp] linear_backend = {section.linear_backend!r}: choose one of {', '.join(BACKENDS)}")
    if section.te_recipe not in RECIPES:
        raise ValueError(f"[gtp] te_recipe = {section.te_recipe!r}: choose one of {', '.join(RECIPES)}")
    if not uses_transformer_engine(job_config):
        if section.te_recipe != "bf16":
            raise ValueError(
                f"[gtp] te_recipe = {section.te_recipe!r} has no meaning with linear_backend = {section.linear_backend!r}: set "
                f"linear_backend = {TRANSFORMER_ENGINE!r}"
            )
        return
    parallelism, compilation = job_config.parallelism, job_config.compile
    is_sharded, is_delayed = degrees(job_config).gtp_enabled, section.te_recipe == "delayed"
    key, mode = f"[gtp] linear_backend = {TRANSFORMER_ENGINE!r}", job_config.activation_checkpoint.mode
    refused = [
        (job_config.model.name not in _SERVED_MODELS, f"model.name = {job_config.model.name!r}", "use llama3"),
        (
            parallelism.tensor_parallel_degree > 1 and not is_sharded,
            "parallelism.tensor_parallel_degree > 1 and GTP off",
            "set [gtp] tensor_parallel_num_weight_shards to a multiple of it, or tensor_parallel_degree to 1",
        ),
        (compilation.enable and "model" in compilation.components, "compile.components with 'model'", "remove it"),
        (bool(job_config.model.converters), f"model.converters = {job_config.model.converters}", "remove them"),
        (
            is_delayed and (mode not in ("none", "full") or mode == "full" and not is_sharded),
            f"te_recipe = 'delayed' and activation_checkpoint.mode = {mode!r}{'' if is_sharded else ' and GTP off'}, whose "
            "recompute would read scales of after the forward,",
            f"use recipe 'current' or 'block', or mode {'none'!r}{' or ' + repr('full') if is_sharded else ''}",
        ),
    ]
    for wrong, what, remedy in refused:
        if wrong:
            raise NotImplementedError(f"{key} with {what} is not supported yet: {remedy}")
    _check_device(transformer_engine(), section.te_recipe)


def _check_device(te: ModuleType, recipe: str) -> None:
    """Whether this GPU has the GEMMs of a recipe: TE itself asks in the first forward."""
    asked = {"delayed": "is_fp8_available", "current": "is_fp8_available", "block": "is_fp8_block_scaling_available"}
    if recipe not in asked:
        return
    is_available, reason = getattr(te, asked[recipe])(return_reason=True)
    if not is_available:
        raise ValueError(
            f"[gtp] te_recipe = {recipe!r}: TransformerEngine cannot compute so here ({reason}): use 'bf16'"
        )


def _recipe(name: str) -> Any:
    """TE's recipe of that name; None for "bf16"."""
    if name == "bf16":
        return None
    from transformer_engine.common import recipe

    return {
        "delayed": recipe.DelayedScaling,
        "current": recipe.Float8CurrentScaling,
        "block": recipe.Float8BlockScaling,
    }[name]()


class Region:
    """What a block's forward runs in.

    Attributes:
        recipe: TE's; None: high precision.
        amax_group: over which TE reduces largest values for delayed scaling.
    """

    def __init__(self, recipe: Any) -> None:
        self.recipe = recipe
        self.amax_group: dist.ProcessGroup | None = None

    @property
    def is_delayed(self) -> bool:
        """Whether scales come from values seen before."""
        return self.recipe is not None and self.recipe.delayed()

    def __call__(self) -> contextlib.AbstractContextManager:
        if self.recipe is None:
            return contextlib.nullcontext()
        te = transformer_engine()
        return te.autocast(enabled=True, recipe=self.recipe, amax_reduction_group=self.amax_group)


@functools.lru_cache(maxsize=None)
def _in_region(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, *args, **kwargs):
        with self.te_region():
            return cls.forward(self, *args, **kwargs)

    return type(cls.__name__, (cls,), {"forward": forward, "__module__": cls.__module__})


def use_te_linears(model: nn.Module, job_config, *, is_sharded: bool) -> Region | None:
    """Makes the linears of `model`, on the meta device, TE's: all but the output layer. Returns what its blocks run in; None
    where the backend is another.

    With a recipe in FP8, weights are stored so where they are sharded (`is_sharded`), and travel so. Linears may have been
    cut by torch's tensor parallelism, and nothing else may have been done to the model.

    Raises:
        ValueError: a linear's features do not fit FP8 GEMMs; names it.
        NotImplementedError: a linear that is cut has a bias; names it.
    """
    if not uses_transformer_engine(job_config):
        return None
    te, recipe = transformer_engine(), _recipe(job_config.gtp.te_recipe)
    region, num_linears = Region(recipe), 0
    for name, parent in list(model.named_modules()):
        for child, linear in list(parent.named_children()):
            fqn = f"{name}.{child}" if name else child
            if type(linear) is not nn.Linear or fnmatch.fnmatchcase(fqn, _OUTPUT):
                continue
            setattr(parent, child, _te_linear(te, fqn, linear, recipe, is_sharded))
            num_linears += 1
    if not is_sharded:
        from gtp_dtensor.te import plain_extra_state

        plain_extra_state(model)  # so that checkpoints go both ways, and hold no pickle of TE's
    for part in (*model.layers.values(), *([model] if region.is_delayed else [])):
        part.te_region = region
        part.__class__ = _in_region(type(part))
    if dist.get_rank() == 0:
        logger.info(f"{num_linears} linears are TransformerEngine's, recipe {job_config.gtp.te_recipe}")
    return region


@functools.lru_cache(maxsize=None)
def _stateless(cls: type[nn.Module]) -> type[nn.Module]:
    """A class of TE's without the empty `_extra_state` in state dicts."""
    methods = {name: getattr(nn.Module, name) for name in ("get_extra_state", "set_extra_state")}
    return type(cls.__name__, (cls,), {**methods, "__module__": __name__})


def _te_linear(te: ModuleType, fqn: str, linear: nn.Linear, recipe: Any, is_sharded: bool) -> nn.Module:
    weight = linear.weight
    local_sizes = tuple(weight.to_local().shape if isinstance(weight, DTensor) else weight.shape)
    if recipe is not None and any(size % _BLOCK for size in local_sizes):
        raise ValueError(
            f"{fqn}: {local_sizes[1]} in and {local_sizes[0]} out features of an FP8 linear have to be multiples of "
            f"{_BLOCK}{' on each tp rank' if isinstance(weight, DTensor) else ''}: choose another flavor, or [gtp] te_recipe "
            "= 'bf16'"
        )
    stores_fp8 = is_sharded and recipe is not None
    made_in = contextlib.nullcontext()
    if stores_fp8:
        made_in = te.quantized_model_init(enabled=True, recipe=recipe, preserve_high_precision_init_val=True)
    cls = te.Linear if recipe is not None and recipe.delayed() else _stateless(te.Linear)
    with made_in:
        new = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            params_dtype=weight.dtype,
            device=weight.device.type,
        )
    if isinstance(weight, DTensor):
        _take_over(new, fqn, linear)
    return new


def _take_over(new: nn.Module, fqn: str, linear: nn.Linear) -> None:
    """Gives `new` the part of the weight that tensor parallelism has made of `linear`'s, and the hooks that bring DTensors
    to it and from it into place; between them it works on this rank's parts."""
    if linear.bias is not None:
        raise NotImplementedError(f"{fqn}: a linear of TransformerEngine that tensor parallelism cuts has no bias")
    mesh, (placement,) = linear.weight.device_mesh, linear.weight.placements
    cuts_outputs = placement == Shard(0)
    new.weight = linear.weight
    new._forward_pre_hooks.update(linear._forward_pre_hooks)
    # Of an input that all ranks have, each computes the gradient through its own outputs.
    new.register_forward_pre_hook(functools.partial(_to_local, [Partial()] if cuts_outputs else None))
    new.register_forward_hook(functools.partial(_from_local, mesh, Shard(-1) if cuts_outputs else Partial()))
    new._forward_hooks.update(linear._forward_hooks)


def _to_local(grads: list[Placement] | None, module: nn.Module, args: tuple[DTensor, ...]) -> tuple[torch.Tensor, ...]:
    return (args[0].to_local(grad_placements=grads), *args[1:])


def _from_local(
    mesh: DeviceMesh, placement: Placement, module: nn.Module, args: tuple, output: torch.Tensor
) -> DTensor:
    return DTensor.from_local(output, mesh, [placement], run_check=False)


# ---- activation checkpointing


def checkpoint_blocks(model: nn.Module) -> None:
    """Full activation checkpointing by TE's function, whose recompute has the scales of the forward; torch's has not."""
    for name, block in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(block, checkpoint_fn=_checkpoint))
    logger.info("Applied full activation checkpointing to the model, by TransformerEngine")


def _checkpoint(block: nn.Module, *args, **kwargs) -> torch.Tensor:
    te = transformer_engine()
    # The recompute is in such a region as this call. In one that computes in FP8, scales would move on at its end; blocks
    # have one of their own.
    with te.autocast(enabled=False):
        return te.checkpoint(block, *args, use_reentrant=False, **kwargs)


def finish_region(region: Region | None, model: nn.Module) -> None:
    """After `model` was sharded: the ranks that share its weights are known."""
    if region is not None and region.is_delayed:
        from gtp_dtensor.te import amax_group

        region.amax_group = amax_group(model)
