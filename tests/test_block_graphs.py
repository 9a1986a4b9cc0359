"""Graphs of blocks over a stand-in (see graph_stand_in.py): what eager code and graphs owe each other. On a GPU:
test_graphs_gpu.py."""

import copy
import os
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from gtp_dtensor import GraphError, GTPConfig, GTPStyle, graph_blocks, set_requires_gradient_sync, stats
from gtp_dtensor.block_graphs import GraphedBlocks
from tests.graph_stand_in import BlockStandIn, graphed
from tests.harness import ranks
from tests.models import TinyLlama
from tests.moe import MoEModel
from tests.reference import assert_equal_to_reference, full_gradients, full_parameters, local_slice, replica_options
from tests.test_graphs import slow, tokens_of, training
from tests.test_parity import _llama_tp_plan

NUM_LAYERS = 3


def blocks_of(model, modules=("layers.*",), **options):
    return GraphedBlocks(model, modules, recorder=BlockStandIn(model), **{"num_warmup_passes": 2, **options})


def build(mesh, config=None, recompute=False, **options):
    torch.manual_seed(0)
    model = TinyLlama(num_layers=NUM_LAYERS)
    if recompute:
        for layer in model.layers:
            forward = layer.forward
            layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    parallelize_module(model, mesh, GTPStyle(config or GTPConfig(param_dtype=torch.bfloat16), min_numel=30, **options))
    return model


def trained(model, step, rank, world_size, num_steps, num_microbatches=1, first=0):
    found = []
    for n in range(first, first + num_steps):
        total, norm = step(tokens_of(n, rank, world_size, num_microbatches))
        found.append((total.item(), norm.item()))
    return found


@ranks(2)
@pytest.mark.parametrize(
    "modules, num_microbatches, recompute",
    [
        (["layers.*"], 2, False),
        slow(["layers.*"], 1, True),
        slow(["layers.*.attention", "layers.0.feed_forward"], 1, False),
    ],
)
def test_blocks_train_as_without(mesh, rank, world_size, modules, num_microbatches, recompute):
    """Losses, norms, gradients and weights, bit for bit."""
    results, live = [], []
    for is_graphed in (False, True):
        model = build(mesh, recompute=recompute)
        step, optimizer = training(model)
        if is_graphed:
            blocks = blocks_of(model, modules)
        values = trained(model, step, rank, world_size, 6, num_microbatches)
        model(tokens_of(50, rank, world_size)[0]).square().mean().backward()
        live.append(stats(model).live_lease_bytes)  # what the next microbatch begins with
        results.append((values, full_gradients(model), full_parameters(model)))
    num_modules = NUM_LAYERS if len(modules) == 1 else NUM_LAYERS + 1
    num_passes = 6 * num_microbatches - 2 + 1
    assert blocks.is_captured and blocks.num_eager == 0 and blocks.num_replays == 2 * num_modules * num_passes
    assert results[0][0] == results[1][0]
    assert_equal_to_reference(results[1][1], results[0][1], "gradient")
    assert_equal_to_reference(results[1][2], results[0][2], "weight")
    assert stats(model).num_pending == 0 and live[0] == live[1]
    blocks.release()
    assert trained(model, step, rank, world_size, 1) and all(
        "forward" not in m.__dict__ or recompute for m in model.layers
    )


@ranks(2)
def test_counters_of_a_step(mesh, rank, world_size):
    """Each weight is gathered and reduced as often as without graphs."""
    counted = []
    for is_graphed in (False, True):
        model = build(mesh, GTPConfig())
        step, _ = training(model)
        if is_graphed:
            blocks_of(model)
        trained(model, step, rank, world_size, 4)
        before = stats(model)
        trained(model, step, rank, world_size, 2)
        after = stats(model)
        counted.append({name: getattr(after, name) - getattr(before, name) for name in vars(after)})
    for name in ("num_forward_gathers", "num_reductions", "num_small_reductions", "reduce_bytes", "num_refreshes"):
        assert counted[0][name] == counted[1][name] > 0 or name == "num_refreshes", (name, counted)
    assert counted[1]["num_prefetch_hits"] > 0 and counted[1]["num_mispredictions"] == 0


