"""`[gtp] linear_backend = "transformer_engine"`: the linears of a model become TransformerEngine's.

Names of weights stay, so checkpoints of either backend have the same keys but for TE's own `_extra_state`. Each block
computes in a `te.autocast` region of its own: inside activation checkpointing, which re-runs a block outside of any region
around the model.
"""

from __future__ import annotations

import contextlib
import fnmatch
import functools
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch import nn
from torchtitan.tools.logging import logger

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
    parallelism, compilation, checkpoints = job_config.parallelism, job_config.compile, job_config.checkpoint
    checks_activations = job_config.activation_checkpoint.mode != "none"
    key = f"[gtp] linear_backend = {TRANSFORMER_ENGINE!r}"
    refused = [
        (job_config.model.name not in _SERVED_MODELS, f"model.name = {job_config.model.name!r}", "use llama3"),
        (parallelism.tensor_parallel_degree > 1, "parallelism.tensor_parallel_degree > 1", "set it to 1"),
        (compilation.enable and "model" in compilation.components, "compile.components with 'model'", "remove it"),
        (bool(job_config.model.converters), f"model.converters = {job_config.model.converters}", "remove them"),
        (
            section.te_recipe == "delayed" and checks_activations,
            f"te_recipe = 'delayed' and activation_checkpoint.mode = {job_config.activation_checkpoint.mode!r}, whose "
            "recompute would read scales of after the forward,",
            "use recipe 'current' or 'block', or mode 'none'",
        ),
        (
            checkpoints.enable and (checkpoints.last_save_in_hf or checkpoints.initial_load_in_hf),
            "a checkpoint in Hugging Face's format (checkpoint.last_save_in_hf, initial_load_in_hf)",
            "leave these false, and convert with linear_backend = 'torch'",
        ),
    ]
    for wrong, what, remedy in refused:
        if wrong:
            raise NotImplementedError(f"{key} with {what} is not supported yet: {remedy}")
    transformer_engine()


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
    """Makes the linears of `model`, on the meta device and not parallelized yet, TE's: all but the output layer. Returns
    what its blocks run in; None where the backend is another.

    With a recipe in FP8, weights are stored so where they are sharded (`is_sharded`), and travel so.

    Raises:
        ValueError: a linear's features do not fit FP8 GEMMs; names it.
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
    for block in model.layers.values():
        block.te_region = region
        block.__class__ = _in_region(type(block))
    if dist.get_rank() == 0:
        logger.info(f"{num_linears} linears are TransformerEngine's, recipe {job_config.gtp.te_recipe}")
    return region


def _te_linear(te: ModuleType, fqn: str, linear: nn.Linear, recipe: Any, is_sharded: bool) -> nn.Module:
    sizes = linear.in_features, linear.out_features
    if recipe is not None and any(size % _BLOCK for size in sizes):
        raise ValueError(
            f"{fqn}: {sizes[0]} in and {sizes[1]} out features of an FP8 linear have to be multiples of {_BLOCK}: choose "
            "another flavor, or [gtp] te_recipe = 'bf16'"
        )
    stores_fp8 = is_sharded and recipe is not None
    made_in = contextlib.nullcontext()
    if stores_fp8:
        made_in = te.quantized_model_init(enabled=True, recipe=recipe, preserve_high_precision_init_val=True)
    with made_in:
        return te.Linear(
            *sizes, bias=linear.bias is not None, params_dtype=linear.weight.dtype, device=linear.weight.device.type
        )


def finish_region(region: Region | None, model: nn.Module) -> None:
    """After `model` was sharded: the ranks that share its weights are known."""
    if region is not None and region.recipe is not None and region.recipe.delayed():
        from gtp_dtensor.te import amax_group

        region.amax_group = amax_group(model)
