"""Second-order gradients: by way of an input they are the unsharded model's; through a reduced gradient they are refused
at once, by the name of the parameter. Never silently wrong."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from gtp_dtensor import GTPConfig, GTPStyle, grouped_linear, stats
from tests.harness import ranks
from tests.reference import build_pair, full_gradients, local_slice

DIM = 32


class Critic(nn.Module):
    """Linears, a convolution and a norm: what GTP knows, what it does not, and what stays whole."""

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(DIM, DIM), nn.LayerNorm(DIM)
        self.conv, self.second = nn.Conv1d(1, 1, 3, padding=1), nn.Linear(DIM, DIM, bias=False)
        self.head = nn.Linear(DIM, 1)
        self.recomputes = recomputes

    def body(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        return torch.tanh(self.second(self.conv(x.unsqueeze(1)).squeeze(1)))

    def forward(self, x):
        return self.head(checkpoint(self.body, x, use_reentrant=False) if self.recomputes else self.body(x))


def pair(mesh, build, config=GTPConfig()):
    model, reference = build_pair(lambda: build().double())
    parallelize_module(model, mesh, GTPStyle(config, min_numel=2))
    return model, reference


def batch(seed=0):
    return torch.randn(4, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def penalty(model, x):
    """Of a critic whose gradient should have length 1; the gradient of the sum has no graph of its own."""
    x = x.clone().requires_grad_()
    y = model(x)
    (grad,) = torch.autograd.grad(y.sum(), [x], create_graph=True)
    return (grad.norm(dim=1) - 1).square().mean() + y.mean()


def assert_same_grads(model, reference):
    expected = full_gradients(reference)
    for name, grad in full_gradients(model).items():
        assert (grad is None) == (expected[name] is None), name
        assert grad is None or torch.allclose(grad, expected[name], rtol=1e-10, atol=1e-13), name
    assert (stats(model).num_pending, stats(model).live_lease_bytes) == (0, 0)


@ranks(2)
@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("frozen", [None, "second"])
def test_gradient_penalties(mesh, rank, world_size, recomputes, frozen):
    model, reference = pair(mesh, lambda: Critic(recomputes))
    if frozen:
        model.second.requires_grad_(False), reference.second.requires_grad_(False)
    for step in range(3):
        x = batch(step)
        penalty(model, local_slice(x, rank, world_size)).backward()
        penalty(reference, x).backward()
        assert_same_grads(model, reference)


@ranks(2)
def test_the_last_linear_is_not_left_out(mesh, rank, world_size):
    """A sum's gradient has no graph: torch's ``once_differentiable`` would let it pass, and the penalty of a linear critic
    would train nothing."""
    model, reference = pair(mesh, lambda: nn.Sequential(nn.Linear(DIM, 1)))
    x = batch()
    penalty(model, local_slice(x, rank, world_size)).backward()
    penalty(reference, x).backward()
    assert_same_grads(model, reference)
    assert full_gradients(model)["0.weight"].abs().max() > 0.1


@ranks(2)
def test_a_penalty_of_a_penalty(mesh, rank, world_size):
    """Third order."""
    model, reference = pair(mesh, lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1)))
    x = batch()
    for one, mine in ((model, local_slice(x, rank, world_size)), (reference, x)):
        mine = mine.clone().requires_grad_()
        (first,) = torch.autograd.grad(one(mine).sum(), [mine], create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), [mine], create_graph=True)
        second.square().mean().backward()
    assert_same_grads(model, reference)


@ranks(2)
@pytest.mark.parametrize("wanted", ["all", "first.weight", "conv.weight", "norm.weight", "head.bias"])
def test_gradients_of_parameters_are_refused_at_once(mesh, rank, world_size, wanted):
    model, reference = pair(mesh, Critic)
    x = local_slice(batch(), rank, world_size)
    named = r"head\.(weight|bias)" if wanted == "all" else wanted.replace(".", r"\.")
    with pytest.raises(RuntimeError, match=rf"{named}: its gradient is reduced over ranks.*create_graph=True"):
        if wanted == "all":
            model(x).sum().backward(create_graph=True)
        else:
            torch.autograd.grad(model(x).sum(), [model.get_parameter(wanted)], create_graph=True)
    model.zero_grad()
    penalty(model, x).backward()  # and on it goes
    penalty(reference, batch()).backward()
    assert_same_grads(model, reference)


class Stack(nn.Module):
    """Two experts, by ``grouped_linear``."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(2, DIM, DIM))

    def forward(self, x):
        raise NotImplementedError("given as forwards=")


def run_stack(module, x):
    return grouped_linear(module, "w", x, splits=[x.shape[0] - 1, 1])


@ranks(2)
@pytest.mark.parametrize("kind", ["embedding", "experts"])
def test_modules_without_a_differentiable_backward_are_refused_at_once(mesh, kind):
    model = nn.Embedding(64, DIM) if kind == "embedding" else Stack()
    style = GTPStyle(min_numel=2, forwards={} if kind == "embedding" else {Stack: run_stack})
    parallelize_module(model, mesh, style)
    x = torch.arange(4) if kind == "embedding" else torch.randn(4, DIM, requires_grad=True)
    with pytest.raises(RuntimeError, match="^w(eight)?: .*create_graph=True"):
        model(x).sum().backward(create_graph=True)


@ranks(2)
def test_a_write_between_is_refused(mesh):
    model, _ = pair(mesh, lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1)))
    x = batch().requires_grad_()
    y = model(x).sum()
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"2\.weight: the weight was modified between a forward and its backward"):
        torch.autograd.grad(y, [x], create_graph=True)


@ranks(2)
@pytest.mark.parametrize("options", [{"param_dtype": torch.bfloat16}, {"wire_format": "fp8_rowwise"}], ids=str)
@pytest.mark.parametrize("autocasts", [False, True])
def test_penalties_of_weights_that_are_cast(mesh, rank, world_size, options, autocasts):
    """The second pass reads what the first one read: bfloat16, or what arrived in FP8."""
    model, reference = build_pair(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1)))
    parallelize_module(model, mesh, GTPStyle(GTPConfig(**options), min_numel=2))
    x = batch().float()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocasts):
        penalty(model, local_slice(x, rank, world_size)).float().backward()
    penalty(reference, x).backward()
    expected = full_gradients(reference)
    for name, grad in full_gradients(model).items():
        error = (grad - expected[name]).norm() / expected[name].norm()
        assert error < 0.1 and (error > 0 or name == "2.bias"), (name, error)  # that one is a mean of ones
    assert (stats(model).num_pending, stats(model).live_lease_bytes) == (0, 0)
