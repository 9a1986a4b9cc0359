"""Ordinary things that users do and that break other systems: each works, or is refused by name."""

import copy
import gc

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import gtp_dtensor
from gtp_dtensor import GTPConfig, GTPStyle, clip_grad_norm_, finalize_grads, reset_stats, schedule_table, stats
from tests.harness import ranks
from tests.models import MLP
from tests.reference import build_pair, full, local_slice, train_beside_reference

BF16 = GTPConfig(param_dtype=torch.bfloat16)


class Net(nn.Module):
    """Registration order differs from execution order."""

    def __init__(self, dim=32):
        super().__init__()
        self.dec, self.mid, self.enc = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x):
        return self.dec(torch.tanh(self.mid(torch.tanh(self.enc(x)))))


def pair(mesh, build=Net, config=GTPConfig(), plan=None, double=True):
    model, reference = build_pair(lambda: build().double() if double else build())
    parallelize_module(model, mesh, plan or GTPStyle(config, min_numel=30))
    return model, reference


def batch(num=4, dim=32, seed=0):
    return torch.randn(num, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_same_grads(model, reference, rtol=1e-11):
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters()):
        assert (mine.grad is None) == (theirs.grad is None), name
        if mine.grad is not None:
            assert torch.allclose(full(mine.grad), theirs.grad, rtol=rtol, atol=1e-13), name
    assert stats(model).num_pending == 0 and stats(model).live_lease_bytes == 0


@ranks(2)
@pytest.mark.parametrize("look", [stats, schedule_table, reset_stats, finalize_grads])
def test_looking_on_one_rank_disturbs_nothing(mesh, rank, world_size, look):
    model, reference = pair(mesh, plan={name: GTPStyle(min_numel=30) for name in ("dec", "mid", "enc")})
    for step in range(3):
        if rank == 0:
            look(model)
        x = batch(seed=step)
        model(local_slice(x, rank, world_size)).square().mean().backward()
        reference(x).square().mean().backward()
    assert_same_grads(model, reference)


@ranks(2)
def test_functional_call_with_computed_weights(mesh, rank, world_size):
    model, reference = pair(mesh)
    x = batch()
    for one, mine in ((model, local_slice(x, rank, world_size)), (reference, x)):
        fast = {name: param * 2 for name, param in one.named_parameters()}
        functional_call(one, fast, (mine,)).square().mean().backward()
    assert_same_grads(model, reference)
    train_beside_reference(
        model, reference, lambda step: batch(seed=step), rank=rank, world_size=world_size, rtol=1e-11
    )


@ranks(2)
def test_a_failing_backward_leaves_nothing_behind(mesh, rank, world_size):
    model, reference = pair(mesh)
    x = batch()
    for bad in ("dec.bias", "enc.weight"):
        param = model.get_parameter(bad)
        placement = Shard(0) if bad.endswith("bias") else Replicate()
        param.grad = torch.distributed.tensor.zeros(
            *param.shape, dtype=param.dtype, device_mesh=param.device_mesh, placements=[placement]
        )
        with pytest.raises(RuntimeError, match=rf"{bad}: \.grad has placements"):
            model(local_slice(x, rank, world_size)).square().mean().backward()
        model.zero_grad(set_to_none=True)
    model(local_slice(x, rank, world_size)).square().mean().backward()
    reference(x).square().mean().backward()
    assert_same_grads(model, reference)


