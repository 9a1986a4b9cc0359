"""What ``te`` has to know of TransformerEngine's modules: which they are, what of them cannot be served, and how TE calls
their parts. Imports nothing of it: who has a module of TE's has imported it."""

from __future__ import annotations

import functools
import sys

import torch.nn as nn

GROUPED, NORM_LINEAR = "GroupedLinear", "LayerNormLinear"
PROTOCOL = ("Linear", NORM_LINEAR, GROUPED)  # classes that ask weights by the protocol
SHARDED = "_is_sharded_te_class"  # attribute of classes of ours, which say that they are in TE's module
STACK = "weight"  # TE's own name for the parameter of all experts


@functools.lru_cache(maxsize=None)
def te_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of TE's that ``cls`` is or derives from."""
    bases = (base for base in cls.__mro__ if SHARDED not in vars(base))
    return next(base for base in bases if base.__module__.startswith("transformer_engine.pytorch."))


def is_grouped(cls: type[nn.Module]) -> bool:
    """Whether ``cls`` is or derives from TE's GroupedLinear."""
    return te_class(cls).__name__ == GROUPED


def uses_protocol(base: type[nn.Module], module: nn.Module) -> bool:
    """Whether the forward of ``base``, the class of ``module`` without GTP, asks its weight by the protocol. Not where it has
    several, which TE would concatenate, and not where a class derived from TE's has a forward of its own."""
    own = te_class(base)
    names = getattr(module, "weight_names", None) or ["weight"]
    return own.__name__ in PROTOCOL and base.forward is own.forward and names == ["weight"]


# ---- what is refused

_SUPPORT = {  # TE's functions that know whether a device has the kernels of a quantizer
    "Float8Quantizer": "is_fp8_available",
    "Float8CurrentScalingQuantizer": "is_fp8_available",
    "Float8BlockQuantizer": "is_fp8_block_scaling_available",
    "MXFP8Quantizer": "is_mxfp8_available",
    "NVFP4Quantizer": "is_nvfp4_available",
}


def _version() -> str:
    return getattr(sys.modules.get("transformer_engine"), "__version__", "of an unknown version")


def _is_set(module: nn.Module, *prefixes: str) -> list[str]:
    return [name for name, value in vars(module).items() if name.startswith(prefixes) and value is True]


def refusal(module: nn.Module) -> str | None:
    """Why ``module``, one of TE's with parameters, cannot be served, with the remedy; None: it can be."""
    name = te_class(type(module)).__name__
    if "transformer_engine.pytorch.distributed_weight" not in sys.modules:
        return f"TransformerEngine is {_version()}, and weights are gathered for it since 2.19: install 2.19 or later"
    if any(base.__module__.startswith("transformer_engine.pytorch.ops.") for base in type(module).__mro__):
        return (
            f"{name} of te.ops reads registered parameters in its backward too, where they are shards: use a "
            "module of transformer_engine.pytorch such as Linear, LayerNormLinear or GroupedLinear, or of torch.nn"
        )
    store = getattr(module, "wgrad_store", None)
    if store is not None and store.delay_wgrad_compute():
        return (
            "delay_wgrad_compute=True computes weight gradients after TE has handed them on, so they would be lost: "
            "build it with delay_wgrad_compute=False"
        )
    for option in ("single_grouped_weight", "single_grouped_bias"):
        if getattr(module, option, False):
            return f"{option}=True packs experts in a tensor of TE's own, which is not sharded: build it with {option}=False"
    overlaps = _is_set(module, "ub_overlap", "ub_bulk")
    if overlaps:
        return f"{overlaps[0]}=True communicates in TE's own buffers, untested under GTP: build it without"
    if getattr(module, "fsdp_group", None) is not None:
        return "it was given to TE's own FSDP, which cuts what GTP cuts: use one of them"
    return _tp_refusal(module, name) or _device_refusal(module)


def _tp_refusal(module: nn.Module, name: str) -> str | None:
    tp_size = getattr(module, "tp_size", 1)
    if tp_size == 1 or getattr(module, "parallel_mode", None) is None and name in PROTOCOL:
        return None
    if getattr(module, "tp_group", None) is None:
        return f"tp_size={tp_size} without a group, so it is not known which ranks hold its other parts: pass tp_group="
    if name not in ("Linear", NORM_LINEAR):
        return f"{name} with tp_size={tp_size}: of TE's classes Linear and LayerNormLinear can be tensor parallel under GTP"
    return None


def _device_refusal(module: nn.Module) -> str | None:
    """Kernels of TE's that a device lacks may do nothing there, and leave weights of whatever was in memory."""
    if not getattr(module, "primary_weights_in_fp8", False):
        return None
    for kind in sorted({type(quantizer).__name__ for quantizer in module.quantizers["scaling_fwd"]} & _SUPPORT.keys()):
        is_available, why = getattr(sys.modules["transformer_engine.pytorch"], _SUPPORT[kind])(return_reason=True)
        if not is_available:
            return (
                f"quantized_model_init made it for TE's {kind}, whose kernels this device does not have ({why}): choose "
                "another recipe, such as Float8CurrentScaling, or another device"
            )
    return None


def refuse(module: nn.Module, what: str) -> None:
    """Raise ``ValueError`` where ``module``, one of TE's that owns ``what``, cannot be served."""
    why = refusal(module)
    if why is not None:
        raise ValueError(f"{what}, of a {type(module).__name__} of TransformerEngine: {why}")


# ---- how TE calls their parts


def init_meta(module: nn.Module, name: str) -> object:
    """What TE knows of how a parameter is made."""
    table = module.param_init_meta
    return table[name] if name in table else table[f"{name}0"]


def fp8_index(module: nn.Module, name: str) -> int | None:
    """The number of the quantizer of a parameter that is stored in FP8, if the module has such parameters."""
    return init_meta(module, name).fp8_meta_index


def weight_quantizers(module: nn.Module) -> list:
    """TE's quantizers of the weights of ``module``, one for each, as they are now."""
    names = [f"weight{i}" for i in range(module.num_gemms)] if is_grouped(type(module)) else ["weight"]
    quantizers = module.quantizers["scaling_fwd"]
    return [quantizers[fp8_index(module, name)] for name in names]
