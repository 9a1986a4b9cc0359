"""What happened since the last reset, by weight and by runtime; see ``GTPStats``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .runtime import Runtime
    from .weight import ShardedWeight


@dataclass(slots=True)
class WeightCounters:
    """What happened to one weight since the last reset. Summed over weights these make ``GTPStats``."""

    num_forward_gathers: int = 0
    num_recompute_gathers: int = 0
    num_backward_gathers: int = 0
    num_kept_at_turn: int = 0
    num_prefetch_hits: int = 0
    num_on_demand_gathers: int = 0
    num_reductions: int = 0
    num_replica_reductions: int = 0
    num_quantizations: int = 0
    gather_bytes: int = 0
    reduce_bytes: int = 0

    def reset(self) -> None:
        for field in fields(self):
            setattr(self, field.name, 0)


@dataclass(slots=True)
class RuntimeCounters:
    """What cannot be told weight by weight."""

    num_mispredictions: int = 0
    num_small_reductions: int = 0
    num_refreshes: int = 0
    num_fences: int = 0
    live_lease_bytes: int = 0
    peak_lease_bytes: int = 0


class Tally:
    """What each replay of a CUDA graph adds to the counters of one runtime: what the captured step counted.

    While this is entered, the step is captured; the counters are afterwards what they were before. Replays are entered into
    the counters when somebody reads them: a replay costs one addition.

    Args:
        left_out: what replays do not count.

    Attributes:
        num_replays: not entered yet.
    """

    def __init__(self, runtime: Runtime, left_out: tuple[str, ...] = ()) -> None:
        self._runtime = runtime
        # Leases are freed as often as they are made.
        self._left_out = (*left_out, "peak_lease_bytes", "live_lease_bytes")
        self._peak = 0
        self._deltas: list[tuple[ShardedWeight | Runtime, dict[str, int]]] = []
        self.num_replays = 0

    def __enter__(self) -> Tally:
        runtime = self._runtime
        self._before = [(owner, _values(owner.counters)) for owner in (runtime, *runtime.live_weights())]
        runtime.counters.peak_lease_bytes = runtime.counters.live_lease_bytes
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._peak = self._runtime.counters.peak_lease_bytes
        self._deltas = []
        for owner, before in self._before:
            after = _values(owner.counters)
            delta = {name: after[name] - before[name] for name in after if after[name] != before[name]}
            for name in self._left_out:
                delta.pop(name, None)
            for name, value in before.items():
                if name != "live_lease_bytes":
                    setattr(owner.counters, name, value)
            if delta and kind is None:
                self._deltas.append((owner, delta))
        del self._before

    def enter(self) -> None:
        """Into the counters."""
        num, self.num_replays = self.num_replays, 0
        if not num:
            return
        for owner, delta in self._deltas:
            for name, value in delta.items():
                setattr(owner.counters, name, getattr(owner.counters, name) + num * value)
        counters = self._runtime.counters
        counters.peak_lease_bytes = max(counters.peak_lease_bytes, self._peak)


def _values(counters: WeightCounters | RuntimeCounters) -> dict[str, int]:
    return {field.name: getattr(counters, field.name) for field in fields(counters)}