@ranks(2)
@pytest.mark.parametrize("write", ["data", "data_lerp", "broadcast", "foreach", "ema"])
def test_writes_without_a_trace_are_seen_by_the_next_evaluation(mesh, write):
    model, reference = pair(mesh, config=BF16, double=False)
    half = reference.bfloat16()
    x = torch.randn(4, 32)
    if write == "ema":
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        for _ in range(3):
            model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            with torch.no_grad():
                y = average(x)
            for mine, theirs in zip(average.module.parameters(), reference.parameters()):
                theirs.data = full(mine)
            assert torch.equal(y, copy.deepcopy(reference).bfloat16()(x.bfloat16()))
        return
    with torch.no_grad():
        assert torch.equal(model(x), half(x.bfloat16()))
        for mine, theirs in zip(model.parameters(), half.parameters()):
            if write == "data":
                mine.data.mul_(2)
            elif write == "data_lerp":
                mine.data.lerp_(torch.zeros_like(mine), -1.0)
            elif write == "broadcast":
                local = mine.detach().to_local().clone() * 2
                everyones = [torch.empty_like(local) for _ in range(2)]
                dist.all_gather(everyones, local)
                mine.to_local().data.copy_(everyones[dist.get_rank()])
            theirs.mul_(2)
        if write == "foreach":
            torch._foreach_mul_(list(model.parameters()), 2.0)
        assert torch.equal(model(x), half(x.bfloat16()))
    model(x).float().sum().backward()  # a model that no optimizer trains is not trusted in training either


@ranks(2)
def test_clamping_weights_after_the_step(mesh, rank, world_size):
    """As a Wasserstein critic does, through ``.data``."""
    model, reference = pair(mesh, config=BF16, double=False)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        y = model(x)
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for param in model.parameters():
            param.data.clamp_(-0.05, 0.05)
        for mine, theirs in zip(model.parameters(), reference.parameters()):
            theirs.data = full(mine)
        assert torch.equal(model(x), copy.deepcopy(reference).bfloat16()(x.bfloat16()))


@ranks(2)
def test_a_write_that_one_rank_alone_makes(mesh, rank):
    """A row that only rank 0 stores; modules called without their root in between."""
    model, reference = pair(mesh)
    x = batch()
    with torch.no_grad():
        for _ in range(3):
            h = model.enc(x)
            model.mid(h)
        if rank == 0:
            model.mid.weight._local_tensor[0].zero_()
        reference.mid.weight[0].zero_()
        for _ in range(2):
            assert torch.allclose(model(x), reference(x), rtol=1e-12)
            assert torch.allclose(model.mid(model.enc(x)), reference.mid(reference.enc(x)), rtol=1e-12)
    assert stats(model).live_lease_bytes == 0


@ranks(2)
def test_an_optimizer_without_the_empty_shards(mesh, rank, world_size):
    class Narrow(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 1, bias=False)
            self.c = nn.Linear(32, 32)

        def forward(self, x):
            return self.c(self.a(x)) * self.b(x)

    model, reference = pair(mesh, Narrow)
    assert model.b.weight.to_local().shape[0] == 1 - rank  # the trap is armed
    mine = [p for p in model.parameters() if p.to_local().numel()]
    optimizers = [torch.optim.SGD(mine, lr=0.1, foreach=False), torch.optim.SGD(reference.parameters(), lr=0.1)]
    for step in range(3):
        x = batch(seed=step)
        model(local_slice(x, rank, world_size)).square().mean().backward()
        reference(x).square().mean().backward()
        assert_same_grads(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@ranks(2)
def test_replacing_a_module_does_not_depend_on_garbage_collection(mesh, rank, world_size):
    model, reference = pair(mesh)
    x = batch()
    with torch.no_grad():
        for _ in range(3):
            model(x)
    old, model.dec = model.dec, nn.Identity()
    reference.dec = nn.Identity()
    if rank == 0:
        old.cycle = old  # survives until a collection
    del old
    if rank == 1:
        gc.collect()
    for _ in range(3):
        with torch.no_grad():
            assert torch.allclose(model(x), reference(x), rtol=1e-12)
    train_beside_reference(
        model, reference, lambda step: batch(seed=step), rank=rank, world_size=world_size, rtol=1e-11
    )
    assert stats(model).num_sharded_weights == 2


@ranks(2)
def test_an_optimizer_from_before_is_refused(mesh):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    model(torch.randn(2, 32)).sum().backward()
    with pytest.raises(RuntimeError, match=r"dec\.weight: this optimizer was built before GTPStyle.*afterwards"):
        optimizer.step()


@ranks(2)
def test_a_weight_written_between_forward_and_backward(mesh):
    model, _ = pair(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 32, dtype=torch.float64)
    model(x).sum().backward()
    for write in ("step", "by_hand"):
        loss = model(x).sum()
        if write == "step":
            optimizer.step()
        else:
            with torch.no_grad():
                model.mid.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"weight: the weight was modified between a forward and its backward"):
            loss.backward()
    model.zero_grad()
    model(x).sum().backward()  # and on it goes


