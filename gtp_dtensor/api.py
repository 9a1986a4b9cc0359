"""The functions that take a model: drain, refresh, direct use of a weight, statistics."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
import torch.nn as nn

from . import functional
from .counters import WeightCounters
from .members import STATE, ModuleState, model_members, model_runtimes
from .plan import clean_fqn
from .runtime import Runtime
from .schedule import IN_BACKWARD, Kind, Use, is_out_of_reach
from .weight import ShardedWeight


def finalize_grads(model: nn.Module) -> None:
    """Wait for all pending gradient reductions of ``model`` and accumulate them into ``.grad``.

    Done by itself at the end of every backward and before every optimizer step; nothing is pending afterwards, also of
    what :func:`set_requires_gradient_sync` kept back. Gathers for a backward that were issued ahead and not used are freed.
    """
    for runtime in model_runtimes(model):
        runtime.finalize()


def set_requires_gradient_sync(model: nn.Module | Iterable[nn.Module], requires_gradient_sync: bool) -> None:
    """Whether the next backwards bring gradients to all replicas and into ``.grad``: those of the parameters of ``model``,
    which may be a part of a larger one, or several (the stages of a pipeline).

    While False, gradients are summed over the gtp axis only and kept back, in memory of the size of this rank's shards;
    where there are no replicas those of sharded weights go into ``.grad`` at once. For accumulation over microbatches:
    set False before the first and True before the last backward (whose communication then overlaps it), or call
    :func:`finalize_grads` after the last. ``zero_grad()`` does not reach what is kept back: where a step is given up
    (a microbatch raised), call :func:`finalize_grads` first. Gradients that hooks or ``torch.autograd.grad`` ask for are
    never kept back.
    """
    for part in (model,) if isinstance(model, nn.Module) else model:
        for member in model_members(part):
            member.keeps_back = not requires_gradient_sync


def refresh(model: nn.Module) -> None:
    """To be called after writing into parameters by hand: compute shards are rebuilt before the next gather, and parameters
    that stay whole are cast anew.

    Needed where ``param_dtype`` differs from the parameters' dtype, between two training forwards of a model that an
    optimizer trains, for writes that leave no trace: foreach and fused kernels called by hand, writes through
    ``param.data``, collectives on local tensors. Optimizer steps, ``load_state_dict`` and in-place operators on a
    single parameter are noticed, and forwards without gradients do not rely on it.
    """
    for member in model_members(model):
        if isinstance(member, ShardedWeight):
            member.mark_changed()
        else:
            member.keep_copy(None)


@contextlib.contextmanager
def materialized(module: nn.Module, name: str = "weight") -> Iterator[torch.Tensor]:
    """The gathered weight of ``module``, for direct use: ``loss = chunked_loss(h, w)``; gradients flow back.

    Yields a tensor of the weight's logical shape in compute dtype; after tensor parallelism a DTensor on the tp mesh.
    It may be used after the block only by the backward of what the block computed. A module that GTP did not touch
    yields its parameter.

    Raises:
        AttributeError: ``module`` has no parameter of that name.
    """
    if module._parameters.get(name) is None:
        raise AttributeError(f"{type(module).__name__} has no parameter '{name}'; it has {list(module._parameters)}")
    state: ModuleState | None = module.__dict__.get(STATE)
    if state is None:
        yield module._parameters[name]
    elif name in state.weights:
        yield functional.materialize(module, name)
    else:
        yield functional.use_small(module, name)


@dataclass
class GTPStats:
    """Counters of a model since the last ``reset_stats``.

    Bytes are the payload of whole gathered weights and unsharded gradients as they travelled, padding included, so
    that bytes divided by the weight's elements is the specification's "B per element".

    Attributes:
        num_forward_gathers: gathers issued for forward uses (training and inference).
        num_recompute_gathers: gathers issued for forwards re-run by activation checkpointing.
        num_backward_gathers: gathers issued for gradients of inputs.
        num_kept_at_turn: gradients of inputs without a gather: the weight that a forward ended with was still there for the
            backward that began with it.
        num_prefetch_hits: uses whose gather had been issued ahead.
        num_on_demand_gathers: gathers issued at the use itself.
        num_mispredictions: uses other than the one that the schedule expected.
        num_reductions: reduce-scatters over gtp of sharded weights' gradients.
        num_replica_reductions: what goes on from there: reduce-scatters over the optimizer shard axis, all-reduces over
            the axis of copies.
        num_small_reductions: coalesced reductions of the gradients of parameters that stay whole.
        num_refreshes: compute shards rewritten.
        num_fences: with symmetric memory: how often ranks told each other, around that, that they had read or rewritten
            them; two an optimizer step.
        num_quantizations: of them, those that were quantized.
        gather_bytes: payload gathered.
        reduce_bytes: payload reduced (sharded weights).
        live_lease_bytes: gathered weights in memory now.
        peak_lease_bytes: the most of them at one time; in a model with experts the most of these and the most of the
            others, which need not be at one time.
        num_pending: gradients that are not in ``.grad`` yet; 0 after a drain.
        num_sharded_weights: sharded weights of the model.
        symmetric_bytes: memory that peers reach (compute shards, inboxes), unknown to torch's caching allocator; of all
            models on these mesh axes.
    """

    num_forward_gathers: int = 0
    num_recompute_gathers: int = 0
    num_backward_gathers: int = 0
    num_kept_at_turn: int = 0
    num_prefetch_hits: int = 0
    num_on_demand_gathers: int = 0
    num_mispredictions: int = 0
    num_reductions: int = 0
    num_replica_reductions: int = 0
    num_small_reductions: int = 0
    num_refreshes: int = 0
    num_fences: int = 0
    num_quantizations: int = 0
    gather_bytes: int = 0
    reduce_bytes: int = 0
    live_lease_bytes: int = 0
    peak_lease_bytes: int = 0
    num_pending: int = 0
    num_sharded_weights: int = 0
    symmetric_bytes: int = 0


def stats(model: nn.Module) -> GTPStats:
    """The counters of ``model`` since the last :func:`reset_stats`. All 0 where GTP is off."""
    result = GTPStats()
    runtimes = model_runtimes(model)
    result.symmetric_bytes = sum(transport.num_bytes for transport in {runtime.transport for runtime in runtimes})
    for runtime in runtimes:
        runtime.enter_tallies()
        for field in fields(runtime.counters):
            setattr(result, field.name, getattr(result, field.name) + getattr(runtime.counters, field.name))
        result.num_pending += runtime.reducer.num_pending
    for member in model_members(model):
        if isinstance(member, ShardedWeight):
            result.num_sharded_weights += 1
            for field in fields(WeightCounters):
                setattr(result, field.name, getattr(result, field.name) + getattr(member.counters, field.name))
    return result


def reset_stats(model: nn.Module) -> None:
    """Set the counters of ``model`` to zero; the peak of gathered bytes starts at what is gathered now."""
    for runtime in model_runtimes(model):
        runtime.reset_counters()
    for member in model_members(model):
        if isinstance(member, ShardedWeight):
            member.counters.reset()


@dataclass(frozen=True)
class ScheduleRow:
    """One use of one weight in the learned schedule.

    ``issued_at``: the position at whose use the gather is issued; its own position: on demand; None: no gather, the
    weight is still there from its recompute, or from the forward's end. Microseconds of the device, None where no step was
    timed (see :func:`time_next_step`): ``waits_us``, for the weight, which is exposed communication; ``computes_us``, from
    there to the next use.
    """

    position: int
    kind: str
    weight: str
    format: str
    num_bytes: int
    issued_at: int | None
    waits_us: float | None = None
    computes_us: float | None = None


class ScheduleTable(list[ScheduleRow]):
    """The rows of :func:`schedule_table`, readable when printed."""

    def __str__(self) -> str:
        if not self:
            return "(no schedule recorded yet)"
        width = max(len(row.weight) for row in self)
        lines = [f"{'pos':>5}  {'kind':<9}  {'weight':<{width}}  {'format':<8}  {'bytes':>12}  issued at"]
        is_timed = any(row.waits_us is not None for row in self)
        lines[0] += "  waits (us)  computes (us)" * is_timed
        for row in self:
            issued = "kept" if row.issued_at is None else str(row.issued_at)
            lines.append(
                f"{row.position:>5}  {row.kind:<9}  {row.weight:<{width}}  {row.format:<8}  {row.num_bytes:>12,}  {issued:<9}"
            )
            if row.waits_us is not None:
                lines[-1] += f"  {row.waits_us:>10.1f}  {row.computes_us:>13.1f}"
        return "\n".join(line.rstrip() for line in lines)


def schedule_table(model: nn.Module) -> ScheduleTable:
    """The learned schedule of ``model``: the uses of its last whole step, in order, with where each gather is
    issued."""
    names = {id(param): clean_fqn(name) for name, param in model.named_parameters()}
    table = ScheduleTable()
    for runtime in model_runtimes(model):
        uses = runtime.schedule.period()
        issued = issue_positions(runtime, uses)
        timings = runtime.look_ahead.timings_of(uses)
        for position, use in enumerate(uses):
            weight: ShardedWeight | None = runtime.weights[use.weight]()
            if weight is None:
                continue
            fqn = names.get(id(weight.param), weight.fqn)
            kind = use.kind.name.lower()
            row = ScheduleRow(position, kind, fqn, weight.wire_name, weight.gathered_bytes, issued[position])
            if timings:
                waits, computes = timings[position]
                row = replace(row, waits_us=waits / 1e3, computes_us=computes / 1e3)
            table.append(row)
    return table


def time_next_step(model: nn.Module) -> None:
    """Take the times of the next whole step, from one optimizer step to the next, for :func:`schedule_table`. At its end
    the host waits once for the device."""
    for runtime in model_runtimes(model):
        runtime.look_ahead.time_next_step()


def issue_positions(runtime: Runtime, uses: list[Use]) -> list[int | None]:
    """At which use the gather for each use is issued, as the runtime does it; None where none is."""
    issued: list[int | None] = list(range(len(uses)))
    for position in _kept_positions(runtime, uses):
        issued[position] = None
    if not runtime.config.weight_prefetch:
        return issued
    waiting: dict[int, int] = {}  # weight -> the use that its gather, issued ahead, is for
    aheads = runtime.schedule.period_aheads()
    for now, use in enumerate(uses):
        waiting.pop(use.weight, None)
        is_backward = use.kind in IN_BACKWARD

        def peek(ahead: int, after: int = now + 1) -> Use | None:
            # The runtime sees the step before repeated: beyond the end it looks at the beginning.
            return uses[(after + ahead) % len(uses)] if ahead < len(uses) else None

        distance = runtime.distance(use.weight, peek, aheads[now])
        for position in range(now + 1, min(now + 1 + distance, len(uses))):
            coming = uses[position]
            if is_out_of_reach(coming, is_backward, runtime.has_optimizer):
                break
            if coming.weight not in waiting and issued[position] is not None:
                waiting[coming.weight] = position
                issued[position] = now
    return issued


def _kept_positions(runtime: Runtime, uses: list[Use]) -> set[int]:
    """Backward uses that read what their recompute gathered, or the forward that ends where the backward begins."""
    kept, waiting, room = set(), {}, runtime.keep_limit()
    for position, use in enumerate(uses):
        weight = runtime.weights[use.weight]()
        if weight is None:
            continue
        if use.kind is Kind.FORWARD and not weight.has_view_for_backward:
            if uses[position + 1 : position + 2] and uses[position + 1][:2] == (use.weight, Kind.BACKWARD):
                waiting[use.weight] = weight.gathered_bytes
        if use.kind is Kind.RECOMPUTE and use.weight not in waiting and not weight.has_view_for_backward:
            if sum(waiting.values()) + weight.gathered_bytes <= room:
                waiting[use.weight] = weight.gathered_bytes
        elif use.kind is Kind.BACKWARD and use.weight in waiting:
            del waiting[use.weight]
            kept.add(position)
    return kept


def process_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """The communicators that ``model``'s gathers and reductions use, for setting their time-outs."""
    groups: Iterable[dist.ProcessGroup] = (
        group
        for runtime in model_runtimes(model)
        for transport in runtime.domain.transports
        for group in transport.process_groups()
    )
    return list(dict.fromkeys(groups))
