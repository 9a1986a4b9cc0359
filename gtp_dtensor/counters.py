"""What happened since the last reset, by weight and by runtime; see ``GTPStats``."""

from __future__ import annotations

from dataclasses import dataclass, fields


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
