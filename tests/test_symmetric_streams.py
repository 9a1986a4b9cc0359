"""What else writes gradients, and which streams wait for what, where a program has several that compute; on a CPU."""

import contextlib
import copy
import inspect
import io
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPConfig, GTPStyle, stats
from gtp_dtensor.grad_hooks import has_hooks, wants_gradient_returned
from gtp_dtensor.transport.choice import Surroundings, reason_against
from gtp_dtensor.transport.collective import Transfer
from gtp_dtensor.transport.symmetric import PeerReads, SymmetricTransport, Ticket
from tests.harness import ranks
from tests.models import MLP
from tests.reference import assert_close_to_reference, build_pair, full_gradients, local_slice, mean_square
from tests.test_block_graphs import blocks_of, build, trained
from tests.test_graphs import training
from tests.test_symmetric import on_threads
from tests.test_wires import sharded_weight

HOME, OTHER = 10, 11


def _with_penalty(model, x):
    """A loss with terms that operators on parameters make, before and after the model's own in the graph."""
    params = [param for param in model.parameters() if param.dim() > 1]
    whole = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in params]
    first = sum(param.square().sum() for param in whole)
    return 0.1 * first + mean_square(model(x)) + sum(param.sin().sum() for param in whole)


@ranks(2)
@pytest.mark.parametrize("transport", ["collective", "sums late", "pushes late"])
def test_what_autograd_adds_comes_after_the_sums(rank, world_size, transport):
    """The sums go into ``.grad`` on a stream of their own, and autograd adds a penalty's gradient there by itself."""
    kind = {"sums late": "summing", "pushes late": "pushing"}.get(transport)
    with contextlib.nullcontext() if kind is None else on_threads(**{kind: 0.01}) as made:
        model, reference = build_pair(lambda: MLP((16, 32, 32, 16)))
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("gtp",))
        parallelize_module(model, mesh, GTPStyle(GTPConfig(graph_wgrad_ring_size=8), min_numel=30))
    for step in range(2):  # into a new gradient, and to one that is there
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
        _with_penalty(model, local_slice(x, rank, world_size)).backward()
        _with_penalty(reference, x).backward()
        assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient")
    assert made is None or made[0].fabric.calls["sum"] == 2 * 3
    assert stats(model).num_pending == 0


@ranks(2)
def test_the_hook_that_orders_them_is_nobody_elses(mesh, rank, world_size):
    """Sums still go straight into ``.grad`` with it, and hooks of a user's get the reduced gradient beside it."""
    with on_threads() as made:
        model = MLP((16, 32, 16))
        parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30))
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()
    param = model.layers[0].weight
    assert len(param._backward_hooks) == 1 and not has_hooks(param) and not wants_gradient_returned(param)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(param, io.BytesIO())
    assert copy.deepcopy(param)._backward_hooks is None
    seen = []
    handle = param.register_hook(seen.append)
    assert has_hooks(param) and wants_gradient_returned(param)
    before = param.grad.full_tensor().clone()
    model(torch.ones(2, 16)).sum().backward()
    (grad,) = seen
    assert torch.allclose(param.grad.full_tensor(), before + grad.full_tensor())
    handle.remove()
    assert not wants_gradient_returned(param) and made[0].fabric.calls["sum"] == 2 * 3


class _Log:
    """A fabric whose current stream is ``stream``."""

    def __init__(self, stream):
        self.stream, self.calls = stream, []

    def current(self):
        return self.stream

    def record(self, event, lane):
        self.calls.append(("record", lane))

    def wait(self, lane, event):
        self.calls.append(("wait", lane))


@pytest.mark.parametrize("stream", [HOME, OTHER])
@pytest.mark.parametrize("kind", [PeerReads, Ticket])
def test_memory_goes_back_after_its_readers_on_another_stream(kind, stream):
    """The allocator gives it to what its own stream does next."""
    transport = SimpleNamespace(fabric=_Log(stream), free_events=[])
    flight = kind(transport, "event", HOME, ()) if kind is PeerReads else kind(transport, "event", HOME)
    flight.wait()
    flight.release()
    flight.release()
    assert transport.free_events == ["event"]
    calls = transport.fabric.calls
    if stream == HOME:
        assert set(calls) == {("wait", HOME)}
    else:
        assert calls[0] == ("wait", OTHER) and calls[-2:] == [("record", OTHER), ("wait", HOME)]


@ranks(2)
def test_a_reduction_knows_the_stream_that_it_was_started_on(mesh, rank, world_size):
    with on_threads() as made:
        model = MLP((16, 32, 16))
        parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30))
    weight = sharded_weight(model.layers[0])
    (transport,) = made
    grad, out = torch.full((32, 16), rank + 1.0), torch.zeros(16, 16)
    ticket = transport.reduce_rows(weight, grad, out, 1.0, False)
    transport.fabric.calls.clear()
    with mock.patch.object(transport.fabric, "current", lambda: transport.fabric.copying):
        ticket.release()
    assert transport.fabric.calls == {"wait": 2, "record": 1}  # which the computing one has passed then
    assert (out == 3.0).all()


