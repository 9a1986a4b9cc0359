"""What crosses the borders of graphs of blocks, over a stand-in (see graph_stand_in.py) that puts off reductions for as long as
nobody waits for them: gathers for the next graph, and gradients in a ring. On a GPU: test_block_borders_gpu.py."""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import gtp_dtensor.domain
from gtp_dtensor import GraphError, GTPConfig, GTPStyle, stats
from gtp_dtensor.graph_borders import PendingReplay, RingWriter
from gtp_dtensor.graphed_block import Graph
from gtp_dtensor.members import weight_of
from gtp_dtensor.transport import Traffic
from gtp_dtensor.transport.symmetric import SymmetricTransport
from tests.graph_stand_in import BlockStandIn
from tests.harness import ranks
from tests.moe import MoEModel
from tests.reference import assert_equal_to_reference, full_gradients, full_parameters, local_slice
from tests.test_block_graphs import NUM_LAYERS, blocks_of, build, trained
from tests.test_experts import grids
from tests.test_experts import shard as shard_with_experts
from tests.test_gpu import poisoned_memory
from tests.test_graphs import slow, tokens_of, training
from tests.test_wires import sharded_weight
from tests.thread_fabric import ThreadFabric


class Watch:
    """Looks at each replay of a graph that computes, just before it.

    Attributes:
        outstanding: of each backward of a block: how many blocks' reductions have not run when it is given, and when what it
            waits for has.
        num_poisoned: slots and buffers that were NaN meanwhile.
    """

    def __init__(self, blocks, poisons=False):
        self.blocks, self.poisons = blocks, poisons
        self.outstanding, self.num_poisoned = [], 0

    def __enter__(self):
        give, watch = Graph.give, self

        def watched_give(graph):
            if graph._owner is watch.blocks and not graph.part.reduces:
                watch.poison(graph)
            if graph.part.ring is not None:
                before = len(watch.blocks.recorder.put_off)
                inner, graph._run = graph._run, lambda: watch.note(before, inner)
                try:
                    return give(graph)
                finally:
                    graph._run = inner
            return give(graph)

        self._patch = mock.patch.object(Graph, "give", watched_give)
        self._patch.start()
        return self

    def __exit__(self, *_):
        self._patch.stop()

    def note(self, before, inner):
        self.outstanding.append((before, len(self.blocks.recorder.put_off)))
        inner()

    def poison(self, graph):
        """What nobody may read any more: slots whose reductions ran, and gathered weights but those for this graph."""
        if not self.poisons:
            return
        marks = [mark for _, mark in self.blocks.recorder.put_off]
        places = [place for _, place in graph.part.taken._left.values()] if graph.part.taken else []
        read = {buffer.data_ptr() for place in places for buffer in place.buffers}
        free = [b for b in self.blocks.border.buffers() if b.data_ptr() not in read]
        free += [s.memory for s in self.blocks.ring.slots() if s.reader is None or s.reader.mark not in marks]
        for memory in free:
            memory.view(-1).view(torch.uint8).fill_(255)  # NaN
        self.num_poisoned += len(free)


def run(mesh, rank, world_size, config, is_graphed, num_microbatches=2, poisons=False, **options):
    """(losses and norms, weights, gradients of a last backward), the blocks, what was watched."""
    model = build(mesh, config, **options)
    step, _ = training(model)
    blocks = blocks_of(model) if is_graphed else None
    values = trained(model, step, rank, world_size, 2, num_microbatches)
    poison = poisoned_memory() if poisons else contextlib.nullcontext()  # leases at their ends
    with poison, Watch(blocks, poisons) if is_graphed else contextlib.nullcontext() as watch:
        values += trained(model, step, rank, world_size, 3, num_microbatches, first=2)
        model(tokens_of(50, rank, world_size)[0]).square().mean().backward()
    assert stats(model).num_pending == 0
    if is_graphed:
        assert blocks.is_captured and blocks.num_eager == 0
    return (values, full_parameters(model), full_gradients(model)), blocks, watch


def assert_same(one, other):
    assert one[0] == other[0]
    assert_equal_to_reference(one[1], other[1], "weight")
    assert_equal_to_reference(one[2], other[2], "gradient")


# ---- reductions


