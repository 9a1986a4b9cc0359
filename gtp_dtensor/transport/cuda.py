"""Streams, copies, signals and shared memory of one CUDA device.

The driver is called through ctypes, by the names of its stable interface (``_v2`` where there are two): torch has no
functions for copies between raw addresses and for signals on streams, and its wrappers of the others cost several times
as much host time.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from .fabric import Address, Sum
from .summing import new_kernel, sum_in_one_kernel
from .watchdog import NUM_KINDS

logger = logging.getLogger(__name__)

_WAIT, _WRITE = 1, 2  # CUstreamBatchMemOpType
_AT_LEAST, _EQUAL = 0, 1  # CU_STREAM_WAIT_VALUE_GEQ, _EQ
_DEVICE_MEMORY = 2  # CU_MEMORYTYPE_DEVICE
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
_NO_CONTEXT, _NOT_READY = 201, 600
_MOST_PITCH = (1 << 31) - 1  # bytes, CU_DEVICE_ATTRIBUTE_MAX_PITCH of all devices
_MOST_READ = 128  # words at once: one for each peer
_COUNT = "_gtp_num_rendezvous"


class _MemOp(ctypes.Structure):
    """CUstreamBatchMemOpParams: 48 bytes."""

    _fields_ = [
        ("operation", ctypes.c_uint32),
        ("_padding", ctypes.c_uint32),
        ("address", ctypes.c_uint64),
        ("value", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("_padding_too", ctypes.c_uint32),
        ("alias", ctypes.c_uint64),
        ("_rest", ctypes.c_uint64),
    ]


class _Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = [
        (f"{side}_{name}", kind)
        for side in ("source", "to")
        for name, kind in (
            ("x", ctypes.c_size_t),
            ("y", ctypes.c_size_t),
            ("memory_type", ctypes.c_uint32),
            ("host", ctypes.c_void_p),
            ("device", ctypes.c_uint64),
            ("array", ctypes.c_void_p),
            ("pitch", ctypes.c_size_t),
        )
    ] + [("width", ctypes.c_size_t), ("height", ctypes.c_size_t)]


class Driver:
    """The functions of the CUDA driver that are called.

    Raises:
        OSError, AttributeError: there is none, or it lacks one of them.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        pointer, address, size, u32 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint32

        def bind(name: str, *types: type) -> Callable[..., int]:
            function = getattr(library, name)
            function.argtypes, function.restype = types, ctypes.c_int
            return function

        self.copy = bind("cuMemcpyAsync", address, address, size, pointer)
        self.copy_2d = bind("cuMemcpy2DAsync_v2", pointer, pointer)
        self.copy_to_host = bind("cuMemcpyDtoHAsync_v2", pointer, address, size, pointer)
        self.memory_operations = bind("cuStreamBatchMemOp_v2", pointer, u32, pointer, u32)
        self.query = bind("cuStreamQuery", pointer)
        self.new_event = bind("cuEventCreate", pointer, u32)
        self.record = bind("cuEventRecord", pointer, pointer)
        self.wait = bind("cuStreamWaitEvent", pointer, pointer, u32)
        self.host_address = bind("cuMemHostGetDevicePointer_v2", pointer, pointer, u32)
        self.current_context = bind("cuCtxGetCurrent", pointer)
        self.set_context = bind("cuCtxSetCurrent", pointer)
        self._name = bind("cuGetErrorName", ctypes.c_int, pointer)

    def check(self, code: int, what: str) -> None:
        """Raise where ``code`` is an error."""
        if code:
            name = ctypes.c_char_p()
            self._name(code, ctypes.byref(name))
            raise RuntimeError(f"CUDA driver: {what}: {(name.value or b'unknown error').decode()}")


@dataclass(eq=False)
class SharedMemory:
    """See :class:`~.fabric.Shared`. ``handle`` keeps the peers' memory mapped."""

    tensor: torch.Tensor
    ptrs: list[Address]
    handle: object


