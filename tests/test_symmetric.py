"""The symmetric transport's logic (order, fences, the ring of inboxes) on CPU ranks, whose streams are threads and
whose peer memory are mapped files. Its bytes on a GPU: test_gpu_symmetric.py."""

import contextlib
import gc
import threading
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import gtp_dtensor.domain
from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, set_requires_gradient_sync, stats
from gtp_dtensor.layout import RowCut
from gtp_dtensor.transport import CollectiveTransport, choice
from gtp_dtensor.transport.choice import Surroundings, reason_against
from gtp_dtensor.transport.inbox import pieces_of
from gtp_dtensor.transport.symmetric import SymmetricTransport
from gtp_dtensor.transport.watchdog import NUM_KINDS, Watchdog
from tests.harness import count_collectives, ranks
from tests.models import MLP
from tests.moe import MoEModel
from tests.reference import (
    assert_close_to_reference,
    assert_equal_to_reference,
    build_pair,
    full_gradients,
    full_parameters,
    local_slice,
    mean_square,
    replica_options,
    train_beside_reference,
)
from tests.test_experts import grids
from tests.test_experts import shard as shard_with_experts
from tests.thread_fabric import ThreadFabric

SIZES = (16, 33, 20, 5, 16)  # no rank count divides 33; of 5 rows, the last of 4 ranks has none
SLOW = pytest.mark.slow
LATE = 0.002  # seconds, for each copy or sum


@contextlib.contextmanager
def on_threads(**delays):
    """Domains made meanwhile get symmetric transports over threads; ``delays`` as in :class:`ThreadFabric`."""
    made = []

    def choose(requested, mesh, device, name):
        fabric = ThreadFabric()
        fabric.delays = delays
        made.append(SymmetricTransport(mesh.get_group(), device, name, fabric))
        return made[-1]

    with mock.patch.object(gtp_dtensor.domain, "choose_transport", choose):
        yield made


def _trained(mesh, config, rank, world_size, num_steps=4):
    """(weights, last gradients, losses) of training with microbatches of one, an evaluation between."""
    torch.manual_seed(0)
    model = MLP(SIZES)
    parallelize_module(model, mesh, GTPStyle(config, min_numel=30))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(num_steps):
        x = torch.randn(2 * world_size, SIZES[0], generator=torch.Generator().manual_seed(step))
        x = local_slice(x, rank, world_size)
        with torch.no_grad():
            model(x)
        loss = mean_square(model(x))
        loss.backward()
        losses.append(loss.item())
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model), gradients, losses, stats(model)


@ranks(2)
def test_memory_of_the_stand_in_stays_until_its_lanes_are_done():
    """Signals that nobody waits for come late; the process would die of one into memory that is gone."""
    fabric = ThreadFabric()
    shared = fabric.share(torch.distributed.group.WORLD, 4096)
    done = threading.Event()
    fabric._do(fabric.copying, lambda: time.sleep(0.2))
    fabric.writer(shared.ptrs, 1)(fabric.copying)
    fabric._do(fabric.copying, done.set)
    gone = weakref.ref(fabric)
    del fabric, shared
    gc.collect()
    assert gone() is None and not done.is_set() and done.wait(10)


@ranks(3)
@pytest.mark.parametrize(
    "late", ["copying", "summing", pytest.param(None, marks=SLOW), pytest.param("pushing", marks=SLOW)]
)
def test_bit_for_bit_as_collectives(mesh, rank, world_size, late):
    """Both sum in float32 in rank order. One stream of one rank is late."""
    config = GTPConfig(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.bfloat16,
        reduce_scatter_with_fp32_accumulation=True,
        look_ahead=2,
    )
    *expected, _ = _trained(mesh, config, rank, world_size)
    with on_threads(**({late: LATE} if rank == 1 and late else {})) as made:
        *found, s = _trained(init_device_mesh("cpu", (world_size,), mesh_dim_names=("gtp",)), config, rank, world_size)
    assert made and made[0].fabric.calls["copy"] and made[0].fabric.calls["sum"]
    assert s.num_fences > 0 and s.symmetric_bytes > 0 and s.num_pending == 0 and s.live_lease_bytes == 0
    assert found[2] == expected[2]
    assert_equal_to_reference(found[0], expected[0], "weight")
    assert_equal_to_reference(found[1], expected[1], "gradient")


