"""Quantizing all weights of a step in few kernels: the bits of one by one, and of torchao's functions."""

from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import amax_to_scale

import gtp_dtensor.quantized
from gtp_dtensor import GTPConfig, GTPStyle, refresh, stats
from gtp_dtensor.wire import Amax
from gtp_dtensor.wire.dequantizing import divide_in_one_kernel, divide_plainly
from gtp_dtensor.wire.float8 import Float8Matrix
from tests.harness import ranks
from tests.reference import full
from tests.test_wires import Weights, sharded_weight

ROWS = [512, 384, 41, 3, 128]  # even, uneven, and fewer rows than ranks


def torchao_codes(matrix):
    scale = amax_to_scale(matrix.abs().max(), torch.float8_e4m3fn)
    return hp_tensor_and_scale_to_float8(matrix, scale, torch.float8_e4m3fn)._data


def check(linear):
    """What this rank reads of its weight now, and what it has of it."""
    weight = sharded_weight(linear)
    gathered, transfer = weight.quantized.gather(weight, weight.wire.views[0])
    transfer.wait()
    (codes,) = weight.quantized.whole(weight.wire.views[0], gathered)
    expected = torchao_codes(full(linear.weight))
    assert torch.equal(codes, expected.view(torch.uint8)), weight.fqn
    scale = amax_to_scale(full(linear.weight).abs().max(), torch.float8_e4m3fn)
    values = weight.quantized.read(weight.wire.views[0], gathered, weight)
    assert torch.equal(values, (expected.float() / scale).to(torch.bfloat16))  # divided in float32, rounded once
    transfer.release()
    (mine,) = weight.quantized.parts[weight.wire.views[0]]
    assert not mine[weight.num_local_rows :].any(), "padding that travels is zeros"


@ranks(4, device=("cpu", "cuda"), timeout=120, group_timeout=60)
@pytest.mark.parametrize("most_bytes", [None, 50_000, 1])
def test_codes_of_each_step(rank, device, most_bytes, monkeypatch):
    """Larger and smaller values from step to step; all at once, in several batches, one by one."""
    if most_bytes is not None:
        monkeypatch.setattr(gtp_dtensor.quantized, "_MOST_BATCH_BYTES", most_bytes)
    mesh = init_device_mesh(device.type, (4,), mesh_dim_names=("gtp",))
    torch.manual_seed(0)
    model = Weights(ROWS).to(device)
    parallelize_module(model, mesh, GTPStyle(GTPConfig(wire_format="fp8", param_dtype=torch.bfloat16), min_numel=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batches = []
    original = Float8Matrix.quantize_many

    def counting(self, rows, scales, codes):
        batches.append(sum(part.nbytes for part in rows))
        original(self, rows, scales, codes)

    with mock.patch.object(Float8Matrix, "quantize_many", counting):
        for step in range(4):
            batches.clear()
            x = torch.randn(8, 256, device=device, generator=torch.Generator(device).manual_seed(step + rank))
            model(x).sum().backward()
            num_mine = sum(sharded_weight(linear).num_local_rows > 0 for linear in model.linears)
            assert num_mine == 5 - (rank == 3)
            num_batches = {None: 1, 50_000: 3, 1: num_mine}[most_bytes]
            assert len(batches) == (0 if step == 0 else num_batches), "the first time each makes its memory"
            for linear in model.linears:
                check(linear)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                for linear in model.linears:
                    linear.weight.mul_(0.1 if step % 2 else 30.0)
            refresh(model)
    assert stats(model).num_quantizations == 5 * 4


@ranks(2)
def test_what_is_known_of_a_weight_stays_where_it_is(mesh):
    """For graphs; and as far apart as the format made it, for GEMMs."""
    model = Weights([64])
    parallelize_module(model, mesh, GTPStyle(GTPConfig(wire_format="fp8"), min_numel=1))
    shard = sharded_weight(model.linears[0]).quantized
    for value in (1.0, 2.0):
        entries = torch.full((3, 1, 4), value)[..., :1]
        for mine, new in shard._remember({Amax.SCALE: entries}):
            mine.copy_(new)
        known = shard.amax[Amax.SCALE]
        if value == 1.0:
            address = known.data_ptr()
        assert (known == value).all() and known.stride() == (4, 4, 1) and known.data_ptr() == address


@ranks(2, device=("cpu", "cuda"), timeout=120, group_timeout=60)
def test_what_is_not_finite_is_found_among_many(mesh):
    model = Weights([64, 64, 64]).to(mesh.device_type)
    parallelize_module(model, mesh, GTPStyle(GTPConfig(wire_format="fp8"), min_numel=1))
    x = torch.ones(2, 256, device=mesh.device_type)
    model(x).sum().backward()
    for bad in (float("nan"), float("inf"), float("-inf")):
        before = model.linears[1].weight._local_tensor[0, 5].clone()
        with torch.no_grad():
            if mesh.get_local_rank() == 1:
                model.linears[1].weight._local_tensor[0, 5] = bad
        refresh(model)
        with pytest.raises(RuntimeError, match=r"linears\.1\.weight: the weight holds NaN or infinity"):
            model(x)
            refresh(model)  # a GPU tells it a quantization later
            model(x)
        with torch.no_grad():
            model.linears[1].weight._local_tensor[0, 5] = before
        refresh(model)
        model(x).sum().backward()


@ranks(1, device="cuda")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1, 1), (129, 257), (3, 65, 33), (2, 4096, 1024)], ids=str)
def test_the_kernel_that_divides_codes(device, dtype, shape):
    """All 256 codes over many scales, and what lies behind the last block stays as it is."""
    codes = torch.randint(0, 256, shape, device=device, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for seed in range(3):
        generator = torch.Generator(device).manual_seed(seed)
        scale = torch.rand(*shape[:-2], 1, 1, device=device, generator=generator) * 10.0 ** (3 * seed - 3) + 1e-4
        found, expected = divide_in_one_kernel(codes, scale, dtype), divide_plainly(codes, scale, dtype)
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)) or (
            torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.nan_to_num(), expected.nan_to_num())
        )
