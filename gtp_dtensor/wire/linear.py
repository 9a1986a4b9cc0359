"""The autograd function of linears whose GEMMs read quantized numbers, with the weight gathered for each of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn as nn
from torch.autograd.function import FunctionCtx
from torch.compiler import is_dynamo_compiling

from ..functional import Edge, engine_edges, once_differentiable, param_edge, reduce_weight_grad, use_small
from ..local import cast_inputs
from ..members import weight_of
from ..schedule import Kind
from ..weight import Lease, ShardedWeight


class GEMMs(Protocol):
    """The three of a linear, by the library that owns the numbers. x_rows (T, in), grad_rows (T, out)."""

    def output(self, x_rows: torch.Tensor, lease: Lease) -> torch.Tensor:
        """x_rows W^T, (T, out)."""

    def input_grad(self, grad_rows: torch.Tensor, lease: Lease) -> torch.Tensor:
        """grad_rows W, (T, in)."""

    def weight_grad(self, grad_rows: torch.Tensor, x_rows: torch.Tensor) -> torch.Tensor:
        """grad_rows^T x_rows, (out, in)."""


class _Linear(torch.autograd.Function):
    """y = x W^T, W gathered for this call only; see functional._Linear."""

    @staticmethod
    def forward(ctx: FunctionCtx, x, param, weight: ShardedWeight, kind: Kind, gemms: GEMMs):
        runtime = weight.runtime
        lease = runtime.acquire(weight, kind)
        y = gemms.output(x.reshape(-1, x.shape[-1]), lease)
        runtime.release(lease)
        ctx.use = weight, param, gemms, weight.num_writes
        ctx.save_for_backward(x if param.requires_grad else None)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_y: torch.Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        weight, param, gemms, num_writes = ctx.use
        runtime = weight.runtime
        edges = engine_edges()
        grad_x = grad_weight = None
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        if edges[0] is not Edge.UNUSED:
            lease = runtime.acquire(weight, Kind.BACKWARD, True, num_writes)
            grad_x = gemms.input_grad(rows, lease)
            runtime.release(lease)
            grad_x = grad_x.reshape(*grad_y.shape[:-1], grad_x.shape[-1])
        else:
            runtime.enter()
        weight_edge = param_edge(param, edges[1])
        if weight_edge is not Edge.UNUSED:
            runtime.reducer.make_room()
            grad = gemms.weight_grad(rows, x.reshape(-1, x.shape[-1]))
            grad_weight = reduce_weight_grad(weight, param, grad, weight_edge)
        return grad_x, grad_weight, None, None, None


def linear(module: nn.Linear, x: torch.Tensor, gemms: Callable[[nn.Linear], GEMMs]) -> torch.Tensor:
    """``module(x)`` for a linear whose weight is sharded; ``gemms`` makes its GEMMs.

    Raises:
        NotImplementedError: in code that is being compiled.
    """
    if is_dynamo_compiling():
        raise NotImplementedError(
            f"a {type(module).__name__} is not served in compiled code yet: leave it uncompiled (torch.compiler.disable)"
        )
    weight = weight_of(module, "weight")
    bias = None if module._parameters.get("bias") is None else use_small(module, "bias")
    x, _, _ = cast_inputs(x, None, weight.compute_dtype, weight.runtime.config.param_dtype is not None)
    y = _Linear.apply(x, weight.param, weight, weight.runtime.forward_kind(), gemms(module))
    return y if bias is None else y + bias.to(y.dtype)
