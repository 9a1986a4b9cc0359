"""Stacks of experts: one linear for each of them, with the stack gathered for that use only.

Saves a handle to the weight for backward, as the functions in functional.py do.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor

from .functional import (
    Edge,
    engine_edges,
    fast_apply,
    once_differentiable,
    param_edge,
    reduce_weight_grad,
    use_small,
)
from .local import cast_inputs
from .members import STATE, ModuleState, small_of, weight_of
from .schedule import Kind
from .weight import ShardedWeight


class _Groups:
    """Which rows of x belong to which expert, and the products over all experts: x (T, in), w (E, out, in).

    ``offsets``, int32 (E,): where each expert's rows end, for torch's grouped GEMM, which reads bfloat16. ``splits``: a
    list of their numbers of rows, for one product an expert in any dtype.
    """

    def __init__(self, offsets: torch.Tensor | None, splits: list[int] | None) -> None:
        self.offsets = offsets
        self.splits = splits

    def _loop(self, one: Callable, *stacks: torch.Tensor) -> list[torch.Tensor]:
        """``one`` of each expert's rows of ``stacks``."""
        used = sum(self.splits)
        parts = [stack[:used].split(self.splits) for stack in stacks]
        return [one(expert, *rows) for expert, rows in enumerate(zip(*parts))]

    def check(self, fqn: str, shape: torch.Size) -> None:
        """Raise ``ValueError`` where there are not as many groups as experts in a stack of this shape."""
        num_groups = len(self.splits) if self.offsets is None else self.offsets.shape[0]
        if len(shape) != 3 or shape[0] != num_groups:
            raise ValueError(
                f"grouped_linear: {num_groups} groups of rows for {fqn}, of shape {tuple(shape)} on this rank: dim 0 "
                "counts experts"
            )

    def product(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """x w^T by experts, (rows, out)."""
        if self.offsets is not None:
            return torch._grouped_mm(x, w.transpose(-2, -1), offs=self.offsets)
        return torch.cat(self._loop(lambda expert, rows: rows @ w[expert].t(), x))

    def input_grad(self, grad_y: torch.Tensor, w: torch.Tensor, num_rows: int) -> torch.Tensor:
        """grad_y w by experts, (num_rows, in)."""
        if self.offsets is not None:
            return torch._grouped_mm(grad_y, w, offs=self.offsets)
        grad_x = torch.cat(self._loop(lambda expert, rows: rows @ w[expert], grad_y))
        unused = num_rows - grad_x.shape[0]  # rows of no expert
        return F.pad(grad_x, (0, 0, 0, unused)) if unused else grad_x

    def weight_grad(self, grad_y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """grad_y^T x by experts, (E, out, in)."""
        if self.offsets is not None:
            return torch._grouped_mm(grad_y.t(), x, offs=self.offsets)
        return torch.stack(self._loop(lambda expert, grad_rows, rows: grad_rows.t() @ rows, grad_y, x))


def _local_stack(w: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """This rank's experts of a gathered stack, in ``dtype`` where it is given."""
    w = w.to_local() if isinstance(w, DTensor) else w
    return w if dtype is None else w.to(dtype)


class _GroupedLinear(torch.autograd.Function):
    """y = x W^T by experts, with the stack W (E, out, in) gathered for this call only."""

    @staticmethod
    def forward(ctx: FunctionCtx, x, param, weight: ShardedWeight, groups: _Groups, kind: Kind, dtype):
        runtime = weight.runtime
        lease = runtime.acquire(weight, kind)
        w = _local_stack(lease.read(), dtype)
        y = groups.product(x, w)
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
            w = _local_stack(lease.read(), dtype)
            grad_x = groups.input_grad(grad_y, w, ctx.num_rows)
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
    state: ModuleState | None = module.__dict__.get(STATE)
    if state is None or module._parameters.get(name) is None:
        found = "is not under GTP" if state is None else f"has no parameter '{name}'; it has {list(module._parameters)}"
        raise AttributeError(f"grouped_linear: {type(module).__name__} {found}")
    groups = _Groups(offsets, splits)
    dtype = None  # that the weight is cast to, beyond what is gathered
    if offsets is not None:
        dtype = torch.bfloat16
        x = x.to(dtype)
    if name not in state.weights:
        small = small_of(module, name)
        w = _local_stack(use_small(module, name), dtype)
        groups.check(small.fqn, w.shape)
        if small.runtime.config.param_dtype is not None:
            x = x.to(w.dtype)
        return groups.product(x, w)
    weight = weight_of(module, name)
    groups.check(weight.fqn, weight.tp_local_shape)
    if offsets is None:
        x, _, dtype = cast_inputs(x, None, weight.compute_dtype, weight.runtime.config.param_dtype is not None)
    return _apply_grouped_linear(x, weight.param, weight, groups, weight.runtime.forward_kind(), dtype)
