"""NVFP4 as TransformerEngine's GEMMs read it: e2m1 codes, two a byte, with one e4m3 scale for 16 x 16 elements, and the
whole weight's largest value.

Blocks are square, so one view serves both directions: what a backward's GEMM reads is made by TE, from the codes. The
random Hadamard transform and stochastic rounding of TE's recipe are for activations and gradients, which do not travel.

Packing, gathering and the tensors made of it need no GEMM. Nothing here has run on a device with NVFP4 GEMMs, which are
Blackwell's.
"""

from __future__ import annotations

import torch
from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked, pack_uint4
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor as NVFP4Values
from transformer_engine.pytorch import NVFP4Quantizer, NVFP4Tensor

from .base import Amax, Parts, View, as_bytes, resized
from .te_float8 import TEFormat, padded_to_tiles

_E4M3 = torch.float8_e4m3fn
_BLOCK = 16
_LARGEST_CODE, _LARGEST_SCALE = 6.0, 448.0
_LARGEST = torch.finfo(torch.float32).max
_TILE = (128, 4)  # TE's kernels want scales in whole tiles


def unserved(quantizer: NVFP4Quantizer) -> str | None:
    """Why weights that ``quantizer`` makes cannot be gathered; None: they can be."""
    if not quantizer.with_2d_quantization:
        return "with blocks along one dim"
    for option in ("nvfp4_use_4over6", "row_scaled_nvfp4", "with_rht", "stochastic_rounding"):
        if getattr(quantizer, option, False):
            return f"with {option}=True"
    return None


class NVScaling(TEFormat):
    """Codes, and one scale for each square block, which is repeated for the block's rows after the gather.

    Gathered codes and scales, and the largest value, are bit for bit those of TE's reference in Python on the whole weight.
    """

    name = "nvfp4"
    column_block = row_block = _BLOCK
    fills_rows = False
    quantizer_class = NVFP4Quantizer

    def part_shapes(self, view: View, shape: torch.Size) -> tuple[torch.Size, ...]:
        num_rows, num_columns = shape[-2:]
        return (resized(shape, num_columns // 2), resized(shape, num_rows // _BLOCK, num_columns // _BLOCK))

    def quantize(self, rows: torch.Tensor, amax: dict[Amax, torch.Tensor]) -> dict[View, Parts]:
        # In the order of operations of TE's reference in Python, which says it has them of the kernels: exact divisions.
        encode = _encode_scale(amax)
        sixth = torch.full_like(encode, _LARGEST_CODE).reciprocal()
        num_rows, num_columns = rows.shape[-2:]
        blocks = rows.view(*rows.shape[:-2], num_rows // _BLOCK, _BLOCK, num_columns // _BLOCK, _BLOCK)
        scales = _finite(blocks.abs().amax((-3, -1)) * (encode * sixth)).clamp(max=_LARGEST_SCALE).to(_E4M3)
        factors = _finite((scales.float() * encode.reciprocal()).reciprocal())[..., :, None, :, None]
        codes = (blocks * factors).clamp(-_LARGEST_CODE, _LARGEST_CODE).view(rows.shape)
        return {View.ROWS: (pack_uint4(f32_to_f4_unpacked(codes)), as_bytes(scales))}

    def dequantize(self, view, parts, shape, amax, dtype) -> torch.Tensor:
        codes, scales = parts
        scales = _by_row(scales).view(_E4M3)
        return NVFP4Values(codes, scales, _BLOCK, torch.float32, _encode_scale(amax).reciprocal()).dequantize(dtype)

    def _tensor(self, view, index, parts, shard, quantizer, dtype) -> torch.Tensor:
        codes, scales = parts
        tensor = NVFP4Tensor(
            shape=shard.shape[-2:],
            dtype=dtype,
            rowwise_data=codes,
            rowwise_scale_inv=padded_to_tiles(_by_row(scales), _TILE),
            columnwise_data=None,
            columnwise_scale_inv=None,
            amax_rowwise=shard.amax[Amax.MATRIX].reshape(-1)[index].view(1),
            amax_columnwise=None,
            fp4_dtype=quantizer.dtype,
            quantizer=quantizer,
            with_gemm_swizzled_scales=False,
        )
        if quantizer.columnwise_usage:
            tensor.update_usage(rowwise_usage=True, columnwise_usage=True)
        return tensor


def _encode_scale(amax: dict[Amax, torch.Tensor]) -> torch.Tensor:
    """What brings the largest value of a whole matrix to the largest product of a code and a scale."""
    largest = amax[Amax.MATRIX]
    return _finite(torch.full_like(largest, _LARGEST_SCALE * _LARGEST_CODE) / largest)


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    """A matrix or block of zeros has no scale of its own: the largest number, as in TE."""
    return tensor.clamp(max=_LARGEST)


def _by_row(scales: torch.Tensor) -> torch.Tensor:
    return scales.repeat_interleave(_BLOCK, -2)
