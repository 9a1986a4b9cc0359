"""Copies of whole parameters in compute dtype, made once a step: no bit differs from casting them at each use."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import gtp_dtensor.runtime
from gtp_dtensor import GTPConfig, GTPStyle, refresh
from gtp_dtensor.graph_capture import Runtimes, RuntimesReplay
from gtp_dtensor.members import model_members
from gtp_dtensor.small import SmallParam
from tests.graph_stand_in import graphed
from tests.harness import ranks
from tests.reference import assert_equal_to_reference, full_gradients, full_parameters, mean_square


class _Model(nn.Module):
    def __init__(self, recomputes=False):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.RMSNorm(16), nn.Linear(16, 16)) for _ in range(3))
        self.recomputes = recomputes
        self.seen = []

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        self.seen.append([small.read().data_ptr() for small in smalls_of(self)])
        return x


def smalls_of(model):
    return [member for member in model_members(model) if isinstance(member, SmallParam)]


def build(mesh, **options):
    torch.manual_seed(0)
    model = _Model(**options)
    parallelize_module(model, mesh, GTPStyle(GTPConfig(param_dtype=torch.bfloat16), min_numel=30))
    assert len(smalls_of(model)) == 6  # norms and biases
    return model


def batch(number, rank):
    return torch.randn(2, 16, generator=torch.Generator().manual_seed(10 * number + rank))


def backward(model, number, rank):
    loss = mean_square(model(batch(number, rank)))
    loss.backward()
    return loss.detach()


def step(model, optimizer, number, rank):
    losses = [backward(model, 2 * number + microbatch, rank) for microbatch in range(2)]
    optimizer.step()
    optimizer.zero_grad()
    return losses


def _in_place(model, rank):
    with torch.no_grad():
        model.blocks[0][0].weight.mul_(1.5)


def _through_a_state_dict(model, rank):
    """As ``dcp.load`` does."""
    state = get_model_state_dict(model)
    state["blocks.0.0.weight"]._local_tensor.fill_(0.75)


def _load(model, rank):
    model.load_state_dict({**model.state_dict(), "blocks.0.0.weight": 0.5 * model.blocks[0][0].weight.detach()})


def _without_a_trace(model, rank):
    torch._foreach_mul_([param.data for param in model.parameters()], 0.9)
    refresh(model)


def _norms_alone(model, rank):
    norms = [block[0].weight for block in model.blocks]
    for norm in norms:
        norm.grad = torch.ones_like(norm)
    optimizer = torch.optim.SGD(norms, lr=0.25, foreach=True)
    optimizer.step()
    optimizer.zero_grad()


def _an_evaluation(model, rank):
    """Between a forward and its backward, of weights that were written without a trace; which are as before then."""
    loss = mean_square(model(batch(7, rank)))
    params = [param.data for param in model.parameters()]
    torch._foreach_mul_(params, 2.0)
    with torch.inference_mode():
        output = model(batch(8, rank))
    torch._foreach_mul_(params, 0.5)
    loss.backward()
    return output


def _a_part_alone(model, rank):
    """Outside of the root's forward nothing is relied on."""
    torch._foreach_mul_([param.data for param in model.parameters()], 2.0)
    output = model.blocks[0](batch(9, rank)).detach()
    refresh(model)
    return output


CHANGES = [
    _in_place,
    _through_a_state_dict,
    _load,
    _without_a_trace,
    _norms_alone,
    _an_evaluation,
    _a_part_alone,
]


def program(mesh, rank, change, **options):
    """(what it computed, where each forward found its whole parameters)."""
    model = build(mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    losses = [*step(model, optimizer, 0, rank), *step(model, optimizer, 1, rank), backward(model, 4, rank)]
    losses.append(change(model, rank))
    losses.append(backward(model, 5, rank))
    found = [loss for loss in losses if loss is not None]
    gradients = full_gradients(model)
    optimizer.step()
    return torch.cat([loss.flatten().float() for loss in found]), gradients, full_parameters(model), model.seen


def without_copies():
    return mock.patch.object(gtp_dtensor.runtime, "copy_together", lambda smalls: None)


@ranks(2)
@pytest.mark.parametrize("recomputes", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__[1:])
def test_nothing_changes_a_bit(mesh, rank, change, recomputes):
    with without_copies():
        *expected, seen = program(mesh, rank, change, recomputes=recomputes)
    *found, seen = program(mesh, rank, change, recomputes=recomputes)
    assert seen[3] == seen[2] and seen[4] != seen[2]  # of the second step both, of the third a new one: they were there
    assert torch.equal(found[0], expected[0])
    assert_equal_to_reference(found[1], expected[1], "gradient")
    assert_equal_to_reference(found[2], expected[2], "parameter")


@ranks(2)
def test_replays_of_a_step_and_eager_forwards(mesh, rank):
    """A graph casts for itself; what it writes is cast anew after it."""
    results = []
    for is_graphed in (False, True):
        model = build(mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))

        def one(x):
            loss = mean_square(model(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        call, stand_in = graphed(one, model, optimizer) if is_graphed else (one, None)
        losses = [call(batch(number, rank)).item() for number in range(4)]
        assert all(small._copy is None for small in smalls_of(model))  # an optimizer stepped
        losses += [mean_square(model(batch(number, rank))).item() for number in (5, 6)]
        assert all(small._copy is not None for small in smalls_of(model))
        losses.append(call(batch(7, rank)).item())
        losses.append(mean_square(model(batch(8, rank))).item())
        results.append((losses, full_parameters(model)))
    assert results[0][0] == results[1][0]
    assert_equal_to_reference(results[1][1], results[0][1], "parameter")


@ranks(2)
def test_what_a_replay_wrote_is_cast_anew(mesh, rank):
    """No version and no hook tells of it."""
    outputs = []
    for is_copied in (False, True):
        with contextlib.nullcontext() if is_copied else without_copies():
            model = build(mesh)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            step(model, optimizer, 0, rank)
            backward(model, 2, rank)
            assert all((small._copy is not None) is is_copied for small in smalls_of(model))
            values = [small.param._local_tensor.data for small in smalls_of(model)]
            RuntimesReplay(Runtimes(model)).step(lambda: torch._foreach_mul_(values, 2.0))
            outputs.append(model(batch(3, rank)).detach())
    assert torch.equal(*outputs)


@ranks(2)
def test_copies_are_made_together(mesh, rank):
    """By one kernel a step, whatever the number of microbatches."""
    model = build(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for number in range(2):
        step(model, optimizer, number, rank)
    copied, foreach_copy_ = [], torch._foreach_copy_

    def note(to, source):
        copied.append(len(to))
        foreach_copy_(to, source)

    with mock.patch.object(torch, "_foreach_copy_", note):
        for number in range(3):
            step(model, optimizer, number, rank)
    assert copied == [6, 3] * 3  # and compute shards
