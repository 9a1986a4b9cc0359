"""te.ops.GroupedLinear under GTP, on a stand-in for TransformerEngine; tests/test_te_gpu.py has the real one."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, stats
from gtp_dtensor.members import STATE, weight_of
from gtp_dtensor.schedule import Kind
from gtp_dtensor.te_ops import _Passage
from gtp_dtensor.te_weight import TEWeight, WeightUse
from tests import te_stand_in as te
from tests import te_stand_in_ops as ops
from tests.harness import ranks
from tests.reference import assert_close_to_reference, build_pair, full, full_parameters, mean_square

SPLITS = torch.tensor([4, 0, 5])
DIM = 128


class Net(nn.Module):
    """Two in a pipeline, which a Sequential built before GTP may hold, and one by itself."""

    def __init__(self, reentrant=None, dim=16, num=3, **options):
        super().__init__()
        self.first = ops.Sequential(
            ops.GroupedLinear(num, dim, 2 * dim, **options), ops.Tanh(), ops.GroupedLinear(num, 2 * dim, dim, **options)
        )
        self.second = ops.GroupedLinear(num, dim, dim + 8, bias=False, **options)
        self.splits, self.reentrant = SPLITS[-num:], reentrant
        for param in self.parameters():
            if param.dim() == 1:
                nn.init.uniform_(param, 0.5, 1.5)

    def body(self, x):
        return self.second(self.first(x, self.splits, self.splits), self.splits)

    def forward(self, x):
        return self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)


def by_expert(params):
    found = {}
    for name, value in params.items():
        stack = name.rpartition(".")[2] == "weight"
        found |= {f"{name}{index}": one for index, one in enumerate(value)} if stack else {name: value}
    return found


def gradients(model):
    return {name: full(param.grad) for name, param in model.named_parameters()}


def batch_of(rank, step=0, rows=9, dim=16):
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(100 * step + rank))


def compare(model, reference, rank, world_size, call):
    """``call(model, x)`` on one batch, beside the reference on all."""
    inputs = [batch_of(peer, rows=int(model.splits.sum())).requires_grad_() for peer in range(world_size)]
    outs = [call(reference, x) for x in inputs]
    for y in outs:
        (mean_square(y) / world_size).backward()
    x = inputs[rank].detach().clone().requires_grad_()
    y = call(model, x)
    mean_square(y).backward()
    assert torch.equal(y, outs[rank]) and torch.equal(x.grad, inputs[rank].grad * world_size)
    assert_close_to_reference(by_expert(gradients(model)), gradients(reference))


@ranks(2)
@pytest.mark.parametrize("reentrant", [None, pytest.param(True, marks=pytest.mark.slow), False])
def test_pipelines_as_unsharded(mesh, rank, world_size, reentrant):
    with te.installed():
        model, reference = build_pair(lambda: Net(reentrant))
        model(batch_of(0))  # TE keeps the parameters that it met
        parallelize_module(model, mesh, GTPStyle(min_numel=100))
        compare(model, reference, rank, world_size, lambda net, x: net(x))
        found, kept = stats(model), 0 if reentrant is None else 3
        assert (found.num_forward_gathers, found.num_recompute_gathers) == (3, kept)
        assert (found.num_backward_gathers, found.num_reductions) == (3 - kept, 3)
        assert found.live_lease_bytes == found.num_pending == found.num_mispredictions == 0
        assert found.num_sharded_weights == 3
        kinds = {use.kind for use in weight_of(model.second, "weight").runtime.schedule.period()}
        first = Kind.INFERENCE if reentrant else Kind.FORWARD
        assert kinds == {first, Kind.BACKWARD} | ({Kind.RECOMPUTE} if kept else set())
        mean_square(model(batch_of(rank).requires_grad_())).backward()
        found = stats(model)
        assert found.num_prefetch_hits > 0 and found.num_kept_at_turn == (reentrant is None)
        assert found.num_backward_gathers == 2 * (3 - kept) - found.num_kept_at_turn
        assert not any(name.startswith(("weight", "bias")) for name in model.second.__dict__)


@ranks(2)
@pytest.mark.parametrize(("num", "packs", "min_numel"), [(1, True, 100), (3, False, 100), (3, True, 100_000)])
def test_one_expert_separate_gradients_and_small_stacks(mesh, rank, world_size, num, packs, min_numel):
    with te.installed():
        model, reference = build_pair(lambda: Net(num=num, packs=packs))
        parallelize_module(model, mesh, GTPStyle(min_numel=min_numel))
        assert stats(model).num_sharded_weights == (3 if min_numel == 100 else 0)
        compare(model, reference, rank, world_size, lambda net, x: net(x))


@ranks(2)
def test_what_the_engine_wants(mesh):
    """Only the input's gradient; a captured weight and bias; hooks; what is frozen; a whole stack."""
    with te.installed():
        model, reference = build_pair(Net)
        small = parallelize_module(
            copy.deepcopy(model), mesh, GTPStyle(GTPConfig(calculate_per_token_loss=True), min_numel=9999)
        )
        parallelize_module(model, mesh, GTPStyle(GTPConfig(calculate_per_token_loss=True), min_numel=100))
        x = batch_of(0).requires_grad_()
        mean_square(reference(x)).backward()
        expected = {name: 2 * grad for name, grad in gradients(reference).items()}
        for net in (model, small):
            weight, bias = net.first[0].weight, net.first[2].bias1
            reset_stats(net)
            torch.autograd.grad(mean_square(net(x)), x)
            assert stats(net).num_reductions == 0
            found = torch.autograd.grad(mean_square(net(x)), [weight, bias])
            assert_close_to_reference(
                by_expert({"first.0.weight": full(found[0]), "first.2.bias1": full(found[1])}),
                {
                    name: expected[name]
                    for name in ("first.0.weight0", "first.0.weight1", "first.0.weight2", "first.2.bias1")
                },
            )
            assert all(param.grad is None for param in net.parameters())
            assert stats(net).num_reductions == (1 if net is model else 0)
            seen = {}
            handles = [
                param.register_post_accumulate_grad_hook(lambda param, name=name: seen.update({name: full(param.grad)}))
                for name, param in (("first.0.weight", weight), ("first.2.bias1", bias))
            ]
            mean_square(net(x)).backward()
            for handle in handles:
                handle.remove()
            assert_close_to_reference(by_expert(seen), {name: expected[name] for name in by_expert(seen)})
            assert_close_to_reference(by_expert(gradients(net)), expected)
            net.zero_grad()
            for name in ("weight", "bias0"):
                net.first[0].get_parameter(name).requires_grad_(False)
            mean_square(net(x)).backward()
            assert net.first[0].weight.grad is None and net.first[0].bias0.grad is None
            assert_close_to_reference(full(net.first[0].bias1.grad), expected["first.0.bias1"])
            with torch.no_grad():
                assert torch.equal(net(x), reference(x))
            assert stats(net).live_lease_bytes == stats(net).num_pending == 0


