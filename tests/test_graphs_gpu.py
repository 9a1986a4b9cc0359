"""Step graphs on a GPU that ranks share: bit for bit as without, poisoned memory, what is refused, and the way on after it."""

import contextlib
import ctypes
import dataclasses
import functools
import gc
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import tests.test_experts
from gtp_dtensor import GraphError, GTPConfig, GTPStyle, clip_grad_norm_, graph_blocks, graph_step, stats
from tests.harness import ranks
from tests.models import VOCAB, TinyLlama
from tests.moe import MoEModel
from tests.moe import grouped_experts as experts_by_splits
from tests.reference import full_parameters, local_slice
from tests.test_experts import grids, run_grouped_gemm
from tests.test_experts import shard as shard_with_experts
from tests.test_gpu import poisoned_memory
from tests.test_wires import sharded_weight

on_gpu = ranks(4, device="cuda", timeout=120, group_timeout=60)
NUM_WARMUP_STEPS = 2


@contextlib.contextmanager
def same_kernels():
    """Inside, kernels give the same bits each time."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def llama(mesh, device, config, recompute=False, dropout=0.0):
    torch.manual_seed(0)
    model = TinyLlama(dim=64, hidden=168).to(device)
    parallelize_module(model, mesh, GTPStyle(config, min_numel=30))
    for layer in model.layers if recompute else ():
        forward = layer.forward
        layer.forward = functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
    if dropout:
        model.norm.register_forward_hook(lambda module, args, y: F.dropout(y, dropout))
    return model


def adam(model, lr=2**-8):
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=True)


def training_step(model, optimizer):
    """A step over microbatches (microbatches, batch, ...): loss and gradient norm."""

    def step(batches):
        total = 0.0
        for batch in batches.unbind():
            loss = model(batch).float().square().mean() / len(batches)
            loss.backward()
            total = total + loss.detach()
        norm = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return total, norm

    return step


def tokens_of(number, rank, world_size, device, num_microbatches=1, length=8):
    generator = torch.Generator().manual_seed(number)
    whole = torch.randint(VOCAB, (2 * world_size, num_microbatches, length), generator=generator)
    return local_slice(whole, rank, world_size).transpose(0, 1).contiguous().to(device)


class Run(NamedTuple):
    values: torch.Tensor  # (steps, 2): loss, norm
    weights: dict[str, torch.Tensor]
    stats: object
    num_replays: int


def run(model, optimizer, batch, num_steps, is_graphed, between=lambda number: None, blocks=()):
    """``blocks``: patterns of modules that are graphed, in place of the step."""
    step = training_step(model, optimizer)
    blocks = graph_blocks(model, blocks) if blocks else None
    graphed = graph_step(step, model, optimizer) if is_graphed else None
    values = []
    for number in range(num_steps):
        values.append(torch.stack([v.float() for v in (graphed or step)(batch(number))]))
        between(number)
    graphs = graphed or blocks
    result = Run(torch.stack(values), full_parameters(model), stats(model), graphs.num_replays if graphs else 0)
    if graphs:
        graphs.release()
    return result


def assert_same(eager, graphed, num_steps):
    assert graphed.num_replays == num_steps - NUM_WARMUP_STEPS
    assert torch.isfinite(eager.values).all() and eager.values[-1, 0] < eager.values[0, 0]
    differing = (eager.values != graphed.values).any(1).nonzero().flatten().tolist()
    assert not differing, (differing, eager.values, graphed.values)
    for name, weight in eager.weights.items():
        assert torch.equal(graphed.weights[name], weight), name
    # Peers' memory is that of all models that are alive.
    one, other = (dataclasses.replace(run.stats, symmetric_bytes=0) for run in (eager, graphed))
    assert one == other and one.num_prefetch_hits > 0


# ---- one rank: what torch does


@ranks(1, device="cuda", timeout=60)
def test_refused_and_then_goes_on(device):
    """Host reads are found before the capture; one that is not found breaks it. Either way training goes on, random numbers
    included."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
            self.reads = False

        def forward(self, x):
            x = F.dropout(self.first(x), 0.5)
            if self.reads and x.sum().item() > 1e9:
                x = x * 2
            return self.second(x)

    def made():
        torch.manual_seed(0)
        model = Model().to(device)
        optimizer = adam(model)
        return model, optimizer, training_step(model, optimizer)

    def batch(number):
        return torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(number)).to(device)

    _, _, step = made()
    expected = [step(batch(number))[0].item() for number in range(6)]
    for how in ("found", "not found"):
        model, optimizer, step = made()
        graphed = graph_step(step, model, optimizer)
        model.reads = how == "found"
        found = [graphed(batch(number))[0].item() for number in range(2)]
        model.reads = True
        with pytest.raises(GraphError, match=r"the model: Model \(\S*test_graphs_gpu.py:\d+\)") as error:
            graphed(batch(2))
        assert ("the host waits" in str(error.value)) == (how == "found"), error.value
        found += [graphed.eager(batch(number))[0].item() for number in range(2, 4)]
        model.reads = False
        graphed.reset()
        found += [graphed(batch(number))[0].item() for number in range(4, 6)]
        graphed(batch(6))
        assert graphed.num_replays == 1 and found == expected, how
        graphed.release()


