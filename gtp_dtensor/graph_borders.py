"""What crosses the borders of CUDA graphs that hold parts of a step: gathered weights, and gradients to be reduced.

[Note: borders of graphs]
    Gathers. The graph of one block also gathers what the next one begins with, as far ahead as eager code would, into memory
    that both know (:class:`BorderMemory`), and ends when it is there: so the next graph, which reads it, waits for nothing.
    That holds where the one was replayed right before the other, with no other graph between, and the weight was not
    written since. Elsewhere the gather is made again, in eager code, before the replay that reads it: right, counted, late.
    Eager code and graphs never gather for each other.

    Reductions. What a graph of a backward computes of weights' gradients goes into a ring of slots
    (:class:`GradientRing`), memory outside of that of graphs; their reductions are a graph of their own, replayed on
    another stream after it. The next graph does not wait for that, but for the readers of the slots that it writes.
    Graphs of reductions run one after the other, in memory that no other graphs use, so what they run beside cannot meet
    them. Whoever ends the backward waits for them all.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn as nn

from .graph_checks import GraphError
from .schedule import Kind
from .transport import Transfer
from .weight import Lease, LeaseState, ShardedWeight

if TYPE_CHECKING:
    from .graph_capture import Mark

Buffers = tuple[torch.Tensor, ...]


# ---- gathers


class _Place:
    """Memory for one gathered weight.

    Attributes:
        is_left: a graph gathers into it, for one that is not captured yet.
        lease: that holds it, in the capture of the graph that reads it.
    """

    def __init__(self, buffers: Buffers) -> None:
        self.buffers = buffers
        self.is_left = True
        self.lease: Callable[[], Lease | None] = lambda: None

    @property
    def is_free(self) -> bool:
        lease = self.lease()
        return not self.is_left and (lease is None or lease.state is LeaseState.ENDED)


class BorderMemory:
    """Gathered weights that graphs leave to each other: memory that stays, used again once its reader is done with it."""

    def __init__(self) -> None:
        self._places: dict[tuple, list[_Place]] = {}

    def take(self, weight: ShardedWeight, kind: Kind) -> _Place:
        """Memory for a gather of ``weight`` for a use of ``kind``, within a capture."""
        shapes = weight.gathered_shapes(kind)
        places = self._places.setdefault(shapes, [])
        for place in places:
            if place.is_free:
                place.is_left = True
                return place
        device = weight.param.device
        places.append(_Place(tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)))
        return places[-1]

    def buffers(self) -> list[torch.Tensor]:
        """All of it."""
        return [buffer for places in self._places.values() for place in places for buffer in place.buffers]


class Handover:
    """What one graph gathers for the next one.

    Args:
        weights: that it may gather.
    """

    def __init__(self, memory: BorderMemory, weights: Iterable[ShardedWeight]) -> None:
        self._memory = memory
        # On an axis of size 1 there is nothing to gather; compiled code keeps what it is given.
        self.weights = frozenset(w for w in weights if w.runtime.transport.size > 1 and not w.runtime.is_compiled)
        self._left: dict[ShardedWeight, tuple[Kind, _Place]] = {}
        self._generations: dict[ShardedWeight, int] = {}

    def __len__(self) -> int:
        return len(self._left)

    def room_for(self, weight: ShardedWeight, kind: Kind) -> Buffers:
        """Where a gather of ``weight`` goes, in the capture of the graph that makes it."""
        if weight not in self._left:
            self._left[weight] = kind, self._memory.take(weight, kind)
        return self._left[weight][1].buffers

    def close(self) -> None:
        """At the end of that capture: what was gathered and is still wanted is there for the next graph."""
        for weight, (_, place) in list(self._left.items()):
            lease, weight.next_lease = weight.next_lease, None
            if lease is None:  # predicted, and then no more
                del self._left[weight]
                place.is_left = False
            else:
                lease.leave()

    def leases(self) -> list[Lease]:
        """What was gathered, in the capture of the graph that reads it."""
        found = []
        for weight, (kind, place) in self._left.items():
            quantized = weight.quantized
            view = None if quantized is None else quantized.view_of(kind)
            buffer = place.buffers[0] if quantized is None else place.buffers
            lease = Lease(weight, kind, buffer, Transfer.done(*place.buffers), True, view)
            place.is_left, place.lease = False, weakref.ref(lease)
            found.append(lease)
        return found

    def note_gathered(self) -> None:
        """The graph that gathers was replayed."""
        self._generations = {weight: weight.generation for weight in self._left}

    def complete(self, is_next: bool) -> int:
        """Before a replay of the graph that reads: gather what is not there. ``is_next``: the one that gathers was the last
        to be replayed. Returns how many that were."""
        num_late = 0
        for weight, (kind, place) in self._left.items():
            if is_next and self._generations.get(weight) == weight.generation:
                continue
            weight.counters.num_on_demand_gathers += 1
            num_late += 1
            lease = weight.gather(kind, False, into=place.buffers)
            lease.leave()
        return num_late


# ---- reductions


class Slot:
    """Memory for one unsharded gradient.

    Attributes:
        memory: what is reduced: TP-local shape, perhaps with rows of zeros behind it.
        reader: the reductions that were given last to read it.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self.memory = memory
        self.reader: PendingReplay | None = None


