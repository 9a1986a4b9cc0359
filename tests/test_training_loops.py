"""Training loops that ordinary users write and other systems trip over: each gives what the unsharded model gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, schedule_table, stats
from tests.harness import ranks
from tests.reference import (
    assert_close_to_reference,
    build_pair,
    full,
    full_gradients,
    full_parameters,
    local_slice,
    train_beside_reference,
)

DIM = 32


class Net(nn.Module):
    """Three linears; the middle one may be recomputed."""

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.reentrant = recompute

    def forward(self, x):
        x = torch.tanh(self.first(x))
        middle = self.middle if self.reentrant is None else self.recomputed
        return self.last(torch.tanh(middle(x)))

    def recomputed(self, x):
        return checkpoint(self.middle, x, use_reentrant=self.reentrant)


def pair(mesh, build=Net, config=GTPConfig(), min_numel=30):
    model, reference = build_pair(lambda: build().double())
    parallelize_module(model, mesh, GTPStyle(config, min_numel=min_numel))
    return model, reference


def batch(seed=0, num=4):
    return torch.randn(num, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def both(model, reference, x, rank, world_size):
    return (model, local_slice(x, rank, world_size)), (reference, x)


def assert_same(model, reference, of=full_parameters, rtol=1e-10):
    assert_close_to_reference(of(model), of(reference), of.__name__, rtol)
    assert (stats(model).live_lease_bytes, stats(model).num_pending) == (0, 0)


# ---- optimizers


@ranks(2)
@pytest.mark.parametrize("is_tied", [False, True])
def test_an_optimizer_step_inside_the_backward(mesh, rank, world_size, is_tied):
    """One optimizer a parameter, stepped by its hook as soon as its gradient is there, which frees the gradient."""

    def build():
        net = Net()
        if is_tied:
            net.last.weight = net.first.weight
        return net

    model, reference = pair(mesh, build)
    for one in (model, reference):
        optimizers = {param: torch.optim.AdamW([param], lr=1e-2, eps=1e-2) for param in one.parameters()}

        def step(param, optimizers=optimizers):
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in one.parameters():
            param.register_post_accumulate_grad_hook(step)
    for seed in range(4):
        for one, x in both(model, reference, batch(seed), rank, world_size):
            one(x).square().mean().backward()
        assert_same(model, reference)
        assert all(param.grad is None for param in model.parameters())


@ranks(2)
def test_an_optimizer_that_calls_the_model(mesh, rank, world_size):
    """LBFGS evaluates a closure several times a step."""
    model, reference = pair(mesh)
    for one, x in both(model, reference, batch(), rank, world_size):
        optimizer = torch.optim.LBFGS(one.parameters(), lr=0.1, max_iter=5)

        def closure():
            optimizer.zero_grad()
            loss = one(x).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    assert_same(model, reference, rtol=1e-8)


@ranks(2)
@pytest.mark.parametrize("config", [GTPConfig(), GTPConfig(pad_for_alignment=3)], ids=["in_place", "copied"])
def test_weights_that_are_moved_and_moved_back(mesh, rank, world_size, config):
    """Sharpness-aware minimization: the gradient at another place; there compute shards are copies, too."""
    model, reference = pair(mesh, config=config)
    pairs = [(one, torch.optim.SGD(one.parameters(), lr=0.1)) for one in (model, reference)]
    for seed in range(3):
        for (one, x), (_, optimizer) in zip(both(model, reference, batch(seed), rank, world_size), pairs):
            one(x).square().mean().backward()
            moves = [param.grad.clone() * 0.1 for param in one.parameters()]
            with torch.no_grad():
                for param, move in zip(one.parameters(), moves):
                    param.add_(move)
            one.zero_grad()
            one(x).square().mean().backward()
            with torch.no_grad():
                for param, move in zip(one.parameters(), moves):
                    param.sub_(move)
            optimizer.step()
            optimizer.zero_grad()
        assert_same(model, reference)


@ranks(2)
def test_a_gradient_scaler_skips_on_all_ranks(mesh, rank):
    """Infinity in one rank's data reaches all shards."""
    model, _ = build_pair(Net)
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for is_bad in (True, False):
        before = full_parameters(model)
        x = batch(rank).float()
        if is_bad and rank == 1:
            x[0, 0] = float("inf")
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert all(torch.equal(before[name], value) == is_bad for name, value in full_parameters(model).items())
        assert scaler.get_scale() == 8.0


# ---- batches and outputs


@ranks(2)
def test_a_rank_without_samples(mesh, rank, world_size):
    model, reference = pair(mesh)
    x = batch()
    model(x if rank == 0 else x[:0]).square().sum().backward()
    reference(x).square().sum().div(world_size).backward()
    assert_same(model, reference, full_gradients)


@ranks(2)
def test_samples_without_a_batch_dim(mesh, rank, world_size):
    model, reference = pair(mesh)
    x = batch()
    model(x[rank]).square().sum().backward()
    sum(reference(x[index]).square().sum() for index in range(world_size)).div(world_size).backward()
    assert_same(model, reference, full_gradients)


