"""Which arrangements there are, and which of them is best."""

from __future__ import annotations

import copy
import dataclasses
import math
import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field

from titan_integration.families import families

from . import worker
from .arrangement import Arrangement, Plan, arrangement_of, make_plan, make_short_plan
from .cluster import Cluster

_MOST_TP = 8  # that is looked at by default
_NUM_WORLDS, _MOST_RANKS = 6, 4096  # of weak scaling
_NUM_SEEDS = 4  # arrangements around which the second round looks


@dataclass(frozen=True)
class Choices:
    """Values to look at, by degree; None: all that may make sense. ``wire`` () is the TOML's format only."""

    tp: tuple[int, ...] | None = None
    gtp: tuple[int, ...] | None = None
    pp: tuple[int, ...] | None = None
    ep: tuple[int, ...] | None = None
    egtp: tuple[int, ...] | None = None
    wire: tuple[str, ...] = ()


@dataclass
class Ranking:
    """Attributes:
    cluster, world: that was planned for.
    plans: of arrangements that fit into the memory, best first.
    too_large: of those that do not, smallest first.
    refused: (arrangement, why it cannot run).
    """

    cluster: Cluster
    world: int
    plans: list[Plan] = field(default_factory=list)
    too_large: list[Plan] = field(default_factory=list)
    refused: list[tuple[Arrangement, str]] = field(default_factory=list)

    def add(self, plan: Plan) -> None:
        """Into its place."""
        if plan.memory_bytes <= memory_limit(self.cluster):
            self.plans.append(plan)
            self.plans.sort(key=lambda plan: -plan.tokens_per_s)
        else:
            self.too_large.append(plan)
            self.too_large.sort(key=lambda plan: plan.memory_bytes)


# Of the GPU's memory: the rest is the CUDA context, communicators' buffers and what fragmentation loses.
_USABLE = 0.92


def memory_limit(cluster: Cluster) -> float:
    """Bytes that a plan may need."""
    return _USABLE * cluster.gpu.memory_gb * 1e9


def model_shape(job_config) -> tuple[int, int, int]:
    """(layers, layers until every kind is there, period), see ``arrangement.depths``."""
    args = families()[job_config.model.name].flavors[job_config.model.flavor]
    period = getattr(args, "interleave_moe_layer_step", 1)
    period = math.lcm(period, _checkpoint_period(job_config))
    return args.n_layers, getattr(args, "n_dense_layers", 0) + period, period


def _checkpoint_period(job_config) -> int:
    section = job_config.activation_checkpoint
    option = section.selective_ac_option
    return int(option) if section.mode == "selective" and str(option).isdigit() else 1


def _powers(low: int, high: int) -> tuple[int, ...]:
    return tuple(1 << e for e in range(low.bit_length() - 1, max(high, 0).bit_length()) if low <= 1 << e <= high)