@ranks(1, device="cuda", timeout=60)
def test_a_loss_that_is_kept(device):
    """Nodes of its graph belong to another stream: told, and well once it is gone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device)
    optimizer = adam(model)
    kept = model(torch.ones(2, 64, device=device)).sum()
    kept.backward()
    optimizer.zero_grad()
    graphed = graph_step(training_step(model, optimizer), model, optimizer)
    x = torch.randn(1, 8, 64, device=device)
    for _ in range(2):
        graphed(x)
    with pytest.raises(GraphError, match=r"keep loss\.detach\(\)"):
        graphed(x)
    del kept
    graphed.reset()
    for _ in range(3):
        loss, _ = graphed(x)
    assert graphed.num_replays == 1 and torch.isfinite(loss)
    graphed.release()


@ranks(1, device="cuda", timeout=60)
def test_released_graphs_leave_no_memory(device):
    """Each captures on a stream of its own, for which cuBLAS takes a workspace of 32 MiB a thread."""
    torch.manual_seed(0)
    model = nn.Linear(256, 256).to(device)
    left = []
    for _ in range(4):
        graphed = graph_step(lambda x: model(x).square().mean().backward(), model)
        for _ in range(4):
            model.zero_grad()
            graphed(torch.ones(8, 256, device=device))
        assert graphed.num_replays == 2
        graphed.release()
        del graphed
        model.zero_grad()
        gc.collect()
        left.append(torch.cuda.memory_allocated())
    assert left[-1] - left[0] < 1 << 20, left


@ranks(1, device="cuda", timeout=60)
def test_dropout_and_a_schedule(device):
    """Random numbers and a learning rate that a schedule writes are those of eager steps."""
    runs = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 64)).to(device)
        optimizer = adam(model, lr=torch.tensor(1e-2, device=device))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)

        def batch(number):
            return torch.randn(2, 8, 64, generator=torch.Generator().manual_seed(number)).to(device)

        runs.append(run(model, optimizer, batch, 10, is_graphed, between=lambda number: schedule.step()))
    assert runs[1].num_replays == 8 and torch.equal(runs[0].values, runs[1].values)
    assert all(torch.equal(runs[1].weights[name], weight) for name, weight in runs[0].weights.items())


# ---- four ranks


@on_gpu
def test_groups_of_high_priority(rank, world_size, device):
    """`[gtp] high_priority_stream_groups`: NCCL's groups of these axes are, others are not, and a step graph over them
    changes no bit."""
    from tests.test_titan_setup import dims  # torchtitan

    def batch(number):
        return tokens_of(number, rank, world_size, device)

    config = GTPConfig(transport="collective", param_dtype=torch.bfloat16)
    parallel_dims = dims(world_size, gtp=world_size, high_priority=("gtp",))
    parallel_dims.build_mesh()
    mesh, other = (parallel_dims.get_mesh(name) for name in ("gtp", "batch"))
    assert mesh.size() == other.size() == world_size
    backends = [each.get_group()._get_backend(device) for each in (mesh, other)]
    assert [backend.options.is_high_priority_stream for backend in backends] == [True, False]
    runs = []
    with same_kernels():
        for is_graphed in (False, True):
            model = llama(mesh, device, config)
            runs.append(run(model, adam(model), batch, 6, is_graphed))
    assert_same(*runs, 6)


@on_gpu
@pytest.mark.parametrize(
    "transport, wire, num_microbatches, recompute",
    [("symmetric", "bf16", 3, True), ("symmetric", "fp8_rowwise", 1, False), ("collective", "bf16", 1, True)],
)
def test_fifty_steps_bit_for_bit(mesh, rank, world_size, device, transport, wire, num_microbatches, recompute):
    num_steps = 50 if transport == "symmetric" else 8  # sockets are slow
    config = GTPConfig(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, transport=transport, wire_format=wire, look_ahead=2
    )

    def batch(number):
        return tokens_of(number, rank, world_size, device, num_microbatches)

    runs = []
    with same_kernels():
        for is_graphed in (False, True):
            model = llama(mesh, device, config, recompute)
            runs.append(run(model, adam(model), batch, num_steps, is_graphed))
    assert_same(*runs, num_steps)
    s = runs[1].stats
    assert (s.num_recompute_gathers > 0) == recompute and (s.num_quantizations > 0) == (wire != "bf16")
    assert (s.num_fences > 0) == (transport == "symmetric")


def _poison_free_memory(pool):
    """NaN into all memory of a graph's pool that no tensor of Python has. Returns how many bytes."""
    torch.cuda.synchronize()
    driver, num_bytes = ctypes.CDLL("libcuda.so.1"), 0
    for segment in torch.cuda.memory_snapshot():
        if tuple(segment["segment_pool_id"]) == tuple(pool):
            for block in segment["blocks"]:
                if block["state"] == "inactive":
                    code = driver.cuMemsetD8_v2(ctypes.c_uint64(block["address"]), 255, ctypes.c_size_t(block["size"]))
                    assert code == 0
                    num_bytes += block["size"]
    torch.cuda.synchronize()
    return num_bytes


