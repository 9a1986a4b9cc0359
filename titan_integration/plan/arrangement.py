"""One arrangement of a job on a cluster: what its step costs."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gtp_dtensor.schedule import role_of_fqn

from .cluster import Cluster
from .device import fake_world
from .pipeline import StageTimes, pipeline_seconds, stage_times
from .rank import Rank, RankStep, build_rank, pipeline_actions, with_degrees
from .record import Event, Mark, Recorder, Start, Wait
from .simulate import Timeline, simulate

NUM_RECORDED = 3  # microbatches: the first, one in the middle, the last


@dataclass(frozen=True, order=True)
class Arrangement:
    """Degrees, and the format that weights travel in ("" as in the TOML). dp_shard takes the ranks that are left."""

    tp: int = 1
    gtp: int = 1
    pp: int = 1
    ep: int = 1
    egtp: int = 1
    wire: str = ""

    def __str__(self) -> str:
        sizes = dataclasses.asdict(self)
        wire = sizes.pop("wire")
        text = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "gtp1"
        return f"{text} {wire}" if wire else text


def arrangement_of(job_config) -> Arrangement:
    """The one that a TOML names."""
    parallelism, gtp = job_config.parallelism, job_config.gtp
    tp, etp = parallelism.tensor_parallel_degree, parallelism.expert_tensor_parallel_degree
    return Arrangement(
        tp=tp,
        gtp=max(1, (gtp.tensor_parallel_num_weight_shards or tp) // tp),
        pp=parallelism.pipeline_parallel_degree,
        ep=parallelism.expert_parallel_degree,
        egtp=max(1, (gtp.expert_tensor_parallel_num_weight_shards or etp) // etp),
    )


@dataclass
class Plan:
    """What a step of one arrangement costs. Seconds and bytes; of one GPU, that with the most memory.

    Attributes:
        arrangement, world: what was planned.
        seconds: of a step.
        compute_s, host_s: in which kernels ran, and the computing stream waited for the host.
        bubble_s: in which a pipeline stage had nothing to do.
        exposed: communication that the computing stream waited for, by (role of the weight or "", kind).
        memory: by kind, at the peak.
        stages: of a pipeline, the memory of those that were built.
        link_bytes: received in a step, by (axis, link).
        volumes: bytes that travelled of sharded weights, by ("gather" or "reduce", format), and their elements by
            ("elements", format) for one use each way.
        num_microbatches: of a step.
        tokens: of a step, of the whole job.
        flops: of a step, of the whole job, as torchtitan counts them.
        num_layers: that were built, where the rest is extrapolated; 0: all.
        timeline: of the recorded rank, where it was asked for.
    """

    arrangement: Arrangement
    world: int
    seconds: float = 0.0
    compute_s: float = 0.0
    host_s: float = 0.0
    bubble_s: float = 0.0
    exposed: Counter = field(default_factory=Counter)
    memory: Counter = field(default_factory=Counter)
    stages: tuple[Counter, ...] = ()
    link_bytes: Counter = field(default_factory=Counter)
    volumes: Counter = field(default_factory=Counter)
    num_microbatches: int = 1
    tokens: int = 0
    flops: float = 0.0
    num_layers: int = 0
    timeline: Timeline | None = None

    @property
    def memory_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def exposed_s(self) -> float:
        return sum(self.exposed.values())

    @property
    def tokens_per_s(self) -> float:
        """Of one GPU."""
        return self.tokens / self.seconds / self.world

    def mfu(self, cluster: Cluster) -> float:
        """Model-flops utilization, of the bf16 peak."""
        return self.flops / self.seconds / self.world / (cluster.gpu.bf16_tflops * 1e12)


_LINEAR = ("seconds", "compute_s", "host_s", "bubble_s", "flops")
_LINEAR_COUNTERS = ("exposed", "memory", "link_bytes", "volumes")


def along(one: Plan, other: Plan, distance: float) -> Plan:
    """``one`` + distance x (``other`` - ``one``) in everything that grows with the number of layers or microbatches."""
    result = dataclasses.replace(other, timeline=None)
    for name in _LINEAR:
        first, second = getattr(one, name), getattr(other, name)
        setattr(result, name, first + distance * (second - first))
    for name in _LINEAR_COUNTERS:
        setattr(result, name, _along(getattr(one, name), getattr(other, name), distance))
    if one.stages:
        result.stages = tuple(_along(*both, distance) for both in zip(one.stages, other.stages, strict=True))
        result.memory = _heaviest(result.stages)
    return result


def _along(one: Counter, other: Counter, distance: float) -> Counter:
    values = {key: one[key] + distance * (other[key] - one[key]) for key in one.keys() | other.keys()}
    return Counter({key: max(0, value) for key, value in values.items()})


def _heaviest(stages: Sequence[Counter]) -> Counter:
    return max(stages, key=lambda memory: sum(memory.values()))


def configured(job_config, arrangement: Arrangement, world: int):
    """(the job in this arrangement, microbatches of a step).

    The batch stays that of the TOML: ``local_batch_size`` is that of a microbatch, and where there is a
    ``global_batch_size``, an arrangement with fewer data ranks makes more microbatches of it.

    Raises:
        ValueError: the global batch cannot be dealt out.
    """
    job = with_degrees(job_config, **{k: v for k, v in dataclasses.asdict(arrangement).items() if k != "wire"})
    if arrangement.wire:
        job.gtp.wire_format = arrangement.wire
    training, parallelism = job.training, job.parallelism
    data_ranks = world // (arrangement.tp * arrangement.pp * parallelism.context_parallel_degree)
    size = training.local_batch_size
    if arrangement.pp > 1 and job_config.parallelism.pipeline_parallel_degree > 1:
        size = parallelism.pipeline_parallel_microbatch_size
    total = training.global_batch_size
    if total < 0:
        each = training.local_batch_size * (2 * arrangement.pp if size == training.local_batch_size else 1)
        total = data_ranks * (each if arrangement.pp > 1 else training.local_batch_size)
    if not data_ranks or total % (size * data_ranks):
        raise ValueError(
            f"training.global_batch_size = {total} is not a multiple of {size} samples x {data_ranks} data ranks "
            f"({arrangement} on {world} ranks)"
        )
    num_microbatches = total // (size * data_ranks)
    if arrangement.pp > 1:
        parallelism.pipeline_parallel_microbatch_size = size
        training.local_batch_size = size * num_microbatches
    training.global_batch_size = total
    return job, num_microbatches


def make_plan(
    job_config,
    cluster: Cluster,
    world: int,
    arrangement: Arrangement,
    num_layers: int | None = None,
    keeps_timeline: bool = False,
) -> Plan:
    """Builds, records and simulates. With ``num_layers`` a model of that depth.

    Raises:
        ValueError, NotImplementedError: it cannot run so; names the key.
    """
    job, num_microbatches = configured(job_config, arrangement, world)
    if arrangement.pp > 1:
        return _pipeline_plan(job, cluster, world, arrangement, num_layers, num_microbatches, keeps_timeline)
    with fake_world(world, 0):
        rank = build_rank(job, world, num_layers)
        recorder = RankStep(rank, min(num_microbatches, NUM_RECORDED)).record()
        plan = _plan_of(rank, cluster, world, arrangement, recorder, num_microbatches, keeps_timeline)
    plan.num_layers = num_layers or 0
    return plan


def _plan_of(rank: Rank, cluster, world, arrangement, recorder: Recorder, num_microbatches, keeps_timeline) -> Plan:
    events = recorder.events

    def played(events: Sequence[Event]) -> Plan:
        timeline = simulate(cluster, events)
        plan = Plan(arrangement, world, timeline.seconds, timeline.compute_s, timeline.host_bound_s)
        plan.exposed = by_role(timeline.exposed)
        plan.link_bytes = timeline.link_bytes
        plan.volumes = volumes(rank, events)
        plan.timeline = timeline if keeps_timeline else None
        return plan

    plan = played(events)
    if num_microbatches > NUM_RECORDED:
        timeline = plan.timeline
        plan = along(plan, played(with_one_more(events)), num_microbatches - NUM_RECORDED)
        plan.timeline = timeline
    plan.memory = Counter(recorder.memory.peak())
    plan.num_microbatches = num_microbatches
    data_ranks = world // (arrangement.tp * arrangement.pp)
    plan.tokens = rank.tokens_per_microbatch * num_microbatches * data_ranks
    plan.flops = plan.tokens * rank.num_flops_per_token
    return plan


def by_role(exposed: Counter) -> Counter:
    """Summed over the layers: (role of the weight, kind) -> seconds."""
    found: Counter = Counter()
    for (weight, kind), seconds in exposed.items():
        found[role_of_fqn(weight) if weight else "", kind] += seconds
    return found


def volumes(rank: Rank, events: Sequence[Event]) -> Counter:
    """See :attr:`Plan.volumes`."""
    weights = {weight.fqn: weight for weight in rank.sharded_weights()}
    found: Counter = Counter()
    for event in events:
        if not isinstance(event, Start) or event.weight not in weights or event.axis.endswith(("_shard", "_replicate")):
            continue
        weight = weights[event.weight]
        what = event.kind.split()[0]
        if what in ("gather", "reduce"):
            found[what, weight.wire_name] += event.num_bytes
        if what == "reduce":
            found["elements", weight.wire_name] += math.prod(weight.tp_local_shape)
    return found


def with_one_more(events: Sequence[Event]) -> list[Event]:
    """The events of a step with its second microbatch twice, the last two recorded being the third's and the end."""
    places = {event.name: place for place, event in enumerate(events) if isinstance(event, Mark)}
    first, last = places["forward 1"], places["forward 2"]
    started = [event.number for event in events[:last] if isinstance(event, Start)]
    before = [event.number for event in events[:first] if isinstance(event, Start)]
    shift = len(started) - len(before)
    middle, after = events[first:last], events[last:]
    return [*events[:last], *(_shifted(event, shift) for event in middle), *(_shifted(event, shift) for event in after)]


