"""Step graphs: what Python has to do around captures and replays, over a stand-in (see graph_stand_in.py), and the order of
streams under capture. On a GPU: test_graphs_gpu.py."""

import copy
import warnings
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from gtp_dtensor import (
    GraphError,
    GTPConfig,
    GTPStyle,
    clip_grad_norm_,
    graph_step,
    reset_stats,
    schedule_table,
    stats,
)
from gtp_dtensor.graph_checks import HostReads, check_optimizers
from gtp_dtensor.members import model_members
from gtp_dtensor.weight import ShardedWeight
from gtp_dtensor.wire import Amax
from tests.graph_stand_in import graphed
from tests.harness import ranks
from tests.models import MLP, VOCAB, TinyLlama
from tests.moe import MoEModel
from tests.reference import full_parameters, local_slice, replica_options
from tests.test_experts import grids
from tests.test_experts import shard as shard_with_experts
from tests.test_graphs_gpu import training_step


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def build(mesh, config=None, **options):
    torch.manual_seed(0)
    model = TinyLlama()
    parallelize_module(model, mesh, GTPStyle(config or GTPConfig(), min_numel=30, **options))
    return model


def training(model, **adam):
    """(a step over tokens (microbatches, batch, length), its optimizer)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-7, capturable=False, **adam)

    for group in optimizer.param_groups:
        group["capturable"] = None
    return training_step(model, optimizer), optimizer


def tokens_of(number, rank, world_size, num_microbatches=1, length=7):
    generator = torch.Generator().manual_seed(number)
    whole = torch.randint(VOCAB, (num_microbatches, 2 * world_size, length), generator=generator)
    return local_slice(whole.transpose(0, 1), rank, world_size).transpose(0, 1).contiguous()


def trained(step, rank, world_size, num_steps, num_microbatches=1):
    return [tuple(t.item() for t in step(tokens_of(n, rank, world_size, num_microbatches))) for n in range(num_steps)]


@ranks(2)
@pytest.mark.parametrize("num_microbatches", [slow(1), 3])
def test_replays_are_steps(mesh, rank, world_size, num_microbatches):
    """Losses, norms, weights, counters and schedule are those of steps that run as they are; so is what follows."""
    config = GTPConfig(param_dtype=torch.bfloat16)
    eager = build(mesh, config)
    step, _ = training(eager)
    expected = trained(step, rank, world_size, 8, num_microbatches)

    model = build(mesh, config)
    step, optimizer = training(model)
    step, _ = graphed(step, model, optimizer)
    found = trained(step, rank, world_size, 6, num_microbatches)
    assert step.num_graphs == 1 and step.num_replays == 4  # after two steps that warmed up
    for n in (6, 7):  # and two that need no graph
        found.append(tuple(t.item() for t in step.eager(tokens_of(n, rank, world_size, num_microbatches))))
    assert found == expected
    expected_weights = full_parameters(eager)
    for name, weight in full_parameters(model).items():
        assert torch.equal(weight, expected_weights[name]), name
    assert stats(model) == stats(eager) and stats(model).num_prefetch_hits > 0
    assert str(schedule_table(model)) == str(schedule_table(eager))
    assert schedule_table(model)


@ranks(2)
@pytest.mark.parametrize("gtp, egtp", [(1, 2), (2, 1)])
def test_experts_beside_other_axes(rank, world_size, gtp, egtp):
    """Where only experts are sharded, or only the others: all runtimes of the model are in the graph."""
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model = shard_with_experts(MoEModel(2), *grids(world_size, gtp, egtp))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x, model=model, optimizer=optimizer):
            loss = model(x).square().mean()
            loss.backward()
            norm = clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss, norm

        if is_graphed:
            step, _ = graphed(step, model, optimizer)
        values = []
        for n in range(5):
            x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(n))
            values += [t.item() for t in step(local_slice(x, rank, world_size))]
        results.append((values, stats(model)))
    assert step.num_replays == 3 and results[0] == results[1]
    assert results[0][1].num_replica_reductions > 0 and results[0][1].num_sharded_weights > 0


@ranks(2)
def test_counters_after_a_reset(mesh, rank, world_size):
    model = build(mesh)
    step, optimizer = training(model)
    step, _ = graphed(step, model, optimizer)
    trained(step, rank, world_size, 4)
    reset_stats(model)
    one = stats(model)
    assert one.num_forward_gathers == one.num_reductions == 0
    trained(step, rank, world_size, 1)
    one = stats(model)
    trained(step, rank, world_size, 2)
    three = stats(model)
    assert one.num_forward_gathers > 0 and three.num_forward_gathers == 3 * one.num_forward_gathers
    assert three.gather_bytes == 3 * one.gather_bytes and three.num_refreshes == 3 * one.num_refreshes
    assert three.peak_lease_bytes == one.peak_lease_bytes > 0 and three.num_pending == 0
    step.release()
    assert stats(model) == three


@ranks(2)
def test_forwards_between_replays_read_what_they_wrote(mesh, rank, world_size):
    """Nobody but a replay's own news tells eager code that compute shards are out of date."""
    outputs = []
    for is_graphed in (False, True):
        model = build(mesh, GTPConfig(param_dtype=torch.bfloat16))
        step, optimizer = training(model)
        if is_graphed:
            step, _ = graphed(step, model, optimizer)
        outputs.append([])
        for n in range(6):
            step(tokens_of(n, rank, world_size))
            outputs[-1].append(model(tokens_of(n, rank, world_size)[0]).detach())
    assert step.num_replays == 4 and all(torch.equal(*pair) for pair in zip(*outputs))
    assert not torch.equal(*outputs[0][-2:])