@ranks(2)
def test_experts_stay_eager(rank, world_size):
    """What asks the host is between graphs."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("gtp",))
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model = MoEModel(3)
        parallelize_module(model, mesh, GTPStyle(GTPConfig(), min_numel=30))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_graphed:
            blocks = blocks_of(model, ["layers.*.mix", "layers.*.moe.shared"])
        losses = []
        for n in range(6):
            x = local_slice(torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(n)), rank, world_size)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        results.append((losses, full_parameters(model)))
    assert blocks.num_replays == 2 * 6 * 4 and blocks.num_eager == 0
    assert results[0][0] == results[1][0]
    assert_equal_to_reference(results[1][1], results[0][1], "weight")


@ranks(2)
def test_calls_that_cannot_be_replays(mesh, rank, world_size):
    """Other shapes, evaluation, two forwards before a backward: right, and counted."""
    results = []
    for is_graphed in (False, True):
        model = build(mesh)
        step, optimizer = training(model)
        if is_graphed:
            blocks = blocks_of(model)
        values = trained(model, step, rank, world_size, 3)
        values += [step(tokens_of(7, rank, world_size, length=9))[0].item()]
        model.eval()
        with torch.no_grad():
            values.append(model(tokens_of(8, rank, world_size)[0]).sum().item())
        model.train()
        outputs = [model(tokens_of(n, rank, world_size)[0]) for n in (9, 10)]
        (outputs[0].square().mean() + outputs[1].square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        values += trained(model, step, rank, world_size, 2)
        results.append((values, full_parameters(model)))
    assert blocks.num_eager == NUM_LAYERS * 2 and blocks.num_replays == 2 * NUM_LAYERS * (1 + 1 + 2)
    assert results[0][0] == results[1][0]
    assert_equal_to_reference(results[1][1], results[0][1], "weight")


@ranks(2)
def test_graphs_hang_on_leaves_of_their_own(mesh, rank, world_size):
    """Nodes of parameters live on with a loss that is referenced, and belong to the stream of its forward."""
    model = build(mesh)
    blocks = blocks_of(model)
    kept = []
    for n in range(3):
        kept.append(model(tokens_of(n, rank, world_size)[0]).square().mean())
        kept[-1].backward()
    assert blocks.is_captured

    def leaves(node, seen):
        for to, _ in node.next_functions:
            if to is not None and to not in seen:
                seen.add(to)
                leaves(to, seen)
        return {id(to.variable) for to in seen if hasattr(to, "variable")}

    params = {id(param) for param in model.parameters()}
    assert params <= leaves(kept[0].grad_fn, set())
    for block in blocks._blocks:
        found = leaves(block._live[0].grad_fn, set())
        assert len(found) > len(list(block.module.parameters())) and not found & params
        assert all(member.leaf is member.param for member in (*block.weights, *block._smalls))


@ranks(2)
def test_a_backward_that_raises(mesh, rank, world_size):
    """Reductions that go on beside the graph that raises are waited for; the next step is clean."""
    results, outstanding = [], []
    for is_graphed in (False, True):
        model = build(mesh)
        step, _ = training(model)
        blocks = blocks_of(model) if is_graphed else None
        values = trained(model, step, rank, world_size, 3)

        def fail(grad, blocks=blocks):
            outstanding.append(0 if blocks is None else len(blocks.recorder.put_off))
            raise RuntimeError("on its way")

        hook = model.layers[0].register_forward_hook(lambda module, args, y, fail=fail: y.register_hook(fail) and None)
        with pytest.raises(RuntimeError, match="on its way"):
            model(tokens_of(9, rank, world_size)[0]).square().mean().backward()
        hook.remove()
        model.zero_grad()
        values += trained(model, step, rank, world_size, 2, first=3)
        results.append((values, full_parameters(model)))
        assert stats(model).num_pending == 0
    assert outstanding == [0, 2] and blocks.num_eager == 0  # of the two blocks whose backwards came through
    assert results[0][0] == results[1][0]
    assert_equal_to_reference(results[1][1], results[0][1], "weight")


class _Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        return [layer(x) for layer in self.layers]


@ranks(2)
def test_branches_whose_backwards_come_apart(mesh, rank, world_size):
    """A graph may write where a later block's activations wait."""
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model = _Branches()
        parallelize_module(model, mesh, GTPStyle(GTPConfig(), min_numel=30))
        if is_graphed:
            blocks = blocks_of(model)
        for n in range(4):
            x = torch.randn(2, 16, generator=torch.Generator().manual_seed(2 * n + rank))
            first = model(x)
            first[0].sum().backward()
            if n == 3:
                again = model(x + 1)  # the second branch of the first forward waits
                again[0].square().sum().backward()
            first[1].square().sum().backward()
        results.append(full_gradients(model))
    assert blocks.num_eager == 2 and blocks.num_replays == 2 * 2 * 2
    assert_equal_to_reference(results[1], results[0], "gradient")


