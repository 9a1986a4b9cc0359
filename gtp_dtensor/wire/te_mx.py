"""MXFP8 as TransformerEngine's GEMMs read it: blocks of 32 along columns for the forward, along rows for the backward.

Packing, gathering and the tensors made of it need no GEMM. Nothing here has run on a device with MXFP8 GEMMs, which are
Blackwell's.
"""

from __future__ import annotations

import torch
from transformer_engine.pytorch import MXFP8Quantizer, MXFP8Tensor

from .base import Parts, View, resized
from .te_float8 import TEFormat, padded_to_tiles

_BLOCK = 32
_BIAS = 127  # of the exponent that a scale's byte is
# TE's kernels want scales in whole tiles of 128 x 4; they travel without the padding.
_TILES = {View.ROWS: (128, 4), View.COLUMNS: (4, 128)}


def _scale_shape(view: View, num_rows: int, num_columns: int) -> tuple[int, int]:
    return (num_rows, num_columns // _BLOCK) if view is View.ROWS else (num_rows // _BLOCK, num_columns)


class MXScaling(TEFormat):
    """Codes (rows, columns) in both views, with one exponent for 32 of them.

    Args:
        quantizer: a module's, for its settings.
    """

    name = "mxfp8"
    column_block = row_block = _BLOCK
    has_columns = True
    fills_rows = False
    quantizer_class = MXFP8Quantizer

    def __init__(self, quantizer: MXFP8Quantizer) -> None:
        self._quantizer = quantizer.copy()
        self._quantizer.internal = False
        self._quantizer.optimize_for_gemm = False  # scales in their plain order
        self._quantizer.set_usage(rowwise=True, columnwise=True)

    def part_shapes(self, view: View, shape: torch.Size) -> tuple[torch.Size, ...]:
        return (shape, resized(shape, *_scale_shape(view, *shape[-2:])))

    def quantize(self, rows, amax) -> dict[View, Parts]:
        tensors = [self._quantizer(matrix) for matrix in rows.view(-1, *rows.shape[-2:])]
        parts = {
            View.ROWS: [(tensor._rowwise_data, tensor._rowwise_scale_inv) for tensor in tensors],
            View.COLUMNS: [(tensor._columnwise_data, tensor._columnwise_scale_inv) for tensor in tensors],
        }
        views = {}
        for view, pairs in parts.items():
            num_rows, num_columns = _scale_shape(view, *rows.shape[-2:])
            codes = torch.stack([codes for codes, _ in pairs])
            scales = torch.stack([scales[:num_rows, :num_columns] for _, scales in pairs])
            shapes = self.part_shapes(view, rows.shape)
            views[view] = tuple(part.view(torch.uint8).view(s) for part, s in zip((codes, scales), shapes))
        return views

    def dequantize(self, view, parts, shape, amax, dtype) -> torch.Tensor:
        codes, scales = parts
        scales = torch.exp2(scales.float() - _BIAS).repeat_interleave(_BLOCK, -1 if view is View.ROWS else -2)
        return (codes.view(torch.float8_e4m3fn).float() * scales).to(dtype)

    def _tensor(self, view, index, parts, shard, quantizer, dtype) -> torch.Tensor:
        codes, scales = parts
        scales = padded_to_tiles(scales, _TILES[view])
        is_rows = view is View.ROWS
        quantizer.set_usage(rowwise=is_rows, columnwise=not is_rows)
        return MXFP8Tensor(
            shape=shard.shape[-2:],
            dtype=dtype,
            rowwise_data=codes if is_rows else None,
            rowwise_scale_inv=scales if is_rows else None,
            columnwise_data=None if is_rows else codes,
            columnwise_scale_inv=None if is_rows else scales,
            fp8_dtype=quantizer.dtype,
            quantizer=quantizer,
            with_gemm_swizzled_scales=False,
        )