@ranks(2)
def test_half_precision_means_do_not_overflow(mesh, rank):
    model = nn.Linear(64, 64, bias=False).half()
    parallelize_module(model, mesh, GTPStyle(GTPConfig(reduce_dtype=torch.float32)))
    y = model(torch.full((1, 64), 250.0, dtype=torch.float16))
    y.backward(torch.full_like(y, 200.0))
    assert torch.equal(full(model.weight.grad), torch.full((64, 64), 50000.0, dtype=torch.float16))


@ranks(2)
@pytest.mark.parametrize("hooked", [False, True])
def test_a_hook_changes_no_bit(mesh, rank, hooked):
    model = nn.Linear(64, 64).bfloat16()
    parallelize_module(model, mesh, GTPStyle(GTPConfig(reduce_dtype=torch.float32)))
    if hooked:
        for param in model.parameters():
            param.register_hook(lambda grad: None)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank)).bfloat16()
    model(x).float().square().sum().backward()
    grads = [full(param.grad) for param in model.parameters()]
    plain = nn.Linear(64, 64).bfloat16()
    plain.load_state_dict({name: full(value) for name, value in model.state_dict().items()})
    plain(x).float().square().sum().backward()
    for grad, param in zip(grads, plain.parameters()):
        total = param.grad.float()
        dist.all_reduce(total)
        assert torch.equal(grad, (total / 2).bfloat16())


@ranks(2)
@pytest.mark.parametrize("which", ["weights", "small"])
def test_ranks_that_use_different_weights_are_told_so(mesh, rank, which):
    """With ``check_param_states``; both ranks hear it."""

    class Diverging(Net):
        def __init__(self):
            super().__init__()
            self.g = nn.ParameterList(nn.Parameter(torch.ones(32)) for _ in range(2))

        def forward(self, x):
            x = self.enc(x)
            return self.mid(x) if which == "weights" and rank else self.dec(x * self.g[rank if which == "small" else 0])

    model, _ = pair(mesh, Diverging, GTPConfig(check_param_states=True))
    x = torch.randn(2, 32, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"ranks of the gtp axis use different weights.*(mid|g\.[01])"):
        model(x).sum().backward()


