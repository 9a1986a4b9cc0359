"""Gradients: how they are scaled, reduced, and brought into ``param.grad``.

A sharded weight's gradient is reduce-scattered as soon as it is computed, one step behind the backward. The gradients
of parameters that stay whole are collected and summed by one coalesced all-reduce at the end of the backward.

Scaling is decided here and nowhere else: over the data axes gradients are averaged (each rank's loss is a mean over
its own samples), or summed (the loss is already divided by the global number of tokens).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .layout import new_dtensor
from .modes import annotation, plain_ops
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


def grad_like(param: torch.Tensor, local: torch.Tensor) -> DTensor:
    """``local`` as a gradient of the DTensor ``param``: its mesh and placements."""
    return new_dtensor(local, param._spec)


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
    if param.grad is None:
        param.grad = grad_like(param, local)
    else:
        param.grad._local_tensor.add_(local)


@dataclass
class PendingReduction:
    """A reduce-scatter in flight. Its ``finish`` accumulates into ``.grad``."""

    weight: ShardedWeight
    transfer: Transfer
    void: list[bool]  # set to [True] to drop the result


class Reducer:
    """All gradient reductions of one runtime."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.pending: deque[PendingReduction] = deque()
        # local gradient so far, and whether its sum over tp is still owed
        self.small: dict[tuple[SmallParam, nn.Parameter], tuple[torch.Tensor, bool]] = {}

    @property
    def num_pending(self) -> int:
        return len(self.pending) + len(self.small)

    def scale(self) -> float:
        return 1.0 if self._runtime.config.calculate_per_token_loss else 1.0 / self._runtime.transport.size

    # ---- sharded weights

    def make_room(self) -> None:
        """Before another unsharded gradient is allocated: wait for the oldest ones in flight."""
        limit = self._runtime.config.graph_wgrad_ring_size - 1
        while len(self.pending) > limit:
            self.pending.popleft().transfer.release()

    def launch(self, weight: ShardedWeight, param: nn.Parameter, grad: torch.Tensor, returned: bool) -> DTensor | None:
        """Reduce ``grad``, the gradient of the gathered weight (TP-local shape, plain or on the tp mesh).

        Accumulates into the ``.grad`` of ``param`` (the leaf that the forward read) and returns None; or, where autograd
        wants the gradient itself (``returned``), waits and returns it as a DTensor placed like the parameter.
        """
        config = self._runtime.config
        transport = self._runtime.transport
        result: list[DTensor] = []
        void = [False]
        if not returned:
            check_grad(param, weight.fqn)
        self.make_room()
        with plain_ops():
            buffer = self._reduction_input(weight, grad)
            out_dtype = buffer.dtype
            fp32_sum = config.reduce_scatter_with_fp32_accumulation and out_dtype.itemsize < 4 and transport.size > 2
            out = buffer.new_empty(weight.send_shape, dtype=torch.float32 if fp32_sum else out_dtype)

            def finish() -> None:
                if void[0]:
                    return
                with plain_ops():
                    local = out if weight.num_local_rows == out.shape[0] else out[: weight.num_local_rows].clone()
                    if returned:
                        result.append(grad_like(param, scaled(local, param.dtype, self.scale())))
                    else:
                        accumulate(param, local, self.scale())

            with annotation("reduce", weight.fqn):
                transfer = transport.reduce_scatter(out, buffer, finish, fp32_sum)
        weight.counters.num_reductions += 1
        weight.counters.reduce_bytes += buffer.numel() * buffer.element_size()
        if returned or not config.async_reduction:
            transfer.release()
            return result[0] if returned else None
        self.pending.append(PendingReduction(weight, transfer, void))
        return None

    def _reduction_input(self, weight: ShardedWeight, grad: torch.Tensor) -> torch.Tensor:
        if weight.tp is not None:
            grad, owes_tp_sum = weight.tp.unwrap_grad(grad)
            if owes_tp_sum:
                grad = grad.clone()
                dist.all_reduce(grad, group=weight.tp.mesh.get_group())
        if grad.dtype != weight.reduce_dtype:
            grad = grad.to(weight.reduce_dtype)
        return weight.cut.pack(grad)

    # ---- parameters that stay whole

    def collect(self, small: SmallParam, param: nn.Parameter, grad: torch.Tensor) -> None:
        """Add this use's gradient to what the end of the backward reduces."""
        check_grad(param, small.fqn)
        with plain_ops():
            local, owes_tp_sum = small.local_grad(grad)
            local = local.to(small.reduce_dtype)
            key = (small, param)
            before = self.small.get(key)
            if before is None:
                self.small[key] = (local, owes_tp_sum)
            elif before[1] == owes_tp_sum:
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
            return grad_like(param, scaled(local, param.dtype, self.scale()))

    def _reduce_small(self) -> None:
        """One all-reduce over gtp for all of them (one a dtype); before it, one over tp for those that owe it."""
        entries = sorted(self.small.items(), key=lambda item: (not item[1][1], item[0][0].serial))
        self.small = {}
        self._runtime.check_small_peers([small for (small, _), _ in entries])
        groups: dict[tuple, list[tuple[SmallParam, nn.Parameter, torch.Tensor, bool]]] = {}
        for (small, param), (local, owes) in entries:
            key = (local.dtype, small.tp.mesh.get_group().group_name if owes else None)
            groups.setdefault(key, []).append((small, param, local, owes))
        for (dtype, tp_group), group in groups.items():
            if tp_group is not None:
                flat = torch.cat([local.reshape(-1) for _, _, local, _ in group])
                dist.all_reduce(flat, group=group[0][0].tp.mesh.get_group())
                parts = flat.split([local.numel() for _, _, local, _ in group])
                whole = [(s, p, part.view(local.shape), False) for (s, p, local, _), part in zip(group, parts)]
                groups[dtype, tp_group] = whole
        for dtype in dict.fromkeys(dtype for dtype, _ in groups):
            group = [entry for (of, _), entries in groups.items() if of == dtype for entry in entries]
            flat = torch.cat([local.reshape(-1) for _, _, local, _ in group])
            self._runtime.transport.all_reduce(flat)
            parts = flat.split([local.numel() for _, _, local, _ in group])
            for (_, param, local, _), part in zip(group, parts):
                accumulate(param, part.view(local.shape), self.scale())  # gradients are views of one buffer
            self._runtime.counters.num_small_reductions += 1

    # ---- draining

    def drain(self) -> None:
        """Wait for and accumulate everything. Nothing is pending afterwards, also if it raises."""
        try:
            while self.pending:
                self.pending.popleft().transfer.release()
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
            reduction = self.pending.popleft()
            reduction.void[0] = True
            reduction.transfer.release()
        self.small = {}


def wants_gradient_returned(param: nn.Parameter) -> bool:
    """Whether autograd has to get the reduced gradient itself: hooks must see it, or it flows on from a non-leaf."""
    return (
        not param.is_leaf
        or bool(getattr(param, "_backward_hooks", None))
        or bool(getattr(param, "_post_accumulate_grad_hooks", None))
    )