@ranks(2)
def test_a_backward_across_a_replay_is_refused(mesh, rank, world_size):
    """A replay writes the weights, as an optimizer does."""
    model = build(mesh)
    step, optimizer = training(model)
    step, _ = graphed(step, model, optimizer)
    trained(step, rank, world_size, 3)
    y = model(tokens_of(0, rank, world_size)[0])
    trained(step, rank, world_size, 1)
    with pytest.raises(RuntimeError, match="modified between a forward and its backward"):
        y.sum().backward()


@ranks(2)
def test_shapes_and_modes_have_graphs_of_their_own(mesh, rank, world_size):
    model = build(mesh)
    step, optimizer = training(model)
    step, _ = graphed(step, model, optimizer)
    trained(step, rank, world_size, 3)
    longer = tokens_of(9, rank, world_size, length=9)
    with pytest.raises(
        GraphError, match=r"inputs \[\(1, 2, 9\) int64\] in train mode.*graphs.*\(1, 2, 7\).*max_graphs=2"
    ):
        step(longer)
    before = full_parameters(model)
    assert all(torch.equal(weight, before[name]) for name, weight in full_parameters(model).items())
    step.eager(longer)  # goes on without
    trained(step, rank, world_size, 1)
    assert step.num_replays == 2
    step._max_graphs = 3
    for _ in range(4):
        step(longer)
    assert step.num_graphs == 2 and step.num_replays == 4
    model.eval()
    trained(step, rank, world_size, 3)
    assert step.num_graphs == 3 and step.num_replays == 5


@ranks(2)
def test_train_and_eval_graphs_beside_each_other(mesh, rank, world_size):
    config = GTPConfig(param_dtype=torch.bfloat16)
    losses = []
    for is_graphed in (False, True):
        model = build(mesh, config)
        train, optimizer = training(model)

        def evaluate(tokens, model=model):
            with torch.no_grad():
                return model(tokens[0]).float().square().mean()

        if is_graphed:
            train, _ = graphed(train, model, optimizer)
            evaluate, _ = graphed(evaluate, model)
        losses.append([])
        for n in range(6):
            losses[-1] += [t.item() for t in train(tokens_of(n, rank, world_size))]
            losses[-1].append(evaluate(tokens_of(100 + n, rank, world_size)).item())
    assert train.num_replays == evaluate.num_replays == 4
    assert losses[0] == losses[1]


@ranks(2)
@pytest.mark.parametrize("zeroes", ["first", "last", "outside", "never"])
def test_gradients_between_steps(mesh, rank, world_size, zeroes):
    """``.grad`` after a replay is what the step leaves there. A step that accumulates is replayed while it finds the
    gradients that it was captured with."""
    found = []
    for is_graphed in (False, True):
        model = build(mesh)

        def step(tokens, model=model):
            if zeroes == "first":
                model.zero_grad()
            model(tokens[0]).float().square().mean().backward()
            if zeroes == "last":
                model.zero_grad()

        if is_graphed:
            step, _ = graphed(step, model)
        found.append([])
        for n in range(5):
            if zeroes == "outside":
                model.zero_grad()
            step(tokens_of(n, rank, world_size))
            grads = [param.grad for param in model.parameters()]
            found[-1].append([None if grad is None else grad.to_local().clone() for grad in grads])
    assert step.num_replays == 3
    for one, other in zip(*found):
        assert all(a is b or torch.equal(a, b) for a, b in zip(one, other))
    assert (found[0][-1][0] is None) == (zeroes == "last")
    if zeroes == "never":
        model.zero_grad()
        with pytest.raises(GraphError, match=r"tok_embeddings\.weight: its gradient is not the one.*zero_grad"):
            step(tokens_of(0, rank, world_size))