@ranks(2)
def test_a_forward_that_writes_into_its_weight_is_refused(mesh):
    class Codebook(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = nn.Parameter(torch.randn(64, 32), requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                self.codes.mul_(0.5)
            return x @ self.codes.t()

    model = Codebook()
    parallelize_module(model, mesh, GTPStyle())
    with pytest.raises(RuntimeError, match="codes: the forward wrote into a gathered copy"):
        model(torch.randn(2, 32))


@ranks(2)
def test_odd_parameters_beside(mesh, rank, world_size):
    """0-dim, empty, complex, integer, boolean, and nested containers of parameters."""

    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
            self.empty = nn.Parameter(torch.empty(0, dtype=torch.float64))
            self.phase = nn.Parameter(torch.randn(32, dtype=torch.complex128))
            self.shift = nn.Parameter(torch.arange(32), requires_grad=False)
            self.mask = nn.Parameter(torch.ones(32, dtype=torch.bool), requires_grad=False)
            self.nested = nn.ParameterDict({"a": nn.ParameterList([nn.Parameter(torch.randn(32, 32).double())])})
            self.plain = nn.ParameterList([nn.Parameter(torch.randn(32, 32).double())])

        def forward(self, x):
            x = x @ self.nested["a"][0] @ self.plain[0]
            return (x * self.phase).abs() * self.scale * self.mask + self.shift + self.empty.sum()

    model, reference = build_pair(Odd)
    parallelize_module(model, mesh, GTPStyle(GTPConfig(reduce_dtype=torch.float64), min_numel=30))
    assert stats(model).num_sharded_weights == 2
    for step in range(2):
        x = batch(seed=step)
        model(local_slice(x, rank, world_size)).square().mean().backward()
        reference(x).square().mean().backward()
    assert_same_grads(model, reference)


@ranks(2)
@pytest.mark.parametrize("kind", ["list", "dict"])
def test_a_root_that_owns_a_container_only(mesh, rank, world_size, kind):
    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            weights = [nn.Parameter(torch.randn(32, 32)) for _ in range(2)]
            self.w = nn.ParameterList(weights) if kind == "list" else nn.ParameterDict(zip("ab", weights))

        def forward(self, x):
            weights = self.w if kind == "list" else self.w.values()
            for w in weights:
                x = torch.tanh(x @ w)
            return x

    model, reference = pair(mesh, Root)
    train_beside_reference(
        model, reference, lambda step: batch(seed=step), rank=rank, world_size=world_size, rtol=1e-11
    )


@ranks(2)
def test_transformer_encoder_layer_in_train_and_eval(mesh, rank, world_size):
    def build():
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        return nn.TransformerEncoder(layer, 2)

    model, reference = pair(mesh, build)
    x = torch.randn(4, 6, 32, dtype=torch.float64)
    train_beside_reference(model, reference, lambda step: x, rank=rank, world_size=world_size, rtol=1e-11)
    model.eval(), reference.eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert torch.allclose(model(x), reference(x), rtol=1e-11)


@ranks(2)
@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_modules_hold_no_gathered_weight(mesh, rank, world_size, cls):
    model, reference = pair(mesh, lambda: cls(32, 32, num_layers=2, batch_first=True))
    for step in range(3):
        x = torch.randn(4, 5, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model(local_slice(x, rank, world_size))[0].square().mean().backward()
        reference(x)[0].square().mean().backward()
        assert_same_grads(model, reference)


@ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_method_checkpointed_inside_forward(mesh, rank, world_size, reentrant):
    class LayerScale(nn.Module):
        def __init__(self, dim=32):
            super().__init__()
            self.gamma = nn.Parameter(torch.full((dim,), 0.5))
            self.mix = nn.Parameter(torch.randn(dim, dim))
            self.linear = nn.Linear(dim, dim)

        def inner(self, x):
            return self.gamma * torch.tanh(self.linear(x) @ self.mix)

        def forward(self, x):
            return x + checkpoint(self.inner, x, use_reentrant=reentrant)

    model, reference = pair(mesh, lambda: nn.Sequential(nn.Linear(32, 32), LayerScale(), LayerScale()))
    train_beside_reference(
        model,
        reference,
        lambda step: batch(seed=step),
        rank=rank,
        world_size=world_size,
        num_microbatches=2,
        rtol=1e-11,
    )
    assert stats(model).live_lease_bytes == 0


@ranks(2)
def test_gradients_in_flight_are_bounded_for_any_module(mesh):
    class Convs(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv1d(16, 16, 3, padding=1) for _ in range(8))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Convs()
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    runtime = model.layers[0]._gtp.weights["weight"].runtime
    seen = []
    for layer in model.layers:
        layer.register_full_backward_hook(lambda *_: seen.append(len(runtime.reducer.pending)))
    model(torch.randn(2, 16, 9, requires_grad=True)).sum().backward()
    assert max(seen) == 2 and len(seen) == 8


@ranks(4)
@pytest.mark.parametrize("plan", ["one_call", "two_calls", "wildcard"])
def test_a_plan_after_tensor_parallelism_stores_on_one_mesh(rank, plan):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.norm = nn.Linear(32, 64), nn.Linear(64, 32), nn.LayerNorm(32)

        def forward(self, x):
            return self.norm(x + self.b(torch.tanh(self.a(x))))

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
    model, reference = build_pair(lambda: Block().double())
    parallelize_module(model, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
    style = lambda: GTPStyle(min_numel=30)  # noqa: E731
    if plan == "one_call":
        parallelize_module(model, mesh["gtp"], {"norm": style(), "a": style(), "b": style()})
    elif plan == "two_calls":
        parallelize_module(model, mesh["gtp"], {"norm": style()})
        parallelize_module(model, mesh["gtp"], {"a": style(), "b": style()})
    else:
        parallelize_module(model, mesh["gtp"], {"*": style()})
    assert len({param.device_mesh for param in model.parameters()}) == 1
    assert model.norm.weight.placements == (Replicate(), Replicate())
    x = batch()
    mine = local_slice(x, mesh["gtp"].get_local_rank(), 2)
    for _ in range(3):
        reset_stats(model)
        model.zero_grad(), reference.zero_grad()
        model(mine).square().mean().backward()
        reference(x).square().mean().backward()
        assert_same_grads(model, reference)
    assert stats(model).num_on_demand_gathers == 1  # one schedule for all
    norm = clip_grad_norm_(model.parameters(), 1.0)
    assert torch.allclose(norm, torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0), rtol=1e-11)
    torch.optim.AdamW(model.parameters(), foreach=True).step()


@ranks(8)
def test_parts_on_different_tensor_parallel_axes(rank):
    class Part(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(self.norm(x))))

    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("gtp", "a", "b"))
    model, reference = build_pair(lambda: nn.Sequential(Part(), Part()).double())
    for part, axis in ((model[0], "a"), (model[1], "b")):
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(part, mesh[axis], plan)
    with pytest.raises(ValueError, match="2 different tensor-parallel meshes.*on that part itself"):
        parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30))
    for part in model:
        parallelize_module(part, mesh["gtp"], GTPStyle(min_numel=30))
    assert model[0].up.weight.device_mesh.mesh_dim_names == ("a", "gtp")
    assert model[1].up.weight.device_mesh.mesh_dim_names == ("b", "gtp")


