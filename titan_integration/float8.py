"""torchtitan's converters under GTP: ours in their place, and what the float8 one leaves behind for FSDP2."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn
from torchtitan.components.quantization.float8 import Float8LinearConverter
from torchtitan.tools.logging import logger

from titan_integration.mx import MX, GTPMXLinearConverter, check_mx

FLOAT8 = "quantize.linear.float8"
OF_EXPERTS = ("quantize.grouped_mm.float8", "quantize.grouped_mm.mx")


def check_converters(job_config) -> None:
    """Refuses converters that do not exist, or do not work under GTP yet.

    Raises:
        ValueError: torchtitan has no converter of that name, or it cannot serve this job.
        NotImplementedError: it has, and it does not work under GTP.
    """
    from torchtitan.protocols.model_converter import _registry_model_converter_cls

    names = job_config.model.converters
    for name in names:
        if name not in _registry_model_converter_cls:
            raise ValueError(
                f"model.converters: there is no converter {name!r}; choose from "
                f"{', '.join(sorted(_registry_model_converter_cls))}"
            )
        if name.startswith("quantize.") and name not in (FLOAT8, MX, *OF_EXPERTS):
            raise NotImplementedError(
                f"model.converters with {name!r} is not supported together with gtp yet: remove that converter"
            )
        if name in OF_EXPERTS and job_config.compile.enable and "model" in job_config.compile.components:
            raise NotImplementedError(
                f"model.converters with {name!r} and compile.components with 'model' are not supported together with gtp "
                "yet: remove one of them"
            )
    if MX in names:
        check_mx(job_config)


@contextmanager
def converters_by_us() -> Iterator[None]:
    """torchtitan's `Trainer.__init__` looks converters up by name; inside it finds ours under the names of torchtitan's."""
    from torchtitan.protocols import model_converter

    # Experts import the settings, and those import this module.
    from titan_integration.grouped_converters import Float8GroupedMMConverter, MXGroupedMMConverter

    original = model_converter._registry_model_converter_cls
    model_converter._registry_model_converter_cls = original | {
        FLOAT8: GTPFloat8LinearConverter,
        MX: GTPMXLinearConverter,
        **dict(zip(OF_EXPERTS, (Float8GroupedMMConverter, MXGroupedMMConverter))),
    }
    try:
        yield
    finally:
        model_converter._registry_model_converter_cls = original


class GTPFloat8LinearConverter(Float8LinearConverter):
    """torchtitan's, which says where it runs emulated, whose `emulate` holds for recipes too and, under GTP, goes with
    `[compile]`: there the compiler does not see the emulation."""

    def __init__(self, job_config, parallel_dims) -> None:
        emulate, seen = job_config.quantize.linear.float8.emulate, job_config
        if emulate and parallel_dims.gtp_enabled:
            seen = dataclasses.replace(job_config, compile=dataclasses.replace(job_config.compile, enable=False))
        super().__init__(seen, parallel_dims)
        if not emulate:
            return
        self.config = dataclasses.replace(self.config, emulate=True)
        if dist.get_rank() == 0:
            logger.info(
                f"{FLOAT8}.emulate = true: float8 training runs emulated: operands are quantized, and multiplied in high "
                "precision"
            )


def prepare_float8(model: nn.Module, job_config) -> None:
    """To be called before the model is parallelized: weights are plain tensors again; which of them is gathered in float8
    the wire format says."""
    if FLOAT8 not in job_config.model.converters:
        return
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor

    for module in model.modules():
        if not isinstance(module, Float8Linear):
            continue
        weight = module.weight
        if isinstance(weight.data, WeightWithDynamicFloat8CastTensor):
            plain = weight.data._tensor
            module.weight = nn.Parameter(plain.detach(), requires_grad=weight.requires_grad)
        module.config = dataclasses.replace(module.config, enable_fsdp_float8_all_gather=False)