def _shifted(event: Event, shift: int) -> Event:
    return dataclasses.replace(event, number=event.number + shift) if isinstance(event, (Start, Wait)) else event


def _pipeline_plan(job, cluster, world, arrangement, num_layers, num_microbatches, keeps_timeline) -> Plan:
    """Of stages: the first, one in the middle and the last are built; the others are as the middle one."""
    pp = arrangement.pp
    stages: dict[int, tuple[Plan, StageTimes]] = {}
    for place in sorted({0, pp // 2, pp - 1}):
        with fake_world(world, place * (world // pp)):
            rank = build_rank(copy.deepcopy(job), world, num_layers)
            recorder = RankStep(rank).record()
            actions = pipeline_actions(rank.schedule)
            plan = _plan_of(rank, cluster, world, arrangement, recorder, 1, True)
            stages[place] = plan, stage_times(plan.timeline, actions[place])
            peers = [other * (world // pp) for other in range(pp)]
            hidden = RankStep(rank).hidden_bytes
    times = [stages[place][1] if place in stages else stages[pp // 2][1] for place in range(pp)]
    seconds = pipeline_seconds(cluster, actions, times, peers, hidden)
    memories = tuple(plan.memory for plan, _ in stages.values())
    busiest = max((plan for plan, _ in stages.values()), key=lambda plan: plan.seconds)
    result = dataclasses.replace(busiest, memory=_heaviest(memories), stages=memories, seconds=seconds)
    result.num_layers = num_layers or 0
    result.bubble_s = seconds - busiest.seconds
    result.num_microbatches = num_microbatches
    result.tokens *= num_microbatches
    result.flops = result.tokens * rank.num_flops_per_token
    result.timeline = busiest.timeline if keeps_timeline else None
    return result


def depths(num_layers: int, least: int, period: int, pp: int) -> tuple[int, int] | None:
    """Two depths of which the plan of ``num_layers`` is extrapolated; None where there is nothing to gain.

    Args:
        num_layers: of the model.
        least: layers with which every kind of layer is there.
        period: of layers that repeat.
        pp: stages, which all grow alike.
    """
    step = math.lcm(2 * period, pp)
    one = -(-max(least, 2) * pp // step) * step  # so that the first stage, too, has every kind
    return None if one + step >= num_layers else (one, one + step)


def make_short_plan(
    job_config, cluster: Cluster, world: int, arrangement: Arrangement, shape: tuple[int, int, int]
) -> Plan:
    """:func:`make_plan`, extrapolated from two short models: everything but the ends of a model repeats.

    Args:
        shape: (layers, least, period), see :func:`depths`.
    """
    num_layers, least, period = shape
    short = depths(num_layers, least, period, arrangement.pp)
    if short is None:
        return make_plan(job_config, cluster, world, arrangement)
    plan: Callable[[int], Plan] = lambda depth: make_plan(job_config, cluster, world, arrangement, depth)  # noqa: E731
    result = along(plan(short[0]), plan(short[1]), (num_layers - short[0]) / (short[1] - short[0]))
    result.num_layers = short[1]
    return result
