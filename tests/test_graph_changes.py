"""What a user changes after graphs were captured, and what a step or block does that replays would not: noticed before a replay,
or refused at the capture. Over stand-ins (see graph_stand_in.py), whose replays run Python: so what is looked at is whether there
was one."""

import copy
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GraphError, GTPConfig, GTPStyle, stats
from gtp_dtensor.graph_checks import check_optimizers
from gtp_dtensor.graph_python import Decisions, Names
from tests.graph_stand_in import graphed
from tests.harness import ranks
from tests.reference import assert_equal_to_reference, full_parameters
from tests.test_block_graphs import blocks_of
from tests.test_block_graphs import build as build_blocks
from tests.test_graphs import build, tokens_of, trained, training


def _scale(grad):
    return grad * 2


# What is changed in a module, and how it is told.
CHANGES = {
    "a part in eval mode": (lambda m: m.attention.eval(), "attention.training"),
    "a number": (lambda m: setattr(m.ffn_norm, "eps", 0.5), "ffn_norm.eps"),
    "a hook of a forward": (lambda m: m.attention.register_forward_hook(lambda *_: None), "the hooks of"),
    "a hook of a gradient": (lambda m: m.attention.wq.weight.register_hook(_scale), "the hooks of the gradient of"),
    "a hook of a whole one's": (lambda m: m.ffn_norm.weight.register_hook(_scale), "the hooks of the gradient of"),
    "a hook after gradients": (
        lambda m: m.attention.wq.weight.register_post_accumulate_grad_hook(lambda param: None),
        "the hooks of the gradient of",
    ),
    "a submodule": (lambda m: setattr(m, "attention", copy.deepcopy(m.attention)), "a submodule of"),
    "one more submodule": (lambda m: setattr(m.ffn_norm, "adapter", nn.Identity()), "a submodule of"),
    "a forward": (lambda m: setattr(m.ffn_norm, "forward", type(m.ffn_norm).forward.__get__(m.ffn_norm)), ".forward"),
    "a tensor": (lambda m: setattr(m.attention, "mask", torch.zeros(())), "attention.mask"),
}


@ranks(2)
def test_steps_notice_what_modules_are_now(mesh, rank, world_size):
    model = build(mesh)
    model.layers[0].attention.mask = torch.ones(())
    step, optimizer = training(model)
    step, _ = graphed(step, model, optimizer)
    trained(step, rank, world_size, 3)

    def check(name, change, told):
        num_graphs, num_replays = step.num_graphs, step.num_replays
        assert num_graphs == 1
        change()
        with mock.patch("gtp_dtensor.graphs.logger") as log:
            trained(step, rank, world_size, 1)
        assert step.num_graphs == 0 and step.num_replays == num_replays, name
        assert told in log.warning.call_args.args[1], (name, log.warning.call_args)
        trained(step, rank, world_size, 2)
        assert step.num_graphs == 1 and step.num_replays == num_replays + 1

    for name, (change, told) in CHANGES.items():
        if "submodule" not in name:
            check(name, lambda change=change: change(model.layers[0]), told)
    check("a hook of steps", lambda: optimizer.register_step_post_hook(lambda *_: None), "the hooks of AdamW")
    check("fewer parameters", lambda: optimizer.param_groups[0]["params"].pop(), "what AdamW optimizes")
    check("a hook of the model", lambda: model.register_forward_hook(lambda *_: None), "the hooks of the model")
    check("a submodule", lambda: CHANGES["one more submodule"][0](model.layers[0]), "a submodule of layers.0.ffn_norm")


