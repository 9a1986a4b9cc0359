"""What crosses the borders of graphs of blocks, on a GPU that ranks share: reductions that go on beside the next graph, and NaN in
all memory of borders that is not in use. Bit equality of whole trainings is in test_graphs_gpu.py."""

import contextlib
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from gtp_dtensor import GTPConfig, graph_blocks, stats
from gtp_dtensor.graph_capture import CudaRecorder
from gtp_dtensor.graphed_block import Graph
from tests.harness import ranks
from tests.reference import full_parameters
from tests.test_gpu import poisoned_memory
from tests.test_graphs_gpu import _poison_free_memory, adam, llama, run, same_kernels, tokens_of, training_step
from tests.test_wires import sharded_weight

on_gpu = ranks(4, device="cuda", timeout=240, group_timeout=120)
NUM_STEPS, NUM_LAYERS = 10, 2
LONG = 1_000_000_000  # GPU clock cycles: half a second; a block takes a thousandth of that


def made(mesh, device, transport, reduce_dtype):
    config = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, transport=transport)
    model = llama(mesh, device, config)
    for layer in model.layers:  # random numbers in graphs beside which others are replayed
        layer.attention.register_forward_hook(lambda module, args, y: F.dropout(y, 0.1))
    return model


class Watch:
    """Poisons what may not be read any more, before each replay.

    Attributes:
        delay: of the reductions of each backward, in cycles.
        num_beside: how often the graph of a backward ended while the reductions of the one before it went on.
        num_poisoned: tensors that were NaN meanwhile.
    """

    def __init__(self, blocks):
        self.blocks = blocks
        self.delay = self.num_beside = self.num_poisoned = 0
        self._marks = []

    @contextlib.contextmanager
    def watching(self):
        give, beside, watch = Graph.give, CudaRecorder.beside, self

        def watched_give(graph):
            if not graph.part.reduces:
                watch.poison(graph)
            give(graph)
            if graph.part.ring is not None and watch.delay and watch._marks:
                done = torch.cuda.current_stream().record_event()
                done.synchronize()
                watch.num_beside += not watch._marks[-1].query()

        def watched_beside(recorder, work, done):
            def late():
                if watch.delay:
                    torch.cuda._sleep(watch.delay)
                work()

            beside(recorder, late, done)
            watch._marks.append(done)

        with mock.patch.object(Graph, "give", watched_give), mock.patch.object(CudaRecorder, "beside", watched_beside):
            yield

    def poison(self, graph):
        places = [place for _, place in graph.part.taken._left.values()] if graph.part.taken else []
        read = {buffer.data_ptr() for place in places for buffer in place.buffers}
        free = [b for b in self.blocks.border.buffers() if b.data_ptr() not in read]
        free += [s.memory for s in self.blocks.ring.slots() if s.reader is None or not s.reader.is_given]
        for memory in free:
            memory.view(-1).view(torch.uint8).fill_(255)
        self.num_poisoned += len(free)


@on_gpu
@pytest.mark.parametrize(
    "transport, reduce_dtype",
    [("symmetric", torch.bfloat16), ("symmetric", torch.float32), ("collective", torch.bfloat16)],
)
def test_borders_of_blocks(mesh, rank, world_size, device, transport, reduce_dtype):
    """Ring, leases, inboxes and free memory of both pools are NaN where nobody may read them: no result is. Reductions go on
    while the next graph runs to its end. Replays make no event, and nothing is gathered late."""
    num_steps = NUM_STEPS if transport == "symmetric" else 5  # sockets are slow

    def batch(number):
        return tokens_of(number, rank, world_size, device)

    with same_kernels():
        torch.manual_seed(1)
        model = made(mesh, device, transport, reduce_dtype)
        torch.manual_seed(2)
        expected = run(model, adam(model), batch, num_steps, False)
        model = made(mesh, device, transport, reduce_dtype)
        optimizer = adam(model)
        step, blocks = training_step(model, optimizer), graph_blocks(model)
        watch, values, num_free = Watch(blocks), [], 0
        axis = sharded_weight(model.layers[0].attention.wq).runtime.transport
        torch.manual_seed(2)
        with poisoned_memory(), watch.watching():
            for number in range(num_steps):
                if number == 4 and transport == "symmetric":
                    num_events = axis.num_events_created
                watch.delay = LONG if number == num_steps - 2 else 0
                watch._marks.clear()
                values.append(torch.stack([v.float() for v in step(batch(number))]))
                if number >= 2:
                    torch.cuda.synchronize()
                    torch.distributed.barrier()
                    for pool in (blocks.recorder._pool, blocks.recorder._pool_beside):
                        num_free += _poison_free_memory(pool)
                    if transport == "symmetric":
                        axis._inbox.shared.tensor.fill_(255)
                        torch.cuda.synchronize()
                    torch.distributed.barrier()
        assert blocks.num_replays == 2 * NUM_LAYERS * (num_steps - 2) and blocks.num_eager == 0
        assert torch.equal(torch.stack(values), expected.values), (torch.stack(values), expected.values)
        for name, weight in full_parameters(model).items():
            assert torch.equal(weight, expected.weights[name]), name
    assert watch.num_beside == NUM_LAYERS - 1 and watch.num_poisoned > 0 and num_free > 0
    assert blocks.num_border_gathers == 2 * (NUM_LAYERS - 1) and blocks.num_late_gathers == 0
    assert transport != "symmetric" or axis.num_events_created == num_events
    found = stats(model)
    assert found.num_pending == 0 and found.num_reductions == expected.stats.num_reductions
    blocks.release()
