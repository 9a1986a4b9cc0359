"""torchtitan's converters of routed experts, `quantize.grouped_mm.float8` and `.mx`, with torchao 0.17.

torchtitan 0.2.2's own import names that torchao 0.17 no longer has. These read the same TOML sections, and serve
experts with GTP and without.
"""

from __future__ import annotations

from torch import nn
from torchtitan.components.quantization import (
    FP8_GROUP_ALIGNMENT_SIZE,
    MXFP8_GROUP_ALIGNMENT_SIZE,
    QuantizationConverter,
)
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.models.moe.utils import set_token_group_alignment_size_m
from torchtitan.tools.logging import logger

from titan_integration.experts import QuantizedGroupedExperts

_SECTION = "quantize.grouped_mm"


def _convert(model: nn.Module, key: str, fqns: list[str] | str, gemms) -> None:
    """Experts below modules whose names contain one of `fqns`, in place.

    Raises:
        ValueError: `fqns` names no routed experts, or some whose features `gemms` cannot serve.
    """
    targets = [target for target in (fqns.split(",") if isinstance(fqns, str) else fqns) if target]
    experts = {name: module for name, module in model.named_modules() if type(module) is GroupedExperts}
    chosen = {name: module for name, module in experts.items() if any(target in name for target in targets)}
    if not chosen:
        found = f"such as {', '.join([*experts][:3])}" if experts else "and this model has none"
        raise ValueError(
            f"[{key}] fqns = {fqns!r} names no routed experts, {found}: use ['experts'], or remove the converter"
        )
    from gtp_dtensor.wire.grouped_linear import use_grouped_gemms

    for name, module in chosen.items():
        use_grouped_gemms(module, gemms, name)
        module.__class__ = QuantizedGroupedExperts
    how = "emulated: quantized, dequantized, and multiplied in high precision" if gemms.emulate else "on the GPU"
    logger.info(
        f"Grouped GEMMs of {len(chosen)} layers of routed experts read {gemms.name} ({how}); weight gradients are in "
        "high precision"
    )


class Float8GroupedMMConverter(QuantizationConverter):
    """Experts whose forward and input gradient read float8, a scale for each row."""

    def __init__(self, job_config, parallel_dims) -> None:
        super().__init__(job_config, parallel_dims)
        self._fqns = job_config.quantize.grouped_mm.float8.fqns
        set_token_group_alignment_size_m(FP8_GROUP_ALIGNMENT_SIZE)

    def convert(self, model: nn.Module) -> None:
        """In place."""
        from gtp_dtensor.wire.grouped_linear import Float8GroupedGEMMs, has_scaled_grouped_mm

        gemms = Float8GroupedGEMMs(emulate=not has_scaled_grouped_mm())
        _convert(model, f"{_SECTION}.float8", self._fqns, gemms)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: the compute shards are made when they are needed."""


class MXGroupedMMConverter(QuantizationConverter):
    """Experts whose forward and input gradient read MXFP8."""

    def __init__(self, job_config, parallel_dims) -> None:
        super().__init__(job_config, parallel_dims)
        section = job_config.quantize.grouped_mm.mx
        if section.recipe_name != "mxfp8":
            raise ValueError(f"[{_SECTION}.mx] recipe_name = {section.recipe_name!r}: choose 'mxfp8'")
        self._fqns = section.fqns
        set_token_group_alignment_size_m(MXFP8_GROUP_ALIGNMENT_SIZE)

    def convert(self, model: nn.Module) -> None:
        """In place."""
        from gtp_dtensor.wire.grouped_linear import MXFloat8GroupedGEMMs

        _convert(model, f"{_SECTION}.mx", self._fqns, MXFloat8GroupedGEMMs())

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: the compute shards are made when they are needed."""