@ranks(2)
def test_gradients_that_are_kept_back(rank, world_size):
    """Microbatches that do not synchronise run without graphs where there are replicas."""
    results = []
    for is_graphed in (False, True):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dps", "gtp"))
        model = build(mesh["gtp"], **replica_options(mesh))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if is_graphed:
            blocks = blocks_of(model)
        values = []
        for n in range(4):
            for is_last in (False, True):
                set_requires_gradient_sync(model, is_last)
                loss = model(tokens_of(2 * n + is_last, rank, world_size)[0]).float().square().mean()
                loss.backward()
                values.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        results.append((values, full_parameters(model)))
    assert blocks.num_replays == 2 * NUM_LAYERS * 3 and blocks.num_eager == NUM_LAYERS * 3
    assert results[0][0] == results[1][0]
    assert_equal_to_reference(results[1][1], results[0][1], "weight")


@ranks(2)
def test_what_a_backward_refuses(mesh, rank, world_size):
    model = build(mesh)
    step, optimizer = training(model)
    blocks_of(model)
    trained(model, step, rank, world_size, 3)
    tokens = tokens_of(0, rank, world_size)[0]
    loss = model(tokens).square().mean()
    trained_weight = model.layers[0].attention.wq.weight
    with torch.no_grad():
        trained_weight.mul_(1.0)
    with pytest.raises(RuntimeError, match=r"layers\.0\.attention\.wq\.weight: the weight was modified"):
        loss.backward()
    model.zero_grad()
    loss = model(tokens).square().mean()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="retain_graph is not served by graphed blocks"):
        loss.backward()
    model.zero_grad()
    loss = model(tokens).square().mean()
    with pytest.raises(RuntimeError, match=r"layers\.2: gradients of some tensors only"):
        torch.autograd.grad(loss, model.norm.weight, retain_graph=True)
        torch.autograd.grad(loss, model.tok_embeddings.weight)
    del loss
    model.zero_grad()
    model.output.requires_grad_(False), model.norm.requires_grad_(False)  # which would refuse first
    with pytest.raises(RuntimeError, match=r"layers\.2: create_graph=True cannot go through the graph of a block"):
        model(tokens).sum().backward(create_graph=True)
    model.requires_grad_(True)
    model.zero_grad()
    model(tokens).square().mean().backward()
    copied = copy.deepcopy(model)
    assert type(copied.layers[0].forward).__name__ == "method" and copied.layers[0].forward.__self__ is copied.layers[0]