@on_gpu
def test_poison(mesh, rank, world_size, device):
    """Leases at their ends, and between replays inboxes and all free memory of the graph, are NaN: no result is. While
    capturing, no memory is taken from elsewhere, and no event is made."""
    config = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, transport="symmetric")

    def batch(number):
        return tokens_of(number, rank, world_size, device)

    with same_kernels():
        model = llama(mesh, device, config)
        expected = run(model, adam(model), batch, 8, False)
        model = llama(mesh, device, config)
        optimizer = adam(model)
        step = graph_step(training_step(model, optimizer), model, optimizer)
        transport = sharded_weight(model.layers[0].attention.wq).runtime.transport
        values, num_poisoned = [], 0
        with poisoned_memory():
            for number in range(8):
                if number == NUM_WARMUP_STEPS:
                    num_events = transport.num_events_created
                    torch.cuda.memory._record_memory_history(max_entries=100_000, context=None, stacks="python")
                values.append(torch.stack([v.float() for v in step(batch(number))]))
                if number == NUM_WARMUP_STEPS:
                    snapshot = torch.cuda.memory._snapshot()
                    torch.cuda.memory._record_memory_history(enabled=None)
                    assert transport.num_events_created == num_events
                if number >= NUM_WARMUP_STEPS:
                    torch.cuda.synchronize()
                    torch.distributed.barrier()
                    num_poisoned += _poison_free_memory(step._recorder._pool)
                    transport._inbox.shared.tensor.fill_(255)
                    torch.cuda.synchronize()
                    torch.distributed.barrier()
    assert num_poisoned > 0 and torch.equal(torch.stack(values), expected.values)
    for name, weight in full_parameters(model).items():
        assert torch.equal(weight, expected.weights[name]), name
    stream = step._recorder._stream.cuda_stream
    captured = {(s["address"], s["total_size"]) for s in snapshot["segments"] if tuple(s["segment_pool_id"]) != (0, 0)}
    taken = [
        e for trace in snapshot["device_traces"] for e in trace if e["action"] == "alloc" and e["stream"] == stream
    ]
    outside = [e for e in taken if not any(start <= e["addr"] < start + size for start, size in captured)]
    # But the seed and the offset of random numbers, which torch makes when a capture begins.
    assert len(taken) > 2 and [e["size"] for e in outside] == [8, 8], (len(taken), outside)
    step.release()


_NUM_TOGETHER = 8  # tokens in a row that go to the same experts: rows of an expert are a multiple of it