class GradientRing:
    """Slots for the gradients of weights that play the same role in their blocks: ``graph_wgrad_ring_size`` for each role."""

    def __init__(self) -> None:
        self._slots: dict[tuple, list[Slot]] = {}
        self._num_given: dict[tuple, int] = {}

    @staticmethod
    def _key(weight: ShardedWeight) -> tuple:
        return weight.runtime, weight.role, weight.buffer_shape, weight.reduce_dtype

    def allocate(self, weights: Iterable[ShardedWeight]) -> None:
        """Before any capture, so that no graph has this memory."""
        for weight in weights:
            key = self._key(weight)
            if key not in self._slots:
                reducer, dtype = weight.runtime.reducer, weight.reduce_dtype
                size = weight.runtime.config.graph_wgrad_ring_size
                self._slots[key] = [Slot(reducer.gradient_buffer(weight, dtype)) for _ in range(size)]
                self._num_given[key] = 0

    def next_slot(self, weight: ShardedWeight) -> Slot | None:
        """For the next gradient of such a weight; None: nothing was allocated for such ones."""
        key = self._key(weight)
        if key not in self._slots:
            return None
        slots, number = self._slots[key], self._num_given[key]
        self._num_given[key] = number + 1
        return slots[number % len(slots)]

    def slots(self) -> list[Slot]:
        """All."""
        return [slot for slots in self._slots.values() for slot in slots]


class RingWriter:
    """Where the graph of one backward puts gradients of weights.

    Attributes:
        fqn: of its block.
        entries: (weight, leaf that the forward read, slot), in this order.
    """

    def __init__(self, ring: GradientRing, fqn: str) -> None:
        self._ring, self.fqn = ring, fqn
        self.entries: list[tuple[ShardedWeight, nn.Parameter, Slot]] = []
        self._num_put = 0
        self._coming: Slot | None = None

    def begin(self) -> None:
        """A capture begins."""
        self._num_put, self._coming = 0, None

    @property
    def slots(self) -> list[Slot]:
        return [slot for *_, slot in self.entries]

    def room_for(self, weight: ShardedWeight) -> torch.Tensor:
        """Where the gradient that is computed next, of ``weight``, may be written, TP-local shape: :meth:`put` takes it."""
        return _rows(self._slot(weight), weight)

    def put(self, weight: ShardedWeight, param: nn.Parameter, grad: torch.Tensor, returned: bool) -> None:
        """Write the gradient, TP-local shape or as it is sent, to its slot, if it is not there already. ``returned``:
        autograd itself wants it.

        Raises:
            GraphError: it does; or another gradient of this graph is there; or it has no slot.
        """
        if returned:
            raise GraphError(f"{weight.fqn}: autograd asks for its gradient, which a graphed block does not bring by")
        slot = self._slot(weight)
        if self._num_put == len(self.entries):
            self.entries.append((weight, param, slot))
        self._num_put, self._coming = self._num_put + 1, None
        memory = slot.memory
        into = memory if grad.shape == memory.shape else _rows(slot, weight)
        if into.data_ptr() != grad.data_ptr():
            into.copy_(grad)

    def _slot(self, weight: ShardedWeight) -> Slot:
        if self._num_put < len(self.entries):  # the same as in the capture before
            return self.entries[self._num_put][2]
        if self._coming is None:
            self._coming = self._ring.next_slot(weight)
            if self._coming is None:
                raise GraphError(
                    f"{weight.fqn}: trained by a use in {self.fqn}, which is graphed and does not own it: name a module that "
                    "owns it in modules=, or leave this one out"
                )
            if self._coming in self.slots:
                self._refuse(weight)
        return self._coming

    def _refuse(self, weight: ShardedWeight) -> None:
        alike = [other.fqn for other, *_ in self.entries if other.role == weight.role]
        size = weight.runtime.config.graph_wgrad_ring_size
        raise GraphError(
            f"{weight.fqn}: its gradient, of shape {tuple(weight.tp_local_shape)}, would overwrite that of {alike[0]} in the "
            f"graph of {self.fqn}'s backward, before it is reduced: GTPConfig(graph_wgrad_ring_size={size}) makes {size} "
            f"slots for weights of this role. Make it {len(alike) + 1} or more, or name smaller modules in modules="
        )


def _rows(slot: Slot, weight: ShardedWeight) -> torch.Tensor:
    """Without padding."""
    return weight.cut.first(slot.memory, weight.cut.num_rows)


class PendingReplay:
    """Reductions of one block that were replayed, and what waits for their end; as those of :mod:`.pending` are.

    Attributes:
        mark: their end.
        weights: whose gradients they bring.
        num_gradients: how many.
        is_given: and nobody is known to have waited.
    """

    def __init__(self, mark: Mark, weights: list[ShardedWeight]) -> None:
        self.mark, self.num_gradients = mark, len(weights)
        self.weights = frozenset(weights)
        self.is_given = False

    def wait(self) -> None:
        """What the current stream does next comes after them."""
        if self.is_given:
            self.mark.wait()

    def release(self) -> None:
        """:meth:`wait`, by the stream that all others of the model are ordered by."""
        self.wait()
        self.is_given = False

    abandon = release

    def discard(self) -> None:
        """Replays are no part of a capture."""
