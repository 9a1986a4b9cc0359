"""What the CUDA fabric makes of the driver's answers, over a stand-in for the driver. On a GPU: test_gpu_symmetric.py."""

import ctypes
import threading
from unittest import mock

import pytest
import torch

from gtp_dtensor.transport.cuda import _MOST_READ, CudaFabric, Driver
from tests.harness import ranks

NO_CONTEXT, NOT_READY, INVALID_HANDLE = 201, 600, 400
CONTEXT = 77


class FakeDriver:
    """Works in threads that have a context. Device memory is ``memory``, 32-bit words by address.

    Attributes:
        stuck: no stream gets on any more.
    """

    check = Driver.check

    def __init__(self):
        self.calls, self.memory, self.stuck, self.device = [], {}, False, None
        self._thread = threading.local()
        for name in ("record", "wait", "copy", "memory_operations", "new_event", "copy_2d"):
            setattr(self, name, self._working(name))

    def _working(self, name):
        def call(*args):
            if getattr(self._thread, "context", None) != CONTEXT:
                return NO_CONTEXT
            self.calls.append(name)
            return 0

        return call

    def set_context(self, context):
        self._thread.context = context
        return 0

    def copy_to_host(self, to, word, num_bytes, lane):
        if getattr(self._thread, "context", None) != CONTEXT:
            return NO_CONTEXT
        if not self.stuck:
            ctypes.c_int32.from_address(to).value = self.memory[word]
        self.calls.append(to)
        return 0

    def query(self, lane):
        return NOT_READY if self.stuck else 0

    def _name(self, code, name):
        ctypes.cast(name, ctypes.POINTER(ctypes.c_char_p))[0] = b"CUDA_ERROR_INVALID_HANDLE"


@pytest.fixture
def fabric():
    made = object.__new__(CudaFabric)
    made._driver, made._context, made._index, made.device = FakeDriver(), CONTEXT, 3, torch.device("cuda", 3)
    made._progress, made._reading = 4096, 9
    made._seen = torch.zeros(_MOST_READ, dtype=torch.int32)
    with mock.patch("torch.cuda.current_device", lambda: 3), mock.patch("torch.cuda.device", mock.MagicMock()):
        yield made


def test_a_thread_without_a_context_gets_one(fabric):
    """Each call may be the first one that its thread makes: autograd's threads, and those of users."""
    calls = {
        "record": lambda: fabric.record(1, 0),
        "wait": lambda: fabric.wait(0, 1),
        "copy": lambda: fabric.copy(16, 32, 8, 0),
        "copy_2d": lambda: fabric.copy_rows(16, 8, 32, 8, 4, 2, 0),
        "new_event": fabric.new_event,
        "memory_operations": lambda: fabric.pass_mark(0, 1, 5),
    }
    signals = fabric.writer([64], 1), fabric.taker([64], 1, 0)
    works = [*calls.values(), lambda: signals[0](0), lambda: signals[1](0, 5), lambda: signals[1](0, None)]
    errors = []
    for work in works:
        thread = threading.Thread(target=_caught, args=(work, errors))
        thread.start()
        thread.join()
    assert not errors
    assert fabric._driver.calls == [*calls, *["memory_operations"] * 3]


def _caught(work, errors):
    try:
        work()
    except Exception as error:
        errors.append(error)


def test_a_thread_on_another_device_is_told_what_to_do(fabric):
    fabric._driver.record = lambda event, lane: INVALID_HANDLE
    with pytest.raises(RuntimeError, match="^CUDA driver: recording an event: CUDA_ERROR_INVALID_HANDLE$"):
        fabric.record(1, 0)
    with mock.patch("torch.cuda.current_device", lambda: 0):
        message = r"this thread is 0, and the model is on cuda:3: call torch.cuda.set_device\(3\)"
        with pytest.raises(RuntimeError, match=message):
            fabric.record(1, 0)


@pytest.mark.parametrize("stuck", [False, True])
def test_words_are_read_by_the_watchdog_whatever_is_stuck(fabric, stuck):
    """From its own thread, and into memory for which the driver does not wait for the copy."""
    fabric._driver.memory, fabric._driver.stuck = {100: 1, 200: 0}, stuck
    found = []
    with mock.patch("gtp_dtensor.transport.cuda.range", lambda num: range(3), create=True):
        thread = threading.Thread(target=lambda: found.append(fabric.read([100, 200])))
        thread.start()
        thread.join()
    assert found == [None if stuck else [1, 0]]
    pinned = fabric._seen.data_ptr()
    assert fabric._driver.calls == [pinned, pinned + 4]


@ranks(2)
def test_memory_that_one_rank_cannot_have_is_refused_on_all(mesh, rank):
    """And nobody waits for that rank in the rendezvous."""
    fabric = object.__new__(CudaFabric)
    fabric.device = torch.device("cpu")

    def allocate(*args):
        if rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.\nand more")
        return torch.ones(4096, dtype=torch.uint8)

    memory = mock.patch("torch.distributed._symmetric_memory._SymmetricMemory")
    message = "^symmetric memory: rank 1: 4096 bytes that peers reach could not be allocated: CUDA out of memory.$"
    with memory as stand_in, pytest.raises(RuntimeError, match=message):
        stand_in.empty_strided_p2p = allocate
        fabric.share(mesh.get_group(), 4096)


def test_rows_too_far_apart_for_one_copy_are_copied_one_by_one(fabric):
    """The driver takes pitches below 2 GiB: experts' rows, cut on dim 1, may be farther apart."""
    fabric._driver.set_context(CONTEXT)
    copies = []
    fabric._driver.copy = lambda *args: copies.append(args) or 0
    fabric.copy_rows(0, 8, 64, 1 << 31, 8, 3, 5)
    assert copies == [(8 * row, 64 + (row << 31), 8, 5) for row in range(3)] and not fabric._driver.calls
    fabric.copy_rows(0, 8, 64, (1 << 31) - 1, 8, 3, 5)
    assert fabric._driver.calls == ["copy_2d"] and len(copies) == 3
