"""GEMMs that read MXFP8, as a device has them that this process is not: casts and products are a kernel each.

Without such a device the library emulates them, and a plan would time the emulation. These stand in for the methods
that cast and multiply; everything around them, gathers and what travels, is the library's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from gtp_dtensor.weight import Lease
from gtp_dtensor.wire.grouped_linear import GroupedGEMMs, Stack
from gtp_dtensor.wire.mx_linear import GEMMs

from .record import Recorder

_BLOCK = 32


def replaced_methods(recorder: Recorder | None) -> tuple[tuple[type, str, Callable], ...]:
    """(class, name, method) that note their kernels in ``recorder``."""

    def cast(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of ``rows``."""
        codes = torch.empty(rows.shape, dtype=torch.float8_e4m3fn, device=rows.device)
        scales = torch.empty((*rows.shape[:-1], -(-rows.shape[-1] // _BLOCK)), dtype=torch.uint8, device=rows.device)
        note("mx_cast", [rows, codes, scales])
        return codes, scales

    def note(name: str, tensors: list[torch.Tensor], shape: tuple[int, int, int, int] | None = None) -> None:
        if recorder is not None:
            recorder.kernel(name, tensors, 0 if shape is None else 2 * math.prod(shape), "fp8", shape)

    def multiply(rows: torch.Tensor, num_columns: int, others: tuple[torch.Tensor, ...], inner: int) -> torch.Tensor:
        out = rows.new_empty(rows.shape[0], num_columns)
        note("mx_mm", [*cast(rows), *others, out], (rows.shape[0], num_columns, 1, inner))
        return out

    def output(self: GEMMs, x_rows: torch.Tensor, lease: Lease) -> torch.Tensor:
        num_out, num_in = lease.weight.tp_local_shape
        return multiply(x_rows, num_out, _as_tuple(lease.parts), num_in)

    def input_grad(self: GEMMs, grad_rows: torch.Tensor, lease: Lease) -> torch.Tensor:
        num_out, num_in = lease.weight.tp_local_shape
        return multiply(grad_rows, num_in, _as_tuple(lease.parts), num_out)

    def weight_grad(self: GEMMs, grad_rows: torch.Tensor, x_rows: torch.Tensor) -> torch.Tensor:
        if self._wgrad_with_hp:
            return torch.mm(grad_rows.t(), x_rows)
        return multiply(grad_rows.t(), x_rows.shape[1], cast(x_rows.t()), x_rows.shape[0])

    def grouped(rows: torch.Tensor, stack: Stack, num_rows: int, num_columns: int, inner: int) -> torch.Tensor:
        out = rows.new_empty(num_rows, num_columns)
        num_experts = stack.shape[0]
        shape = (-(-rows.shape[0] // num_experts), num_columns, num_experts, inner)
        note("mx_grouped_mm", [*cast(rows), *stack.parts, out], shape)
        return out

    def grouped_output(self: GroupedGEMMs, x: torch.Tensor, stack: Stack, groups) -> torch.Tensor:
        return grouped(x, stack, x.shape[0], stack.shape[1], stack.shape[2])

    def grouped_input_grad(
        self: GroupedGEMMs, grad_y: torch.Tensor, stack: Stack, groups, num_rows: int
    ) -> torch.Tensor:
        return grouped(grad_y, stack, num_rows, stack.shape[2], stack.shape[1])

    return (
        (GEMMs, "output", output),
        (GEMMs, "input_grad", input_grad),
        (GEMMs, "weight_grad", weight_grad),
        (GroupedGEMMs, "output", grouped_output),
        (GroupedGEMMs, "input_grad", grouped_input_grad),
    )


def _as_tuple(parts) -> tuple[torch.Tensor, ...]:
    return parts if isinstance(parts, tuple) else (parts,)
