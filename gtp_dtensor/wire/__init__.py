"""Wire formats: how the bits of a shard travel. torchao is imported by the formats that need it, when they are asked
for."""

from __future__ import annotations

from .base import Amax, Parts, View, WireFormat, as_bytes

QUANTIZED = ("fp8", "fp8_rowwise", "fp8_block", "mxfp8", "nvfp4")

__all__ = ["QUANTIZED", "Amax", "Parts", "View", "WireFormat", "as_bytes", "wire_format"]


def wire_format(name: str, has_columns: bool = False) -> WireFormat | None:
    """The format called ``name``; None for "bf16", which means "as it is, in the dtype that is computed in".

    Args:
        name: "bf16" or one of ``QUANTIZED``.
        has_columns: whether a GEMM of the backward wants blocks along rows; formats that do not differ ignore it.

    Raises:
        ImportError: torchao is not installed.
    """
    if name == "bf16":
        return None
    try:
        if name == "mxfp8":
            from .mx import MXFloat8

            return MXFloat8(has_columns)
        if name == "nvfp4":
            from .nvfp4 import NVFloat4

            return NVFloat4()
        from .float8 import Float8Blocks, Float8Matrix, Float8Rows
    except ImportError as error:
        raise ImportError(f"wire format '{name}' needs torchao 0.17: pip install torchao==0.17.0 ({error})") from error
    formats = {"fp8": Float8Matrix, "fp8_block": Float8Blocks}
    return Float8Rows(Amax.COLUMN if has_columns else None) if name == "fp8_rowwise" else formats[name]()
