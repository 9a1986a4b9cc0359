"""A pass that ends where nobody planned it: Ctrl-C in a notebook, an error in a recompute, an out-of-memory retry."""

import copy

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, stats
from tests.harness import ranks
from tests.reference import build_pair, local_slice, train_beside_reference

DIM = 16
# The schedule believes the longest run of equal steps: until there were more of them after the interruption than before
# it (three here, and never more than Schedule.CONTEXT uses), each mispredicts once.
NUM_STEPS_TO_FORGET = 5


class Breakable(nn.Module):
    """Four linears, the middle two recomputed or not; ``where`` ("forward", "recompute", "backward") raises ``error``."""

    def __init__(self, recompute: str = "none") -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.recompute, self.where, self.error = recompute, "", KeyboardInterrupt

    def middle(self, x):
        x = torch.tanh(self.layers[1](x))
        in_backward = torch._C._current_graph_task_id() != -1
        if self.where == ("recompute" if in_backward else "forward"):
            raise self.error("on purpose")
        if self.where == "backward":
            x.register_hook(self.raise_error)
        return torch.tanh(self.layers[2](x))

    def raise_error(self, grad):
        raise self.error("on purpose")

    def forward(self, x):
        x = torch.tanh(self.layers[0](x))
        is_recomputed = self.recompute != "none"
        x = checkpoint(self.middle, x, use_reentrant=self.recompute == "reentrant") if is_recomputed else self.middle(x)
        return self.layers[3](x)


def pair(mesh, build, config=GTPConfig()):
    model, reference = build_pair(lambda: build().double())
    parallelize_module(model, mesh, GTPStyle(config, min_numel=30))
    return model, reference


def batch(step, num=8):
    return torch.randn(num, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def train(model, reference, rank, world_size, **options):
    train_beside_reference(model, reference, batch, rank=rank, world_size=world_size, rtol=1e-11, **options)


@ranks(2)
@pytest.mark.parametrize("error", [KeyboardInterrupt, pytest.param(torch.OutOfMemoryError, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "recompute, where",
    [("none", "forward"), ("none", "backward"), ("nonreentrant", "recompute"), ("reentrant", "recompute")],
)
def test_training_goes_on_as_if_nothing_had_been(mesh, rank, world_size, recompute, where, error):
    """Twice in a row, and then with the counters of a run that was never interrupted."""
    seen = {}
    for is_interrupted in (False, True):
        model, reference = pair(mesh, lambda: Breakable(recompute))
        train(model, reference, rank, world_size)
        model.where, model.error = where, error
        for _ in range(2 * is_interrupted):
            with pytest.raises(error):
                model(local_slice(batch(0), rank, world_size).requires_grad_()).sum().backward()
        model.where = ""
        model.zero_grad()
        train(model, reference, rank, world_size, num_steps=NUM_STEPS_TO_FORGET)
        reset_stats(model)
        train(model, reference, rank, world_size, num_steps=2)
        seen[is_interrupted] = stats(model)
    assert seen[True] == seen[False]
    with torch.no_grad():
        for _ in range(3):
            model(batch(0))
            assert stats(model).live_lease_bytes == 0  # the model's forward is known to have ended


@ranks(2)
def test_an_evaluation_after_an_interruption_sees_writes_that_leave_no_trace(mesh):
    """Where a model's forward begins, copies of weights are made anew: it must be seen to begin."""
    model, reference = build_pair(Breakable)
    parallelize_module(model, mesh, GTPStyle(GTPConfig(param_dtype=torch.bfloat16), min_numel=30))
    reference.bfloat16()
    x = batch(0).float()
    with torch.no_grad():
        model.where = "forward"
        with pytest.raises(KeyboardInterrupt):
            model(x)
        model.where = ""
        assert torch.equal(model(x), reference(x.bfloat16()))
        torch._foreach_mul_(list(model.parameters()), 2.0)
        torch._foreach_mul_(list(reference.parameters()), 2.0)
        assert torch.equal(model(x), reference(x.bfloat16()))


@ranks(2)
def test_a_smaller_batch_after_running_out_of_memory(mesh, rank, world_size):
    """Automatic microbatching: a batch that does not fit is tried again in halves; what was accumulated stays."""
    model, reference = pair(mesh, Breakable)

    def step(one, x, num_parts=1):
        for part in x.chunk(num_parts):
            one(part).square().mean().div(num_parts).backward()

    for seed in range(3):
        x = batch(seed)
        mine = local_slice(x, rank, world_size)
        model.where, model.error = "forward", torch.OutOfMemoryError
        with pytest.raises(torch.OutOfMemoryError):
            step(model, mine)
        model.where = ""
        step(model, mine, num_parts=2)
        step(reference, x)
    for (name, param), other in zip(model.named_parameters(), reference.parameters()):
        assert torch.allclose(param.grad.full_tensor(), other.grad, rtol=1e-11, atol=1e-14), name


class Interrupted(torch.optim.SGD):
    """Writes by a foreach kernel, which leaves no trace, and does not come to its end where ``breaks``."""

    breaks = False

    @torch.no_grad()
    def step(self):
        torch._foreach_add_(self.param_groups[0]["params"], 1.0)
        if self.breaks:
            raise KeyboardInterrupt


@ranks(2)
def test_an_optimizer_step_that_is_interrupted(mesh):
    """It has written, and the signal at its end does not come: the next forward reads what was written."""
    model, reference = build_pair(Breakable)
    parallelize_module(model, mesh, GTPStyle(GTPConfig(param_dtype=torch.bfloat16), min_numel=30))
    optimizer, x = Interrupted(model.parameters(), lr=0.1), batch(0).float()
    for optimizer.breaks in (False, False, True):
        model(x).float().sum().backward()
        if optimizer.breaks:
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        else:
            optimizer.step()
        optimizer.zero_grad()
        reference.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
        assert torch.equal(model(x), copy.deepcopy(reference).bfloat16()(x.bfloat16()))


class Nested(nn.Module):
    """Calls itself, as tree models do."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.breaks = False

    def forward(self, x, depth=2):
        x = torch.tanh(self.down(x))
        if depth:
            x = x + self(x, depth - 1)
        elif self.breaks:
            raise KeyboardInterrupt
        return torch.tanh(self.up(x))


@ranks(2)
def test_a_model_that_calls_itself(mesh, rank, world_size):
    seen = {}
    for is_interrupted in (False, True):
        model, reference = pair(mesh, Nested)
        train(model, reference, rank, world_size)
        model.breaks = True
        for _ in range(is_interrupted):
            with pytest.raises(KeyboardInterrupt):
                model(batch(0))
        model.breaks = False
        train(model, reference, rank, world_size, num_steps=NUM_STEPS_TO_FORGET)
        reset_stats(model)
        train(model, reference, rank, world_size)
        seen[is_interrupted] = stats(model)
    assert seen[True] == seen[False] and seen[True].num_prefetch_hits > 0


@ranks(2)
def test_recovery_inside_an_exception_handler(mesh, rank, world_size):
    """The handler's own exception gets no note of ours, and the depth of the forward is right in there, too."""
    model, reference = pair(mesh, Breakable)
    try:
        raise RuntimeError("of somebody else, about a DTensor")
    except RuntimeError as error:
        train(model, reference, rank, world_size)
        assert not getattr(error, "__notes__", [])
