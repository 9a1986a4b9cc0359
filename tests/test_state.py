"""What sees the parameters from outside: state dicts, copies, loading, meta devices, initialisation, deletion."""

import copy
import gc
import io
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.swa_utils import AveragedModel

from gtp_dtensor import (
    GTPConfig,
    GTPStyle,
    finalize_grads,
    logical_init,
    process_groups,
    refresh,
    reset_stats,
    schedule_table,
    stats,
)
from gtp_dtensor.schedule import Kind
from tests.harness import ranks
from tests.models import MLP, TinyLlama
from tests.reference import build_pair, full, full_parameters, local_slice, mean_square, train_beside_reference

BF16 = GTPConfig(param_dtype=torch.bfloat16)


def tokens(step, num=4):
    return torch.randint(0, 24, (num, 6), generator=torch.Generator().manual_seed(step))


def train(model, reference, rank, world_size, num_steps=2):
    train_beside_reference(model, reference, tokens, rank=rank, world_size=world_size, num_steps=num_steps, rtol=1e-12)


def sharded_llama(mesh, config=GTPConfig(), **kwargs):
    model, reference = build_pair(lambda: TinyLlama(**kwargs).double())
    parallelize_module(model, mesh, GTPStyle(config, min_numel=30))
    return model, reference


@ranks(2)
def test_parameters_are_sharded_dtensors_at_every_moment(mesh, rank, world_size):
    model, reference = sharded_llama(mesh)
    expected = {name: id(param) for name, param in model.named_parameters()}
    num_looks = 0

    def look(*_):
        nonlocal num_looks
        num_looks += 1
        for name, param in model.named_parameters():
            assert isinstance(param, DTensor) and isinstance(param, nn.Parameter) and id(param) == expected[name]
            if param.dim() >= 2:
                assert param.placements == (Shard(0),)
        for name, value in model.state_dict().items():
            assert isinstance(value, DTensor), name

    look()
    for module in model.modules():
        module.register_forward_pre_hook(look)
        module.register_forward_hook(look)
        module.register_full_backward_hook(look)
    train(model, reference, rank, world_size)
    with torch.no_grad():
        model(tokens(0))
    look()
    assert num_looks > 100
    assert model.output.weight is dict(model.named_parameters())["output.weight"]


@ranks(2)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("tied", [False, True])
def test_deepcopy_is_independent(mesh, rank, world_size, when, tied):
    model, reference = sharded_llama(mesh, tied=tied)
    if when == "after":
        train(model, reference, rank, world_size)
    twin, twin_reference = copy.deepcopy(model), copy.deepcopy(reference)
    if tied:
        assert twin.output.weight is twin.tok_embeddings.weight is not model.output.weight
    before = full_parameters(twin)
    train(model, reference, rank, world_size)
    for name, value in full_parameters(twin).items():
        assert torch.equal(value, before[name]), name
    assert stats(twin).num_forward_gathers == 0  # a schedule, leases and counters of its own
    train(twin, twin_reference, rank, world_size)
    assert stats(twin).num_forward_gathers > 0 and stats(twin).num_pending == 0


@ranks(2)
def test_deepcopy_with_gradients(mesh, rank):
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16))
    parallelize_module(model, mesh, GTPStyle(min_numel=1))
    mean_square(model(torch.randn(4, 16))).backward()
    expected = {name: full(param.grad) for name, param in model.named_parameters()}
    twin = copy.deepcopy(model)
    model.zero_grad(set_to_none=False)
    for name, param in twin.named_parameters():
        assert torch.equal(full(param.grad), expected[name]) and expected[name].any(), name


@ranks(2)
def test_averaged_model(mesh, rank, world_size):
    model, reference = sharded_llama(mesh)
    average, expected = AveragedModel(model), AveragedModel(reference)
    for _ in range(3):
        train(model, reference, rank, world_size, num_steps=1)
        average.update_parameters(model)
        expected.update_parameters(reference)
    for name, value in full_parameters(average).items():
        assert torch.allclose(value, dict(expected.named_parameters())[name], rtol=1e-11), name
    with torch.no_grad():
        assert torch.allclose(average(tokens(0)), expected(tokens(0)), rtol=1e-10)