@ranks(2)
@pytest.mark.parametrize(
    "ring_size, recompute, wire",
    [(1, False, "bf16"), (2, True, "bf16"), slow(2, True, "fp8_rowwise"), slow(3, False, "fp8_block")],
)
def test_reductions_run_beside_the_next_graph(mesh, rank, world_size, ring_size, recompute, wire):
    """As many blocks' as there are slots, less the one that is written; with NaN in all that is not in use."""
    config = GTPConfig(param_dtype=torch.bfloat16, graph_wgrad_ring_size=ring_size, wire_format=wire)
    expected, *_ = run(mesh, rank, world_size, config, False, recompute=recompute)
    found, blocks, watch = run(mesh, rank, world_size, config, True, recompute=recompute, poisons=True)
    assert_same(found, expected)
    num_backwards = 2 * (5 - 1) - 1  # of the model: one step is warm-up, and a last one
    of_one = [(min(n, ring_size), min(n, ring_size - 1)) for n in range(NUM_LAYERS)]
    assert watch.outstanding == num_backwards * of_one
    assert watch.num_poisoned > 0 and blocks.num_late_gathers == 0
    assert len(blocks.ring.slots()) == 7 * ring_size  # roles of weights in a block


@ranks(2)
def test_a_slot_that_is_written_too_early_is_seen(mesh, rank, world_size):
    """That the test above can fail: were a graph not to wait for the readers of its slots, gradients would be wrong."""
    config = GTPConfig()
    expected, *_ = run(mesh, rank, world_size, config, False)
    wait = PendingReplay.wait

    def only_at_the_end(self):
        # The third block's graph writes the first one's slots.
        if not torch._C._current_graph_task_id() != -1:
            wait(self)

    with mock.patch.object(PendingReplay, "wait", only_at_the_end):
        found, *_ = run(mesh, rank, world_size, config, True)
    assert found[0] != expected[0]


@ranks(2)
def test_reductions_that_are_not_asynchronous(mesh, rank, world_size):
    config = GTPConfig(async_reduction=False)
    expected, *_ = run(mesh, rank, world_size, config, False)
    found, _, watch = run(mesh, rank, world_size, config, True)
    assert_same(found, expected)
    assert set(watch.outstanding) == {(0, 0)}


class _Stages(nn.Module):
    """Weights of the same role in one module; or one weight that is used three times."""

    def __init__(self, is_tied):
        super().__init__()
        self.stage = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)])
        self.head = nn.Linear(16, 16, bias=False)
        if is_tied:
            self.stage[2] = self.stage[1] = self.stage[0]

    def forward(self, x):
        return self.head(self.stage(x))


@ranks(2)
@pytest.mark.parametrize("is_tied", [False, True])
def test_two_writers_of_one_slot_are_refused(mesh, rank, world_size, is_tied):
    """With advice, which helps; and training goes on without graphs."""
    results = []
    for size in (None, 2, 3):
        torch.manual_seed(0)
        model = _Stages(is_tied)
        parallelize_module(model, mesh, GTPStyle(GTPConfig(graph_wgrad_ring_size=size or 2), min_numel=30))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        blocks = None if size is None else blocks_of(model, ["stage"])
        number, refused = 0, False
        while number < 5:
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * number + rank))
            try:
                loss = model(x).square().mean()
            except GraphError as error:
                assert size == 2 and number == 2 and not refused
                name = "stage.0.weight" if is_tied else "stage.0.weight: .* that of stage.2.weight"
                assert pytest.raises(GraphError, match=name).matches(error)
                assert "graph_wgrad_ring_size=2) makes 2 slots" in str(error) and "3 or more" in str(error)
                refused = True
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            number += 1
        assert refused == (size == 2) and (size != 3 or blocks.num_replays == 2 * 3)
        results.append(full_parameters(model))
    for found in results[1:]:
        assert_equal_to_reference(found, results[0], "weight")