@ranks(2)
@pytest.mark.parametrize("old", ["weight_norm", "spectral_norm", "prune"])
def test_weights_computed_by_hooks_are_refused(mesh, old):
    layer = nn.Linear(64, 64)
    if old == "prune":
        torch.nn.utils.prune.l1_unstructured(layer, "weight", 0.5)
    else:
        getattr(torch.nn.utils, old)(layer)
    with pytest.raises(ValueError, match=r"hook computes a weight.*parametrizations"):
        parallelize_module(nn.Sequential(layer), mesh, GTPStyle())


@ranks(2)
def test_a_parametrization_from_afterwards_is_refused_by_name(mesh):
    model = nn.Sequential(nn.Linear(64, 64))
    parallelize_module(model, mesh, GTPStyle())
    torch.nn.utils.parametrize.register_parametrization(model[0], "weight", nn.Identity(), unsafe=True)
    with pytest.raises(RuntimeError, match=r"0\.weight: the parameter is gone from its module.*before GTPStyle"):
        model(torch.randn(2, 64))


@ranks(4)
def test_embeddings_with_padding_under_tensor_parallelism(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
    for padding_idx in (0, 5, 11):
        for min_numel in (0, 10_000):  # sharded, and whole
            with torch.device("meta"):
                model = nn.Sequential(nn.Embedding(12, 8, padding_idx=padding_idx))
            parallelize_module(model, mesh["tp"], {"0": RowwiseParallel()})
            parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=min_numel))
            model.to_empty(device="cpu")
            model[0].reset_parameters()
            zero_rows = (full(model[0].weight) == 0).all(1)
            assert zero_rows.nonzero().flatten().tolist() == [padding_idx]
    frequent = nn.Sequential(nn.Embedding(64, 64, scale_grad_by_freq=True))
    parallelize_module(frequent, mesh["tp"], {"0": RowwiseParallel()})
    with pytest.raises(ValueError, match=r"0\.weight.*scale_grad_by_freq=True.*cannot be tensor parallel"):
        parallelize_module(frequent, mesh["gtp"], GTPStyle())


@ranks(2)
def test_convolution_first_in_mixed_precision(mesh, rank, world_size):
    build = lambda: nn.Sequential(nn.Conv1d(8, 16, 3), nn.GELU(), nn.Conv1d(16, 8, 3))  # noqa: E731
    model, reference = build_pair(build)
    parallelize_module(model, mesh, GTPStyle(BF16, min_numel=30))
    x = torch.randn(4, 8, 9)
    y = model(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y, reference.bfloat16()(x.bfloat16()))
    y.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@ranks(2)
