"""What the symmetric transport puts into a CUDA graph: only edges order it there, not the host. Streams are logged, and then
run in any order that the edges allow."""

import contextlib
import gc
import random
import sys
from dataclasses import dataclass, field
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import gtp_dtensor.domain
from gtp_dtensor import GTPConfig, GTPStyle, stats
from gtp_dtensor.block_graphs import GraphedBlocks
from gtp_dtensor.graph_capture import Runtimes, RuntimesReplay
from gtp_dtensor.transport import Traffic
from gtp_dtensor.transport.symmetric import SymmetricTransport
from tests.harness import ranks
from tests.models import MLP, WithEinsum
from tests.reference import assert_equal_to_reference, full_parameters, mean_square
from tests.thread_fabric import ThreadFabric


@dataclass
class Node:
    """Of a captured graph. ``words``: what it writes, or waits for and resets; numbers tell words of a rank's memory."""

    lane: int
    kind: str
    before: set[int] = field(default_factory=set)
    words: list[tuple[int, int]] = field(default_factory=list)
    value: int = 0


class LoggingFabric(ThreadFabric):
    """While ``nodes`` is a list, what lanes are given goes there and nothing happens."""

    nodes = None
    place_of = None  # address -> (rank, number)

    def __init__(self):
        super().__init__()
        self._of_captures = set()
        self.foreign = 0

    def start(self, place_of):
        self.nodes, self.place_of = [], place_of
        self._last, self._waits, self._events = {}, {}, {}

    def awaited(self, lane):
        """What the lane waits for next."""
        return self._waits.get(lane, set())

    def _node(self, lane, kind, words=(), value=0):
        before = self._waits.pop(lane, set())
        if lane in self._last:
            before.add(self._last[lane])
        self._last[lane] = len(self.nodes)
        self.nodes.append(Node(lane, kind, before, [self.place_of(word) for word in words], value))

    def record(self, event, lane):
        if self.nodes is None:
            self._of_captures.discard(id(event))
            return super().record(event, lane)
        self._of_captures.add(id(event))
        self._node(lane, "record")
        self._events[id(event)] = self._last[lane]

    def wait(self, lane, event):
        if self.nodes is None:
            assert id(event) not in self._of_captures, "eager code waits for an event of a capture"
            return super().wait(lane, event)
        if id(event) not in self._events:  # of eager code: a capture would fail
            self.foreign += 1
            return
        self._waits.setdefault(lane, set()).add(self._events[id(event)])

    def copy(self, to, source, num_bytes, lane):
        super().copy(to, source, num_bytes, lane) if self.nodes is None else self._node(lane, "copy")

    def writer(self, words, value):
        write = super().writer(words, value)
        return lambda lane: write(lane) if self.nodes is None else self._node(lane, "write", words, value)

    def taker(self, words, value, kind):
        take = super().taker(words, value, kind)

        def call(lane, number):
            assert (number is None) is (self.nodes is not None)  # the watchdog does not know what is captured
            take(lane, number) if self.nodes is None else self._node(lane, "take", words, value)

        return call

    def sum(self, lane, job):
        super().sum(lane, job) if self.nodes is None else self._node(lane, "sum")


def _mlp():
    return MLP((16, 24, 24, 24, 16), bias=False)


def _model(world_size, config, build=_mlp, **options):
    """(a model, its transport)."""
    made = []

    def choose(requested, mesh, device, name):
        made.append(SymmetricTransport(mesh.get_group(), device, name, LoggingFabric()))
        return made[-1]

    with mock.patch.object(gtp_dtensor.domain, "choose_transport", choose):
        torch.manual_seed(0)
        model = build()
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("gtp",))
        parallelize_module(model, mesh, GTPStyle(config, **{"min_numel": 30, **options}))
    (transport,) = made
    return model, transport


def _places(transport):
    """A function from addresses of words to (rank, number)."""
    ptrs = transport._control.ptrs

    def place_of(address):
        owner = max(ptr for ptr in ptrs if ptr <= address)
        return ptrs.index(owner), address - owner

    return place_of


