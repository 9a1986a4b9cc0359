"""torchao's ``Float8Linear`` under GTP: the same bits as unsharded, weights gathered in float8."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, stats
from gtp_dtensor.members import STATE
from tests.harness import ranks
from tests.reference import (
    assert_close_to_reference,
    build_pair,
    full_gradients,
    full_parameters,
    mean_square,
    replica_options,
)

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def sharded_weight(linear):
    return linear.__dict__[STATE].weights["weight"]


class TanhNet(nn.Module):
    """Linears that ``convert`` changes, and one at the end that it does not."""

    def __init__(self, convert, checkpoints=False, hidden=(96, 160)):
        super().__init__()
        first, second = hidden
        self.layers = nn.ModuleList(
            [nn.Linear(64, first, bias=False), nn.Linear(first, second), nn.Linear(second, 64, bias=False)]
        )
        convert(self.layers)
        self.output = nn.Linear(64, 16)
        self.checkpoints = checkpoints

    def body(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x):
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)
        return self.output(x)


class Net(TanhNet):
    def __init__(self, recipe, emulate=True, checkpoints=False):
        from torchao.float8 import convert_to_float8_training
        from torchao.float8.config import Float8LinearConfig

        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
        super().__init__(lambda layers: convert_to_float8_training(layers, config=config), checkpoints)


def train(model, reference, num_peers, rank, rtol=1e-6, optimizer=None):
    """Scales of activations are a rank's own: so the reference sees each rank's samples by themselves."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        reference.load_state_dict(full_parameters(model))
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(10 * step + microbatch)
            batch = torch.randn(num_peers, 32, 64, generator=generator).to(next(model.parameters()).device)
            mine = model(batch[rank])
            mean_square(mine).backward()
            for peer in range(num_peers):
                expected = reference(batch[peer])
                (mean_square(expected) / num_peers).backward()
                if peer == rank:
                    assert torch.equal(mine, expected)
                    losses.append(mean_square(expected).item())
        assert_close_to_reference(*map(full_gradients, (model, reference)), f"gradient of step {step}", rtol)
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
    assert losses[-1] < losses[0]


@ranks(4, device=("cpu", "cuda"), timeout=120, group_timeout=60)
@pytest.mark.parametrize(
    "recipe, checkpoints",
    [
        ("tensorwise", False),
        ("rowwise", False),
        slow("rowwise_with_gw_hp", False),
        slow("tensorwise", True),
        slow("rowwise", True),
        slow("rowwise_with_gw_hp", True),
    ],
)
def test_trains_as_unsharded(rank, world_size, device, recipe, checkpoints):
    """On a GPU with its float8 GEMMs."""
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dps", "gtp"))
    emulate = device.type == "cpu" and not checkpoints
    model, reference = build_pair(lambda: Net(recipe, emulate, checkpoints).to(device))
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30, **replica_options(mesh)))
    name = "fp8" if recipe == "tensorwise" else "fp8_rowwise"
    assert [sharded_weight(layer).wire_name for layer in (*model.layers, model.output)] == [name] * 3 + ["fp32"]
    train(model, reference, 4, rank)
    reset_stats(model)
    for _ in range(2):  # as many microbatches as in training, or the first weight of one more would be gathered
        mean_square(model(torch.randn(32, 64, device=device))).backward()
    found = stats(model)
    numel = [layer.weight.numel() for layer in model.layers]
    scales = 0 if name == "fp8" else [4 * layer.out_features for layer in model.layers]
    forward = sum(numel) + (0 if name == "fp8" else sum(scales))
    backward = sum(numel[1:])  # the input needs no gradient
    output = 4 * model.output.weight.numel()  # once: it stays for the backward
    if checkpoints:
        # Codes gathered for recompute serve the backward too, where both GEMMs read the same.
        forward, backward = (forward + sum(numel), 0) if name == "fp8" else (2 * forward, backward)
    assert found.num_kept_at_turn == 2
    assert found.gather_bytes == 2 * (forward + backward + output)
    assert found.num_quantizations == 3  # after the last optimizer step


@ranks(2)
def test_one_gathered_in_high_precision_is_quantized_at_each_gemm(mesh, rank, world_size):
    for recipe in RECIPES:
        model, reference = build_pair(lambda: Net(recipe))
        parallelize_module(model, mesh["gtp"], GTPStyle(GTPConfig(wire_format="bf16"), min_numel=30))
        assert sharded_weight(model.layers[0]).wire is None
        train(model, reference, 2, rank)


@ranks(2)
def test_other_formats_are_refused(mesh, rank, world_size):
    for recipe, wire, read in (("tensorwise", "mxfp8", "'fp8'"), ("rowwise", "fp8", "'fp8_rowwise'")):
        with pytest.raises(
            ValueError, match=rf"layers\.0\.weight: wire format '{wire}' for Float8Linear.*{read}.*'auto'"
        ):
            parallelize_module(Net(recipe), mesh["gtp"], GTPStyle(GTPConfig(wire_format=wire), min_numel=30))


@ranks(4)
@pytest.mark.parametrize(
    "recipe, wire",
    [
        ("tensorwise", "auto"),
        slow("rowwise", "auto"),
        slow("rowwise_with_gw_hp", "auto"),
        slow("tensorwise", "bf16"),
        slow("rowwise", "bf16"),
    ],
)
def test_tensor_parallel_is_torchaos_own(rank, world_size, recipe, wire):
    """gtp peers read the same samples, so that the mean of their gradients is each one's: torchao's, to the last bit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
    pair = build_pair(lambda: Net(recipe))
    plan = {
        "layers.0": ColwiseParallel(),
        "layers.1": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        "output": RowwiseParallel(),
    }
    for model in pair:
        distribute_module(model.layers[2], mesh["tp"])  # whole on each rank, of which each has its own tokens
        parallelize_module(model, mesh["tp"], plan)
    parallelize_module(pair[0], mesh["gtp"], GTPStyle(GTPConfig(wire_format=wire), min_numel=30))
    assert (sharded_weight(pair[0].layers[1]).wire is None) == (wire == "bf16")
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    outputs = [model(x) for model in pair]
    assert torch.equal(*outputs)
    for output in outputs:
        mean_square(output).backward()
    found, expected = map(full_gradients, pair)
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name


@ranks(4)
@pytest.mark.parametrize("recipe", ["rowwise", slow("tensorwise")])
def test_uneven_tensor_parallel_is_torchaos_own(rank, world_size, recipe):
    from torchao.float8 import convert_to_float8_training
    from torchao.float8.config import Float8LinearConfig

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    pair = build_pair(lambda: convert_to_float8_training(nn.Sequential(nn.Linear(64, 63)), config=config))
    x = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))
    outputs = []
    for model in pair:
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False)})
        if model is pair[0]:
            parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30))
        outputs.append(model(x))
        assert outputs[-1].shape == (2, 16, 63) and outputs[-1].to_local().shape[-1] == 32 - rank % 2
        mean_square(outputs[-1].full_tensor()).backward()
    assert torch.equal(*(output.full_tensor() for output in outputs))
    found, expected = map(full_gradients, pair)
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name


@ranks(4)
def test_a_plain_input_of_a_tensor_parallel_weight_is_refused(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
    model = Net("tensorwise")
    layer = model.layers[0]
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tp"], [Shard(0)]))
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30))
    with pytest.raises(RuntimeError, match=r"layers\.0\.weight.*mesh axes \('tp',\).*plain tensor.*parallel style"):
        layer(torch.randn(32, 64))
