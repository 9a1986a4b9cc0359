"""What one model does with its sharded weights: schedule, leases, drain, statistics.

A runtime belongs to one root model on one gtp axis. It is reached from the modules it serves and from nowhere else, so
that several models and meshes live in one process without seeing each other, and a deleted model frees everything.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from .checks import check_peers
from .config import GTPConfig
from .counters import RuntimeCounters, Tally
from .domain import Domain
from .look_ahead import LookAhead, UseTimer
from .modes import in_backward, plain_ops
from .quantized import FiniteCheck, refresh_quantized
from .reduce import Reducer
from .schedule import IN_BACKWARD, Kind, Schedule, Use, block_distance, is_out_of_reach
from .small import SmallParam, copy_together
from .steps import watch_optimizers
from .weight import Lease, LeaseState, ShardedWeight

if TYPE_CHECKING:
    from .graph_capture import Captured
    from .members import RootState


_current_task, _is_grad_enabled = torch._C._current_graph_task_id, torch.is_grad_enabled
# Looking a member up in its class costs more than a method call.
_FORWARD, _INFERENCE, _RECOMPUTE, _BACKWARD = Kind
_IN_FLIGHT, _READY = LeaseState.IN_FLIGHT, LeaseState.READY


class _BackwardEnd:
    """Runs when one backward (one autograd graph task) ends. Dies unrun with the graph task if the backward raises."""

    def __init__(self, runtime: Runtime, task: int) -> None:
        self.runtime = runtime
        self.task = task

    def __call__(self) -> None:
        self.runtime.end_backward(self.task)


class Runtime:
    """The state of one root model on one gtp axis.

    Args:
        domain: the axes and their communicators.
        config: settings.
        num_data_ranks: over how many ranks' losses gradients are averaged, None: see :attr:`gradient_scale`.
    """

    def __init__(self, domain: Domain, config: GTPConfig, num_data_ranks: int | None = None) -> None:
        self.domain = domain
        self.config = config
        self.num_data_ranks = num_data_ranks
        self.transport = domain.transport
        self.schedule = Schedule()
        self.reducer = Reducer(self)
        self.counters = RuntimeCounters()
        self.tallies: list[Tally] = []  # of CUDA graphs
        self.captured: Captured | None = None  # by the capture that goes on
        # Members are held by their root and by the modules that own them; never by us, or nothing would be freed.
        self.weights: list[weakref.ref[ShardedWeight]] = []
        self.smalls: list[weakref.ref[SmallParam]] = []
        self.root_state: Callable[[], RootState | None] = lambda: None
        self._kept_bytes = 0
        self._largest_bytes = 0
        self.depth = 0  # of the root's forward, outside backwards
        self.last_read_outside: str | None = None  # the parameter that was read last outside of its module's forward
        self._starts_pass = False  # the next use is the first of a pass
        self.finite_checks: dict[tuple[str, ...], FiniteCheck] = {}  # of the last quantizations, by their weights
        self.is_compiled = False  # compiled code uses our weights
        self.has_optimizer = False  # an optimizer stepped on our weights
        self._has_small_copies = False
        self.is_stepping = False  # an optimizer's step runs, or raised before its end
        self._mispredictions_pruned = 0
        self._backwards: dict[int, weakref.ref[_BackwardEnd]] = {}
        self.look_ahead = LookAhead(self)
        self.timer: UseTimer | None = None  # while a step is timed
        # Asked for at each use. Experts have no usual distance.
        self.dgrad_first = not config.wgrad_before_dgrad
        self._prefetches = config.weight_prefetch
        self._usual_distance = None if domain.is_expert else config.look_ahead
        watch_optimizers(self)

    def __deepcopy__(self, memo: dict) -> Runtime:
        copied = Runtime(self.domain, self.config, self.num_data_ranks)
        memo[id(self)] = copied
        state = self.root_state()
        if state is not None and id(state.module()) in memo:
            copied.root_state = weakref.ref(copy.deepcopy(state, memo))
        elif self.domain.is_expert:
            # A part of the model is copied, without its root, which alone leads to the dense weights.
            with contextlib.suppress(ValueError):  # not known yet
                copied.gradient_scale = self.gradient_scale
        return copied

    # ---- membership

    def live_weights(self) -> list[ShardedWeight]:
        return [weight for weight in [ref() for ref in self.weights] if weight is not None]

    def live_smalls(self) -> list[SmallParam]:
        return [small for small in [ref() for ref in self.smalls] if small is not None]

    @property
    def syncs_gradients(self) -> bool:
        """Whether no member keeps its gradients back from the replicas."""
        return not any(member.keeps_back for member in (*self.live_weights(), *self.live_smalls()))

    def adopt(self, member: ShardedWeight | SmallParam) -> None:
        """Make ``member`` ours, with the next index of its kind."""
        table = self.weights if isinstance(member, ShardedWeight) else self.smalls
        member.index = len(table)
        member.serial = next(self.domain.serials)
        table.append(weakref.ref(member))
        if isinstance(member, ShardedWeight):
            self._largest_bytes = max(self._largest_bytes, member.gathered_bytes)
        state = self.root_state()
        if state is not None:
            state.members.append(member)

    def expel(self, member: ShardedWeight | SmallParam) -> None:
        """``member`` left the model; nothing of it may be gathered ahead any more."""
        table = self.weights if isinstance(member, ShardedWeight) else self.smalls
        table[member.index] = lambda: None
        if isinstance(member, ShardedWeight):
            member.drop_leases()

    @functools.cached_property
    def gradient_scale(self) -> float:
        """What summed gradients are multiplied by: 1, or one over the number of ranks whose losses are averaged.

        These are the ranks of the dense weights' data axes, for experts too: an expert's axes count other ranks, those
        that hold it, while the tokens of its expert-parallel peers reach it as well.

        Raises:
            ValueError: of experts it is not known how many there are.
        """
        runtimes = [self]
        fqn = next((weight.fqn for weight in self.live_weights()), "(no weight)")
        if self.domain.is_expert:
            root = self.root_state()
            runtimes = [] if root is None else [r for r in root.runtimes if not r.domain.is_expert]
            if any(r.config.calculate_per_token_loss != self.config.calculate_per_token_loss for r in runtimes):
                raise ValueError(
                    f"{fqn}, an expert's weight, has calculate_per_token_loss={self.config.calculate_per_token_loss} and the "
                    "dense weights of its model have not: give both styles the same setting"
                )
        if self.config.calculate_per_token_loss:
            return 1.0
        if self.num_data_ranks is not None:
            return 1.0 / self.num_data_ranks
        counts = {
            runtime.num_data_ranks or math.prod(transport.size for transport in runtime.domain.transports)
            for runtime in runtimes
        }
        if len(counts) != 1:
            found = f"are on {' and on '.join(map(str, sorted(counts)))} ranks" if counts else "are not under GTP"
            raise ValueError(
                f"{fqn}, an expert's weight on mesh axis {self.domain.gtp_mesh.mesh_dim_names} of size "
                f"{self.transport.size}: over how many ranks its gradient is to be averaged is not known, since the dense "
                f"weights of its model {found}; pass GTPStyle(is_expert=True, num_data_ranks=...), the number of ranks that "
                "read different data, or set GTPConfig(calculate_per_token_loss=True) where the loss is divided already"
            )
        return 1.0 / counts.pop()

    # ---- passes and backwards

    def enter_root(self) -> None:
        """The root's forward begins. Outside of it, and of backwards, nothing is gathered ahead."""
        if in_backward():
            return
        self.depth += 1
        if self.depth > 1:
            return
        self._starts_pass = True
        self.last_read_outside = None
        if torch.is_grad_enabled():
            _ = self.gradient_scale  # raises before anything is computed where it is not known
        if self.counters.num_mispredictions != self._mispredictions_pruned:  # perhaps the model has changed
            self._mispredictions_pruned = self.counters.num_mispredictions
            state = self.root_state()
            if state is not None:
                state.prune()
        # Writes that leave no trace (param.data, foreach kernels, an EMA) are common before an evaluation and in models
        # that no optimizer trains: there the copies are made anew each pass. In training the optimizer signals, at the end
        # of its step.
        if self.is_stepping or not (torch.is_grad_enabled() and self.has_optimizer):
            self.distrust_copies()
        elif not self._has_small_copies and self.captured is None:
            self._has_small_copies = True
            copy_together(self.live_smalls())

    @property
    def is_in_root(self) -> bool:
        """Whether the root's forward runs, as far as its hooks tell."""
        return self.depth > 0

    def forget_interrupted(self, num_outer: int) -> None:
        """Of the root's forwards that began, only ``num_outer`` still run."""
        self.depth = min(self.depth, num_outer)

    def exit_root(self) -> None:
        """The root's forward is over, or raised: only what its backward will read may stay gathered."""
        if in_backward():
            return
        self.depth = max(0, self.depth - 1)
        if self.depth == 0:
            for weight in self.live_weights():
                lease = weight.next_lease
                if lease is not None and not (lease.kind in IN_BACKWARD and torch.is_grad_enabled()):
                    self.drop(lease)

    def distrust_copies(self) -> None:
        """Rewrite each compute shard before its next gather."""
        for weight in self.live_weights():
            weight.distrust_copy()
        self.drop_small_copies()

    def drop_small_copies(self) -> None:
        """Parameters that stay whole may have been written: see [Note: copies in compute dtype] in small.py."""
        self._has_small_copies = False
        for small in self.live_smalls():
            small.keep_copy(None)

    def forward_kind(self) -> Kind:
        """The kind of a forward use that happens now."""
        if _current_task() != -1:
            return _RECOMPUTE
        return _FORWARD if _is_grad_enabled() else _INFERENCE

    def enter(self) -> None:
        """To be called before anything else at each use and each gradient: notices backwards that begin or died."""
        task = _current_task()
        if task == -1 and not self._backwards:
            return
        known = self._backwards.get(task)
        if known is not None and known() is not None:
            return
        dead = [known for known, end in self._backwards.items() if end() is None]
        for known in dead:
            del self._backwards[known]
        if dead and not self._backwards:
            self._void()
        if task == -1:
            return
        if not self._backwards:
            self._starts_pass = True
        end = _BackwardEnd(self, task)
        self._backwards[task] = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def end_backward(self, task: int) -> None:
        """A backward ended. Where it was a part of another (reentrant checkpointing), the other one drains."""
        self._backwards.pop(task, None)
        if self.captured is not None and self.captured.part is not None:
            return  # a part of one is captured
        if any(end() is not None for end in self._backwards.values()):
            return
        self.finalize(brings_out_all=False)
        self._backwards.clear()

    def finalize(self, brings_out_all: bool = True) -> None:
        """Accumulate all pending reductions, free what was gathered for a backward and not used.

        Without ``brings_out_all``, gradients of members that keep theirs back stay kept back. What the next microbatch's
        forward begins with may stay gathered.
        """
        if not in_backward():
            self.enter()  # drops the reductions of a backward that raised
        self.reducer.drain(brings_out_all)
        self.free_unused_leases(but_for_forward=True)

    def forget_passes(self) -> None:
        """What began will not end."""
        self._backwards.clear()
        self.depth, self._starts_pass = 0, False

    def _void(self) -> None:
        self.reducer.void()
        self.free_unused_leases()

    # ---- uses

    def in_capture(self, weight: ShardedWeight) -> Captured:
        """For ``weight``, in the capture that goes on.

        Raises:
            RuntimeError: it is of another model.
        """
        if self.captured is None:
            raise RuntimeError(
                f"{weight.fqn}: belongs to another model than the one that is captured: give graph_step() both, as "
                "torch.nn.ModuleList([...])"
            )
        return self.captured

    def acquire(
        self,
        weight: ShardedWeight,
        kind: Kind,
        may_keep: bool = True,
        num_writes: int | None = None,
        waits: bool = True,
    ) -> Lease:
        """The lease that a use reads; also issues the gathers that the schedule predicts next.

        Args:
            weight: what is used.
            kind: for what.
            may_keep: the lease of a recompute, or of the forward's end, may stay for the weight's backward use.
            num_writes: how often the weight had been written when the forward of this backward read it.
            waits: else the caller orders its stream after the gather, by the lease's ``wait``, before it reads.

        Raises:
            RuntimeError: it was written since.
        """
        task = _current_task()
        known = self._backwards.get(task)
        if (known is None or known() is None) and (task != -1 or self._backwards):
            self.enter()
        schedule = self.schedule
        if not schedule.record(weight.index, kind, self._starts_pass):
            self._note_misprediction(weight, kind)
        self._starts_pass = False
        weight.notice_writes()
        if num_writes is not None and num_writes != weight.num_writes:
            weight.refuse_changed()
        if (timer := self.timer) is not None:
            timer.arrive()
        looks_ahead = self.depth > 0 or kind is _BACKWARD or kind is _RECOMPUTE
        if not looks_ahead:
            weight.distrust_copy()
        lease, kept = weight.next_lease, weight.kept_lease
        if lease is None or kept is not None or weight.quantized is not None or lease.generation != weight.generation:
            lease = self._take(weight, kind)
        else:  # what _take would do
            weight.next_lease = None
        if lease is None:
            lease = self._gather_now(weight, kind)
        elif lease.prefetched:
            weight.counters.num_prefetch_hits += 1
        if waits or timer is not None:
            if lease.state is _IN_FLIGHT and not weight.checks_states:  # what Lease.wait does
                lease.state = _READY
                lease.transfer.wait()
            else:
                lease.wait()
        if timer is not None:
            timer.ready()
        coming = schedule.next_use
        if may_keep and (kind is _RECOMPUTE or kind is _FORWARD and coming is not None and coming.kind is _BACKWARD):
            if self._has_room_to_keep(weight) if kind is _RECOMPUTE else self._turns_at(weight, coming):
                self._keep(weight, lease, kind)
        # Elsewhere a module was called by itself: what comes next is up to the user's code.
        if looks_ahead and coming is not None and self._prefetches:
            self._prefetch(weight, kind, coming)
        return lease

    def release(self, lease: Lease) -> None:
        """The use has enqueued its reads of ``lease``."""
        if lease.weight.kept_lease is not lease:
            lease.end()

    def _take(self, weight: ShardedWeight, kind: Kind) -> Lease | None:
        is_kept = kind is _BACKWARD and weight.kept_lease is not None
        if is_kept:
            lease, weight.kept_lease = weight.kept_lease, None
            self._kept_bytes -= lease.num_bytes
            lease.prefetched = False
        else:
            lease, weight.next_lease = weight.next_lease, None
        quantized = weight.quantized
        if lease is not None and (
            lease.generation != weight.generation or quantized is not None and lease.view is not quantized.view_of(kind)
        ):
            lease.end()
            return None
        if is_kept and lease.kind is _FORWARD:
            weight.counters.num_kept_at_turn += 1
        return lease

    def _gather_now(self, weight: ShardedWeight, kind: Kind) -> Lease:
        if weight.compute_shard is None or weight.checks_states:
            self._make_ready(weight, kind)
        weight.counters.num_on_demand_gathers += 1
        return weight.gather(kind, False)

    def _make_ready(self, weight: ShardedWeight, kind: Kind) -> None:
        """For a gather: bring the compute shard up to date; checked where states are."""
        if weight.compute_shard is None:
            self.refresh_copies()
        if weight.checks_states:
            weight.check_copy()
            check_peers(self, [weight], kind.name.lower() + " use")

    def refresh_copies(self) -> None:
        """Rewrite every compute shard that is out of date: all in one foreach copy; where parameters are cut over
        replicas, then a gather for each over that axis, awaited when the weight is used (with symmetric memory: here)."""
        with plain_ops():
            stale = [weight for weight in self.live_weights() if weight.compute_shard is None]
            if stale and self.transport.is_capturing:
                self.in_capture(stale[0]).refreshed.update(stale)
            num_fences = self.transport.num_fences
            with self.transport.rewriting(stale):
                quantized = [weight for weight in stale if weight.quantized is not None]
                if quantized:
                    refresh_quantized(quantized)
                pairs = [pair for pair in (weight.refresh() for weight in stale) if pair is not None]
                if pairs:
                    torch._foreach_copy_([dst for dst, _ in pairs], [src for _, src in pairs])
                if self.domain.shard_transport is not None:
                    for weight in stale:
                        weight.collect_pieces()
            self.counters.num_fences += self.transport.num_fences - num_fences
            self.counters.num_refreshes += sum(weight.is_copied for weight in stale)

    def check_finite(self) -> None:
        """Raise where weights held NaN or infinity when they were quantized, as far as that is known by now."""
        for check in self.finite_checks.values():
            check.raise_if_not()

    # ---- looking ahead

    def _role(self, index: int) -> str | None:
        weight = self.weights[index]()
        return None if weight is None else weight.role

    def distance(self, index: int, peek: Callable[[int], Use | None], planned: int | None) -> int:
        """How many uses ahead gathers may be issued while weight ``index`` is used; ``peek`` tells these uses,
        ``planned`` is the plan for this one, if there is one."""
        if planned is not None:
            return planned
        if not self.domain.is_expert:
            return self.config.look_ahead
        # Each weight once in a pass; the search ends where the role occurs again, usually three uses ahead.
        farthest = self.config.look_ahead * len(self.weights) + 1
        return block_distance(peek, self._role, self._role(index), self.config.look_ahead, farthest)

    def _prefetch(self, used: ShardedWeight, current: Kind, coming: Use) -> None:
        schedule, distance = self.schedule, self._usual_distance
        if distance is None or schedule.ahead is not None:
            distance = self.distance(used.index, schedule.peek, schedule.ahead)
        is_backward = current is _BACKWARD or current is _RECOMPUTE
        for ahead, use in enumerate((coming,) if distance == 1 else schedule.coming(distance)):
            index, kind, starts_pass = use
            is_like_this = (kind is _BACKWARD or kind is _RECOMPUTE) is is_backward and not starts_pass
            if not is_like_this:
                is_microbatch = is_backward and self.has_optimizer and schedule.stays_in_step(ahead)
                if is_out_of_reach(use, is_backward, is_microbatch):
                    return
            weight = self.weights[index]()
            if weight is None:
                return
            captured = self.captured
            if captured is not None and not captured.may_gather(weight, kind):
                return
            if weight.next_lease is None and (kind is not _BACKWARD or weight.kept_lease is None):
                # A write that one rank alone made must be noticed before the gather, or it would gather again at the
                # use.
                weight.notice_writes()
                if weight.compute_shard is None or weight.checks_states:
                    self._make_ready(weight, kind)
                weight.next_lease = (
                    weight.gather(kind, True) if captured is None else captured.gather_ahead(weight, kind)
                )

    def _note_misprediction(self, used: ShardedWeight, kind: Kind) -> None:
        """Count it, and let go of gathers that neither this use nor the new prediction wants soon.

        Where a forward came instead of the backward that a weight stayed for, the weight goes, whatever is predicted now:
        it may be written before the next backward in ways that leave no trace.
        """
        self.counters.num_mispredictions += 1
        coming = self.schedule.coming(self.distance(used.index, self.schedule.peek, self.schedule.ahead))
        wanted = {used.index, *(use.weight for use in coming)}
        for weight in self.live_weights():
            if weight.next_lease is not None and weight.index not in wanted:
                self.drop(weight.next_lease)
            if weight.kept_lease is not None and kind not in IN_BACKWARD:
                self.drop(weight.kept_lease)

    def _turns_at(self, weight: ShardedWeight, coming: Use) -> bool:
        """Whether ``weight``, in use in a forward, is what the backward begins with: a second gather would lie beside it."""
        return coming.weight == weight.index and weight.kept_lease is None and not weight.has_view_for_backward

    def _has_room_to_keep(self, weight: ShardedWeight) -> bool:
        if weight.has_view_for_backward:
            return False
        if weight.kept_lease is not None or weight.gathered_bytes == 0:
            return weight.kept_lease is None
        kept_bytes = sum(runtime._kept_bytes for runtime in self._runtimes())
        return kept_bytes + weight.gathered_bytes <= self.keep_limit()

    def _runtimes(self) -> list[Runtime]:
        """Of the model: experts and others share its budget."""
        root = self.root_state()
        return [self] if root is None else root.runtimes

    def keep_limit(self) -> int:
        """How many bytes of the model's weights may stay from recomputes for backwards."""
        limit = self.config.recompute_keep_bytes
        return 8 * max(runtime._largest_bytes for runtime in self._runtimes()) if limit is None else limit

    def _keep(self, weight: ShardedWeight, lease: Lease, kind: Kind) -> None:
        weight.kept_lease = lease
        lease.kind = kind  # it may have been gathered for another that did not come
        self._kept_bytes += lease.num_bytes

    # ---- leases

    def drop(self, lease: Lease) -> None:
        """End a lease that waits for a use."""
        weight = lease.weight
        if weight.next_lease is lease:
            weight.next_lease = None
        if weight.kept_lease is lease:
            weight.kept_lease = None
            self._kept_bytes -= lease.num_bytes
        lease.end()

    def free_unused_leases(self, but_for_forward: bool = False) -> None:
        """Those that wait for a use, perhaps without those that wait for one of a forward."""
        for weight in self.live_weights():
            for lease in (weight.next_lease, weight.kept_lease):
                if lease is not None and not (
                    but_for_forward and lease is weight.next_lease and lease.kind is _FORWARD
                ):
                    self.drop(lease)

    def enter_tallies(self) -> None:
        """Bring replays of CUDA graphs into the counters."""
        for tally in self.tallies:
            tally.enter()

    def reset_counters(self) -> None:
        """All to zero; the peak of gathered bytes starts at what is gathered now."""
        self.enter_tallies()
        live = self.counters.live_lease_bytes
        self.counters = RuntimeCounters(live_lease_bytes=live, peak_lease_bytes=live)
        self._mispredictions_pruned = 0