@ranks(2)
def test_graphs_and_eager_code_in_one_backward(mesh, rank, world_size):
    """Both add to the same gradients, in the order of the backward: an eager sum waits for the reductions before it. And a graph
    does not wait for eager ones of other weights."""
    results = []
    for is_graphed in (False, True):
        model = build(mesh, GTPConfig())
        step, _ = training(model)
        blocks = blocks_of(model) if is_graphed else None
        trained(model, step, rank, world_size, 3)
        in_flight = []
        reducer = sharded_weight(model.output).runtime.reducer
        model(tokens_of(3, rank, world_size)[0]).square().mean().backward()
        give = Graph.give

        def noted(graph, in_flight=in_flight, reducer=reducer):
            if graph.part.ring is not None:
                in_flight.append([reduction.weight.fqn for reduction in reducer.pending.in_flight])
            give(graph)

        with mock.patch.object(Graph, "give", noted):
            outputs = [model(tokens_of(n, rank, world_size, length=length)[0]) for n, length in ((4, 9), (5, 7))]
            (outputs[0].square().mean() + outputs[1].square().mean()).backward()
        results.append(full_gradients(model))
    assert blocks.num_eager == NUM_LAYERS and in_flight[:NUM_LAYERS] == [["output.weight"]] * NUM_LAYERS
    assert_equal_to_reference(results[1], results[0], "gradient")


@ranks(2)
def test_gradients_are_written_to_their_slots(mesh, rank, world_size):
    """By the products themselves; and nothing that orders replays is made for one of them."""
    model = build(mesh, GTPConfig())
    step, _ = training(model)
    blocks = blocks_of(model)
    copied, marks, put, mark = [], [], RingWriter.put, BlockStandIn.mark

    def noted(self, weight, param, grad, returned):
        slot = self._slot(weight)
        copied.append(slot.memory.data_ptr() != grad.data_ptr())
        put(self, weight, param, grad, returned)

    with (
        mock.patch.object(RingWriter, "put", noted),
        mock.patch.object(BlockStandIn, "mark", lambda self: marks.append(0) or mark(self)),
    ):
        trained(model, step, rank, world_size, 5)
    assert blocks.num_replays > 0 and copied and not any(copied)
    assert len(marks) == NUM_LAYERS and blocks.recorder.num_beside == NUM_LAYERS * (5 - 2)


# ---- gathers


def on_demand(model):
    """Gathers that a use had to wait for, of weights of blocks."""
    return sum(
        weight.counters.num_on_demand_gathers
        for weight in sharded_weight(model.layers[0].attention.wq).runtime.live_weights()
        if weight.fqn.startswith("layers.")
    )


@ranks(2)
@pytest.mark.parametrize(
    "look_ahead, planned, num_ahead", [(1, None, 1), slow(2, None, 2), (1, 3, 3)], ids=["one", "two", "planned"]
)
def test_gathers_for_the_next_block(mesh, rank, world_size, look_ahead, planned, num_ahead):
    """Each graph but the last ones gathers what the next one begins with, as far ahead as settings or a plan say; what it finds
    is not gathered again."""
    counted, results = [], []
    for is_graphed in (False, True):
        model = build(mesh, GTPConfig(look_ahead=look_ahead))
        step, _ = training(model)
        blocks = blocks_of(model) if is_graphed else None
        values = trained(model, step, rank, world_size, 2)
        schedule = sharded_weight(model.layers[0].attention.wq).runtime.schedule
        if planned is not None:
            schedule.plan([planned] * len(schedule.period()))
        values += trained(model, step, rank, world_size, 1)
        before, waited = stats(model), on_demand(model)
        values += trained(model, step, rank, world_size, 2)
        after = stats(model)
        names = ("num_forward_gathers", "num_backward_gathers", "gather_bytes", "num_reductions")
        counted.append([getattr(after, name) - getattr(before, name) for name in names])
        waited = on_demand(model) - waited
        results.append((values, full_parameters(model), {}))
    assert_same(*results)
    assert blocks.num_border_gathers == 2 * (NUM_LAYERS - 1) * num_ahead and blocks.num_late_gathers == 0
    assert waited == 2 * 2  # the first of each forward and of each backward
    assert counted[0][0] == counted[1][0] and counted[0][3] == counted[1][3]


@ranks(2)
def test_no_gathers_ahead_without_prefetch(mesh, rank, world_size):
    config = GTPConfig(weight_prefetch=False)
    expected, *_ = run(mesh, rank, world_size, config, False)
    found, blocks, _ = run(mesh, rank, world_size, config, True)
    assert_same(found, expected)
    assert blocks.num_border_gathers == 0 and not blocks.border.buffers()