class CudaFabric:
    """See :class:`~.fabric.Fabric`. Streams are raw handles, events too; both are kept for good.

    [Note: threads and contexts]
        The driver looks for a context in the calling thread. torch gives a thread one with its first call into CUDA that
        needs one: autograd's of device 0 has none before, and the watchdog's never. And handle 0, the default stream's,
        is that of whatever context the thread has.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._driver = Driver()
        self._index = device.index
        with torch.cuda.device(device):
            # High priority for the few launches that copies are; sums measured the same at either beside GEMMs.
            self._streams = [torch.cuda.Stream(device, priority=priority) for priority in (-1, -1, 0, 0)]
            self._words = torch.zeros(NUM_KINDS, dtype=torch.int32, device="cpu").pin_memory()
            # A copy to other memory stops the host until it is made, and it may come after waits that never end.
            self._seen = torch.zeros(_MOST_READ, dtype=torch.int32, device="cpu").pin_memory()
            context = ctypes.c_void_p()
            self._driver.check(self._driver.current_context(ctypes.addressof(context)), "looking for a context")
            self._context = context.value
        self.copying, self.pushing, self.summing, self._reading = (stream.cuda_stream for stream in self._streams)
        self._progress = self._on_device(self._words.data_ptr())
        self.progress = (ctypes.c_int32 * NUM_KINDS).from_address(self._words.data_ptr())
        self._kernel = new_kernel()

    def _on_device(self, host_address: Address) -> Address:
        found = ctypes.c_uint64()
        self._driver.check(self._driver.host_address(ctypes.addressof(found), host_address, 0), "mapping host memory")
        return found.value

    def current(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._index)

    # ---- shared memory

    def share(self, group: dist.ProcessGroup, num_bytes: int) -> SharedMemory:
        from torch.distributed import _symmetric_memory as symmetric_memory

        # Multicast objects are not needed, and where a machine's fabric manager misbehaves making one hangs.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        tensor = error = None
        try:
            # Not symmetric_memory.empty(), whose memory goes through a pool that differs by release.
            tensor = symmetric_memory._SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self.device)
        except RuntimeError as failure:
            error = f"{num_bytes} bytes that peers reach could not be allocated: " + str(failure).partition("\n")[0]
        self._align_rendezvous(group, error)
        tensor.zero_()
        torch.cuda.synchronize(self.device)
        handle = _rendezvous(tensor, group)
        if handle.multicast_ptr:
            raise RuntimeError(
                "symmetric memory was mapped with multicast, which TORCH_SYMM_MEM_DISABLE_MULTICAST=1 forbids"
            )
        ptrs = list(handle.buffer_ptrs)
        if ptrs[group.rank()] != tensor.data_ptr():
            raise RuntimeError("symmetric memory: a tensor does not begin where its allocation does")
        return SharedMemory(tensor, ptrs, handle)

    def _align_rendezvous(self, group: dist.ProcessGroup, error: str | None) -> None:
        """torch (until issue 196082 is fixed) numbers rendezvous by process, not by group: ranks that made different
        numbers of them before wait for each other for ever. So those with fewer make some with themselves. Raises on
        all ranks where one has an ``error``: the others would wait for it."""
        from torch.distributed import _symmetric_memory as symmetric_memory

        everyones: list = [None] * group.size()
        dist.all_gather_object(everyones, (_num_rendezvous(), error), group=group)
        counts, errors = zip(*everyones)
        for rank, found in zip(dist.get_process_group_ranks(group), errors):
            if found is not None:
                raise RuntimeError(f"symmetric memory: rank {rank}: {found}")
        missing = max(counts) - counts[group.rank()]
        if not missing:
            return
        alone = _group_of_one()
        for _ in range(missing):
            tensor = symmetric_memory._SymmetricMemory.empty_strided_p2p((1,), (1,), torch.uint8, self.device)
            _rendezvous(tensor, alone)

    # ---- events, copies, signals

    def _again(self, code: int, what: str, function: Callable[..., int], *args: object) -> None:
        """``function(*args)`` gave the error ``code``: once more where this thread had no context, else raise."""
        if code == _NO_CONTEXT:
            self._driver.set_context(self._context)
            code = function(*args)
        if code and torch.cuda.current_device() != self._index:
            what += (
                f" (the current CUDA device of this thread is {torch.cuda.current_device()}, and the model is on "
                f"{self.device}: call torch.cuda.set_device({self._index}) in it)"
            )
        self._driver.check(code, what)

    def new_event(self) -> int:
        event = ctypes.c_void_p()
        create, args = self._driver.new_event, (ctypes.addressof(event), _NO_TIMING)
        with torch.cuda.device(self.device):
            code = create(*args)
            if code:
                self._again(code, "creating an event", create, *args)
        return event.value

    def record(self, event: int, lane: int) -> None:
        code = self._driver.record(event, lane)
        if code:
            self._again(code, "recording an event", self._driver.record, event, lane)

    def wait(self, lane: int, event: int) -> None:
        code = self._driver.wait(lane, event, 0)
        if code:
            self._again(code, "waiting for an event", self._driver.wait, lane, event, 0)

    def copy(self, to: Address, source: Address, num_bytes: int, lane: int) -> None:
        code = self._driver.copy(to, source, num_bytes, lane)
        if code:
            self._again(code, f"copying {num_bytes} bytes", self._driver.copy, to, source, num_bytes, lane)

    def copy_rows(
        self, to: Address, to_pitch: int, source: Address, source_pitch: int, width: int, num_rows: int, lane: int
    ) -> None:
        if max(to_pitch, source_pitch) > _MOST_PITCH:
            for row in range(num_rows):
                self.copy(to + row * to_pitch, source + row * source_pitch, width, lane)
            return
        job = _Copy2D(
            source_memory_type=_DEVICE_MEMORY,
            source_device=source,
            source_pitch=source_pitch,
            to_memory_type=_DEVICE_MEMORY,
            to_device=to,
            to_pitch=to_pitch,
            width=width,
            height=num_rows,
        )
        code = self._driver.copy_2d(ctypes.addressof(job), lane)
        if code:
            what, address = f"copying {num_rows} x {width} bytes", ctypes.addressof(job)
            self._again(code, what, self._driver.copy_2d, address, lane)

    def writer(self, words: Sequence[Address], value: int) -> Callable[[int], None]:
        jobs = (_MemOp * len(words))(*(_MemOp(_WRITE, 0, word, value) for word in words))
        num, address, again = len(words), ctypes.addressof(jobs), self._again
        enqueue = self._driver.memory_operations

        def write(lane: int, _jobs=jobs) -> None:
            code = enqueue(lane, num, address, 0)
            if code:
                again(code, "signals", enqueue, lane, num, address, 0)

        return write

    def taker(self, words: Sequence[Address], value: int, kind: int) -> Callable[[int, int], None]:
        waits = [self._wait_for(word, value) for word in words]
        resets = [_MemOp(_WRITE, 0, word, 1 - value) for word in words]
        jobs = (_MemOp * (2 * len(words) + 1))(*waits, *resets, _MemOp(_WRITE, 0, self._progress + 4 * kind))
        most, address, again, last = len(jobs), ctypes.addressof(jobs), self._again, jobs[len(jobs) - 1]
        enqueue = self._driver.memory_operations

        def take(lane: int, number: int | None, _jobs=jobs) -> None:
            if number is None:
                num = most - 1
            else:
                num, last.value = most, number
            code = enqueue(lane, num, address, 0)
            if code:
                again(code, "waiting for signals", enqueue, lane, num, address, 0)

        return take

    def pass_mark(self, lane: int, kind: int, number: int) -> None:
        job = _MemOp(_WRITE, 0, self._progress + 4 * kind, number)
        enqueue, args = self._driver.memory_operations, (lane, 1, ctypes.addressof(job), 0)
        code = enqueue(*args)
        if code:
            self._again(code, "signals", enqueue, *args)

    def _wait_for(self, word: Address, value: int) -> _MemOp:
        return _MemOp(_WAIT, 0, word, value, _EQUAL)

    def sum(self, lane: int, job: Sum) -> None:
        sum_in_one_kernel(job, self._kernel, lane)

    # ---- when it goes wrong

    def read(self, words: Sequence[Address]) -> list[int] | None:
        self._driver.set_context(self._context)  # the watchdog's thread asks
        for place, word in enumerate(words):
            if self._driver.copy_to_host(self._seen.data_ptr() + 4 * place, word, 4, self._reading):
                return None
        for _ in range(1_000_000):
            code = self._driver.query(self._reading)
            if code != _NOT_READY:
                return None if code else self._seen[: len(words)].tolist()
        return None

    def abort(self, message: str) -> None:
        """Ends the process, as a process group's watchdog does: streams that wait for a peer cannot be told to stop."""
        logger.critical(message)
        os.abort()


def _num_rendezvous() -> int:
    return dist.distributed_c10d._world.__dict__.get(_COUNT, 0)


def _rendezvous(tensor: torch.Tensor, group: dist.ProcessGroup) -> object:
    from torch.distributed import _symmetric_memory as symmetric_memory

    handle = symmetric_memory.rendezvous(tensor, group)
    # Beside torch's own count, which lives as long as the process too.
    setattr(dist.distributed_c10d._world, _COUNT, _num_rendezvous() + 1)
    return handle


def _group_of_one() -> dist.ProcessGroup:
    """A process group of this rank alone, made without the others."""
    c10d = dist.distributed_c10d
    names = set(c10d._world.pg_names.values())
    rank = dist.get_rank()
    name = next(name for name in (f"gtp_alone_{rank}_{n}" for n in itertools.count()) if name not in names)
    backend = dist.Backend("gloo")
    group, _ = c10d._new_process_group_helper(
        1,
        0,
        [rank],
        backend,
        c10d._get_default_store(),
        name,
        timeout=c10d._get_default_timeout(backend),
        group_desc="gtp_alone",
    )
    c10d._world.pg_group_ranks[group] = {rank: 0}
    return group
