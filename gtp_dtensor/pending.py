"""Reductions in flight, and what is done with what they bring.

Of a reduction over one axis arrives either the sum, or, where it is summed here in float32, every rank's part of it.
Either way this rank's rows of the sum are written to a new tensor (:meth:`rows`), or added to one that is there
(:meth:`add_to`): the gradient of a parameter, or what is kept back from the replicas. Where ranks write into each
other's memory, the sum itself is enqueued when the reduction starts, and may go straight into the gradient.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn as nn

from .accumulation import sum_parts
from .layout import new_dtensor
from .transport import SUMMED_DTYPES, Ticket, Transfer

if TYPE_CHECKING:
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


def may_be_scaled_later(summed: torch.dtype, kept: torch.dtype) -> bool:
    """Whether a sum in one dtype loses nothing by being kept in the other one before it is scaled."""
    return summed is kept or kept is torch.float32 and summed.itemsize <= kept.itemsize


class PendingSum:
    """A reduction in flight: rows of ``weight``'s gradient, for ``param``, are coming, summed by the collective.

    Args:
        out: where they arrive, padded.
        shape: of what of it is ours.
    """

    __slots__ = ("weight", "param", "_out", "_shape", "_transfer")

    is_in_grad = False

    def __init__(
        self, weight: ShardedWeight, param: nn.Parameter, out: torch.Tensor, shape: torch.Size, transfer: Transfer
    ) -> None:
        self.weight = weight
        self.param = param
        self._out = out
        self._shape = shape
        self._transfer = transfer

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the sum is made in."""
        return self._out.dtype

    def rows(self, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        """Wait. Returns ``scale`` times the summed rows in ``dtype``, contiguous, ours to keep; :meth:`release` follows."""
        self._transfer.wait()
        own = self._out
        if own.shape != self._shape:
            own = own[tuple(map(slice, self._shape))].clone(memory_format=torch.contiguous_format)
        if own.dtype is dtype:  # as in scaled()
            return own if scale == 1.0 else own.mul_(scale)
        return scaled(own, dtype, scale)

    def add_to(self, into: torch.Tensor, scale: float = 1.0) -> None:
        """Wait. ``into += scale * the summed rows``; :meth:`release` follows. Once, and instead of :meth:`rows`."""
        self._transfer.wait()
        own = self._out
        if own.shape != self._shape:
            own = own[tuple(map(slice, self._shape))]
        if scale == 1.0:
            into.add_(own)  # parsed faster than with alpha
        else:
            into.add_(own, alpha=scale)  # in the wider of both dtypes, rounded once

    def release(self) -> None:
        """What reads the result is enqueued, or nobody wants it."""
        self._transfer.release()

    def abandon(self) -> None:
        """The model dies while this is in flight."""
        self._transfer.abandon()

    def discard(self) -> None:
        """It was part of a capture that failed."""
        self._transfer.discard()


class PendingParts:
    """The same where all ranks' parts of the rows are coming, to be summed here in float32.

    Beside the parts nothing of the rows' size is allocated but what :meth:`rows` returns: where the sum is not written
    to its place at once, it is made in the memory of what was sent. On a GPU a first gradient takes one kernel, and
    another where it is scaled or not float32; adding to one takes two.

    Args:
        parts: where they arrive, (size of the axis, ...), padded.
        shape: of what of each is ours.
        spare: what was sent, where it is ours to overwrite now; else None.
    """

    __slots__ = ("weight", "param", "_parts", "_shape", "_transfer", "_spare")

    is_in_grad = False
    dtype = torch.float32  # that the sum is made in

    def __init__(
        self,
        weight: ShardedWeight,
        param: nn.Parameter,
        parts: torch.Tensor,
        shape: torch.Size,
        transfer: Transfer,
        spare: torch.Tensor | None,
    ) -> None:
        self.weight = weight
        self.param = param
        self._parts = parts
        self._shape = shape
        self._transfer = transfer
        self._spare = spare

    def rows(self, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        """See :meth:`PendingSum.rows`."""
        is_final = dtype == self.dtype
        total = self._sum_into(self._new_room() if is_final else self._room())
        if scale != 1.0:
            total.mul_(scale)
        return total if is_final else total.to(dtype)

    def add_to(self, into: torch.Tensor, scale: float = 1.0) -> None:
        """See :meth:`PendingSum.add_to`."""
        into.add_(self._sum_into(self._room()), alpha=scale)

    def _sum_into(self, out: torch.Tensor) -> torch.Tensor:
        self._transfer.wait()
        sum_parts(self._parts[(slice(None), *map(slice, self._shape))], out)
        return out

    def _room(self) -> torch.Tensor:
        """Memory for the sum, for as long as this is not released."""
        spare, num_bytes = self._spare, self._shape.numel() * self.dtype.itemsize
        # More than two parts of 16 bits, of which each has our rows or more: there is room for one of 32.
        if spare is None or spare.nbytes < num_bytes or spare.storage_offset() * spare.itemsize % self.dtype.itemsize:
            return self._new_room()
        return spare.view(-1)[: num_bytes // spare.itemsize].view(self.dtype).view(self._shape)

    def _new_room(self) -> torch.Tensor:
        return self._parts.new_empty(self._shape, dtype=self.dtype)

    def release(self) -> None:
        """See :meth:`PendingSum.release`."""
        self._transfer.release()
        self._spare = None

    def abandon(self) -> None:
        """See :meth:`PendingSum.abandon`."""
        self._transfer.abandon()

    def discard(self) -> None:
        """See :meth:`PendingSum.discard`."""
        self._transfer.discard()


class PendingPush:
    """The same where each rank's rows are written into its memory by its peers, and summed by a kernel that is enqueued
    already.

    Args:
        grad: the unsharded gradient, which is read until the sum is made.
        total: the sum, float32 (this rank's rows); or the local gradient of ``param`` that it goes into, scaled.
        is_in_grad: which of both: there is nothing to do then but to wait.
    """

    __slots__ = ("weight", "param", "is_in_grad", "_grad", "_total", "_ticket")

    dtype = torch.float32  # that the sum is made in

    def __init__(
        self,
        weight: ShardedWeight,
        param: nn.Parameter,
        grad: torch.Tensor,
        total: torch.Tensor,
        is_in_grad: bool,
        ticket: Ticket,
    ) -> None:
        self.weight = weight
        self.param = param
        self.is_in_grad = is_in_grad
        self._grad = grad
        self._total = total
        self._ticket = ticket

    def wait(self) -> None:
        """What the current stream does next comes after the sum."""
        self._ticket.wait()

    def rows(self, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
        """See :meth:`PendingSum.rows`."""
        self._ticket.wait()
        return scaled(self._total, dtype, scale)

    def add_to(self, into: torch.Tensor, scale: float = 1.0) -> None:
        """See :meth:`PendingSum.add_to`."""
        self._ticket.wait()
        into.add_(self._total, alpha=scale)

    def release(self) -> None:
        """See :meth:`PendingSum.release`; waits."""
        self._ticket.release()
        self._grad = self._total = None

    def abandon(self) -> None:
        """See :meth:`PendingSum.abandon`."""
        self._ticket.release()  # before the memory that it reads and writes is used for something else

    def discard(self) -> None:
        """See :meth:`PendingSum.discard`."""
        self._ticket.discard()
        self._grad = self._total = None


def room_in_grad(param: nn.Parameter) -> tuple[torch.Tensor | None, bool]:
    """For a :class:`PendingPush`: (local gradient that a kernel can write to, whether it has to add to it); None where it
    has another kind of memory than the kernel serves."""
    grad = param.grad
    if grad is None:
        if param.dtype not in SUMMED_DTYPES:
            return None, False
        local = torch.empty_like(param._local_tensor, memory_format=torch.contiguous_format)
        param.grad = new_dtensor(local, param._spec)
        return local, False
    local = grad._local_tensor
    return (local, True) if local.dtype in SUMMED_DTYPES and local.is_contiguous() else (None, False)


Pending = PendingSum | PendingParts | PendingPush


class Stage:
    """Reductions in flight over one axis, oldest first.

    Args:
        proceed: is given each that is to be received, and waits for it.

    Attributes:
        in_flight: these; always the same object.
        add: one more, just started.
    """

    def __init__(self, proceed: Callable[[Pending], None]) -> None:
        self._proceed = proceed
        self.in_flight: deque[Pending] = deque()
        self.add = self.in_flight.append

    def __len__(self) -> int:
        return len(self.in_flight)

    def receive(self, most: int = 0) -> None:
        """Receive the oldest ones until at most ``most`` are in flight."""
        while len(self.in_flight) > most:
            reduction = self.in_flight.popleft()
            try:
                self._proceed(reduction)
            finally:
                reduction.release()

    def drop(self) -> None:
        """Wait for all, and let go of what they brought."""
        while self.in_flight:
            self.in_flight.popleft().release()

    def discard(self) -> None:
        """All were part of a capture that failed."""
        while self.in_flight:
            self.in_flight.popleft().discard()

    def __del__(self) -> None:
        for reduction in self.in_flight:
            reduction.abandon()
