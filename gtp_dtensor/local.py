"""The arithmetic of a use, on local tensors: what eager and compiled code share."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .layout import TPLayout, new_dtensor


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


def linear_on_tp(x: DTensor, tp: TPLayout, compute: Callable[[torch.Tensor, bool], torch.Tensor]) -> DTensor:
    """A linear without bias whose weight has the layout ``tp``, on local tensors, with what they owe each other.

    Args:
        x: (..., in) on the mesh of ``tp``, of one axis.
        compute: of (this rank's x, whether the ranks of a weight that is whole have different tokens, so that its gradient
            is a sum over them); gives this rank's (..., out).

    Returns:
        (..., out): cut along it, a partial sum, or with the tokens of x.
    """
    mesh, placement, features = tp.mesh, tp.placements[0], x.dim() - 1
    if placement == Shard(0):
        wanted, given, grad = Replicate(), Shard(features), Partial()
    elif placement == Shard(1):
        wanted, given, grad = Shard(features), Partial(), Shard(features)
    else:
        has_tokens = x.placements[0].is_shard() and x.placements[0] != Shard(features)
        wanted = given = grad = x.placements[0] if has_tokens else Replicate()
    local = x.redistribute(mesh, (wanted,)).to_local(grad_placements=(grad,))
    y = compute(local, placement.is_replicate() and wanted.is_shard())
    num_out = tp.spec.shape[0]
    if placement != Shard(0) or num_out % mesh.size() == 0:
        return DTensor.from_local(y, mesh, (given,), run_check=False)
    shape = torch.Size((*local.shape[:-1], num_out))
    stride = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    return DTensor.from_local(y, mesh, (given,), run_check=False, shape=shape, stride=tuple(stride))


def linear_weight_grad(
    grad_rows: torch.Tensor, x_rows: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """grad_rows^T x_rows, (out, in). On a GPU (which a meta tensor stands for) it leaves the GEMM's float32 accumulator in
    ``dtype`` where that is float32 (no rounding to 16 bits and no kernel that converts); elsewhere it has the dtype of its
    factors. Factors on a mesh give a product on it. Where ``out`` is of the product's dtype, and no factor is on a mesh, the
    product is written there."""
    if type(x_rows) is type(grad_rows) is torch.Tensor:
        return _local_weight_grad(grad_rows, x_rows, dtype, out)
    placement = None
    if type(x_rows) is type(grad_rows) is DTensor:
        given, read = grad_rows._spec, x_rows._spec
        if given.mesh == read.mesh and given.mesh.ndim == 1:
            placement = _WEIGHT_GRAD_PLACEMENTS.get((given.placements[0], read.placements[0]))
    if placement is None:
        return torch.mm(grad_rows.t(), x_rows)  # by DTensor's rule, which moves what has to move
    local = _local_weight_grad(grad_rows._local_tensor, x_rows._local_tensor, dtype)
    shape = torch.Size((grad_rows.shape[1], x_rows.shape[1]))
    meta = TensorMeta(shape, (shape[1], 1), local.dtype)
    return new_dtensor(local, DTensorSpec(given.mesh, (placement,), tensor_meta=meta))


# Of grad_rows^T x_rows on a mesh of one axis, where each rank's factors are all that its part needs.
_WEIGHT_GRAD_PLACEMENTS = {
    (Shard(1), Replicate()): Shard(0),
    (Replicate(), Shard(1)): Shard(1),
    (Shard(0), Shard(0)): Partial(),
    (Replicate(), Replicate()): Replicate(),
}


def _local_weight_grad(
    grad_rows: torch.Tensor, x_rows: torch.Tensor, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    if dtype is torch.float32 and (x_rows.is_cuda or x_rows.is_meta):
        if x_rows.dtype is grad_rows.dtype and x_rows.dtype in (torch.bfloat16, torch.float16):
            return torch.mm(grad_rows.t(), x_rows, out_dtype=dtype, out=out)
    if out is not None and out.dtype is not x_rows.dtype:
        out = None
    return torch.mm(grad_rows.t(), x_rows, out=out)


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


class Groups:
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

    def cast(self, x: torch.Tensor, dtype: torch.dtype, casts: bool) -> tuple[torch.Tensor, torch.dtype | None]:
        """(x, the dtype that the stack is cast to beyond ``dtype``, its own, or None); see cast_inputs."""
        if self.offsets is not None:
            return x.to(torch.bfloat16), torch.bfloat16
        x, _, dtype = cast_inputs(x, None, dtype, casts)
        return x, dtype

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
