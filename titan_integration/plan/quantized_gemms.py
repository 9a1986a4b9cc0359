"""GEMMs that read MXFP8, as a device has them that this process is not: casts and products are a kernel each.

Without such a device the library emulates them, and a plan would time the emulation; the same holds for its one kernel
that dequantizes float8. These stand in for the methods that cast and multiply; everything around them, gathers and what
travels, is the library's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from gtp_dtensor.weight import Lease
from gtp_dtensor.wire.float8 import ScaledFloat8
from gtp_dtensor.wire.grouped_linear import GroupedGEMMs, Stack
from gtp_dtensor.wire.mx_linear import GEMMs

from .record import Recorder

_BLOCK = 32


class _Kernels:
    """Notes them in ``recorder``, if there is one, and allocates what they give."""

    def __init__(self, recorder: Recorder | None) -> None:
        self._recorder = recorder

    def note(self, name: str, tensors: Sequence[torch.Tensor], shape: tuple[int, int, int, int] | None = None) -> None:
        if self._recorder is not None:
            self._recorder.kernel(name, tensors, 0 if shape is None else 2 * math.prod(shape), "fp8", shape)

    def cast(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of ``rows``."""
        codes = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
        scales = torch.empty((*rows.shape[:-1], -(-rows.shape[-1] // _BLOCK)), dtype=torch.uint8, device=rows.device)
        self.note("mx_cast", [rows, codes, scales])
        return codes, scales

    def multiply(self, rows: torch.Tensor, num_columns: int, others: Sequence[torch.Tensor]) -> torch.Tensor:
        """``rows`` (T, k) with a quantized matrix of as many columns."""
        out = rows.new_empty(rows.shape[0], num_columns)
        self.note("mx_mm", [*self.cast(rows), *others, out], (rows.shape[0], num_columns, 1, rows.shape[1]))
        return out

    def multiply_groups(self, rows: torch.Tensor, stack: Stack, num_rows: int, num_columns: int) -> torch.Tensor:
        """The same with a matrix for each expert; all have as many rows."""
        out = rows.new_empty(num_rows, num_columns)
        num_experts = stack.shape[0]
        shape = (-(-rows.shape[0] // num_experts), num_columns, num_experts, rows.shape[1])
        self.note("mx_grouped_mm", [*self.cast(rows), *stack.parts, out], shape)
        return out


def replaced_methods(recorder: Recorder | None) -> tuple[tuple[type, str, Callable], ...]:
    """(class, name, method) that note their kernels in ``recorder``."""
    kernels, plain = _Kernels(recorder), ScaledFloat8.dequantize

    def output(self: GEMMs, x_rows: torch.Tensor, lease: Lease) -> torch.Tensor:
        return kernels.multiply(x_rows, lease.weight.tp_local_shape[0], _as_tuple(lease.parts))

    def input_grad(self: GEMMs, grad_rows: torch.Tensor, lease: Lease) -> torch.Tensor:
        return kernels.multiply(grad_rows, lease.weight.tp_local_shape[1], _as_tuple(lease.parts))

    def weight_grad(self: GEMMs, grad_rows: torch.Tensor, x_rows: torch.Tensor) -> torch.Tensor:
        if self._wgrad_with_hp:
            return torch.mm(grad_rows.t(), x_rows)
        return kernels.multiply(grad_rows.t(), x_rows.shape[1], kernels.cast(x_rows.t()))

    def grouped_output(self: GroupedGEMMs, x: torch.Tensor, stack: Stack, groups) -> torch.Tensor:
        return kernels.multiply_groups(x, stack, x.shape[0], stack.shape[1])

    def grouped_input_grad(self: GroupedGEMMs, grad_y: torch.Tensor, stack: Stack, groups, num_rows: int):
        return kernels.multiply_groups(grad_y, stack, num_rows, stack.shape[2])

    def dequantize(self: ScaledFloat8, view, parts, shape, amax, dtype) -> torch.Tensor:
        codes, scale = self.codes_and_scale(view, parts, amax)
        if scale.shape[-2:] != (1, 1):
            return plain(self, view, parts, shape, amax, dtype)
        values = torch.empty(codes.shape, dtype=dtype, device=codes.device)
        kernels.note("dequantize", [codes, values])
        return values

    return (
        (ScaledFloat8, "dequantize", dequantize),
        (GEMMs, "output", output),
        (GEMMs, "input_grad", input_grad),
        (GEMMs, "weight_grad", weight_grad),
        (GroupedGEMMs, "output", grouped_output),
        (GroupedGEMMs, "input_grad", grouped_input_grad),
    )


def _as_tuple(parts: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return parts if isinstance(parts, tuple) else (parts,)
