"""Float8 as TransformerEngine's GEMMs read it: delayed and current scaling, and blocks of 128 x 128.

Codes and scales of gathered parts are, bit for bit, those of TE's quantizer on the whole weight. What is handed to TE is
its own tensor over gathered memory; the transpose that a backward's GEMM reads on Hopper is made by TE, from the codes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
import torch.nn.functional as F
from transformer_engine.pytorch import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
)

from ..te_modules import weight_quantizers
from .base import Amax, Parts, View, WireFormat, as_bytes, resized

if TYPE_CHECKING:
    from ..weight import Lease

_E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(_E4M3).max
_BLOCK = 128
_EXPONENT = -(1 << 23)  # the bits of a float32 that are no mantissa
_COLUMNS = 16  # that an FP8 GEMM counts in
_ALIGNED = 4  # float32 numbers between scales: 16 bytes


def wire_for(module: nn.Module) -> WireFormat:
    """The format of the weights of ``module``, which has its parameters in FP8.

    Raises:
        ValueError: its recipe's weights cannot be gathered as its GEMMs read them.
    """
    quantizers = weight_quantizers(module)
    kind = type(quantizers[0])
    if kind is Float8Quantizer:
        return DelayedScaling()
    if kind is Float8CurrentScalingQuantizer:
        return CurrentScaling(quantizers[0].force_pow_2_scales, quantizers[0].amax_epsilon)
    if kind is Float8BlockQuantizer and quantizers[0].block_scaling_dim == 2:
        return BlockScaling(quantizers[0])
    if kind.__name__ == "MXFP8Quantizer":
        from .te_mx import MXScaling

        return MXScaling(quantizers[0])
    how = "with blocks along one dim" if kind is Float8BlockQuantizer else None
    if kind.__name__ == "NVFP4Quantizer":
        from .te_nvfp4 import NVScaling, unserved

        how = unserved(quantizers[0])
        if how is None:
            return NVScaling()
    raise ValueError(
        f"{type(module).__name__} with {module.num_gemms if hasattr(module, 'num_gemms') else 1} weights made in FP8 by "
        f"TransformerEngine's {kind.__name__}{'' if how is None else f', {how}'}: such weights do not travel quantized; use wire_format='bf16' (or "
        "wire_format_overrides), and TE quantizes them where they are used"
    )


def quantized_for_backward(weight: torch.Tensor, quantizer: object, scale: torch.Tensor | None) -> torch.Tensor:
    """``weight``, gathered in high precision, as the forward's GEMM read it.

    Args:
        quantizer: the module's.
        scale: of delayed scaling, at the forward. None: other recipes.
    """
    quantizer = quantizer.copy()
    if isinstance(quantizer, Float8Quantizer):
        quantizer.scale, quantizer.amax = scale, torch.zeros_like(scale)  # its history has seen the weight
    quantizer.set_usage(rowwise=True, columnwise=True)
    quantizer.internal = False
    return quantizer(weight)


def padded_to_tiles(scales: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """``scales`` of a matrix with zeros behind them, up to whole tiles."""
    missing = [-size % length for size, length in zip(scales.shape, tile)]
    return F.pad(scales, (0, missing[1], 0, missing[0]))


class TEFormat(WireFormat):
    """What TE's GEMMs read as ``tensor_class``, made by quantizers of ``quantizer_class``.

    Under TE's own tensor parallelism each slice is quantized by itself, as TE does that: a run with GTP is then, bit for
    bit, TE's run at the same tp without. One scale for all slices would not make it the run at tp 1, since TE scales
    slices of inputs and gradients by themselves too. (What is stored, in high precision, does not depend on tp.)
    """

    column_block = _COLUMNS
    spans_tp = False
    quantizer_class: type

    def tensors(self, lease: Lease, quantizers: list, dtype: torch.dtype, is_backward: bool) -> Iterable[torch.Tensor]:
        """The gathered weights, one for each quantizer, as TE's tensors that stand for ``dtype``.

        Raises:
            RuntimeError: TE's autocast has another recipe than the weights were made for.
        """
        weight, shard = lease.weight, lease.weight.quantized
        if not isinstance(quantizers[0], self.quantizer_class):
            raise RuntimeError(
                f"{weight.fqn}: its parameter is in FP8 for {self.quantizer_class.__name__}, and te.autocast has a recipe of "
                f"{type(quantizers[0]).__name__}: use the recipe of quantized_model_init"
            )
        parts = shard.whole(lease.view, lease.parts)
        if not weight.layout.is_stack:
            parts = tuple(part.unsqueeze(0) for part in parts)
        tensors = []
        for index, quantizer in enumerate(quantizers):
            quantizer = quantizer.copy()
            quantizer.internal = False
            quantizer.set_usage(rowwise=True, columnwise=is_backward)
            parts_of_one = [part[index] for part in parts]
            tensors.append(self._tensor(lease.view, index, parts_of_one, shard, quantizer, dtype))
        return tensors

    def _tensor(self, view, index, parts, shard, quantizer, dtype) -> torch.Tensor:
        raise NotImplementedError


class _ScaledFloat8(TEFormat):
    """One scale for a matrix: only codes travel, and serve both directions."""

    name = "fp8"

    def part_shapes(self, view: View, shape: torch.Size) -> tuple[torch.Size, ...]:
        return (shape,)

    def quantize(self, rows: torch.Tensor, amax: dict[Amax, torch.Tensor]) -> dict[View, Parts]:
        # TE's kernel to the last bit, and for all experts of a stack at once.
        codes = (rows * amax[Amax.SCALE]).clamp(-_LARGEST, _LARGEST).to(_E4M3)
        return {View.ROWS: (as_bytes(codes),)}

    def dequantize(self, view, parts, shape, amax, dtype) -> torch.Tensor:
        return (parts[0].view(_E4M3).float() * amax[Amax.INVERSE]).to(dtype)

    @staticmethod
    def _with_scale(amax: dict[Amax, torch.Tensor], scale: torch.Tensor) -> dict[Amax, torch.Tensor]:
        inverse = scale.new_empty(*scale.shape[:-1], _ALIGNED)[..., :1]  # cuBLAS wants each of them aligned
        return {**amax, Amax.SCALE: scale, Amax.INVERSE: torch.reciprocal(scale, out=inverse)}

    def _tensor(self, view, index, parts, shard, quantizer, dtype) -> torch.Tensor:
        inverse = shard.amax[Amax.INVERSE]
        return Float8Tensor(
            shape=parts[0].shape,
            dtype=dtype,
            data=parts[0],
            fp8_scale_inv=(inverse[index] if inverse.dim() > 2 else inverse).view(1),
            fp8_dtype=quantizer.dtype,
            quantizer=quantizer,
        )


class DelayedScaling(_ScaledFloat8):
    """With the scale of the module's quantizer at the time of quantization: kept until the weight is written, like the
    weight of an unsharded module that is stored in FP8. The weight's largest value enters the amax history then, where TE
    takes the maximum over the amax group, tensor-parallel ranks among it, at the end of its region."""

    quantizer_class = Float8Quantizer

    def complete(self, amax, before, owner) -> dict[Amax, torch.Tensor]:
        if Amax.SCALE in before:
            return {**before, **amax}
        scales = []
        for quantizer, value in zip(weight_quantizers(owner), amax[Amax.MATRIX].view(-1, 1), strict=True):
            scales.append(quantizer.scale.reshape(1))
            quantizer.amax.copy_(torch.maximum(quantizer.amax.reshape(1), value).view(quantizer.amax.shape))
        scale = torch.cat(scales).view_as(amax[Amax.MATRIX])
        return self._with_scale(amax, scale)


class CurrentScaling(_ScaledFloat8):
    """With the scale that brings the whole weight's largest value to the largest code.

    Args:
        power_of_2: scales are rounded down to one.
        epsilon: smaller largest values count as this.
    """

    quantizer_class = Float8CurrentScalingQuantizer

    def __init__(self, power_of_2: bool, epsilon: float) -> None:
        self.power_of_2, self.epsilon = power_of_2, epsilon

    def complete(self, amax, before, owner) -> dict[Amax, torch.Tensor]:
        scale = self._scale(amax[Amax.MATRIX])
        return self._with_scale(amax, scale)

    def _scale(self, amax: torch.Tensor) -> torch.Tensor:
        """As TE's kernel computes it."""
        amax = amax.clamp(min=self.epsilon)
        scale = (_LARGEST / amax.double()).float().clamp(max=torch.finfo(torch.float32).max)
        if self.power_of_2:
            scale = (scale.view(torch.int32) & _EXPONENT).view(torch.float32)
        return torch.where((amax == 0) | amax.isinf(), torch.ones_like(scale), scale)


