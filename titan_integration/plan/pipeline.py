"""When the stages of a pipeline do what, from what each action takes by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .cluster import Cluster
from .network import demand
from .rank import Action
from .simulate import Timeline


@dataclass(frozen=True)
class StageTimes:
    """Of one rank of axis pp, in seconds.

    Attributes:
        actions: of each "forward" and "backward" of each of its stages (the mean over microbatches).
        before, after: the first action, and after the last one: reductions over the replicas, clipping, the optimizer.
    """

    actions: Mapping[tuple[str, int], float]
    before: float
    after: float


def stage_times(timeline: Timeline, actions: Sequence[Action]) -> StageTimes:
    """From a step of this rank alone."""
    marks = timeline.marks
    names = [f"{action.kind} {action.stage} {action.microbatch}" for action in actions]
    starts = [marks[name] for name in names]
    ends = [*starts[1:], marks["finish"]]
    found: dict[tuple[str, int], list[float]] = {}
    for action, start, end in zip(actions, starts, ends):
        found.setdefault((action.kind, place_of(action, actions)), []).append(end - start)
    means = {key: sum(times) / len(times) for key, times in found.items()}
    return StageTimes(means, starts[0], timeline.seconds - marks["finish"])


def place_of(action: Action, actions: Sequence[Action]) -> int:
    """Which of its rank's stages an action belongs to: 0, 1, ..."""
    return sorted({one.stage for one in actions}).index(action.stage)


def pipeline_seconds(
    cluster: Cluster,
    actions: Mapping[int, Sequence[Action]],
    times: Sequence[StageTimes],
    peers: Sequence[int],
    num_bytes: int,
) -> float:
    """Seconds of a step.

    Args:
        actions: of each rank of axis pp, in order.
        times: of each.
        peers: their global ranks.
        num_bytes: that a stage gives to the next.
    """
    num_stages = 1 + max(action.stage for order in actions.values() for action in order)
    holder = {action.stage: rank for rank, order in actions.items() for action in order}
    done: dict[Action, float] = {}
    clocks = [time.before for time in times]
    next_up = [0] * len(times)

    def arrives(source: Action, rank: int) -> float | None:
        """When what ``source`` gives is at ``rank``."""
        if source not in done:
            return None
        sender = holder[source.stage]
        if sender == rank:
            return done[source]
        ranks = tuple(sorted((peers[sender], peers[rank])))
        return done[source] + demand(cluster, "send", ranks, num_bytes).seconds

    progress = True
    while progress:
        progress = False
        for rank, order in actions.items():
            while next_up[rank] < len(order):
                action = order[next_up[rank]]
                forward = action.kind == "forward"
                stage = action.stage - 1 if forward else action.stage + 1
                ready: float | None = 0.0
                if 0 <= stage < num_stages:
                    ready = arrives(Action(action.kind, stage, action.microbatch), rank)
                if ready is None:
                    break
                start = max(clocks[rank], ready)
                clocks[rank] = done[action] = start + times[rank].actions[action.kind, place_of(action, order)]
                next_up[rank] += 1
                progress = True
    if any(place < len(actions[rank]) for rank, place in enumerate(next_up)):
        raise RuntimeError("the pipeline's schedule waits for itself")
    return max(clock + time.after for clock, time in zip(clocks, times))
