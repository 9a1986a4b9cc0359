"""Ends waits that are for a peer which died, came too late, or runs another program."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .fabric import Fabric

NUM_KINDS = 6
_MOST = 1 << 30  # numbers begin anew here


class Watchdog:
    """Compares, from a thread of its own, the waits that were enqueued with those that are over.

    A stream counts the waits of one kind that it has passed in a word on the host (``fabric.progress``), so looking at
    them takes no call into CUDA, which would break a capture in another thread. Where one wait is the oldest for longer
    than the time-out, ``fabric.abort`` is told what it was for. As with a process group's, work of one's own before it
    in the stream that takes longer than the time-out is taken for a missing peer.

    Args:
        timeout: seconds; None: never. Asked each time, since it may change.
        describe: makes the message from what :meth:`expect` was given, and the seconds.
    """

    def __init__(
        self,
        fabric: Fabric,
        timeout: Callable[[], float | None],
        describe: Callable[[Any, str, float], str],
    ) -> None:
        self._fabric = fabric
        self._timeout = weakref.WeakMethod(timeout)
        self._describe = weakref.WeakMethod(describe)
        self._numbers = [0] * NUM_KINDS
        self._open: list[deque[tuple[int, Any, str]]] = [deque() for _ in range(NUM_KINDS)]
        self._oldest: list[tuple[int, float] | None] = [None] * NUM_KINDS  # (its number, since when)
        threading.Thread(target=_patrol, args=(weakref.ref(self),), name="gtp-watchdog", daemon=True).start()

    def expect(self, kind: int, what: Any, detail: str) -> int:
        """A wait of this kind is about to be enqueued. Returns its number, which ``progress[kind]`` becomes."""
        number = self._numbers[kind] = self._numbers[kind] % _MOST + 1
        self._open[kind].append((number, what, detail))
        return number

    def look(self, now: float) -> float | None:
        """Forget what is over; abort where something is stuck. Returns seconds until the next look; None: no more."""
        seconds = None  # asked for only while something waits: the group may be gone else
        for kind, waits in enumerate(self._open):
            passed = self._fabric.progress[kind]
            while waits and 0 <= (passed - waits[0][0]) % _MOST < _MOST // 2:
                waits.popleft()
            if not waits:
                self._oldest[kind] = None
                continue
            number, what, detail = waits[0]
            timeout = self._timeout()
            if timeout is None:
                return None
            seconds = timeout()
            oldest = self._oldest[kind]
            if oldest is None or oldest[0] != number:
                self._oldest[kind] = number, now
            elif seconds is not None and now - oldest[1] > seconds:
                describe = self._describe()
                if describe is not None:
                    self._fabric.abort(describe(what, detail, seconds))
                return None
        return min(1.0, seconds / 4) if seconds else 1.0


def _patrol(watchdog: weakref.ref[Watchdog]) -> None:
    pause: float | None = 0.1
    while pause is not None:
        time.sleep(pause)
        dog = watchdog()
        pause = None if dog is None else dog.look(time.monotonic())
        del dog
