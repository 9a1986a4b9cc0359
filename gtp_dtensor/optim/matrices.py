"""Whole matrices, made of the pieces that ranks hold, and given back to them.

[Note: homes]
    Each matrix is computed with on one rank, its *home*. Work is dealt out by cost, the largest first, each to the rank
    that has least so far; replicas take their share. In one round a rank sends its pieces to the homes of some matrices
    (of equal pieces, which replicas hold, one is sent), and gets back its pieces of what they made of them: an all-to-all
    each way. The next round's matrices are on their way while this round's are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class Region(NamedTuple):
    """A rank's part of a matrix."""

    row: int
    column: int
    num_rows: int
    num_columns: int

    @property
    def numel(self) -> int:
        return self.num_rows * self.num_columns

    def of(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix[self.row : self.row + self.num_rows, self.column : self.column + self.num_columns]


@dataclass(eq=False)
class Matrix:
    """One logical matrix: a parameter of two dims, or one expert of a stack.

    Attributes:
        param: it, or the stack.
        expert: its number in the stack; None: it is no stack.
        cost: of computing with it, in any unit.
        regions: of each rank of the group, None for what it has nothing of.
        home: the rank of the group that computes with it; None: all do.
    """

    param: torch.Tensor
    expert: int | None
    shape: tuple[int, int]
    cost: float
    regions: list[Region | None]
    home: int | None = None
    first_expert: int = 0  # of this rank's part of the stack

    def local_piece(self, local: torch.Tensor) -> torch.Tensor:
        """Of ``local``, this rank's part of the parameter, or of something like it: what belongs to this matrix."""
        return local if self.expert is None else local[self.expert - self.first_expert]

    def senders(self, to: int) -> list[int]:
        """The ranks that send their regions to rank ``to``: of equal ones the nearest."""
        nearest: dict[Region, int] = {}
        for rank, region in enumerate(self.regions):
            if region is not None:
                before = nearest.get(region)
                if before is None or abs(rank - to) < abs(before - to):
                    nearest[region] = rank
        return sorted(nearest.values())


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def ranks_of(param: torch.Tensor) -> tuple[int, ...]:
    """The ranks that hold pieces of ``param``, ascending; none where it is this rank's own."""
    if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
        return ()
    return tuple(sorted(param.device_mesh.mesh.flatten().tolist()))


def matrices_of(
    params: Sequence[torch.Tensor], group: dist.ProcessGroup | None, cost: Callable[[torch.Tensor, int, int], float]
) -> list[Matrix]:
    """The matrices of ``params``, all of which lie on the ranks of ``group``. Collective.

    Args:
        cost: of (parameter, rows, columns).
    """
    mine = [_place(param) for param in params]
    everyones: list = [mine]
    if group is not None:
        everyones = [None] * group.size()
        dist.all_gather_object(everyones, mine, group=group)
    rank = 0 if group is None else group.rank()
    found = []
    for number, param in enumerate(params):
        places = [theirs[number] for theirs in everyones]
        *stack, num_rows, num_columns = param.shape
        for expert in range(stack[0]) if stack else [None]:
            regions = [_region(shape, offset, expert) for shape, offset in places]
            first = places[rank][1][0] if stack else 0
            matrix = Matrix(
                param, expert, (num_rows, num_columns), cost(param, num_rows, num_columns), regions, None, first
            )
            found.append(matrix)
    return found


def _place(param: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(local shape, offset) of this rank's piece."""
    if not isinstance(param, DTensor):
        return tuple(param.shape), (0,) * param.dim()
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    if tuple(shape) != tuple(param._local_tensor.shape):
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} with placements {param.placements} on mesh axes "
            f"{param.device_mesh.mesh_dim_names}: this rank holds {tuple(param._local_tensor.shape)}, not {tuple(shape)}"
        )
    return tuple(shape), tuple(offset)


def _region(shape: tuple[int, ...], offset: tuple[int, ...], expert: int | None) -> Region | None:
    if expert is not None and not offset[0] <= expert < offset[0] + shape[0]:
        return None
    region = Region(*offset[-2:], *shape[-2:])
    return region if region.numel else None


def deal_out(matrices: Iterable[Matrix], num_ranks: int) -> list[float]:
    """Give each of ``matrices`` a home. Returns the cost that each rank has to bear."""
    loads = [0.0] * num_ranks
    for matrix in sorted(matrices, key=lambda matrix: -matrix.cost):
        matrix.home = min(range(num_ranks), key=loads.__getitem__)
        loads[matrix.home] += matrix.cost
    return loads


