"""The autograd function of linears whose GEMMs read quantized numbers, with the weight gathered for each of them."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn as nn
from torch.autograd.function import FunctionCtx
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor, Partial, Shard

from .. import compiled
from ..functional import first_order_only, gathered_backward, use_small
from ..layout import TPLayout
from ..local import cast_inputs, linear_on_tp
from ..members import weight_of
from ..schedule import Kind
from ..weight import Lease, ShardedWeight


class GEMMs(ABC):
    """The three of a linear, by the library that owns the numbers, on local tensors: x_rows (T, in), grad_rows (T, out).

    Args:
        module: the linear.
        tp: the tensor-parallel layout of its weight.
        cuts_tokens: whether the ranks of a weight that is whole on tp's mesh have different tokens.

    Attributes:
        x_cut, grad_cut: the dim of x_rows and grad_rows that tp's mesh cuts, or None.
    """

    def __init__(self, module: nn.Linear, tp: TPLayout | None, cuts_tokens: bool) -> None:
        placement = None if tp is None else tp.placements[0]
        self.tp_mesh = None if tp is None else tp.mesh
        tokens = 0 if cuts_tokens else None
        self.x_cut, self.grad_cut = {Shard(0): (None, 1), Shard(1): (1, None)}.get(placement, (tokens, tokens))

    def check_tokens(self, num_tokens: int) -> None:
        """Raise ``ValueError`` where a backward could not cut so many tokens into blocks."""

    @abstractmethod
    def output(self, x_rows: torch.Tensor, lease: Lease) -> torch.Tensor:
        """x_rows W^T, (T, out)."""

    @abstractmethod
    def input_grad(self, grad_rows: torch.Tensor, lease: Lease) -> torch.Tensor:
        """grad_rows W, (T, in)."""

    @abstractmethod
    def weight_grad(self, grad_rows: torch.Tensor, x_rows: torch.Tensor) -> torch.Tensor:
        """grad_rows^T x_rows, (out, in)."""


class _Linear(torch.autograd.Function):
    """y = x W^T, W gathered for this call only; see functional._Linear."""

    @staticmethod
    def forward(ctx: FunctionCtx, x, leaf, weight: ShardedWeight, kind: Kind, gemms: GEMMs, owes_tp_sum: bool):
        runtime = weight.runtime
        lease = runtime.acquire(weight, kind)
        y = gemms.output(x.reshape(-1, x.shape[-1]), lease)
        runtime.release(lease)
        ctx.use = weight, weight.param, gemms, owes_tp_sum, weight.num_writes
        ctx.save_for_backward(x if leaf.requires_grad else None)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @first_order_only
    def backward(ctx: FunctionCtx, grad_y: torch.Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        weight, param, gemms, owes_tp_sum, num_writes = ctx.use
        rows = grad_y.reshape(-1, grad_y.shape[-1])

        def weight_grad() -> torch.Tensor:
            grad = gemms.weight_grad(rows, x.reshape(-1, x.shape[-1]))
            return DTensor.from_local(grad, weight.tp.mesh, (Partial(),), run_check=False) if owes_tp_sum else grad

        grad_x, grad_weight = gathered_backward(
            weight, param, num_writes, lambda lease: gemms.input_grad(rows, lease), weight_grad
        )
        if grad_x is not None:
            grad_x = grad_x.reshape(*grad_y.shape[:-1], grad_x.shape[-1])
        return grad_x, grad_weight, None, None, None, None


def linear(module: nn.Linear, x: torch.Tensor, make: type[GEMMs]) -> torch.Tensor:
    """``module(x)`` for a linear whose weight is sharded and whose GEMMs are ``make``'s.

    Under tensor parallelism all arithmetic is local, with the communication that DTensor's rules would do: quantizing
    DTensors costs dozens of dispatches a cast, and compiled code could not hold them.

    Raises:
        RuntimeError: a plain ``x`` for a tensor-parallel weight.
    """
    has_bias = module._parameters.get("bias") is not None
    if is_dynamo_compiling():
        y = compiled.linear(module, x, with_bias=False)
        return y + compiled.use(module, "bias").to(y.dtype) if has_bias else y
    weight = weight_of(module, "weight")
    bias = use_small(module, "bias") if has_bias else None
    x, _, _ = cast_inputs(x, None, weight.compute_dtype, weight.runtime.config.param_dtype is not None)
    kind, tp = weight.runtime.forward_kind(), weight.tp

    def compute(local: torch.Tensor, cuts_tokens: bool) -> torch.Tensor:
        gemms = make(module, tp, cuts_tokens)
        if torch.is_grad_enabled():
            gemms.check_tokens(local.numel() // local.shape[-1])
        return _Linear.apply(local, weight.leaf, weight, kind, gemms, cuts_tokens)

    if tp is None:
        y = compute(x, False)
    elif isinstance(x, DTensor):
        y = linear_on_tp(x, tp, compute)
    else:
        raise RuntimeError(
            f"{weight.fqn}: its weight is sharded over mesh axes {tp.mesh.mesh_dim_names}, its input is a plain tensor: name the "
            "input's layout in the module's parallel style"
        )
    return y if bias is None else y + bias.to(y.dtype)