def _route_on_device(module, x):
    """The forward of a mixture of experts without a word from the host."""
    flat = x.reshape(-1, x.shape[-1])
    scores = torch.softmax(module.router(flat).float(), -1)
    chosen = scores.view(-1, _NUM_TOGETHER, module.num_experts).mean(1).topk(module.top_k).indices
    chosen = chosen.repeat_interleave(_NUM_TOGETHER, 0)
    order = chosen.view(-1).argsort(stable=True)
    tokens = order // module.top_k
    counts = (chosen.view(-1, 1) == torch.arange(module.num_experts, device=x.device)).sum(0)
    outputs = module.experts(flat[tokens], counts) * scores.gather(1, chosen).view(-1)[order].unsqueeze(-1)
    return (module.shared(flat) + torch.zeros_like(flat).index_add(0, tokens, outputs.to(flat.dtype))).view_as(x)


def _moe(device, world_size, gtp, egtp, reads_host=False, ep=1):
    torch.manual_seed(0)
    model = MoEModel(2, dim=64, hidden=64, num_experts=4).to(device)
    forward = experts_by_splits if reads_host else run_grouped_gemm
    for layer in () if reads_host else model.layers:
        layer.moe.forward = functools.partial(_route_on_device, layer.moe)
    config = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, transport="symmetric")
    meshes = grids(world_size, gtp, egtp, ep, device_type=torch.device(device).type)
    with mock.patch.object(tests.test_experts, "grouped_experts", forward):
        shard_with_experts(model, *meshes, config=config)
    return model


@on_gpu
@pytest.mark.parametrize("gtp, egtp", [(4, 2), (1, 2)])
def test_experts_bit_for_bit(rank, world_size, device, gtp, egtp):
    """Experts told by offsets on the device; the dense weights on the same ranks, or on no gtp axis at all."""

    def batch(number):
        whole = torch.randn(8, 1, 16, 64, generator=torch.Generator().manual_seed(number))
        return local_slice(whole, rank, world_size).transpose(0, 1).contiguous().to(device)

    runs = []
    with same_kernels():
        for is_graphed in (False, True):
            model = _moe(device, world_size, gtp, egtp)
            runs.append(run(model, adam(model), batch, 12, is_graphed))
    assert_same(*runs, 12)


@on_gpu
def test_experts_that_ask_the_host_are_refused_by_name(rank, world_size, device):
    model = _moe(device, world_size, 4, 2, reads_host=True)
    optimizer = adam(model)
    step = graph_step(training_step(model, optimizer), model, optimizer)
    x = torch.randn(1, 2, 5, 64, device=device)
    for _ in range(2):
        step(x)
    with pytest.raises(GraphError, match=r"host waits for the device in .*layers\.0\.moe.* \(\S*moe.py:\d+\)"):
        step(x)
    assert all(torch.isfinite(value) for value in step.eager(x))


# ---- blocks


def assert_same_by_blocks(eager, graphed, num_replays):
    assert graphed.num_replays == num_replays
    assert torch.isfinite(eager.values).all() and torch.equal(eager.values, graphed.values), (
        eager.values,
        graphed.values,
    )
    assert all(torch.equal(graphed.weights[name], weight) for name, weight in eager.weights.items())
    assert graphed.stats.num_reductions == eager.stats.num_reductions and graphed.stats.num_pending == 0


@on_gpu
@pytest.mark.parametrize(
    "transport, wire, num_microbatches, recompute",
    [("symmetric", "bf16", 3, True), ("symmetric", "fp8_rowwise", 1, False), ("collective", "bf16", 1, False)],
)
def test_blocks_bit_for_bit(mesh, rank, world_size, device, transport, wire, num_microbatches, recompute):
    """Leases are poisoned within the graphs, too."""
    num_steps = 50 if transport == "symmetric" else 6
    config = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, transport=transport, wire_format=wire)

    def batch(number):
        return tokens_of(number, rank, world_size, device, num_microbatches)

    runs = []
    with same_kernels(), poisoned_memory():
        for blocks in ((), ("layers.*",)):
            model = llama(mesh, device, config, recompute)
            runs.append(run(model, adam(model), batch, num_steps, False, blocks=blocks))
    assert_same_by_blocks(*runs, 2 * 2 * (num_steps * num_microbatches - 2))