def test_a_collectives_memory_goes_back_after_its_readers_on_another_stream():
    """A stream is found by its three numbers: torch takes them by name only."""
    calls = []

    class Stream:
        signature = inspect.signature(torch.cuda.Stream.__new__)

        def __init__(self, *args, **kwargs):
            self.numbers = self.signature.bind(Stream, *args, **kwargs).arguments["kwargs"]

        def record_event(self):
            calls.append("recorded")
            return "event"

        def wait_event(self, event):
            calls.append((self.numbers, event))

    work = SimpleNamespace(wait=lambda: calls.append("work"))
    home = dict(stream_id=3, device_index=0, device_type=1)
    transfer = Transfer(work, tuple(home.values()), ())
    transfer._is_done = True
    with (
        mock.patch("torch.cuda.Stream", Stream),
        mock.patch("torch.cuda.current_stream", lambda index: Stream(stream_id=7)),
        mock.patch("torch.cuda.stream", lambda stream: contextlib.nullcontext()),
        mock.patch("gtp_dtensor.transport.collective.current_stream", lambda index: (7, 0, 1)),
    ):
        transfer.release()
    assert calls == ["recorded", "work", (home, "event")]


@ranks(2)
def test_captures_that_fail_at_different_places_leave_the_ring_in_step(mesh, rank, world_size):
    with on_threads() as made, mock.patch.object(SymmetricTransport, "_timeout_seconds", lambda self: 5.0):
        model, reference = build_pair(lambda: MLP((16, 32, 32, 16)))
        parallelize_module(model, mesh["gtp"], GTPStyle(GTPConfig(graph_wgrad_ring_size=3), min_numel=30))
        for step in range(3):
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            mean_square(model(local_slice(x, rank, world_size))).backward()
            mean_square(reference(x)).backward()
            assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient")
            made[0].begin_capture()
            if rank == 0:
                made[0]._inbox.next_slot()
            made[0].abandon_capture()


@ranks(2)
def test_the_watchdog_can_name_ranks_whose_groups_are_gone(mesh):
    with on_threads() as made:
        parallelize_module(MLP((16, 32, 16)), mesh["gtp"], GTPStyle(min_numel=30))
    (transport,) = made
    gone = mock.patch("torch.distributed.get_process_group_ranks", side_effect=KeyError)
    with gone, mock.patch.object(transport.fabric, "read", lambda words: None):
        message = transport._describe(transport._take_read, "", 5.0)
    assert f"rank {transport.rank}: waited 5 s" in message and f"rank(s) {1 - transport.rank}: they died" in message


def test_a_process_that_sees_one_gpu_is_told_so():
    alone = [Surroundings("host", one, is_alone=True) for one in "ab"]
    reason = reason_against(alone)
    assert reason.startswith("rank 1 sees its own GPU only, and not that of rank 0 (CUDA_VISIBLE_DEVICES")
    one_of_two = [alone[0], Surroundings("host", "b", frozenset("a"))]
    assert reason_against(one_of_two).startswith("rank 0 sees its own GPU only, and not that of rank 1")


@ranks(2)
def test_what_autograd_adds_comes_after_replays_that_add_too(mesh, rank, world_size):
    model = build(mesh)
    step, _ = training(model)
    blocks = blocks_of(model)
    trained(model, step, rank, world_size, 3)
    assert blocks.is_captured
    param = model.layers[1].attention.wq.weight
    weight = sharded_weight(model.layers[1].attention.wq)
    waits = []
    replay = SimpleNamespace(weights={weight}, num_gradients=1, wait=lambda: waits.append("wait"), release=lambda: None)
    replays = weight.runtime.reducer.replays
    replays.add(replay)
    model.layers[0].attention.wq.weight.full_tensor().sum().backward()
    assert not waits  # they bring nothing for that one
    param.full_tensor().sum().backward()
    assert waits == ["wait"]
    replays.in_flight.clear()


@ranks(2)
@pytest.mark.parametrize("late", ["copying", "pushing"])
def test_both_fences_hold_for_our_own_rows_too(mesh, rank, world_size, late):
    """A gather that nobody waited for yet has the rows of before; one from another stream than wrote has the new ones."""
    with on_threads(**{late: 0.05 if rank == 0 else 0.0}) as made:
        model = MLP((16, 32, 16))
        parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30))
        model(torch.ones(2, 16))
    (transport,), weight = made, sharded_weight(model.layers[0])
    fabric, shard = transport.fabric, weight.compute_shard
    old, new = shard.clone(), torch.full_like(shard, 99.0)
    before, after = (torch.zeros(weight.buffer_shape) for _ in range(2))
    reads = transport.all_gather(before, shard)
    with mock.patch.object(fabric, "current", lambda: fabric.summing), transport.rewriting([weight]):
        fabric.copy(shard.data_ptr(), new.data_ptr(), new.nbytes, fabric.summing)
    others = transport.all_gather(after, shard)
    reads.wait()
    others.wait()
    own = slice(16 * rank, 16 * (rank + 1))
    assert torch.equal(before[own], old) and not (before == 99.0).any() and (after == 99.0).all()
    reads.release()
    others.release()
