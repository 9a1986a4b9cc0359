"""Quantized weights on odd numbers of ranks, quantizers before and after sharding, and what is read in between."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from gtp_dtensor import GTPConfig, GTPStyle, stats
from tests.harness import ranks
from tests.models import WithEinsum
from tests.reference import build_pair, full, full_gradients, full_parameters, local_slice, mean_square
from tests.test_wires import check_bits, sharded_weight, whole_quantized

DIM = 64


@ranks(3)
def test_codes_and_scales_on_three_ranks(rank):
    """Cut inside blocks, and fewer blocks than ranks: what arrives is the whole weight quantized."""
    check_bits({"gtp": 3}, None)


@ranks(5)
@pytest.mark.slow
def test_codes_and_scales_on_five_ranks(rank):
    check_bits({"gtp": 5}, None)


@ranks(4)
@pytest.mark.parametrize("wire", ["fp8", "fp8_rowwise", "mxfp8"])
def test_ranks_without_a_row_take_part(rank, world_size, wire):
    """Two rows on four ranks: the largest absolute value of nothing is 0, and all ranks send as many bytes."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
    model, reference = build_pair(lambda: nn.Linear(DIM, 2, bias=False))
    parallelize_module(model, mesh, GTPStyle(GTPConfig(wire_format=wire), min_numel=1))
    assert model.weight.to_local().shape[0] == (1 if rank < 2 else 0)  # the trap is armed
    weight = sharded_weight(model)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(0))
    y = model(x)
    if weight.quantized is None:  # fewer rows than a block
        assert wire == "mxfp8" and torch.equal(y, reference(x))
    else:
        ((view, parts),) = whole_quantized(weight.wire, full(model.weight)).items()
        found, transfer = weight.quantized.gather(weight, view)
        transfer.wait()
        assert all(map(torch.equal, parts, weight.quantized.whole(view, found)))
        transfer.release()
        assert 0 < (y - reference(x)).norm() < 0.1 * y.norm()
    mean_square(y).backward()
    assert full(model.weight.grad).abs().min() > 0


@ranks(2)
def test_gradients_reach_the_parameter_through_any_module(mesh, rank, world_size):
    """An einsum with a weight that travelled in FP8, and a leaf before it."""
    model, reference = build_pair(lambda: WithEinsum(dim=32))
    parallelize_module(model, mesh, GTPStyle(GTPConfig(wire_format="fp8_rowwise"), min_numel=1))
    x = torch.randn(4, 6, 32, generator=torch.Generator().manual_seed(0))
    leaf = local_slice(x, rank, world_size).clone().requires_grad_()
    whole = x.clone().requires_grad_()
    mean_square(model(leaf)).backward()
    mean_square(reference(whole)).backward()
    expected = full_gradients(reference)
    for name, grad in full_gradients(model).items():
        assert (grad - expected[name]).norm() < 0.2 * expected[name].norm(), name
    others = local_slice(whole.grad, rank, world_size) * world_size
    assert (leaf.grad - others).norm() < 0.2 * others.norm()


@ranks(2)
@pytest.mark.parametrize("wire", ["fp8", "mxfp8"])
def test_a_gather_that_waits_does_not_mix_old_codes_and_new_scales(mesh, wire):
    """A weight is written, by a factor that changes its scale, while its gather of before lies there: all old or all new."""
    model, reference = build_pair(lambda: nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(3))))
    parallelize_module(model, mesh, GTPStyle(GTPConfig(wire_format=wire), min_numel=1))
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(0))
    middle = sharded_weight(model[1])
    num_waiting = 0

    def write(module, args, output):
        nonlocal num_waiting
        num_waiting += middle.next_lease is not None
        with torch.no_grad():
            model[1].weight.mul_(1000)

    fresh = nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(3)))
    with torch.no_grad():
        for _ in range(2):
            model(x)  # from the second on the middle one is gathered ahead
        hook = model[0].register_forward_hook(write)
        y = model(x)
        hook.remove()
        assert num_waiting == 1  # the trap is armed
        fresh.load_state_dict(full_parameters(model))
        parallelize_module(fresh, mesh, GTPStyle(GTPConfig(wire_format=wire), min_numel=1))
        assert torch.equal(y, fresh(x))
    assert stats(model).live_lease_bytes == 0


