"""Saving, loading and building as users of FSDP2 do it: whole state dicts from one rank, frozen parts, pads that differ,
weights of fewer rows than there are ranks."""

from __future__ import annotations

import copy
import io
import pickle
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import CheckedFileSystemReader, CheckedLoadPlanner, GTPConfig, GTPStyle, logical_init, stats
from tests.harness import ranks
from tests.models import MLP, TinyLlama
from tests.reference import (
    build_pair,
    full,
    full_gradients,
    full_parameters,
    local_slice,
    mean_square,
    replica_options,
    train_beside_reference,
)

WIDTHS = (16, 33, 16)


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


def batch(step, num=12):
    return torch.randn(num, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def build_mlp(seed=0, config=GTPConfig(), mesh=None, widths=WIDTHS, **options):
    torch.manual_seed(seed)
    model = MLP(widths).double()
    if mesh is not None:
        parallelize_module(model, mesh, GTPStyle(config, min_numel=1, **options))
    return model


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2)


def step(model, optimizer, seed, rank=0, world_size=1):
    mean_square(model(local_slice(batch(seed), rank, world_size))).backward()
    optimizer.step()
    optimizer.zero_grad()


def load_folder(tmp_path, rank):
    """The same on all ranks."""
    shared = [str(tmp_path)]
    dist.broadcast_object_list(shared)
    return Path(shared[0]) / "checkpoint"


# ---- whole state dicts


