"""Weights that something other than their own module's forward reads: losses, adapters, hooks, backwards of one's own."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from gtp_dtensor import GTPStyle, materialized, reset_stats, stats
from tests.harness import ranks
from tests.moe import MoEModel
from tests.reference import build_pair, full, full_gradients, local_slice, replica_options, train_beside_reference

DIM, VOCAB = 32, 40


def assert_same_grads(model, reference):
    expected = full_gradients(reference)
    for name, grad in full_gradients(model).items():
        assert (grad is None) == (expected[name] is None), name
        assert grad is None or torch.allclose(grad, expected[name], rtol=1e-10, atol=1e-14), name
    assert (stats(model).live_lease_bytes, stats(model).num_pending) == (0, 0)


def ids_of(step, num=4):
    return torch.randint(0, VOCAB, (num, 6), generator=torch.Generator().manual_seed(step))


# ---- low-rank adapters


class Adapted(nn.Module):
    """A frozen linear with a low-rank update, which can be switched off."""

    def __init__(self, dim: int, rank: int = 4) -> None:
        super().__init__()
        self.base = nn.Linear(dim, dim).requires_grad_(False)
        self.down, self.up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False)
        self.is_on = True

    def forward(self, x):
        y = self.base(x)
        return y + self.up(self.down(x)) if self.is_on else y


class Policy(nn.Module):
    """An embedding, three adapted layers and a head. Everything but the adapters is frozen."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM).requires_grad_(False)
        self.layers = nn.ModuleList(Adapted(DIM) for _ in range(3))
        self.head = nn.Linear(DIM, VOCAB, bias=False).requires_grad_(False)
        self.recompute = recompute

    def hidden(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return x

    def forward(self, ids):
        return self.head(self.hidden(ids))

    def adapters(self, is_on):
        for layer in self.layers:
            layer.is_on = is_on


def sharded_policy(mesh, **options):
    model, reference = build_pair(lambda: Policy(**options).double())
    parallelize_module(model, mesh, GTPStyle(min_numel=100))
    return model, reference


@ranks(2)
@pytest.mark.parametrize("recompute", [False, True])
def test_adapters_train_and_frozen_weights_move_only_when_needed(mesh, rank, world_size, recompute):
    model, reference = sharded_policy(mesh, recompute=recompute)
    optimizers = [
        torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (model, reference)
    ]
    for step in range(4):
        reset_stats(model)
        in_use = []  # bytes gathered when the backward of each frozen base ends
        look = lambda *_: in_use.append(stats(model).live_lease_bytes)  # noqa: E731
        hooks = [layer.base.register_full_backward_hook(look) for layer in model.layers]
        ids = ids_of(step)
        model(local_slice(ids, rank, world_size)).square().mean().backward()
        reference(ids).square().mean().backward()
        for hook in hooks:
            hook.remove()
        assert_same_grads(model, reference)
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    seen, bases, adapters = stats(model), 3, 6
    assert seen.num_reductions == adapters  # no reduction and no buffer for what is frozen
    # The frozen bottom layer needs no gradient of its input: its base is read once, and again only where it is recomputed.
    num_again = seen.num_backward_gathers + seen.num_recompute_gathers + seen.num_kept_at_turn
    assert num_again == bases + adapters + 1 if recompute else num_again == (bases - 1) + (adapters - 1) + 1
    one_base, one_adapter = DIM * DIM * 8, 4 * DIM * 8
    assert len(in_use) == bases - 1 and max(in_use) <= one_base + 2 * one_adapter


@ranks(2)
def test_policy_and_reference_in_turn(mesh, rank, world_size):
    """Direct preference optimization with one model: adapters off without gradients, then on with. The order of uses
    differs from pass to pass, repeats from step to step, and is learned."""
    model, reference = sharded_policy(mesh)
    orders = [("off", "on"), ("off", "on"), ("off", "off", "on"), ("off", "on")] + [("off", "off", "on")] * 4
    for step, passes in enumerate(orders):
        reset_stats(model)
        ids = ids_of(step)
        for one, mine in ((model, local_slice(ids, rank, world_size)), (reference, ids)):
            logits = {}
            for which in passes:
                one.adapters(which == "on")
                with torch.set_grad_enabled(which == "on"):
                    logits[which] = one(mine)
            F.softplus(logits["off"] - logits["on"]).mean().backward()
        assert_same_grads(model, reference)
    seen = stats(model)
    assert (seen.num_mispredictions, seen.num_on_demand_gathers) == (0, 3)  # what each forward begins with


@ranks(2)
def test_merging_adapters(mesh, rank, world_size):
    """An update computed with the DTensor parameters themselves, as merging and unmerging does."""
    model, reference = sharded_policy(mesh)
    for one in (model, reference):
        with torch.no_grad():
            for layer in one.layers:
                nn.init.ones_(layer.up.weight)
                layer.base.weight += layer.up.weight @ layer.down.weight
        one.adapters(False)
    with torch.no_grad():
        assert torch.allclose(model(ids_of(0)), reference(ids_of(0)), rtol=1e-11)


# ---- a loss that reads the head


def chunked_cross_entropy(hidden, weight, labels, num_chunks=3):
    parts = zip(hidden.flatten(0, 1).chunk(num_chunks), labels.flatten().chunk(num_chunks))
    return sum(F.cross_entropy(x @ weight.t(), y, reduction="sum") for x, y in parts) / labels.numel()


@ranks(2)
@pytest.mark.parametrize("trains_head", [False, True])
def test_a_chunked_loss_with_adapters(mesh, rank, world_size, trains_head):
    model, reference = sharded_policy(mesh)
    for step in range(3):
        ids = ids_of(step)
        for one, mine in ((model, local_slice(ids, rank, world_size)), (reference, ids)):
            one.head.requires_grad_(trains_head)
            hidden = one.hidden(mine)
            with materialized(one.head) as weight:
                chunked_cross_entropy(hidden, weight, mine).backward()
            del weight
        assert_same_grads(model, reference)


@ranks(4)
def test_a_chunked_loss_over_a_vocabulary_cut_by_tensor_parallelism(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))

    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB, bias=False)

        def forward(self, x):
            return torch.tanh(self.body(x))

    model, reference = build_pair(lambda: Head().double())
    parallelize_module(model, mesh["tp"], {"head": ColwiseParallel()})
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30))
    assert model.head.weight.placements == (Shard(0), Shard(0))
    x = torch.randn(4, 6, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = ids_of(0)
    mine, my_labels = (local_slice(part, mesh["gtp"].get_local_rank(), 2) for part in (x, labels))
    for _ in range(3):
        with materialized(model.head) as weight:
            assert isinstance(weight, DTensor) and weight.device_mesh == mesh["tp"]
            chunked_cross_entropy(model(mine), weight.full_tensor(), my_labels).backward()
        chunked_cross_entropy(reference(x), reference.head.weight, labels).backward()
        del weight
        assert_same_grads(model, reference)


# ---- a forward that was replaced on the instance


def doubled(module):
    """As wrappers of other libraries do it: around the bound method of before."""
    original = module.forward
    module.forward = lambda *args, **kwargs: 2 * original(*args, **kwargs)


def scaled_forward(self, x):
    return F.linear(x, self.weight * 0.5, self.bias)


@ranks(2)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_forward_that_was_replaced_on_the_instance(mesh, rank, world_size, is_compiled):
    """A linear, an embedding, a norm, a method bound to its module; gathered as for a module that GTP does not know."""

    def build():
        model = nn.Sequential(nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM))
        doubled(model[0]), doubled(model[1]), doubled(model[2])
        model[3].forward = types.MethodType(scaled_forward, model[3])
        return model.double()

    model, reference = build_pair(build)
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    run = torch.compile(model, backend="aot_eager") if is_compiled else model
    train_beside_reference(run, reference, ids_of, rank=rank, world_size=world_size, rtol=1e-10)
    assert stats(model).num_sharded_weights == 3 and stats(model).live_lease_bytes == 0
    twin = nn.Sequential(copy.deepcopy(model[3]))  # a bound method follows; a closure would not, in plain torch either
    with torch.no_grad():
        model[3].weight.zero_()
        x = torch.randn(2, DIM, dtype=torch.float64)
        assert torch.allclose(twin(x), reference[3](x), rtol=1e-10)