@ranks(2)
def test_a_step_that_fails_while_it_is_captured(mesh, rank, world_size):
    """The error names the module; nothing was computed or forgotten, and training goes on without a graph."""
    config = GTPConfig(param_dtype=torch.bfloat16)
    eager = build(mesh, config)
    step, _ = training(eager)
    expected = trained(step, rank, world_size, 5)
    model = build(mesh, config)
    step, optimizer = training(model)
    step, stand_in = graphed(step, model, optimizer)
    found = trained(step, rank, world_size, 2)
    broken = model.layers[1].feed_forward

    def read_the_host(self, x):
        if stand_in._is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing")
        return type(self).__mro__[1].forward(self, x)

    s = stats(model)
    with mock.patch.object(type(broken), "forward", read_the_host, create=True):
        with pytest.raises(GraphError, match=r"layers\.\d\.feed_forward: \w*SwiGLU \(.*test_graphs.py.*not permitted"):
            trained(step, rank, world_size, 1)
    assert stats(model) == s and s.live_lease_bytes == 0 and step.num_graphs == 0
    assert all(not t.is_capturing for r in step._runtimes.all for t in r.domain.transports)
    for n in (2, 3, 4):
        found.append(tuple(t.item() for t in step.eager(tokens_of(n, rank, world_size))))
    assert found == expected
    assert stats(model).num_mispredictions == stats(eager).num_mispredictions


@ranks(2)
def test_what_was_replaced_is_captured_anew(mesh, rank, world_size):
    model = build(mesh)
    step, optimizer = training(model)
    step, stand_in = graphed(step, model, optimizer)
    trained(step, rank, world_size, 4)
    optimizer.load_state_dict(optimizer.state_dict())  # the same tensors
    trained(step, rank, world_size, 1)
    assert step.num_graphs == 1
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with mock.patch("gtp_dtensor.graphs.logger") as log:
        trained(step, rank, world_size, 2)
    assert step.num_graphs == 0 and stand_in.num_released == 1
    assert log.warning.call_args.args[1] == "the state 'step' of tok_embeddings.weight"
    trained(step, rank, world_size, 1)
    assert step.num_graphs == 1
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    with mock.patch("gtp_dtensor.graphs.logger") as log:
        trained(step, rank, world_size, 1)
    assert log.warning.call_args.args[1] == "tok_embeddings.weight" and step.num_graphs == 0
    trained(step, rank, world_size, 2)
    for param in model.layers[0].parameters():
        param.requires_grad_(False)
    trained(step, rank, world_size, 1)
    assert step.num_graphs == 0


@ranks(2)
def test_frozen_weights_that_are_written_between_replays(mesh, rank, world_size):
    """The graph does not rewrite their compute shards."""
    config = GTPConfig(param_dtype=torch.bfloat16)
    losses = []
    for is_graphed in (False, True):
        model = build(mesh, config)
        model.layers[0].requires_grad_(False)
        step, optimizer = training(model)
        if is_graphed:
            step, stand_in = graphed(step, model, optimizer)
        losses.append(trained(step, rank, world_size, 4))
        with torch.no_grad():
            model.layers[0].attention.wq.weight.mul_(3.0)
        reset_stats(model)
        losses[-1] += trained(step, rank, world_size, 2)
    assert losses[0] == losses[1] and step.num_replays == 4


# ---- what is refused


def test_what_an_optimizer_must_not_keep_on_the_host():
    model = MLP()
    names = {id(param): name for name, param in model.named_parameters()}
    with pytest.raises(GraphError, match=r"AdamW with capturable=False \(param_groups\[0\]\).*capturable=True"):
        check_optimizers([torch.optim.AdamW(model.parameters())], names)
    check_optimizers([torch.optim.SGD(model.parameters(), lr=0.1)], names)


@ranks(2)
def test_numbers_that_change(mesh, rank, world_size):
    model = build(mesh)
    step, optimizer = training(model)
    step, _ = graphed(step, model, optimizer)
    trained(step, rank, world_size, 3)
    optimizer.param_groups[0]["lr"] *= 0.5
    with pytest.raises(
        GraphError, match=r"param_groups\[0\]\['lr'\] was 0\.0078125 .* and is 0\.00390625.*make it a tensor"
    ):
        trained(step, rank, world_size, 1)
    step.reset()
    trained(step, rank, world_size, 3)
    assert step.num_graphs == 1

    def with_schedule(tokens):
        outputs = step.eager(tokens)
        optimizer.param_groups[0]["lr"] *= 0.5
        return outputs

    other, _ = graphed(with_schedule, model, optimizer)
    trained(other, rank, world_size, 2)
    lr = optimizer.param_groups[0]["lr"]
    with pytest.raises(GraphError, match=r"changes AdamW.param_groups\[0\]\['lr'\] on the host.*schedulers outside"):
        trained(other, rank, world_size, 1)
    assert optimizer.param_groups[0]["lr"] == lr
    assert stats(model).num_pending == 0