@ranks(4)
@pytest.mark.parametrize("kind", ["dps", slow("dpr")])
def test_whole_state_dicts_of_the_first_rank(rank, kind):
    """What FSDP2's users load and save with: everything on rank 0, nothing on the others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(kind, "gtp"))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    broadcasts = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def build(seed):
        model, reference = build_pair(lambda: TinyLlama(tied=True).double(), seed=seed)
        parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=1, **replica_options(mesh)))
        return model, torch.optim.AdamW(model.parameters(), lr=0.01), reference

    def train(model, optimizer):
        model(torch.randint(0, 24, (2, 6), generator=torch.Generator().manual_seed(rank))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer, _ = build(0)
    _, _, other = build(1)
    set_model_state_dict(model, other.state_dict() if rank == 0 else {}, options=broadcasts)
    assert all(torch.equal(v, other.get_parameter(name)) for name, v in full_parameters(model).items())
    train(model, optimizer)
    saved = get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)
    saved = copy.deepcopy(saved)  # the step counts of both optimizers are one tensor else, in stock torch on a CPU
    assert bool(saved[0]) == (rank == 0) and not any(isinstance(value, DTensor) for value in saved[0].values())
    twin, twin_optimizer, _ = build(2)
    set_model_state_dict(twin, saved[0], options=broadcasts)
    set_optimizer_state_dict(twin, twin_optimizer, saved[1], options=broadcasts)
    assert twin.output.weight is twin.tok_embeddings.weight
    for _ in range(2):
        train(model, optimizer), train(twin, twin_optimizer)
    expected = full_parameters(model)
    assert all(torch.equal(value, expected[name]) for name, value in full_parameters(twin).items())


@ranks(2)
def test_a_state_dict_from_before_training_is_live(mesh, rank, world_size):
    model, optimizer = (model := build_mlp(mesh=mesh)), adamw(model)
    early = model.state_dict()
    for seed in range(3):
        step(model, optimizer, seed, rank, world_size)
    assert all(torch.equal(full(early[name]), full(value)) for name, value in model.state_dict().items())


@ranks(2)
def test_a_plain_state_dict_is_refused_by_name(mesh):
    """As with FSDP2: ``set_model_state_dict(..., full_state_dict=True)`` is what distributes it."""
    model = build_mlp(mesh=mesh)
    with pytest.raises(RuntimeError, match=r'(?s)"layers\.0\.weight".*mixed torch\.Tensor and DTensor'):
        model.load_state_dict(build_mlp().state_dict())
    set_model_state_dict(model, build_mlp(seed=4).state_dict(), options=StateDictOptions(full_state_dict=True))
    assert torch.equal(full(model.layers[0].weight), build_mlp(seed=4).layers[0].weight)


@ranks(2)
def test_a_model_is_not_pickled_whole(mesh):
    """It holds process groups: pickle says so before it writes anything. A state dict is what is saved."""
    model = build_mlp(mesh=mesh)
    for save in (lambda: torch.save(model, io.BytesIO()), lambda: pickle.dumps(model)):
        with pytest.raises((pickle.PicklingError, AttributeError), match="GTP|pickle"):
            save()
    torch.save(model.state_dict(), io.BytesIO())


@ranks(2)
def test_writes_to_param_data_are_those_of_any_dtensor(mesh, rank, world_size):
    """torch ignores ``param.data = x`` for every DTensor: neither the parameter nor what is computed changes. Writes into
    ``param.data`` count."""
    model = build_mlp(mesh=mesh)
    x = batch(0)
    with torch.no_grad():
        before, weight = model(x), model.layers[1].weight
        weight.data = weight.detach() * 2
        assert torch.equal(model(x), before) and torch.equal(full(weight), build_mlp().layers[1].weight)
        weight.data.copy_(weight.detach() * 2)
        reference = build_mlp()
        reference.layers[1].weight.mul_(2)
        assert torch.allclose(model(x), reference(x), rtol=1e-12)


# ---- frozen parts


@ranks(2)
def test_moments_of_a_layer_that_was_frozen_later(mesh, rank, world_size, tmp_path):
    """Layer 0 is trained and then frozen, layer 1 the other way round. torch asks a fresh optimizer for the state of what is
    trainable at that moment, and counts a step for it: load before freezing, not strictly, and drop the state of what the
    checkpoint has none of. Strictly, the missing keys are named."""
    folder = load_folder(tmp_path, rank)

    def freeze(model, first):
        model.layers[0].requires_grad_(not first)
        model.layers[1].requires_grad_(first)

    model = build_mlp(mesh=mesh)
    optimizer = adamw(model)
    freeze(model, False)
    for seed in range(2):
        step(model, optimizer, seed, rank, world_size)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    assert set(state["optimizer"]["state"]) == {"layers.0.weight", "layers.0.bias"}  # the trap is armed
    dcp.save(state, checkpoint_id=folder)
    twin = build_mlp(seed=5, mesh=mesh)
    twin_optimizer = adamw(twin)
    state = dict(zip(("model", "optimizer"), get_state_dict(twin, twin_optimizer)))
    with pytest.raises(
        CheckpointException, match=r"optimizer\.state\.layers\.1\.weight\.exp_avg: the checkpoint does not have"
    ):
        dcp.load(state, storage_reader=CheckedFileSystemReader(folder), planner=CheckedLoadPlanner())
    reader = CheckedFileSystemReader(folder)
    dcp.load(state, storage_reader=reader, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(twin, twin_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    saved = reader.read_metadata().state_dict_metadata
    for name, param in twin.named_parameters():
        if f"optimizer.state.{name}.step" not in saved:
            twin_optimizer.state.pop(param)
    for phase in (True, False):  # layer 1 is trained, then layer 0 again, with its moments
        for one, opt in ((model, optimizer), (twin, twin_optimizer)):
            freeze(one, phase)
            for seed in range(2, 4):
                step(one, opt, seed, rank, world_size)
        expected = full_parameters(model)
        for name, value in full_parameters(twin).items():
            assert torch.equal(value, expected[name]), (phase, name)


# ---- other pads, other degrees, joined weights


class Gated(nn.Module):
    """``fc1`` joins gate and up, 5 rows each; ``head`` has 33 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.head = nn.Linear(16, 2 * 5, bias=False), nn.Linear(5, 33)

    def forward(self, x):
        gate, up = self.fc1(x).chunk(2, -1)
        return self.head(F.silu(gate) * up)