def _shard_dense(model, options, gtp_mesh, **config):
    parallelize_module(model, gtp_mesh, GTPStyle(GTPConfig(**config), min_numel=30, **options))


@ranks(4)
@pytest.mark.parametrize(
    "kind", ["dps", pytest.param("dpr", marks=SLOW), "features of experts", "ring of one, in pieces"]
)
def test_beside_replicas_and_experts(rank, world_size, kind):
    with on_threads() as made:
        if kind == "features of experts":  # 6 experts on 4 ranks: dim 1 is cut
            model, reference = build_pair(lambda: MoEModel(2, num_experts=6))
            shard_with_experts(model, *grids(world_size, 4, 4))
            peers, features = world_size, (5, 8)
        else:
            model, reference = build_pair(lambda: MLP(SIZES))
            peers, features = world_size, (SIZES[0],)
            if kind in ("dps", "dpr"):
                mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(kind, "gtp"))
                _shard_dense(model, replica_options(mesh), mesh["gtp"])
            else:
                mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
                with mock.patch.multiple(gtp_dtensor.transport.symmetric, _MOST_SLOT_BYTES=128, _ALIGNMENT=64):
                    _shard_dense(model, {}, mesh, graph_wgrad_ring_size=1)
                    model(torch.zeros(1, SIZES[0])).sum().backward()  # makes the inbox
                    model.zero_grad()
        train_beside_reference(
            model,
            reference,
            lambda step: torch.randn(8, *features, generator=torch.Generator().manual_seed(step)),
            rank=rank,
            world_size=peers,
            num_microbatches=2,
            syncs_last_only=kind in ("dps", "dpr"),
        )
    s = stats(model)
    assert made and s.num_fences > 0 and s.num_pending == 0 and s.live_lease_bytes == 0
    if kind.startswith("ring"):
        assert made[0].fabric.calls["sum"] > 2 * s.num_reductions  # in several pieces each


@ranks(2)
def test_weights_that_travel_quantized(mesh, rank, world_size):
    weights = []
    for context in (contextlib.nullcontext([]), on_threads(copying=LATE if rank else 0.0)):
        with context as made:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(64, 96, bias=False), nn.Linear(96, 64, bias=False))
            mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("gtp",))
            parallelize_module(model, mesh, GTPStyle(GTPConfig(wire_format="mxfp8"), min_numel=30))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2 * step + rank))
                mean_square(model(x)).backward()
                optimizer.step()
                optimizer.zero_grad()
            weights.append(full_parameters(model))
    assert made and made[0].fabric.calls["copy"] > 0 and stats(model).num_quantizations > 0
    assert_equal_to_reference(weights[1], weights[0], "weight")