def captured(world_size, config):
    """(nodes of one training step on this rank, the fabric)."""
    model, transport = _model(world_size, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        for _ in range(2):
            mean_square(model(torch.ones(2, 16))).backward()
        optimizer.step()
        optimizer.zero_grad()

    runtimes = Runtimes(model)
    for _ in range(2):
        step()
        runtimes.settle()
    transport.before_replay(Traffic.ALL)  # the caller comes after all lanes
    torch.distributed.barrier()
    transport.fabric.start(_places(transport))
    with runtimes.capturing(RuntimesReplay(runtimes)):
        step()
    nodes, transport.fabric.nodes = transport.fabric.nodes, None
    assert stats(model).live_lease_bytes == 0 and stats(model).num_pending == 0
    return nodes, transport.fabric


def order_of(nodes, seed):
    """All nodes, in a random order that their edges allow."""
    generator, done, order = random.Random(seed), set(), []
    waiting = set(range(len(nodes)))
    while waiting:
        ready = sorted(n for n in waiting if nodes[n].before <= done)
        # For long from one lane, so that lanes come far apart.
        lane = generator.choice(sorted({nodes[n].lane for n in ready}))
        for _ in range(generator.choice((1, 3, 50))):
            ready = sorted(n for n in waiting if nodes[n].before <= done and nodes[n].lane == lane)
            if not ready:
                break
            order.append(ready[0])
            done.add(ready[0])
            waiting.discard(ready[0])
    return order


def runs_through(graphs, order, num_replays=2):
    """Whether all ranks, each with one queue, come to the end of their graphs in this order."""
    words: dict[tuple[int, int], int] = {}
    queues = [order * num_replays for _ in graphs]
    at = [0] * len(graphs)
    moved = True
    while moved:
        moved = False
        for rank, nodes in enumerate(graphs):
            while at[rank] < len(queues[rank]):
                node = nodes[queues[rank][at[rank]]]
                if node.kind == "take":
                    if any(words.get(word, 0) != node.value for word in node.words):
                        break
                    words.update({word: 1 - node.value for word in node.words})
                elif node.kind == "write":
                    words.update({word: node.value for word in node.words})
                at[rank] += 1
                moved = True
    return all(place == len(queue) for place, queue in zip(at, queues))


@ranks(2)
@pytest.mark.parametrize("missing", [None, "parts", "room"])
def test_every_order_that_the_edges_allow_runs_through(rank, world_size, missing):
    config = GTPConfig(param_dtype=torch.bfloat16, graph_wgrad_ring_size=2)
    # Gradients travel in pieces: else a slot's last use was received before its next one, whatever is edged here.
    with mock.patch.multiple(gtp_dtensor.transport.symmetric, _MOST_SLOT_BYTES=256, _ALIGNMENT=64):
        nodes, fabric = captured(world_size, config)
    assert fabric.foreign == 0  # no event of eager code was waited for
    lanes = {node.lane for node in nodes}
    num_pieces = sum(node.kind == "sum" for node in nodes)
    assert len(lanes) == 4 and num_pieces > 2 * 8
    assert sum(node.kind == "take" for node in nodes) == 2 + 2 * num_pieces
    if missing is not None:
        drop_edges(nodes, missing)
    graphs = [None] * world_size
    torch.distributed.all_gather_object(graphs, nodes)
    assert len({tuple((n.lane, n.kind, frozenset(n.before)) for n in graph) for graph in graphs}) == 1
    stuck = sum(not runs_through(graphs, order_of(nodes, seed)) for seed in range(60))
    assert (stuck > 0) == (missing is not None), stuck


@ranks(2)
def test_all_lanes_begin_with_the_capture_and_join_it(rank, world_size):
    nodes, fabric = captured(world_size, GTPConfig())
    assert nodes[0].lane == 0 and all(node.before for node in nodes[1:])  # nothing begins by itself
    last = max(n for n, node in enumerate(nodes) if node.lane == 0)
    reached, todo = set(), [last, *fabric.awaited(0)]  # what the capturing stream would do next comes after all
    while todo:
        n = todo.pop()
        if n not in reached:
            reached.add(n)
            todo += nodes[n].before
    assert reached == set(range(len(nodes)))


def drop_edges(nodes, missing):
    """As if the capture relied on the host's order there: from telling to waiting for parts, or from giving room to
    waiting for room."""
    pushing, summing = 2, 3
    for place, node in enumerate(nodes):
        if node.kind != "take" or node.lane != (summing if missing == "parts" else pushing):
            continue
        other = pushing if missing == "parts" else summing
        node.before = {n for n in node.before if nodes[n].lane != other} | {
            max((n for n in range(place) if nodes[n].lane == node.lane), default=0)
        }


@ranks(2)
@pytest.mark.parametrize("place", [pytest.param(1, marks=pytest.mark.slow), 4, 6])
def test_a_capture_that_fails_leaves_no_trace(rank, world_size, place):
    """In the forward, in the backward, between microbatches: with gathers and reductions under way, of which nothing ran."""
    weights = []
    for fails in (False, True):
        model, transport = _model(world_size, GTPConfig(param_dtype=torch.bfloat16, look_ahead=2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runtimes = Runtimes(model)
        for number in range(5):
            if number == 3 and fails:
                runtimes.settle()
                schedules = runtimes.schedules()
                transport.fabric.start(_places(transport))
                with pytest.raises(RuntimeError, match="not when capturing"):
                    with runtimes.capturing(RuntimesReplay(runtimes)):
                        _fail_at(place, model)
                nodes, transport.fabric.nodes = transport.fabric.nodes, None
                assert any(node.kind == "copy" for node in nodes) and not transport.fabric.foreign
                runtimes.abandon(schedules)
                model.zero_grad()
                assert stats(model).live_lease_bytes == 0 and stats(model).num_pending == 0
            for microbatch in range(2):
                x = torch.randn(2, 16, generator=torch.Generator().manual_seed(10 * number + 2 * microbatch + rank))
                mean_square(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(full_parameters(model))
    assert_equal_to_reference(*weights, "weight")


def _fail_at(place, model):
    """Two microbatches, of which the layer in which so many calls, forwards and backwards together, were made before
    raises."""
    num_calls = 0

    def call(*_):
        nonlocal num_calls
        num_calls += 1
        if num_calls > place:
            raise RuntimeError("not when capturing")

    hooks = [layer.register_forward_hook(call) for layer in model.layers]
    hooks += [layer.register_full_backward_hook(call) for layer in model.layers]
    try:
        for _ in range(2):
            mean_square(model(torch.ones(2, 16))).backward()
    finally:
        for hook in hooks:
            hook.remove()


class _LoggingRecorder:
    """Captures into a fabric's log; replays do nothing."""

    def __init__(self, fabric, place_of):
        self.graphs = []
        self._fabric, self._place_of = fabric, place_of

    def apart(self):
        return contextlib.nullcontext()

    def prepare(self):
        pass

    def capture(self, step, failed, is_beside=False):
        self._fabric.start(self._place_of)
        result = step()
        self.graphs.append(self._fabric.nodes)
        self._fabric.nodes = None
        return lambda: None, result

    def mark(self):
        return mock.Mock()

    def beside(self, work, done):
        work()

    def release(self):
        pass


@ranks(2)
def test_graphs_of_blocks_wait_for_nothing_outside(rank, world_size):
    """Each of them is a capture of its own: events of others, and of eager code, mean nothing in it; nor do its own after it,
    also where autograd keeps gathered weights."""
    model, transport = _model(world_size, GTPConfig(look_ahead=2), lambda: WithEinsum(dim=24))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        mean_square(model(torch.ones(2, 6, 24))).backward()
        optimizer.step()
        optimizer.zero_grad()

    recorder = _LoggingRecorder(transport.fabric, lambda address: _places(transport)(address))
    blocks = GraphedBlocks(model, ["first", "mixer"], recorder=recorder, num_warmup_passes=2)
    for _ in range(4):
        step()
    assert blocks.is_captured and len(recorder.graphs) == 6 and transport.fabric.foreign == 0
    for nodes in recorder.graphs:
        assert nodes[0].lane == 0 and all(node.before for node in nodes[1:])
    fabric = transport.fabric
    # The lanes that do more than begin and end. The first forward gathers, for the second too; backwards need no weight, but
    # what autograd kept of it; reductions are graphs of their own.
    lanes = [{node.lane for node in nodes if node.kind != "record"} for nodes in recorder.graphs]
    beside = {fabric.pushing, fabric.summing}
    assert lanes == [{fabric.copying}, set(), set(), beside, set(), beside], lanes
    assert stats(model).num_pending == 0
    errors = []
    # What autograd kept dies while another stream is the current one than that of the captures.
    with mock.patch.object(transport.fabric, "current", lambda: transport.fabric.summing):
        with mock.patch.object(sys, "unraisablehook", errors.append):
            blocks.release()
            del blocks
            gc.collect()
    assert not errors
    step()
    assert stats(model).live_lease_bytes == 0
