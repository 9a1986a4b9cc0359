"""Whole matrices, made of the pieces that ranks hold, and given back to them.

[Note: homes]
    Each matrix is computed with on one rank, its *home*. Work is dealt out by cost, the largest first, each to the rank
    that has least so far; replicas take their share. In one round a rank sends its pieces to the homes of some matrices
    (of equal pieces, which replicas hold, one is sent), and gets back its pieces of what they made of them: an all-to-all
    each way. The next round's matrices are on their way while this round's are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
        """The ranks that send their regions to rank ``to``: of those with equal ones the nearest."""
        nearest: dict[Region, int] = {}
        for rank, region in enumerate(self.regions):
            if region is not None:
                before = nearest.get(region)
                if before is None or rank ^ to < before ^ to:  # that shares the larger blocks of ranks with it
                    nearest[region] = rank
        return sorted(nearest.values())


def ranks_of(param: torch.Tensor) -> tuple[int, ...]:
    """The ranks that hold pieces of ``param``, ascending; none where it is this rank's own."""
    if not isinstance(param, DTensor) or param.device_mesh.size() == 1:
        return ()
    return tuple(sorted(param.device_mesh.mesh.flatten().tolist()))


def matrices_of(
    params: Sequence[torch.Tensor], group: dist.ProcessGroup | None, cost: Callable[[int, int], float]
) -> list[Matrix]:
    """The matrices of ``params``, all of which lie on the ranks of ``group``. Collective.

    Args:
        cost: of (rows, columns).

    Raises:
        ValueError: on all ranks: they do not have the same ``params``.
    """
    mine = [_place(param) for param in params]
    everyones: list = [mine]
    if group is not None:
        everyones = [None] * group.size()
        dist.all_gather_object(everyones, mine, group=group)
        first, *others = (len(theirs) for theirs in everyones)
        for other, number in enumerate(others, 1):
            if number != first:
                raise ValueError(
                    f"Muon: rank {dist.get_global_rank(group, 0)} has gradients of {first} parameters, rank "
                    f"{dist.get_global_rank(group, other)} of {number}: a step needs the same ones on all ranks of a mesh "
                    "(zeros where a rank does not use a weight)"
                )
    rank = 0 if group is None else group.rank()
    found = []
    for number, param in enumerate(params):
        places = [theirs[number] for theirs in everyones]
        *stack, num_rows, num_columns = param.shape
        for expert in range(stack[0]) if stack else [None]:
            regions = [_region(shape, offset, expert) for shape, offset in places]
            first = places[rank][1][0] if stack else 0
            matrix = Matrix(param, expert, (num_rows, num_columns), cost(num_rows, num_columns), regions, None, first)
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


class Round:
    """Some matrices, on their way to their homes and back. What goes where is worked out once; a step calls :meth:`send`,
    :meth:`compute`, :meth:`give_back` and :meth:`take`, in this order.

    Args:
        matrices: dealt out, or all without a home: each rank computes with all then.
        group: None: all are whole here.
        dtype: that travels and is computed in.
    """

    def __init__(
        self, matrices: list[Matrix], group: dist.ProcessGroup | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.matrices = matrices
        self._group, self._device, self._dtype = group, device, dtype
        self._rank, size = (0, 1) if group is None else (group.rank(), group.size())
        self._goes_back = any(matrix.home is not None for matrix in matrices)
        at = [[matrix for matrix in matrices if matrix.home in (None, rank)] for rank in range(size)]
        self._here = at[self._rank]
        # By rank: the matrices of which pieces are sent to it, and those of which pieces come from it.
        self._to = [[matrix for matrix in at[to] if self._rank in matrix.senders(to)] for to in range(size)]
        senders = [(matrix, matrix.senders(self._rank)) for matrix in self._here]
        self._from = [[matrix for matrix, sources in senders if source in sources] for source in range(size)]
        # The same for what comes back.
        self._back_to = [[matrix for matrix in self._here if matrix.regions[to] is not None] for to in range(size)]
        self._back_from = [[matrix for matrix in at[source] if self._has(matrix)] for source in range(size)]
        self._results: dict[Matrix, torch.Tensor] = {}
        self._coming: _Exchange | None = None
        self._returning: _Exchange | None = None

    def _has(self, matrix: Matrix) -> bool:
        return matrix.regions[self._rank] is not None

    def send(self, piece_of: Callable[[Matrix], torch.Tensor]) -> None:
        """Start bringing matrices home. ``piece_of`` tells this rank's piece of one."""
        pieces: dict[Matrix, torch.Tensor] = {}
        for matrix in (matrix for matrices in self._to for matrix in matrices):
            if matrix not in pieces:
                pieces[matrix] = piece_of(matrix).to(self._dtype).reshape(-1)
        parts = [pieces[matrix] for matrices in self._to for matrix in matrices]
        sent = [sum(matrix.regions[self._rank].numel for matrix in matrices) for matrices in self._to]
        received = [sum(m.regions[source].numel for m in matrices) for source, matrices in enumerate(self._from)]
        self._coming = self._exchange(parts, sent, received)

    def compute(self, function: Callable[[Matrix, torch.Tensor], torch.Tensor]) -> None:
        """``function`` of each matrix that is at home here, whole."""
        whole = {matrix: torch.empty(matrix.shape, dtype=self._dtype, device=self._device) for matrix in self._here}
        for source, flat in enumerate(self._coming.pieces()):
            regions = [matrix.regions[source] for matrix in self._from[source]]
            parts = flat.split([region.numel for region in regions])
            for matrix, region, part in zip(self._from[source], regions, parts):
                region.of(whole[matrix]).copy_(part.view(region.num_rows, region.num_columns))
        self._coming = None
        self._results = {matrix: function(matrix, tensor) for matrix, tensor in whole.items()}

    def give_back(self) -> None:
        """Start bringing every rank its pieces of the results."""
        if not self._goes_back:
            return
        regions = [[(matrix, matrix.regions[to]) for matrix in theirs] for to, theirs in enumerate(self._back_to)]
        parts = [region.of(self._results[matrix]).reshape(-1) for theirs in regions for matrix, region in theirs]
        sent = [sum(region.numel for _, region in theirs) for theirs in regions]
        received = [sum(matrix.regions[self._rank].numel for matrix in mine) for mine in self._back_from]
        self._returning = self._exchange(parts, sent, received)
        self._results = {}

    def take(self) -> Iterator[tuple[Matrix, torch.Tensor]]:
        """(matrix, this rank's piece of the result) of all that this rank has a piece of."""
        if not self._goes_back:
            results, self._results = self._results, {}
            yield from ((m, m.regions[self._rank].of(result)) for m, result in results.items() if self._has(m))
            return
        returned, self._returning = self._returning, None
        for mine, flat in zip(self._back_from, returned.pieces()):
            regions = [matrix.regions[self._rank] for matrix in mine]
            parts = flat.split([region.numel for region in regions])
            for matrix, region, part in zip(mine, regions, parts):
                yield matrix, part.view(region.num_rows, region.num_columns)

    def _exchange(self, parts: list[torch.Tensor], sent: list[int], received: list[int]) -> _Exchange:
        empty = torch.empty(0, dtype=self._dtype, device=self._device)
        sending = torch.cat([*parts, empty])
        if self._group is None:
            return _Exchange(sending, sending, received, None)
        receiving = empty.new_empty(sum(received))
        work = dist.all_to_all_single(receiving, sending, received, sent, group=self._group, async_op=True)
        return _Exchange(receiving, sending, received, work)
