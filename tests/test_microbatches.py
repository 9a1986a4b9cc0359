"""Between microbatches: the first weight of the next forward is gathered while the backward before it ends."""

from unittest import mock

import pytest
import torch
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPStyle, finalize_grads, refresh, reset_stats, schedule_table, stats
from gtp_dtensor.reduce import Reducer
from gtp_dtensor.weight import ShardedWeight
from tests.harness import ranks
from tests.reference import assert_close_to_reference, build_pair, full_parameters, local_slice
from tests.test_counters import Model

IDS = torch.arange(20).view(4, 5)
OTHERS = IDS.flip(0)


def pair(mesh):
    model, reference = build_pair(lambda: Model(["no"] * 2))
    parallelize_module(model, mesh, GTPStyle())
    return model, reference


def microbatches(number):
    return [IDS, OTHERS, IDS + 1, OTHERS + 1][:number]


class Training:
    """The same steps of a sharded and an unsharded model."""

    def __init__(self, mesh, rank, world_size):
        self.models = pair(mesh)
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in self.models]
        self._slice = lambda ids: local_slice(ids, rank, world_size)

    def backward(self, ids):
        for model, batch in zip(self.models, (self._slice(ids), ids)):
            model(batch).square().mean().backward()

    def step(self, num_microbatches, between=lambda: None):
        for ids in microbatches(num_microbatches):
            self.backward(ids)
            between()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def check(self):
        assert_close_to_reference(*map(full_parameters, self.models), "weights")


@ranks(2)
@pytest.mark.parametrize("between", ["nothing", "finalize_grads", "evaluation"])
def test_only_the_first_forward_of_a_step_waits(mesh, rank, world_size, between):
    training = Training(mesh, rank, world_size)
    model = training.models[0]

    def evaluate():
        with torch.no_grad():
            model(IDS)

    calls = {"nothing": lambda: None, "finalize_grads": lambda: finalize_grads(model), "evaluation": evaluate}
    for _ in range(3):
        training.step(3, calls[between])
    reset_stats(model)
    training.step(3, calls[between])
    found = stats(model)
    uses = found.num_forward_gathers + found.num_backward_gathers + found.num_kept_at_turn
    if between == "evaluation":  # whose first weight waits, and that of the forward after it
        assert found.num_on_demand_gathers == 6
    else:
        assert found.num_on_demand_gathers == 1
        assert uses == 3 * (2 * model.num_weights - 1)  # nothing is gathered for nobody
        table = schedule_table(model)
        firsts = [row for row in table if row.weight == "embedding.weight"]
        assert [row.issued_at == row.position for row in firsts] == [True, False, False]
    assert found.live_lease_bytes == found.num_mispredictions == 0
    training.check()


@ranks(2)
def test_other_numbers_of_microbatches_and_writes_between(mesh, rank, world_size):
    training = Training(mesh, rank, world_size)
    for number in (2, 2, 2, 4, 1, 3, 3, 2):
        training.step(number)
        assert stats(training.models[0]).live_lease_bytes == 0
        training.check()

    def write():
        for model in training.models:
            for param in model.parameters():
                param.data.mul_(0.9)
        refresh(training.models[0])

    reset_stats(training.models[0])
    training.step(2, write)
    training.step(2, write)
    assert stats(training.models[0]).num_on_demand_gathers > 2  # what was gathered before the write is void
    training.check()


@ranks(2)
def test_a_microbatch_that_raises_leaves_nothing(mesh, rank, world_size):
    training = Training(mesh, rank, world_size)
    for _ in range(3):
        training.step(2)
    model = training.models[0]
    training.backward(IDS)
    assert stats(model).live_lease_bytes > 0  # the trap is armed: the next forward's first weight
    handle = model.blocks[1].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(IDS)
    handle.remove()
    assert stats(model).live_lease_bytes == 0
    training.backward(OTHERS)
    for optimizer in training.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    training.step(2)
    training.check()


@ranks(2)
def test_without_an_optimizer_nothing_waits_between_backwards(mesh):
    model, _ = pair(mesh)
    for _ in range(4):
        model(IDS).square().mean().backward()
        assert stats(model).live_lease_bytes == 0


@ranks(2)
def test_what_is_under_way_when_a_backward_drains(mesh, rank, world_size):
    """The next microbatch's first gather, issued before the last gradients were launched; and of reductions no more than
    the ring holds: all others were received on the way."""
    training = Training(mesh, rank, world_size)
    for _ in range(3):
        training.step(2)
    log = []
    gather, launch, drain = ShardedWeight.gather, Reducer.launch, Reducer.drain

    def note_gather(weight, kind, *options):
        log.append(("gather", weight.fqn, kind.name))
        return gather(weight, kind, *options)

    def note_launch(reducer, weight, *options):
        log.append(("launch", weight.fqn))
        return launch(reducer, weight, *options)

    def note_drain(reducer, *options):
        log.append(("drain", len(reducer.pending)))
        drain(reducer, *options)

    with (
        mock.patch.object(ShardedWeight, "gather", note_gather),
        mock.patch.object(Reducer, "launch", note_launch),
        mock.patch.object(Reducer, "drain", note_drain),
    ):
        training.backward(IDS)
    first = log.index(("gather", "embedding.weight", "FORWARD"), 1)
    launches = [place for place, (what, *_) in enumerate(log) if what == "launch"]
    assert len(launches) == training.models[0].num_weights and log[0] == ("gather", "embedding.weight", "FORWARD")
    assert first < launches[-2] and log[-1] == ("drain", 2) and launches[-1] == len(log) - 2
