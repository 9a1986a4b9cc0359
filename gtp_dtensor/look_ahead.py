"""How long uses take and wait, and from that when each gather is issued.

[Note: planned look-ahead]
    With ``GTPConfig.look_ahead_bytes`` the distance of a gather is not one number. Once the schedule repeats itself, one
    step is timed: how long the device computes from each use to the next, and how long each waits for its weight; then
    one gather of each size by itself. From these every gather gets the use at which it is issued: the last one from which
    it arrives in time, one gather following the other. Where more would wait for their uses than the budget allows, it is
    issued later, at the earliest use that has room for it, and what its use then waits is the price. All ranks of the
    data axes plan with the longest of their times, so that they issue alike.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from .counters import WeightCounters
from .modes import plain_ops
from .schedule import IN_BACKWARD, Use, is_out_of_reach
from .weight import ShardedWeight

if TYPE_CHECKING:
    from .runtime import Runtime

logger = logging.getLogger(__name__)
_NUM_REPEATS = 3  # of a gather that is timed; the shortest counts
_NUM_STEPS = 2  # that have to be alike before one is timed


class Timing(NamedTuple):
    """Of one use, in nanoseconds of the device; what a step computes after its last use is not counted."""

    waits: int  # for its weight
    computes: int  # until the next use


@dataclass(frozen=True)
class Gather:
    """One use, for :func:`plan`."""

    use: Use
    num_bytes: int  # gathered for it; 0: its weight is there already
    gather_ns: int
    compute_ns: int  # until the next use


def plan(gathers: Sequence[Gather], budget: int, is_microbatch: bool = False) -> tuple[list[int], list[int]]:
    """(how many uses ahead gathers are issued at each use, nanoseconds that each use is expected to wait).

    At least the next use's gather is issued, whatever the budget.

    Args:
        gathers: of each use of a step, in order.
        budget: bytes of gathered weights that may wait for their uses at one time.
        is_microbatch: an optimizer tells of its steps, see :func:`~.schedule.is_out_of_reach`.
    """
    wanted = _latest_issues(gathers)
    last = 0  # the farthest use whose gather has been issued
    issued_at = list(range(len(gathers)))
    aheads = []
    for now in range(len(gathers)):
        last = max(last, now)
        waiting = sum(gather.num_bytes for gather in gathers[now + 1 : last + 1])
        while last + 1 < len(gathers) and _is_in_reach(gathers, now, last + 1, is_microbatch):
            num_bytes = gathers[last + 1].num_bytes
            is_next = last == now
            if not is_next and (wanted[last + 1] > now or waiting + num_bytes > budget):
                break
            last += 1
            waiting += num_bytes
            issued_at[last] = now
        aheads.append(max(1, last - now))
    return aheads, _expected_waits(gathers, issued_at)


def _is_in_reach(gathers: Sequence[Gather], now: int, coming: int, is_microbatch: bool) -> bool:
    is_backward = gathers[now].use.kind in IN_BACKWARD
    between = gathers[now + 1 : coming + 1]
    return not any(is_out_of_reach(gather.use, is_backward, is_microbatch) for gather in between)


def _latest_issues(gathers: Sequence[Gather]) -> list[int]:
    """The last use at which each gather can be issued to arrive in time, were there no budget."""
    starts, now = [], 0
    for gather in gathers:
        starts.append(now)
        now += gather.compute_ns
    issues = [0] * len(gathers)
    free, at = now, len(gathers) - 1  # from when on gathers that come later occupy the wire; a use
    for position in reversed(range(len(gathers))):
        free = min(free, starts[position]) - gathers[position].gather_ns
        at = min(at, position)
        while at > 0 and starts[at] > free:
            at -= 1
        issues[position] = at
    return issues


def _expected_waits(gathers: Sequence[Gather], issued_at: Sequence[int]) -> list[int]:
    waits, now, wire = [], 0, 0
    arrives = [0] * len(gathers)
    of_use: dict[int, list[int]] = {}
    for position, issue in enumerate(issued_at):
        of_use.setdefault(issue, []).append(position)
    for position, gather in enumerate(gathers):
        for coming in of_use.get(position, []):
            wire = max(wire, now) + gathers[coming].gather_ns
            arrives[coming] = wire
        waits.append(max(0, arrives[position] - now) if gather.num_bytes else 0)
        now += waits[-1] + gather.compute_ns
    return waits


class UseTimer:
    """Takes the times of one step's uses, on the computing stream; the host does not wait."""

    def __init__(self, device: torch.device) -> None:
        self._mark: Callable[[], object] = _event if device.type == "cuda" else time.perf_counter_ns
        self._device = device
        self._marks: list[object] = []

    def arrive(self) -> None:
        """A use begins."""
        self._marks.append(self._mark())

    def ready(self) -> None:
        """Its weight is there."""
        self._marks.append(self._mark())

    def timings(self) -> list[Timing]:
        """Of all uses. The host waits for the device."""
        if not self._marks:
            return []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        times = [_nanoseconds(self._marks[0], mark) for mark in self._marks]
        ends = [*times[2::2], times[-1]]
        return [Timing(ready - arrive, end - ready) for arrive, ready, end in zip(times[::2], times[1::2], ends)]


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _nanoseconds(start: object, end: object) -> int:
    return int(start.elapsed_time(end) * 1e6) if isinstance(start, torch.cuda.Event) else end - start


