"""FP8 (e4m3) with one scale for a matrix, a row, or a block of 128 x 128. Casts and scales are torchao's."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import amax_to_scale
from torchao.quantization.quant_primitives import (
    _choose_scale_float8,
    _dequantize_affine_float8,
    _quantize_affine_float8,
)

from .base import Amax, Parts, View, WireFormat, as_bytes, resized
from .dequantizing import divide_in_one_kernel, divide_plainly, has_kernel, new_kernel

_E4M3 = torch.float8_e4m3fn
_BLOCK = 128
# torchao's smallest amax: of a block of zeros the scale would be zero, and the codes 0 / 0.
_LEAST_AMAX = 1e-12


def _codes(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return as_bytes(hp_tensor_and_scale_to_float8(rows, scale, _E4M3)._data)


class ScaledFloat8(WireFormat):
    """Codes with a scale that multiplied them, as torchao's ``Float8TrainingTensor``."""

    def __init__(self) -> None:
        self._kernel = new_kernel()

    @abstractmethod
    def codes_and_scale(
        self, view: View, parts: Parts, amax: dict[Amax, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(e4m3 (..., rows, columns), float32 scale that broadcasts over them)."""

    def dequantize(self, view, parts, shape, amax, dtype) -> torch.Tensor:
        codes, scale = self.codes_and_scale(view, parts, amax)
        if codes.is_cuda and scale.shape[-2:] == (1, 1) and has_kernel(codes.device):
            return divide_in_one_kernel(codes, scale, dtype, self._kernel)
        return divide_plainly(codes, scale, dtype)


class Float8Matrix(ScaledFloat8):
    """One scale for a matrix, which every rank knows from the amax: only codes travel, and serve both directions."""

    name = "fp8"

    def __init__(self, power_of_2: bool = False) -> None:
        super().__init__()
        self.power_of_2 = power_of_2

    def scales(self, amaxes: torch.Tensor) -> torch.Tensor:
        return amax_to_scale(amaxes, _E4M3, self.power_of_2)

    @property
    def scales_like(self) -> tuple:
        return Float8Matrix, self.power_of_2

    def _scale(self, amax: dict[Amax, torch.Tensor]) -> torch.Tensor:
        return amax[Amax.SCALE] if Amax.SCALE in amax else self.scales(amax[Amax.MATRIX])

    def part_shapes(self, view: View, shape: torch.Size) -> tuple[torch.Size, ...]:
        return (shape,)

    def quantize_many(self, rows: list[torch.Tensor], scales: list[torch.Tensor], codes: list[torch.Tensor]) -> None:
        scaled = torch._foreach_mul(rows, scales)
        most = torch.finfo(_E4M3).max
        torch._foreach_clamp_min_(scaled, -most)
        torch._foreach_clamp_max_(scaled, most)
        torch._foreach_copy_([part.view(_E4M3) for part in codes], scaled)

    def quantize(self, rows: torch.Tensor, amax: dict[Amax, torch.Tensor]) -> dict[View, Parts]:
        return {View.ROWS: (_codes(rows, self._scale(amax)),)}

    def codes_and_scale(self, view, parts, amax) -> tuple[torch.Tensor, torch.Tensor]:
        return parts[0].view(_E4M3), self._scale(amax)


class Float8Rows(ScaledFloat8):
    """One scale for a row, which travels beside its codes; in the view for the backward one for a column, or for the
    matrix, which every rank knows from the amax.

    Args:
        columns: what has one scale in the view for the backward (COLUMN or MATRIX); None: there is no such view.
        power_of_2: of scales, as in torchao's rowwise recipes.
    """

    name = "fp8_rowwise"

    def __init__(self, columns: Amax | None = None, power_of_2: bool = True) -> None:
        super().__init__()
        self.columns = columns
        self.has_columns = columns is not None
        self.power_of_2 = power_of_2
        self.amaxes = (Amax.MATRIX, Amax.ROW, *((Amax.COLUMN,) if columns is Amax.COLUMN else ()))

    def _scale(self, of: Amax, amax: dict[Amax, torch.Tensor]) -> torch.Tensor:
        return amax_to_scale(amax[of], _E4M3, self.power_of_2)

    def part_shapes(self, view: View, shape: torch.Size) -> tuple[torch.Size, ...]:
        return (shape, resized(shape, 4)) if view is View.ROWS else (shape,)

    def quantize(self, rows: torch.Tensor, amax: dict[Amax, torch.Tensor]) -> dict[View, Parts]:
        scale = self._scale(Amax.ROW, amax)
        views = {View.ROWS: (_codes(rows, scale), as_bytes(scale))}
        if self.has_columns:
            views[View.COLUMNS] = (_codes(rows, self._scale(self.columns, amax)),)
        return views

    def codes_and_scale(self, view, parts, amax) -> tuple[torch.Tensor, torch.Tensor]:
        if view is View.ROWS:
            return parts[0].view(_E4M3), parts[1].view(torch.float32)
        return parts[0].view(_E4M3), self._scale(self.columns, amax)


class Float8Blocks(WireFormat):
    """One scale for 128 x 128 elements, which travels with them and serves both directions."""

    name = "fp8_block"
    column_block = row_block = _BLOCK

    def part_shapes(self, view: View, shape: torch.Size) -> tuple[torch.Size, ...]:
        return (shape, resized(shape, shape[-2] // _BLOCK, 4 * shape[-1] // _BLOCK))

    def quantize(self, rows: torch.Tensor, amax: dict[Amax, torch.Tensor]) -> dict[View, Parts]:
        scale = _choose_scale_float8(rows, self._blocks(rows.dim()), _E4M3, hp_value_lb=_LEAST_AMAX)
        return {View.ROWS: (as_bytes(_quantize_affine_float8(rows, scale, _E4M3)), as_bytes(scale))}

    def dequantize(self, view, parts, shape, amax, dtype) -> torch.Tensor:
        codes, scale = parts
        return _dequantize_affine_float8(codes.view(_E4M3), scale.view(torch.float32), dtype)

    @staticmethod
    def _blocks(num_dims: int) -> list[int]:
        return [1] * (num_dims - 2) + [_BLOCK, _BLOCK]