@ranks(2)
def test_memory_of_borders_is_used_again(mesh, rank, world_size):
    """However many blocks there are: one gathered weight for forwards and one for backwards."""
    _, blocks, _ = run(mesh, rank, world_size, GTPConfig(), True)
    layer = blocks._model.layers[0]
    first, last = sharded_weight(layer.attention.wq), sharded_weight(layer.feed_forward.w2)
    assert {tuple(b.shape) for b in blocks.border.buffers()} == {tuple(first.buffer_shape), tuple(last.buffer_shape)}
    assert len(blocks.border.buffers()) == 2


@ranks(2)
@pytest.mark.parametrize("how", ["another shape", "a write"])
def test_gathers_that_are_not_there(mesh, rank, world_size, how):
    """The graph before was not replayed, or the weight was written after its gather: gathered again, and counted."""
    results = []
    for is_graphed in (False, True):
        model = build(mesh, GTPConfig())
        step, _ = training(model)
        blocks = blocks_of(model) if is_graphed else None
        values = trained(model, step, rank, world_size, 3, 2)
        forward = model.layers[1].forward
        num_calls = itertools.count()

        def odd(x, forward=forward, num_calls=num_calls):  # in each second microbatch, without the graph
            if next(num_calls) % 2 == 0:
                return forward(x)
            half = len(x) // 2
            return torch.cat([forward(x[:half]), forward(x[half:])])

        def writes(module, args, model=model):
            with torch.no_grad():
                model.layers[1].attention.wq.weight.mul_(0.5)

        if how == "another shape":
            model.layers[1].forward = odd
        hook = model.layers[1].register_forward_pre_hook(writes) if how == "a write" else None
        values += trained(model, step, rank, world_size, 2, 2)
        if hook is not None:
            hook.remove()
        model.layers[1].forward = forward
        values += trained(model, step, rank, world_size, 2, 2)
        results.append((values, full_parameters(model), {}))
    assert_same(*results)
    # In both steps: forward and backward of what comes after the eager block; each forward of what was written.
    assert blocks.num_late_gathers == 4
    assert blocks.num_eager == (4 if how == "another shape" else 0)


# ---- experts


def _experts(grid, look_ahead=1):
    torch.manual_seed(0)
    model = MoEModel(3)
    return shard_with_experts(model, *grid, config=GTPConfig(look_ahead=look_ahead))


@ranks(2)
@pytest.mark.parametrize("modules", [["layers.*.mix", "layers.*.moe.shared"], ["layers.*"]], ids=["eager", "graphed"])
def test_experts_one_block_ahead(rank, world_size, modules):
    """Beside graphs each expert weight is gathered while the block before computes, as without; in graphs too, across their
    borders."""
    grid = grids(world_size, gtp=2, egtp=2)
    results, hits = [], []
    for is_graphed in (False, True):
        model = _experts(grid)
        runtime = weight_of(model.layers[0].moe.experts, "w1").runtime
        assert runtime.domain.is_expert
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # The stand-in runs captured functions, so routing that asks the host can be in them.
        blocks = blocks_of(model, modules) if is_graphed else None
        losses = []
        for n in range(6):
            if n == 4:
                runtime.enter_tallies()
                before = [
                    (w.counters.num_prefetch_hits, w.counters.num_on_demand_gathers) for w in runtime.live_weights()
                ]
            x = local_slice(torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(n)), rank, world_size)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        runtime.enter_tallies()
        after = [(w.counters.num_prefetch_hits, w.counters.num_on_demand_gathers) for w in runtime.live_weights()]
        hits.append({w.fqn: (b[0] - a[0], b[1] - a[1]) for w, a, b in zip(runtime.live_weights(), before, after)})
        results.append((losses, full_parameters(model), {}))
    assert_same(*results)
    assert blocks.num_eager == 0 and blocks.num_late_gathers == 0
    # (found, waited for) in two steps, a use of each weight in forward and backward.
    first, last = "layers.0.moe.experts.w1", "layers.2.moe.experts.w2"
    assert hits[0].pop(first) == hits[1].pop(first) == (2, 2)  # nothing before it
    if modules == ["layers.*"]:
        # No graph of a forward leaves the backward what it begins with, and eager code keeps it.
        assert hits[0].pop(last) == (2, 0) and hits[1].pop(last) == (2, 2)
    assert hits[0] == hits[1] and all(counts == (4, 0) for name, counts in hits[0].items() if name != last), hits
    if modules == ["layers.*"]:
        assert blocks.num_border_gathers >= 2 * 2 * 3