def candidates(job_config, cluster: Cluster, world: int, choices: Choices) -> list[Arrangement]:
    """First round: tensor, generalized tensor and expert parallelism; the rest as the choices demand, else 1."""
    family = families()[job_config.model.name]
    num_experts = family.num_experts(job_config.model.flavor)
    domain = cluster.ranks_per_domain
    tps = choices.tp or _powers(1, min(_MOST_TP, domain, world))
    eps = choices.ep or (_powers(min(8, num_experts), min(num_experts, world)) if num_experts else (1,))
    pps = choices.pp or (1,)
    egtps = choices.egtp or (1,)
    found = []
    for tp in tps:
        for pp in pps:
            for gtp in choices.gtp or _powers(2, min(world // (tp * pp), max(domain, 64))):
                found += [
                    Arrangement(tp, gtp, pp, ep, egtp, wire)
                    for ep in eps
                    for egtp in egtps
                    for wire in choices.wire or ("",)
                ]
    return list(dict.fromkeys(found))


def neighbours(job_config, world: int, choices: Choices, seeds: Sequence[Plan]) -> list[Arrangement]:
    """Second round: the best so far with pipelines and shared experts."""
    family = families()[job_config.model.name]
    num_experts = family.num_experts(job_config.model.flavor)
    found = []
    for plan in seeds:
        one = plan.arrangement
        if choices.egtp is None and num_experts:
            found += [dataclasses.replace(one, egtp=egtp) for egtp in (2, 4)]
        if choices.pp is None:
            for pp in (2, 4):
                for gtp in {one.gtp, max(1, one.gtp // pp)} if choices.gtp is None else {one.gtp}:
                    found.append(dataclasses.replace(one, pp=pp, gtp=gtp))
    return list(dict.fromkeys(found))


def search(
    job_config,
    cluster: Cluster,
    world: int,
    choices: Choices,
    num_exact: int = 0,
    source: tuple[int, str, Sequence[str]] | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> Ranking:
    """Plans all candidates and, around the best of them, some more.

    Args:
        num_exact: how many of the best are planned again with all their layers.
        source: (processes that plan, the TOML that ``job_config`` is of, options); None: this process plans.
        tell: is given a line on what happens.
    """
    ranking = Ranking(cluster, world)
    done: set[Arrangement] = set()
    with _Workers(job_config, cluster, world, source) as workers:

        def plan_all(arrangements: Iterable[Arrangement]) -> None:
            wanted = [one for one in dict.fromkeys(arrangements) if one not in done]
            done.update(wanted)
            for arrangement, result in workers.run(wanted, False):
                if isinstance(result, Plan):
                    ranking.add(result)
                else:
                    ranking.refused.append((arrangement, result))
            tell(f"planned {len(wanted)} arrangements; {len(ranking.plans)} of {len(done)} fit")

        own = arrangement_of(job_config)
        plan_all([*([own] if own.gtp > 1 or own.egtp > 1 else []), *candidates(job_config, cluster, world, choices)])
        seeds = ranking.plans[:_NUM_SEEDS] or ranking.too_large[:_NUM_SEEDS]
        plan_all(neighbours(job_config, world, choices, seeds))
        for arrangement, result in workers.run([plan.arrangement for plan in ranking.plans[:num_exact]], True):
            if isinstance(result, Plan):
                ranking.plans = [plan for plan in ranking.plans if plan.arrangement != arrangement]
                ranking.add(result)
    return ranking


def worlds_of(arrangement: Arrangement) -> list[int]:
    """Numbers of ranks for :func:`weak_scaling`: the least that the arrangement needs, and doublings of it."""
    least = math.lcm(arrangement.tp * arrangement.gtp, arrangement.ep * arrangement.egtp) * arrangement.pp
    return [least << doubling for doubling in range(_NUM_WORLDS) if least << doubling <= _MOST_RANKS]


def weak_scaling(job_config, cluster: Cluster, arrangement: Arrangement, worlds: Sequence[int]) -> list[Plan]:
    """The same arrangement, with the same work for each rank, on more and more ranks.

    Raises:
        ValueError, NotImplementedError: it cannot run on so many; names the key.
    """
    job = dataclasses.replace(job_config, training=dataclasses.replace(job_config.training, global_batch_size=-1))
    return [make_short_plan(job, cluster, world, arrangement, model_shape(job)) for world in worlds]


def plan_or_reason(job_config, cluster: Cluster, world: int, arrangement: Arrangement, is_exact: bool) -> Plan | str:
    """A plan, or why there is none."""
    job_config = copy.deepcopy(job_config)
    try:
        if is_exact:
            return make_plan(job_config, cluster, world, arrangement)
        return make_short_plan(job_config, cluster, world, arrangement, model_shape(job_config))
    except (ValueError, NotImplementedError) as error:
        return str(error)


class _Workers:
    """Processes that plan, or this one."""

    def __init__(self, job_config, cluster: Cluster, world: int, source: tuple | None) -> None:
        self._context = job_config, cluster, world
        self._pool = None
        if source is not None:
            num_processes, toml, options = source
            spawn = multiprocessing.get_context("spawn")
            arguments = toml, tuple(options), cluster, world
            self._pool = ProcessPoolExecutor(num_processes, spawn, worker.start, arguments)

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def run(self, arrangements: Sequence[Arrangement], is_exact: bool) -> list[tuple[Arrangement, Plan | str]]:
        """In order."""
        if self._pool is None:
            return [(one, plan_or_reason(*self._context, one, is_exact)) for one in arrangements]
        futures = [self._pool.submit(worker.plan, one, is_exact) for one in arrangements]
        return [(one, future.result()) for one, future in zip(arrangements, futures)]
