"""Gradients: how they are scaled, reduced, and brought into ``param.grad``.

A sharded weight's gradient is reduce-scattered over gtp as soon as it is computed, one step behind the backward. Where
there are replicas it goes on from there: it is reduce-scattered over the axis that cuts the optimizer's parameters, and
all-reduced over the axis of copies, each again one step behind the other. While gradients are not to be synchronised,
the sums over gtp are kept back and take that way with the last microbatch's. Each axis may be one that sums in float32
(see accumulation.py); what travels over any of them is in ``reduce_dtype``. The gradients of parameters that stay
whole are collected and summed by one coalesced all-reduce an axis at the end of the backward.

Scaling is decided in one place, ``Runtime.gradient_scale``: over the data ranks gradients are averaged (each rank's loss
is a mean over its own samples), or summed (the loss is already divided by the global number of tokens).
"""

from __future__ import annotations

import logging
from enum import Enum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .accumulation import sums_here
from .checks import GRADIENT, GRADIENTS, RETURNED, check_grad, check_peers
from .grad_hooks import guard_gradient
from .layout import RowCut, new_dtensor, share_storage
from .modes import is_plain, own_ops, plain_ops
from .pending import Pending, PendingParts, PendingPush, PendingSum, Stage, may_be_scaled_later, room_in_grad, scaled
from .small import accumulate, joined, parts_of
from .transport import CollectiveTransport

if TYPE_CHECKING:
    from .graph_borders import RingWriter
    from .runtime import Runtime
    from .small import SmallParam
    from .weight import ShardedWeight

logger = logging.getLogger(__name__)


class _Way(Enum):
    """How a gradient is summed over gtp."""

    SUMMED = 1  # by a collective
    SUMMED_HERE = 2  # of all ranks' parts, see accumulation.py
    PUSHED = 3  # through memory of the peers


_SUMMED, _SUMMED_HERE, _PUSHED = _Way

# (the leaf that the forward read, its local gradient so far, whether its sum over tp is still owed)
SmallGrad = tuple[nn.Parameter, torch.Tensor, bool]
# Tensors are hashed in Python, numbers are not. What is kept under the number keeps the leaf alive.
SmallKey = tuple["SmallParam", int]


