"""Planned look-ahead: the plan from given times, and what a training step makes of it."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, schedule_table, stats, time_next_step
from gtp_dtensor.look_ahead import Gather, plan
from gtp_dtensor.members import model_runtimes
from gtp_dtensor.schedule import Kind, Use
from tests.harness import ranks


def forward(*times):
    """Uses of different weights in one forward, from (bytes, gather ns, compute ns)."""
    return [Gather(Use(index, Kind.FORWARD, index == 0), *one) for index, one in enumerate(times)]


def test_a_gather_is_issued_as_late_as_it_may():
    gathers = forward((1, 5, 10), (1, 5, 10), (1, 5, 10), (1, 35, 10), (1, 5, 10), (1, 5, 10))
    aheads, waits = plan(gathers, 100)
    # The long one occupies the wire from -10 on, so it and the two before it are issued at the beginning.
    assert aheads == [3, 2, 1, 1, 1, 1]
    # 5 for the first gather, then the wire is busy: 5, 10, 15, 20, 55.
    assert waits == [5, 0, 0, 15, 0, 0]


def test_the_budget_holds_but_for_the_next_use():
    gathers = forward((10, 5, 30), (10, 5, 30), (10, 5, 30), (10, 80, 30), (10, 5, 30))
    found = {budget: plan(gathers, budget) for budget in (1, 10, 20, 30, 1000)}
    assert [max(aheads) for aheads, _ in found.values()] == [1, 1, 2, 3, 3]
    # The long one is issued at the third use, the second, the first.
    assert [waits[3] for _, waits in found.values()] == [50, 50, 20, 0, 0]
    assert all(waits[0] == 5 for _, waits in found.values())


def test_a_plan_does_not_reach_beyond_a_pass():
    there = forward(*[(1, 50, 10)] * 3)
    back = [Gather(Use(index, Kind.BACKWARD, index == 2), 1, 50, 10) for index in (2, 1, 0)]
    aheads, _ = plan([*there, *back, *there], 1000)
    # From a forward into its backward, but not from a backward into the next forward.
    assert aheads == [5, 4, 3, 2, 1, 1, 2, 1, 1]
    assert plan([*back, *back], 1000)[0][:3] == [2, 1, 1]


class Net(nn.Module):
    """Linears of very different sizes."""

    def __init__(self):
        super().__init__()
        sizes = (8, 8, 256, 8, 8, 8)
        self.linears = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in zip(sizes, sizes[1:]))

    def forward(self, x):
        for linear in self.linears:
            x = linear(x)
        return x


def train(net, optimizer, num_steps, x):
    losses = []
    for _ in range(num_steps):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def largest_waiting(table):
    """Bytes of the gathers that were issued ahead of the next use and wait at one time, from the printed schedule."""
    return max(
        sum(row.num_bytes for row in table if row.issued_at is not None and row.issued_at <= now < row.position)
        for now in range(len(table))
    )


@ranks(2)
@pytest.mark.parametrize("budget", [100, 10_000, 1_000_000])
def test_a_training_step_follows_its_plan(mesh, rank, budget):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    found = []
    for options in ({}, {"look_ahead_bytes": budget}):
        torch.manual_seed(0)
        net = Net()
        parallelize_module(net, mesh, GTPStyle(GTPConfig(**options), min_numel=1))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        found.append(train(net, optimizer, 8, x))
    assert found[0] == found[1]
    (runtime,) = model_runtimes(net)
    assert runtime.timer is None
    aheads = runtime.schedule.period_aheads()
    table = schedule_table(net)
    assert len(aheads) == len(table) == 9 and None not in aheads
    assert all(row.waits_us is not None and row.computes_us > 0 for row in table[:-1])
    waiting = largest_waiting(table)
    next_bytes = max(row.num_bytes for row in table)
    assert waiting <= max(budget, next_bytes), (waiting, budget)
    if budget == 100:  # room for the next one only
        assert set(aheads) == {1}
    reset_stats(net)
    before = runtime.schedule.period_aheads()
    assert train(net, optimizer, 2, x) and runtime.schedule.period_aheads() == before
    counted = stats(net)
    on_demand = sum(row.issued_at == row.position for row in table)
    assert counted.num_on_demand_gathers == 2 * on_demand and counted.num_mispredictions == 0
    everyones = runtime.transport.exchange([ahead for ahead in before])
    assert everyones[0] == everyones[1]


@ranks(2)
def test_a_plan_ends_with_the_program_that_it_is_for(mesh, rank):
    net = Net()
    parallelize_module(net, mesh, GTPStyle(GTPConfig(look_ahead_bytes=10**6), min_numel=1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    train(net, optimizer, 7, x)
    (runtime,) = model_runtimes(net)
    assert None not in runtime.schedule.period_aheads()
    net.linears = net.linears[::2][:1]
    assert train(net, optimizer, 3, x)
    assert stats(net).live_lease_bytes == 0


@ranks(2)
def test_a_step_is_timed_on_request(mesh, rank):
    net = Net()
    parallelize_module(net, mesh, GTPStyle(min_numel=1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
    train(net, optimizer, 3, x)
    assert all(row.waits_us is None for row in schedule_table(net))
    time_next_step(net)
    train(net, optimizer, 3, x)
    table = schedule_table(net)
    assert all(row.waits_us >= 0 and row.computes_us > 0 for row in table[:-1]) and len(table) == 9
    assert "waits" in str(table)
    assert model_runtimes(net)[0].timer is None
