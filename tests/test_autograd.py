"""Every way of driving autograd that an unsharded model allows: same gradients, or a clear refusal; nothing pending."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gtp_dtensor import GTPConfig, GTPStyle, finalize_grads, materialized, reset_stats, stats
from tests.harness import ranks
from tests.models import MLP, TinyLlama, WithConv
from tests.reference import build_pair, full, full_gradients, local_slice, train_beside_reference

DIMS = (16, 32, 24, 16)


def pair(mesh, build=lambda: MLP(DIMS), config=GTPConfig()):
    model, reference = build_pair(lambda: build().double())
    parallelize_module(model, mesh, GTPStyle(config, min_numel=30))
    return model, reference


def batch(world_size, seed=0, per_rank=3):
    return torch.randn(per_rank * world_size, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def assert_same_grads(model, reference):
    finalize_grads(model)
    for (name, grad), (_, expected) in zip(full_gradients(model).items(), full_gradients(reference).items()):
        assert (grad is None) == (expected is None), name
        assert grad is None or torch.allclose(grad, expected, rtol=1e-11, atol=1e-13), name
    assert stats(model).num_pending == 0 and stats(model).live_lease_bytes == 0
    for param in model.parameters():
        assert isinstance(param, DTensor)
        assert param.grad is None or param.grad.placements == param.placements


@ranks(2)
def test_input_gradients(mesh, rank, world_size):
    model, reference = pair(mesh)
    x = batch(world_size)
    mine, whole = local_slice(x, rank, world_size).requires_grad_(), x.clone().requires_grad_()
    model(mine).square().mean().backward()
    reference(whole).square().mean().backward()
    assert torch.allclose(mine.grad, local_slice(whole.grad, rank, world_size) * world_size, rtol=1e-12)
    assert_same_grads(model, reference)


@ranks(2)
@pytest.mark.parametrize("order", ["first_first", "last_first", "1f1b"])
def test_several_forwards_before_backwards(mesh, rank, world_size, order):
    model, reference = pair(mesh)
    xs = [batch(world_size, seed) for seed in range(3)]
    for one, share in ((model, lambda x: local_slice(x, rank, world_size)), (reference, lambda x: x)):
        if order == "1f1b":
            first, second = one(share(xs[0])), one(share(xs[1]))
            first.square().mean().backward()
            third = one(share(xs[2]))
            second.square().mean().backward()
            third.square().mean().backward()
        else:
            losses = [one(share(x)).square().mean() for x in xs]
            for loss in losses if order == "first_first" else losses[::-1]:
                loss.backward()
    assert_same_grads(model, reference)


@ranks(2)
def test_retained_graph(mesh, rank, world_size):
    model, reference = pair(mesh)
    x = batch(world_size)
    for one, mine in ((model, local_slice(x, rank, world_size)), (reference, x)):
        y = one(mine)
        y.square().mean().backward(retain_graph=True)
        y.sin().mean().backward()
    assert_same_grads(model, reference)


@ranks(2)
def test_autograd_grad_returns_and_accumulates_nothing(mesh, rank, world_size):
    model, reference = pair(mesh)
    x = batch(world_size)
    mine, whole = local_slice(x, rank, world_size).requires_grad_(), x.clone().requires_grad_()
    wanted, expected_wanted = [[one.layers[1].weight, one.layers[0].bias] for one in (model, reference)]
    grads = torch.autograd.grad(model(mine).square().mean(), [*wanted, mine])
    expected = torch.autograd.grad(reference(whole).square().mean(), [*expected_wanted, whole])
    for grad, exp in zip(grads[:2], expected[:2]):
        assert torch.allclose(full(grad), exp, rtol=1e-12, atol=1e-14)
    assert torch.allclose(grads[2] / world_size, local_slice(expected[2], rank, world_size), rtol=1e-12)
    assert all(p.grad is None for p in model.parameters())
    assert stats(model).num_pending == 0


@ranks(2)
def test_only_what_the_engine_executes_is_computed(mesh, rank, world_size):
    model, _ = pair(mesh, config=GTPConfig(weight_prefetch=False))
    x = local_slice(batch(world_size), rank, world_size).requires_grad_()
    reset_stats(model)
    torch.autograd.grad(model(x).square().mean(), [x])
    assert stats(model).num_reductions == 0 and stats(model).num_small_reductions == 0
    reset_stats(model)
    model(x).square().mean().backward(inputs=[model.layers[2].weight])
    s = stats(model)
    assert s.num_reductions == 1 and s.num_backward_gathers == 0
    assert x.grad is None and model.layers[0].weight.grad is None and model.layers[2].weight.grad is not None


@ranks(2)
@pytest.mark.parametrize("frozen", [[0], [1], [2], [0, 1], [0, 2], [0, 1, 2]])
def test_frozen_layers(mesh, rank, world_size, frozen):
    """In the reference implementation a frozen neighbour makes gradients vanish."""
    model, reference = pair(mesh)
    for one in (model, reference):
        for index in frozen:
            one.layers[index].requires_grad_(False)
    x = batch(world_size)
    mine, whole = local_slice(x, rank, world_size).requires_grad_(), x.clone().requires_grad_()
    for _ in range(3):
        reset_stats(model)
        model(mine).square().mean().backward()
        reference(whole).square().mean().backward()
        assert stats(model).num_reductions == 3 - len(frozen)
        assert_same_grads(model, reference)


@ranks(2)
def test_requires_grad_toggled_between_and_within_steps(mesh, rank, world_size):
    model, reference = pair(mesh)
    for step in range(6):
        for one, x in (
            (model, local_slice(batch(world_size, step), rank, world_size)),
            (reference, batch(world_size, step)),
        ):
            one.layers[step % 3].requires_grad_(step % 2 == 0)
            y = one(x)
            one.layers[(step + 1) % 3].weight.requires_grad_(step % 2 == 1)  # after the forward
            y.square().mean().backward()
        assert_same_grads(model, reference)


class Weird(nn.Module):
    """Repeats, skips and ties."""

    def __init__(self, dim=16):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(dim, dim) for _ in range(4))
        self.d.weight = self.a.weight

    def forward(self, x, skip=False):
        x = torch.tanh(self.a(x))
        for _ in range(3):
            x = torch.tanh(self.b(x))
        if not skip:
            x = torch.tanh(self.c(x))
        return self.d(self.b(x))


@ranks(2, 4)
def test_repeated_skipped_and_tied_weights(mesh, rank, world_size):
    model, reference = pair(mesh, Weird)
    assert model.a.weight is model.d.weight
    for step in range(8):
        x = batch(world_size, step)
        model(local_slice(x, rank, world_size), step % 3 == 1).square().mean().backward()
        reference(x, step % 3 == 1).square().mean().backward()
        s = stats(model)
        assert s.num_pending == 0 and s.live_lease_bytes == 0
    assert_same_grads(model, reference)
    assert len(list(model.parameters())) == len(list(reference.parameters()))


@ranks(2)
def test_hooks_on_parameters_see_the_reduced_gradient(mesh, rank, world_size):
    model, reference = pair(mesh)
    seen = []
    for one in (model, reference):
        one.layers[1].weight.register_hook(lambda grad: grad * 2)
        one.layers[0].bias.register_hook(lambda grad: grad * 3)
        one.layers[2].weight.register_post_accumulate_grad_hook(lambda param: seen.append(full(param.grad).clone()))
    x = batch(world_size)
    for _ in range(2):
        model(local_slice(x, rank, world_size)).square().mean().backward()
        reference(x).square().mean().backward()
    assert_same_grads(model, reference)
    assert (
        len(seen) == 4 and torch.allclose(seen[0], seen[1], rtol=1e-12) and torch.allclose(seen[2], seen[3], rtol=1e-12)
    )


class Boom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, where):
        ctx.where = where
        if where == "forward":
            raise ValueError("boom in forward")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.where == "backward":
            raise ValueError("boom in backward")
        return grad, None


class Fragile(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(4))
        self.where = None

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if index == 1:
                x = Boom.apply(x, self.where)
        return x


@ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("next_is_a_retained_backward", [False, True])
def test_an_exception_leaves_the_next_step_clean(mesh, rank, world_size, where, next_is_a_retained_backward):
    model, reference = pair(mesh, Fragile)
    x = batch(world_size)
    mine = local_slice(x, rank, world_size)
    for _ in range(2):
        model(mine).square().mean().backward()
    retained = model(mine).square().mean()
    model.where = where
    with pytest.raises(ValueError, match="boom"):
        model(mine).square().mean().backward()
    model.where = None
    model.zero_grad()
    if next_is_a_retained_backward:
        retained.backward()
    else:
        model(mine).square().mean().backward()
    reference(x).square().mean().backward()
    assert_same_grads(model, reference)


@ranks(2)
def test_a_raised_backward_is_dropped_before_an_optimizer_step(mesh, rank, world_size):
    """What it launched must not arrive in .grad later."""
    model, _ = pair(mesh, Fragile)
    mine = local_slice(batch(world_size), rank, world_size)
    model.where = "backward"
    with pytest.raises(ValueError):
        model(mine).square().mean().backward()
    runtime = model.layers[3]._gtp.weights["weight"].runtime
    assert runtime.reducer.num_pending > 0  # the trap is armed
    model.zero_grad()
    before = [full(p).clone() for p in model.parameters()]
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert runtime.reducer.num_pending == 0
    for param, old in zip(model.parameters(), before):
        assert param.grad is None and torch.equal(full(param), old)


MODES = ["reentrant", "nonreentrant", "selective"]


def recomputed(function, mode, *args):
    if mode == "selective":

        def policy(ctx, op, *args, **kwargs):
            if op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                ctx.count = getattr(ctx, "count", 0) + 1
                return CheckpointPolicy.MUST_SAVE if ctx.count % 2 else CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return checkpoint(
            function, *args, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
    return checkpoint(function, *args, use_reentrant=mode == "reentrant")


class Checkpointed(nn.Module):
    """A model whose layers are checkpointed one by one."""

    def __init__(self, inner, layers, mode):
        super().__init__()
        self.inner, self.mode, self.chosen = inner, mode, layers

    def forward(self, tokens):
        x = self.inner.tok_embeddings(tokens)
        for index, layer in enumerate(self.inner.layers):
            x = recomputed(layer, self.mode, x) if index in self.chosen else layer(x)
        return self.inner.output(self.inner.norm(x))


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layers", [(0, 1, 2), (0, 2), (1,)])
def test_activation_checkpointing(mesh, rank, world_size, mode, layers):
    model, reference = build_pair(lambda: Checkpointed(TinyLlama(num_layers=3).double(), layers, mode))
    parallelize_module(model, mesh, GTPStyle(min_numel=30))

    def batch(step):
        return torch.randint(0, 24, (4, 6), generator=torch.Generator().manual_seed(step))

    train_beside_reference(
        model, reference, batch, rank=rank, world_size=world_size, num_microbatches=2, num_steps=2, rtol=1e-12
    )
    for _ in range(2):  # the first one ends where another microbatch was expected, whose first weight is gathered
        reset_stats(model)
        train_beside_reference(model, reference, batch, rank=rank, world_size=world_size, num_steps=1, rtol=1e-12)
    s = stats(model)
    num_weights, num_recomputed = s.num_sharded_weights, 7 * len(layers)
    assert s.num_forward_gathers == num_weights
    # Two a weight and microbatch, but one of the head: it stays, and of the embedding.
    assert s.num_recompute_gathers + s.num_backward_gathers + s.num_kept_at_turn == num_weights - 1, s
    assert s.num_kept_at_turn == 1
    assert 0 < s.num_recompute_gathers <= num_recomputed
    assert s.num_mispredictions == 0 and s.num_pending == 0 and s.live_lease_bytes == 0


@ranks(2)
@pytest.mark.parametrize("mode", ["reentrant", "nonreentrant"])
def test_the_gathered_weight_is_never_saved_for_backward(mesh, mode):
    """Between forward and backward no gathered weight of a linear or embedding is in memory."""
    model = MLP(DIMS).double()
    parallelize_module(model, mesh, GTPStyle(GTPConfig(weight_prefetch=False), min_numel=30))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        loss = model(torch.randn(5, 16, dtype=torch.float64)).sum()
    assert stats(model).live_lease_bytes == 0
    gathered = {tuple(layer.weight.shape) for layer in model.layers}
    assert saved and not gathered & set(saved)
    loss.backward()
    conv = WithConv().double()
    parallelize_module(conv, mesh, GTPStyle(GTPConfig(weight_prefetch=False), min_numel=30))
    loss = conv(torch.randn(2, 6, 16, dtype=torch.float64)).sum()
    assert stats(conv).live_lease_bytes == 32 * 16 * 3 * 8  # the general path: its graph holds it, and says so
    loss.backward()
    del loss
    assert stats(conv).live_lease_bytes == 0


@ranks(2)
def test_evaluation_between_steps(mesh, rank, world_size):
    model, reference = pair(mesh)
    for step in range(4):
        for grad_mode in (torch.no_grad, torch.inference_mode):
            with grad_mode():
                x = batch(world_size, 100 + step)
                assert torch.allclose(model(x), reference(x), rtol=1e-12, atol=1e-14)
                assert stats(model).live_lease_bytes == 0  # nothing stays gathered after a forward-only pass
        train_beside_reference(
            model,
            reference,
            lambda _: batch(world_size, step),
            rank=rank,
            world_size=world_size,
            num_steps=1,
            rtol=1e-12,
        )


@ranks(2)
def test_direct_use_of_a_weight(mesh, rank, world_size):
    """A chunked loss reads the head's weight itself."""
    model, reference = pair(mesh)
    x = batch(world_size)
    for one, mine in ((model, local_slice(x, rank, world_size)), (reference, x)):
        h = torch.tanh(one.layers[0](mine))
        with materialized(one.layers[1]) as w, materialized(one.layers[1], "bias") as b:
            assert not isinstance(w, DTensor) and w.shape == (24, 32)
            loss = sum(F.linear(part, w, b).square().sum() for part in h.chunk(3)) / mine.shape[0]
        loss.backward()
    assert_same_grads(model, reference)
    with pytest.raises(AttributeError, match="no parameter 'wait'.*weight"):
        with materialized(model.layers[1], "wait"):
            pass


