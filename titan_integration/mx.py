"""torchtitan's MX converter over torchao 0.17, whose MX linear has no module and no configuration of its own.

torchtitan 0.2.2's asks for names that torchao gave up in 0.17, and for a device with these GEMMs. This one reads the same
section of the TOML, works with GTP and without, and emulates where the device lacks the GEMMs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch.distributed as dist
from torch import nn
from torchtitan.components.quantization import MXFP8_GROUP_ALIGNMENT_SIZE, QuantizationConverter
from torchtitan.components.quantization.utils import module_filter_fn
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import has_cuda_capability, has_rocm_capability

MX = "quantize.linear.mx"


@dataclass(frozen=True)
class _Recipe:
    """What a name means.

    Attributes:
        mode: how scales are chosen, by torchao's names.
        emulate: whatever the device is.
        wgrad_with_hp: the weight gradient's GEMM reads high precision.
    """

    mode: str
    emulate: bool = False
    wgrad_with_hp: bool = False


# The first three are torchao's names up to 0.16, which torchtitan documents; the others those of 0.17.
_RECIPES = {
    "mxfp8_cublas": _Recipe("floor"),
    "mxfp8_cublas_rceil": _Recipe("rceil"),
    "mxfp8_emulated": _Recipe("floor", emulate=True),
    "mxfp8_rceil": _Recipe("rceil"),
    "mxfp8_rceil_wgrad_with_hp": _Recipe("rceil", wgrad_with_hp=True),
    "mxfp8_emulated_rceil": _Recipe("rceil", emulate=True),
}


def _recipe(name: str) -> _Recipe:
    if name not in _RECIPES:
        raise ValueError(f"{MX}.recipe_name = {name!r}: choose one of {', '.join(_RECIPES)}")
    return _RECIPES[name]


def check_mx(job_config) -> None:
    """Refuses what the MX converter cannot do in this job.

    Raises:
        ValueError: an unknown recipe, or numbers of tokens that its blocks do not divide; names what would work.
    """
    section, parallelism, training = job_config.quantize.linear.mx, job_config.parallelism, job_config.training
    if _recipe(section.recipe_name).wgrad_with_hp:
        return
    cp = parallelism.context_parallel_degree
    key = "training.local_batch_size"
    num_samples = training.local_batch_size
    if parallelism.pipeline_parallel_degree > 1:
        key, num_samples = (
            "parallelism.pipeline_parallel_microbatch_size",
            parallelism.pipeline_parallel_microbatch_size,
        )
    block = MXFP8_GROUP_ALIGNMENT_SIZE
    if num_samples * training.seq_len // cp % block:
        raise ValueError(
            f"{key} = {num_samples} x training.seq_len = {training.seq_len} / context_parallel_degree = {cp} tokens are not a "
            f"multiple of {block}, along which the weight gradient's GEMM of {MX}.recipe_name = {section.recipe_name!r} has "
            "blocks: choose sizes that are, or recipe 'mxfp8_rceil_wgrad_with_hp'"
        )


class GTPMXLinearConverter(QuantizationConverter):
    """Makes the linears of a model MXLinears of `gtp_dtensor`: all but those that `filter_fqns` names and, as torchtitan
    documents, those with features that are no multiple of 16."""

    def __init__(self, job_config, parallel_dims) -> None:
        super().__init__(job_config, parallel_dims)
        check_mx(job_config)
        from torchao.prototype.mx_formats.config import MXFP8Dim1CastKernelChoice, ScaleCalculationMode

        section = job_config.quantize.linear.mx
        recipe = _recipe(section.recipe_name)
        self._filter_fqns = section.filter_fqns
        has_gemms = has_cuda_capability(10, 0) or has_rocm_capability(9, 5)
        self._options = {
            "mode": ScaleCalculationMode(recipe.mode),
            "emulate": recipe.emulate or not has_gemms,
            "wgrad_with_hp": recipe.wgrad_with_hp,
            "dim1_cast": MXFP8Dim1CastKernelChoice(section.mxfp8_dim1_cast_kernel_choice),
        }
        if dist.get_rank() == 0:
            how = "on MXFP8 GEMMs"
            if self._options["emulate"]:
                why = "as the recipe says" if recipe.emulate else "this device has no MXFP8 GEMMs"
                how = f"emulated ({why}): operands are quantized, and multiplied in high precision"
            logger.info(f"MX training with recipe {section.recipe_name} runs {how}")

    def convert(self, model: nn.Module) -> None:
        """Converts `model` in place. Raises ValueError for a linear whose features blocks do not divide."""
        from gtp_dtensor.wire.mx_linear import convert_to_mx_training

        chosen = partial(module_filter_fn, filter_fqns=self._filter_fqns)
        try:
            convert_to_mx_training(model, module_filter_fn=chosen, **self._options)
        except ValueError as error:
            raise ValueError(f"{error} ({MX}.filter_fqns = {self._filter_fqns})") from error

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: weights are quantized when they are used next."""