class Reducer:
    """All gradient reductions of one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        domain = runtime.domain
        self._runtime = runtime
        self._transport = runtime.transport
        self._is_async = runtime.config.async_reduction
        self._ways: dict[torch.dtype, _Way] = {}
        self._over_shards = domain.shard_transport
        self._over_copies = domain.replicate_transport
        self._most_pending = runtime.config.graph_wgrad_ring_size - 1
        self.has_replicas = self._over_shards is not None or self._over_copies is not None
        self.pending = Stage(self._to_replicas if self.has_replicas else self._accumulate)  # over gtp
        self._in_flight = self.pending.in_flight
        # Sums for parameters, by their id, that have no gradient yet: scaled together.
        self._new: dict[int, tuple[ShardedWeight, nn.Parameter, torch.Tensor]] = {}
        self._to_shards = Stage(self._accumulate if self._over_copies is None else self._from_shards)
        self._to_copies = Stage(self._from_copies)
        self._back_to_copies = Stage(self._accumulate)  # sums that each copy made a part of
        self.replays = Stage(lambda reduction: None)  # of CUDA graphs, all the way
        self.ring: RingWriter | None = None  # where gradients go while the graph of a backward is captured
        self.kept_back: dict[tuple[ShardedWeight, nn.Parameter], torch.Tensor] = {}  # summed over gtp only
        self.small: dict[SmallKey, SmallGrad] = {}  # of this backward
        self.small_kept_back: dict[SmallKey, SmallGrad] = {}  # of earlier ones

    @property
    def _stages(self) -> tuple[Stage, ...]:
        """In the order that a gradient passes them."""
        return self.pending, self._to_shards, self._to_copies, self._back_to_copies, self.replays

    @property
    def num_pending(self) -> int:
        """Gradients that are not in ``.grad`` yet."""
        num_replayed = sum(replay.num_gradients - 1 for replay in self.replays.in_flight)
        return num_replayed + sum(map(len, (*self._stages, self.kept_back, self.small, self.small_kept_back)))

    # ---- sharded weights

    def make_room(self, weight: ShardedWeight | None = None) -> torch.Tensor | None:
        """Before another unsharded gradient is allocated: receive the oldest ones in flight. Returns where that of ``weight``
        had best be written (TP-local shape, in ``reduce_dtype``), or None: anywhere."""
        if len(self._in_flight) > self._most_pending:
            if is_plain():
                self.pending.receive(self._most_pending)
            else:
                with plain_ops():
                    self.pending.receive(self._most_pending)
        ring = self.ring
        return None if ring is None or weight is None or weight.tp is not None else ring.room_for(weight)

    def _accumulate(self, reduction: Pending) -> None:
        if self.replays.in_flight:
            self._await_replays(reduction.weight)
        if reduction.is_in_grad:
            return
        param, scale = reduction.param, self._runtime.gradient_scale
        new, grad, dtype = self._new.get(id(param)), param.grad, param.dtype
        if new is not None:
            reduction.add_to(new[2])
        elif grad is not None:
            reduction.add_to(grad._local_tensor, scale)
        elif scale != 1.0 and self._is_async and may_be_scaled_later(reduction.dtype, dtype):
            self._new[id(param)] = reduction.weight, param, reduction.rows(dtype)
        else:
            param.grad = new_dtensor(reduction.rows(dtype, scale), param._spec)

    def _give_new(self) -> None:
        """New gradients, scaled, to their parameters; autograd may have given these some meanwhile."""
        if not self._new:
            return
        given, self._new = list(self._new.values()), {}
        torch._foreach_mul_([local for _, _, local in given], self._runtime.gradient_scale)
        for weight, param, local in given:
            if param.grad is None:
                param.grad = new_dtensor(local, param._spec)
            else:
                check_grad(param, weight.fqn)
                param.grad._local_tensor.add_(local)

    def _await_replays(self, weight: ShardedWeight) -> None:
        """The current stream comes after replays that add to the same gradient on another one."""
        for replay in list(self.replays.in_flight):
            if weight in replay.weights:
                replay.wait()

    def await_sums(self, weight: ShardedWeight) -> None:
        """The current stream comes after what was enqueued elsewhere and writes the gradient of ``weight`` itself."""
        for reduction in self._in_flight:
            if reduction.is_in_grad and reduction.weight is weight:
                reduction.wait()
        self._await_replays(weight)

    def _to_replicas(self, reduction: Pending) -> None:
        proceed = self._keep_back if reduction.weight.keeps_back else self._go_on
        proceed(reduction)

    def _keep_back(self, reduction: Pending) -> None:
        key = (reduction.weight, reduction.param)
        before = self.kept_back.get(key)
        if before is None:
            # In the wider dtype: many microbatches are added up here.
            self.kept_back[key] = reduction.rows(torch.promote_types(reduction.dtype, reduction.param.dtype))
        else:
            reduction.add_to(before)

    def _go_on(self, reduction: Pending) -> None:
        """What was summed over gtp, and what was kept back: start its way over the replicas. All that travels is in
        ``reduce_dtype``, so a sum in float32 is rounded once an axis, however many ranks or microbatches it has."""
        weight, param = reduction.weight, reduction.param
        before = self.kept_back.pop((weight, param), None)
        if before is None:
            rows = reduction.rows(weight.reduce_dtype)
        else:
            reduction.add_to(before)
            rows = before.to(weight.reduce_dtype)
        self._start_over_replicas(weight, param, rows)

    def _start_over_replicas(self, weight: ShardedWeight, param: nn.Parameter, rows: torch.Tensor) -> None:
        if self._over_shards is None:
            self._start_over_copies(weight, param, rows)
            return
        self._to_shards.receive(self._most_pending)
        self._to_shards.add(self._over_shard_axis(weight, param, rows))

    def _from_shards(self, reduction: Pending) -> None:
        weight = reduction.weight
        self._start_over_copies(weight, reduction.param, reduction.rows(weight.reduce_dtype))

    def _start_over_copies(self, weight: ShardedWeight, param: nn.Parameter, rows: torch.Tensor) -> None:
        self._to_copies.receive(self._most_pending)
        self._to_copies.add(self._over_copy_axis(weight, param, rows))

    def _from_copies(self, reduction: Pending) -> None:
        if isinstance(reduction, PendingSum):
            self._accumulate(reduction)
            return
        self._back_to_copies.receive(self._most_pending)
        self._back_to_copies.add(self._share_sum(reduction))

    def _over_replicas_now(self, reduction: Pending) -> Pending:
        """``reduction``, over gtp, and then those over all replicas: the last of them, not yet released.

        Earlier ones go before it, as they do on ranks where nobody waits for it: a hook may be there on one rank alone.
        """
        weight, param = reduction.weight, reduction.param
        axes = (
            (self._over_shards, self._over_shard_axis, self.pending),
            (
                self._over_copies,
                self._over_copy_axis,
                self._to_shards if self._over_shards is not None else self.pending,
            ),
        )
        for start, before in ((start, before) for transport, start, before in axes if transport is not None):
            before.receive()
            rows = reduction.rows(weight.reduce_dtype)
            reduction.release()
            reduction = start(weight, param, rows)
        if self._over_copies is not None and isinstance(reduction, PendingParts):
            self._to_copies.receive()
            parts, reduction = reduction, self._share_sum(reduction)
            parts.release()
        return reduction

    def launch(
        self, weight: ShardedWeight, param: nn.Parameter, grad: torch.Tensor, returned: bool, is_borrowed: bool = False
    ) -> DTensor | None:
        """Reduce ``grad``, the gradient of the gathered weight (TP-local shape, plain or on the tp mesh; or with rows of
        zeros behind it, as it is sent: see :meth:`gradient_buffer`).

        Accumulates into the ``.grad`` of ``param`` (the leaf that the forward read) and returns None; or, where
        autograd wants the gradient itself (``returned``), waits and returns it as a DTensor placed like the parameter.
        Unless ``is_borrowed``, the memory of ``grad`` is given away: nobody else may read it any more.
        """
        if self.ring is not None:
            with plain_ops():
                local = grad if weight.tp is None else _own_gradient(weight, grad)
                self.ring.put(weight, param, local, returned)
            return None
        if not returned:
            before = param.grad
            if before is not None and getattr(before, "_spec", None) is not param._spec:
                check_grad(param, weight.fqn)
        if weight.checks_states:
            # Where all is in step a hook may be on one rank alone; but what is kept back elsewhere would go to the replicas.
            is_ahead = returned and weight.keeps_back and (self._over_shards or self._over_copies) is not None
            check_peers(self._runtime, [weight], RETURNED if is_ahead else GRADIENT)
        if len(self._in_flight) > self._most_pending:
            self.make_room()
        if is_plain():
            reduction = self._start(weight, param, grad, returned, is_borrowed)
        else:
            with own_ops(weight.fqn, "reduce"):
                reduction = self._start(weight, param, grad, returned, is_borrowed)
        if returned:
            with plain_ops():
                reduction = self._over_replicas_now(reduction)
                local = reduction.rows(param.dtype, self._runtime.gradient_scale)
            reduction.release()
            return new_dtensor(local, param._spec)
        self._in_flight.append(reduction)
        if not self._is_async:
            with plain_ops():
                self.pending.receive()
        return None

    # ---- over one axis

    def _start(
        self, weight: ShardedWeight, param: nn.Parameter, grad: torch.Tensor, returned: bool, is_borrowed: bool
    ) -> Pending:
        transport, cut, counters, dtype = self._transport, weight.cut, weight.counters, weight.reduce_dtype
        counters.num_reductions += 1
        way = self._ways.get(dtype) or self._way_of(dtype)
        buffer = grad if weight.tp is None else _own_gradient(weight, grad)
        if buffer.dtype is not dtype:
            buffer = buffer.to(dtype)
        if way is _PUSHED:
            return self._push(weight, param, buffer, returned)
        if buffer.shape != weight.buffer_shape or not buffer.is_contiguous():
            buffer = cut.pack(buffer)
        if transport.size > 1:
            counters.reduce_bytes += buffer.nbytes
        if way is _SUMMED_HERE:
            borrowed = None if not is_borrowed else grad._local_tensor if isinstance(grad, DTensor) else grad
            return self._exchange(transport, weight, param, buffer, weight.shard_shape, cut.dim, borrowed)
        out = buffer.new_empty(*weight.send_shape)
        return PendingSum(weight, param, out, weight.shard_shape, transport.reduce_scatter(out, buffer, cut.dim))

    def _way_of(self, dtype: torch.dtype) -> _Way:
        """How gradients that travel in ``dtype`` are summed over gtp: the same for as long as this lives."""
        switch = self._runtime.config.reduce_scatter_with_fp32_accumulation
        if self._transport.pushes(dtype):
            way = _PUSHED
        else:
            way = _SUMMED_HERE if sums_here(switch, self._transport.size, dtype) else _SUMMED
        self._ways[dtype] = way
        return way

    def _push(self, weight: ShardedWeight, param: nn.Parameter, grad: torch.Tensor, returned: bool) -> PendingPush:
        """Through memory of the peers: no padding travels, and where nothing follows the sum it is made in ``.grad``."""
        runtime, counters = self._runtime, weight.counters
        grad = grad.contiguous()
        counters.reduce_bytes += grad.nbytes
        scale, adds = 1.0, False
        total = None
        if not (returned or self.has_replicas):
            total, adds = room_in_grad(param)
        is_in_grad = total is not None
        if is_in_grad:
            guard_gradient(weight, param)
            scale = runtime.gradient_scale
        else:
            total = grad.new_empty(weight.shard_shape, dtype=torch.float32)
        ticket = runtime.transport.reduce_rows(weight, grad, total, scale, adds)
        return PendingPush(weight, param, grad, total, is_in_grad, ticket)

    def _over_shard_axis(self, weight: ShardedWeight, param: nn.Parameter, rows: torch.Tensor) -> Pending:
        """``rows``, ours to give away, over the axis that cuts the optimizer's parameters."""
        transport, cut = self._over_shards, weight.replica_cut
        weight.counters.num_replica_reductions += 1
        buffer, shape = cut.pack(rows), weight.stored_shape
        if self._sums_over_replicas(transport, rows.dtype):
            return self._exchange(transport, weight, param, buffer, shape, cut.dim)
        out = buffer.new_empty(weight.piece_shape)
        return PendingSum(weight, param, out, shape, transport.reduce_scatter(out, buffer, cut.dim))

    def _over_copy_axis(self, weight: ShardedWeight, param: nn.Parameter, rows: torch.Tensor) -> Pending:
        """``rows``, ours to give away, over the axis of copies. Where they are summed here, each copy gets a part of
        the sum, which :meth:`_share_sum` gives to all."""
        transport = self._over_copies
        weight.counters.num_replica_reductions += 1
        if self._sums_over_replicas(transport, rows.dtype):
            cut = RowCut(rows.numel(), transport.size)
            return self._exchange(transport, weight, param, cut.pack(rows.view(-1)), torch.Size((cut.padded,)))
        return PendingSum(weight, param, rows, rows.shape, transport.start_all_reduce(rows))

    def _share_sum(self, reduction: PendingParts) -> PendingSum:
        """Start collecting the parts of a sum over copies. They travel in ``reduce_dtype`` too: together no more bytes
        than the all-reduce in whose place this is."""
        weight, param = reduction.weight, reduction.param
        part = reduction.rows(weight.reduce_dtype)
        buffer = part.new_empty(part.numel() * self._over_copies.size)
        transfer = self._over_copies.all_gather(buffer, part)
        shape = param._local_tensor.shape
        return PendingSum(weight, param, buffer[: shape.numel()].view(shape), shape, transfer)

    def _sums_over_replicas(self, transport: CollectiveTransport, dtype: torch.dtype) -> bool:
        return sums_here(self._runtime.config.replicate_reduce_with_fp32_accumulation, transport.size, dtype)

    def _exchange(
        self,
        transport: CollectiveTransport,
        weight: ShardedWeight,
        param: nn.Parameter,
        buffer: torch.Tensor,
        shape: torch.Size,
        dim: int = 0,
        borrowed: torch.Tensor | None = None,
    ) -> PendingParts:
        transfer = transport.all_to_all(buffer, dim)
        parts, sent = transfer.tensors
        is_spare = borrowed is None or not share_storage(sent, borrowed)
        return PendingParts(weight, param, parts, shape, transfer, sent if is_spare else None)

    def gradient_buffer(self, weight: ShardedWeight, dtype: torch.dtype) -> torch.Tensor:
        """Memory for the gradient of the gathered weight, not initialised, which :meth:`launch` takes as it is: of
        ``weight.buffer_shape``, with zeros as padding, or where that is not what is sent, of the weight's own shape."""
        self.make_room()
        cut, device = weight.cut, weight.param.device
        with plain_ops():
            if cut.padded != cut.chunk or self._runtime.transport.pushes(weight.reduce_dtype):
                return torch.empty(weight.tp_local_shape, dtype=dtype, device=device)
            buffer = torch.empty(weight.buffer_shape, dtype=dtype, device=device)
            buffer.narrow(cut.dim, cut.num_rows, cut.buffer_rows - cut.num_rows).zero_()
            return buffer

    # ---- parameters that stay whole

    def collect(self, small: SmallParam, param: nn.Parameter, grad: torch.Tensor) -> None:
        """Add this use's gradient to what the end of the backward reduces."""
        before = param.grad
        if before is not None and getattr(before, "_spec", None) is not param._spec:
            check_grad(param, small.fqn)
        key = small, id(param)
        if small.tp is None and type(grad) is torch.Tensor and key not in self.small:
            self.small[key] = param, grad, False
            return
        with plain_ops():
            local, owes_tp_sum = small.local_grad(grad)
            self.small[key] = _sum_of(small, self.small.get(key), (param, local, owes_tp_sum))

    def add_small(self, small: SmallParam, grad: SmallGrad) -> None:
        """:meth:`collect` of what it collected in a capture."""
        key = small, id(grad[0])
        with plain_ops():
            self.small[key] = _sum_of(small, self.small.get(key), grad)

    def reduce_now(self, small: SmallParam, param: nn.Parameter, grad: torch.Tensor) -> DTensor:
        """The reduced gradient of one use, for a parameter whose gradient autograd itself wants."""
        if self._runtime.config.check_param_states:
            check_peers(self._runtime, [small], RETURNED)
        with plain_ops():
            local, owes_tp_sum = small.local_grad(grad)
            local = local.to(small.reduce_dtype).clone(memory_format=torch.contiguous_format)
            if owes_tp_sum:
                dist.all_reduce(local, group=small.tp.mesh.get_group())
            for transport in self._runtime.domain.transports:
                transport.all_reduce(local)
            return new_dtensor(scaled(local, param.dtype, self._runtime.gradient_scale), param._spec)

    def _reduce_small(self, keys: list[SmallKey]) -> None:
        """One all-reduce an axis for all of them (one a dtype); before it, one over tp for those that owe it."""
        entries = [(key, self.small_kept_back.pop(key)) for key in keys]
        entries.sort(key=lambda item: (not item[1][2], item[0][0].serial))
        if self._runtime.config.check_param_states:
            check_peers(self._runtime, [small for (small, _), _ in entries], GRADIENTS)
        groups: dict[tuple, list[tuple[SmallParam, nn.Parameter, torch.Tensor]]] = {}
        for (small, _), (param, local, owes) in entries:
            key = (small.reduce_dtype, small.tp.mesh.get_group().group_name if owes else None)
            groups.setdefault(key, []).append((small, param, local))
        for (dtype, tp_group), group in groups.items():
            if tp_group is not None:
                flat = joined([local for _, _, local in group], dtype)
                dist.all_reduce(flat, group=group[0][0].tp.mesh.get_group())
                parts = parts_of(flat, [local for _, _, local in group])
                groups[dtype, tp_group] = [(small, param, part) for (small, param, _), part in zip(group, parts)]
        for dtype in dict.fromkeys(dtype for dtype, _ in groups):
            group = [entry for (of, _), entries in groups.items() if of == dtype for entry in entries]
            grads = [grad for _, _, grad in group]
            flat = joined(grads, dtype)
            for transport in self._runtime.domain.transports:
                transport.all_reduce(flat)
            accumulate([param for _, param, _ in group], flat, grads, self._runtime.gradient_scale)
            self._runtime.counters.num_small_reductions += 1

    # ---- draining

    def drain(self, brings_out_all: bool) -> None:
        """Wait for and accumulate everything. Nothing is pending afterwards, also if it raises, but without
        ``brings_out_all`` what members keep back."""
        try:
            with plain_ops():
                self.replays.receive()
                self.pending.receive()
                self._merge_small()
                self._bring_out(brings_out_all)
                self._give_new()
        except BaseException:
            self.void()
            raise
        assert not brings_out_all or self.num_pending == 0

    def _merge_small(self) -> None:
        if not self.small_kept_back:
            self.small_kept_back, self.small = self.small, {}
            return
        for key, grad in self.small.items():
            self.small_kept_back[key] = _sum_of(key[0], self.small_kept_back.get(key), grad)
        self.small = {}

    def _bring_out(self, brings_out_all: bool) -> None:
        """What is kept back, all or what no longer has to be, and what is on its way over the replicas, into ``.grad``."""
        leaving = [key for key in self.kept_back if brings_out_all or not key[0].keeps_back]
        for weight, param in sorted(leaving, key=lambda key: key[0].serial):
            rows = self.kept_back.pop((weight, param))
            self._start_over_replicas(weight, param, rows.to(weight.reduce_dtype))
        for stage in self._stages:
            stage.receive()
        small = [key for key in self.small_kept_back if brings_out_all or not key[0].keeps_back]
        if small:
            self._reduce_small(small)

    def void(self) -> None:
        """Wait for and drop what is not in ``.grad`` yet: the backward that launched it raised.

        As everywhere in PyTorch, ``.grad`` may hold a part of such a backward's gradients (on a GPU all that were
        launched and added to another): ``zero_grad()`` before the next one. What earlier microbatches left here cannot
        be told from it.
        """
        if self.kept_back or self.small_kept_back:
            logger.warning(
                "GTP: a backward raised; gradients kept back from the replicas, those of earlier microbatches included, are "
                "dropped with it: repeat the step"
            )
        for stage in self._stages:
            stage.drop()
        self.small, self.kept_back, self.small_kept_back, self._new = {}, {}, {}, {}

    def discard(self) -> None:
        """What is under way was part of a capture that failed: nothing of it ran."""
        for stage in self._stages:
            stage.discard()
        self.small, self.kept_back, self.small_kept_back, self._new = {}, {}, {}, {}


def _own_gradient(weight: ShardedWeight, grad: torch.Tensor) -> torch.Tensor:
    """Of the TP-local weight, from that of the weight on its tp mesh."""
    grad, owes_tp_sum = weight.tp.unwrap_grad(grad)
    if owes_tp_sum:
        grad = grad.clone()
        dist.all_reduce(grad, group=weight.tp.mesh.get_group())
    return grad


def _sum_of(small: SmallParam, before: SmallGrad | None, grad: SmallGrad) -> SmallGrad:
    """The sum of two gradients of one parameter, in the dtype that it is reduced in."""
    if before is None:
        return grad
    dtype = small.reduce_dtype
    (param, one, owes), (_, other, other_owes) = before, grad
    one, other = one.to(dtype), other.to(dtype)
    if owes == other_owes:
        return param, one + other, owes
    # One use sees a part of the sequence, another all of it: settle the partial one now.
    partial, done = (one, other) if owes else (other, one)
    partial = partial.clone()
    dist.all_reduce(partial, group=small.tp.mesh.get_group())
    return param, done + partial, False