@ranks(2, group_timeout=15)
def test_ranks_whose_rows_need_no_copy_quantize_with_the_others(mesh, rank):
    """Three rows on two ranks: one of them copies its part to fill it up, and makes all copies anew with it."""
    model = nn.Sequential(nn.Embedding(3, DIM), nn.Linear(DIM, DIM))
    parallelize_module(model, mesh, GTPStyle(GTPConfig(wire_format="fp8"), min_numel=1))
    ids = torch.arange(3)
    with torch.no_grad():
        outputs = [model(ids) for _ in range(3)]
    assert [sharded_weight(m).is_copied for m in model] == [rank == 1, True]  # the trap is armed
    assert torch.equal(outputs[0], outputs[2]) and stats(model).num_quantizations == 3
    for _ in range(2):
        mean_square(model(ids)).backward()


ORDERS = {
    "quantize tp gtp": None,  # works
    "tp quantize gtp": "its input is a plain tensor: name the input's layout",
    "tp gtp quantize": "mixed torch.Tensor and DTensor",
    "quantize gtp tp": "Cannot distribute a DTensor",
    "gtp tp quantize": "Cannot distribute a DTensor",
    "gtp quantize tp": "Cannot distribute a DTensor",
}


@ranks(4)
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_of_quantizing_and_sharding_is_right_or_refused(rank, order):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(DIM, DIM, bias=False), nn.ReLU(), nn.Linear(DIM, DIM, bias=False))
    config = Float8LinearConfig(emulate=True)
    expected = convert_to_float8_training(copy.deepcopy(model), config=config)
    x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(1))
    steps = {
        "quantize": lambda: convert_to_float8_training(model, config=config),
        "tp": lambda: parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()}),
        "gtp": lambda: parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=1)),
    }
    if ORDERS[order] is not None:
        with pytest.raises((RuntimeError, ValueError), match=ORDERS[order]) as info:
            for name in order.split():
                steps[name]()
            model(x)
        if order == "tp gtp quantize":
            assert "replace modules (converters, quantizers) before GTPStyle" in info.value.__notes__[0]
        return
    for name in order.split():
        steps[name]()
    y = model(x)
    y = y.full_tensor() if isinstance(y, DTensor) else y
    assert (y - expected(x)).norm() < 1e-5 * y.norm()


@ranks(2)
def test_weights_that_are_quantized_already_are_refused_by_name(mesh):
    model = nn.Sequential(nn.Linear(DIM, DIM, bias=False))
    quantize_(model, Int8WeightOnlyConfig())
    before = model[0].weight
    with pytest.raises(
        ValueError, match=r"0\.weight of shape \(64, 64\).*a kind of tensor not served yet: dequantize it"
    ):
        parallelize_module(model, mesh, GTPStyle())
    assert model[0].weight is before and type(model[0]) is nn.Linear


@ranks(2)
@pytest.mark.parametrize("shape", [(20, 32), (7, 20)])
def test_torchs_own_muon_sees_whole_matrices(mesh, shape):
    """On a parameter of GTP its operators are DTensor's: slow, and right. Also of a zero gradient."""

    def stepped(param, grad):
        param.grad = grad
        torch.optim.Muon([param], lr=0.1).step()
        return full(param)

    for grad in (torch.randn(shape, generator=torch.Generator().manual_seed(0)), torch.zeros(shape)):
        model, reference = build_pair(lambda: nn.Linear(shape[1], shape[0], bias=False))
        parallelize_module(model, mesh, GTPStyle(min_numel=1))
        weight = model.weight
        first, num = sharded_weight(model).first_stored_row, sharded_weight(model).num_stored_rows
        sharded = DTensor(grad[first : first + num].contiguous(), weight._spec, requires_grad=False)
        mine, expected = stepped(weight, sharded), stepped(reference.weight, grad)
        assert expected.isfinite().all() and (mine - expected).norm() <= 0.05 * expected.norm()  # 16-bit products