# ---- misuse


class Functional(nn.Module):
    """Its forward reads a child's weight instead of calling the child."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, DIM)

    def forward(self, ids):
        x = self.body(self.embedding(ids))
        return x @ self.embedding.weight.to(x.dtype).t()


class WithMaterialized(Functional):
    """The same as the note says."""

    def forward(self, ids):
        x = self.body(self.embedding(ids))
        with materialized(self.embedding) as weight:
            return x @ weight.to(x.dtype).t()


@ranks(2)
def test_reading_a_childs_weight_names_it_and_the_remedy(mesh, rank, world_size):
    model, _ = build_pair(lambda: Functional().double())
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mixed torch.Tensor and DTensor") as info:
            model(ids_of(0))
        (note,) = info.value.__notes__
        assert note.startswith("gtp_dtensor: embedding.weight was read outside of its own module's forward")
        assert "with materialized(model.embedding, 'weight') as w:" in note
    model, reference = build_pair(lambda: WithMaterialized().double())
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    train_beside_reference(model, reference, ids_of, rank=rank, world_size=world_size, rtol=1e-11)


class Replaced(nn.Linear):
    """What a converter makes of a linear: another module with the same parameters."""

    @classmethod
    def of(cls, linear: nn.Linear) -> Replaced:
        new = cls(linear.in_features, linear.out_features)
        new.weight, new.bias = linear.weight, linear.bias
        return new


@ranks(2)
def test_a_module_that_was_replaced_afterwards_is_named(mesh):
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, DIM))
    parallelize_module(model, mesh, GTPStyle())
    model[2] = Replaced.of(model[2])
    with pytest.raises(RuntimeError) as info:
        model(torch.randn(2, DIM))
    assert "2.weight belongs to a Replaced that took the place of the module" in info.value.__notes__[0]


class ReadsItself(torch.autograd.Function):
    """Its backward reads the module's attribute, not what was saved."""

    @staticmethod
    def forward(ctx, x, weight, module):
        ctx.module = module
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.module.seen.append((ctx.module.weight, ctx.module.weight.data))
        return grad * weight, (grad * x), None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, DIM))
        self.seen = []

    def forward(self, x):
        return ReadsItself.apply(x, self.weight, self)