@ranks(2)
def test_graphs_do_not_wait_for_gathers_of_others(rank, world_size):
    """An eager gather of an expert's weight, a block ahead, is still on its way when graphs of dense weights are replayed."""
    grid = grids(world_size, gtp=2, egtp=2)
    model = _experts(grid)
    blocks = blocks_of(model, ["layers.*.mix", "layers.*.moe.shared"])
    expert = weight_of(model.layers[1].moe.experts, "w1")
    seen = []
    with mock.patch.object(Graph, "give", autospec=True, side_effect=Graph.give) as give:
        for n in range(3):
            x = local_slice(torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(n)), rank, world_size)
            model(x).square().mean().backward()
        transports = [call.args[0]._replays._transports for call in give.call_args_list]
        seen = [expert.runtime.transport in used for used in transports]
    assert blocks.is_captured and seen and not any(seen)


# ---- symmetric memory


@ranks(2)
def test_beside_symmetric_memory(rank, world_size):
    """With streams that run late, and NaN in what is not in use."""
    made = []

    def choose(requested, mesh, device, name):
        fabric = ThreadFabric()
        fabric.delays = {"copying": 2e-4, "pushing": 2e-4, "summing": 1e-3}
        made.append(SymmetricTransport(mesh.get_group(), device, name, fabric))
        return made[-1]

    results = []
    for is_graphed in (False, True):
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("gtp",))
        with mock.patch.object(gtp_dtensor.domain, "choose_transport", choose):
            config = GTPConfig(param_dtype=torch.bfloat16)
            found, blocks, watch = run(mesh, rank, world_size, config, is_graphed, poisons=True)
        results.append(found)
    assert_same(*results)
    assert len(made) == 2 and made[1].num_fences > 0 and watch.num_poisoned > 0
    assert blocks.num_border_gathers == 2 * (NUM_LAYERS - 1) and blocks.num_late_gathers == 0


class _LaneLog(ThreadFabric):
    """Notes what the lanes wait for: (lane, lane that recorded the event)."""

    def __init__(self):
        super().__init__()
        self.waits, self._recorded = [], {}

    def record(self, event, lane):
        self._recorded[id(event)] = lane
        super().record(event, lane)

    def wait(self, lane, event):
        self.waits.append((lane, self._recorded.get(id(event))))
        super().wait(lane, event)


@ranks(2)
def test_what_replays_wait_for_with_symmetric_memory(mesh, rank, world_size):
    """A replay of gathers waits for rewritten shards, not for reductions nor for other gathers; one of reductions for reductions.
    What comes after either waits for it, in lanes of its kind."""
    fabric = _LaneLog()
    current, copying, pushing, summing = fabric.current(), fabric.copying, fabric.pushing, fabric.summing
    transport = SymmetricTransport(mesh.get_group(), torch.device("cpu"), "gtp", fabric)
    with mock.patch.object(gtp_dtensor.domain, "choose_transport", lambda *_: transport):
        model = build(mesh, GTPConfig(param_dtype=torch.bfloat16))
    model(tokens_of(0, rank, world_size)[0]).square().mean().backward()
    assert transport._rewritten[0] is not None  # recorded by eager code, after the fence

    def waits_of(traffic):
        fabric.waits.clear()
        transport.before_replay(traffic)
        before = set(fabric.waits)
        fabric.waits.clear()
        transport.after_replay(traffic)
        return before, set(fabric.waits)

    assert waits_of(Traffic.GATHERS) == ({(current, copying)}, {(copying, current)})
    reductions = {(current, pushing), (current, summing)}, {(pushing, current), (summing, current)}
    assert waits_of(Traffic.REDUCTIONS) == reductions
    before, after = waits_of(Traffic.ALL)
    assert before == reductions[0] | {(current, copying)} and after == reductions[1] | {(copying, current)}
    # And that of gathers waits for what it was when shards were rewritten, however many gathers came since.
    with mock.patch.object(fabric, "record") as record:
        transport.before_replay(Traffic.GATHERS)
    assert not record.called