@on_gpu
def test_blocks_around_expert_parallelism(rank, world_size, device):
    """Tokens travel to their experts in eager code; what is before and beside them is graphed."""

    def batch(number):
        whole = torch.randn(8, 1, 16, 64, generator=torch.Generator().manual_seed(number))
        return local_slice(whole, rank, world_size).transpose(0, 1).contiguous().to(device)

    runs = []
    with same_kernels():
        for blocks in ((), ("layers.*.mix", "layers.*.moe.shared")):
            model = _moe(device, world_size, 4, 2, reads_host=True, ep=2)
            runs.append(run(model, adam(model), batch, 8, False, blocks=blocks))
    assert_same_by_blocks(*runs, 2 * 4 * 6)


# ---- steps of several kinds


@on_gpu
def test_train_and_eval_graphs_and_eager_steps_between(mesh, rank, world_size, device):
    """In turns, on other shapes too; gradients stay where a step leaves them."""
    config = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, transport="symmetric")
    results = []
    with same_kernels():
        for is_graphed in (False, True):
            model = llama(mesh, device, config)
            optimizer = adam(model)
            train = training_step(model, optimizer)

            def evaluate(tokens, model=model):
                with torch.no_grad():
                    return model(tokens[0]).float().square().mean()

            eager = train
            if is_graphed:
                train, evaluate = graph_step(train, model, optimizer, max_graphs=2), graph_step(evaluate, model)
            values = []
            for number in range(16):
                length = 12 if number % 3 == 2 else 8
                tokens = tokens_of(number, rank, world_size, device, length=length)
                values += (eager if number == 11 else train)(tokens)
                values.append(evaluate(tokens_of(100 + number, rank, world_size, device)))
            results.append((torch.stack([v.float() for v in values]), full_parameters(model), stats(model)))
    assert (train.num_graphs, evaluate.num_graphs) == (2, 1) and train.num_replays == 16 - 1 - 4
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[1][1][name], weight) for name, weight in results[0][1].items())
    assert results[0][2].gather_bytes == results[1][2].gather_bytes
    train.release()
    evaluate.release()


@on_gpu
def test_a_capture_that_fails_among_ranks(mesh, rank, world_size, device):
    """With copies and signals in it: nothing hangs, and steps without a graph go on as if it had not been."""
    config = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, transport="symmetric")

    def batch(number):
        return tokens_of(number, rank, world_size, device)

    with same_kernels():
        model = llama(mesh, device, config)
        expected = run(model, adam(model), batch, 8, False)
        model = llama(mesh, device, config)
        optimizer = adam(model)
        step = graph_step(training_step(model, optimizer), model, optimizer)
        values = [step(batch(number)) for number in range(2)]
        hook = model.layers[1].ffn_norm.register_forward_hook(lambda module, args, y: y * y.detach().sum().item() ** 0)
        with pytest.raises(GraphError, match="test_graphs_gpu.py"):
            step(batch(2))
        hook.remove()
        values += [step.eager(batch(number)) for number in range(2, 4)]
        values += [step(batch(number)) for number in range(4, 8)]
    assert step.num_replays == 4
    found = torch.stack([torch.stack([v.float() for v in value]) for value in values])
    assert torch.equal(found, expected.values)
    assert all(torch.equal(weight, expected.weights[name]) for name, weight in full_parameters(model).items())
    step.release()


@ranks(2, device="cuda", timeout=60, group_timeout=30)
def test_over_replicas(rank, world_size, device):
    """The optimizer's parameters are cut over replicas: pieces of compute shards travel within the graph."""
    mesh = init_device_mesh("cuda", (2, 1), mesh_dim_names=("dps", "gtp"))
    runs = []
    with same_kernels():
        for is_graphed in (False, True):
            torch.manual_seed(0)
            model = TinyLlama(dim=64, hidden=168).to(device)
            config = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
            parallelize_module(model, mesh["gtp"], GTPStyle(config, min_numel=30, optimizer_shard_mesh=mesh["dps"]))
            runs.append(run(model, adam(model), lambda n: tokens_of(n, rank, world_size, device), 6, is_graphed))
    assert_same(*runs, 6)
    assert runs[1].stats.num_replica_reductions > 0
