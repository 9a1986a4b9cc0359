"""Gradients: how they are scaled, reduced, and brought into ``param.grad``.

A sharded weight's gradient is reduce-scattered as soon as it is computed, one step behind the backward. The gradients
of parameters that stay whole are collected and summed by one coalesced all-reduce at the end of the backward.

Scaling is decided here and nowhere else: over the data axes gradients are averaged (each rank's loss is a mean over
its own samples), or summed (the loss is already divided by the global number of tokens).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .layout import new_dtensor
from .modes import named_ops, plain_ops, runs_bare
from .transport import Transfer

if TYPE_CHECKING:
    from .runtime import Runtime
    from .small import SmallParam
    from .weight import ShardedWeight


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
    """A reduce-scatter in flight: this rank's rows of ``weight``'s gradient are coming."""

    __slots__ = ("weight", "param", "_out", "_transfer")

    def __init__(self, weight: ShardedWeight, param: nn.Parameter, out: torch.Tensor, transfer: Transfer) -> None:
        self.weight = weight
        self.param = param
        self._out = out
        self._transfer = transfer

    def receive(self) -> torch.Tensor:
        """Wait. Returns the rows (num_local_rows, ...), summed and unscaled, ours to keep; :meth:`release` follows."""
        self._transfer.wait()
        out, num_rows = self._out, self.weight.num_local_rows
        return out if out.shape[0] == num_rows else out[:num_rows].clone()

    def release(self) -> None:
        """What reads the result is enqueued, or nobody wants it."""
        self._transfer.release()


class Reducer:
    """All gradient reductions of one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._scale = 1.0 if runtime.config.calculate_per_token_loss else 1.0 / runtime.transport.size
        self.pending: deque[PendingReduction] = deque()
        self._most_pending = runtime.config.graph_wgrad_ring_size - 1
        # local gradient so far, and whether its sum over tp is still owed
        self.small: dict[tuple[SmallParam, nn.Parameter], tuple[torch.Tensor, bool]] = {}

    @property
    def num_pending(self) -> int:
        return len(self.pending) + len(self.small)

    # ---- sharded weights

    def make_room(self) -> None:
        """Before another unsharded gradient is allocated: receive the oldest ones in flight."""
        while len(self.pending) > self._most_pending:
            self._receive_oldest()

    def _receive_oldest(self) -> None:
        reduction = self.pending.popleft()
        if runs_bare():
            accumulate(reduction.param, reduction.receive(), self._scale)
        else:
            with plain_ops():
                accumulate(reduction.param, reduction.receive(), self._scale)
        reduction.release()

    def launch(self, weight: ShardedWeight, param: nn.Parameter, grad: torch.Tensor, returned: bool) -> DTensor | None:
        """Reduce ``grad``, the gradient of the gathered weight (TP-local shape, plain or on the tp mesh).

        Accumulates into the ``.grad`` of ``param`` (the leaf that the forward read) and returns None; or, where autograd
        wants the gradient itself (``returned``), waits and returns it as a DTensor placed like the parameter.
        """
        if not returned:
            check_grad(param, weight.fqn)
        self.make_room()
        if runs_bare():
            reduction = self._start(weight, param, grad)
        else:
            with named_ops("reduce", weight.fqn):
                reduction = self._start(weight, param, grad)
        if returned:
            with plain_ops():
                local = scaled(reduction.receive(), param.dtype, self._scale)
            reduction.release()
            return new_dtensor(local, param._spec)
        self.pending.append(reduction)
        if not self._runtime.config.async_reduction:
            self._receive_oldest()
        return None

    def _start(self, weight: ShardedWeight, param: nn.Parameter, grad: torch.Tensor) -> PendingReduction:
        config, transport = self._runtime.config, self._runtime.transport
        buffer = self._reduction_input(weight, grad)
        dtype = buffer.dtype
        fp32_sum = config.reduce_scatter_with_fp32_accumulation and dtype.itemsize < 4 and transport.size > 2
        out = buffer.new_empty(weight.send_shape, dtype=torch.float32 if fp32_sum else dtype)
        counters = weight.counters
        counters.num_reductions += 1
        counters.reduce_bytes += weight.num_buffer_elements * dtype.itemsize
        return PendingReduction(weight, param, out, transport.reduce_scatter(out, buffer, fp32_sum))

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
            key = (small, param)
            before = self.small.get(key)
            if before is None:
                self.small[key] = (local, owes_tp_sum)
                return
            dtype = small.reduce_dtype
            before, local = (before[0].to(dtype), before[1]), local.to(dtype)
            if before[1] == owes_tp_sum:
                self.small[key] = (before[0] + local, owes_tp_sum)
            else:  # one use sees a part of the sequence, another all of it: settle the partial one now
                done = local if before[1] else before[0]
                partial = before[0].clone() if before[1] else local.clone()
                dist.all_reduce(partial, group=small.tp.mesh.get_group())
                self.small[key] = (done + partial, False)

    def reduce_now(self, small: SmallParam, param: nn.Parameter, grad: torch.Tensor) -> DTensor:
        """The reduced gradient of one use, for a parameter whose gradient autograd itself wants."""
        with plain_ops():
            local, owes_tp_sum = small.local_grad(grad)
            local = local.to(small.reduce_dtype).clone(memory_format=torch.contiguous_format)
            if owes_tp_sum:
                dist.all_reduce(local, group=small.tp.mesh.get_group())
            self._runtime.transport.all_reduce(local)
            return new_dtensor(scaled(local, param.dtype, self._scale), param._spec)

    def _reduce_small(self) -> None:
        """One all-reduce over gtp for all of them (one a dtype); before it, one over tp for those that owe it."""
        entries = sorted(self.small.items(), key=lambda item: (not item[1][1], item[0][0].serial))
        self.small = {}
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
            self._runtime.transport.all_reduce(flat)
            parts = flat.split([local.numel() for _, _, local, _ in group])
            for (_, param, local, _), part in zip(group, parts):
                accumulate(param, part.view(local.shape), self._scale)  # gradients are views of one buffer
            self._runtime.counters.num_small_reductions += 1

    # ---- draining

    def drain(self) -> None:
        """Wait for and accumulate everything. Nothing is pending afterwards, also if it raises."""
        try:
            while self.pending:
                self._receive_oldest()
            if self.small:
                with plain_ops():
                    self._reduce_small()
        except BaseException:
            self.void()
            raise
        assert self.num_pending == 0

    def void(self) -> None:
        """Wait for and drop what is not in ``.grad`` yet: the backward that launched it raised.

        As everywhere in PyTorch, ``.grad`` may hold a part of such a backward's gradients (on a GPU all that were
        launched): ``zero_grad()`` before the next one.
        """
        while self.pending:
            self.pending.popleft().release()
        self.small = {}


def wants_gradient_returned(param: nn.Parameter) -> bool:
    """Whether autograd has to get the reduced gradient itself: hooks must see it, or it flows on from a non-leaf."""
    return (
        not param.is_leaf
        or bool(getattr(param, "_backward_hooks", None))
        or bool(getattr(param, "_post_accumulate_grad_hooks", None))
    )
