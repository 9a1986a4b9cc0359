"""Capturing a step into a CUDA graph, and what the runtimes of a model do around captures and replays.

[Note: capture and replay]
    A capture runs the step's Python once and nothing on the device; each replay runs on the device and no Python. So
    everything that Python leaves behind is done again for each replay: counters (:class:`~.counters.Tally`), the news that
    weights were written, ``.grad``. And everything that crosses the border of a step is settled before a capture: gathers
    issued ahead, reductions, pieces of compute shards on their way. Compute shards are rewritten within the graph, with
    both fences around that where peers read them, by the step that finds them stale as in eager code.

    The schedule has the captured step as one step like others, and replays leave it alone: the step after them, if it is
    eager, follows a whole step.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn as nn

from .counters import Tally
from .graph_borders import Handover, RingWriter
from .members import model_runtimes
from .runtime import Runtime
from .schedule import IN_BACKWARD, Kind
from .small import SmallParam
from .transport import CollectiveTransport, Traffic
from .weight import Lease, ShardedWeight


class Mark(Protocol):
    """A place in what a stream was given; as torch's events are."""

    def wait(self) -> None:
        """What the current stream is given next comes after it."""


class Recorder(Protocol):
    """What captures and replays on one device."""

    def apart(self) -> contextlib.AbstractContextManager:
        """Inside, work goes to the stream of captures, after what the current stream was given before; afterwards the
        current stream comes after it."""

    def prepare(self) -> None:
        """Before one or several captures. Waits for the device."""

    def capture(
        self, step: Callable[[], Any], failed: Callable[[], None], is_beside: bool = False
    ) -> tuple[Callable[[], None], Any]:
        """(what replays it on the current stream, what ``step`` returned). Inside of :meth:`apart`. ``failed`` is called
        when it is over and did not succeed. ``is_beside``: it will be replayed :meth:`beside` others, and shares memory
        with such graphs only."""

    def mark(self) -> Mark:
        """To be used again and again."""

    def beside(self, work: Callable[[], None], done: Mark) -> None:
        """Call ``work`` with a stream of its own as the current one, which comes after what the current stream was given so
        far; the current one does not wait. Afterwards ``done`` is its end."""

    def release(self) -> None:
        """Free all graphs, which must not be replayed any more. Waits for the device."""


def _free_workspaces() -> None:
    """Of cuBLAS, which torch keeps for each stream and thread, 32 MiB each on recent GPUs: those of our stream would outlive
    us, and one that came to be in a capture would hold the memory of its graph. Others come anew when they are needed."""
    torch._C._cuda_clearCublasWorkspaces()


