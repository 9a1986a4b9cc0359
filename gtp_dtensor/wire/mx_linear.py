"""A linear whose GEMMs read MXFP8, with its weight gathered for each of them, in MXFP8 where it travels so.

torchao 0.17 has the casts, the tensor and the GEMMs of MXFP8 training (``mx_mm``), and no module for them. Unsharded, the
module here is ``mx_mm``; sharded, the same arithmetic with a weight that was quantized once an optimizer step.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
from torch.autograd.function import FunctionCtx
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor
from torchao.prototype.mx_formats.config import (
    MXFP8Dim0CastKernelChoice,
    MXFP8Dim1CastKernelChoice,
    ScaleCalculationMode,
)
from torchao.prototype.mx_formats.mx_linear import mx_mm
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

from ..functional import Edge, engine_edges, once_differentiable, param_edge, reduce_weight_grad, use_small
from ..local import cast_inputs
from ..members import weight_of
from ..schedule import Kind
from ..weight import Lease, ShardedWeight
from .base import View
from .mx import MXFloat8

_E4M3, _BLOCK = torch.float8_e4m3fn, 32


class MXLinear(nn.Linear):
    """``nn.Linear`` with inputs, weight and gradients of its GEMMs in MXFP8 (e4m3, blocks of 32).

    Attributes:
        mode: how scales are chosen.
        emulate: dequantize and multiply in high precision, for devices without these GEMMs.
        wgrad_with_hp: the weight gradient's GEMM reads high precision; else tokens have to be a multiple of 32.
    """

    mode = ScaleCalculationMode.RCEIL
    emulate = True
    wgrad_with_hp = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out)."""
        check_tokens(self, x)
        y = mx_mm.apply(
            x,
            self.weight,
            _E4M3,
            _E4M3,
            _E4M3,
            _BLOCK,
            _kernels(self),
            MXFP8Dim0CastKernelChoice.TORCH if self.emulate else MXFP8Dim0CastKernelChoice.TRITON,
            MXFP8Dim1CastKernelChoice.TORCH if self.emulate else MXFP8Dim1CastKernelChoice.CUDA,
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
    module_filter_fn: Callable[[nn.Module, str], bool] | None = None,
) -> nn.Module:
    """Make ``model``'s linears MXLinears, in place, before it is parallelized. Returns ``model``.

    Args:
        mode, emulate, wgrad_with_hp: see MXLinear.
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
        module.mode, module.emulate, module.wgrad_with_hp = mode, emulate, wgrad_with_hp
    return model


def check_tokens(module: MXLinear, x: torch.Tensor) -> None:
    """Raise ``ValueError`` where the weight gradient's blocks would not be full."""
    num_tokens = x.numel() // x.shape[-1]
    if num_tokens % _BLOCK and not module.wgrad_with_hp and torch.is_grad_enabled():
        raise ValueError(
            f"MXLinear of {module.in_features} to {module.out_features} features: {num_tokens} tokens are not a multiple of "
            f"{_BLOCK}, along which the weight gradient's GEMM has blocks: use such a batch, or wgrad_with_hp=True"
        )


def _kernels(module: MXLinear) -> KernelPreference:
    return KernelPreference.EMULATED if module.emulate else KernelPreference.AUTO


def wire_of(module: MXLinear) -> MXFloat8:
    """The format that ``module``'s GEMMs read."""
    if isinstance(module.weight, DTensor):
        raise NotImplementedError(
            "an MXLinear under GTP is not served with tensor parallelism yet: leave it out of the plan"
        )
    return MXFloat8(True, module.mode)


def _cast(tensor: torch.Tensor, module: MXLinear) -> torch.Tensor:
    return MXTensor.to_mx(tensor.contiguous(), _E4M3, _BLOCK, module.mode, _kernels(module))


def _weight(lease: Lease, module: MXLinear, view: View, dtype: torch.dtype) -> torch.Tensor:
    """torchao's tensor: (out, in) with blocks along in, or for the backward (in, out) with blocks along out."""
    quantized = lease.weight.quantized
    if quantized is None:
        w = lease.read_local().to(dtype)
        return _cast(w if view is View.ROWS else w.t(), module)
    parts = quantized.whole(view, lease.parts)
    codes, scales = parts if view is View.ROWS else (part.t().contiguous() for part in parts)
    codes, scales = codes.view(_E4M3), scales.view(torch.float8_e8m0fnu)
    return MXTensor.from_qdata_and_scales(codes, scales, dtype, block_size=_BLOCK, kernel_preference=_kernels(module))


class _MXLinear(torch.autograd.Function):
    """y = x W^T, W gathered for this call only; see functional._Linear."""

    @staticmethod
    def forward(ctx: FunctionCtx, x, param, weight: ShardedWeight, kind: Kind, module: MXLinear):
        runtime = weight.runtime
        lease = runtime.acquire(weight, kind)
        y = torch.mm(_cast(x.reshape(-1, x.shape[-1]), module), _weight(lease, module, View.ROWS, x.dtype).t())
        runtime.release(lease)
        ctx.use = weight, param, module, weight.num_writes
        ctx.save_for_backward(x if param.requires_grad else None)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_y: torch.Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        weight, param, module, num_writes = ctx.use
        runtime = weight.runtime
        edges = engine_edges()
        grad_x = grad_weight = None
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        if edges[0] is not Edge.UNUSED:
            lease = runtime.acquire(weight, Kind.BACKWARD, True, num_writes)
            grad_x = torch.mm(_cast(rows, module), _weight(lease, module, View.COLUMNS, grad_y.dtype).t())
            runtime.release(lease)
            grad_x = grad_x.reshape(*grad_y.shape[:-1], grad_x.shape[-1])
        else:
            runtime.enter()
        weight_edge = param_edge(param, edges[1])
        if weight_edge is not Edge.UNUSED:
            runtime.reducer.make_room()
            x_rows = x.reshape(-1, x.shape[-1])
            if module.wgrad_with_hp:
                grad = torch.mm(rows.t(), x_rows)
            else:
                grad = torch.mm(_cast(rows.t(), module), _cast(x_rows.t(), module).t())
            grad_weight = reduce_weight_grad(weight, param, grad, weight_edge)
        return grad_x, grad_weight, None, None, None


def forward(module: MXLinear, x: torch.Tensor) -> torch.Tensor:
    """``module(x)`` for an ``MXLinear`` whose weight is sharded."""
    if is_dynamo_compiling():
        raise NotImplementedError(
            "an MXLinear under GTP is not served in compiled code yet: leave it uncompiled (torch.compiler.disable)"
        )
    weight = weight_of(module, "weight")
    if weight.tp is not None or isinstance(x, DTensor):
        raise NotImplementedError(f"{weight.fqn}: an MXLinear under GTP is not served with tensor parallelism yet")
    check_tokens(module, x)
    bias = None if module._parameters.get("bias") is None else use_small(module, "bias")
    x, _, _ = cast_inputs(x, None, weight.compute_dtype, weight.runtime.config.param_dtype is not None)
    y = _MXLinear.apply(x, weight.param, weight, weight.runtime.forward_kind(), module)
    return y if bias is None else y + bias.to(y.dtype)
