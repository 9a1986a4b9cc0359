"""Process-group collectives, issued ahead of their use and waited for without stopping the host.

They are asynchronous c10d collectives. On a GPU each communicator has a stream of its own, which first waits for the
stream that issues the collective; "done" is an event that the reader's stream waits for. On a CPU (Gloo) they run in
threads. Both look the same from here: a work handle.

Every buffer is allocated on the stream that computes. So the caching allocator's own order (a block is reused by later
work of the stream it was allocated on) is the whole of the memory protocol, provided that a block which a communicator
touches is only let go after that stream has waited for the work. No ``record_stream``, whose delayed frees make memory
depend on the host's speed.

The methods of ``ProcessGroup`` are called directly: the functions of ``torch.distributed`` around them cost more host
time than everything else a use of a weight does.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from datetime import timedelta
from enum import Enum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from ..layout import RowCut
    from ..weight import ShardedWeight

# (stream id, device index, device type) of the current stream of a CUDA device: cheaper than a Stream object.
current_stream = getattr(torch._C, "_cuda_getCurrentStream", None)  # None where torch has no CUDA
# torch 2.13 has both names of each; the first one is all that torch 2.11 has.
_GATHER = "_allgather_base" if hasattr(dist.ProcessGroup, "_allgather_base") else "all_gather_single"
_REDUCE = "_reduce_scatter_base" if hasattr(dist.ProcessGroup, "_reduce_scatter_base") else "reduce_scatter_single"
_EXCHANGE = "alltoall_base" if hasattr(dist.ProcessGroup, "alltoall_base") else "all_to_all_single"


class _Enqueued:
    """In place of a collective's work handle, on an axis of size 1: what the current stream was given so far."""

    __slots__ = ("_event",)

    def __init__(self, device_index: int | None) -> None:
        self._event = None if device_index is None else torch.cuda.current_stream(device_index).record_event()

    def wait(self) -> None:
        """Order the current stream after it."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)


_NOTHING = _Enqueued(None)


class Transfer:
    """One collective in flight, with the tensors it reads and writes, which must outlive it.

    ``home`` is the stream that the tensors were allocated on (None on a CPU): their memory returns to its pool.
    """

    __slots__ = ("_work", "_home", "_is_done", "tensors")

    def __init__(self, work: dist.Work | _Enqueued, home: tuple | None, tensors: tuple[torch.Tensor, ...]) -> None:
        self._work = work
        self._home = home
        self._is_done = False
        self.tensors = tensors

    @classmethod
    def done(cls, *tensors: torch.Tensor) -> Transfer:
        """Nothing has to move: readers of ``tensors`` are ordered by the stream that wrote them."""
        return cls(_Enqueued(None), None, tensors)

    def wait(self) -> None:
        """Order what the current stream (on a CPU: the caller) does next after the transfer."""
        if self._is_done and self._home is None:
            return
        self._work.wait()
        self._is_done = True

    def release(self) -> None:
        """Let go of the tensors, whose readers are enqueued on the current stream: their memory may be reused by what
        the stream they were allocated on does next."""
        if not self._is_done:
            self.wait()
        home = self._home
        if home is not None and home != current_stream(home[1]):
            self._hand_back()
        self.tensors, self._work = (), _NOTHING  # NCCL's handle holds what the collective wrote

    def abandon(self) -> None:
        """:meth:`release`, by who holds this and dies: perhaps nobody waited, and a GPU's stream has to be told before
        the memory is reused; a CPU's collective holds its own tensors, and its peers may be gone."""
        if self._home is not None:
            self.release()

    def discard(self) -> None:
        """It was part of a capture that is over, or failed: nobody may wait for it."""
        self._is_done, self._home, self._work, self.tensors = True, None, _NOTHING, ()

    def _hand_back(self) -> None:
        """The home stream waits for the transfer and for the readers on this stream."""
        stream_id, device_index, device_type = self._home
        home = torch.cuda.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type)
        read = torch.cuda.current_stream(self._home[1]).record_event()
        with torch.cuda.stream(home):
            self._work.wait()
            home.wait_event(read)


class Traffic(Enum):
    """What a CUDA graph moves."""

    GATHERS = 1  # on the stream that computes
    REDUCTIONS = 2  # on a stream of their own, beside what computes
    ALL = 3  # on the stream that computes