@ranks(2)
@pytest.mark.parametrize("min_numel", [1, 10**6])
def test_the_attribute_is_the_parameter_in_a_backward_too(mesh, rank, world_size, min_numel):
    """The contract: outside of the forward it is the registered DTensor; a backward reads what its forward saved."""
    model, reference = build_pair(lambda: nn.Sequential(nn.Linear(DIM, DIM), Scaled()).double())
    parallelize_module(model, mesh, GTPStyle(min_numel=min_numel))
    x = torch.randn(4, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    model(x).square().mean().backward()
    ((attribute, data),) = model[1].seen
    assert attribute is model[1]._parameters["weight"] and isinstance(data, DTensor)
    everyones = [torch.randn(4, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(2)]
    for x in everyones:
        reference(x).square().mean().div(2).backward()
    assert_same_grads(model, reference)


# ---- parts


@ranks(4)
@pytest.mark.parametrize("what", ["block", "experts", "linear"])
def test_a_copy_of_a_part_stands_alone(rank, what):
    """Experts alone do not know over how many ranks gradients are averaged; the model that they were copied from does."""
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dps", "gtp"))
    sparse = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dps", "egtp"))
    model = MoEModel(num_blocks=2).double()
    experts = GTPStyle(is_expert=True, modules=["layers.*.moe.experts"], min_numel=1, **replica_options(sparse))
    parallelize_module(model, sparse["egtp"], experts)
    parallelize_module(model, dense["gtp"], GTPStyle(min_numel=1, **replica_options(dense)))
    part = {"block": model.layers[0], "experts": model.layers[0].moe.experts, "linear": model.layers[0].mix}[what]
    twin = copy.deepcopy(part)
    rows = torch.randn(6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    args = (rows, torch.tensor([2, 1, 3, 0])) if what == "experts" else (rows,)
    for _ in range(2):
        for one in (part, twin):
            one(*args).square().mean().backward()
    for (name, param), other in zip(twin.named_parameters(), part.parameters()):
        assert param is not other and torch.equal(full(param.grad), full(other.grad)) and full(param.grad).any(), name
    before = [full(param) for param in part.parameters()]
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    twin(*args)
    assert all(torch.equal(full(param), old) for param, old in zip(part.parameters(), before))
    assert stats(twin).num_pending == 0
