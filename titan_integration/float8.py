"""torchtitan's float8 converter under GTP: what it leaves behind for FSDP2, and what it forgets."""

from __future__ import annotations

import dataclasses

from torch import nn

FLOAT8 = "quantize.linear.float8"
_OF_EXPERTS = ("quantize.grouped_mm.float8", "quantize.grouped_mm.mx")


def check_converters(job_config) -> None:
    """Refuses converters that do not exist, or do not work under GTP yet.

    Raises:
        ValueError: torchtitan has no converter of that name.
        NotImplementedError: it has, and it does not work under GTP, or not together with another key.
    """
    from torchtitan.protocols.model_converter import _registry_model_converter_cls

    names = job_config.model.converters
    for name in names:
        if name not in _registry_model_converter_cls:
            raise ValueError(
                f"model.converters: there is no converter {name!r}; choose from "
                f"{', '.join(sorted(_registry_model_converter_cls))}"
            )
        if name.startswith("quantize.") and name not in (FLOAT8, *_OF_EXPERTS):
            raise NotImplementedError(
                f"model.converters with {name!r} is not supported together with gtp yet: remove that converter"
            )
    compiles = job_config.compile.enable and "model" in job_config.compile.components
    for name in (FLOAT8, *_OF_EXPERTS):
        if name in names and compiles:
            raise NotImplementedError(
                f"model.converters with {name!r} and compile.components with 'model' are not supported together with "
                "gtp yet: remove one of them"
            )


def prepare_float8(model: nn.Module, job_config) -> None:
    """To be called before the model is parallelized: weights are plain tensors again (which of them is gathered in float8
    the wire format says), and `emulate` holds for recipes too."""
    if FLOAT8 not in job_config.model.converters:
        return
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    emulate = job_config.quantize.linear.float8.emulate
    for module in model.modules():
        if not isinstance(module, Float8Linear):
            continue
        weight = module.weight
        if isinstance(weight.data, WeightWithDynamicFloat8CastTensor):
            plain = weight.data._tensor
            module.weight = nn.Parameter(plain.detach(), requires_grad=weight.requires_grad)
        config = dataclasses.replace(module.config, enable_fsdp_float8_all_gather=False, emulate=emulate)
        module.config = config
        module.linear_mm_config = type(module.linear_mm_config)(
            *(gemm._replace(emulate=emulate) for gemm in module.linear_mm_config)
        )
