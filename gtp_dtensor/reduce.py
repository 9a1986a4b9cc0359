"""Gradients: how they are scaled, reduced, and brought into ``param.grad``.

A sharded weight's gradient is reduce-scattered over gtp as soon as it is computed, one step behind the backward. Where
there are replicas it goes on from there: it is reduce-scattered over the axis that cuts the optimizer's parameters, and
all-reduced over the axis of copies, each again one step behind the other. While gradients are not to be synchronised,
the sums over gtp are kept back and take that way with the last microbatch's. The gradients of parameters that stay
whole are collected and summed by one coalesced all-reduce an axis at the end of the backward.

Scaling is decided in one place, ``Runtime.gradient_scale``: over the data ranks gradients are averaged (each rank's loss
is a mean over its own samples), or summed (the loss is already divided by the global number of tokens).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .layout import new_dtensor
from .modes import own_ops, plain_ops
from .transport import Transfer

if TYPE_CHECKING:
    from .runtime import Runtime
    from .small import SmallParam
    from .weight import ShardedWeight

logger = logging.getLogger(__name__)


def scaled(local: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """``scale * local`` in ``dtype``. ``local`` is ours to change.

    Scaled in the wider of both dtypes: a sum may overflow the narrower one where its mean does not.
    """
    if scale != 1.0:
        if local.dtype != dtype:
            local = local.to(torch.promote_types(local.dtype, dtype))
        local.mul_(scale)
    return local if local.dtype == dtype else local.to(dtype)


def check_grad(param: torch.Tensor, fqn: str) -> None:
    """Raise where somebody put a gradient with other placements there, which torch would accept in silence."""
    grad = param.grad
    if grad is not None and (not isinstance(grad, DTensor) or grad._spec.placements != param._spec.placements):
        found = grad._spec.placements if isinstance(grad, DTensor) else type(grad).__name__
        raise RuntimeError(
            f"{fqn}: .grad has placements {found}, the parameter {param._spec.placements}: set .grad to None or to a "
            "DTensor placed like the parameter"
        )


def accumulate(param: torch.Tensor, local: torch.Tensor, scale: float) -> None:
    """``param.grad += scale * local``. ``local`` is ours to keep."""
    local = scaled(local, param.dtype, scale)
    grad = param.grad
    if grad is None:
        param.grad = new_dtensor(local, param._spec)
    else:
        grad._local_tensor.add_(local)


class PendingReduction:
    """A reduction in flight: rows of ``weight``'s gradient, for ``param``, are coming."""

    __slots__ = ("weight", "param", "_out", "_shape", "_transfer")

    def __init__(
        self, weight: ShardedWeight, param: nn.Parameter, out: torch.Tensor, shape: torch.Size, transfer: Transfer
    ) -> None:
        self.weight = weight
        self.param = param
        self._out = out
        self._shape = shape  # of what is ours in ``out``, which is padded
        self._transfer = transfer

    def receive(self) -> torch.Tensor:
        """Wait. Returns the rows, summed and unscaled, ours to keep; :meth:`release` follows."""
        self._transfer.wait()
        out, shape = self._out, self._shape
        return out if out.shape == shape else out[tuple(map(slice, shape))].clone(memory_format=torch.contiguous_format)

    def release(self) -> None:
        """What reads the result is enqueued, or nobody wants it."""
        self._transfer.release()


class Stage:
    """Reductions in flight over one axis, oldest first.

    Args:
        proceed: is given (weight, param, rows) of each that is received.
    """

    def __init__(self, proceed: Callable[[ShardedWeight, nn.Parameter, torch.Tensor], None]) -> None:
        self._proceed = proceed
        self._in_flight: deque[PendingReduction] = deque()

    def __len__(self) -> int:
        return len(self._in_flight)

    def add(self, reduction: PendingReduction) -> None:
        """One more, just started."""
        self._in_flight.append(reduction)

    def receive(self, most: int = 0) -> None:
        """Receive the oldest ones until at most ``most`` are in flight."""
        while len(self._in_flight) > most:
            reduction = self._in_flight.popleft()
            self._proceed(reduction.weight, reduction.param, reduction.receive())
            reduction.release()

    def drop(self) -> None:
        """Wait for all, and let go of what they brought."""
        while self._in_flight:
            self._in_flight.popleft().release()