@ranks(1)
def test_arguments(mesh):
    with pytest.raises(ValueError, match="on one GPU, and its parameters are on cpu"):
        graph_step(lambda: None, nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"max_graphs=0\): must be an integer of at least 1"):
        graphed(lambda: None, nn.Linear(2, 2), max_graphs=0)
    step, _ = graphed(lambda x: x, nn.Linear(2, 2))
    with pytest.raises(ValueError, match="require no gradient"):
        step(torch.ones(2, requires_grad=True))
    with pytest.raises(ValueError, match="tensors and constants"):
        step({1, 2})


@ranks(2)
def test_debug_checks_stop_the_host(mesh):
    with pytest.raises(ValueError, match="check_param_states=True"):
        graphed(lambda: None, build(mesh, GTPConfig(check_param_states=True)))


class _Reads(nn.Module):
    def forward(self, x):
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at x.cpp:1.)")
        return x


def test_host_reads_are_named():
    """torch's warning of each is turned into the place where it happens."""
    model = nn.ModuleDict({"first": nn.Linear(4, 4), "second": _Reads()})
    model["first"].weight.register_hook(lambda grad: warnings.warn("called a synchronizing CUDA operation") or grad)
    reads = HostReads(model)
    with mock.patch("torch.cuda.get_sync_debug_mode", lambda: 0), mock.patch("torch.cuda.set_sync_debug_mode") as mode:
        with warnings.catch_warnings(record=True) as others, reads.watching():
            warnings.warn("Synchronization debug mode is a prototype feature")
            warnings.warn("something else")
            model["second"](model["first"](torch.ones(1, 4))).sum().backward()
    assert [str(other.message) for other in others] == ["something else"]
    assert [call.args for call in mode.call_args_list] == [("warn",), (0,)]
    assert len(reads.found) == 2
    message = r"second: _Reads \(\S*test_graphs.py:\d+\); in first.weight: a hook of its gradient \(\S*test_graphs.py"
    with pytest.raises(GraphError, match=message):
        reads.refuse()


@ranks(2)
def test_checkpointed_blocks_and_replicas(rank, world_size):
    """Gathers for recomputes, and what is kept for backwards, are in the captured step and in its counters."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dps", "gtp"))
    results = []
    for is_graphed in (False, True):
        model = build(mesh["gtp"], GTPConfig(param_dtype=torch.bfloat16), **replica_options(mesh))
        for layer in model.layers:
            forward = layer.forward
            layer.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
        step, optimizer = training(model)
        if is_graphed:
            step, _ = graphed(step, model, optimizer)
        results.append((trained(step, rank, world_size, 5), stats(model)))
    assert step.num_replays == 3 and results[1][1].num_recompute_gathers + results[1][1].num_replica_reductions > 0
    assert results[0] == results[1]


@ranks(2)
@pytest.mark.parametrize("wire", ["fp8", slow("fp8_rowwise"), slow("mxfp8")])
def test_what_a_graph_reads_stays_where_it_is(mesh, wire):
    """Compute shards, largest values and scales, from one quantization to the next, of all weights or of some."""
    torch.manual_seed(0)
    model = MLP((64, 64, 64, 64), bias=False)
    parallelize_module(model, mesh, GTPStyle(GTPConfig(wire_format=wire, param_dtype=torch.bfloat16)))
    weights = [member for member in model_members(model) if isinstance(member, ShardedWeight)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def addresses():
        return [
            [
                t.data_ptr()
                for t in (*w.quantized.amax.values(), *(p for parts in w.quantized.parts.values() for p in parts))
            ]
            for w in weights
        ]

    def step():
        model(torch.ones(2, 64)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    before, values = addresses(), [w.quantized.amax[Amax.MATRIX].clone() for w in weights]
    step()
    weights[0].param.requires_grad_(False)
    step()
    assert addresses() == before and all(len(one) > 1 for one in before)
    assert all((w.quantized.amax[Amax.MATRIX] != value).any() for w, value in zip(weights, values))
    assert stats(model).num_quantizations > 2 * len(weights)
