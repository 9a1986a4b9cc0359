"""NVFP4: e2m1 codes, two a byte, with one e4m3 scale for 16 elements and one float32 scale for a matrix, which every
rank knows from the amax. The quantizer is torchao's."""

from __future__ import annotations

import torch
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, nvfp4_quantize, per_tensor_amax_to_scale

from .base import Amax, Parts, View, WireFormat, as_bytes, resized

_BLOCK = 16
_LEAST_AMAX = 1e-12  # a matrix of zeros would be 0 / 0


class NVFloat4(WireFormat):
    """Dequantized where it is used, from the same codes in both directions: no machine without NVFP4 GEMMs needs more."""

    name = "nvfp4"
    column_block = _BLOCK

    def part_shapes(self, view: View, shape: torch.Size) -> tuple[torch.Size, ...]:
        return (resized(shape, shape[-1] // 2), resized(shape, shape[-1] // _BLOCK))

    def quantize(self, rows: torch.Tensor, amax: dict[Amax, torch.Tensor]) -> dict[View, Parts]:
        shape = rows.shape
        scale = self._scale(amax).expand(*shape[:-1], 1)
        # torchao's function takes one matrix; a scale for each of its rows stands for a stack of them.
        scales, codes = nvfp4_quantize(rows.reshape(-1, shape[-1]), _BLOCK, scale.reshape(-1, 1))
        codes, scales = (as_bytes(part).view(*shape[:-1], -1) for part in (codes, scales))
        return {View.ROWS: (codes, scales)}

    def dequantize(self, view, parts, shape, amax, dtype) -> torch.Tensor:
        codes, scales = parts
        # In float32: with a 16-bit orig_dtype the product of both scales would be rounded before it is used.
        scales = scales.view(torch.float8_e4m3fn)
        return NVFP4Tensor(codes, scales, _BLOCK, torch.float32, self._scale(amax)).dequantize(dtype)

    @staticmethod
    def _scale(amax: dict[Amax, torch.Tensor]) -> torch.Tensor:
        return per_tensor_amax_to_scale(amax[Amax.MATRIX].clamp(min=_LEAST_AMAX))