@ranks(2)
def test_anomaly_mode(mesh, rank, world_size):
    model, reference = pair(mesh)
    x = batch(world_size)
    with torch.autograd.set_detect_anomaly(True):
        model(local_slice(x, rank, world_size)).square().mean().backward()
    reference(x).square().mean().backward()
    assert_same_grads(model, reference)


@ranks(2)
def test_a_gradient_put_there_by_hand_must_be_placed_like_the_parameter(mesh):
    model, _ = pair(mesh)
    weight = model.layers[1].weight
    weight.grad = torch.distributed.tensor.zeros(
        *weight.shape,
        dtype=weight.dtype,
        device_mesh=weight.device_mesh,
        placements=[torch.distributed.tensor.Replicate()],
    )
    with pytest.raises(RuntimeError, match=r"layers\.1\.weight: \.grad has placements.*Replicate"):
        model(torch.randn(3, 16, dtype=torch.float64)).sum().backward()


@ranks(2)
def test_branches_that_alternate(mesh, rank, world_size):
    """Two passes a step through the same weights (policy and reference), then another number of passes."""
    model, reference = pair(mesh)
    for step in range(6):
        x = batch(world_size, step)
        for _ in range(1 + step % 2):
            with torch.no_grad():
                model(local_slice(x, rank, world_size)), reference(x)
        train_beside_reference(model, reference, lambda _: x, rank=rank, world_size=world_size, num_steps=1, rtol=1e-12)
    assert stats(model).num_mispredictions <= 12
