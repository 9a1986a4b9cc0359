"""Where a forward turns into its backward: the weight that the one ends with stays for the other, which begins with it.

How often that is in steps of every kind: in test_counters, test_section_programs (pipelines too) and test_mtp.
"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, stats
from tests.harness import ranks
from tests.reference import assert_close_to_reference, build_pair, full_gradients, local_slice
from tests.test_counters import Model, train_step
from tests.test_float8_linear import sharded_weight

IDS = torch.arange(20).view(4, 5)


def learned(mesh, **options) -> tuple[Model, torch.optim.Optimizer]:
    """A model whose step is known by now."""
    torch.manual_seed(0)
    model = parallelize_module(Model(["no"] * 2, **options), mesh, GTPStyle())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        train_step(model, optimizer)
    reset_stats(model)
    return model, optimizer


@ranks(2)
def test_there_is_no_second_copy_beside_it(mesh):
    model, optimizer = learned(mesh, vocab=400)
    train_step(model, optimizer)
    head, largest_other = (weight.numel() * 4 for weight in (model.head.weight, model.blocks[1].down.weight))
    assert head > 2 * largest_other
    assert stats(model).peak_lease_bytes == head + largest_other  # not twice the head
    assert stats(model).num_kept_at_turn == 1 and stats(model).live_lease_bytes == 0


@ranks(2)
def test_it_goes_when_no_backward_follows(mesh, rank, world_size):
    model, optimizer = learned(mesh)
    head = model.head.weight.numel() * 4
    for number in range(3):
        train_step(model, optimizer)
        model(IDS)
        # The trap is armed once; from then on this forward is known to end without a backward.
        assert stats(model).live_lease_bytes == (head if number == 0 else 0)
        with torch.no_grad():
            model(IDS)
        assert stats(model).live_lease_bytes == 0
    reset_stats(model)
    for _ in range(4):  # forwards alone: at most one of it, and none once they are what is expected
        model(IDS)
        assert stats(model).live_lease_bytes <= head
    assert stats(model).live_lease_bytes == stats(model).num_kept_at_turn == 0
    _, reference = build_pair(lambda: Model(["no"] * 2))
    reference.load_state_dict({name: param.full_tensor() for name, param in model.state_dict().items()})
    model(local_slice(IDS, rank, world_size)).square().mean().backward()
    reference(IDS).square().mean().backward()
    assert_close_to_reference(*map(full_gradients, (model, reference)))
    assert stats(model).live_lease_bytes == 0


@ranks(2)
@pytest.mark.parametrize("look_ahead", [1, 2])
def test_a_backward_does_not_read_what_an_earlier_forward_left(mesh, rank, look_ahead):
    """No optimizer trains the model, so the weight may be written between two forwards without a trace."""
    model, reference = build_pair(lambda: nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 8, bias=False)))
    parallelize_module(model, mesh, GTPStyle(GTPConfig(look_ahead=look_ahead), min_numel=1))
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    for _ in range(2):
        model(x).sum().backward()
    model(x)
    kept, ahead = 32 * 8 * 4, 16 * 32 * 4
    assert stats(model).live_lease_bytes == kept + (ahead if look_ahead == 2 else 0)  # the trap is armed
    for one in (model[1].weight._local_tensor, reference[1].weight):
        one.data.mul_(3)
    x.grad = None
    model(x).sum().backward()
    (expected,) = torch.autograd.grad(reference(x).sum(), x)
    assert torch.equal(x.grad, expected)
    assert stats(model).live_lease_bytes == 0


@ranks(2)
@pytest.mark.parametrize("writer", ["hand", "optimizer"])
def test_a_write_before_the_backward_is_refused(mesh, writer):
    model, optimizer = learned(mesh)
    model(IDS).square().mean().backward()
    loss = model(IDS).square().mean()
    assert stats(model).live_lease_bytes == model.head.weight.numel() * 4  # the trap is armed
    if writer == "hand":
        with torch.no_grad():
            model.head.weight.mul_(2)
    else:
        optimizer.step()
    with pytest.raises(
        RuntimeError, match=r"^head\.weight: the weight was modified between a forward and its backward"
    ):
        loss.backward()
    assert (stats(model).live_lease_bytes, stats(model).num_kept_at_turn) == (0, 1)


@ranks(2)
def test_where_the_backward_reads_other_codes_nothing_stays(mesh):
    from gtp_dtensor.wire.mx_linear import convert_to_mx_training

    for converts in (False, True):
        model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
        if converts:
            convert_to_mx_training(model)
        parallelize_module(model, mesh, GTPStyle(GTPConfig(wire_format="mxfp8"), min_numel=30))
        assert sharded_weight(model[1]).has_view_for_backward == converts
        for _ in range(3):
            reset_stats(model)
            model(torch.randn(32, 64, requires_grad=True)).sum().backward()
        s = stats(model)
        assert (s.num_kept_at_turn, s.num_backward_gathers) == ((0, 2) if converts else (1, 1))
        assert s.num_on_demand_gathers == 1  # of the first forward; the backward's first was issued ahead, or stayed
        assert s.num_mispredictions == s.live_lease_bytes == 0


class Branches(nn.Module):
    """The second one, of data, is computed last; its input needs no gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 8, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, x, data):
        return self.first(x) + self.second(data)


@ranks(2)
def test_only_what_the_backward_begins_with_stays(mesh):
    model = parallelize_module(Branches(), mesh, GTPStyle(min_numel=1))
    for number in range(4):
        reset_stats(model)
        y = model(torch.randn(3, 16, requires_grad=True), torch.randn(3, 32))
        # Of the first branch, issued ahead.
        assert number < 2 or stats(model).live_lease_bytes == model.first.weight.numel() * 4
        y.sum().backward()
    s = stats(model)
    assert (s.num_backward_gathers, s.num_kept_at_turn, s.num_mispredictions, s.live_lease_bytes) == (1, 0, 0, 0)


@ranks(2)
def test_a_head_tied_to_the_embedding(mesh, rank, world_size):
    def build():
        model = Model(["no"])
        model.head.weight = model.embedding.weight
        return model

    model, reference = build_pair(build)
    parallelize_module(model, mesh, GTPStyle())
    for number in range(5):
        for one in (model, reference):
            one.zero_grad()
        reset_stats(model)
        model(local_slice(IDS, rank, world_size)).square().mean().backward()
        reference(IDS).square().mean().backward()
        counters = sharded_weight(model.head).counters
        found = counters.num_forward_gathers, counters.num_backward_gathers, counters.num_kept_at_turn
        assert number < 2 or found == (2, 0, 1), number
        assert_close_to_reference(*map(full_gradients, (model, reference)))
