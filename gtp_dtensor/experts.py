"""Stacks of experts: one linear for each of them, with the stack gathered for that use only.

Saves a handle to the weight for backward, as the functions in functional.py do.
"""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.autograd.function import FunctionCtx
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor

from . import compiled
from .functional import (
    Edge,
    engine_edges,
    fast_apply,
    once_differentiable,
    param_edge,
    reduce_weight_grad,
    use_small,
)
from .local import Groups
from .members import STATE, ModuleState, small_of, weight_of
from .schedule import Kind
from .weight import ShardedWeight


class _GroupedLinear(torch.autograd.Function):
    """y = x W^T by experts, with the stack W (E, out, in) gathered for this call only."""

    @staticmethod
    def forward(ctx: FunctionCtx, x, param, weight: ShardedWeight, groups: Groups, kind: Kind, dtype):
        runtime = weight.runtime
        lease = runtime.acquire(weight, kind)
        w = lease.read_local()
        y = groups.product(x, w if dtype is None else w.to(dtype))
        del w
        runtime.release(lease)
        ctx.use = weight, param, groups, dtype, weight.num_writes
        ctx.num_rows = x.shape[0]
        ctx.save_for_backward(x if param.requires_grad else None)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_y: torch.Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        weight, param, groups, dtype, num_writes = ctx.use
        runtime = weight.runtime
        edges = engine_edges()
        grad_x = grad_weight = None
        if edges[0] is not Edge.UNUSED:
            lease = runtime.acquire(weight, Kind.BACKWARD, True, num_writes)
            w = lease.read_local()
            grad_x = groups.input_grad(grad_y, w if dtype is None else w.to(dtype), ctx.num_rows)
            del w
            runtime.release(lease)
        else:
            runtime.enter()
        weight_edge = param_edge(param, edges[1])
        if weight_edge is not Edge.UNUSED:
            runtime.reducer.make_room()
            grad_weight = reduce_weight_grad(weight, param, groups.weight_grad(grad_y, x), weight_edge)
        return grad_x, grad_weight, None, None, None, None


_apply_grouped_linear = fast_apply(_GroupedLinear)


def grouped_linear(
    module: nn.Module,
    name: str,
    x: torch.Tensor,
    *,
    offsets: torch.Tensor | None = None,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """One linear for each expert of a stack, gathered for this call only: for a forward given as ``forwards=``.

    Args:
        module, name: whose parameter, logical shape (experts, out, in); of it this rank's experts and out or in
            features are used, E of them.
        x: (T, in), rows of one expert after the other.
        offsets: int32 (E,), where each expert's rows end: torch's grouped GEMM, on x and weight in bfloat16. What is in
            rows of y and of the gradient of x beyond the last is not defined.
        splits: the number of rows of each expert: one product an expert. y has as many rows as these together.

    Returns:
        (rows, out). Gradients flow back into x and the parameter.

    Raises:
        AttributeError: ``module`` is not under GTP, or has no parameter of that name.
        ValueError: not exactly one of ``offsets`` and ``splits``; a number of experts that is not this rank's.
    """
    if (offsets is None) == (splits is None):
        raise ValueError("grouped_linear takes either offsets= or splits=")
    if is_dynamo_compiling():
        return compiled.grouped_linear(module, name, x, offsets, splits)
    state: ModuleState | None = module.__dict__.get(STATE)
    if state is None or module._parameters.get(name) is None:
        found = "is not under GTP" if state is None else f"has no parameter '{name}'; it has {list(module._parameters)}"
        raise AttributeError(f"grouped_linear: {type(module).__name__} {found}")
    groups = Groups(offsets, splits)
    if name in state.weights:
        weight = weight_of(module, name)
        groups.check(weight.fqn, weight.tp_local_shape)
        x, dtype = groups.cast(x, weight.compute_dtype, weight.runtime.config.param_dtype is not None)
        return _apply_grouped_linear(x, weight.param, weight, groups, weight.runtime.forward_kind(), dtype)
    small = small_of(module, name)
    w = use_small(module, name)
    w = w.to_local() if isinstance(w, DTensor) else w
    groups.check(small.fqn, w.shape)
    x, dtype = groups.cast(x, w.dtype, small.runtime.config.param_dtype is not None)
    return groups.product(x, w if dtype is None else w.to(dtype))