@ranks(2)
def test_counts_of_a_step(mesh, rank, world_size):
    """No collective for sharded weights, two fences, no new event, no gather twice, no more calls into the driver than it
    takes: a gather records two events and waits for one, and its reader for the other; a reduction records three, waits for
    two, signals and takes twice, and its reader waits once."""
    with on_threads() as made:
        model = MLP((16, 32, 32, 16))
        parallelize_module(model, mesh["gtp"], GTPStyle(GTPConfig(), min_numel=30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        for micro in range(2):
            set_requires_gradient_sync(model, micro == 1)
            model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):  # the third is the first one that looks beyond a microbatch
        step()
    (transport,) = made
    reset_stats(model)
    events, num_bytes = transport.num_events_created, transport.num_bytes
    transport.fabric.calls.clear()
    with count_collectives() as log:
        for _ in range(3):
            step()
    s = stats(model)
    calls, num_gathers, num_reductions = (
        transport.fabric.calls,
        s.num_forward_gathers + s.num_backward_gathers,
        3 * 2 * 3,
    )
    assert calls["record"] <= 2 * num_gathers + 3 * num_reductions + 2 * s.num_fences
    assert calls["wait"] == 2 * num_gathers + 3 * num_reductions + s.num_fences
    assert calls["signal"] == calls["take"] == 2 * num_reductions + s.num_fences
    assert calls["copy"] == world_size * num_gathers + (world_size - 1) * num_reductions
    assert calls["sum"] == num_reductions
    assert s.num_fences == 2 * 3
    assert transport.num_events_created == events and transport.num_bytes == num_bytes == s.symmetric_bytes
    assert log.count("all_gather") == log.count("reduce_scatter") == log.count("all_to_all") == 0
    assert s.num_small_reductions == log.count("all_reduce")  # of biases
    assert s.num_reductions == num_reductions and s.gather_bytes > 0


@ranks(2)
def test_a_backward_that_raised_leaves_nothing_behind(mesh, rank, world_size):
    """Its gradients on their way are received and dropped, the ring goes on, and a deleted model gives its memory back."""
    gradients = []
    for context in (contextlib.nullcontext([]), on_threads(summing=LATE)):
        with context as made:
            torch.manual_seed(0)
            model = MLP((16, 32, 32, 16))
            mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("gtp",))
            parallelize_module(model, mesh, GTPStyle(min_numel=30))
        y = model.layers[0](torch.ones(2, 16))
        y.register_hook(_raising)
        with pytest.raises(ZeroDivisionError):
            model.layers[2](model.layers[1](y)).sum().backward()
        model.zero_grad()
        model(torch.full((2, 16), rank + 1.0)).sum().backward()
        gradients.append(full_gradients(model))
    assert_equal_to_reference(gradients[1], gradients[0], "gradient")
    (transport,) = made
    num_bytes = transport.num_bytes
    del model, y
    gc.collect()
    shards = 4 * (16 * 32 + 32 * 32 + 32 * 16) // 2
    assert transport.num_bytes == num_bytes - shards


def _raising(grad):
    raise ZeroDivisionError