def gated_run(folder, saves, pad, rank=0, world_size=1):
    """Train two steps and save, or load; then one step more. Returns logical weights, moments and the last loss."""
    torch.manual_seed(0 if saves else 1)
    model = Gated().double()
    if world_size > 1:
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("gtp",))
        parallelize_module(model, mesh, GTPStyle(GTPConfig(pad_for_alignment=pad), min_numel=1))
    optimizer = adamw(model)
    for seed in range(2 if saves else 0):
        step(model, optimizer, seed, rank, world_size)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    options = {} if world_size > 1 else {"no_dist": True}
    if saves:
        dcp.save(state, checkpoint_id=folder, **options)
    else:
        dcp.load(state, storage_reader=CheckedFileSystemReader(folder), planner=CheckedLoadPlanner(), **options)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    seen = {f"weight {name}": value for name, value in full_parameters(model).items()}
    for name, param in model.named_parameters():
        for key in ("exp_avg", "exp_avg_sq"):
            seen[f"{key} {name}"] = full(optimizer.state[param][key])
    loss = mean_square(model(local_slice(batch(7), rank, world_size))).detach()
    if world_size > 1:
        dist.all_reduce(loss)
    return seen, loss / world_size


def gated_on_ranks(folder, saves, pad):
    return gated_run(folder, saves, pad, dist.get_rank(), dist.get_world_size())


def test_other_pads_and_degrees_and_joined_weights(rank_pool, tmp_path):
    """From gtp 4 with pads of 32 to gtp 2 with 16, gtp 3 with none, and one process, and back: gate and up stay apart."""
    first, other = str(tmp_path / "first"), str(tmp_path / "other")
    expected, expected_loss = rank_pool.run(4, gated_on_ranks, first, True, 32)[0]
    assert expected["weight fc1.weight"].shape == (10, 16)
    found = [rank_pool.run(world, gated_on_ranks, first, False, pad)[0] for world, pad in ((2, 16), (3, None), (4, 8))]
    found.append(gated_run(first, False, None))
    for seen, loss in found:
        assert seen.keys() == expected.keys()
        assert all(torch.equal(value, expected[name]) for name, value in seen.items())
        assert torch.allclose(loss, expected_loss, rtol=1e-12)
    gated_run(other, True, None)
    whole, whole_loss = gated_run(other, False, None)
    for seen, loss in (rank_pool.run(world, gated_on_ranks, other, False, 32)[0] for world in (2, 4)):
        assert all(torch.equal(value, whole[name]) for name, value in seen.items())
        assert torch.allclose(loss, whole_loss, rtol=1e-12)


class CountingPlanner(DefaultSavePlanner):
    """Remembers what the coordinator decided: which rank writes which chunk."""

    def create_global_plan(self, all_plans):
        plans, metadata = super().create_global_plan(all_plans)
        self.plans, self.known = plans, metadata
        return plans, metadata


@ranks(4)
@pytest.mark.parametrize("names", [("dpr", "gtp"), slow(("gtp", "dpr")), slow(("dps", "gtp")), ("gtp", "dps")])
def test_each_chunk_has_one_writer(rank, tmp_path, names):
    """Whichever way the replicas lie, each part of each tensor is written once, and the parts are the tensor."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    model = build_mlp(mesh=mesh["gtp"], widths=(16, 33, 3, 16), **replica_options(mesh))
    optimizer = adamw(model)
    step(model, optimizer, 0, rank, 4)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    planner = CountingPlanner()
    dcp.save(state, checkpoint_id=load_folder(tmp_path, rank), planner=planner)
    if rank:
        return
    written = Counter((item.index.fqn, item.index.offset) for plan in planner.plans for item in plan.items)
    assert set(written.values()) == {1}
    for fqn, tensor in planner.known.state_dict_metadata.items():
        if hasattr(tensor, "chunks"):
            assert sum(chunk.sizes.numel() for chunk in tensor.chunks) == tensor.size.numel(), fqn
            places = [tuple(chunk.offsets) for chunk in tensor.chunks if chunk.sizes.numel()]
            assert len(places) == len(set(places)) and all((fqn, chunk.offsets) in written for chunk in tensor.chunks)


# ---- fewer rows than ranks


class Narrow(nn.Module):
    """Weights of one row and of three."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.three = nn.Linear(16, 1), nn.Linear(16, 3)
        self.table = nn.Parameter(torch.ones(1, 16))

    def reset(self):
        for linear in (self.one, self.three):
            linear.reset_parameters()
        nn.init.normal_(self.table)

    def forward(self, x):
        return self.three(x * self.table) * self.one(x)