@ranks(2)
def test_blocks_notice_what_modules_are_now(mesh, rank, world_size):
    """They run without their graphs then, and train as without graphs at all."""
    for name in ("a number", "a hook of a gradient", "a hook of a forward"):
        change, told = CHANGES[name]
        weights = []
        for is_graphed in (False, True):
            model = build_blocks(mesh)
            step, _ = training(model)
            if is_graphed:
                blocks = blocks_of(model)
            trained(step, rank, world_size, 3)
            change(model.layers[1])
            with mock.patch("gtp_dtensor.graphed_block.logger") as log:
                trained(step, rank, world_size, 2)
            weights.append(full_parameters(model))
        assert blocks.num_eager == 2 and blocks.num_replays == 2 * 3 + 2 * 2 * 2, name
        assert log.warning.call_args.args[1] == "layers.1" and told in str(log.warning.call_args.args[2]), name
        assert_equal_to_reference(weights[1], weights[0], name)
    model = build_blocks(mesh)
    step, _ = training(model)
    blocks = blocks_of(model)
    trained(step, rank, world_size, 3)
    model.layers[1].register_forward_hook(lambda *_: None)  # runs around the graph
    trained(step, rank, world_size, 1)
    assert blocks.num_eager == 0


def test_what_the_captured_step_changes_itself_does_not_count():
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    model[0].num_calls, model[0].last, model[0].name = 0, None, "first"
    decisions = Decisions(model)
    model[0].num_calls, model[0].last = 1, torch.ones(())
    decisions.note_captured()
    model[0].num_calls, model[0].last = 2, torch.zeros(())
    assert decisions.changed() is None
    model[1].p = 0.1
    assert decisions.changed() == "1.p"
    model[1].p = 0.5
    assert decisions.changed() is None
    del model[0].name
    assert decisions.changed() == "0.name"
    model[0].name = "first"
    model[0].register_forward_hook(lambda *_: None).remove()
    assert decisions.changed() is None
    model[0].__class__ = type("Other", (nn.Linear,), {})
    assert decisions.changed() == "0"
    assert Decisions(model, with_root=False).changed() is None


_rate = 1.0