def rounds_of(matrices: Sequence[Matrix], num_ranks: int, most_elements: int) -> list[list[Matrix]]:
    """``matrices``, dealt out, in rounds: each rank computes with at most ``most_elements`` in one, or with one matrix."""
    queues: list[list[Matrix]] = [[] for _ in range(num_ranks)]
    for matrix in sorted(matrices, key=lambda matrix: -matrix.cost):
        queues[matrix.home or 0].append(matrix)
    rounds = []
    while any(queues):
        taken = []
        for queue in queues:
            num_elements = 0
            while queue and (not num_elements or num_elements + _numel(queue[0]) <= most_elements):
                num_elements += _numel(queue[0])
                taken.append(queue.pop(0))
        rounds.append(taken)
    return rounds


def _numel(matrix: Matrix) -> int:
    return matrix.shape[0] * matrix.shape[1]


@dataclass
class _Exchange:
    """An all-to-all in flight."""

    received: torch.Tensor
    sent: torch.Tensor  # must live as long
    splits: list[int]
    work: dist.Work | None

    def pieces(self) -> list[torch.Tensor]:
        """What arrived, by sender."""
        if self.work is not None:
            self.work.wait()
        return list(self.received.split(self.splits))


@dataclass
class Round:
    """Some matrices on their way to their homes and back.

    Args:
        group: None: all are whole here.
        dtype: that travels and is computed in.
    """

    matrices: list[Matrix]
    group: dist.ProcessGroup | None
    device: torch.device
    dtype: torch.dtype
    results: list[tuple[Matrix, torch.Tensor]] = field(default_factory=list)
    _coming: _Exchange | None = None
    _returning: _Exchange | None = None

    @property
    def _rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def _size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def _at(self, rank: int) -> list[Matrix]:
        """What is computed with at ``rank``."""
        return [matrix for matrix in self.matrices if matrix.home is None or matrix.home == rank]

    def send(self, piece_of: Callable[[Matrix], torch.Tensor]) -> None:
        """Start bringing matrices home. ``piece_of`` tells this rank's piece of one."""
        parts, splits = [], []
        for to in range(self._size):
            mine = [matrix for matrix in self._at(to) if self._rank in matrix.senders(to)]
            parts += [piece_of(matrix).to(self.dtype).reshape(-1) for matrix in mine]
            splits.append(sum(matrix.regions[self._rank].numel for matrix in mine))
        here = self._at(self._rank)
        received = [
            sum(matrix.regions[source].numel for matrix in here if source in matrix.senders(self._rank))
            for source in range(self._size)
        ]
        self._coming = self._exchange(parts, splits, received)

    def compute(self, function: Callable[[Matrix, torch.Tensor], torch.Tensor]) -> None:
        """``function`` of each matrix that is at home here, whole."""
        by_source = self._coming.pieces()
        taken = [0] * self._size
        for matrix in self._at(self._rank):
            whole = torch.empty(matrix.shape, dtype=self.dtype, device=self.device)
            for source in matrix.senders(self._rank):
                region = matrix.regions[source]
                part = by_source[source][taken[source] : taken[source] + region.numel]
                region.of(whole).copy_(part.view(region.num_rows, region.num_columns))
                taken[source] += region.numel
            self.results.append((matrix, function(matrix, whole)))
        self._coming = None

    def give_back(self) -> None:
        """Start bringing every rank its pieces of the results."""
        if all(matrix.home is None for matrix in self.matrices):
            return
        parts, splits = [], []
        for to in range(self._size):
            theirs = [(m.regions[to], result) for m, result in self.results if m.regions[to] is not None]
            parts += [region.of(result).reshape(-1) for region, result in theirs]
            splits.append(sum(region.numel for region, _ in theirs))
        received = [sum(region.numel for _, region in self._mine_of(source)) for source in range(self._size)]
        self._returning = self._exchange(parts, splits, received)
        self.results = []

    def _mine_of(self, source: int) -> list[tuple[Matrix, Region]]:
        pairs = [(matrix, matrix.regions[self._rank]) for matrix in self._at(source)]
        return [(matrix, region) for matrix, region in pairs if region is not None]

    def take(self) -> Iterable[tuple[Matrix, torch.Tensor]]:
        """(matrix, this rank's piece of the result) of all that this rank has a piece of."""
        if self._returning is None:
            for matrix, result in self.results:
                if matrix.regions[self._rank] is not None:
                    yield matrix, matrix.regions[self._rank].of(result)
            self.results = []
            return
        for source, flat in enumerate(self._returning.pieces()):
            start = 0
            for matrix, region in self._mine_of(source):
                yield matrix, flat[start : start + region.numel].view(region.num_rows, region.num_columns)
                start += region.numel
        self._returning = None

    def _exchange(self, parts: list[torch.Tensor], sent: list[int], received: list[int]) -> _Exchange:
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        sending = torch.cat([*parts, empty])
        if self.group is None:
            return _Exchange(sending, sending, received, None)
        receiving = empty.new_empty(sum(received))
        work = dist.all_to_all_single(receiving, sending, received, sent, group=self.group, async_op=True)
        return _Exchange(receiving, sending, received, work)