@ranks(2)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("config", [GTPConfig(), BF16], ids=["same_dtype", "bf16"])
def test_loaded_values_are_used(mesh, rank, world_size, assign, config):
    tied = not assign  # assignment parts ties, in plain torch too
    model, _ = build_pair(lambda: TinyLlama(tied=tied))
    other, _ = build_pair(lambda: TinyLlama(tied=tied), seed=5)
    for one in (model, other):
        parallelize_module(one, mesh, GTPStyle(config, min_numel=30))
        with torch.no_grad():
            one(tokens(0))  # compute shards exist
    state = {name: value.detach().clone() for name, value in other.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    with torch.no_grad():
        assert torch.equal(model(tokens(1)), other(tokens(1)))
    model(tokens(1)).float().sum().backward()
    other(tokens(1)).float().sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters()):
        assert torch.equal(full(mine.grad), full(theirs.grad)), name


@ranks(2)
def test_a_plain_tensor_loaded_by_assignment_is_refused_by_name(mesh):
    model, reference = sharded_llama(mesh)
    model.load_state_dict(reference.state_dict(), assign=True)
    with pytest.raises(RuntimeError, match=r"tok_embeddings\.weight: the parameter was replaced.*Shard\(dim=0\)"):
        model(tokens(0))


@ranks(2)
@pytest.mark.parametrize("how", ["copy_", "mul_", "local", "foreach_and_refresh", "dtype"])
def test_values_written_by_hand_are_used(mesh, how):
    model, reference = build_pair(lambda: TinyLlama())
    parallelize_module(model, mesh, GTPStyle(BF16, min_numel=30))
    half = reference.bfloat16()
    with torch.no_grad():
        assert torch.equal(model(tokens(0)), half(tokens(0)))
        params = list(model.parameters())
        if how == "copy_":
            for p in params:
                p.copy_(p * 2)
        elif how == "mul_":
            for p in params:
                p.mul_(2)
        elif how == "local":
            for p in params:
                p.to_local().mul_(2)
        elif how == "dtype":
            for p in params:
                p.mul_(2)
            model.to(torch.float64)
        else:
            torch._foreach_mul_(params, 2.0)
            refresh(model)
        for p in half.parameters():
            p.mul_(2)
        assert torch.equal(model(tokens(0)), half(tokens(0)))


@ranks(2)
def test_checked_states_find_a_write_without_a_signal(mesh):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    config = GTPConfig(param_dtype=torch.bfloat16, check_param_states=True, weight_prefetch=False)
    parallelize_module(model, mesh, GTPStyle(config))
    x = torch.randn(2, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).float().sum().backward()
    optimizer.step()  # from here on the optimizer is trusted to signal
    model(x)
    versions = [(p._version, p._local_tensor._version) for p in model.parameters()]
    with torch.no_grad():
        torch._foreach_mul_([model[1].weight], 2.0)
    assert versions == [(p._version, p._local_tensor._version) for p in model.parameters()]  # the trap is armed
    with pytest.raises(RuntimeError, match=r"1\.weight: illegal transition.*refresh\(model\)"):
        model(x)
    refresh(model)
    model(x)


@ranks(2)
def test_checked_states_find_an_illegal_transition(mesh):
    for checked in (True, False):
        model = nn.Sequential(nn.Linear(64, 64))
        parallelize_module(model, mesh, GTPStyle(GTPConfig(check_param_states=checked)))
        weight = model[0]._gtp.weights["weight"]
        weight.runtime.refresh_copies()
        lease = weight.gather(Kind.FORWARD, prefetched=False)
        with pytest.raises(RuntimeError, match="0.weight: read of a gathered weight that is 'in flight'"):
            lease.read()
        lease.wait()
        lease.end()
        with pytest.raises(RuntimeError, match="0.weight: read of a gathered weight that is 'ended'"):
            lease.read()
        if checked:
            with pytest.raises(RuntimeError, match="0.weight: illegal transition.*from 'ended' to 'ready'"):
                lease.wait()