@ranks(2)
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", ["current", pytest.param("block", marks=pytest.mark.slow)])
def test_fp8(mesh, rank, kind, native):
    with te.installed():
        recipe = te.Recipe(kind)
        reference = Net(dim=DIM)
        if native:
            with te.quantized_model_init(recipe):
                model = Net(dim=DIM)
        else:
            model = Net(dim=DIM)
        parallelize_module(model, mesh, GTPStyle(GTPConfig(calculate_per_token_loss=True), min_numel=1000))
        weight = model.second.__dict__[STATE].weights["weight"]
        assert weight.wire_name == ("fp32" if not native else "fp8" if kind == "current" else "fp8_block")
        for name, value in by_expert(full_parameters(model)).items():
            with torch.no_grad():
                reference.get_parameter(name).copy_(value)
        results = []
        reset_stats(model)
        for net in (model, reference):
            x = batch_of(0, 0, 9, DIM).requires_grad_()
            with te.autocast(recipe):
                y = net(x)
            mean_square(y).backward()
            results.append((y, x.grad))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
        assert_close_to_reference(by_expert(gradients(model)), {n: 2 * g for n, g in gradients(reference).items()})
        if native and kind == "current":
            numel = 3 * (2 * DIM * DIM * 2 + DIM * (DIM + 8))
            assert stats(model).gather_bytes == 2 * numel
        with torch.no_grad():
            plain = model(batch_of(0, 0, 9, DIM))  # outside of an autocast
        assert plain.isfinite().all() and stats(model).live_lease_bytes == 0


@ranks(2)
def test_parameters_that_a_pipeline_does_not_know_and_writes_are_refused(mesh):
    with te.installed():
        model = parallelize_module(Net(), mesh, GTPStyle(min_numel=100))
        loss = mean_square(model(batch_of(0)))
        with torch.no_grad():
            model.second.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"second\.weight: the weight was modified between"):
            loss.backward()
        state = {name: param.detach().clone() for name, param in model.named_parameters()}
        model.load_state_dict(state, assign=True)
        with pytest.raises(RuntimeError, match=r"first\.2\.weight: .*built with another parameter"):
            mean_square(model(batch_of(0))).backward()
        model.first._module_groups = None
        mean_square(model(batch_of(0))).backward()
        assert all(param.grad is not None for param in model.parameters())
        offloads = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)
        with offloads:  # no handle is saved
            mean_square(model(batch_of(0))).backward()