class LookAhead:
    """Times steps of one runtime, and plans when each gather is issued; see [Note: planned look-ahead]."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._timings: list[Timing] = []  # of the uses of the last timed step, in order
        self._timed: list[tuple] = []  # these uses
        self._num_steps = 0  # alike, so far
        self._last: list[tuple] = []  # uses of the step before
        self._is_planned = False
        self._wants_times = False

    @property
    def is_busy(self) -> bool:
        """Whether the next steps are to be timed."""
        return self._wants_times or self._plans and not self._is_planned

    def time_next_step(self) -> None:
        """Take the times of the next whole step."""
        self._wants_times = True

    def timings_of(self, uses: list[Use]) -> list[Timing]:
        """Of these uses, where they are those of the last timed step; else none."""
        return self._timings if [use[:2] for use in uses] == self._timed else []

    def after_step(self) -> None:
        """An optimizer stepped: the uses since the step before are a whole step."""
        runtime = self._runtime
        timer, runtime.timer = runtime.timer, None
        uses = runtime.schedule.period()
        step = [use[:2] for use in uses]
        self._num_steps = self._num_steps + 1 if step == self._last and step else 0
        self._last = step
        if timer is not None:
            timings = timer.timings()
            if self._num_steps and len(timings) == len(uses):
                self._timings, self._timed = timings, step
                if not self._plans or self._is_planned:
                    self._wants_times = False
                else:
                    self._plan(uses)  # and then time what it brings
        if self._plans and not self._is_planned and self._num_steps >= _NUM_STEPS:
            self._wants_times = True
        if self._wants_times:
            runtime.timer = UseTimer(runtime.domain.device)

    @property
    def _plans(self) -> bool:
        return self._runtime.config.look_ahead_bytes is not None

    def _plan(self, uses: list[Use]) -> None:
        runtime = self._runtime
        gather_ns = self._time_gathers(uses)
        times = [number for timing in self._timings for number in timing] + list(gather_ns.values())
        for transport in runtime.domain.transports:
            with plain_ops():
                everyones = transport.exchange(times)
            if len({len(one) for one in everyones}) > 1:
                logger.warning("GTP: ranks of one axis use different weights, so look-ahead is not planned")
                return
            times = [max(numbers) for numbers in zip(*everyones)]
        gather_ns = dict(zip(gather_ns, times[2 * len(uses) :]))
        gathers = []
        for use, compute_ns in zip(uses, times[1 : 2 * len(uses) : 2]):
            weight = runtime.weights[use.weight]()
            num_bytes = 0 if weight is None else weight.gathered_bytes
            gathers.append(Gather(use, num_bytes, gather_ns.get(num_bytes, 0), compute_ns))
        aheads, waits = plan(gathers, runtime.config.look_ahead_bytes, runtime.has_optimizer)
        runtime.schedule.plan(aheads)
        self._is_planned = True
        computing = sum(gather.compute_ns for gather in gathers)
        logger.info(
            f"GTP: look-ahead planned for {len(uses)} uses: up to {max(aheads)} uses ahead; expected exposed communication "
            f"{sum(waits) / 1e6:.2f} ms beside {computing / 1e6:.2f} ms of computation"
        )

    def _time_gathers(self, uses: list[Use]) -> dict[int, int]:
        """Nanoseconds of a gather by itself, by its bytes. Collective."""
        runtime = self._runtime
        runtime.refresh_copies()
        found: dict[int, int] = {}
        for use in uses:
            weight = runtime.weights[use.weight]()
            if weight is not None and weight.gathered_bytes and weight.gathered_bytes not in found:
                found[weight.gathered_bytes] = min(_time_gather(weight, use) for _ in range(_NUM_REPEATS))
        return found


def _time_gather(weight: ShardedWeight, use: Use) -> int:
    timer, counters = UseTimer(weight.runtime.domain.device), weight.counters
    weight.counters = WeightCounters()
    timer.arrive()
    lease = weight.gather(use.kind, False)
    lease.wait()
    timer.ready()
    lease.end()
    weight.counters = counters
    return timer.timings()[0].waits