@ranks(2)
def test_what_cannot_be_captured(mesh, rank, world_size):
    model = build(mesh)
    with pytest.raises(ValueError, match="on one GPU"):
        graph_blocks(model)
    with pytest.raises(ValueError, match="'blocks.*' matches no module"):
        blocks_of(model, ["blocks.*"])
    with pytest.raises(ValueError, match="graph_blocks: .*check_param_states=True"):
        blocks_of(build(mesh, GTPConfig(check_param_states=True)))
    with pytest.raises(ValueError, match="not under GTP"):
        blocks_of(nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(2, 2)])}))
    with mock.patch.dict(os.environ, NCCL_GRAPH_MIXING_SUPPORT="0"):
        with pytest.raises(ValueError, match="NCCL_GRAPH_MIXING_SUPPORT=0 forbids"):
            blocks_of(model)
    step, _ = training(model)
    blocks = blocks_of(model)
    trained(model, step, rank, world_size, 2)
    hook = model.layers[1].attention.wq.weight.register_hook(lambda grad: grad)
    with pytest.raises(GraphError, match=r"layers\.1\.attention\.wq\.weight: a hook waits for its gradient"):
        trained(model, step, rank, world_size, 1)
    hook.remove()
    assert not blocks.is_captured and blocks.recorder.num_released == 1
    assert len(trained(model, step, rank, world_size, 4)) == 4 and blocks.num_replays == 0  # goes on without

    blocks = blocks_of(model)
    trained(model, step, rank, world_size, 2)
    layer = model.layers[2]
    norm = layer.ffn_norm.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("not when capturing")))
    with pytest.raises(GraphError, match=r"blocks cannot be captured: layers\.2.*not when capturing"):
        trained(model, step, rank, world_size, 1)
    norm.remove()
    assert stats(model).live_lease_bytes == 0 and stats(model).num_pending == 0
    assert len(trained(model, step, rank, world_size, 2)) == 2


@ranks(4, timeout=120)
@pytest.mark.slow
def test_beside_tensor_parallelism(rank, world_size):
    """Steps and blocks, with sequence parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
    results = []
    for how in ("eager", "step", "block"):
        torch.manual_seed(0)
        model = TinyLlama()
        parallelize_module(model, mesh["tp"], _llama_tp_plan(2))
        parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(tokens, model=model, optimizer=optimizer):
            loss = model(tokens).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        graphs = None
        if how == "step":
            step, _ = graphed(step, model, optimizer)
            graphs = step
        elif how == "block":
            graphs = blocks_of(model)
        losses = []
        for n in range(5):
            generator = torch.Generator().manual_seed(10 * n + mesh["gtp"].get_local_rank())
            losses.append(step(torch.randint(24, (2, 6), generator=generator)).item())
        results.append((losses, full_parameters(model)))
        if graphs is not None:
            assert graphs.num_replays == (3 if how == "step" else 2 * 2 * 3)
            assert results[-1][0] == results[0][0]
            assert_equal_to_reference(results[-1][1], results[0][1], "weight")


@ranks(2)
def test_a_weight_that_eager_code_used_first_in_the_same_backward(mesh, rank, world_size):
    """What came of it there waits for its scale, and is added to what the graph adds to."""
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model = TinyLlama(num_layers=NUM_LAYERS)
        model.layers[2].attention.wq.weight = model.layers[0].attention.wq.weight
        parallelize_module(model, mesh, GTPStyle(GTPConfig(), min_numel=30))
        step, _ = training(model)
        if is_graphed:
            blocks = blocks_of(model, ["layers.0"])
        values = trained(model, step, rank, world_size, 5)
        model(tokens_of(50, rank, world_size)[0]).square().mean().backward()
        results.append((values, full_gradients(model), full_parameters(model)))
    assert blocks.is_captured and blocks.num_eager == 0 and blocks.num_replays > 0
    assert results[0][0] == results[1][0]
    assert_equal_to_reference(results[1][1], results[0][1], "gradient")
    assert_equal_to_reference(results[1][2], results[0][2], "weight")
