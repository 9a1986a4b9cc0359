"""Which weight travels in which format."""

from __future__ import annotations

import fnmatch
import functools
from types import ModuleType
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .config import WIRE_FORMATS
from .quantized import matrices
from .wire import WireFormat, wire_format

if TYPE_CHECKING:
    from .layout import TPLayout
    from .plan import Plan
    from .wire.linear import GEMMs

_AS_IT_IS = "bf16"
_AUTO = "auto"
# Modules that travel as they are by default, like embeddings: quantizing logits' weights costs most and saves least.
_OUTPUT_NAMES = ("output", "lm_head")
GROUPED_GEMMS = "grouped_gemms"  # attribute of modules whose stacks quantized GEMMs read; see wire/grouped_linear.py


def choose_wires(plan: Plan) -> tuple[dict[int, WireFormat], list[str]]:
    """(formats of sharded parameters that travel quantized, by id; names of those that are too small for theirs).

    Raises:
        ValueError: a format that does not exist, an override that matches nothing, a shape that its format cannot cut into
            blocks.
        ImportError: torchao is missing.
    """
    style = plan.style
    default = style.config.wire_format
    overrides = style.wire_format_overrides
    names = {below: id(param) for _, _, _, below, _, param in plan.entries}
    for pattern, name in overrides.items():
        if name not in WIRE_FORMATS:
            raise ValueError(
                f"GTPStyle(wire_format_overrides=...): '{pattern}' = '{name}' is no wire format; choose one of "
                f"{', '.join(WIRE_FORMATS)}"
            )
        matched = fnmatch.filter(names, pattern)
        if not any(names[below] in plan.sharded for below in matched):
            found = (
                f"matches only weights that are not sharded ({', '.join(matched[:3])})"
                if matched
                else "matches nothing"
            )
            raise ValueError(
                f"GTPStyle(wire_format_overrides=...): pattern '{pattern}' {found}; names of sharded weights are such as "
                f"{', '.join(sorted(below for below, key in names.items() if key in plan.sharded)[:5])}"
            )
    chosen: dict[int, set[str]] = {}
    for module, module_name, _, below, fqn, param in plan.entries:
        if id(param) in plan.sharded:
            room = gemm_room(module)
            if room is not None:
                room.check(module, fqn)
            chosen.setdefault(id(param), set()).add(_choice(module, module_name, below, default, overrides))
    wires, small = {}, []
    for module, _, _, below, fqn, param in plan.entries:
        choices = chosen.get(id(param), {_AS_IT_IS})
        name = _AS_IT_IS if _AS_IT_IS in choices else min(choices)  # of a tied weight's owners one that wants it exact
        wire = None if name == _AS_IT_IS or id(param) in wires else _wire(module, name, fqn)
        if wire is None:
            continue
        local = param._local_tensor if isinstance(param, DTensor) else param
        shape = matrices(local.shape, plan.is_stack(param))
        if shape[-1] < wire.column_block or shape[-2] < wire.row_block:
            small.append(f"{fqn} {tuple(local.shape)}")
        else:
            _check_shape(fqn, wire, shape, param, below)
            wires[id(param)] = wire
    return wires, small


def gemm_room(module: nn.Module) -> ModuleType | None:
    """For linears and experts whose GEMMs read quantized weights: the module of ours that serves them, with ``check`` and
    ``wire_of``, and for linears ``GEMMs`` and ``forward``. Imports torchao only where such a module is met."""
    if GROUPED_GEMMS in module.__dict__:
        from .wire import grouped_linear

        return grouped_linear
    if is_te(type(module)):
        return te_room()
    for base in type(module).__mro__:
        if base.__name__ == "Float8Linear" and base.__module__.startswith("torchao."):
            from .wire import float8_linear

            return float8_linear
        if base.__name__ == "MXLinear" and base.__module__ == f"{__package__}.wire.mx_linear":
            from .wire import mx_linear

            return mx_linear
    return None


@functools.lru_cache(maxsize=None)
def is_te(cls: type[nn.Module]) -> bool:
    """Whether ``cls`` is TransformerEngine's, or derived from such a class."""
    return any(base.__module__.startswith("transformer_engine.pytorch.") for base in cls.__mro__)


def te_room() -> ModuleType:
    """The module of ours that serves TransformerEngine's, for those who have met one."""
    from . import te

    return te


def gemms_of(module: nn.Module, tp: TPLayout | None, cuts_tokens: bool) -> GEMMs | None:
    """The GEMMs of ``module`` where they read quantized weights; see wire/linear.py."""
    room = gemm_room(module)
    return None if room is None else room.GEMMs(module, tp, cuts_tokens)


def _wire(module: nn.Module, name: str, fqn: str) -> WireFormat | None:
    room = gemm_room(module)
    if room is None:
        return None if name == _AUTO else wire_format(name)
    try:
        wire = room.wire_of(module)
    except ValueError as error:
        raise ValueError(f"{fqn}: {error}") from error
    if name == _AUTO or wire is not None and name == wire.name:
        return wire
    raise ValueError(
        f"{fqn}: wire format '{name}' for {type(module).__name__}, whose GEMMs read "
        f"{'high precision' if wire is None else repr(wire.name)}: use 'auto', or 'bf16' to quantize at each of them"
    )


def _choice(module: nn.Module, module_name: str, below: str, default: str, overrides: dict[str, str]) -> str:
    for pattern, name in overrides.items():
        if fnmatch.fnmatchcase(below, pattern):
            return name
    is_output = module_name.rpartition(".")[2] in _OUTPUT_NAMES
    return _AS_IT_IS if isinstance(module, nn.Embedding) or is_output else default


def _check_shape(fqn: str, wire: WireFormat, shape: torch.Size, param: torch.Tensor, below: str) -> None:
    tp = (
        f", {tuple(shape)} on this rank of mesh axes {param.device_mesh.mesh_dim_names}"
        if isinstance(param, DTensor)
        else ""
    )
    if shape[-1] % wire.column_block:
        raise ValueError(
            f"{fqn} of shape {tuple(param.shape)}{tp}: wire format '{wire.name}' has blocks of {wire.column_block} columns, "
            f"which do not divide {shape[-1]}; name another format for it, such as "
            f"wire_format_overrides={{'{below}': 'fp8_rowwise'}} or 'bf16'"
        )
    if not wire.fills_rows and shape[-2] % wire.row_block:
        raise ValueError(
            f"{fqn} of shape {tuple(param.shape)}{tp}: wire format '{wire.name}' has blocks of {wire.row_block} rows, which do "
            f"not divide {shape[-2]}, and its GEMMs read whole blocks: pad it, or make it in high precision"
        )
    row_dim = len(shape) - 2
    cuts_rows = isinstance(param, DTensor) and any(p.is_shard(row_dim) for p in param.placements)
    if cuts_rows and shape[-2] % wire.row_block:
        raise ValueError(
            f"{fqn} of shape {tuple(param.shape)}{tp}: wire format '{wire.name}' has blocks of {wire.row_block} rows, and "
            f"tensor parallelism cuts one; name another format for it, such as "
            f"wire_format_overrides={{'{below}': 'fp8_rowwise'}} or 'bf16'"
        )
