"""How gradients travel through the ranks' inboxes: a ring of slots, and the pieces that fit into one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .fabric import Address, Lane, Shared

if TYPE_CHECKING:
    from ..layout import RowCut


@dataclass(slots=True)
class Slot:
    """Memory for one piece of a gradient from each peer, with the signals that order who writes and who reads it.

    Attributes:
        given: an event, after room was given under capture; ``is_captured``: whether in the capture that is going on.
    """

    memory: torch.Tensor  # ours: one part for each peer
    at: dict[int, Address]  # where our part of each peer's slot begins
    take_room: Callable[[Lane, str], None]
    tell: Callable[[Lane], None]
    take_parts: Callable[[Lane, str], None]
    give_room: Callable[[Lane], None]
    given: Any
    is_captured: bool = False
    views: dict[torch.dtype, torch.Tensor] = field(default_factory=dict)

    def viewed_as(self, dtype: torch.dtype) -> torch.Tensor:
        """``memory``, 1-D, in ``dtype``."""
        view = self.views.get(dtype)
        if view is None:
            view = self.views[dtype] = self.memory.view(dtype)
        return view


class Inbox:
    """A ring of slots in ``shared``, of which all ranks use the same one at the same time. ``part_bytes``: what one
    peer may send at once."""

    def __init__(self, shared: Shared, slots: list[Slot], part_bytes: int) -> None:
        self.shared = shared  # keeps the peers' memory mapped
        self.part_bytes = part_bytes
        self._slots = slots
        self._count = self._count_before = 0

    def next_slot(self) -> Slot:
        slot = self._slots[self._count % len(self._slots)]
        self._count += 1
        return slot

    def begin_capture(self) -> None:
        """Events of another capture mean nothing to this one."""
        self._count_before = self._count
        for slot in self._slots:
            slot.is_captured = False

    def abandon_capture(self) -> None:
        """It failed, on each rank perhaps at another place: all go on from the slot that it began with."""
        self._count = self._count_before


@dataclass(slots=True)
class Piece:
    """What goes through one slot: of each rank's rows the runs from ``first_run`` on, or a part of one run.

    Attributes:
        parts: of each rank, (first element in the unsharded gradient, elements of each run).
        first: the first element of the run.
    """

    first_run: int
    num_runs: int
    num_runs_in_all: int
    first: int
    run_stride: int
    parts: list[tuple[int, int]]


def pieces_of(cut: RowCut, shape: torch.Size, size: int, most: int) -> list[Piece]:
    """How a gradient of ``shape`` travels: in pieces of which no rank's part has more than ``most`` elements. The same
    on all ranks. A run is what is contiguous of a rank's rows: all of them, or an expert's where dim 1 is cut."""
    row = math.prod(shape[cut.dim + 1 :])
    num_runs, stride = math.prod(shape[: cut.dim]), cut.num_rows * row
    longest = cut.chunk * row
    at_once = min(num_runs, max(1, most // longest))
    pieces = []
    for first_run in range(0, num_runs, at_once):
        for first in range(0, longest, most):
            parts = []
            for rank in range(size):
                start, num = (number * row for number in cut.rows_of(rank))
                width = max(0, min(num, first + most) - first)
                parts.append((first_run * stride + start + first, width))
            runs = min(at_once, num_runs - first_run)
            pieces.append(Piece(first_run, runs, num_runs, first, stride, parts))
    return pieces


def place_at(owner: int, peer: int) -> int:
    """Which part of ``owner``'s slots is for what ``peer`` sends."""
    return peer if peer < owner else peer - 1