@ranks(2)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "adamw_foreach", "adamw_fused"])
def test_optimizer_steps_are_noticed(mesh, optimizer):
    """Also those of foreach and fused kernels, which leave version counters alone."""
    model, reference = build_pair(lambda: MLP())
    parallelize_module(model, mesh, GTPStyle(BF16, min_numel=30))
    build = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
        "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
        "adamw_fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    }[optimizer]
    opt = build(model.parameters())
    x = torch.randn(4, 16)
    for _ in range(2):
        model(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
        for mine, theirs in zip(model.parameters(), reference.parameters()):
            theirs.data = full(mine)
        with torch.no_grad():
            assert torch.equal(model(x), copy.deepcopy(reference).bfloat16()(x.bfloat16()))


@ranks(4)
@pytest.mark.parametrize("arrangement", ["gtp4", "tp2gtp2", "gtp2tp2"])
@pytest.mark.parametrize("how", ["logical_init", "reset_parameters"])
def test_meta_initialisation_gives_the_logical_weights_of_an_unsharded_run(arrangement, how):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(23, 16, padding_idx=13)
            self.up = nn.Linear(16, 40)
            self.down = nn.Linear(40, 5)

        def init_weights(self):
            nn.init.normal_(self.embedding.weight, std=0.3)
            nn.init.trunc_normal_(self.up.weight, std=0.02)
            nn.init.orthogonal_(self.down.weight)
            nn.init.zeros_(self.down.bias)
            self.up.bias.data.uniform_(-1, 1)

        def reset(self):
            for module in self.children():
                module.reset_parameters()

    sizes = {"gtp4": ((4,), ("gtp",)), "tp2gtp2": ((2, 2), ("tp", "gtp")), "gtp2tp2": ((2, 2), ("gtp", "tp"))}
    mesh = init_device_mesh("cpu", sizes[arrangement][0], mesh_dim_names=sizes[arrangement][1])
    with torch.device("meta"):
        model = Net()
    if "tp" in arrangement.replace("gtp", ""):
        parallelize_module(
            model, mesh["tp"], {"embedding": RowwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30))
    model.to_empty(device="cpu")
    for param in model.parameters():
        param._local_tensor.fill_(float("nan"))
    reference = Net()
    torch.manual_seed(11)
    with torch.no_grad():
        if how == "logical_init":
            with logical_init():
                model.init_weights()
        else:
            model.reset()
    state = torch.get_rng_state()
    torch.manual_seed(11)
    with torch.no_grad():
        reference.init_weights() if how == "logical_init" else reference.reset()
    assert torch.equal(state, torch.get_rng_state())  # the same draws: what comes next is the same too
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters()):
        assert isinstance(mine, DTensor) and torch.equal(full(mine), theirs), name
    assert how == "logical_init" or not full(model.embedding.weight)[13].any()  # torch zeroes the padding row