# (local gradient so far, whether its sum over tp is still owed)
SmallGrad = tuple[torch.Tensor, bool]


class Reducer:
    """All gradient reductions of one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        domain = runtime.domain
        self._runtime = runtime
        self._over_shards = domain.shard_transport
        self._over_copies = domain.replicate_transport
        self._most_pending = runtime.config.graph_wgrad_ring_size - 1
        has_replicas = self._over_shards is not None or self._over_copies is not None
        self.pending = Stage(self._to_replicas if has_replicas else self._accumulate)  # over gtp
        self._to_shards = Stage(self._accumulate if self._over_copies is None else self._start_over_copies)
        self._to_copies = Stage(self._accumulate)
        self.kept_back: dict[tuple[ShardedWeight, nn.Parameter], torch.Tensor] = {}  # summed over gtp only
        self.small: dict[tuple[SmallParam, nn.Parameter], SmallGrad] = {}  # of this backward
        self.small_kept_back: dict[tuple[SmallParam, nn.Parameter], SmallGrad] = {}  # of earlier ones

    @property
    def num_pending(self) -> int:
        """Gradients that are not in ``.grad`` yet."""
        queues = (self.pending, self._to_shards, self._to_copies, self.kept_back, self.small, self.small_kept_back)
        return sum(map(len, queues))

    # ---- sharded weights

    def make_room(self) -> None:
        """Before another unsharded gradient is allocated: receive the oldest ones in flight."""
        if len(self.pending) > self._most_pending:
            with plain_ops():
                self.pending.receive(self._most_pending)

    def _accumulate(self, weight: ShardedWeight, param: nn.Parameter, rows: torch.Tensor) -> None:
        accumulate(param, rows, self._runtime.gradient_scale)

    def _to_replicas(self, weight: ShardedWeight, param: nn.Parameter, rows: torch.Tensor) -> None:
        proceed = self._go_on if self._runtime.syncs_gradients else self._keep_back
        proceed(weight, param, rows)

    def _keep_back(self, weight: ShardedWeight, param: nn.Parameter, rows: torch.Tensor) -> None:
        key = (weight, param)
        before = self.kept_back.get(key)
        if before is None:
            # In the wider dtype: many microbatches are added up here.
            self.kept_back[key] = rows.to(torch.promote_types(rows.dtype, param.dtype))
        else:
            before.add_(rows)

    def _go_on(self, weight: ShardedWeight, param: nn.Parameter, rows: torch.Tensor) -> None:
        """``rows``, summed over gtp, and what was kept back: start their way over the
        replicas."""
        before = self.kept_back.pop((weight, param), None)
        if before is not None:
            rows = before.add_(rows).to(rows.dtype)
        if self._over_shards is None:
            self._start_over_copies(weight, param, rows)
            return
        self._to_shards.receive(self._most_pending)
        self._to_shards.add(self._over_shard_axis(weight, param, rows))

    def _over_shard_axis(self, weight: ShardedWeight, param: nn.Parameter, rows: torch.Tensor) -> PendingReduction:
        cut = weight.replica_cut
        out = rows.new_empty(cut.resized(rows.shape, cut.padded))
        weight.counters.num_replica_reductions += 1
        transfer = self._over_shards.reduce_scatter(out, cut.pack(rows), dim=cut.dim)
        return PendingReduction(weight, param, out, cut.resized(rows.shape, weight.num_stored_rows), transfer)

    def _start_over_copies(self, weight: ShardedWeight, param: nn.Parameter, rows: torch.Tensor) -> None:
        self._to_copies.receive(self._most_pending)
        weight.counters.num_replica_reductions += 1
        transfer = self._over_copies.start_all_reduce(rows)
        self._to_copies.add(PendingReduction(weight, param, rows, rows.shape, transfer))

    def _over_replicas_now(self, weight: ShardedWeight, param: nn.Parameter, rows: torch.Tensor) -> torch.Tensor:
        """``rows``, summed over gtp, summed over all replicas too: this rank's stored rows."""
        if self._over_shards is not None:
            reduction = self._over_shard_axis(weight, param, rows)
            rows = reduction.receive()
            reduction.release()
        if self._over_copies is not None:
            self._over_copies.all_reduce(rows)
        return rows

    def launch(self, weight: ShardedWeight, param: nn.Parameter, grad: torch.Tensor, returned: bool) -> DTensor | None:
        """Reduce ``grad``, the gradient of the gathered weight (TP-local shape, plain or on the tp mesh).

        Accumulates into the ``.grad`` of ``param`` (the leaf that the forward read) and returns None; or, where
        autograd wants the gradient itself (``returned``), waits and returns it as a DTensor placed like the parameter.
        """
        if not returned:
            check_grad(param, weight.fqn)
        self.make_room()
        with own_ops(weight.fqn, "reduce"):
            reduction = self._start(weight, param, grad)
        if returned:
            with plain_ops():
                rows = self._over_replicas_now(weight, param, reduction.receive())
                local = scaled(rows, param.dtype, self._runtime.gradient_scale)
            reduction.release()
            return new_dtensor(local, param._spec)
        self.pending.add(reduction)
        if not self._runtime.config.async_reduction:
            with plain_ops():
                self.pending.receive()
        return None

    def _start(self, weight: ShardedWeight, param: nn.Parameter, grad: torch.Tensor) -> PendingReduction:
        config, transport = self._runtime.config, self._runtime.transport
        buffer = self._reduction_input(weight, grad)
        dtype = buffer.dtype
        fp32_sum = config.reduce_scatter_with_fp32_accumulation and dtype.itemsize < 4 and transport.size > 2
        out = buffer.new_empty(weight.send_shape, dtype=torch.float32 if fp32_sum else dtype)
        counters = weight.counters
        counters.num_reductions += 1
        if transport.size > 1:
            counters.reduce_bytes += weight.num_buffer_elements * dtype.itemsize
        cut = weight.cut
        transfer = transport.reduce_scatter(out, buffer, fp32_sum, cut.dim)
        return PendingReduction(weight, param, out, cut.resized(out.shape, weight.num_local_rows), transfer)

    def _reduction_input(self, weight: ShardedWeight, grad: torch.Tensor) -> torch.Tensor:
        if weight.tp is not None:
            grad, owes_tp_sum = weight.tp.unwrap_grad(grad)
            if owes_tp_sum:
                grad = grad.clone()
                dist.all_reduce(grad, group=weight.tp.mesh.get_group())
        if grad.dtype != weight.reduce_dtype:
            grad = grad.to(weight.reduce_dtype)
        return grad if weight.is_buffer_exact and grad.is_contiguous() else weight.cut.pack(grad)

    # ---- parameters that stay whole

    def collect(self, small: SmallParam, param: nn.Parameter, grad: torch.Tensor) -> None:
        """Add this use's gradient to what the end of the backward reduces."""
        check_grad(param, small.fqn)
        with plain_ops():
            local, owes_tp_sum = small.local_grad(grad)
            self.small[small, param] = _sum_of(small, self.small.get((small, param)), (local, owes_tp_sum))

    def reduce_now(self, small: SmallParam, param: nn.Parameter, grad: torch.Tensor) -> DTensor:
        """The reduced gradient of one use, for a parameter whose gradient autograd itself wants."""
        with plain_ops():
            local, owes_tp_sum = small.local_grad(grad)
            local = local.to(small.reduce_dtype).clone(memory_format=torch.contiguous_format)
            if owes_tp_sum:
                dist.all_reduce(local, group=small.tp.mesh.get_group())
            for transport in self._runtime.domain.transports:
                transport.all_reduce(local)
            return new_dtensor(scaled(local, param.dtype, self._runtime.gradient_scale), param._spec)

    def _reduce_small(self) -> None:
        """One all-reduce an axis for all of them (one a dtype); before it, one over tp for those that owe it."""
        entries = sorted(self.small_kept_back.items(), key=lambda item: (not item[1][1], item[0][0].serial))
        self.small_kept_back = {}
        self._runtime.check_small_peers([small for (small, _), _ in entries])
        groups: dict[tuple, list[tuple[SmallParam, nn.Parameter, torch.Tensor, bool]]] = {}
        for (small, param), (local, owes) in entries:
            key = (small.reduce_dtype, small.tp.mesh.get_group().group_name if owes else None)
            groups.setdefault(key, []).append((small, param, local, owes))
        for (dtype, tp_group), group in groups.items():
            if tp_group is not None:
                flat = torch.cat([local.reshape(-1) for _, _, local, _ in group]).to(dtype)
                dist.all_reduce(flat, group=group[0][0].tp.mesh.get_group())
                parts = flat.split([local.numel() for _, _, local, _ in group])
                whole = [(s, p, part.view(local.shape), False) for (s, p, local, _), part in zip(group, parts)]
                groups[dtype, tp_group] = whole
        for dtype in dict.fromkeys(dtype for dtype, _ in groups):
            group = [entry for (of, _), entries in groups.items() if of == dtype for entry in entries]
            flat = torch.cat([local.reshape(-1) for _, _, local, _ in group]).to(dtype)
            for transport in self._runtime.domain.transports:
                transport.all_reduce(flat)
            parts = flat.split([local.numel() for _, _, local, _ in group])
            for (_, param, local, _), part in zip(group, parts):
                accumulate(
                    param, part.view(local.shape), self._runtime.gradient_scale
                )  # gradients are views of one buffer
            self._runtime.counters.num_small_reductions += 1

    # ---- draining

    def drain(self, syncs_gradients: bool) -> None:
        """Wait for and accumulate everything. Nothing is pending afterwards, also if it raises; without
        ``syncs_gradients`` gradients are kept back instead."""
        try:
            with plain_ops():
                self.pending.receive()
                self._merge_small()
                if syncs_gradients:
                    self._bring_out()
        except BaseException:
            self.void()
            raise
        assert not syncs_gradients or self.num_pending == 0

    def _merge_small(self) -> None:
        for (small, param), grad in self.small.items():
            before = self.small_kept_back.get((small, param))
            self.small_kept_back[small, param] = _sum_of(small, before, grad)
        self.small = {}

    def _bring_out(self) -> None:
        """Everything that is kept back or on its way over the replicas, into ``.grad``."""
        for weight, param in sorted(self.kept_back, key=lambda key: key[0].serial):
            rows = self.kept_back.pop((weight, param))
            self._go_on(weight, param, rows.to(weight.reduce_dtype))
        self._to_shards.receive()
        self._to_copies.receive()
        if self.small_kept_back:
            self._reduce_small()

    def void(self) -> None:
        """Wait for and drop what is not in ``.grad`` yet: the backward that launched it raised.

        As everywhere in PyTorch, ``.grad`` may hold a part of such a backward's gradients (on a GPU all that were
        launched): ``zero_grad()`` before the next one. What earlier microbatches left here cannot be told from it.
        """
        if self.kept_back or self.small_kept_back:
            logger.warning(
                "GTP: a backward raised; gradients kept back from the replicas, those of earlier microbatches included, are "
                "dropped with it: repeat the step"
            )
        for stage in (self.pending, self._to_shards, self._to_copies):
            stage.drop()
        self.small, self.kept_back, self.small_kept_back = {}, {}, {}


def _sum_of(small: SmallParam, before: SmallGrad | None, grad: SmallGrad) -> SmallGrad:
    """The sum of two gradients of one parameter, in the dtype that it is reduced in."""
    if before is None:
        return grad
    dtype = small.reduce_dtype
    (one, owes), (other, other_owes) = before, grad
    one, other = one.to(dtype), other.to(dtype)
    if owes == other_owes:
        return one + other, owes
    # One use sees a part of the sequence, another all of it: settle the partial one now.
    partial, done = (one, other) if owes else (other, one)
    partial = partial.clone()
    dist.all_reduce(partial, group=small.tp.mesh.get_group())
    return done + partial, False


def wants_gradient_returned(param: nn.Parameter) -> bool:
    """Whether autograd has to get the reduced gradient itself: hooks must see it, or it flows on from a non-leaf."""
    return (
        not param.is_leaf
        or bool(getattr(param, "_backward_hooks", None))
        or bool(getattr(param, "_post_accumulate_grad_hooks", None))
    )
