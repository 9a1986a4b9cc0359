"""Stacks of experts: one linear for each of them, with the stack gathered for that use only.

Saves a handle to the weight for backward, as the functions in functional.py do.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn as nn
from torch.autograd.function import FunctionCtx
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor

from . import compiled
from .functional import (
    fast_apply,
    first_order_only,
    gathered_backward,
    use_small,
)
from .local import Groups
from .members import STATE, ModuleState, small_of, weight_of
from .schedule import Kind
from .weight import Lease, ShardedWeight
from .wires import GROUPED_GEMMS


class Products(Protocol):
    """The three of a gathered stack W (E, out, in), by experts. x (T, in), grad_y (T, out)."""

    def output(self, x: torch.Tensor, lease: Lease) -> torch.Tensor:
        """x W^T, (rows, out)."""

    def input_grad(self, grad_y: torch.Tensor, lease: Lease, num_rows: int) -> torch.Tensor:
        """grad_y W, (num_rows, in)."""

    def weight_grad(self, grad_y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """grad_y^T x, (E, out, in)."""


class _Plain:
    """Products in high precision; ``dtype``: that the stack is cast to, None: its own."""

    def __init__(self, groups: Groups, dtype: torch.dtype | None) -> None:
        self._groups, self._dtype = groups, dtype

    def _stack(self, lease: Lease) -> torch.Tensor:
        w = lease.read_local()
        return w if self._dtype is None else w.to(self._dtype)

    def output(self, x: torch.Tensor, lease: Lease) -> torch.Tensor:
        return self._groups.product(x, self._stack(lease))

    def input_grad(self, grad_y: torch.Tensor, lease: Lease, num_rows: int) -> torch.Tensor:
        return self._groups.input_grad(grad_y, self._stack(lease), num_rows)

    def weight_grad(self, grad_y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._groups.weight_grad(grad_y, x)


class _GroupedLinear(torch.autograd.Function):
    """y = x W^T by experts, with the stack W (E, out, in) gathered for this call only."""

    @staticmethod
    def forward(ctx: FunctionCtx, x, leaf, weight: ShardedWeight, products: Products, kind: Kind):
        runtime = weight.runtime
        lease = runtime.acquire(weight, kind)
        y = products.output(x, lease)
        runtime.release(lease)
        ctx.use = weight, weight.param, products, weight.num_writes
        ctx.num_rows = x.shape[0]
        ctx.save_for_backward(x if leaf.requires_grad else None)
        return y

    @staticmethod
    @first_order_only
    def backward(ctx: FunctionCtx, grad_y: torch.Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        weight, param, products, num_writes = ctx.use
        grad_x, grad_weight = gathered_backward(
            weight,
            param,
            num_writes,
            lambda lease: products.input_grad(grad_y, lease, ctx.num_rows),
            lambda: products.weight_grad(grad_y, x),
        )
        return grad_x, grad_weight, None, None, None


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

    Its GEMMs read quantized numbers where ``wire.grouped_linear.use_grouped_gemms`` says so of ``module``, which then need
    not be under GTP.

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
        NotImplementedError: quantized GEMMs in code that is being compiled.
    """
    if (offsets is None) == (splits is None):
        raise ValueError("grouped_linear takes either offsets= or splits=")
    gemms = module.__dict__.get(GROUPED_GEMMS)
    if is_dynamo_compiling():
        if gemms is not None:
            _refuse_compiled(module, gemms.name)
        return compiled.grouped_linear(module, name, x, offsets, splits)
    state: ModuleState | None = module.__dict__.get(STATE)
    if state is None and gemms is not None:
        w, groups = module._parameters[name], Groups(offsets, splits)
        w = w.to_local() if isinstance(w, DTensor) else w
        groups.check(name, w.shape)
        return gemms.apply(groups.cast(x, x.dtype, False)[0], w, groups)
    if state is None or module._parameters.get(name) is None:
        found = "is not under GTP" if state is None else f"has no parameter '{name}'; it has {list(module._parameters)}"
        raise AttributeError(f"grouped_linear: {type(module).__name__} {found}")
    groups = Groups(offsets, splits)
    if name in state.weights:
        weight = weight_of(module, name)
        groups.check(weight.fqn, weight.tp_local_shape)
        x, dtype = groups.cast(x, weight.compute_dtype, weight.runtime.config.param_dtype is not None)
        products = _Plain(groups, dtype) if gemms is None else gemms.products(groups)
        return _apply_grouped_linear(x, weight.leaf, weight, products, weight.runtime.forward_kind())
    small = small_of(module, name)
    w = use_small(module, name)
    w = w.to_local() if isinstance(w, DTensor) else w
    groups.check(small.fqn, w.shape)
    x, dtype = groups.cast(x, w.dtype, small.runtime.config.param_dtype is not None)
    if gemms is not None:
        return gemms.apply(x, w, groups)
    return groups.product(x, w if dtype is None else w.to(dtype))


def _refuse_compiled(module: nn.Module, what: str) -> None:
    raise NotImplementedError(
        f"grouped GEMMs of {type(module).__name__} in {what} are not served in compiled code yet: leave it uncompiled "
        "(torch.compiler.disable)"
    )