class TwoHeads(nn.Module):
    """Two outputs, and a layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other, self.never = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x):
        x = torch.tanh(self.body(x))
        return self.one(x), self.other(x)


@ranks(2)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_an_output_that_is_not_used_any_more(mesh, rank, world_size, optimizer):
    """Both for three steps, then the first only. Gradients of what is not used are None, or stay zero where they are kept."""
    model, reference = pair(mesh, TwoHeads)
    optimizers = [optimizer(one.parameters(), lr=0.01) for one in (model, reference)]
    for step in range(10):
        for one, x in both(model, reference, batch(step), rank, world_size):
            outputs = one(x)[: 2 if step < 3 else 1]
            sum(y.square().mean() for y in outputs).backward()
        assert_same(model, reference, full_gradients)
        assert all(param.grad is None for param in model.never.parameters())
        for one in optimizers:
            one.step()
            one.zero_grad(set_to_none=step % 2 == 0)
        assert_same(model, reference, rtol=1e-7)  # AdamW's quotient of small numbers


@ranks(2)
def test_activations_saved_on_the_host(mesh, rank, world_size):
    model, reference = pair(mesh)
    for one, x in both(model, reference, batch(), rank, world_size):
        with torch.autograd.graph.save_on_cpu():
            loss = one(x).square().mean()
        loss.backward()
    assert_same(model, reference, full_gradients)


@ranks(2)
def test_a_hook_on_several_gradients(mesh, rank, world_size):
    model, reference = pair(mesh)
    seen = []
    for one, x in both(model, reference, batch(), rank, world_size):
        parameters = list(one.parameters())
        torch.autograd.graph.register_multi_grad_hook(parameters, lambda grads: seen.append([full(g) for g in grads]))
        one(x).square().mean().backward()
    assert_same(model, reference, full_gradients)
    assert len(seen) == 2 and all(torch.allclose(*grads, rtol=1e-11) for grads in zip(*seen))


# ---- several passes


@ranks(2)
@pytest.mark.parametrize("keep_bytes", [None, 0])
@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_loss_of_two_forwards(mesh, rank, world_size, reentrant, keep_bytes):
    """A preferred and a rejected sample through the same recomputed block, and one backward."""

    def preference(one, x):
        chosen, rejected = (one(half.clone().requires_grad_()) for half in x.chunk(2))
        return F.softplus(rejected.sum(1) - chosen.sum(1)).mean()

    model, reference = pair(mesh, lambda: Net(reentrant), GTPConfig(recompute_keep_bytes=keep_bytes))
    for step in range(3):
        x = batch(step, num=8)
        preference(model, local_slice(x, rank, world_size)).backward()
        for part in x.chunk(world_size):
            preference(reference, part).div(world_size).backward()
        assert_same(model, reference, full_gradients)


@ranks(2)
def test_validation_before_any_training(mesh, rank, world_size):
    model, reference = pair(mesh)
    model.eval()
    with torch.no_grad():
        for seed in range(3):
            assert torch.allclose(model(batch(seed)), reference(batch(seed)), rtol=1e-12)
    order = [row.weight for row in schedule_table(model)]
    assert order == ["first.weight", "middle.weight", "last.weight"]  # each once, as they are executed
    model.train()
    train_beside_reference(model, reference, batch, rank=rank, world_size=world_size, rtol=1e-11)
    reset_stats(model)
    train_beside_reference(model, reference, batch, rank=rank, world_size=world_size, rtol=1e-11, num_steps=2)
    assert stats(model).num_mispredictions == 0


class Generator(nn.Module):
    """Methods beside ``forward``, as language models have them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.body = nn.Embedding(40, DIM), nn.Linear(DIM, DIM)
        self.head = nn.Linear(DIM, 40, bias=False)

    def encode(self, ids):
        return torch.tanh(self.body(self.embedding(ids)))

    def forward(self, ids):
        return self.head(self.encode(ids))

    def generate(self, ids, through_forward):
        for _ in range(4):
            logits = self(ids) if through_forward else self.head(self.encode(ids))
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
        return ids


def tokens(step, num=4):
    return torch.randint(0, 40, (num, 3), generator=torch.Generator().manual_seed(step))


@ranks(2)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_methods_beside_forward(mesh, rank, world_size, mode):
    model, reference = pair(mesh, Generator)
    for seed in range(2):
        for through_forward in (True, False):
            with mode():
                made = [one.generate(tokens(seed), through_forward) for one in (model, reference)]
            assert torch.equal(*made)
            assert stats(model).live_lease_bytes == 0
        train_beside_reference(model, reference, tokens, rank=rank, world_size=world_size, rtol=1e-11)
    for one, ids in both(model, reference, tokens(0), rank, world_size):
        one.encode(ids).square().mean().backward()  # a loss from the middle of the model
    assert_same(model, reference, full_gradients)


# ---- memory that nobody has written


@ranks(2, 4)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_uninitialised_memory_reaches_no_result(mesh, rank, world_size, is_compiled):
    """In torch's deterministic mode new memory is full of NaN: buffers, their padding, and what compiled code returns to
    autograd as a gradient that nobody reads."""

    def build():
        return nn.Sequential(nn.Linear(DIM, 31), nn.Tanh(), nn.Linear(31, 5), nn.Tanh(), nn.Linear(5, 3))

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()  # the trap is armed
        model, reference = pair(mesh, build, GTPConfig(pad_for_alignment=4))
        model = torch.compile(model, backend="aot_eager") if is_compiled else model
        train_beside_reference(
            model, reference, lambda s: batch(s, 8), rank=rank, world_size=world_size, num_microbatches=2, rtol=1e-11
        )
    finally:
        torch.use_deterministic_algorithms(False)


@ranks(2)
def test_parameters_swapped_in_place(mesh, rank, world_size):
    """``torch.__future__``'s way of converting and loading: the parameter stays the object, and gets another content."""
    model, reference = build_pair(Net)
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model(batch().float())
        model.double(), reference.double()
        train_beside_reference(model, reference, batch, rank=rank, world_size=world_size, rtol=1e-11)
        model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()}, assign=True)
        reference.load_state_dict({name: value * 2 for name, value in reference.state_dict().items()})
        train_beside_reference(model, reference, batch, rank=rank, world_size=world_size, rtol=1e-11)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