@ranks(2)
def test_initialisation_copies_and_state(mesh, rank):
    with te.installed():
        torch.manual_seed(3)
        expected = ops.GroupedLinear(3, 16, 32)
        model = ops.GroupedLinear(3, 16, 32, device="meta")
        parallelize_module(model, mesh, GTPStyle(min_numel=100))
        with pytest.raises(RuntimeError, match=r"weight: is on the meta device"):
            model(batch_of(0), SPLITS)
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        model.reset_parameters()
        assert_close_to_reference(by_expert(full_parameters(model)), dict(expected.named_parameters()), rtol=0)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for param in twin.parameters():
                param.zero_()
        gc.disable()
        try:
            for one in (model, twin):
                mean_square(one(batch_of(rank), SPLITS)).backward()
            kinds = (WeightUse, TEWeight, _Passage)
            assert not [thing for thing in gc.get_objects() if isinstance(thing, kinds)]
        finally:
            gc.enable()
        assert full(model.weight.grad).abs().sum() > 0 == full(twin.weight.grad).abs().sum()
        fresh = parallelize_module(ops.GroupedLinear(3, 16, 32), mesh, GTPStyle(min_numel=100))
        fresh.load_state_dict(
            {"weight": model.weight} | {name: p for name, p in model.named_parameters() if "bias" in name}
        )
        assert torch.equal(full(fresh.weight), full(model.weight))
        state = {
            name: distribute_tensor(param.detach(), mesh, [Replicate()]) for name, param in expected.named_parameters()
        }
        fresh.load_state_dict(state)  # of experts by themselves
        assert_close_to_reference(by_expert(full_parameters(fresh)), dict(expected.named_parameters()), rtol=0)


@ranks(2)
def test_mixed_precision(mesh, rank):
    """A bias of 100 reaches every output; weights compute in param_dtype, or in autocast's."""
    with te.installed():
        model = ops.GroupedLinear(3, 16, 32)
        for name, param in model.named_parameters():
            nn.init.constant_(param, 100.0 if "bias" in name else 0.0)
        parallelize_module(model, mesh, GTPStyle(GTPConfig(param_dtype=torch.bfloat16), min_numel=100))
        y = model(batch_of(rank), SPLITS)
        assert y.dtype == torch.bfloat16 and (y == 100).all()
        mean_square(y.float()).backward()
        assert model.weight.grad.dtype == torch.float32
        model = parallelize_module(ops.GroupedLinear(3, 16, 32), mesh, GTPStyle(min_numel=100))
        with torch.autocast("cpu", torch.bfloat16):
            y = model(batch_of(rank), SPLITS)
        assert y.dtype == torch.bfloat16


@ranks(2)
def test_what_cannot_be_served_is_refused_by_name(mesh):
    class Scaled(ops.GroupedLinear):
        def fuser_forward(self, *args, **kwargs):
            return 2 * super().fuser_forward(*args, **kwargs)

    with te.installed():
        for build, message in (
            (lambda: te.RMSNorm(64), "RMSNorm of te.ops"),
            (lambda: Scaled(2, 32, 32), "GroupedLinear of te.ops"),
            (lambda: ops.GroupedLinear(2, 32, 32, accumulate_into_main_grad=True), "accumulate_into_main_grad=True"),
            (lambda: ops.GroupedLinear(2, 32, 32, delay_wgrad_compute=True), "delay_wgrad_compute=True.*lost"),
        ):
            model = nn.Sequential(nn.Linear(64, 64), build())
            with pytest.raises(ValueError, match=rf"1\.\w+ of shape .*{message}"):
                parallelize_module(model, mesh, GTPStyle())
        model = parallelize_module(ops.GroupedLinear(2, 32, 32), mesh, GTPStyle())
        with te.quantized_model_init(te.Recipe("delayed")):  # scales that TE's pipelines forget
            delayed = ops.GroupedLinear(2, 32, 32)
        with pytest.raises(
            ValueError, match=r"GroupedLinear of te.ops with 2 weights .*Float8Quantizer.*wire_format='bf16'"
        ):
            parallelize_module(delayed, mesh, GTPStyle())
        parallelize_module(delayed, mesh, GTPStyle(GTPConfig(wire_format="bf16")))
        recipe = te.Recipe("current")
        recipe.mxfp8 = lambda: True
        with te.autocast(recipe), pytest.raises(NotImplementedError, match="weight: with Recipe .*fuse operations"):
            model(batch_of(0, dim=32), SPLITS)
        model = parallelize_module(
            ops.GroupedLinear(2, 32, 32, rng_state_tracker_function=lambda: None), mesh, GTPStyle()
        )
        with pytest.raises(NotImplementedError, match="rng_state_tracker_function"):
            model.reset_parameters()
