"""Global gradient norm, clipping and zero counts, each logical element counted once.

[Note: each element once]
    Parameters may lie on several meshes. Of a gradient every rank takes its local shard; where an axis holds copies,
    only the first rank of the axis does. Sums over all axes of a mesh then count each element once. Meshes of the same
    ranks share these sums, and so do axes of the same ranks in different meshes. Which collectives are issued depends
    on the parameters alone, never on which of them have a gradient: so all ranks issue the same ones.

[Note: the last bit]
    Values of ranks are gathered and summed in the order of the axis, never reduced on the way: a reduction may add in
    another order in another group, so that ranks would disagree in the last bit, and a maximum may lose a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@dataclass
class _Holders:
    """Ranks that together hold some of the gradients.

    Attributes:
        ranks: all of them; none for plain tensors, which are this rank's own business.
        axes: groups over which sums visit each of ``ranks`` once; no entry for an axis of size 1.
        local: the elements of these gradients that this rank answers for.
    """

    ranks: frozenset[int]
    axes: list[dist.ProcessGroup]
    local: list[torch.Tensor] = field(default_factory=list)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of ``tensor``, complete."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _as_list(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters, each once: a tied one may be named twice."""
    return [parameters] if isinstance(parameters, torch.Tensor) else list(dict.fromkeys(parameters))