class CudaRecorder:
    """Captures on a stream of its own, into memory that all graphs of this recorder share."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._beside = torch.cuda.Stream(device, priority=-1)
        self._given = torch.cuda.Event()
        self._pool, self._pool_beside = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()
        self._graphs: list[torch.cuda.CUDAGraph] = []

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """See :meth:`Recorder.apart`."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield
        current.wait_stream(self._stream)

    def prepare(self) -> None:
        """See :meth:`Recorder.prepare`."""
        torch.cuda.synchronize(self._device)
        gc.collect()  # what has a destructor that calls CUDA would break a capture that it dies in
        _free_workspaces()
        torch.cuda.empty_cache()

    def mark(self) -> torch.cuda.Event:
        """See :meth:`Recorder.mark`."""
        return torch.cuda.Event()

    def beside(self, work: Callable[[], None], done: torch.cuda.Event) -> None:
        """See :meth:`Recorder.beside`."""
        self._given.record(torch.cuda.current_stream(self._device))
        self._beside.wait_event(self._given)
        with torch.cuda.stream(self._beside):
            work()
            done.record(self._beside)

    def capture(
        self, step: Callable[[], Any], failed: Callable[[], None], is_beside: bool = False
    ) -> tuple[Callable[[], None], Any]:
        """See :meth:`Recorder.capture`."""
        pool = self._pool_beside if is_beside else self._pool
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()
        try:
            # Other threads (watchdogs of process groups, data loaders) go on calling CUDA meanwhile.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = step()
            except BaseException:
                self._give_up(graph, pool)
                failed()
                raise
            try:
                graph.capture_end()
            except BaseException:
                self._give_up(graph, pool)
                failed()
                raise
        finally:
            if collects:
                gc.enable()
        _free_workspaces()
        self._graphs.append(graph)
        return graph.replay, result

    def _give_up(self, graph: torch.cuda.CUDAGraph, pool: tuple[int, int]) -> None:
        """Where the end of a capture raises, torch leaves its allocators and random numbers capturing."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        with contextlib.suppress(RuntimeError, AttributeError):  # it ended well, or torch knows another way
            torch._C._cuda_endAllocateToPool(self._device.index, pool)
        # The allocator of pinned memory, which nobody can tell, goes on asking the graph: it must live on.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
        self._renew_pools()
        # A capture that ends well ends that of random numbers.
        mended = torch.cuda.CUDAGraph()
        mended.capture_begin(capture_error_mode="thread_local")
        torch.zeros(1, device=self._device)
        mended.capture_end()

    def release(self) -> None:
        """See :meth:`Recorder.release`."""
        torch.cuda.synchronize(self._device)
        for graph in self._graphs:
            graph.reset()
        self._graphs.clear()
        _free_workspaces()
        self._renew_pools()  # torch knows no graph that uses those before

    def _renew_pools(self) -> None:
        self._pool, self._pool_beside = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()


@dataclass
class Part:
    """A part of a step that is captured by itself; see [Note: borders of graphs].

    Attributes:
        own: weights.
        is_backward: else of a forward.
        taken: what the graph before it has gathered for it.
        left: what it gathers for the next graph.
        ring: where its gradients go.
        reduces: it is not computation, but reductions of such gradients.
    """

    own: tuple[ShardedWeight, ...]
    is_backward: bool = False
    taken: Handover | None = None
    left: Handover | None = None
    ring: RingWriter | None = None
    reduces: bool = False

    @property
    def traffic(self) -> Traffic:
        return Traffic.REDUCTIONS if self.reduces else Traffic.GATHERS


@dataclass
class Captured:
    """What one runtime did in a capture that goes on.

    Attributes:
        part: of a step; None: a whole one.
        leases: made.
        gathered: whose they are.
        refreshed: whose compute shards the graph rewrites.
    """

    part: Part | None = None
    leases: list[weakref.ref[Lease]] = field(default_factory=list)
    gathered: dict[ShardedWeight, None] = field(default_factory=dict)
    refreshed: set[ShardedWeight] = field(default_factory=set)

    def may_gather(self, weight: ShardedWeight, kind: Kind) -> bool:
        """Whether its gather for a use of ``kind`` may be issued ahead."""
        part = self.part
        if part is None:
            return True
        is_known = weight in part.own or part.left is not None and weight in part.left.weights
        return is_known and (kind in IN_BACKWARD) is part.is_backward

    def gather_ahead(self, weight: ShardedWeight, kind: Kind) -> Lease:
        """Issue that gather."""
        part = self.part
        if part is None or weight in part.own:
            return weight.gather(kind, True)
        return weight.gather(kind, True, into=part.left.room_for(weight, kind))

    def note(self, lease: Lease) -> None:
        """``lease`` was made."""
        self.leases.append(weakref.ref(lease))
        self.gathered[lease.weight] = None


class Runtimes:
    """All runtimes of a model, at the borders of a graph.

    Raises:
        ValueError: their settings stop the host; names ``caller``.
    """

    def __init__(self, model: nn.Module, caller: str = "graph_step") -> None:
        self.all: list[Runtime] = model_runtimes(model)
        if any(runtime.config.check_param_states for runtime in self.all):
            raise ValueError(
                f"{caller}: GTPConfig(check_param_states=True) stops the host at each use, which a graph cannot: set it to False"
            )
        self.transports: list[CollectiveTransport] = list(
            dict.fromkeys(t for runtime in self.all for t in runtime.domain.transports)
        )

    @property
    def takes_times(self) -> bool:
        """Whether eager steps are needed to find out when gathers are to be issued."""
        return any(runtime.look_ahead.is_busy for runtime in self.all)

    def settle(self) -> None:
        """Before a capture: nothing is in flight any more."""
        for runtime in self.all:
            runtime.finalize()
            runtime.free_unused_leases()
            for weight in runtime.live_weights():
                weight.await_pieces()

    @contextlib.contextmanager
    def capturing(self, replay: RuntimesReplay) -> Iterator[None]:
        """Around the captured step, or part of one, within the capture; ``replay`` is what follows its replays."""
        part = replay.part
        for runtime in self.all:
            runtime.captured = Captured(part)
            runtime.reducer.ring = None if part is None else part.ring
        with contextlib.ExitStack() as stack:
            for tally in replay.tallies:
                stack.enter_context(tally)
            for transport in self.transports:
                transport.begin_capture()
            if part is not None and part.taken is not None:
                for lease in part.taken.leases():
                    lease.weight.next_lease = lease
                    lease.weight.runtime.captured.leases.append(weakref.ref(lease))
            yield
            if part is not None and part.left is not None:
                part.left.close()
            for runtime in self.all:
                runtime.finalize()
                runtime.free_unused_leases()
            for transport in self.transports:
                transport.end_capture()
            for runtime in self.all:
                for lease in [ref() for ref in runtime.captured.leases]:
                    if lease is not None:  # autograd's graph has it, and may die in eager code
                        lease.settle()
        replay.note_captured()
        for runtime in self.all:
            runtime.captured = runtime.reducer.ring = None

    def abandon(self, schedules: list[dict[str, object]]) -> None:
        """A capture failed: nothing of it ran, and no stream may be told to wait for it.

        Args:
            schedules: what :meth:`schedules` gave before it.
        """
        for transport in self.transports:
            transport.abandon_capture()
        for runtime, schedule in zip(self.all, schedules):
            runtime.reducer.discard()
            for weight in runtime.live_weights():
                weight.discard_pieces()
            captured, runtime.captured = runtime.captured, None
            runtime.reducer.ring = None
            for lease in [ref() for ref in captured.leases] if captured is not None else ():
                if lease is not None:
                    lease.discard()
            runtime.schedule.restore(schedule)
            runtime.forget_passes()
            for weight in runtime.live_weights():
                weight.mark_changed()

    def take_small(self) -> dict[tuple, tuple]:
        """Gradients of parameters that stay whole, out of a capture of a part of a step: see ``Reducer.small``."""
        taken = {}
        for runtime in self.all:
            taken.update(runtime.reducer.small)
            runtime.reducer.small = {}
        return taken

    def schedules(self) -> list[dict[str, object]]:
        """Of all runtimes, as they are now."""
        return [runtime.schedule.state() for runtime in self.all]


@contextlib.contextmanager
def leaves_apart(members: Iterable[ShardedWeight | SmallParam]) -> Iterator[None]:
    """Around a captured forward whose backward is captured apart from it, without hooks on parameters: autograd's graph of it
    hangs on leaves of its own.

    A leaf's node in autograd's graph is on the stream that was current when it came to be, and lives as long as any graph
    that has it. A loss that is still referenced, that of the microbatch before say, would bring a stream into the capture
    that takes no part in it.
    """
    members = list(members)
    for member in members:
        member.leaf = member.param.detach().requires_grad_(member.param.requires_grad)
    try:
        yield
    finally:
        for member in members:
            member.leaf = member.param


class RuntimesReplay:
    """What the runtimes of a model do before and after each replay of one graph.

    Args:
        part: of a step; None: of a whole one.

    Attributes:
        gathered: weights whose gathers are in it, in the same order on all ranks.
    """

    def __init__(self, runtimes: Runtimes, part: Part | None = None) -> None:
        self._runtimes = runtimes
        self.part = part
        self.gathered: list[ShardedWeight] = []
        self._transports = runtimes.transports
        # A part is captured out of its turn: what the schedule said to that is not counted.
        left_out = () if part is None else ("num_mispredictions",)
        self.tallies = [Tally(runtime, left_out) for runtime in runtimes.all]
        weights = [weight for runtime in runtimes.all for weight in runtime.live_weights()]
        self._kept: list[ShardedWeight] = []  # whose compute shards the graph reads as they are
        self._before = [(weight, weight.num_writes, weight.generation) for weight in weights]
        self._stepped, self._changed = [], []

    def note_captured(self) -> None:
        """It was captured."""
        self.gathered = [weight for runtime in self._runtimes.all for weight in runtime.captured.gathered]
        if self.part is not None:  # others go on beside it
            moved = self.part.own if self.part.reduces else self.gathered
            used = {transport for weight in moved for transport in weight.runtime.domain.transports}
            self._transports = [transport for transport in self._runtimes.transports if transport in used]
        refreshed = {weight for runtime in self._runtimes.all for weight in runtime.captured.refreshed}
        for weight, num_writes, generation in self._before:
            if weight in self.gathered and weight not in refreshed:
                self._kept.append(weight)
            if weight.num_writes != num_writes:
                self._stepped.append(weight)
            if weight.generation != generation:
                self._changed.append(weight)
        for runtime, tally in zip(self._runtimes.all, self.tallies):
            if tally not in runtime.tallies:
                runtime.tallies.append(tally)

    def forget(self) -> None:
        """There will be no more replays."""
        for runtime, tally in zip(self._runtimes.all, self.tallies):
            tally.enter()
            if tally in runtime.tallies:
                runtime.tallies.remove(tally)

    def step(self, replay: Callable[[], None]) -> None:
        """Give the current stream a replay of a whole step."""
        self._runtimes.settle()
        for runtime in self._runtimes.all:
            runtime.check_finite()
        stale = False
        for weight in self._kept:
            weight.notice_writes()
            stale |= weight.compute_shard is None
        if stale:
            for runtime in self._runtimes.all:
                runtime.refresh_copies()
                for weight in runtime.live_weights():
                    weight.await_pieces()
        self.give(replay)
        for weight in self._stepped:
            weight.count_write()
        for weight in self._changed:
            weight.mark_changed()

    def give(self, replay: Callable[[], None]) -> None:
        """Give the current stream a replay."""
        traffic = Traffic.ALL if self.part is None else self.part.traffic
        for transport in self._transports:
            transport.before_replay(traffic)
        replay()
        for transport in self._transports:
            transport.after_replay(traffic)
        for tally in self.tallies:
            tally.num_replays += 1
