"""Whether the layout of a built rank is a layout: every logical element owned once, by DTensor's rule and by the
library's."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from gtp_dtensor.members import model_members
from gtp_dtensor.weight import ShardedWeight

Box = tuple[tuple[int, int], ...]  # of each dim, (first, number)


@dataclass
class LayoutReport:
    """What was checked.

    Attributes:
        num_weights: sharded parameters.
        num_whole: parameters that every rank of the data axes has.
        num_owners: ranks whose parts were put together, of the weight with most of them.
        faults: one line for each weight that is not owned once.
    """

    num_weights: int = 0
    num_whole: int = 0
    num_owners: int = 0
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [
            f"layout: {self.num_weights} sharded weights, parts of up to {self.num_owners} ranks put together; "
            f"{self.num_whole} parameters are whole on each gtp rank",
            *(f"FAULT {fault}" for fault in self.faults),
        ]
        return "\n".join(lines if self.faults else [*lines, "every logical element is owned once"])


def check_layout(parts: list[nn.Module]) -> LayoutReport:
    """Puts together what all ranks of the storage meshes own of each parameter of these model parts."""
    report = LayoutReport()
    known: dict[tuple, list[str]] = {}
    for member in dict.fromkeys(member for part in parts for member in model_members(part)):
        param = member.param
        if isinstance(member, ShardedWeight):
            report.num_weights += 1
        else:
            report.num_whole += 1
        mesh = param.device_mesh
        key = tuple(param.shape), tuple(mesh.shape), tuple(map(str, param.placements))
        if key not in known:
            known[key] = list(_faults(param))
        report.num_owners = max(report.num_owners, _num_owners(param))
        faults = [*known[key], *_own_faults(param)]
        if isinstance(member, ShardedWeight):
            faults += _cut_faults(member)
        report.faults += [f"{member.fqn} {tuple(param.shape)}: {fault}" for fault in faults]
    return report


def _num_owners(param: DTensor) -> int:
    sizes = (param.device_mesh.size(axis) for axis, at in enumerate(param.placements) if at.is_shard())
    return prod(sizes)


def owned_box(shape: tuple[int, ...], sizes: tuple[int, ...], placements: tuple, coordinate: tuple[int, ...]) -> Box:
    """What the rank at ``coordinate`` of a mesh owns: each ``Shard`` cuts what those before it left, in chunks of which
    the last may be smaller or empty."""
    box = [(0, length) for length in shape]
    for size, placement, place in zip(sizes, placements, coordinate):
        if isinstance(placement, Shard):
            first, length = box[placement.dim]
            chunk = -(-length // size)
            start = min(place * chunk, length)
            box[placement.dim] = first + start, min(chunk, length - start)
    return tuple(box)


def _faults(param: DTensor) -> Iterator[str]:
    """Of all ranks: elements that nobody owns or several do."""
    mesh, placements = param.device_mesh, param.placements
    sizes = tuple(mesh.shape)
    ranges = [range(size if at.is_shard() else 1) for size, at in zip(sizes, placements)]  # copies: the first one
    boxes = [owned_box(param.shape, sizes, placements, place) for place in itertools.product(*ranges)]
    edges = [
        sorted({0, n, *(b[dim][0] for b in boxes), *(sum(b[dim]) for b in boxes)}) for dim, n in enumerate(param.shape)
    ]
    owners = torch.zeros([len(edge) - 1 for edge in edges], dtype=torch.int64, device="cpu")
    for box in boxes:
        if all(length for _, length in box):
            cells = (slice(bisect_left(e, first), bisect_left(e, first + n)) for e, (first, n) in zip(edges, box))
            owners[tuple(cells)] += 1
    for count, problem in ((0, "owned by nobody"), (2, "owned more than once")):
        wrong = (owners == 0) if count == 0 else (owners >= 2)
        if wrong.any():
            place = tuple(edge[at] for edge, at in zip(edges, wrong.nonzero()[0].tolist()))
            yield f"element {place} is {problem} on a mesh of {sizes} with {placements}"


def _own_faults(param: DTensor) -> Iterator[str]:
    """Of this rank: what DTensor says, and what is there."""
    mesh = param.device_mesh
    box = owned_box(param.shape, tuple(mesh.shape), param.placements, tuple(mesh.get_coordinate()))
    expected = tuple(n for _, n in box)
    shape, offset = compute_local_shape_and_global_offset(param.shape, mesh, param.placements)
    found = tuple(param._local_tensor.shape)
    if not tuple(shape) == found == expected:
        yield f"this rank holds {found}, by DTensor's rule it is {tuple(shape)}, by ours {expected}"
        return
    starts = tuple(first for first, _ in box)
    if prod(found) and tuple(offset) != starts:
        yield f"this rank's part begins at {tuple(offset)} by DTensor's rule, at {starts} by ours"


def _cut_faults(weight: ShardedWeight) -> Iterator[str]:
    """Between the library's cuts, by which rows travel, and the placements, by which they are stored."""
    cut, replicas = weight.cut, weight.replica_cut
    sharding = weight.runtime.domain.shard_transport
    for rank in range(cut.axis_size):
        first, length = cut.rows_of(rank)
        chunk = -(-cut.num_rows // cut.axis_size)
        start = min(rank * chunk, cut.num_rows)
        if (first, length) != (start, min(chunk, cut.num_rows - start)):
            yield f"gtp rank {rank} gathers rows {first} to {first + length} of dim {cut.dim}, and stores others"
            return
    stored = tuple(weight.param._local_tensor.shape)
    expected = tuple(weight.shard_shape if replicas is None else weight.stored_shape)
    if stored != expected:
        yield f"this rank stores {stored} of its shard, and sends {expected} (replicas: {sharding and sharding.size})"
