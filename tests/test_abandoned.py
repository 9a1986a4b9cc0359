"""Who dies with communication in flight has to order the memory's next owner after it: nobody else will."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from gtp_dtensor import GTPStyle
from gtp_dtensor.members import weight_of
from gtp_dtensor.pending import Stage
from gtp_dtensor.schedule import Kind
from gtp_dtensor.transport import Transfer, collective
from gtp_dtensor.transport.symmetric import PeerReads


class InFlight:
    """In place of a reduction: what became of it."""

    def __init__(self):
        self.seen = []

    def abandon(self):
        self.seen.append("abandoned")

    def release(self):
        self.seen.append("released")


@pytest.fixture
def weight():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    model = nn.Sequential(nn.Linear(16, 16, bias=False))
    parallelize_module(model, init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",)), GTPStyle(min_numel=1))
    holder = [weight_of(model[0], "weight")]
    del model
    yield holder
    dist.destroy_process_group()


def test_reductions_that_die_with_their_model():
    stage, reductions = Stage(lambda reduction: None), [InFlight(), InFlight()]
    for reduction in reductions:
        stage.add(reduction)
    stage.receive(1)
    del stage
    gc.collect()
    assert [reduction.seen for reduction in reductions] == [["released"], ["abandoned"]]


def test_a_reduction_whose_sum_does_not_fit_is_released():
    def raises(reduction):
        raise RuntimeError("does not fit")

    stage, reduction = Stage(raises), InFlight()
    stage.add(reduction)
    with pytest.raises(RuntimeError, match="does not fit"):
        stage.receive()
    assert reduction.seen == ["released"]


@pytest.mark.parametrize("is_used", [False, True])
def test_a_gather_that_dies_with_its_model(weight, monkeypatch, is_used):
    seen = []
    monkeypatch.setattr(Transfer, "abandon", lambda transfer: seen.append(transfer.tensors[0].shape))
    (member,) = weight
    member.runtime.refresh_copies()
    member.next_lease = lease = member.gather(Kind.FORWARD, True)
    if is_used:
        lease.wait()
        member.runtime.drop(lease)
    weight.clear()
    del member, lease
    gc.collect()
    assert seen == ([] if is_used else [(16, 16)])


def test_pieces_that_die_with_their_weight(weight):
    weight[0]._pieces = pieces = InFlight()
    weight.clear()
    gc.collect()
    assert pieces.seen == ["abandoned"]


@pytest.mark.parametrize("was_waited_for", [False, True])
def test_an_abandoned_collective_is_waited_for_once(monkeypatch, was_waited_for):
    home, waits = (0, 0, 1), []
    monkeypatch.setattr(collective, "current_stream", lambda device_index: home)
    transfer = Transfer(SimpleNamespace(wait=lambda: waits.append(None)), home, (torch.ones(1),))
    if was_waited_for:
        transfer.wait()
    transfer.abandon()
    assert len(waits) == 1 and transfer.tensors == ()


def test_what_a_released_collective_wrote_is_free():
    """A GPU's work handle holds it, and a released lease may live as long as the gradient is computed beside it."""

    class Work:
        def __init__(self, result):
            self.result = result

        def wait(self):
            pass

    result = torch.ones(1)
    written, transfer = weakref.ref(result), Transfer(Work(result), None, (result,))
    del result
    transfer.wait()
    assert written() is not None
    transfer.release()
    assert written() is None
    transfer.release()  # of which nothing comes any more


def test_abandoned_peer_reads_are_waited_for_where_their_memory_goes():
    waits = []
    fabric = SimpleNamespace(wait=lambda lane, event: waits.append((lane, event)))
    transport = SimpleNamespace(fabric=fabric, free_events=[])
    reads = PeerReads(transport, "event", "home", ())
    reads.abandon()
    reads.abandon()
    assert waits == [("home", "event")] and transport.free_events == ["event"]
