"""What sees the master of a weight that travels quantized: frozen weights, checkpoints, averages, writes by hand."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPConfig, GTPStyle, refresh
from gtp_dtensor.wire import QUANTIZED
from tests.harness import ranks
from tests.reference import build_pair, full_parameters, mean_square, replica_options
from tests.test_wires import Net, Rounded, sharded_weight, slow


def sharded(mesh, name, build=Net, **config):
    model, reference = build_pair(build)
    style = GTPStyle(GTPConfig(wire_format=name, **config), min_numel=30, **replica_options(mesh))
    parallelize_module(model, mesh["gtp"], style)
    for layer in reference.layers:
        layer.__class__, layer.wire = Rounded, name
    assert [sharded_weight(layer).wire_name for layer in model.layers] == [name] * 3
    return model, reference


def ids(step):
    return torch.randint(0, 40, (4, 3), generator=torch.Generator().manual_seed(step))


def step(model, optimizer, number):
    mean_square(model(ids(number))).backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_computes_with(model, reference):
    """What the parameters say, rounded as they travel: bit for bit."""
    reference.load_state_dict(full_parameters(model))
    assert torch.equal(model(ids(9)), reference(ids(9)))


@ranks(2)
def test_frozen_weights_are_quantized_once(mesh, rank, world_size):
    def build():
        model = Net()
        model.layers[1].weight.requires_grad_(False)
        return model

    for name in ("mxfp8", "fp8"):
        model, reference = sharded(mesh, name, build)
        frozen = sharded_weight(model.layers[1])
        assert not frozen.param.requires_grad and sharded_weight(model.layers[0]).param.requires_grad
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, 0)
        model(ids(1))
        before = [sharded_weight(layer).counters.num_quantizations for layer in model.layers]
        for number in range(2, 5):
            step(model, optimizer, number)
        model(ids(1))
        after = [sharded_weight(layer).counters.num_quantizations for layer in model.layers]
        assert [b - a for a, b in zip(before, after)] == [3, 0, 3]
        assert frozen.param.grad is None
        assert_computes_with(model, reference)
        with torch.no_grad():
            frozen.param.mul_(3)
        assert_computes_with(model, reference)
        frozen.param.requires_grad_(True)
        step(model, optimizer, 5)
        assert_computes_with(model, reference)


@ranks(4)
@pytest.mark.parametrize("name", ["mxfp8", *(slow(name) for name in QUANTIZED if name not in ("mxfp8", "fp8_block"))])
def test_a_checkpoint_holds_the_master_and_training_goes_on_bit_for_bit(rank, world_size, tmp_path, name):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dps", "gtp"))
    model, _ = sharded(mesh, name)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for number in range(2):
        step(model, optimizer, number)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=tmp_path)
    saved = full_parameters(model)
    for number in range(2, 4):
        step(model, optimizer, number)
    expected = full_parameters(model)
    other, reference = sharded(mesh, name)
    its_optimizer = torch.optim.Adam(other.parameters(), lr=1e-2)
    step(other, its_optimizer, 7)  # shards of other values, which must not be used
    states = dict(zip(("model", "optimizer"), get_state_dict(other, its_optimizer), strict=True))
    dcp.load(states, checkpoint_id=tmp_path)
    set_state_dict(other, its_optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    loaded = full_parameters(other)
    # Values that no format could hold came through: it is the master that was saved.
    for key, value in saved.items():
        assert value.dtype == torch.float32 and torch.equal(loaded[key], value), key
    assert (saved["layers.0.weight"].bfloat16() != saved["layers.0.weight"]).any()
    assert_computes_with(other, reference)
    for number in range(2, 4):
        step(other, its_optimizer, number)
    for key, value in full_parameters(other).items():
        assert torch.equal(value, expected[key]), key


@ranks(2)
def test_an_average_written_into_parameters_is_used(mesh, rank, world_size):
    """In place, under no_grad, between forwards of a model that an optimizer trains."""
    model, reference = sharded(mesh, "nvfp4")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    average = [param.detach().clone() for param in model.parameters()]
    for number in range(2):
        step(model, optimizer, number)
    model(ids(0))  # shards of the trained weights are made
    trained = model(ids(9))
    with torch.no_grad():
        for param, mean in zip(model.parameters(), average, strict=True):
            param.lerp_(mean, 0.9)
    assert not torch.equal(model(ids(9)), trained)
    assert_computes_with(model, reference)


@ranks(2)
def test_checked_states_find_a_write_past_the_version_counter(mesh, rank, world_size):
    """As for bfloat16 copies; see test_state."""
    for name in ("fp8", "nvfp4"):
        model, reference = sharded(mesh, name, check_param_states=True, weight_prefetch=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, 0)  # from here on the optimizer is trusted to signal
        model(ids(1))
        weight = model.layers[1].weight
        versions = weight._version, weight._local_tensor._version
        weight._local_tensor.data.mul_(2)
        assert versions == (weight._version, weight._local_tensor._version)  # the trap is armed
        with pytest.raises(RuntimeError, match=r"layers\.1\.weight: illegal transition.*refresh\(model\)"):
            model(ids(1))
        refresh(model)
        assert_computes_with(model, reference)