def _spans(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` joins this rank with others (torchtitan gives axes of size 1 the "fake" backend)."""
    return group.size() > 1 and dist.get_backend(group) != "fake"


def _mesh_axes(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    groups = (mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1)
    return [group for group in groups if _spans(group)]


def _owned(grad: DTensor, caller: str) -> torch.Tensor | None:
    """The elements of ``grad`` that this rank answers for: its shard, or nothing where another rank has the same."""
    mesh = grad.device_mesh
    coordinate = mesh.get_coordinate()
    if any(placement.is_partial() for placement in grad.placements):
        axis = next(axis for axis, placement in enumerate(grad.placements) if placement.is_partial())
        raise ValueError(
            f"{caller}: a gradient of shape {tuple(grad.shape)} has placement {grad.placements[axis]} on mesh axis "
            f"{(mesh.mesh_dim_names or range(mesh.ndim))[axis]!r}: reduce it first (finalize_grads)"
        )
    is_copy = any(placement.is_replicate() and place for placement, place in zip(grad.placements, coordinate))
    return None if is_copy else local_of(grad)


def _check_grad(parameter: torch.Tensor, caller: str) -> None:
    """A gradient that is not where its parameter is would be summed over the wrong ranks."""
    grad = parameter.grad
    mesh, grad_mesh = (t.device_mesh if isinstance(t, DTensor) else None for t in (parameter, grad))
    if mesh != grad_mesh:
        raise ValueError(
            f"{caller}: a parameter of shape {tuple(parameter.shape)} is {_where(mesh)}, its gradient {_where(grad_mesh)}: "
            "put both on one mesh"
        )


def _where(mesh: DeviceMesh | None) -> str:
    return "a plain tensor" if mesh is None else f"on mesh axes {mesh.mesh_dim_names} of sizes {tuple(mesh.shape)}"


def _holders(parameters: list[torch.Tensor], caller: str) -> list[_Holders]:
    """Parameters' gradients by the ranks that hold them together, in the order in which these first occur."""
    by_mesh: dict[DeviceMesh | None, _Holders] = {}
    by_ranks: dict[frozenset[int], _Holders] = {}
    for parameter in parameters:
        mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
        if mesh not in by_mesh:
            if mesh is not None and mesh.get_coordinate() is None:
                raise ValueError(
                    f"{caller}: a parameter of shape {tuple(parameter.shape)} is {_where(mesh)}, to which rank "
                    f"{dist.get_rank()} does not belong: pass the parameters of this rank"
                )
            ranks = frozenset(() if mesh is None else mesh.mesh.flatten().tolist())
            axes = [] if mesh is None else _mesh_axes(mesh)
            holders = by_mesh[mesh] = by_ranks.setdefault(ranks, _Holders(ranks, axes))
            holders.axes = min(holders.axes, axes, key=len)
        if parameter.grad is not None:
            _check_grad(parameter, caller)
            local = _owned(parameter.grad, caller) if mesh is not None else local_of(parameter.grad)
            if local is not None and local.numel():
                by_mesh[mesh].local.append(local)
    return list(by_ranks.values()) or [_Holders(frozenset(), [])]


def _check_groups(groups: Sequence[dist.ProcessGroup], caller: str) -> None:
    for group in groups:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"{caller}: rank {dist.get_rank()} is not a member of one of the process groups in groups="
            )
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"{caller}: groups= takes process groups (mesh.get_group()), got {type(group).__name__}")


def _device(parameters: list[torch.Tensor], groups: Sequence[dist.ProcessGroup], caller: str) -> torch.device:
    devices = dict.fromkeys(local_of(parameter).device for parameter in parameters)
    if len(devices) > 1:
        raise ValueError(f"{caller}: parameters are on several devices: {', '.join(map(str, devices))}")
    if devices:
        return next(iter(devices))
    # A rank without parameters communicates on the device that the others use; nothing tells but the groups' backend.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or all(dist.get_backend(group) in ("gloo", "fake") for group in groups):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


Combine = Callable[[torch.Tensor], torch.Tensor]  # (n, k) -> (k,)


def _gather(values: list[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    """k scalars -> (group size, k): those of all ranks, in the order of the group."""
    mine = torch.stack(values)
    everyones = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(everyones, mine, group=group)
    return torch.stack(everyones)


def _over_ranks(
    values: list[torch.Tensor], holders: list[_Holders], groups: Sequence[dist.ProcessGroup], combine: Combine
) -> torch.Tensor:
    """One value over all gradients from this rank's ``values``, one for each of ``holders``."""
    axes: dict[tuple[int, ...], tuple[dist.ProcessGroup, list[int]]] = {}
    for index, one in enumerate(holders):
        for group in one.axes:
            axes.setdefault(tuple(dist.get_process_group_ranks(group)), (group, []))[1].append(index)
    for group, indices in axes.values():
        combined = combine(_gather([values[index] for index in indices], group))
        for index, value in zip(indices, combined.unbind()):
            values[index] = value
    rank = dist.get_rank() if dist.is_initialized() else 0
    for group in filter(_spans, groups):
        members = set(dist.get_process_group_ranks(group))
        # All ranks of a mesh have its value by now: one of those in the group brings it in.
        speaks = [min(members & (one.ranks | {rank})) == rank for one in holders]
        brought = [value if own else torch.zeros_like(value) for value, own in zip(values, speaks)]
        values = [combine(_gather([_combined(brought, combine)], group))[0]]
        holders = [_Holders(frozenset(), [])]
    return _combined(values, combine)


def _combined(values: list[torch.Tensor], combine: Combine) -> torch.Tensor:
    return combine(torch.stack(values).unsqueeze(1))[0]


def _power_sum(grads: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """Sum of |g|^p (for inf: the maximum of |g|) over all elements, one float64 value."""
    if not grads:
        return torch.zeros((), dtype=torch.float64, device=device)
    norms = []
    for dtype in dict.fromkeys(g.dtype for g in grads):  # foreach wants one dtype; norms are in float32 at least
        same = [g for g in grads if g.dtype == dtype]
        # A CPU adds one element after the other: float32 sums of a large weight are off by 1e-5. A GPU sums in a tree.
        accumulate = torch.float64 if device.type == "cpu" else torch.promote_types(dtype, torch.float32)
        norms += torch._foreach_norm(same, norm_type, dtype=accumulate)
    norms = torch.stack([norm.double() for norm in norms])
    return norms.amax() if math.isinf(norm_type) else norms.pow(norm_type).sum()


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    groups: Sequence[dist.ProcessGroup] = (),
) -> torch.Tensor:
    """Scale gradients in place so that their global norm is at most ``max_norm``; returns the norm before scaling.

    Parameters may be plain tensors and DTensors on any meshes. The norm is that of all logical gradients together,
    equal to the last bit on all ranks: shards are summed over the axes that cut them, replicas are counted once,
    padding never. A plain tensor, and a DTensor on a mesh of fewer ranks than others, is taken to have equal copies on
    all other ranks that ``groups`` does not name. Collective over the meshes and ``groups``; one gather of a few bytes
    for each of their axes larger than 1, none of which makes the host wait on a GPU.

    Args:
        parameters: parameters (or one), those without a gradient are passed over. Every rank of their meshes calls with
            its own, in one order.
        max_norm: the bound; ``float("inf")`` only measures.
        norm_type: p of the p-norm, ``float("inf")`` for the largest magnitude.
        error_if_nonfinite: raise where the norm is not finite (the host waits for the norm). Otherwise a norm that is
            not finite makes gradients NaN, as torch's function does, unless ``max_norm`` is infinite.
        groups: further process groups over whose ranks other parameters of the same model live: pipeline stages, or
            ranks of another mesh, of one of each or of all of them. Several groups have to form a grid. All their ranks
            call, those without parameters too.

    Returns:
        A 0-dim tensor on the parameters' device, float32; float64 where one of this rank's parameters is.

    Raises:
        ValueError: a gradient is a DTensor with a pending (Partial) sum or on another mesh than its parameter; a group
            does not contain this rank; ``norm_type`` is not positive; ``max_norm`` negative.
        RuntimeError: the norm is not finite and ``error_if_nonfinite``; on all ranks alike.
    """
    caller = "clip_grad_norm_"
    norm_type, max_norm = float(norm_type), float(max_norm)
    if not norm_type > 0:
        raise ValueError(f"{caller}: norm_type={norm_type} must be positive")
    if not max_norm >= 0:
        raise ValueError(f"{caller}: max_norm={max_norm} must not be negative")
    parameters = _as_list(parameters)
    holders = _holders(parameters, caller)
    _check_groups(groups, caller)
    device = _device(parameters, groups, caller)
    values = [_power_sum(one.local, norm_type, device) for one in holders]
    is_max = math.isinf(norm_type)
    total = _over_ranks(values, holders, groups, (lambda t: t.amax(0)) if is_max else (lambda t: t.sum(0)))
    if not is_max:
        total = total.pow(1.0 / norm_type)
    if all(parameter.dtype != torch.float64 for parameter in parameters):
        total = total.float()
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(f"{caller}: the total norm of order {norm_type} is {total.item()}")
    if max_norm != math.inf:
        _scale_grads(parameters, torch.clamp(max_norm / (total + 1e-6), max=1.0))
    return total


def _scale_grads(parameters: list[torch.Tensor], factor: torch.Tensor) -> None:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            local = local_of(parameter.grad)
            by_dtype.setdefault(local.dtype, []).append(local)
    for dtype, grads in by_dtype.items():
        torch._foreach_mul_(grads, factor.to(dtype))


@torch.no_grad()
def count_zero_grads(
    parameters: torch.Tensor | Iterable[torch.Tensor], groups: Sequence[dist.ProcessGroup] = ()
) -> torch.Tensor:
    """How many elements of all logical gradients are exactly zero (-0.0 is), each counted once, padding never.

    A parameter without a gradient has no elements to count: it adds nothing, though an optimizer may move it by weight
    decay. Collective, with the same collectives, as :func:`clip_grad_norm_`.

    Args:
        parameters, groups: as for :func:`clip_grad_norm_`.

    Returns:
        A 0-dim int64 tensor on the parameters' device, equal on all ranks.

    Raises:
        ValueError: as :func:`clip_grad_norm_`.
    """
    caller = "count_zero_grads"
    parameters = _as_list(parameters)
    holders = _holders(parameters, caller)
    _check_groups(groups, caller)
    device = _device(parameters, groups, caller)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    values = [sum(((g == 0).sum() for g in one.local), zero) for one in holders]
    return _over_ranks(values, holders, groups, lambda t: t.sum(0))
