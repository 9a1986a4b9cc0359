"""A linear whose GEMMs read MXFP8, with its weight gathered for each of them, in MXFP8 where it travels so.

torchao 0.17 has the casts, the tensor and the GEMMs of MXFP8 training (``mx_mm``), and no module for them. Unsharded, the
module here is ``mx_mm``; sharded, the same arithmetic with a weight that was quantized once an optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.mx_linear import mx_mm
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.utils import _to_mxfp8_dim1_kernel_wrapper
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from ..layout import TPLayout
from ..weight import Lease
from . import linear
from .base import View
from .mx import MXFloat8

_E4M3, _BLOCK = torch.float8_e4m3fn, 32


class MXLinear(nn.Linear):
    """``nn.Linear`` with inputs, weight and gradients of its GEMMs in MXFP8 (e4m3, blocks of 32).

    Attributes:
        mode: how scales are chosen.
        emulate: dequantize and multiply in high precision, for devices without these GEMMs.
        wgrad_with_hp: the weight gradient's GEMM reads high precision; else tokens have to be a multiple of 32.
        dim1_cast: which kernel quantizes activations and gradients along tokens, where not emulated.
    """

    mode = ScaleCalculationMode.RCEIL
    emulate = True
    wgrad_with_hp = False
    dim1_cast = MXFP8Dim1CastKernelChoice.CUDA

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        if torch.is_grad_enabled():
            _check_tokens(self, x.numel() // x.shape[-1])
        y = mx_mm.apply(
            x,
            self.weight,
            _E4M3,
            _E4M3,
            _E4M3,
            _BLOCK,
            _kernels(self),
            MXFP8Dim0CastKernelChoice.TORCH if self.emulate else MXFP8Dim0CastKernelChoice.TRITON,
            MXFP8Dim1CastKernelChoice.TORCH if self.emulate else self.dim1_cast,
            self.mode,
            self.wgrad_with_hp,
        )
        return y if self.bias is None else y + self.bias.to(y.dtype)


def convert_to_mx_training(
    model: nn.Module,
    *,
    mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL,
    emulate: bool = True,
    wgrad_with_hp: bool = False,
    dim1_cast: MXFP8Dim1CastKernelChoice = MXFP8Dim1CastKernelChoice.CUDA,
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Make ``model``'s linears MXLinears, in place, before it is parallelized. Returns ``model``.

    Args:
        mode, emulate, wgrad_with_hp, dim1_cast: see MXLinear.
        module_filter_fn: of (module, name); False: not this one.

    Raises:
        ValueError: a linear's features are not a multiple of 32; names it.
    """
    for name, module in model.named_modules():
        if type(module) is not nn.Linear or module_filter_fn is not None and not module_filter_fn(module, name):
            continue
        if module.in_features % _BLOCK or module.out_features % _BLOCK:
            raise ValueError(
                f"{name}: {module.in_features} in and {module.out_features} out features of an MXFP8 linear have to be "
                f"multiples of {_BLOCK}: leave it out by the filter"
            )
        module.__class__ = MXLinear
        module.mode, module.emulate, module.wgrad_with_hp, module.dim1_cast = mode, emulate, wgrad_with_hp, dim1_cast
    return model


def _check_tokens(module: MXLinear, num_tokens: int) -> None:
    if num_tokens % _BLOCK and not module.wgrad_with_hp:
        raise ValueError(
            f"MXLinear of {module.in_features} to {module.out_features} features: {num_tokens} tokens are not a multiple of "
            f"{_BLOCK}, along which the weight gradient's GEMM has blocks: use such a batch, or wgrad_with_hp=True"
        )


def _kernels(module: MXLinear) -> KernelPreference:
    return KernelPreference.EMULATED if module.emulate else KernelPreference.AUTO


def check(module: MXLinear, fqn: str) -> None:
    """Raise ``ValueError`` where tensor parallelism cuts ``module``'s weight, called ``fqn``, inside a block."""
    weight = module.weight
    if not isinstance(weight, DTensor):
        return
    for placement, size in zip(weight.placements, weight.device_mesh.shape):
        num = weight.shape[placement.dim] if isinstance(placement, Shard) else 0
        if -(-num // size) % _BLOCK:
            fitting = [str(s) for s in range(1, size) if -(-num // s) % _BLOCK == 0]
            raise ValueError(
                f"{fqn} of shape {tuple(weight.shape)}: dim {placement.dim}, cut over {size} ranks of mesh axes "
                f"{weight.device_mesh.mesh_dim_names}, is cut inside one of the blocks of {_BLOCK} that its MXFP8 GEMMs read: "
                f"use an axis of size {' or '.join(fitting)}, or leave it an nn.Linear (module_filter_fn, filter_fqns)"
            )


def wire_of(module: MXLinear) -> MXFloat8:
    """The format that ``module``'s GEMMs read."""
    return MXFloat8(True, module.mode)


class GEMMs(linear.GEMMs):
    """torchao's, as in ``mx_mm``. Blocks along features are whole on every tensor-parallel rank, and tokens are there."""

    def __init__(self, module: MXLinear, tp: TPLayout | None, cuts_tokens: bool) -> None:
        super().__init__(module, tp, cuts_tokens)
        self._module = module
        self._mode, self._kernels, self._wgrad_with_hp = module.mode, _kernels(module), module.wgrad_with_hp
        self._dim1_cast = module.dim1_cast

    def check_tokens(self, num_tokens: int) -> None:
        _check_tokens(self._module, num_tokens)

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return MXTensor.to_mx(tensor.contiguous(), _E4M3, _BLOCK, self._mode, self._kernels)

    def _weight(self, lease: Lease, view: View, dtype: torch.dtype) -> torch.Tensor:
        """torchao's tensor: (out, in) with blocks along in, or for the backward (in, out) with blocks along out."""
        quantized = lease.weight.quantized
        if quantized is None:
            w = lease.read_local().to(dtype)
            return self._cast(w if view is View.ROWS else w.t())
        return quantized.wire.tensor(view, quantized.whole(view, lease.parts), dtype, self._kernels)

    def output(self, x_rows: torch.Tensor, lease: Lease) -> torch.Tensor:
        return torch.mm(self._cast(x_rows), self._weight(lease, View.ROWS, x_rows.dtype).t())

    def input_grad(self, grad_rows: torch.Tensor, lease: Lease) -> torch.Tensor:
        return torch.mm(self._cast(grad_rows), self._weight(lease, View.COLUMNS, grad_rows.dtype).t())

    def weight_grad(self, grad_rows: torch.Tensor, x_rows: torch.Tensor) -> torch.Tensor:
        if self._wgrad_with_hp:
            return torch.mm(grad_rows.t(), x_rows)
        return torch.mm(self._cast_tokens(grad_rows), self._cast_tokens(x_rows).t())

    def _cast_tokens(self, rows: torch.Tensor) -> torch.Tensor:
        """(features, tokens), blocks along tokens."""
        if self._kernels is KernelPreference.EMULATED or self._dim1_cast is MXFP8Dim1CastKernelChoice.TORCH:
            return self._cast(rows.t())
        return _to_mxfp8_dim1_kernel_wrapper(
            rows.contiguous(), _BLOCK, _E4M3, rows.dtype, self._kernels, self._dim1_cast, self._mode
        )


def forward(module: MXLinear, x: torch.Tensor) -> torch.Tensor:
    """``module(x)`` for an ``MXLinear`` whose weight is sharded."""
    return linear.linear(module, x, GEMMs)