class BlockScaling(TEFormat):
    """One scale for 128 x 128 elements, which travels with them, and serves both directions.

    Args:
        quantizer: a module's, for its settings.
    """

    name = "fp8_block"
    row_block = _BLOCK
    quantizer_class = Float8BlockQuantizer

    def __init__(self, quantizer: Float8BlockQuantizer) -> None:
        self._quantizer = quantizer.copy()
        self._quantizer.internal = False
        self._quantizer.set_usage(rowwise=True, columnwise=False)

    def part_shapes(self, view: View, shape: torch.Size) -> tuple[torch.Size, ...]:
        # Scales of four blocks are aligned, and the rest of a row is padding: it travels, and nothing has to be rearranged.
        num_scales = -(-shape[-1] // (4 * _BLOCK)) * 4
        return (shape, resized(shape, shape[-2] // _BLOCK, 4 * num_scales))

    def quantize(self, rows: torch.Tensor, amax: dict[Amax, torch.Tensor]) -> dict[View, Parts]:
        tensors = [self._quantizer(matrix) for matrix in rows.view(-1, *rows.shape[-2:])]
        codes = torch.stack([tensor._rowwise_data for tensor in tensors])
        scales = torch.stack([tensor._rowwise_scale_inv for tensor in tensors])
        shapes = self.part_shapes(View.ROWS, rows.shape)
        return {View.ROWS: tuple(as_bytes(part).view(shape) for part, shape in zip((codes, scales), shapes))}

    def dequantize(self, view, parts, shape, amax, dtype) -> torch.Tensor:
        codes, scales = parts[0].view(_E4M3).float(), parts[1].view(torch.float32)
        scales = scales.repeat_interleave(_BLOCK, -2).repeat_interleave(_BLOCK, -1)
        return (codes * scales[..., : shape[-1]]).to(dtype)

    def _tensor(self, view, index, parts, shard, quantizer, dtype) -> torch.Tensor:
        codes, scales = parts
        return Float8BlockwiseQTensor(
            shape=shard.shape[-2:],
            dtype=dtype,
            rowwise_data=codes[: shard.shape[-2]],  # without the rows that fill the last block
            rowwise_scale_inv=scales.view(torch.float32),
            columnwise_data=None,
            columnwise_scale_inv=None,
            fp8_dtype=quantizer.dtype,
            quantizer=quantizer,
            is_2D_scaled=True,
        )