class CollectiveTransport:
    """Gathers and reductions over one mesh axis, each kind on a communicator (and so a stream) of its own.

    Two communicators, because on one of them NCCL runs kernels in launch order whatever the streams say: a prefetched
    gather would queue behind a reduction, and the reverse. With NCCL both have high priority, so that a gather gets its
    few SMs while a GEMM runs; the mesh's own group is then left to others. ``gathers=False``: one, for reductions, with
    the gathers that are part of them.

    Attributes:
        num_fences: around rewritten compute shards, so far.
        num_bytes: of memory that peers reach, beyond what torch's caching allocator knows.
        is_capturing: what is issued now becomes part of a CUDA graph.
    """

    num_fences = 0
    num_bytes = 0
    is_capturing = False

    def __init__(self, mesh_group: dist.ProcessGroup, device: torch.device, name: str, gathers: bool = True) -> None:
        self.device = device
        self.size = mesh_group.size()
        self.rank = mesh_group.rank()
        self.mesh_group = mesh_group
        needs_sibling = gathers and device.type == "cuda"
        self.gather_group = _sibling_group(mesh_group, device, f"{name}_gather") if needs_sibling else mesh_group
        self.reduce_group = _sibling_group(mesh_group, device, f"{name}_reduce")
        if not gathers:
            self.gather_group = self.reduce_group
        self._device_index = device.index if device.type == "cuda" else None

    def _home(self) -> tuple | None:
        return None if self._device_index is None else current_stream(self._device_index)

    def rewriting(self, weights: Sequence[ShardedWeight]) -> contextlib.AbstractContextManager:
        """Around the rewriting of these weights' compute shards, which nobody reads but in collectives."""
        return contextlib.nullcontext()

    # ---- CUDA graphs. A communicator orders what graphs and eager code issue on it by itself, in the order of the host,
    # whatever their streams (NCCL's graph mixing, which is on by default).

    def begin_capture(self) -> None:
        """The current stream begins to capture, and nothing is in flight."""
        self.is_capturing = True

    def end_capture(self) -> None:
        """The capture is about to end: side streams join the current one."""
        self.is_capturing = False

    def abandon_capture(self) -> None:
        """The capture failed. No stream may be touched."""
        self.is_capturing = False

    def before_replay(self, traffic: Traffic) -> None:
        """What the current stream does next, a replay, comes after what side streams were given of that kind."""

    def after_replay(self, traffic: Traffic) -> None:
        """Side streams for that kind go on after the replay that the current stream was given."""

    def pushes(self, dtype: torch.dtype) -> bool:
        """Whether gradients that travel in ``dtype`` are reduced through memory of the peers."""
        return False

    def unserved(self, dtypes: set[torch.dtype]) -> list[str]:
        """One line for what this transport leaves to collectives, of gradients in ``dtypes``."""
        return []

    def all_gather(self, buffer: torch.Tensor, shard: torch.Tensor, dim: int = 0) -> Transfer:
        """Start filling ``buffer`` from every rank's ``shard``, which has 1/size of its rows along ``dim``, in rank
        order. Both are contiguous; where ``dim`` is 1, each of their parts along dim 0 is, and all of them travel as
        one coalesced collective."""
        if dim == 0:
            index = self._device_index
            home = None if index is None else current_stream(index)
            return Transfer(getattr(self.gather_group, _GATHER)(buffer, shard), home, (buffer, shard))
        work = self.gather_group.allgather_into_tensor_coalesced(list(buffer.unbind()), list(shard.unbind()))
        return Transfer(work, self._home(), (buffer, shard))

    def all_gather_parts(
        self, buffers: tuple[torch.Tensor, ...], parts: tuple[torch.Tensor, ...], dim: int
    ) -> Transfer:
        """:meth:`all_gather` of several tensors, as one coalesced collective."""
        if len(parts) == 1:
            return self.all_gather(buffers[0], parts[0], dim)
        outs, ins = list(buffers), list(parts)
        if dim:
            outs, ins = ([piece for tensor in tensors for piece in tensor.unbind()] for tensors in (outs, ins))
        work = self.gather_group.allgather_into_tensor_coalesced(outs, ins)
        return Transfer(work, self._home(), (*buffers, *parts))

    def move_rows(self, rows: torch.Tensor, have: RowCut, want: RowCut) -> torch.Tensor:
        """This rank's rows of one cut, from those that ranks have of another cut of the same rows; contiguous, ordered on
        the current stream."""
        if self.size == 1 or have.chunk == want.chunk:
            return rows.contiguous()
        dim, rank = have.dim, self.rank
        rows = rows.movedim(dim, 0).contiguous()
        sent = [_num_common(have.rows_of(rank), want.rows_of(peer)) for peer in range(self.size)]
        received = [_num_common(have.rows_of(peer), want.rows_of(rank)) for peer in range(self.size)]
        moved = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(moved, rows, received, sent, group=self.reduce_group)
        return moved.movedim(0, dim).contiguous()

    def reduce_scatter(self, out: torch.Tensor, buffer: torch.Tensor, dim: int = 0) -> Transfer:
        """Start summing ``buffer`` over the axis; this rank's rows, 1/size of those along ``dim``, arrive in ``out``."""
        if self.size == 1:
            out.copy_(buffer)
            return Transfer(_Enqueued(self._device_index), self._home(), (out, buffer))
        if dim == 0:
            work = getattr(self.reduce_group, _REDUCE)(out, buffer)
        else:
            work = self.reduce_group.reduce_scatter_tensor_coalesced(list(out.unbind()), list(buffer.unbind()))
        index = self._device_index
        return Transfer(work, None if index is None else current_stream(index), (out, buffer))

    def all_to_all(self, buffer: torch.Tensor, dim: int = 0) -> Transfer:
        """Start giving every rank its rows of ``buffer`` (contiguous), 1/size of those along ``dim``.

        The transfer's tensors are (what arrives, what is sent), both (size, ...): of the one, slice r is rank r's part of
        this rank's rows; the other is ``buffer``, or where ``dim`` is 1 a copy with each rank's rows in one piece.
        """
        rows = buffer.unflatten(dim, (self.size, buffer.shape[dim] // self.size))
        sent = rows.movedim(dim, 0).contiguous()
        parts = torch.empty_like(sent)
        work = getattr(self.reduce_group, _EXCHANGE)(parts, sent, [], [])
        return Transfer(work, self._home(), (parts, sent))

    def all_reduce(self, buffer: torch.Tensor) -> None:
        """Sum ``buffer`` in place over the axis, ordered on the current stream."""
        if self.size == 1:
            return
        dist.all_reduce(buffer, group=self.reduce_group)

    def all_reduce_max(self, buffer: torch.Tensor) -> None:
        """The largest of the axis, in place, ordered on the current stream."""
        if self.size > 1:
            dist.all_reduce(buffer, dist.ReduceOp.MAX, group=self.reduce_group)

    def start_all_reduce(self, buffer: torch.Tensor) -> Transfer:
        """Start summing ``buffer`` in place over the axis."""
        return Transfer(dist.all_reduce(buffer, group=self.reduce_group, async_op=True), self._home(), (buffer,))

    def exchange(self, numbers: list[int]) -> list[list[int]]:
        """Every rank's ``numbers``, in rank order. Stops the host; for debug checks."""
        everyones: list = [None] * self.size
        dist.all_gather_object(everyones, numbers, group=self.mesh_group)
        return everyones

    def process_groups(self) -> list[dist.ProcessGroup]:
        """The communicators in use, so that an integration can set their time-outs."""
        return list(dict.fromkeys([self.gather_group, self.reduce_group]))


def _num_common(one: tuple[int, int], other: tuple[int, int]) -> int:
    """How many rows are in both of two (first row, number of rows)."""
    return max(0, min(sum(one), sum(other)) - max(one[0], other[0]))


def group_timeout(group: dist.ProcessGroup, device: torch.device) -> timedelta | None:
    """The time-out of ``group``'s collectives, or None where its backend does not tell."""
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)


def _sibling_group(group: dist.ProcessGroup, device: torch.device, name: str) -> dist.ProcessGroup:
    """Another communicator over the ranks of ``group``, with its backend and time-out."""
    backend = dist.get_backend(group)
    if backend == "fake" or group.size() == 1:
        return group
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if backend == "nccl" else None
    timeout = group_timeout(group, device)
    return _made_by_members(
        dist.get_process_group_ranks(group), backend, f"{group.group_name}:{name}:", name, timeout, options
    )


def group_of_ranks(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """A communicator over ``ranks``, ascending, of the default group's backend: the default group where these are all ranks,
    else a new one. Only ``ranks`` take part."""
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    key = hashlib.sha1("_".join(map(str, ranks)).encode(), usedforsecurity=False).hexdigest()
    return _made_by_members(list(ranks), dist.get_backend(), f"{key}:{name}:", name)


def _made_by_members(
    members: list[int], backend: str, prefix: str, name: str, timeout: timedelta | None = None, options=None
) -> dist.ProcessGroup:
    """A new communicator over ``members``, one more of those named ``prefix``."""
    c10d = dist.distributed_c10d
    # dist.new_group() would involve all ranks of the world, or else name the group by how many groups this rank belongs
    # to: where its peers belong to others beside (a bridge, a pipeline's ends), they would wait for each other forever.
    number = sum(known.startswith(prefix) for known in c10d._world.pg_names.values())
    backend = dist.Backend(backend)
    made, _ = c10d._new_process_group_helper(
        len(members),
        members.index(dist.get_rank()),
        members,
        backend,
        c10d._get_default_store(),
        f"{prefix}{number}",
        backend_options=options,
        timeout=timeout or c10d._get_default_timeout(backend),
        group_desc=name,
    )
    c10d._world.pg_group_ranks[made] = {rank: place for place, rank in enumerate(members)}
    return made
