"""Quantized tensors and quantizers of the stand-in for TransformerEngine (te_stand_in.py)."""

from __future__ import annotations

import torch
from torch import nn

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
BLOCK = 128


class QuantizedTensor(torch.Tensor):
    has_columns = False  # what a GEMM of the backward reads

    def update_usage(self, *, columnwise_usage):
        self.has_columns = columnwise_usage

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise RuntimeError(f"{func} of a quantized tensor")

    @classmethod
    def _make(cls, shape, dtype, device):
        return torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)


class Float8Tensor(QuantizedTensor):
    def __new__(cls, *, shape, dtype, data, fp8_scale_inv, fp8_dtype, quantizer):
        self = cls._make(shape, dtype, data.device)
        self._data, self._scale_inv, self._quantizer = data, fp8_scale_inv, quantizer
        return self

    def dequantize(self):
        return (self._data.view(E4M3).float() * self._scale_inv).to(self.dtype)

    def clear(self):
        self._data.data = self._data.data.new_empty(0)


class Float8BlockwiseQTensor(QuantizedTensor):
    def __new__(
        cls,
        *,
        shape,
        dtype,
        rowwise_data,
        rowwise_scale_inv,
        columnwise_data,
        columnwise_scale_inv,
        fp8_dtype,
        quantizer,
        is_2D_scaled,
    ):
        assert is_2D_scaled and rowwise_scale_inv.shape == (-(-shape[0] // BLOCK), -(-shape[1] // (4 * BLOCK)) * 4)
        assert tuple(rowwise_data.shape) == tuple(shape) and rowwise_data.is_contiguous()
        self = cls._make(shape, dtype, rowwise_data.device)
        self._rowwise_data, self._rowwise_scale_inv, self._quantizer = rowwise_data, rowwise_scale_inv, quantizer
        return self

    def dequantize(self):
        scales = self._rowwise_scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        values = self._rowwise_data.view(E4M3).float() * scales[: self.shape[0], : self.shape[1]]
        return values.to(self.dtype)

    def clear(self):
        for tensor in (self._rowwise_data, self._rowwise_scale_inv):
            tensor.data = tensor.data.new_empty(0)


class MXFP8Tensor(QuantizedTensor):
    def __new__(
        cls,
        *,
        shape,
        dtype,
        rowwise_data,
        rowwise_scale_inv,
        columnwise_data,
        columnwise_scale_inv,
        fp8_dtype,
        quantizer,
        with_gemm_swizzled_scales,
    ):
        assert not with_gemm_swizzled_scales
        for scales, tiles in ((rowwise_scale_inv, (128, 4)), (columnwise_scale_inv, (4, 128))):
            assert scales is None or all(size % tile == 0 for size, tile in zip(scales.shape, tiles))
        self = cls._make(shape, dtype, torch.device("cpu"))
        self._rowwise_data, self._rowwise_scale_inv = rowwise_data, rowwise_scale_inv
        self._columnwise_data, self._columnwise_scale_inv = columnwise_data, columnwise_scale_inv
        self._quantizer = quantizer
        return self

    def _values(self, codes, scales, dim):
        scales = torch.exp2(scales.float() - 127).repeat_interleave(32, dim)
        return (codes.view(E4M3).float() * scales[: self.shape[0], : self.shape[1]]).to(self.dtype)

    def dequantize(self):
        return self._values(self._rowwise_data, self._rowwise_scale_inv, 1)

    def for_backward(self):
        return self._values(self._columnwise_data, self._columnwise_scale_inv, 0)

    def clear(self):
        for tensor in (self._rowwise_data, self._columnwise_data):
            if tensor is not None:
                tensor.data = tensor.data.new_empty(0)


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def _unpacked(codes):
    return torch.stack([codes & 15, codes >> 4], -1).flatten(-2)


def _packed(codes):
    return codes[:, ::2] | codes[:, 1::2] << 4


class NVFP4Tensor(QuantizedTensor):
    """Of square blocks: what stands for columns is made of what stands for rows."""

    def __new__(
        cls,
        *,
        shape,
        dtype,
        rowwise_data,
        rowwise_scale_inv,
        columnwise_data,
        columnwise_scale_inv,
        amax_rowwise,
        amax_columnwise,
        fp4_dtype,
        quantizer,
        with_gemm_swizzled_scales,
    ):
        assert not with_gemm_swizzled_scales and columnwise_data is None and amax_rowwise.shape == (1,)
        assert tuple(rowwise_data.shape) == (shape[0], shape[1] // 2) and rowwise_data.is_contiguous()
        assert all(size % tile == 0 for size, tile in zip(rowwise_scale_inv.shape, (128, 4)))
        self = cls._make(shape, dtype, rowwise_data.device)
        self._rowwise_data, self._rowwise_scale_inv, self._amax_rowwise = rowwise_data, rowwise_scale_inv, amax_rowwise
        self._columnwise_data, self._quantizer = None, quantizer
        return self

    def update_usage(self, *, rowwise_usage, columnwise_usage):
        assert rowwise_usage and columnwise_usage
        rows, columns = self.shape
        self._columnwise_data = _packed(_unpacked(self._rowwise_data).t().contiguous())
        scales = self._rowwise_scale_inv[:rows:16, : columns // 16].t()
        self._columnwise_scale_inv = scales.repeat_interleave(16, 0)

    def _values(self, codes, scales):
        codes = _unpacked(codes).long()
        scales = scales.view(E4M3).float() * (1 / (448 * 6 / self._amax_rowwise))
        signs = 1 - 2 * (codes >> 3)
        return (signs * _E2M1[codes & 7] * scales.repeat_interleave(16, 1)[: codes.shape[0], : codes.shape[1]]).float()

    def dequantize(self):
        return self._values(self._rowwise_data, self._rowwise_scale_inv).to(self.dtype)

    def for_backward(self):
        return self._values(self._columnwise_data, self._columnwise_scale_inv).t().to(self.dtype)

    def clear(self):
        for tensor in (self._rowwise_data, self._rowwise_scale_inv, self._amax_rowwise):
            tensor.data = tensor.data.new_empty(0)


class Quantizer:
    internal, dtype = False, "kFloat8E4M3"

    def set_usage(self, *, rowwise=None, columnwise=None):
        pass

    def copy(self):
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        return twin


def _float8(tensor, scale, quantizer):
    codes = (tensor.float() * scale).clamp(-LARGEST, LARGEST).to(E4M3).view(torch.uint8)
    return Float8Tensor(
        shape=tensor.shape,
        dtype=tensor.dtype,
        data=codes,
        fp8_scale_inv=scale.reciprocal(),
        fp8_dtype=None,
        quantizer=quantizer,
    )


class Float8Quantizer(Quantizer):
    def __init__(self, scale, amax, fp8_dtype):
        self.scale, self.amax = scale, amax

    def __call__(self, tensor):
        self.amax.copy_(torch.maximum(self.amax, tensor.abs().amax().float()))
        return _float8(tensor, self.scale.clone(), self)


class Float8CurrentScalingQuantizer(Quantizer):
    force_pow_2_scales, amax_epsilon = False, 0.0

    def __call__(self, tensor):
        scale = (LARGEST / tensor.abs().amax().double()).float().view(1)
        if self.force_pow_2_scales:
            scale = torch.exp2(torch.floor(torch.log2(scale)))
        return _float8(tensor, scale, self)


class Float8BlockQuantizer(Quantizer):
    block_scaling_dim = 2

    def __call__(self, tensor):
        rows, columns = tensor.shape
        tiles = (-(-rows // BLOCK), -(-columns // (4 * BLOCK)) * 4)
        padded = torch.zeros(tiles[0] * BLOCK, tiles[1] * BLOCK)
        padded[:rows, :columns] = tensor.float()
        tiled = padded.view(tiles[0], BLOCK, tiles[1], BLOCK)
        amax = tiled.abs().amax((1, 3)).clamp(min=1e-20)
        scale = torch.exp2(torch.floor(torch.log2(LARGEST / amax)))
        codes = (tiled * scale[:, None, :, None]).to(E4M3).view(padded.shape)[:rows, :columns]
        return Float8BlockwiseQTensor(
            shape=tensor.shape,
            dtype=tensor.dtype,
            rowwise_data=codes.contiguous().view(torch.uint8),
            rowwise_scale_inv=scale.reciprocal(),
            columnwise_data=None,
            columnwise_scale_inv=None,
            fp8_dtype=None,
            quantizer=self,
            is_2D_scaled=True,
        )


class MXFP8Quantizer(Quantizer):
    """In TE's layout: scales padded to whole tiles of 128 x 4."""

    def __call__(self, tensor):
        def quantized(rows):
            blocks = rows.float().reshape(rows.shape[0], -1, 32)
            exponents = torch.floor(torch.log2(blocks.abs().amax(-1).clamp(min=1e-30))) - 8
            codes = (blocks / torch.exp2(exponents)[..., None]).clamp(-LARGEST, LARGEST).to(E4M3)
            return codes.view(rows.shape).view(torch.uint8), (exponents + 127).to(torch.uint8)

        def padded(scales, tiles):
            missing = [-size % tile for size, tile in zip(scales.shape, tiles)]
            return nn.functional.pad(scales, (0, missing[1], 0, missing[0]), value=7)

        rows, row_scales = quantized(tensor)
        columns, column_scales = (part.t().contiguous() for part in quantized(tensor.t().contiguous()))
        return MXFP8Tensor(
            shape=tensor.shape,
            dtype=tensor.dtype,
            rowwise_data=rows,
            rowwise_scale_inv=padded(row_scales, (128, 4)),
            columnwise_data=columns,
            columnwise_scale_inv=padded(column_scales, (4, 128)),
            fp8_dtype=None,
            quantizer=self,
            with_gemm_swizzled_scales=False,
        )


class NVFP4Quantizer(Quantizer):
    """With one scale for 16 x 16 numbers, in TE's layout: repeated in each row, in whole tiles of 128 x 4."""

    with_2d_quantization, nvfp4_use_4over6, columnwise_usage = True, False, True

    def set_usage(self, *, rowwise=None, columnwise=None):
        self.columnwise_usage = columnwise

    def __call__(self, tensor):
        rows, columns = tensor.shape
        amax = tensor.abs().amax().float().view(1)
        encode = 2688.0 * torch.ones(1) / amax
        tiled = tensor.float().view(rows // 16, 16, columns // 16, 16)
        scales = (tiled.abs().amax((1, 3)) * (encode * (1 / torch.tensor(6.0)))).clamp(max=LARGEST).to(E4M3)
        factors = 1 / (scales.float() * (1 / encode))
        values = (tiled * factors[:, None, :, None]).view(rows, columns).clamp(-6.0, 6.0)
        magnitudes = values.abs().contiguous()
        middles = (_E2M1[1:] + _E2M1[:-1]) / 2
        nearest = torch.bucketize(magnitudes, middles)  # of two that are as near the lower one
        nearest += (magnitudes == middles[nearest.clamp(max=6)]) & (nearest % 2 == 1)  # in truth the even one
        codes = nearest.to(torch.uint8) | (values.signbit().to(torch.uint8) << 3)
        by_row = scales.view(torch.uint8).repeat_interleave(16, 0)
        missing = [-size % tile for size, tile in zip(by_row.shape, (128, 4))]
        quantized = NVFP4Tensor(
            shape=tensor.shape,
            dtype=tensor.dtype,
            rowwise_data=_packed(codes),
            rowwise_scale_inv=nn.functional.pad(by_row, (0, missing[1], 0, missing[0])),
            columnwise_data=None,
            columnwise_scale_inv=None,
            amax_rowwise=amax,
            amax_columnwise=None,
            fp4_dtype=None,
            quantizer=self,
            with_gemm_swizzled_scales=False,
        )
        quantized.update_usage(rowwise_usage=True, columnwise_usage=True)
        return quantized