def test_float64_is_left_alone_by_autocast(mesh):
    model, reference = pair(mesh)
    x = batch()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == reference(x).dtype == torch.float64
        assert torch.allclose(model(x), reference(x), rtol=1e-12)


@ranks(2)
def test_ties_across_configurations_are_refused_before_anything_changes(mesh):
    model = nn.Module()
    model.a, model.b = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
    model.b.weight = model.a.weight
    parallelize_module(model, mesh, {"a": GTPStyle()})
    with pytest.raises(ValueError, match=r"a\.weight is tied to a parameter.*another GTPConfig"):
        parallelize_module(model, mesh, {"b": GTPStyle(BF16)})
    assert type(model.b) is nn.Linear
    parallelize_module(model, mesh, {"b": GTPStyle()})
    assert model.a.weight is model.b.weight


@ranks(2)
def test_names_in_messages_are_those_of_the_model(mesh):
    model = nn.ModuleDict({"layers": nn.ModuleList([MLP((16, 64, 16))])})
    parallelize_module(model, mesh, {"layers.*": GTPStyle(min_numel=30)})
    inner = model["layers"][0]
    inner.layers[0].weight = nn.Parameter(torch.zeros(64, 16))
    with pytest.raises(RuntimeError, match=r"layers\.0\.layers\.0\.weight: the parameter was replaced"):
        inner(torch.randn(2, 16))


@ranks(2)
def test_a_key_that_matches_nothing_beside_one_that_does(mesh):
    """Through torch's own function too, as long as it calls us at all."""
    model = Net()
    with pytest.raises(ValueError, match=r"plan key 'layers\.0' matches no module.*'dec', 'mid', 'enc'"):
        parallelize_module(model, mesh, {"enc": GTPStyle(), "layers.0": GTPStyle()})
    assert type(model.enc) is nn.Linear
    with pytest.warns(UserWarning, match="could not be resolved"):
        parallelize_module(model, mesh, {"layers.0": GTPStyle()})
    with pytest.raises(ValueError, match="matches no module"):
        gtp_dtensor.parallelize_module(model, mesh, {"layers.0": GTPStyle()})


@ranks(2)
def test_two_independent_models_in_one_backward(mesh, rank, world_size):
    generator, generator_reference = pair(mesh)
    critic, critic_reference = pair(mesh, lambda: nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)))
    for step in range(3):
        x = batch(seed=step)
        critic(generator(local_slice(x, rank, world_size))).square().mean().backward()
        critic_reference(generator_reference(x)).square().mean().backward()
    assert_same_grads(generator, generator_reference)
    assert_same_grads(critic, critic_reference)
    assert stats(generator).num_sharded_weights == 3 and stats(critic).num_sharded_weights == 2
    assert {row.weight for row in schedule_table(generator)} == {f"{n}.weight" for n in ("enc", "mid", "dec")}


@ranks(2)
def test_a_direct_use_of_dtensor_parameters_in_a_loss(mesh, rank, world_size):
    """An L2 term over parameters: their gradient arrives from DTensor operators, not from ours."""
    model, reference = pair(mesh)
    x = batch()
    penalty = sum(full_norm(p) for p in model.parameters())
    (model(local_slice(x, rank, world_size)).square().mean() + penalty).backward()
    (reference(x).square().mean() + sum(p.square().sum() for p in reference.parameters())).backward()
    assert_same_grads(model, reference)


def full_norm(param):
    value = param.square().sum()
    return value.full_tensor()


@ranks(2)
def test_cross_entropy_training_with_a_tied_head(mesh, rank, world_size):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(37, 16)
            self.head = nn.Linear(16, 37, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids):
            return self.head(self.embedding(ids))

    model, reference = pair(mesh, Tied)
    for step in range(3):
        ids = torch.randint(0, 37, (4, 6), generator=torch.Generator().manual_seed(step))
        mine = local_slice(ids, rank, world_size)
        F.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten()).backward()
        F.cross_entropy(reference(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
    assert_same_grads(model, reference)
