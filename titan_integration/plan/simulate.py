"""Plays the events of one rank's step on the streams of its GPU.

[Note: the streams]
    The host issues events in order and takes its time for each. The computing stream executes kernels in that order,
    none before it was issued; a wait stops it until a collective is done. A collective starts when the computing
    stream has come to where it was issued, and its own stream is free. Collectives in flight share links, see [Note:
    the links]. What a wait takes is exposed communication. A kernel takes as long as its operations or its bytes do,
    whichever is longer; a GEMM or attention longer while collectives are in flight, which take processors from it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .cluster import Cluster
from .network import Demand, demand
from .record import Event, Kernel, Mark, Start, Sync, Wait

# Rows and columns of what one processor computes of a GEMM, and the least of the inner dim that is worth an own
# processor.
_TILE, _INNER = (128, 256), 1024


class Span(NamedTuple):
    """A piece of one stream's time, in seconds: "compute", "wait" or a collective's kind."""

    stream: str
    start: float
    end: float
    name: str
    kind: str


@dataclass
class Timeline:
    """One simulated step. Seconds.

    Attributes:
        seconds: from its first kernel to its end.
        compute_s: in which kernels ran.
        host_bound_s: in which the computing stream waited for the host to issue something.
        exposed: of waits, by (weight or "", kind of collective).
        link_bytes: that this rank received, by (axis, link).
        busy: of each link, by itself.
        marks: when the computing stream came to each.
        spans: of all streams.
    """

    seconds: float = 0.0
    compute_s: float = 0.0
    host_bound_s: float = 0.0
    exposed: Counter = field(default_factory=Counter)
    link_bytes: Counter = field(default_factory=Counter)
    busy: Counter = field(default_factory=Counter)
    marks: dict[str, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)

    @property
    def exposed_s(self) -> float:
        """Of all waits together."""
        return sum(self.exposed.values())


def kernel_seconds(cluster: Cluster, kernel: Kernel) -> float:
    """How long a kernel runs."""
    gpu, efficiency = cluster.gpu, cluster.efficiency
    moved = kernel.num_bytes / (gpu.memory_gb_s * 1e9 * efficiency.memory)
    if not kernel.flops:
        return moved
    if kernel.unit == "attention":
        return max(moved, kernel.flops / (gpu.bf16_tflops * 1e12 * efficiency.attention))
    peak = {"bf16": gpu.bf16_tflops, "fp8": gpu.fp8_tflops, "fp32": gpu.fp32_tflops}[kernel.unit] * 1e12
    busy = 1.0 if kernel.shape is None else occupancy(kernel.shape, gpu.num_processors)
    return max(moved, kernel.flops / (peak * efficiency.gemm * busy))


def occupancy(shape: tuple[int, int, int, int], num_processors: int) -> float:
    """Which part of the processors a GEMM keeps busy: the last of its waves of tiles may be small. Where there are few
    tiles, several processors share the inner dim of each."""
    rows, columns, how_many, inner = shape
    tiles = how_many * math.ceil(rows / _TILE[0]) * math.ceil(columns / _TILE[1])
    if tiles < num_processors:
        tiles *= max(1, min(num_processors // tiles, inner // _INNER))
    return tiles / (math.ceil(tiles / num_processors) * num_processors)


@dataclass
class _Transfer:
    event: Start
    ready: float  # may start then
    latency: float
    left: float  # seconds of its link that it still needs, alone
    link: str
    started: float = -1.0
    done: float = -1.0


class _Links:
    """Collectives in flight."""

    def __init__(self) -> None:
        self.now = 0.0
        self.queues: dict[str, list[_Transfer]] = defaultdict(list)
        self.finished: list[_Transfer] = []

    def add(self, transfer: _Transfer) -> None:
        self.queues[transfer.event.stream].append(transfer)

    def _heads(self) -> list[_Transfer]:
        return [queue[0] for queue in self.queues.values() if queue]

    def in_flight(self) -> tuple[int, float]:
        """(collectives that are in flight now, when the next one starts or ends)."""
        heads = self._heads()
        active = [head for head in heads if head.ready <= self.now]
        share = Counter(head.link for head in active if head.latency <= 0)
        changes = [head.ready for head in heads if head.ready > self.now]
        changes += [self.now + (head.latency if head.latency > 0 else head.left * share[head.link]) for head in active]
        return len(active), min(changes, default=math.inf)

    def advance(self, until: float, wanted: _Transfer | None = None) -> None:
        """To the time ``until``, or until ``wanted`` is done."""
        while wanted is None or wanted.done < 0:
            heads = self._heads()
            active = [head for head in heads if head.ready <= self.now]
            waiting = [head.ready for head in heads if head.ready > self.now]
            share = Counter(head.link for head in active if head.latency <= 0)
            step = min(waiting, default=math.inf) - self.now
            for head in active:
                step = min(step, head.latency if head.latency > 0 else head.left * share[head.link])
            step = min(step, until - self.now)
            if step == math.inf:
                break
            for head in active:
                if head.started < 0:
                    head.started = self.now
                if head.latency > 0:
                    head.latency -= step
                    if head.latency < 1e-12:
                        head.latency = 0.0
                else:
                    head.left -= step / share[head.link]
            self.now += step
            for head in active:
                if head.latency <= 0 and head.left <= 1e-12:
                    self._finish(head)
            if self.now >= until:
                break

    def _finish(self, head: _Transfer) -> None:
        head.done = self.now
        queue = self.queues[head.event.stream]
        queue.pop(0)
        self.finished.append(head)
        if queue:
            queue[0].ready = max(queue[0].ready, self.now)


def simulate(cluster: Cluster, events: Sequence[Event]) -> Timeline:
    """The step whose events these are, on this cluster."""
    return _Player(cluster).play(events)


class _Player:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._links = _Links()
        self._transfers: dict[int, _Transfer] = {}
        self._demands: dict[tuple, Demand] = {}
        self._kernels: dict[Kernel, float] = {}
        self._host = self._compute = 0.0
        self._timeline = Timeline()

    def play(self, events: Sequence[Event]) -> Timeline:
        launch, collective = self._cluster.host.launch_us * 1e-6, self._cluster.host.collective_us * 1e-6
        timeline = self._timeline
        for event in events:
            if isinstance(event, Kernel):
                self._host += launch
                self._run(event)
            elif isinstance(event, Start):
                self._host += collective if event.weight else launch
                self._start(event)
            elif isinstance(event, Wait):
                self._wait(self._transfers[event.number])
            elif isinstance(event, Sync):
                self._host = max(self._host, self._compute)
            elif isinstance(event, Mark):
                timeline.marks[event.name] = self._compute
        timeline.seconds = max(self._compute, self._host)
        self._links.advance(math.inf)
        for transfer in self._links.finished:
            event = transfer.event
            timeline.spans.append(
                Span(event.stream, transfer.started, transfer.done, event.weight or event.axis, event.kind)
            )
        return timeline

    def _run(self, kernel: Kernel) -> None:
        seconds = self._kernels.get(kernel)
        if seconds is None:
            seconds = self._kernels[kernel] = kernel_seconds(self._cluster, kernel)
        timeline = self._timeline
        start = max(self._compute, self._host)
        timeline.host_bound_s += start - self._compute
        self._compute = start + seconds if not kernel.flops else self._end_beside_collectives(start, seconds)
        timeline.compute_s += self._compute - start
        timeline.spans.append(
            Span("compute", start, self._compute, kernel.name, kernel.unit if kernel.flops else "memory")
        )

    def _end_beside_collectives(self, start: float, seconds: float) -> float:
        """When a kernel ends that takes so many ``seconds`` with all processors."""
        now, links = start, self._links
        each = self._cluster.nvlink.num_processors / self._cluster.gpu.num_processors
        while True:
            links.advance(now)
            num_active, change = links.in_flight()
            rate = max(0.25, 1 - each * num_active)
            if now + seconds / rate <= change:
                return now + seconds / rate
            seconds -= (change - now) * rate
            now = change

    def _start(self, event: Start) -> None:
        key = event.what, event.ranks, event.num_bytes
        needed = self._demands.get(key)
        if needed is None:
            needed = self._demands[key] = demand(self._cluster, *key)
        link = "network" if needed.network_s > needed.nvlink_s else "nvlink"
        left = max(needed.nvlink_s, needed.network_s)
        start = max(self._host, self._compute)
        transfer = self._transfers[event.number] = _Transfer(event, start, needed.latency_s, left, link)
        self._links.add(transfer)
        timeline = self._timeline
        for name, seconds, rate in (
            ("nvlink", needed.nvlink_s, self._cluster.nvlink.bandwidth_gb_s * self._cluster.efficiency.nvlink),
            ("network", needed.network_s, self._cluster.network.bandwidth_gb_s * self._cluster.efficiency.network),
        ):
            timeline.busy[name] += seconds
            timeline.link_bytes[event.axis, name] += seconds * rate * 1e9

    def _wait(self, transfer: _Transfer) -> None:
        self._links.advance(math.inf, transfer)
        if transfer.done <= self._compute:
            return
        event, timeline = transfer.event, self._timeline
        timeline.exposed[event.weight, event.kind] += transfer.done - self._compute
        timeline.spans.append(Span("compute", self._compute, transfer.done, event.weight or event.axis, "wait"))
        self._compute = transfer.done