@ranks(2)
def test_ties_survive_or_part_as_in_plain_torch(mesh, rank, world_size):
    with torch.device("meta"):
        model = TinyLlama(tied=True).double()
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    assert model.output.weight is model.tok_embeddings.weight
    model.to_empty(device="cpu")
    assert model.output.weight is model.tok_embeddings.weight
    reference = TinyLlama(tied=False).double()
    retied = TinyLlama(tied=True).double()
    for one in (retied, reference):
        for name, value in one.named_parameters():
            torch.manual_seed(sum(map(ord, name)))
            nn.init.normal_(value, std=0.3)

    def load(source):
        with torch.no_grad():
            for name, param in source.named_parameters(remove_duplicate=False):
                module, _, leaf = name.rpartition(".")
                target = model.get_submodule(module)._parameters[leaf]
                rows = target._local_tensor
                start = rank * -(-param.shape[0] // world_size) if target.placements[0].is_shard() else 0
                rows.copy_(param[start : start + rows.shape[0]])

    load(retied)
    train(model, retied, rank, world_size)
    model.output.weight = nn.Parameter(model.output.weight.detach().clone())
    load(reference)
    train(model, reference, rank, world_size)
    load(retied)
    model.output.weight = model.tok_embeddings.weight
    train(model, retied, rank, world_size)
    assert len(list(model.parameters())) == len(list(retied.parameters()))


@ranks(2)
def test_attributes_of_parameters_survive(mesh):
    layer = nn.Linear(64, 64)
    layer.weight.tag, layer.bias.allreduce = "mine", False
    layer.requires_grad_(False)
    parallelize_module(layer, mesh, GTPStyle())
    assert layer.weight.tag == "mine" and layer.bias.allreduce is False
    assert not layer.weight.requires_grad and not layer.bias.requires_grad


@ranks(2)
@pytest.mark.parametrize("source", [0, 1, None])
def test_ranks_that_start_from_different_weights(mesh, rank, source):
    torch.manual_seed(rank)
    layer = nn.Linear(64, 64)
    mine = layer.weight.detach().clone()
    parallelize_module(layer, mesh, GTPStyle(), src_data_rank=source)
    everyones = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(everyones, mine)
    assert not torch.equal(*everyones)  # the trap is armed
    if source is None:
        expected = torch.cat([everyones[0][:32], everyones[1][32:]])
    else:
        expected = everyones[source]
    assert torch.equal(full(layer.weight), expected)


@ranks(2)
def test_two_models_do_not_see_each_other(mesh, rank, world_size):
    """A teacher and a student, and two that are trained in turn (as in a GAN)."""
    teacher, teacher_reference = sharded_llama(mesh)
    student, student_reference = sharded_llama(mesh)
    for step in range(3):
        x = tokens(step)
        losses = []
        for a, b, mine in (
            (teacher, student, local_slice(x, rank, world_size)),
            (teacher_reference, student_reference, x),
        ):
            with torch.no_grad():
                target = a(mine)
            loss = (b(mine) - target - 1).square().mean()
            loss.backward()
            losses.append(loss)
        for (name, mine), theirs in zip(student.named_parameters(), student_reference.parameters()):
            assert torch.allclose(full(mine.grad), theirs.grad, rtol=1e-11, atol=1e-14), name
    assert stats(teacher).num_reductions == 0 and stats(teacher).num_forward_gathers == 3 * 16
    assert stats(student).num_mispredictions == 0 == stats(teacher).num_mispredictions
    student.zero_grad(), student_reference.zero_grad()
    for _ in range(2):
        train(teacher, teacher_reference, rank, world_size, num_steps=1)
        train(student, student_reference, rank, world_size, num_steps=1)


@ranks(2)
def test_a_deleted_model_frees_everything(mesh, rank, world_size):
    alive = []
    counts = []
    for _ in range(3):
        model, reference = sharded_llama(mesh)
        train(model, reference, rank, world_size)
        schedule_table(model), finalize_grads(model)
        alive += [
            weakref.ref(model.output._gtp.weights["weight"]),
            weakref.ref(model.output._gtp.weights["weight"].runtime),
        ]
        alive += [weakref.ref(param) for param in model.parameters()]
        groups = process_groups(model)
        del model, reference
        gc.collect()
        counts.append(
            (dist.get_pg_count(), len(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks), len(groups))
        )
    assert not [ref for ref in alive if ref() is not None]
    assert counts[0] == counts[1] == counts[2]  # communicators belong to the mesh axis, hooks to the model


@ranks(2)
def test_memory_is_flat_over_steps(mesh, rank, world_size):
    model, _ = sharded_llama(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peaks = []
    for step in range(30):
        reset_stats(model)
        with torch.no_grad():
            model(tokens(step))
        for microbatch in range(1 + step % 2):
            model(tokens(microbatch)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        s = stats(model)
        assert s.live_lease_bytes == 0 and s.num_pending == 0
        peaks.append(s.peak_lease_bytes)
    assert len(set(peaks[2:])) == 1


@ranks(4)
def test_sharded_tensors_load_with_weights_only(rank):
    """Meshes are pickled with the tensors on them; what the library keeps on a mesh is left behind."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
    foreign = distribute_tensor(torch.arange(6.0), mesh["tp"], [Shard(0)])
    model = nn.Linear(64, 64)
    parallelize_module(model, mesh["gtp"], GTPStyle())
    for tensor in (foreign, model.weight.detach()):
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert torch.equal(loaded.to_local(), tensor.to_local())


@ranks(2)
def test_a_state_dict_on_the_meta_device(mesh):
    with torch.device("meta"):
        model = MLP((8, 16, 8))
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    state = model.state_dict()
    assert all(value.is_meta and isinstance(value, DTensor) for value in state.values())
    before = {name: param._local_tensor._version for name, param in model.named_parameters()}
    state["layers.0.weight"]._local_tensor.fill_(1.0)
    assert dict(model.named_parameters())["layers.0.weight"]._local_tensor._version == before["layers.0.weight"] + 1