@ranks(4)
def test_weights_of_fewer_rows_than_ranks_from_meta_to_checkpoint(rank, world_size, tmp_path):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
    folder = load_folder(tmp_path, rank)

    def build(is_loaded):
        with torch.device("meta"):
            model = Narrow().double()
        parallelize_module(model, mesh, GTPStyle(min_numel=1))
        model.to_empty(device="cpu")
        for param in model.parameters():
            param._local_tensor.fill_(float("nan"))
        torch.manual_seed(0)
        if not is_loaded:
            with logical_init():
                model.reset()
        return model

    model = build(False)
    assert model.one.weight.to_local().shape == ((1 if rank == 0 else 0), 16)  # the trap is armed
    assert stats(model).num_sharded_weights == 3
    torch.manual_seed(0)
    reference = Narrow().double()
    torch.manual_seed(0)
    reference.reset()
    assert all(torch.equal(v, reference.get_parameter(name)) for name, v in full_parameters(model).items())
    train_beside_reference(model, reference, batch, rank=rank, world_size=world_size, optimizer="adam", rtol=1e-10)
    optimizer = adamw(model)
    step(model, optimizer, 0, rank, world_size)
    for param in model.parameters():  # also of what was made later: logical shapes on all ranks
        assert optimizer.state[param]["exp_avg"].shape == param.shape and param.shape[0] in (1, 3)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(state, checkpoint_id=folder)
    twin = build(True)
    twin_optimizer = adamw(twin)
    loaded = dict(zip(("model", "optimizer"), get_state_dict(twin, twin_optimizer)))
    dcp.load(loaded, storage_reader=CheckedFileSystemReader(folder), planner=CheckedLoadPlanner())
    set_state_dict(twin, twin_optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
    for one, opt in ((model, optimizer), (twin, twin_optimizer)):
        step(one, opt, 1, rank, world_size)
    expected = full_parameters(model)
    assert all(torch.equal(value, expected[name]) for name, value in full_parameters(twin).items())


class Tiny(nn.Module):
    """A multiplier, empty parameters, a 0-dim one, and a matrix of one row."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.multiplier, self.scale = nn.Parameter(torch.zeros(numel)), nn.Parameter(torch.tensor(1.0))
        self.empty, self.no_rows = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0, 8))
        self.row, self.linear = nn.Parameter(torch.randn(1, 8)), nn.Linear(4, 4)

    def forward(self, x):
        y = (self.linear(x) * self.multiplier.sum() * self.scale).sum() * 3e4
        return y + self.empty.sum() + self.no_rows.sum() + self.row.sum()


@ranks(1, 2, 8)
@pytest.mark.parametrize("numel", [1, slow(2), slow(100_000)])
def test_tiny_parameters_get_their_gradient_on_any_number_of_ranks(mesh, rank, world_size, numel):
    """Forced to be sharded, a 0-dim and an empty parameter stay whole; nothing has a zero gradient but what has no element."""
    model, reference = build_pair(lambda: Tiny(numel).double())
    parallelize_module(model, mesh, GTPStyle(min_numel=0))
    x = torch.randn(2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model(x).backward()
    reference(x).backward()
    expected = full_gradients(reference)
    for name, grad in full_gradients(model).items():
        assert torch.allclose(grad, expected[name], rtol=1e-11), name
    assert full_gradients(model)["multiplier"].abs().min() > 1
