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
from .members import model_runtimes
from .runtime import Runtime
from .small import SmallParam
from .transport import CollectiveTransport
from .weight import Lease, ShardedWeight


class Recorder(Protocol):
    """What captures and replays on one device."""

    def apart(self) -> contextlib.AbstractContextManager:
        """Inside, work goes to the stream of captures, after what the current stream was given before; afterwards the
        current stream comes after it."""

    def prepare(self) -> None:
        """Before one or several captures. Waits for the device."""

    def capture(self, step: Callable[[], Any], failed: Callable[[], None]) -> tuple[Callable[[], None], Any]:
        """(what replays it on the current stream, what ``step`` returned). Inside of :meth:`apart`. ``failed`` is called
        when it is over and did not succeed."""

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
        self._pool = torch.cuda.graph_pool_handle()
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

    def capture(self, step: Callable[[], Any], failed: Callable[[], None]) -> tuple[Callable[[], None], Any]:
        """See :meth:`Recorder.capture`."""
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        gc.disable()
        try:
            # Other threads (watchdogs of process groups, data loaders) go on calling CUDA meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = step()
            except BaseException:
                self._give_up(graph)
                failed()
                raise
            try:
                graph.capture_end()
            except BaseException:
                self._give_up(graph)
                failed()
                raise
        finally:
            if collects:
                gc.enable()
        _free_workspaces()
        self._graphs.append(graph)
        return graph.replay, result

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Where the end of a capture raises, torch leaves its allocators and random numbers capturing."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        with contextlib.suppress(RuntimeError, AttributeError):  # it ended well, or torch knows another way
            torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        # The allocator of pinned memory, which nobody can tell, goes on asking the graph: it must live on.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
        self._pool = torch.cuda.graph_pool_handle()
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
        self._pool = torch.cuda.graph_pool_handle()  # torch knows no graph that uses the one before


@dataclass
class Captured:
    """What one runtime did in a capture that goes on.

    Attributes:
        weights: that may be gathered ahead, of a part of a step; None: all, of a whole one.
        leases: made; ``gathered``: of which weights.
        refreshed: whose compute shards the graph rewrites.
    """

    weights: frozenset[ShardedWeight] | None = None
    leases: list[weakref.ref[Lease]] = field(default_factory=list)
    gathered: set[ShardedWeight] = field(default_factory=set)
    refreshed: set[ShardedWeight] = field(default_factory=set)


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
    def capturing(self, replay: RuntimesReplay, weights: Iterable[ShardedWeight] | None = None) -> Iterator[None]:
        """Around the captured step, within the capture.

        Args:
            replay: what follows its replays.
            weights: of a part of a step: those that it uses.
        """
        for runtime in self.all:
            runtime.captured = Captured(None if weights is None else frozenset(weights))
        with contextlib.ExitStack() as stack:
            for tally in replay.tallies:
                stack.enter_context(tally)
            for transport in self.transports:
                transport.begin_capture()
            yield
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
            runtime.captured = None

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
        is_part: of a part of a step, captured out of its turn: what the schedule said to that is not counted.
    """

    def __init__(self, runtimes: Runtimes, is_part: bool = False) -> None:
        self._runtimes = runtimes
        self.tallies = [Tally(runtime, ("num_mispredictions",) if is_part else ()) for runtime in runtimes.all]
        weights = [weight for runtime in runtimes.all for weight in runtime.live_weights()]
        self._kept: list[ShardedWeight] = []  # whose compute shards the graph reads as they are
        self._before = [(weight, weight.num_writes, weight.generation) for weight in weights]
        self._stepped, self._changed = [], []

    def note_captured(self) -> None:
        """The step was captured."""
        refreshed = {weight for runtime in self._runtimes.all for weight in runtime.captured.refreshed}
        gathered = {weight for runtime in self._runtimes.all for weight in runtime.captured.gathered}
        for weight, num_writes, generation in self._before:
            if weight in gathered and weight not in refreshed:
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
        for runtime in self._runtimes.all:
            runtime.drop_small_copies()

    def give(self, replay: Callable[[], None]) -> None:
        """Give the current stream a replay."""
        for transport in self._runtimes.transports:
            transport.before_replay()
        replay()
        for transport in self._runtimes.transports:
            transport.after_replay()
        for tally in self.tallies:
            tally.num_replays += 1
