"""What ``te`` has to know of TransformerEngine's modules: which they are, what of them cannot be served, and how TE calls
their parts. Imports nothing of it: who has a module of TE's has imported it."""

from __future__ import annotations

import functools
import sys

import torch
import torch.nn as nn

GROUPED, NORM_LINEAR = "GroupedLinear", "LayerNormLinear"
PROTOCOL = ("Linear", NORM_LINEAR, GROUPED)  # classes that ask weights by the protocol
SHARDED = "_is_sharded_te_class"  # attribute of classes of ours, which say that they are in TE's module
EXPERT_MESH = "_gtp_expert_mesh"  # attribute of modules whose experts are those of this rank; see te_experts.py
STACK = "weight"  # TE's own name for the parameter of all experts


@functools.lru_cache(maxsize=None)
def te_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of TE's that ``cls`` is or derives from."""
    bases = (base for base in cls.__mro__ if SHARDED not in vars(base))
    return next(base for base in bases if base.__module__.startswith("transformer_engine.pytorch."))


def is_grouped(cls: type[nn.Module]) -> bool:
    """Whether ``cls`` is or derives from TE's GroupedLinear."""
    return te_class(cls).__name__ == GROUPED


@functools.lru_cache(maxsize=None)
def is_op(cls: type[nn.Module]) -> bool:
    """Whether ``cls`` is or derives from a class of te.ops."""
    return any(base.__module__.startswith("transformer_engine.pytorch.ops.") for base in cls.__mro__)


def num_experts(module: nn.Module) -> int:
    """Of a GroupedLinear."""
    return module.num_groups if is_op(type(module)) else module.num_gemms


def uses_protocol(base: type[nn.Module], module: nn.Module) -> bool:
    """Whether the forward of ``base``, the class of ``module`` without GTP, asks its weight by the protocol. Not where it has
    several, which TE would concatenate, and not where a class derived from TE's has a forward of its own."""
    own = te_class(base)
    names = getattr(module, "weight_names", None) or ["weight"]
    methods = ("forward", "fuser_forward", "fuser_backward") if is_op(base) else ("forward",)
    is_own = all(getattr(base, method) is getattr(own, method) for method in methods)
    return own.__name__ in PROTOCOL and is_own and names == ["weight"]


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
    if is_op(type(module)) and (name != GROUPED or not uses_protocol(type(module), module)):
        return (
            f"{name} of te.ops reads registered parameters in its backward too, where they are shards: use te.ops.GroupedLinear "
            "itself, a module of transformer_engine.pytorch such as Linear, LayerNormLinear or GroupedLinear, or of torch.nn"
        )
    if getattr(module, "_accumulate_into_main_grad", False):
        return (
            "accumulate_into_main_grad=True adds to a buffer of the user's, and GTP reduces the gradient: build it with "
            "accumulate_into_main_grad=False"
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
    if name not in PROTOCOL:
        return f"{name} with tp_size={tp_size}: of TE's classes {', '.join(PROTOCOL)} can be tensor parallel under GTP"
    return None


def _device_refusal(module: nn.Module) -> str | None:
    """Kernels of TE's that a device lacks may do nothing there, and leave weights of whatever was in memory."""
    if not has_fp8_parameters(module):
        return None
    has_protocol = te_class(type(module)).__name__ in PROTOCOL
    quantizers = weight_quantizers(module) if has_protocol else module.quantizers["scaling_fwd"]
    for kind in sorted({type(quantizer).__name__ for quantizer in quantizers} & _SUPPORT.keys()):
        is_available, why = getattr(sys.modules["transformer_engine.pytorch"], _SUPPORT[kind])(return_reason=True)
        if not is_available:
            return (
                f"quantized_model_init made it for TE's {kind}, whose kernels this device does not have ({why}): choose "
                "another recipe, such as Float8CurrentScaling, or another device"
            )
    return None


def _expert_refusal(module: nn.Module, is_expert: bool) -> str | None:
    """Of experts that are not the same on all ranks, as far as that can be seen."""
    is_declared = EXPERT_MESH in module.__dict__
    if is_declared and not is_expert:
        return "TEExpertParallel was applied to it: give it a GTPStyle(is_expert=True) of its own, before this one"
    if not is_declared and any(
        getattr(param, "allreduce", True) is False for param in module.parameters(recurse=False)
    ):
        return (
            "its parameters have allreduce=False, which says that other ranks have other experts under the same names: apply "
            "TEExpertParallel (gtp_dtensor.te_experts) on the expert-parallel axis before GTPStyle(is_expert=True)"
        )
    return None


def refuse(module: nn.Module, what: str, is_expert: bool) -> None:
    """Raise ``ValueError`` where ``module``, one of TE's that owns ``what``, cannot be served by a style (of experts)."""
    why = refusal(module) or _expert_refusal(module, is_expert)
    if why is not None:
        raise ValueError(f"{what}, of a {type(module).__name__} of TransformerEngine: {why}")


# ---- how TE calls their parts


def stack_experts(module: nn.Module, state_dict: dict, prefix: str) -> None:
    """One stack, where ``state_dict`` has the experts of a GroupedLinear by themselves."""
    names = [f"{prefix}weight{index}" for index in range(num_experts(module))]
    if prefix + STACK not in state_dict and all(name in state_dict for name in names):
        state_dict[prefix + STACK] = torch.stack([state_dict.pop(name) for name in names])


def init_meta(module: nn.Module, name: str) -> object:
    """What TE knows of how a parameter is made."""
    table = module.param_init_meta
    return table[name] if name in table else table[f"{name}0"]


def fp8_index(module: nn.Module, name: str) -> int | None:
    """The number of the quantizer of a parameter that is stored in FP8, if the module has such parameters."""
    if is_op(type(module)):
        return 2 * int(name.removeprefix("weight") or 0) + 1 if name.startswith("weight") else None
    return init_meta(module, name).fp8_meta_index


def weight_quantizers(module: nn.Module) -> list:
    """TE's quantizers of the weights of ``module``, one for each, as they are now."""
    names = [f"weight{i}" for i in range(num_experts(module))] if is_grouped(type(module)) else ["weight"]
    if is_op(type(module)):
        return [module.get_quantizer("forward", fp8_index(module, name)) for name in names]
    quantizers = module.quantizers["scaling_fwd"]
    return [quantizers[fp8_index(module, name)] for name in names]


def has_fp8_parameters(module: nn.Module) -> bool:
    """Whether ``module`` was built with its weights in FP8 or a format like it (``te.quantized_model_init``)."""
    attribute = "_with_quantized_weight" if is_op(type(module)) else "primary_weights_in_fp8"
    return getattr(module, attribute, False)


def recipe_in_force(module: nn.Module) -> object | None:
    """The recipe that the forward of ``module``, which is running, computes with; None: in high precision."""
    if not is_op(type(module)):
        return module.fp8_meta.get("recipe") if module.fp8 else None
    state = sys.modules["transformer_engine.pytorch.quantization"].FP8GlobalStateManager
    return state.get_fp8_recipe() if state.is_fp8_enabled() else None
