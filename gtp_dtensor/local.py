"""The arithmetic of a use, on local tensors: what eager and compiled code share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from .layout import TPLayout


def cast_inputs(x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, casts: bool) -> tuple:
    """(x, bias, the dtype that autocast casts the weight to or None): in the dtype that is computed in, autocast's,
    else ``dtype``, the weight's compute dtype, where ``casts``."""
    compute_dtype, autocast = dtype, None
    if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type):
        if torch.float64 not in (x.dtype, dtype):  # autocast leaves these alone
            autocast = dtype = torch.get_autocast_dtype(x.device.type)
    if autocast is not None or casts:
        if x.dtype != dtype and x.is_floating_point():
            x = x.to(dtype)
        if bias is not None and bias.dtype != dtype:
            bias = bias.to(dtype)
    return x, bias, None if autocast is compute_dtype else autocast


def cast_arguments(dtypes: set[torch.dtype], args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Floating-point tensors among a forward's arguments in the dtype that its weights are computed with, where there is
    exactly one: FSDP2 does the same at the border of a module."""
    if len(dtypes) != 1:
        return args, kwargs
    (dtype,) = dtypes

    def cast(value: object) -> object:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float and value.dtype != dtype else value

    return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}


def linear_weight_grad(grad_rows: torch.Tensor, x_rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """grad_rows^T x_rows, (out, in). On a GPU it leaves the GEMM's float32 accumulator in ``dtype`` where that is
    float32 (no rounding to 16 bits and no kernel that converts); elsewhere it has the dtype of its factors."""
    if dtype is torch.float32 and x_rows.is_cuda and type(x_rows) is type(grad_rows) is torch.Tensor:
        if x_rows.dtype is grad_rows.dtype and x_rows.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(grad_rows.t(), x_rows, out_dtype=dtype)
    return torch.mm(grad_rows.t(), x_rows)


def rows_here(
    ids: torch.Tensor, num_rows: int, tp: TPLayout | None, padding_idx: int
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """(row numbers, which of ``ids`` other ranks have or None, number of the padding row or -1) in this rank's part, of
    ``num_rows`` rows, of an embedding table."""
    if tp is None or tp.placements != (Shard(0),):
        return ids, None, padding_idx
    start = tp.mesh.get_local_rank() * -(-tp.spec.shape[0] // tp.mesh.size())
    outside = (ids < start) | (ids >= start + num_rows)
    ids = (ids - start).masked_fill(outside, 0)
    return ids, outside, padding_idx - start if start <= padding_idx < start + num_rows else -1


def embedding_placement(tp: TPLayout, num_dims: int) -> Placement:
    """Of what a table with this layout gives, (..., dim), on its mesh of one axis."""
    if tp.placements == (Shard(0),):
        return Partial()
    return Shard(num_dims - 1) if tp.placements == (Shard(1),) else Replicate()


def look_up(ids: torch.Tensor, outside: torch.Tensor | None, table: torch.Tensor) -> torch.Tensor:
    """Rows of ``table``, zeros for those that other ranks have."""
    y = F.embedding(ids, table)
    return y if outside is None else y.masked_fill(outside.unsqueeze(-1), 0)


def embedding_grad(
    grad_y: torch.Tensor,
    ids: torch.Tensor,
    outside: torch.Tensor | None,
    num_rows: int,
    padding_idx: int,
    scale_by_freq: bool,
) -> torch.Tensor:
    """The gradient of a table of ``num_rows`` rows, (num_rows, dim)."""
    if outside is not None:
        grad_y = grad_y.masked_fill(outside.unsqueeze(-1), 0)
    return torch.ops.aten.embedding_dense_backward(grad_y, ids, num_rows, padding_idx, scale_by_freq)
