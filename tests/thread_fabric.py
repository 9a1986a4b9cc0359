"""A stand-in for a CUDA device's streams and peer memory: threads, and files that all rank processes map.

The computing stream is the caller itself. Everything else is as on a device: what is enqueued runs later, in the order
of its stream; a wait stops a stream and not the caller; memory is read and written through raw addresses. ``delays``
makes one kind of work late on this rank.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import tempfile
import threading
import time
import weakref
from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gtp_dtensor.transport.summing import sum_plainly
from gtp_dtensor.transport.watchdog import NUM_KINDS

_CURRENT = 0


@dataclass(eq=False)
class MappedFiles:
    tensor: torch.Tensor
    ptrs: list[int]
    maps: list[mmap.mmap]


class ThreadFabric:
    """See ``gtp_dtensor.transport.fabric.Fabric``.

    Attributes:
        delays: seconds before each operation of a kind ("copying", "pushing", "summing").
        calls: how often each method was called.
    """

    def __init__(self) -> None:
        self.copying, self.pushing, self.summing = 1, 2, 3
        self.progress = [0] * NUM_KINDS
        self.delays: dict[str, float] = {}
        self.calls: Counter[str] = Counter()
        self._stop = _Stop()
        self._queues = {lane: queue.SimpleQueue() for lane in (1, 2, 3)}
        for lane in self._queues.values():
            threading.Thread(target=_serve, args=(lane, self._stop), daemon=True).start()
        weakref.finalize(self, _end, list(self._queues.values())).atexit = False

    def current(self) -> int:
        return _CURRENT

    def share(self, group: dist.ProcessGroup, num_bytes: int) -> MappedFiles:
        handle, path = tempfile.mkstemp(prefix="gtp_symmetric_")
        os.ftruncate(handle, num_bytes)
        os.close(handle)
        paths: list = [None] * group.size()
        dist.all_gather_object(paths, path, group=group)
        maps = []
        for one in paths:
            with open(one, "r+b") as file:
                maps.append(mmap.mmap(file.fileno(), num_bytes))
        dist.barrier(group=group)
        os.unlink(path)
        ptrs = [ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in maps]
        shared = MappedFiles(torch.frombuffer(maps[group.rank()], dtype=torch.uint8), ptrs, maps)
        weakref.finalize(shared, _outlive, list(self._queues.values()), maps).atexit = False
        return shared

    def _do(self, lane: int, work) -> None:
        if lane == _CURRENT:
            work()
        else:
            self._queues[lane].put(work)

    def _late(self, kind: str, work):
        """``work``, late."""
        delay = self.delays.get(kind, 0.0)

        def call() -> None:
            time.sleep(delay)
            work()

        return call if delay else work

    # ---- events, copies, signals

    def new_event(self) -> list:
        self.calls["new_event"] += 1
        return [None]

    def record(self, event: list, lane: int) -> None:
        self.calls["record"] += 1
        event[0] = reached = threading.Event()
        self._do(lane, reached.set)

    def wait(self, lane: int, event: list) -> None:
        self.calls["wait"] += 1
        reached, stop = event[0], self._stop  # as it was recorded by now
        if reached is not None:
            self._do(lane, lambda: stop.until(reached.is_set))

    def copy(self, to: int, source: int, num_bytes: int, lane: int) -> None:
        self.calls["copy"] += 1
        kind = "copying" if lane == self.copying else "pushing"
        self._do(lane, self._late(kind, lambda: ctypes.memmove(to, source, num_bytes)))

    def copy_rows(self, to, to_pitch, source, source_pitch, width, num_rows, lane) -> None:
        for row in range(num_rows):
            self.copy(to + row * to_pitch, source + row * source_pitch, width, lane)

    def writer(self, words, value):
        cells = [ctypes.c_int32.from_address(word) for word in words]

        def write() -> None:
            for cell in cells:
                cell.value = value

        def enqueue(lane: int) -> None:
            self.calls["signal"] += 1
            self._do(lane, write)

        return enqueue

    def taker(self, words, value, kind):
        cells = [ctypes.c_int32.from_address(word) for word in words]
        progress, stop = self.progress, self._stop

        def take(number: int | None) -> None:
            for cell in cells:
                stop.until(lambda cell=cell: cell.value == value)
            for cell in cells:
                cell.value = 1 - value
            if number is not None:
                progress[kind] = number

        def enqueue(lane: int, number: int | None) -> None:
            self.calls["take"] += 1
            self._do(lane, lambda: take(number))

        return enqueue

    def pass_mark(self, lane: int, kind: int, number: int) -> None:
        progress = self.progress

        def mark() -> None:
            progress[kind] = number

        self._do(lane, mark)

    def sum(self, lane: int, job) -> None:
        self.calls["sum"] += 1
        self._do(lane, self._late("summing", lambda: sum_plainly(job)))

    # ---- when it goes wrong

    def read(self, words) -> list[int]:
        return [ctypes.c_int32.from_address(word).value for word in words]

    def abort(self, message: str) -> None:
        self._stop.message = message


class _Stop:
    """Ends all waits once it has a message."""

    def __init__(self) -> None:
        self.message: str | None = None

    def until(self, condition) -> None:
        for spin in range(1 << 62):
            if condition():
                return
            if self.message is not None:
                raise RuntimeError(self.message)
            time.sleep(0 if spin < 20 else 1e-4)


def _serve(lane: queue.SimpleQueue, stop: _Stop) -> None:
    torch.set_grad_enabled(False)
    while True:
        work = lane.get()
        if work is None:
            return
        if stop.message is not None:  # events of what failed stay unreached
            continue
        try:
            work()
        except Exception as error:
            stop.message = stop.message or f"a lane failed: {error!r}"


def _outlive(queues, maps: list[mmap.mmap]) -> None:
    """``maps`` stay until the lanes have done what they were given: signals may be among it that nobody waits for."""
    for lane in queues:
        lane.put(lambda: maps)


def _end(queues) -> None:
    for lane in queues:
        lane.put(None)
