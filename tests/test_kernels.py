"""Kept Triton kernels: that a launch past Triton is of the kernel that Triton would have taken. On a CPU over a
stand-in that refuses what its kernel was not compiled for, on a GPU bit for bit."""

import contextlib
import copy
import pickle
import random
from unittest import mock

import pytest
import torch

from gtp_dtensor import kernels
from gtp_dtensor.kernels import KeptKernel
from gtp_dtensor.transport.fabric import Sum
from gtp_dtensor.transport.summing import new_kernel, sum_in_one_kernel
from gtp_dtensor.wire import dequantizing
from tests.harness import ranks

_STREAM = 7


def compiled_for(argument):
    """What Triton compiles for, of one argument."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, float):
        return float
    return "one" if argument == 1 else argument % 16 == 0, -(2**31) <= argument < 2**31


class Compiled:
    """In place of ``triton.compiler.CompiledKernel``."""

    def __init__(self, triton, forms, constants):
        self.triton, self.forms, self.constants = triton, forms, constants

    def __getitem__(self, grid):
        def run(*arguments, stream=None):
            assert len(grid) == 3 and stream == _STREAM
            num_numbers = len(arguments) - len(self.constants)
            assert arguments[num_numbers:] == self.constants
            tensors = [self.triton.tensors.get(argument, argument) for argument in arguments[:num_numbers]]
            assert [*map(compiled_for, tensors)] == self.forms
            self.triton.num_kept += 1

        return run


class Triton:
    """In place of a ``triton.jit`` function whose last two arguments are constants."""

    def __init__(self):
        self.tensors = {}  # by address
        self.num_plain = self.num_kept = 0

    def __getitem__(self, grid):
        def launch(*arguments, num_warps):
            assert len(grid) == 1 and num_warps == 4
            self.num_plain += 1
            return self.compiled([*map(compiled_for, arguments[:-2])], arguments[-2:])

        return launch

    def compiled(self, forms, constants):
        return Compiled(self, forms, constants)


@pytest.fixture
def stream_of_a_cpu():
    with mock.patch.object(kernels, "_on", lambda stream, device: contextlib.nullcontext()):
        yield


def launches(triton, kernel, num):
    """``num`` launches with arguments of every form. Returns how many forms there were."""
    choose = random.Random(0)
    memory = {dtype: torch.zeros(64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16)}
    assert all(tensor.data_ptr() % 16 == 0 for tensor in memory.values())
    forms = set()
    for _ in range(num):
        tensors = [memory[choose.choice(list(memory))][choose.choice((0, 1, 8, 16)) :] for _ in range(2)]
        # No two tensors of one address, so that the stand-in can tell their dtypes.
        triton.tensors = {tensor.data_ptr(): tensor for tensor in tensors}
        if len(triton.tensors) < 2:
            continue
        integers = tuple(choose.choice((1, 2, 16, 48, 2**31, 2**31 + 1)) for _ in range(2))
        floats, constants = (choose.random(),), (choose.choice((False, True)), choose.choice((64, 128)))
        forms.add((*map(compiled_for, (*tensors, *integers)), *constants))
        kernel.launch(3, tensors, integers, floats, constants, _STREAM)
    return len(forms)


def test_a_kept_kernel_is_the_one_that_triton_would_take(stream_of_a_cpu):
    triton = Triton()
    kernel = KeptKernel(lambda: triton, num_warps=4)
    num_forms = launches(triton, kernel, 20_000)
    assert num_forms > 500 and triton.num_kept > 4 * triton.num_plain  # both happened
    assert triton.num_plain == len(kernel.kept) >= num_forms
    before = triton.num_plain
    launches(triton, kernel, 5_000)  # the same ones again
    assert triton.num_plain == before


class _OlderCompiled:
    """Of a release whose compiled kernels are launched in another way."""

    def __getitem__(self, grid):
        return lambda *arguments: pytest.fail("launched without its stream")


@pytest.mark.parametrize("compiled", [None, _OlderCompiled()], ids=["interpreter", "older"])
def test_what_cannot_be_kept_is_launched_plainly(stream_of_a_cpu, compiled):
    triton = Triton()
    triton.compiled = lambda *_: compiled
    kernel = KeptKernel(lambda: triton, num_warps=4)
    launches(triton, kernel, 200)
    num = triton.num_plain
    launches(triton, kernel, 200)
    assert triton.num_plain == 2 * num and not triton.num_kept


def test_the_default_stream_is_no_external_one():
    """Torch gives a stream of its pool where an external one has the handle 0."""
    device = torch.device("cuda", 0)
    names = ("stream", "default_stream", "ExternalStream")
    with mock.patch.multiple(torch.cuda, **{name: mock.DEFAULT for name in names}):
        kernels._on(0, device)
        torch.cuda.default_stream.assert_called_once_with(device)
        torch.cuda.ExternalStream.assert_not_called()
        torch.cuda.stream.assert_called_once_with(torch.cuda.default_stream.return_value)
        kernels._on(_STREAM, device)
        torch.cuda.ExternalStream.assert_called_once_with(_STREAM, device)


def _load():
    raise AssertionError("nothing is launched here")


def test_copies_hold_nothing_compiled():
    """Experts' GEMMs hold a format, which holds one, and are copied and saved with their module."""
    kernel = KeptKernel(_load, num_warps=4)
    kernel.kept[1,] = lambda: None
    for copied in (copy.deepcopy(kernel), pickle.loads(pickle.dumps(kernel))):
        assert copied.kept == {} and copied._load is _load and copied._options == {"num_warps": 4}
    assert len(kernel.kept) == 1