@ranks(2)
def test_variables_around_a_step(mesh, rank, world_size):
    """Of other values than at the capture they would be silently without effect."""
    global _rate
    _rate = 1.0
    model = build(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    clip, others = 0.5, [0]

    def step(tokens):
        others[0] += 1
        loss = _rate * model(tokens[0]).float().square().mean().clamp(max=clip)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, loss

    step, _ = graphed(step, model, optimizer)
    trained(step, rank, world_size, 4)
    assert step.num_replays == 2
    clip = 0.25
    with pytest.raises(GraphError, match=r"clip, a variable around the step, was 0\.5 .*is 0\.25.*as an argument"):
        trained(step, rank, world_size, 1)
    clip = 0.5
    trained(step, rank, world_size, 1)
    _rate = 2.0
    with pytest.raises(GraphError, match=r"_rate, .* was 1\.0 "):
        trained(step, rank, world_size, 1)
    _rate = 1.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(GraphError, match=r"optimizer, a variable around the step, was one SGD .* is one SGD"):
        trained(step, rank, world_size, 1)


@ranks(2)
def test_a_step_that_counts(mesh, rank, world_size):
    model = build(mesh)
    num, total = 0, torch.zeros(())

    def step(tokens):
        nonlocal num, total
        loss = model(tokens[0]).float().square().mean()
        loss.backward()
        model.zero_grad()
        num, total = num + 1, total + loss.detach()
        return loss, total

    step, _ = graphed(step, model)
    trained(step, rank, world_size, 2)
    before = total
    with pytest.raises(GraphError, match="makes num, a variable around it, another one.*count outside"):
        trained(step, rank, world_size, 1)
    assert num == 2 and total is before and step.num_graphs == 0  # as if it had not run
    partial = Names(torch.no_grad()(step.eager))  # a decorated one
    num = 5
    assert partial.changed()[0] == "num"


@ranks(2)
def test_inputs_that_are_written(mesh, rank, world_size):
    """A graph has inputs of its own: those that were given would stay as they are."""
    model = build(mesh)

    def step(tokens, total):
        loss = model(tokens[0]).float().square().mean()
        loss.backward()
        model.zero_grad()
        total += loss.detach()

    step, _ = graphed(step, model)
    total = torch.zeros(())
    for n in range(2):
        step(tokens_of(n, rank, world_size), total)
    before = total.clone()
    with pytest.raises(GraphError, match=r"the step writes to tensor 1 of its inputs, of shape \(\).*Return"):
        step(tokens_of(2, rank, world_size), total)
    assert before > 0 and torch.equal(total, before) and step.num_graphs == 0


class _Counting(nn.Linear):
    def forward(self, x, calls):
        calls += 1
        return super().forward(x)


class _Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([_Counting(16, 16)])
        self.calls = torch.zeros(())

    def forward(self, x):
        return self.layers[0](x, self.calls)


@ranks(2)
def test_inputs_that_a_block_writes(mesh, rank, world_size):
    model = _Counted()
    parallelize_module(model, mesh, GTPStyle(GTPConfig(), min_numel=30))
    blocks_of(model)
    for _ in range(2):
        model(torch.ones(2, 16)).sum().backward()
    with pytest.raises(GraphError, match=r"layers\.0 writes to tensor 1 of its inputs, of shape \(\)"):
        model(torch.ones(2, 16))
    assert model.calls == 2


@ranks(2)
def test_gradients_from_before_the_first_step(mesh, rank, world_size):
    """A step that ends by dropping gradients adds to those that it finds, and that is no graph of a step that finds none."""
    model = build(mesh)
    step, optimizer = training(model)
    step, _ = graphed(step, model, optimizer)
    model(tokens_of(50, rank, world_size)[0]).square().mean().backward()
    trained(step, rank, world_size, 4)
    assert step.num_replays == 2
    model(tokens_of(51, rank, world_size)[0]).square().mean().backward()
    with pytest.raises(GraphError, match=r"tok_embeddings\.weight: its gradient is not the one.*zero_grad"):
        trained(step, rank, world_size, 1)
    step.eager(tokens_of(5, rank, world_size))
    trained(step, rank, world_size, 1)
    assert step.num_replays == 3


@ranks(2)
def test_two_models(mesh, rank, world_size):
    """Both belong to the step: their compute shards, counters and schedules go on with replays."""
    config = GTPConfig(param_dtype=torch.bfloat16)
    losses = []
    for is_graphed in (False, True, "one"):
        student, teacher = build(mesh, config), build(mesh, config)
        teacher.requires_grad_(False)
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)

        def step(tokens, student=student, teacher=teacher, optimizer=optimizer):
            loss = (student(tokens[0]).float() - teacher(tokens[0]).float() - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss, loss

        if is_graphed:
            step, _ = graphed(step, student if is_graphed == "one" else nn.ModuleList([student, teacher]), optimizer)
        found = []
        for n in range(6):
            if is_graphed == "one" and n == 2:
                match = r"tok_embeddings\.weight: belongs to another model.*ModuleList"
                with pytest.raises(GraphError, match=match):
                    step(tokens_of(n, rank, world_size))
                assert stats(teacher).live_lease_bytes == 0
                step = step.eager
            found.append(step(tokens_of(n, rank, world_size))[0].item())
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters()):
                    slow.lerp_(fast, 0.5)
        losses.append(found)
        if is_graphed is True:
            assert step.num_replays == 4
    assert losses[0] == losses[1] == losses[2]


@ranks(2)
def test_graphs_in_graphs(mesh, rank, world_size):
    model = build_blocks(mesh)
    step, optimizer = training(model)
    blocks = blocks_of(model)
    with pytest.raises(ValueError, match=r"graph_blocks: layers\.0 is a graph already, or will be one: release\(\)"):
        blocks_of(model, ["layers.0"])
    graphed_step, _ = graphed(step, model, optimizer)
    trained(graphed_step, rank, world_size, 2)
    with pytest.raises(GraphError, match=r"layers\.0: a graph of graph_blocks\(\).*release\(\) those first"):
        trained(graphed_step, rank, world_size, 1)
    blocks.release()
    trained(graphed_step, rank, world_size, 1)
    assert graphed_step.num_replays == 1


@ranks(2)
def test_blocks_that_a_checkpoint_around_recomputes(mesh, rank, world_size):
    """A replay keeps no tensors for the checkpoint, and the recompute would bring it others than it waits for."""
    model = build_blocks(mesh, recompute=True)
    step, _ = training(model)
    blocks_of(model, ["layers.*.attention"])
    trained(step, rank, world_size, 2)
    with pytest.raises(GraphError, match=r"layers\.0\.attention: activation checkpointing around it calls it again"):
        trained(step, rank, world_size, 1)
    assert len(trained(step, rank, world_size, 2)) == 2


