"""MXFP8: e4m3 codes with one e8m0 scale for 32 elements. The quantizer is torchao's."""

from __future__ import annotations

import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from .base import Amax, Parts, View, WireFormat, as_bytes, resized

_BLOCK = 32


class MXFloat8(WireFormat):
    """Blocks along columns; in the view for the backward along rows, sent in the order of the weight's own rows.

    Args:
        mode: how scales are chosen, torchao's.
    """

    name = "mxfp8"
    column_block = _BLOCK

    def __init__(self, has_columns: bool = False, mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL) -> None:
        self.has_columns = has_columns
        self.row_block = _BLOCK if has_columns else 1
        self.mode = mode

    def part_shapes(self, view: View, shape: torch.Size) -> tuple[torch.Size, ...]:
        num_rows, num_columns = shape[-2:]
        if view is View.ROWS:
            return (shape, resized(shape, num_columns // _BLOCK))
        return (shape, resized(shape, num_rows // _BLOCK, num_columns))

    def quantize(self, rows: torch.Tensor, amax: dict[Amax, torch.Tensor]) -> dict[View, Parts]:
        quantized = self._quantize(rows)
        views = {View.ROWS: (as_bytes(quantized.qdata), as_bytes(quantized.scale))}
        if self.has_columns:
            quantized = self._quantize(rows.transpose(-2, -1).contiguous())
            codes, scales = quantized.qdata.view(torch.uint8), quantized.scale.view(torch.uint8)
            views[View.COLUMNS] = tuple(tensor.transpose(-2, -1).contiguous() for tensor in (codes, scales))
        return views

    def _quantize(self, rows: torch.Tensor) -> MXTensor:
        return MXTensor.to_mx(rows, torch.float8_e4m3fn, _BLOCK, self.mode)

    def tensor(
        self, view: View, parts: Parts, dtype: torch.dtype, kernels: KernelPreference = KernelPreference.EMULATED
    ) -> MXTensor:
        """torchao's tensor: (..., rows, columns), or for the backward (..., columns, rows)."""
        if view is View.COLUMNS:
            parts = tuple(part.transpose(-2, -1) for part in parts)
        codes, scales = (part.contiguous() for part in parts)  # torchao takes what is not for a transposed matrix
        codes, scales = codes.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu)
        return MXTensor.from_qdata_and_scales(codes, scales, dtype, block_size=_BLOCK, kernel_preference=kernels)

    def dequantize(self, view, parts, shape, amax, dtype) -> torch.Tensor:
        values = self.tensor(view, parts, dtype).dequantize(dtype)
        return values if view is View.ROWS else values.transpose(-2, -1)