@ranks(1, device="cuda")
def test_kept_sums_equal_plain_launches(device):
    """To the last bit, over addresses that are and are not multiples of 16 bytes, and sizes that no block divides."""
    generator = torch.Generator(device).manual_seed(0)
    kernel, stream = new_kernel(), torch.cuda.current_stream(device).cuda_stream
    plain = new_kernel()
    num_launches = 0
    for dtype in (torch.float32, torch.bfloat16):
        for num in (1, 17, 2048, 4096 + 5):
            for own_at, inbox_at, out_at in ((0, 0, 0), (1, 0, 0), (0, 3, 0), (0, 0, 1), (3, 1, 1), (16, 16, 16)):
                own = torch.randn(num + 32, device=device, generator=generator).to(dtype)[own_at:]
                inbox = torch.randn(3 * num + 32, device=device, generator=generator).to(dtype)[inbox_at:]
                before = torch.randn(num + 32, device=device, generator=generator)
                for scale in (1.0, 0.3):  # the second one finds the first one's kernel
                    outs = []
                    for summing in (kernel, plain):
                        outs.append(before.clone())
                        plain.kept.clear()
                        job = Sum(own, 0, num, num, inbox, num, outs[-1][out_at:], 0, num, 4, 2, scale, True)
                        sum_in_one_kernel(job, summing, stream)
                    num_launches += 1
                    assert torch.equal(*outs) and not torch.equal(outs[0], before)
    assert len(kernel.kept) <= num_launches // 2 and all(kernel.kept.values())  # this Triton gives them away


@ranks(1, device="cuda")
def test_launches_wait_for_their_stream(device):
    """The first one, by Triton, as well as the next one, by the kept kernel; on the default stream, too."""
    own, inbox, out = (torch.zeros(4096, device=device) for _ in range(3))
    job = Sum(own, 0, 4096, 4096, inbox, 4096, out, 0, 4096, 2, 0, 1.0, True)
    sum_in_one_kernel(job, new_kernel(), torch.cuda.current_stream(device).cuda_stream)  # compiles, which takes long
    for stream in (torch.cuda.default_stream(device), torch.cuda.Stream(device)):
        with torch.cuda.stream(stream):
            kernel = new_kernel()
            for num_kept in (0, 1):
                assert len(kernel.kept) == num_kept
                torch.cuda.synchronize()
                torch.cuda._sleep(200_000_000)  # a tenth of a second
                began = stream.record_event()
                for tensor, value in ((own, 1.0), (inbox, 2.0), (out, 4.0)):
                    tensor.fill_(value)
                sum_in_one_kernel(job, kernel, stream.cuda_stream)
                assert not began.query()  # the launch did not come too late to be early
                assert out.eq(7.0).all()


@ranks(1, device="cuda")
def test_kept_divisions_equal_plain_launches(device):
    kernel, plain = dequantizing.new_kernel(), dequantizing.new_kernel()
    memory = torch.randint(0, 256, (9000,), device=device, dtype=torch.uint8)
    scale = torch.rand(1, 1, device=device) + 0.5
    for num in (1, 33, 4096, 8191):
        for at in (0, 1, 16, 24):
            codes = memory[at : at + num].view(torch.float8_e4m3fn).view(1, num)
            for dtype in (torch.bfloat16, torch.float32):
                for _ in range(2):
                    plain.kept.clear()
                    both = (kernel, plain)
                    found, expected = (dequantizing.divide_in_one_kernel(codes, scale, dtype, k) for k in both)
                    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert all(kernel.kept.values())