@ranks(2)
def test_blocks_that_leave_a_loss_in_an_attribute(mesh, rank, world_size):
    model = build_blocks(mesh)
    attention = model.layers[1].attention
    attention.register_forward_hook(lambda module, args, y: setattr(module, "balance", y.square().mean()))

    def step(tokens):
        loss = model(tokens[0]).square().mean() + attention.balance
        loss.backward()
        model.zero_grad()
        return loss, loss

    blocks_of(model)
    trained(step, rank, world_size, 2)
    with pytest.raises(GraphError, match=r"layers\.1: its forward leaves a tensor .* the attribute attention\.balance"):
        trained(step, rank, world_size, 1)


def test_settings_on_the_cpu():
    """A graph reads them late, or never."""
    weight = nn.Parameter(torch.empty(2, device="meta"))
    optimizer = torch.optim.SGD([weight], lr=torch.tensor(0.1))
    with pytest.raises(GraphError, match=r"SGD\.param_groups\[0\]\['lr'\] is a tensor on the CPU.*device=\"cuda\""):
        check_optimizers([optimizer], {})
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    check_optimizers([optimizer], {})


@ranks(2)
def test_gradients_of_inputs_are_the_users(mesh, rank, world_size):
    """The next replay writes the graph's own memory: what somebody keeps is not that."""
    results = []
    for is_graphed in (False, True):
        torch.manual_seed(0)
        model = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])})
        model.forward = lambda x, layers=model["layers"]: layers[1](layers[0](x).tanh())
        parallelize_module(model, mesh, GTPStyle(GTPConfig(), min_numel=30))
        if is_graphed:
            blocks = blocks_of(model)
        leaf = torch.ones(2, 16, requires_grad=True)
        kept = []

        def keep(module, args, kept=kept):
            if not args[0].is_leaf:
                kept.append(args[0])
                args[0].retain_grad() if len(kept) % 2 else args[0].register_hook(lambda grad: kept.append(grad))

        model["layers"][1].register_forward_pre_hook(keep)
        for n in range(6):
            if n == 3:  # a replay brings a new one
                leaf.grad = None
            model(leaf).square().sum().mul(n + 1).backward()
        grads = [one.grad if one.requires_grad and one.retains_grad else one.detach() for one in kept]
        results.append([leaf.grad, *grads])
    assert blocks.num_replays == 2 * 2 * 4 and blocks.num_eager == 0 and len(results[0]) > 6
    for n, (one, other) in enumerate(zip(*results)):
        assert torch.equal(one, other), n


class _Tells(torch.autograd.Function):
    seen = []

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        _Tells.seen.append(torch.is_autocast_enabled("cpu"))
        return grad


@ranks(2)
def test_backwards_are_captured_without_autocast(mesh, rank, world_size):
    """As they run where only the forward is under it, although a forward of the model is what captures."""
    model = build_blocks(mesh, GTPConfig())
    model.layers[1].ffn_norm.register_forward_hook(lambda module, args, y: _Tells.apply(y))
    blocks = blocks_of(model)
    _Tells.seen.clear()
    for n in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            y = model(tokens_of(n, rank, world_size)[0])
            assert blocks.is_captured is (n == 2)
        if n < 2:
            y.float().square().mean().backward()
    assert _Tells.seen == [False] * 3  # of which the last one is of the capture


@ranks(2)
def test_optimizers_that_were_not_named(mesh, rank, world_size):
    """Their learning rates and states would go unnoticed."""
    model = build(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(tokens):
        loss = model(tokens[0]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, loss

    graph, _ = graphed(step, model)
    trained(graph, rank, world_size, 2)
    with pytest.raises(GraphError, match=r"calls step\(\) of SGD, which graph_step\(\) was not given"):
        trained(graph, rank, world_size, 1)
    graph, _ = graphed(step, model, optimizer)
    trained(graph, rank, world_size, 3)
    assert graph.num_replays == 1
