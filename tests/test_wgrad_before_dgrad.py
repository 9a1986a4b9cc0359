"""``GTPConfig.wgrad_before_dgrad``: the same bits in another order."""

from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPConfig, GTPStyle, stats
from gtp_dtensor.local import Groups
from gtp_dtensor.transport import CollectiveTransport
from gtp_dtensor.wire.linear import GEMMs
from gtp_dtensor.wire.linear import linear as linear_by_gemms
from tests.harness import ranks
from tests.moe import Experts, grouped_experts

_ROWS = 6


@contextmanager
def recorded_order():
    """What is issued inside, in order: "gather", "reduce", "dgrad" and "wgrad"."""
    events = []

    def noting(owner, name, event):
        original = getattr(owner, name)

        def noted(*args, **kwargs):
            events.append(event if isinstance(event, str) else event(args))
            return original(*args, **kwargs)

        return mock.patch.object(owner, name, noted)

    with (
        noting(CollectiveTransport, "all_gather", "gather"),
        noting(CollectiveTransport, "reduce_scatter", "reduce"),
        noting(torch, "mm", lambda args: "dgrad" if args[0].shape[0] == _ROWS else "wgrad"),
        noting(Groups, "input_grad", "dgrad"),
        noting(Groups, "weight_grad", "wgrad"),
    ):
        yield events


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(24, 20), nn.Linear(20, 28, bias=False), nn.Linear(28, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Stacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(3, 16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, torch.tensor([3, 1, 2]))


class Quantized(nn.Linear):
    """A linear whose GEMMs are given, as those that read quantized numbers are."""


class Products(GEMMs):
    def output(self, x_rows, lease):
        return x_rows @ lease.read_local().t()

    def input_grad(self, grad_rows, lease):
        return torch.mm(grad_rows, lease.read_local())

    def weight_grad(self, grad_rows, x_rows):
        return torch.mm(grad_rows.t(), x_rows)


class QuantizedLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Quantized(24, 20), Quantized(20, 28, bias=False), Quantized(28, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


FORWARDS = {
    Linears: {},
    Stacks: {Experts: grouped_experts},
    QuantizedLinears: {Quantized: lambda module, x: linear_by_gemms(module, x, Products)},
}


def run(mesh, model_class, is_compiled, **settings):
    """(order of the third step's backward, gradients and output of it)."""
    torch.manual_seed(0)
    model = model_class()
    style = GTPStyle(GTPConfig(**settings), min_numel=30, forwards=FORWARDS[model_class])
    parallelize_module(model, mesh["gtp"], style)
    step = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
    x = torch.randn(_ROWS, 16 if model_class is Stacks else 24)
    for _ in range(3):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        y = step(leaf)
        with recorded_order() as events:
            y.square().sum().backward()
    assert stats(model).num_mispredictions == 0 and stats(model).live_lease_bytes == 0
    return events, [y, leaf.grad, *(p.grad.full_tensor() for p in model.parameters())]


@ranks(2)
@pytest.mark.parametrize("ring", [1, 2])
@pytest.mark.parametrize(
    ("model_class", "is_compiled"),
    [(Linears, False), (Linears, True), (Stacks, False), (QuantizedLinears, False)],
    ids=["eager", "compiled", "experts", "gemms"],
)
def test_order_and_bits(mesh, model_class, is_compiled, ring):
    late, expected = run(mesh, model_class, is_compiled, graph_wgrad_ring_size=ring)
    early, found = run(mesh, model_class, is_compiled, graph_wgrad_ring_size=ring, wgrad_before_dgrad=True)
    # The first weight of the backward is gathered when it begins; at each use, the next one.
    assert late == ["gather", "dgrad", "wgrad", "reduce"] * 2 + ["dgrad", "wgrad", "reduce"]
    assert early == ["gather", "wgrad", "reduce", "dgrad"] * 2 + ["wgrad", "reduce", "dgrad"]
    assert all(map(torch.equal, found, expected))


@ranks(2)
def test_a_backward_that_wants_one_of_both(mesh):
    model = Linears()
    parallelize_module(model, mesh["gtp"], GTPStyle(GTPConfig(wgrad_before_dgrad=True), min_numel=30))
    x = torch.randn(_ROWS, 24)
    for _ in range(2):
        y = model(x)
        with recorded_order() as events:
            y.sum().backward()
    assert (
        events[-2:] == ["wgrad", "reduce"] and events.count("dgrad") == 2
    )  # the first layer's input is a leaf without
    model.requires_grad_(False)
    for _ in range(2):
        y = model(x.requires_grad_())
        with recorded_order() as events:
            y.sum().backward()
    assert events == ["gather", "dgrad", "gather", "dgrad", "dgrad"]
    assert stats(model).live_lease_bytes == 0
