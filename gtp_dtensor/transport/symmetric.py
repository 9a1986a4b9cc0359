"""Gathers and reductions through memory that all ranks of an axis have mapped, moved by copy engines.

[Note: gathers and fences]
    Compute shards live in shared memory. A gather is a copy from each peer's, on a stream of its own: no kernel, no
    handshake. Shards change once a step, and two fences go around that: before the first one all ranks have finished
    reading what is about to be rewritten; after the second one all have rewritten. A fence is one signal to each peer
    and one wait for each, on streams; the host never waits.

[Note: reductions]
    A rank writes each peer's rows of its unsharded gradient into that peer's inbox, and sums what arrives in its own
    with its own rows, which are read where they lie: in float32, in rank order, scaled, into the gradient itself. An
    inbox is a ring of slots. A sender waits until the slot it is about to fill was summed, a receiver until it was
    filled.

[Note: why this cannot lock up]
    All ranks enqueue the same operations in the same order, and the signal that a wait is for is enqueued at the same
    or an earlier place in that order, before the wait. So the rank that is farthest behind can always go on, even where
    all streams of a device share one hardware queue. It rests on all ranks running the same program: a rank that alone
    rewrites its shards waits for the others until the watchdog ends it.

    In a CUDA graph the host's order is gone, and any order that agrees with the graph's edges may be the queue's. So
    there is an edge from each signal to the wait for the peers' signals of that place, also where streams do not need
    one: from telling of parts to waiting for parts, and under capture from giving room in a slot to waiting for room in
    it.

[Note: replays]
    A graph begins with all side streams waiting for the one that captures, and ends with that one waiting for them. What
    runs before a replay is ordered before it the same way, and what runs after it after; of a graph that holds gathers only,
    or reductions only, what is of that kind. Gathers need nothing before them but that shards were rewritten. Words are as
    they were before when a replay ends, and replays that hold signals are ordered by the side streams that they wait for: so
    one of reductions may run beside one of gathers. The watchdog knows replays, not the waits in them.

Signals are words of shared memory, 0 or 1: one side waits for a value and sets the other one, in eager code and under
capture alike. The streams of one rank are ordered by events, never by words only.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .collective import CollectiveTransport, Traffic, group_timeout
from .fabric import Address, Fabric, Lane, Shared, Sum
from .inbox import Inbox, Piece, Slot, pieces_of, place_at
from .watchdog import NUM_KINDS, Watchdog

if TYPE_CHECKING:
    from ..weight import ShardedWeight

_ALIGNMENT = 512  # bytes
_CONTROL_BYTES = 64 << 10
_MOST_SLOTS = 64
_MOST_SLOT_BYTES = 256 << 20  # larger gradients travel in pieces
SUMMED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class PeerReads:
    """A gather in flight; the protocol of :class:`~.collective.Transfer`. Its events are used again."""

    __slots__ = ("_transport", "_ready", "_home", "_is_done", "tensors")

    def __init__(self, transport: SymmetricTransport, ready: Any, home: Lane, tensors: tuple) -> None:
        self._transport = transport
        self._ready = ready
        self._home = home
        self._is_done = False
        self.tensors = tensors

    def wait(self) -> None:
        """Order what the current stream does next after the gather."""
        fabric = self._transport.fabric
        fabric.wait(fabric.current(), self._ready)
        self._is_done = True

    def release(self) -> None:
        """Its readers are enqueued on the current stream: the memory may be reused by what the stream that it was
        allocated on does next."""
        if self._ready is None:
            return
        if not self._is_done:
            self.wait()
        transport, ready, self._ready = self._transport, self._ready, None
        fabric = transport.fabric
        now = fabric.current()
        if now != self._home:
            fabric.wait(self._home, ready)
            fabric.record(ready, now)  # its waits are enqueued: it is free for this
            fabric.wait(self._home, ready)
        self.tensors = ()
        transport.free_events.append(ready)

    def abandon(self) -> None:
        """Who holds this dies, and perhaps nobody waited."""
        if self._ready is not None:
            self._transport.fabric.wait(self._home, self._ready)
            self._transport.free_events.append(self._ready)
            self._ready = None

    def discard(self) -> None:
        """See :meth:`~.collective.Transfer.discard`."""
        if self._ready is not None:
            self._transport.free_events.append(self._ready)
            self._ready, self.tensors = None, ()


class Ticket:
    """A reduction in flight. ``home``: the stream that its memory was allocated on."""

    __slots__ = ("_transport", "_done", "_home")

    def __init__(self, transport: SymmetricTransport, done: Any, home: Lane) -> None:
        self._transport = transport
        self._done = done
        self._home = home

    def wait(self) -> None:
        """Order the current stream after the sum, and after all that read the gradient."""
        if self._done is not None:
            fabric = self._transport.fabric
            fabric.wait(fabric.current(), self._done)

    def release(self) -> None:
        """:meth:`wait`, for the last time: the memory may be reused by what the stream that it was allocated on does
        next."""
        if self._done is None:
            return
        fabric = self._transport.fabric
        now, done, self._done = fabric.current(), self._done, None
        fabric.wait(now, done)
        if now != self._home:
            fabric.record(done, now)  # after what reads the sum
            fabric.wait(self._home, done)
        self._transport.free_events.append(done)

    def discard(self) -> None:
        """See :meth:`~.collective.Transfer.discard`."""
        if self._done is not None:
            self._transport.free_events.append(self._done)
            self._done = None


class Take:
    """Waits for words of all peers, as the watchdog knows it."""

    def __init__(self, transport: SymmetricTransport, kind: int, words: list[Address], value: int, what: str) -> None:
        self.words, self.value, self.what = words, value, what
        self._kind, self._expect = kind, transport.watchdog.expect
        self._run = transport.fabric.taker(words, value, kind)
        self._transport = weakref.ref(transport)

    def __call__(self, lane: Lane, detail: str = "") -> None:
        is_captured = self._transport().is_capturing
        self._run(lane, None if is_captured else self._expect(self._kind, self, detail))


class Replay:
    """A replay of a CUDA graph, as the watchdog knows it."""

    words: tuple[Address, ...] = ()
    value, what = 0, "for a replay of a CUDA graph, with all waits in it, to end"


# Kinds of waits, each in the order of one stream.
_READING, _REWRITING, _ROOM, _PARTS, _REPLAYS, _REDUCING_REPLAYS = range(NUM_KINDS)


class SymmetricTransport(CollectiveTransport):
    """The gtp axis of one NVLink domain. What is small or rare (whole parameters' gradients, largest values, rows that
    move before a quantization, debug checks) stays a collective.

    Args:
        fabric: of this rank's device.
        axis: name of the mesh axis, for messages.
    """

    def __init__(
        self, mesh_group: dist.ProcessGroup, device: torch.device, name: str, fabric: Fabric, axis: str = "gtp"
    ) -> None:
        super().__init__(mesh_group, device, name, gathers=False)
        self.fabric = fabric
        self.axis = axis
        self._ranks = dist.get_process_group_ranks(mesh_group)  # not known any more when the program ends
        self._memory: weakref.WeakKeyDictionary[Shared, int] = weakref.WeakKeyDictionary()  # its bytes
        self.num_events_created = 0
        self.free_events: list = []
        # Each rank begins with the one after it, so that nobody is read by all at once. Its own rows come last.
        self._peers = [(self.rank + 1 + place) % self.size for place in range(self.size - 1)]
        self._control = self._share(_CONTROL_BYTES)
        self.watchdog = Watchdog(fabric, self._timeout_seconds, self._describe)
        self._issued = self._new_event()
        self._rewritten = self._new_event()  # by all, as the stream for gathers knows
        self._say_read, self._take_read = self._signals(0, 1, _READING, "until all have read their compute shards")
        self._say_written, self._take_written = self._signals(1, 1, _REWRITING, "for rewritten compute shards")
        # Where a tensor of ours begins: (its memory, each rank and where its tensor begins, in the order of reading).
        self._shared: dict[Address, tuple[Shared, list[tuple[int, Address]]]] = {}
        self._placed: weakref.WeakKeyDictionary[ShardedWeight, tuple] = weakref.WeakKeyDictionary()
        self._inbox: Inbox | None = None

    @property
    def num_bytes(self) -> int:
        """See :class:`CollectiveTransport`."""
        return sum(self._memory.values())

    def _share(self, num_bytes: int) -> Shared:
        if self.is_capturing:
            raise RuntimeError(
                f"mesh axis '{self.axis}': memory that peers reach has to be made before a capture: the captured step uses a "
                "weight that the steps before it did not use"
            )
        shared = self.fabric.share(self.mesh_group, num_bytes)
        self._memory[shared] = num_bytes
        return shared

    def _new_event(self) -> Any:
        self.num_events_created += 1
        return self.fabric.new_event()

    def _event(self) -> Any:
        return self.free_events.pop() if self.free_events else self._new_event()

    # ---- signals

    def _word(self, owner: int, table: int, peer: int) -> Address:
        """A word in ``owner``'s memory that is about ``peer``."""
        return self._control.ptrs[owner] + 4 * (table * self.size + peer)

    def _signals(self, table: int, value: int, kind: int, what: str) -> tuple[Callable[[Lane], None], Take]:
        """(write ``value`` to all peers' words about us, wait for it in our words about them)."""
        say = self.fabric.writer([self._word(peer, table, self.rank) for peer in self._peers], value)
        return say, Take(self, kind, [self._word(self.rank, table, peer) for peer in self._peers], value, what)

    def _timeout_seconds(self) -> float | None:
        timeout = group_timeout(self.mesh_group, self.device)
        return None if timeout is None else timeout.total_seconds()

    def _describe(self, take: Take | Replay, detail: str, seconds: float) -> str:
        values = self.fabric.read(take.words) if take.words else None
        peers = self._peers if values is None else [p for p, v in zip(self._peers, values) if v != take.value]
        missing = ", ".join(str(self._ranks[peer]) for peer in peers)
        return (
            f"GTP: mesh axis '{self.axis}' of size {self.size}, rank {self._ranks[self.rank]}: waited {seconds:.0f} s, the "
            f"time-out of the process group, {take.what}{detail and ' of '}{detail}; no signal came from rank(s) "
            f"{missing}: they died, are late, or run another program (parameters written or refreshed on some ranks only)"
        )

    # ---- CUDA graphs, see [Note: replays]

    def _lanes(self, traffic: Traffic) -> tuple[Lane, ...]:
        fabric = self.fabric
        gathers, reductions = (fabric.copying,), (fabric.pushing, fabric.summing)
        return {Traffic.GATHERS: gathers, Traffic.REDUCTIONS: reductions}.get(traffic, gathers + reductions)

    def _fork(self, lanes: Sequence[Lane]) -> None:
        """What the lanes are given next comes after what the current stream was given so far."""
        fabric = self.fabric
        fabric.record(self._issued, fabric.current())
        for lane in lanes:
            fabric.wait(lane, self._issued)

    def _join(self, lanes: Sequence[Lane]) -> None:
        """What the current stream is given next comes after what the lanes were given so far."""
        fabric = self.fabric
        now = fabric.current()
        for lane in lanes:
            fabric.record(self._issued, lane)
            fabric.wait(now, self._issued)

    def begin_capture(self) -> None:
        """See :meth:`CollectiveTransport.begin_capture`."""
        self._fork(self._lanes(Traffic.ALL))
        self.is_capturing = True
        if self._inbox is not None:
            self._inbox.begin_capture()

    def end_capture(self) -> None:
        """See :meth:`CollectiveTransport.end_capture`."""
        self._join(self._lanes(Traffic.ALL))
        self.is_capturing = False

    def abandon_capture(self) -> None:
        """See :meth:`CollectiveTransport.abandon_capture`."""
        self.is_capturing = False
        if self._inbox is not None:
            self._inbox.abandon_capture()

    def before_replay(self, traffic: Traffic) -> None:
        """See :meth:`CollectiveTransport.before_replay`."""
        if traffic is Traffic.GATHERS:  # eager ones may be on their way
            self.fabric.wait(self.fabric.current(), self._rewritten)
        else:
            self._join(self._lanes(traffic))

    def after_replay(self, traffic: Traffic) -> None:
        """See :meth:`CollectiveTransport.after_replay`."""
        fabric = self.fabric
        kind = _REDUCING_REPLAYS if traffic is Traffic.REDUCTIONS else _REPLAYS
        fabric.pass_mark(fabric.current(), kind, self.watchdog.expect(kind, Replay, ""))
        self._fork(self._lanes(traffic))

    # ---- gathers

    @contextlib.contextmanager
    def rewriting(self, weights: Sequence[ShardedWeight]) -> Iterator[None]:
        """Around the rewriting of these weights' compute shards, on the current stream: the two fences of
        [Note: gathers and fences]. Gives memory to those that have none; collective then."""
        if not weights:
            yield
            return
        self._place(weights)
        self._before_rewrite()
        try:
            yield
        finally:
            for weight in weights:
                weight.await_pieces()
            self._after_rewrite()

    def _before_rewrite(self) -> None:
        """What the current stream does next comes after all gathers, everybody's, that were issued before."""
        fabric = self.fabric
        now = fabric.current()
        self._say_read(fabric.copying)
        fabric.record(self._issued, fabric.copying)  # the copies of our own rows
        fabric.wait(now, self._issued)
        self._take_read(now)
        self.num_fences += 1

    def _after_rewrite(self) -> None:
        """Gathers issued from now on come after everybody's rewriting."""
        fabric = self.fabric
        now = fabric.current()
        self._say_written(now)
        fabric.record(self._issued, now)
        fabric.wait(fabric.copying, self._issued)
        self._take_written(fabric.copying)
        if not self.is_capturing:
            fabric.record(self._rewritten, fabric.copying)
        self.num_fences += 1

    def _place(self, weights: Sequence[ShardedWeight]) -> None:
        new, end = [], 0
        for weight in weights:
            device = weight.param._local_tensor.device
            if device != self.device:
                raise RuntimeError(
                    f"{weight.fqn}: the parameter is on {device}; on mesh axis '{self.axis}' of size {self.size} with "
                    f"symmetric memory it has to stay on {self.device}, or use GTPConfig(transport='collective')"
                )
            sent = weight.sent_tensors()
            if self._placed.get(weight, (None,))[0] == sent:
                continue
            places = {}
            for key, (shape, dtype) in sent.items():
                places[key] = end, shape, dtype
                end += -(-shape.numel() * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            new.append((weight, sent, places))
        if not new:
            return
        shared = self._share(end)
        for weight, sent, places in new:
            if weight in self._placed:
                self._placed[weight][1]()  # its memory of before
            tensors = {key: _view(shared.tensor, *place) for key, place in places.items()}
            weight.live_in(tensors)
            addresses = []
            for key, tensor in tensors.items():
                addresses.append(tensor.data_ptr())
                sources = [(rank, shared.ptrs[rank] + places[key][0]) for rank in (*self._peers, self.rank)]
                self._shared[addresses[-1]] = shared, sources
            forget = weakref.finalize(weight, _forget, self._shared, addresses)
            forget.atexit = False
            self._placed[weight] = sent, forget

    def all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, dim: int = 0) -> PeerReads:
        """See :meth:`CollectiveTransport.all_gather`. ``shard`` begins where a tensor that peers read does."""
        return self._gather((buffer,), (shard,), dim)

    def all_gather_parts(
        self, buffers: tuple[torch.Tensor, ...], parts: tuple[torch.Tensor, ...], dim: int
    ) -> PeerReads:
        """:meth:`all_gather` of several tensors."""
        return self._gather(buffers, parts, dim)

    def _gather(self, buffers: tuple[torch.Tensor, ...], parts: tuple[torch.Tensor, ...], dim: int) -> PeerReads:
        fabric, lane = self.fabric, self.fabric.copying
        home = fabric.current()
        ready = self._event()
        fabric.record(self._issued, home)  # former readers of the buffers
        fabric.wait(lane, self._issued)
        copy = fabric.copy
        for buffer, part in zip(buffers, parts):
            _, sources = self._shared[part.data_ptr()]
            to, width, num_runs = buffer.data_ptr(), part.nbytes, math.prod(part.shape[:dim]) if dim else 1
            if num_runs == 1:
                for rank, source in sources:
                    copy(to + rank * width, source, width, lane)
                continue
            width //= num_runs
            for rank, source in sources:
                fabric.copy_rows(to + rank * width, width * self.size, source, width, width, num_runs, lane)
        fabric.record(ready, lane)
        return PeerReads(self, ready, home, buffers)

    # ---- reductions

    def pushes(self, dtype: torch.dtype) -> bool:
        """Whether gradients that travel in ``dtype`` are reduced by :meth:`reduce_rows`."""
        return dtype in SUMMED_DTYPES

    def unserved(self, dtypes: set[torch.dtype]) -> list[str]:
        """See :meth:`CollectiveTransport.unserved`."""
        others = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes if not self.pushes(dtype)))
        if not others:
            return []
        return [f"mesh axis '{self.axis}': gradients in {others} are reduced by collectives, not in symmetric memory"]

    def reduce_rows(
        self, weight: ShardedWeight, grad: torch.Tensor, out: torch.Tensor, scale: float, adds: bool
    ) -> Ticket:
        """Start summing the ranks' ``grad`` (TP-local shape, contiguous); this rank's rows, times ``scale``, are
        written or (``adds``) added to ``out``: contiguous, see :class:`Sum`. ``grad`` and ``out`` must live until the
        ticket is released."""
        fabric = self.fabric
        inbox = self._inbox
        if inbox is None:
            inbox = self._inbox = self._new_inbox(weight)
        itemsize, pieces = weight.route or (0, [])
        if itemsize != grad.itemsize:
            itemsize = grad.itemsize
            pieces = pieces_of(weight.cut, weight.tp_local_shape, self.size, inbox.part_bytes // itemsize)
            weight.route = itemsize, pieces
        done, pushing, summing = self._event(), fabric.pushing, fabric.summing
        home = fabric.current()
        fabric.record(done, home)
        fabric.wait(pushing, done)
        base = grad.data_ptr()
        for piece in pieces:
            slot = inbox.next_slot()
            if self.is_capturing and slot.is_captured:
                fabric.wait(pushing, slot.given)
            slot.take_room(pushing, weight.fqn)
            for peer in self._peers:
                start, width = piece.parts[peer]
                if width and piece.num_runs == 1:
                    fabric.copy(slot.at[peer], base + start * itemsize, width * itemsize, pushing)
                elif width:
                    width *= itemsize
                    source, pitch = base + start * itemsize, piece.run_stride * itemsize
                    fabric.copy_rows(slot.at[peer], width, source, pitch, width, piece.num_runs, pushing)
            slot.tell(pushing)
            # The sum is made when the peers' parts are there, so about when ours are with them: one edge orders it
            # after the gradient, orders its end after all that read the gradient, and is what a capture needs.
            fabric.record(done, pushing)
            fabric.wait(summing, done)
            slot.take_parts(summing, weight.fqn)
            self._sum_piece(piece, slot, grad, out, scale, adds)
            slot.give_room(summing)
            if self.is_capturing:
                fabric.record(slot.given, summing)
                slot.is_captured = True
        fabric.record(done, summing)
        return Ticket(self, done, home)

    def _sum_piece(
        self, piece: Piece, slot: Slot, grad: torch.Tensor, out: torch.Tensor, scale: float, adds: bool
    ) -> None:
        start, width = piece.parts[self.rank]
        if not width:
            return
        job = Sum(
            own=grad,
            own_start=start,
            run=width,
            run_stride=piece.run_stride,
            inbox=slot.viewed_as(grad.dtype),
            stride=self._inbox.part_bytes // grad.itemsize,
            out=out,
            out_start=piece.first_run * (out.numel() // piece.num_runs_in_all) + piece.first,
            num=width * piece.num_runs,
            size=self.size,
            rank=self.rank,
            scale=scale,
            adds=adds,
        )
        self.fabric.sum(self.fabric.summing, job)

    def _new_inbox(self, weight: ShardedWeight) -> Inbox:
        """Slots for the largest of the model's gradients. Collective: all ranks reduce their first one."""
        runtime = weight.runtime
        others = [w for w in runtime.live_weights() if self.pushes(w.reduce_dtype)]
        largest = max(w.send_shape.numel() * w.reduce_dtype.itemsize for w in others)
        part_bytes = min(largest, _MOST_SLOT_BYTES // (self.size - 1))
        part_bytes = -(-part_bytes // _ALIGNMENT) * _ALIGNMENT
        num_slots = min(runtime.config.graph_wgrad_ring_size, _MOST_SLOTS)
        slot_bytes = part_bytes * (self.size - 1)
        shared = self._share(slot_bytes * num_slots)
        slots = [self._new_slot(shared, number, slot_bytes, part_bytes) for number in range(num_slots)]
        return Inbox(shared, slots, part_bytes)

    def _new_slot(self, shared: Shared, number: int, slot_bytes: int, part_bytes: int) -> Slot:
        tell, take_parts = self._signals(2 + 2 * number, 1, _PARTS, "for parts of the gradient")
        # A word of 0: there is room at that peer. A sender sets its own, and the receiver clears it.
        give_room, take_room = self._signals(3 + 2 * number, 0, _ROOM, "for room in inboxes, for the gradient")
        start = number * slot_bytes
        at = {p: shared.ptrs[p] + start + place_at(p, self.rank) * part_bytes for p in self._peers}
        memory = shared.tensor[start : start + slot_bytes]
        return Slot(memory, at, take_room, tell, take_parts, give_room, self._new_event())


def _view(memory: torch.Tensor, start: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    return memory[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)


def _forget(shared: dict[Address, tuple], addresses: list[Address]) -> None:
    for address in addresses:
        shared.pop(address, None)
