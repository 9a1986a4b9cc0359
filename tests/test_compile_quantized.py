"""torch.compile over linears whose GEMMs read quantized numbers: the same bits and the same gathers as eager."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gtp_dtensor import GTPStyle
from gtp_dtensor.members import STATE
from tests.harness import ranks
from tests.test_compile import backends, compile_blocks, fresh, num_compilations, train_twins, twins
from tests.test_float8_linear import sharded_weight, slow


class FeedForward(nn.Module):
    """A norm, three linears with and without bias."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64)
        self.gate = nn.Linear(64, 128)
        self.up = nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    """Blocks of quantized linears, and a head that is none."""

    def __init__(self, kind, checkpoints=False, emulate=True):
        super().__init__()
        self.layers = nn.ModuleList(FeedForward() for _ in range(2))
        self.head = nn.Linear(64, 16)
        convert(self.layers, kind, emulate)
        if checkpoints:
            for name, layer in self.layers.named_children():
                self.layers.register_module(name, checkpoint_wrapper(layer))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def convert(layers, kind, emulate):
    if kind == "mx":
        from gtp_dtensor.wire.mx_linear import convert_to_mx_training

        convert_to_mx_training(layers)
        return
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.config import Float8LinearConfig

    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(kind), emulate=emulate)
    convert_to_float8_training(layers, config=config)


def batch(step):
    return torch.randn(16, 32, 64, generator=torch.Generator().manual_seed(step))


def rtol_of(backend):
    """What inductor sums in another order falls on the other side of a few roundings to 4 bits."""
    return 0.0 if backend == "aot_eager" else 3e-2


def expect_twins(pair, backend, rank, world_size, device="cpu"):
    """Both train alike; one graph for each kind of block: the first one's input needs no gradient."""
    assert all(sharded_weight(layer.up).wire is not None for layer in pair[0].layers.children())
    compile_blocks(pair[1], backend)
    rtol = rtol_of(backend)
    eager, compiled = train_twins(
        pair, lambda step: batch(step).to(device), rank, world_size, num_microbatches=2, optimizer="sgd", rtol=rtol
    )
    assert eager == compiled and eager.num_quantizations > 0 and eager.num_backward_gathers > 0
    assert num_compilations() == 2


@ranks(2, timeout=300, group_timeout=200, device=("cpu", "cuda"))
@backends
@pytest.mark.parametrize("kind", ["mx", "tensorwise", slow("rowwise"), slow("rowwise_with_gw_hp")])
def test_trains_as_eager(mesh, rank, world_size, device, kind, backend):
    """On a GPU with its float8 GEMMs."""
    fresh()
    pair = twins(
        lambda: Net(kind, emulate=device.type == "cpu").to(device),
        lambda model: parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30)),
    )
    expect_twins(pair, backend, rank, world_size, device)


@ranks(4, timeout=300, group_timeout=200)
@backends
@pytest.mark.parametrize("kind", [slow("mx"), slow("tensorwise"), slow("rowwise"), slow("rowwise_with_gw_hp")])
def test_tensor_parallel_trains_as_eager(rank, world_size, kind, backend):
    """From a cut sequence to a cut sequence; a scale of what tensor parallelism cuts is made within the operator."""
    fresh()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))

    def shard(model):
        plan = {}
        for number in range(2):
            plan[f"layers.{number}.gate"] = plan[f"layers.{number}.up"] = ColwiseParallel(use_local_output=False)
            plan[f"layers.{number}.down"] = RowwiseParallel()
        parallelize_module(model, mesh["tp"], plan)
        parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30))

    pair = twins(lambda: Net(kind), shard)
    assert sharded_weight(pair[0].layers[0].down).tp.placements == (Shard(1),)
    expect_twins(pair, backend, rank // 2, 2)


@pytest.mark.slow
@ranks(2, timeout=300, group_timeout=200)
@pytest.mark.parametrize("kind", ["mx", "rowwise"])
def test_weights_that_stay_whole(mesh, rank, world_size, kind):
    """torchao's own functions, traced."""
    fresh()
    style = GTPStyle(min_numel=30, exclude=["layers.*.gate.weight"])
    pair = twins(lambda: Net(kind), lambda model: parallelize_module(model, mesh["gtp"], style))
    assert "weight" in pair[1].layers[0].gate.__dict__[STATE].smalls
    expect_twins(pair, "aot_eager", rank, world_size)


@pytest.mark.slow
@ranks(2, timeout=300, group_timeout=200)
@pytest.mark.parametrize("kind", ["mx", "rowwise"])
def test_checkpointed(mesh, rank, world_size, kind):
    fresh()
    pair = twins(lambda: Net(kind, True), lambda model: parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30)))
    compile_blocks(pair[1])
    eager, compiled = train_twins(pair, batch, rank, world_size)
    assert eager.num_recompute_gathers > 0 and eager.num_backward_gathers > 0
    assert eager.num_quantizations == compiled.num_quantizations


@ranks(2, timeout=300, group_timeout=200)
def test_tokens_that_blocks_do_not_divide_are_refused(mesh, rank, world_size):
    fresh()
    model = parallelize_module(Net("mx"), mesh["gtp"], GTPStyle(min_numel=30))
    compile_blocks(model)
    with torch.no_grad():
        model(torch.randn(20, 64))
    with pytest.raises(ValueError, match="20 tokens are not a multiple of 32.*wgrad_with_hp"):
        model(torch.randn(20, 64))
