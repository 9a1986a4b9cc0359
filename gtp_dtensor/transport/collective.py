"""Process-group collectives, issued ahead of their use and waited for without stopping the host.

On a GPU a collective runs on a side stream of this library's own and "done" is an event that the reader's stream
waits for. On a CPU there are no streams: the collective is asynchronous and "done" is its work handle.

Every buffer is allocated on the stream that computes, and the side stream first waits for that stream. So the caching
allocator's own order (a block is reused by later work of the stream it was allocated on) is the whole of the memory
protocol, provided that a block which a side stream touches is only let go after the computing stream has waited for
that side stream's event. No ``record_stream``, whose delayed frees make memory depend on the host's speed.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

# torch 2.13 renamed these two and warns about the old names; the old ones are all that torch 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Transfer:
    """One collective in flight, with the tensors it reads and writes, which must outlive it.

    On a GPU it remembers the stream that its tensors were allocated on: their memory returns to that stream's pool.
    """

    __slots__ = ("_work", "_event", "_finish", "_home", "_waited", "tensors")

    def __init__(
        self,
        work: dist.Work | None,
        event: torch.cuda.Event | None,
        home: torch.cuda.Stream | None,
        tensors: tuple[torch.Tensor, ...],
        finish: Callable[[], None] | None = None,
    ) -> None:
        self._work = work
        self._event = event
        self._home = home
        self._finish = finish
        self._waited = False
        self.tensors = tensors

    def wait(self) -> None:
        """Order what the current stream (on a CPU: the caller) does next after the transfer. Idempotent on a CPU."""
        if self._event is not None:
            self._event.wait()
        elif not self._waited:
            self._waited = True
            self._work.wait()
            if self._finish is not None:
                self._finish()

    def release(self) -> None:
        """Let go of the tensors, whose readers are enqueued on the current stream: their memory may be reused by what
        the stream they were allocated on does next."""
        self.wait()
        if self._home is not None:
            current = torch.cuda.current_stream(self._home.device)
            if current != self._home:
                self._home.wait_event(self._event)
                self._home.wait_event(current.record_event())
        self.tensors = ()
        self._finish = None


class CollectiveTransport:
    """Gathers and reductions over one gtp axis, each kind on a communicator and a side stream of its own.

    Two communicators, because on one of them NCCL runs kernels in launch order whatever the streams say: a prefetched
    gather would queue behind a reduction, and the reverse. The gathers use the mesh's own group.
    """

    def __init__(self, gather_group: dist.ProcessGroup, device: torch.device) -> None:
        self.gather_group = gather_group
        self.device = device
        self.size = gather_group.size()
        self.rank = gather_group.rank()
        self.reduce_group = _sibling_group(gather_group, device)
        self._gather_stream: torch.cuda.Stream | None = None
        self._reduce_stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._gather_stream = torch.cuda.Stream(device, priority=-1)
            self._reduce_stream = torch.cuda.Stream(device, priority=-1)

    def all_gather(self, buffer: torch.Tensor, shard: torch.Tensor) -> Transfer:
        """Start filling ``buffer`` (size * n, ...) from every rank's ``shard`` (n, ...), in rank order."""
        group = self.gather_group
        if self._gather_stream is None:
            work = _all_gather(buffer, shard, group=group, async_op=True)
            return Transfer(work, None, None, (buffer, shard))
        home = torch.cuda.current_stream(self.device)
        self._gather_stream.wait_stream(home)
        with torch.cuda.stream(self._gather_stream):
            _all_gather(buffer, shard, group=group)
            return Transfer(None, self._gather_stream.record_event(), home, (buffer, shard))

    def reduce_scatter(
        self, out: torch.Tensor, buffer: torch.Tensor, finish: Callable[[], None], fp32_sum: bool = False
    ) -> Transfer:
        """Start summing ``buffer`` (size * n, ...) over the axis; this rank's rows arrive in ``out`` (n, ...).

        ``finish`` uses ``out``: on a GPU it is enqueued at once, behind the collective on the reduction stream; on a
        CPU it runs in :meth:`Transfer.wait`. With ``fp32_sum`` rows are exchanged by all-to-all in the dtype of
        ``buffer`` and summed here in the dtype of ``out`` (float32), in rank order.
        """
        group = self.reduce_group
        scratch = torch.empty_like(buffer) if fp32_sum else buffer

        def local_sum() -> None:
            parts = scratch.view(self.size, *out.shape)
            torch.sum(parts, dim=0, dtype=out.dtype, out=out)

        def collective(async_op: bool) -> dist.Work | None:
            if fp32_sum:
                return dist.all_to_all_single(scratch, buffer, group=group, async_op=async_op)
            return _reduce_scatter(out, buffer, group=group, async_op=async_op)

        def after() -> None:
            if fp32_sum:
                local_sum()
            finish()

        if self._reduce_stream is None:
            return Transfer(collective(async_op=True), None, None, (out, buffer, scratch), after)
        home = torch.cuda.current_stream(self.device)
        self._reduce_stream.wait_stream(home)
        with torch.cuda.stream(self._reduce_stream):
            collective(async_op=False)
            after()
            return Transfer(None, self._reduce_stream.record_event(), home, (out, buffer, scratch))

    def all_reduce(self, buffer: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        """Sum ``buffer`` in place over the axis (or over another axis' ``group``), ordered on the current stream."""
        dist.all_reduce(buffer, group=group or self.reduce_group)

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        """Every rank's ``numbers``, in rank order. Stops the host; for debug checks."""
        everyones: list = [None] * self.size
        dist.all_gather_object(everyones, numbers, group=self.gather_group)
        return everyones

    def process_groups(self) -> list[dist.ProcessGroup]:
        """The communicators in use, so that an integration can set their time-outs."""
        return list(dict.fromkeys([self.gather_group, self.reduce_group]))


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The time-out of ``group``'s collectives, or None where its backend does not tell."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def _sibling_group(group: dist.ProcessGroup, device: torch.device) -> dist.ProcessGroup:
    """A second communicator over the ranks of ``group``, with its backend and time-out."""
    backend = dist.get_backend(group)
    if backend == "fake" or group.size() == 1:
        return group
    ranks = dist.get_process_group_ranks(group)
    return dist.new_group(
        ranks,
        timeout=group_timeout(group, device),
        backend=backend,
        use_local_synchronization=True,  # only the members take part: other axes of the mesh may not apply GTP
        group_desc="gtp_reduce",
    )
