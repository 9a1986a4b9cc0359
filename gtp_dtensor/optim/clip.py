"""The global gradient norm, each logical element counted once."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def _local_contribution(grad: torch.Tensor) -> torch.Tensor | None:
    """The elements of ``grad`` that this rank answers for: its shard, or nothing where another rank has the same."""
    if not isinstance(grad, DTensor):
        return grad
    coordinate = grad.device_mesh.get_coordinate()
    for axis, placement in enumerate(grad.placements):
        if placement.is_partial():
            raise ValueError(
                f"clip_grad_norm_: a gradient of shape {tuple(grad.shape)} has placement {placement} on mesh axis "
                f"{grad.device_mesh.mesh_dim_names}[{axis}]: reduce it first (finalize_grads)"
            )
        if placement.is_replicate() and coordinate[axis] != 0:
            return None
    return grad._local_tensor


def _partial_norm(grads: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Sum of |g|^p (for inf: the maximum of |g|) over this rank's elements, as one float64 value."""
    grads = [g for g in grads if g.numel()]
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    if math.isinf(norm_type):
        return torch.stack([g.abs().max() for g in grads]).max().double()
    norms = []
    for dtype in dict.fromkeys(g.dtype for g in grads):  # foreach wants one dtype; norms are in float32 at least
        same = [g for g in grads if g.dtype == dtype]
        # A CPU adds one element after the other: float32 sums of a large weight are off by 1e-5. A GPU sums in a tree.
        accumulate = torch.float64 if device.type == "cpu" else torch.promote_types(dtype, torch.float32)
        norms += torch._foreach_norm(same, norm_type, dtype=accumulate)
    return torch.stack([norm.double() for norm in norms]).pow(norm_type).sum()


def _the_mesh(parameters: list[torch.Tensor]) -> DeviceMesh | None:
    """The mesh that all DTensors among ``parameters`` lie on; None where there are none."""
    meshes = list(dict.fromkeys(p.device_mesh for p in parameters if isinstance(p, DTensor)))
    if len(meshes) > 1:
        raise NotImplementedError(
            f"clip_grad_norm_: parameters lie on {len(meshes)} meshes "
            f"({'; '.join(str(m.mesh_dim_names) for m in meshes)}); this release serves one"
        )
    return meshes[0] if meshes else None


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale gradients in place so that their global norm is at most ``max_norm``; returns the norm before scaling.

    Parameters may be plain tensors and DTensors. The norm is that of all logical gradients together, the same on
    all ranks: shards are summed over the axes that cut them, replicas are counted once, padding never.

    Args:
        parameters: parameters (or one), those without a gradient are passed over. Every rank of their meshes calls.
        max_norm: the bound; ``float("inf")`` only measures.
        norm_type: p of the p-norm, ``float("inf")`` for the largest magnitude.
        error_if_nonfinite: raise where the norm is not finite.

    Returns:
        A 0-dim tensor on the gradients' device, float32 (float64 where a gradient is).

    Raises:
        ValueError: a gradient is a DTensor with a pending (Partial) sum.
        NotImplementedError: gradients lie on more than one mesh.
        RuntimeError: the norm is not finite and ``error_if_nonfinite``.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    norm_type = float(norm_type)
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type={norm_type} must be positive")
    grads = [p.grad for p in parameters if p.grad is not None]
    mesh = _the_mesh(parameters)
    if not grads and mesh is None:
        return torch.tensor(0.0)
    first = next(iter(grads), parameters[0])
    device = first._local_tensor.device if isinstance(first, DTensor) else first.device
    sharded = [_local_contribution(g) for g in grads if isinstance(g, DTensor)]
    total = _partial_norm([g for g in sharded if g is not None], norm_type, device)
    op = dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM
    for axis in range(0 if mesh is None else mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(total, op=op, group=mesh.get_group(axis))
    plain = _partial_norm([g for g in grads if not isinstance(g, DTensor)], norm_type, device)
    total = torch.maximum(total, plain) if math.isinf(norm_type) else (total + plain).pow(1.0 / norm_type)
    if all(g.dtype != torch.float64 for g in grads):
        total = total.float()
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"clip_grad_norm_: the total norm of order {norm_type} is {total.item()}")
    if max_norm != math.inf:
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        local = [g._local_tensor if isinstance(g, DTensor) else g for g in grads]
        for dtype in {g.dtype for g in local}:
            torch._foreach_mul_([g for g in local if g.dtype == dtype], factor.to(dtype))
    return total