@ranks(2)
def test_float64_gradients_are_left_to_collectives(mesh, rank, world_size):
    with on_threads() as made:
        model, reference = build_pair(lambda: MLP((16, 32, 16)).double())
        parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30))
    x = torch.randn(4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mean_square(model(local_slice(x, rank, world_size))).backward()
    mean_square(reference(x)).backward()
    assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient", 1e-14)
    (transport,) = made
    assert transport.fabric.calls["copy"] and not transport.fabric.calls["sum"]
    (line,) = transport.unserved({torch.float64, torch.float32})
    assert line == "mesh axis 'gtp': gradients in float64 are reduced by collectives, not in symmetric memory"


# ---- races: each signal is needed


class _Rewritten(nn.Module):
    """Layers whose weights are written before each forward."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))

    def forward(self, x):
        return torch.stack([layer(x) for layer in self.layers])


def _wrong_forwards(mesh, num_steps=8):
    """How many forwards, of those after a write each, read something else than all ranks' last values."""
    model = _Rewritten()
    parallelize_module(model, mesh, GTPStyle(GTPConfig(), min_numel=30))
    wrong = 0
    for step in range(num_steps):
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(float(step + 1))
            wrong += bool((model(torch.eye(64)) != step + 1).any())
    return wrong


def polite(transport, table):
    """A signal as the table's, but one that is never given twice before it is taken: so what lacks another signal reads
    wrong values, and does not wait for ever."""
    words = [transport._word(peer, table, transport.rank) for peer in transport._peers]
    give = transport.fabric.taker(words, 0, 0)
    return lambda lane: give(lane, 0)


@ranks(2)
@pytest.mark.parametrize("missing", [None, "before", "after"])
def test_each_fence_is_needed(mesh, rank, world_size, missing):
    """One rank reads late, so that the other could rewrite too early; that one rewrites late, so that the first could
    read too early."""
    before, after = SymmetricTransport._before_rewrite, SymmetricTransport._after_rewrite

    def before_late_writing(self):
        if missing is not None:
            self._say_read, self._say_written = polite(self, 0), polite(self, 1)
        if missing != "before":
            before(self)
            time.sleep(5 * LATE * rank)

    def perhaps_after(self):
        if missing != "after":
            after(self)

    patched = mock.patch.multiple(SymmetricTransport, _before_rewrite=before_late_writing, _after_rewrite=perhaps_after)
    with on_threads(**({"copying": LATE} if rank == 0 else {})), patched:
        wrong = torch.tensor(_wrong_forwards(mesh["gtp"]))
    torch.distributed.all_reduce(wrong)
    assert (wrong > 0) == (missing is not None), wrong


def _weights_after_backwards(mesh, rank, num_steps=4):
    torch.manual_seed(0)
    model = MLP((24, 24, 24, 24, 24, 24))
    config = GTPConfig(graph_wgrad_ring_size=1, weight_prefetch=False)
    parallelize_module(model, mesh, GTPStyle(config, min_numel=30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        x = torch.randn(2, 24, generator=torch.Generator().manual_seed(2 * step + rank))
        mean_square(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


@ranks(2)
@pytest.mark.parametrize(
    "missing, late", [(None, "pushing"), (None, "summing"), ("parts", "pushing"), ("room", "summing")]
)
def test_each_signal_of_the_inbox_is_needed(mesh, rank, world_size, missing, late):
    """Without the one a receiver sums what has not arrived; without the other a sender overwrites what was not."""
    expected = _weights_after_backwards(mesh["gtp"], rank)
    new_slot = SymmetricTransport._new_slot

    def careless(self, shared, number, *args):
        slot = new_slot(self, shared, number, *args)
        if missing is not None:
            slot.take_room, slot.tell = lambda lane, detail: None, polite(self, 2 + 2 * number)
        if missing == "parts":  # then the words for room would go out of step
            slot.take_parts, slot.tell = lambda lane, detail: None, lambda lane: None
        return slot

    with (
        on_threads(**({late: 0.02} if rank == 1 else {})),
        mock.patch.object(SymmetricTransport, "_new_slot", careless),
    ):
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("gtp",))
        weights = _weights_after_backwards(mesh, rank)
    wrong = torch.tensor(any(not torch.equal(weights[name], expected[name]) for name in expected), dtype=torch.int)
    torch.distributed.all_reduce(wrong)
    assert bool(wrong) == (missing is not None)


@ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_peer_that_does_not_come_ends_the_wait(mesh, rank, world_size, where):
    with on_threads(), mock.patch.object(SymmetricTransport, "_timeout_seconds", lambda self: 0.4):
        model = MLP((16, 32, 16))
        parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30))
        model(torch.ones(2, 16)).sum().backward()  # shares memory, which is a collective
        what = "until all have read"
        if where == "backward":
            y = model(torch.ones(2, 16)).sum()
            what = r"for parts of the gradient of layers\.\d\.weight"
        if rank == 0:
            message = rf"axis 'gtp' of size 2, rank 0: waited 0 s.*{what}.*rank\(s\) 1: they died"
            with pytest.raises(RuntimeError, match=message):
                model(torch.ones(2, 16)) if where == "forward" else y.backward()
    torch.distributed.barrier()


def test_the_watchdog_lets_go_of_what_is_over():
    class Fabric:
        progress, message = [0] * NUM_KINDS, None

        def abort(self, message):
            self.message = message

    class Owner:
        def timeout(self):
            return 5.0

        def describe(self, what, detail, seconds):
            return f"{what} {detail}"

    owner, fabric = Owner(), Fabric()
    with mock.patch("threading.Thread"):
        dog = Watchdog(fabric, owner.timeout, owner.describe)
    first = dog.expect(2, "first", "")
    assert dog.look(0.0) == 1.0 and dog.look(4.0) == 1.0
    fabric.progress[2] = first
    dog.expect(2, "second", "of w")
    assert dog.look(6.0) == 1.0 and dog.look(10.9) == 1.0  # its own time begins when it is the oldest
    assert fabric.message is None
    assert dog.look(11.1) is None and fabric.message == "second of w"


# ---- arithmetic and choice


@pytest.mark.parametrize("num_rows, dim", [(7, 0), (8, 0), (3, 0), (10, 1)])
@pytest.mark.parametrize("most", [512, 15, 7, 4])
def test_pieces_are_all_rows_once(num_rows, dim, most):
    size = 4
    shape = torch.Size((num_rows, 3)) if dim == 0 else torch.Size((5, num_rows, 3))
    cut = RowCut(num_rows, size, 1, dim)
    grad = torch.arange(float(shape.numel())).view(shape)
    for rank in range(size):
        rows = grad.narrow(dim, *cut.rows_of(rank)).reshape(-1)
        found = torch.full_like(rows, -1)
        for piece in pieces_of(cut, shape, size, most):
            start, width = piece.parts[rank]
            assert width * piece.num_runs <= most
            own = grad.view(-1).as_strided((piece.num_runs, width), (piece.run_stride, 1), start).reshape(-1)
            first = piece.first_run * (rows.numel() // piece.num_runs_in_all) + piece.first
            assert (found[first : first + own.numel()] == -1).all()
            found[first : first + own.numel()] = own
        assert torch.equal(found, rows)


def test_what_the_choice_depends_on():
    uuids = ("a", "b", "c")
    good = [Surroundings("host", one, frozenset(set(uuids) - {one})) for one in uuids]
    assert reason_against(good) is None
    elsewhere = Surroundings("other host", "c", frozenset("ab"))
    assert reason_against([*good[:2], elsewhere]) == "ranks 0 and 2 are on different hosts"
    unlinked = Surroundings("host", "c", frozenset("a"))
    assert reason_against([*good[:2], unlinked]) == "the GPUs of ranks 1 and 2 do not reach each other over NVLink"
    assert reason_against([good[0], good[0]]) == "ranks 0 and 1 share one GPU"
    assert reason_against([good[0], good[0]], may_share=True) is None
    lacking = Surroundings("host", "b", frozenset("ac"), "no driver")
    assert reason_against([good[0], lacking, good[2]]) == "rank 1: no driver"
    assert "at most 72" in reason_against([good[0]] * 73, may_share=True)


@ranks(2)
def test_what_cannot_be_served_is_refused_by_name(mesh):
    with pytest.raises(
        ValueError, match=r"'symmetric' on mesh axis 'gtp' of size 2: it needs CUDA devices.*'collective'"
    ):
        parallelize_module(nn.Linear(64, 64), mesh["gtp"], GTPStyle(GTPConfig(transport="symmetric")))


@ranks(2)
@pytest.mark.parametrize("fails_on, fails_at", [(None, None), (1, "fabric"), (1, "memory")])
def test_auto_is_symmetric_where_all_ranks_can(mesh, rank, fails_on, fails_at):
    """And collective where sharing memory fails on one of them, which the others cannot know."""
    built = []

    def build(*args, at="memory"):
        if rank == fails_on and at == fails_at:
            raise RuntimeError("pidfd_getfd: Operation not permitted\nand where that came from")
        built.append(at)
        return "symmetric"

    with (
        mock.patch.object(choice, "_reason_against", lambda *args, **options: None),
        mock.patch.object(choice, "_symmetric", build),
        mock.patch.object(choice, "_fabric", lambda device: build(at="fabric")),
        mock.patch.object(choice.logger, "info") as info,
    ):
        found = choice.choose_transport("auto", mesh, torch.device("cpu"), "gtp")
    if fails_at == "fabric":
        assert "memory" not in built
    if fails_on is None:
        assert found == "symmetric"
    else:
        assert type(found) is CollectiveTransport
    assert info.call_count == (rank == 0)
    if rank == 0:
        text, *values = info.call_args.args
        message = text % tuple(values)
        assert ("rank 1 could not share memory: pidfd_getfd: Operation not permitted" in message) is (fails_on == 1)
        assert "mesh axis 'gtp' of size 2: transport 'auto' is" in message and "where that" not in message
