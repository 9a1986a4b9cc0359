"""``gtp_dtensor.te`` on a stand-in for TransformerEngine; tests/test_te_gpu.py has the real one."""

import contextlib
import copy
import gc
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from gtp_dtensor import CheckedLoadPlanner, GTPConfig, GTPStyle, materialized, reset_stats, stats
from gtp_dtensor.layout import RowCut
from gtp_dtensor.members import STATE
from gtp_dtensor.te import amax_group, plain_extra_state
from gtp_dtensor.te_weight import TEWeight, WeightUse
from gtp_dtensor.wire import Amax
from tests import te_stand_in as te
from tests.harness import ranks
from tests.reference import assert_close_to_reference, build_pair, full, full_parameters, mean_square
from tests.te_stand_in_tensors import Quantizer

DIM = 128


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


class Net(nn.Module):
    """Each class of the protocol, and a checkpoint around all of them if asked for."""

    def __init__(self, reentrant=None, dim=16, hidden=37, num_experts=2):
        super().__init__()
        self.a = te.LayerNormLinear(dim, hidden)
        self.b = te.Linear(hidden, dim)
        self.c = te.GroupedLinear(num_experts, dim, dim)
        self.num_experts, self.reentrant = num_experts, reentrant
        for param in self.parameters():
            if param.dim() == 1:
                nn.init.uniform_(param, 0.5, 1.5)

    def body(self, x):
        part = x.shape[0] // (self.num_experts + 1)
        splits = [part] * (self.num_experts - 1)
        return self.c(self.b(self.a(x).tanh()), [*splits, x.shape[0] - sum(splits)])

    def forward(self, x):
        return self.body(x) if self.reentrant is None else checkpoint(self.body, x, use_reentrant=self.reentrant)


def by_expert(params):
    """The parameters of a sharded Net under the names that they have in an unsharded one."""
    stack = params.pop("c.weight")
    return params | {f"c.weight{index}": one for index, one in enumerate(stack)}


def gradients(model):
    return {name: full(param.grad) for name, param in model.named_parameters()}


@contextlib.contextmanager
def nothing_packed():
    """Rows that the axis does not divide are padded in what is sent: GEMMs write into that, and nobody copies."""
    packed = []
    with mock.patch.object(RowCut, "pack", lambda self, tensor: packed.append(self)):
        yield
    assert packed == []


def batch_of(rank, step=0, rows=9, dim=16):
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(100 * step + rank))


@ranks(2)
@pytest.mark.parametrize("reentrant", [None, slow(True), False])
def test_every_class_as_unsharded(mesh, rank, world_size, reentrant):
    with te.installed(), nothing_packed():
        model, reference = build_pair(lambda: Net(reentrant))
        parallelize_module(model, mesh, GTPStyle(min_numel=100))
        outs = []
        for peer in range(world_size):
            x = batch_of(peer).requires_grad_()
            y = reference(x)
            (mean_square(y) / world_size).backward()
            outs.append((x, y))
        x = batch_of(rank).requires_grad_()
        y = model(x)
        mean_square(y).backward()
        assert torch.equal(y, outs[rank][1]) and torch.equal(x.grad, outs[rank][0].grad * world_size)
        assert_close_to_reference(by_expert(gradients(model)), gradients(reference))
        found = stats(model)
        kept = 0 if reentrant is None else 3
        assert (found.num_forward_gathers, found.num_recompute_gathers) == (3, kept)
        assert (found.num_backward_gathers, found.num_reductions) == (3 - kept, 3)
        assert found.live_lease_bytes == found.num_pending == found.num_mispredictions == 0
        mean_square(model(batch_of(rank).requires_grad_())).backward()
        found = stats(model)
        assert found.num_prefetch_hits > 0 and found.num_kept_at_turn == (reentrant is None)  # from the second pass on
        assert found.num_backward_gathers == 2 * (3 - kept) - found.num_kept_at_turn
        parts = model.b.__dict__
        assert "weight" not in parts and isinstance(model.b.weight, DTensor) and not parts["fuse_wgrad_accumulation"]


@ranks(2)
def test_what_the_engine_wants(mesh, rank, world_size):
    """Only the input's gradient; a captured weight; hooks; a frozen weight."""
    with te.installed():
        model, reference = build_pair(Net)
        parallelize_module(model, mesh, GTPStyle(GTPConfig(calculate_per_token_loss=True), min_numel=100))
        x = batch_of(0).requires_grad_()
        mean_square(reference(x)).backward()
        weight, expected = model.b.weight, 2 * reference.b.weight.grad
        reset_stats(model)
        torch.autograd.grad(mean_square(model(x)), x)
        assert stats(model).num_reductions == 0
        (found,) = torch.autograd.grad(mean_square(model(x)), weight)
        assert_close_to_reference(full(found), expected)
        assert weight.grad is None and stats(model).num_reductions == 1
        seen = []
        handle = weight.register_post_accumulate_grad_hook(lambda param: seen.append(full(param.grad)))
        mean_square(model(x)).backward()
        handle.remove()
        assert_close_to_reference(seen[0], expected)
        model.zero_grad()
        model.a.weight.requires_grad_(False)
        model.c.weight.requires_grad_(False)
        mean_square(model(x)).backward()
        assert model.a.weight.grad is None and model.c.weight.grad is None
        assert_close_to_reference(full(weight.grad), expected)
        with torch.no_grad():
            assert torch.equal(model(x), reference(x))
        found = stats(model)
        assert found.live_lease_bytes == found.num_pending == 0


@ranks(2)
def test_what_a_backward_cannot_do_is_refused(mesh):
    with te.installed():
        model = parallelize_module(Net(), mesh, GTPStyle(min_numel=100))
        loss = mean_square(model(batch_of(0)))
        with torch.no_grad():
            model.b.weight.mul_(2)
        with pytest.raises(RuntimeError, match=r"b\.weight: the weight was modified between"):
            loss.backward()
        offloads = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved)
        with offloads, pytest.raises(RuntimeError, match=r"weight: .*not gathered.*offloaded"):
            model(batch_of(0))
        with pytest.raises(RuntimeError, match=r"c\.weight: a backward with create_graph=True"):
            torch.autograd.grad(mean_square(model(batch_of(0))), model.b.weight, create_graph=True)
        with pytest.raises(TypeError, match="inp"):
            model.b()
        assert stats(model).live_lease_bytes == 0


@ranks(2)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, slow(torch.bfloat16)])
def test_wgrad_is_written_into_what_is_sent(mesh, rank, reduce_dtype):
    with te.installed(), nothing_packed():
        config = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, calculate_per_token_loss=True)
        models = build_pair(
            lambda: nn.Sequential(te.Linear(16, 37, bias=False), te.GroupedLinear(3, 37, 5, bias=False))
        )
        fused, reference = models
        parallelize_module(fused, mesh, GTPStyle(config, min_numel=100))
        assert fused[1].__dict__[STATE].weights["weight"].cut.dim == 1  # out features of three experts
        reference.bfloat16()
        x = batch_of(0).bfloat16()
        for model in models:
            mean_square(model[1](model[0](x), [0, 5, 4]).float()).backward()
        assert fused[0].weight.grad.dtype == torch.float32
        grad = 2 * torch.stack([reference[1].get_parameter(f"weight{index}").grad for index in range(3)]).float()
        rtol = 2**-8  # the reference's gradient is rounded to bfloat16
        assert_close_to_reference(full(fused[1].weight.grad), grad, rtol=rtol)
        assert_close_to_reference(full(fused[0].weight.grad), 2 * reference[0].weight.grad.float(), rtol=rtol)


FORMATS = {"delayed": "fp8", "current": "fp8", "block": "fp8_block", "mx": "mxfp8", "nv": "nvfp4"}


def build_fp8(recipe, native):
    def build():
        with te.quantized_model_init(recipe) if native else contextlib.nullcontext():
            model = Net(dim=DIM, hidden=2 * DIM + 32, num_experts=3)
        return model

    return build


def train_fp8(model, reference, recipe, rank, world_size):
    """Three steps beside unsharded modules that quantize their weight in each forward."""
    group = amax_group(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(3):
        for name, value in by_expert(full_parameters(model)).items():
            with torch.no_grad():
                reference.get_parameter(name).copy_(value)
        with te.autocast(recipe):  # each rank's rows by themselves: GEMMs of other shapes sum in another order
            inputs = [batch_of(peer, step, 12, DIM).requires_grad_() for peer in range(world_size)]
            expected = [reference(x) for x in inputs]
        for y in expected:
            (mean_square(y) / world_size).backward()
        x = inputs[rank].detach().clone().requires_grad_()
        with te.autocast(recipe, group):
            mine = model(x)
        mean_square(mine).backward()
        assert torch.equal(mine, expected[rank]), step
        assert torch.equal(x.grad, inputs[rank].grad * world_size)
        assert_close_to_reference(by_expert(gradients(model)), gradients(reference))
        for one, other in zip((model.a, model.b, model.c), (reference.a, reference.b, reference.c)):
            if recipe.kind == "delayed":
                for kind in ("scale", "amax_history"):
                    mine, theirs = (getattr(m.fp8_meta["scaling_fwd"], kind) for m in (one, other))
                    assert torch.equal(mine, theirs), (step, kind)
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()


@ranks(2)
@pytest.mark.parametrize("kind", ["delayed", slow("current"), "block", "mx", slow("nv")])
def test_parameters_in_fp8_travel_in_fp8(mesh, rank, world_size, kind):
    with te.installed():
        recipe = te.Recipe(kind)
        model = build_fp8(recipe, True)()
        torch.manual_seed(0)
        for name, param in model.named_parameters():  # what TE keeps of the values before they were quantized
            value = torch.randn(param.shape) * 0.1
            if isinstance(param, te.QuantizedTensor):
                param.get_high_precision_init_val = lambda value=value: value
            else:
                param.data.copy_(value)
        reference = Net(dim=DIM, hidden=2 * DIM + 32, num_experts=3)
        parallelize_module(model, mesh, GTPStyle(min_numel=1000))
        weights = [layer.__dict__[STATE].weights["weight"] for layer in (model.a, model.b, model.c)]
        assert all(weight.wire_name == FORMATS[kind] for weight in weights)
        torch.manual_seed(0)
        first = [torch.randn(param.shape) * 0.1 for param in (model.a._parameters["weight"],)][0]
        assert torch.equal(full(model.a.weight), first)  # float32, not what the codes stand for
        for _ in range(2):  # before an optimizer's first step weights are quantized anew, with the scale of before
            with te.autocast(recipe):
                mean_square(model(batch_of(rank, 9, 12, DIM))).backward()
            if kind == "delayed":
                assert weights[1].quantized.amax[Amax.SCALE].item() == 1 != model.b.fp8_meta["scaling_fwd"].scale[1]
        assert weights[1].counters.num_quantizations == 2
        model.zero_grad()
        for layer in (model.a, model.b, model.c):
            if kind == "delayed":
                layer.fp8_meta["scaling_fwd"].reset()
                layer.__dict__[STATE].weights["weight"].mark_changed()
        train_fp8(model, reference, recipe, rank, world_size)
        reset_stats(model)
        with te.autocast(recipe):
            for _ in range(2):
                mean_square(model(batch_of(rank, 9, 12, DIM))).backward()
        found = stats(model)
        hidden = 2 * DIM + 32
        numels = [hidden * DIM, DIM * hidden, 3 * DIM * DIM]  # of a, b, c
        if (
            kind == "block"
        ):  # cut at blocks of 128 rows: 4 of them for 288 rows, 2 for each expert; with scales for 4 columns
            num_rows = (4 * 128, 128 * 2, 3 * 256)
            numels = [rows * columns for rows, columns in zip(num_rows, (DIM, hidden, DIM))]
            numels = [numel + rows // 128 * 4 * 4 for numel, rows in zip(numels, num_rows)]
        if kind == "mx":  # cut at blocks of 32 rows, the views of both directions alike: 5 blocks a rank of 288 rows
            numels = [numel * 33 // 32 for numel in (320 * DIM, DIM * hidden, 3 * 128 * DIM)]
        if kind == "nv":  # two codes a byte, and a scale for 16 x 16
            numels = [numel // 2 + numel // 256 for numel in numels]
        # Two microbatches, two directions. Where both read the same codes, c stays from its forward.
        kept = 0 if kind == "mx" else 2
        assert weights[2].counters.num_kept_at_turn == found.num_kept_at_turn == kept
        assert found.gather_bytes == 4 * sum(numels) - kept * numels[2]
        assert found.num_quantizations == 3  # once a step, for two microbatches
        assert found.live_lease_bytes == 0


@ranks(2)
@pytest.mark.parametrize("kind", ["delayed", slow("current"), slow("block"), slow("mx"), slow("nv")])
def test_weights_gathered_in_high_precision_are_quantized_in_both_directions(mesh, rank, world_size, kind):
    with te.installed():
        recipe = te.Recipe(kind)
        model, reference = build_pair(build_fp8(recipe, False))
        parallelize_module(model, mesh, GTPStyle(min_numel=1000))
        assert model.b.__dict__[STATE].weights["weight"].wire is None
        train_fp8(model, reference, recipe, rank, world_size)


@ranks(2)
def test_recipes_that_cannot_be_served_are_refused(mesh):
    with te.installed():
        current, other = te.Recipe("current"), te.Recipe("block")
        model = parallelize_module(build_fp8(current, True)(), mesh, GTPStyle(min_numel=1000))
        x = batch_of(0, 0, 12, DIM)
        with te.autocast(other), pytest.raises(RuntimeError, match=r"a\.weight: .*FP8 for Float8Current.*Float8Block"):
            model(x)
        other = te.Recipe("current")
        other.backward_override = "high_precision"
        with te.autocast(other), pytest.raises(RuntimeError, match=r"a\.weight: backward_override='high_precision'"):
            model(x)
        y = model(x)  # outside of an autocast: what the codes stand for
        assert stats(model).live_lease_bytes == 0 and y.isfinite().all()
        with te.quantized_model_init(current):
            layer = te.Linear(DIM, DIM)
        layer.quantizers["scaling_fwd"][1] = Quantizer()
        with pytest.raises(ValueError, match=r"Linear.*Quantizer.*wire_format='bf16'"):
            parallelize_module(nn.Sequential(layer), mesh, GTPStyle())


@ranks(2)
def test_a_copy_trains_by_itself_and_nothing_outlives_a_backward(mesh, rank):
    with te.installed():
        model = parallelize_module(Net(), mesh, GTPStyle(min_numel=100))
        twin = copy.deepcopy(model)
        gc.disable()
        try:
            for one in (model, twin):
                mean_square(one(batch_of(rank))).backward()
            assert not [thing for thing in gc.get_objects() if isinstance(thing, (WeightUse, TEWeight))]
        finally:
            gc.enable()
        assert_close_to_reference(gradients(twin), gradients(model), rtol=0)
        assert twin.b.__dict__[STATE].weights["weight"].owner is twin.b
        with materialized(twin.c) as stack:
            assert torch.equal(stack, full(model.c.weight))


def refused():
    dim = 64
    yield lambda: te.Linear(dim, dim, delay_wgrad_compute=True), "delay_wgrad_compute=True.*lost"
    yield lambda: te.GroupedLinear(2, dim, dim, single_grouped_bias=True), "single_grouped_bias=True"
    yield lambda: te.RMSNorm(dim), "RMSNorm of te.ops"
    for name, value, message in (
        ("ub_overlap_ag_fprop", True, "ub_overlap_ag_fprop=True"),
        ("fsdp_group", object(), "TE's own FSDP"),
        ("tp_size", 2, "tp_size=2 without a group"),
    ):

        def build(name=name, value=value):
            layer = te.Linear(dim, dim, parallel_mode="column")
            setattr(layer, name, value)
            return layer

        yield build, message


@ranks(2)
def test_what_cannot_be_served_is_refused_by_name(mesh):
    with te.installed():
        for build, message in refused():
            model = nn.Sequential(nn.Linear(64, 64), build())
            before = dict(model.named_parameters())
            with pytest.raises(ValueError, match=rf"1\.\w+ of shape .*{message}"):
                parallelize_module(model, mesh, GTPStyle())
            assert all(before[name] is param for name, param in model.named_parameters())
    with te.installed("2.18.0"):
        with pytest.raises(ValueError, match=r"1\.weight .*TransformerEngine is 2\.18\.0.*2\.19"):
            parallelize_module(nn.Sequential(nn.Linear(64, 64), te.Linear(64, 64)), mesh, GTPStyle())


@ranks(2)
def test_general_path(mesh, rank):
    """Several weights of one linear, a LayerNormMLP, a class with a forward of its own."""

    class Scaled(te.Linear):
        def forward(self, inp):
            return super().forward(inp) * self.weight.sum()

    def build():
        split = te.Linear(32, 64, parameters_split=("query", "key"))
        return nn.Sequential(split, te.LayerNormMLP(64, 48), Scaled(64, 32))

    with te.installed():
        model, reference = build_pair(build)
        parallelize_module(model, mesh, GTPStyle(GTPConfig(calculate_per_token_loss=True), min_numel=1000))
        for one in (model, reference):
            y = one[2](one[1](one[0](batch_of(0, dim=32)), is_first_microbatch=None))
            mean_square(y).backward()
        assert_close_to_reference(gradients(model), {n: 2 * g for n, g in gradients(reference).items()})
        assert stats(model).num_forward_gathers == 5
        model[0](batch_of(0, dim=32), True)
        assert not model[0]._fp8_workspaces


@ranks(2)
def test_microbatch_flags_keep_nothing(mesh):
    with te.installed():
        model = parallelize_module(nn.Sequential(te.Linear(32, 64), te.GroupedLinear(2, 64, 32)), mesh, GTPStyle())
        for first in (True, False):
            x = model[0](batch_of(0, dim=32), first)
            mean_square(model[1](x, [4, 5], is_first_microbatch=first)).backward()
        assert not model[0]._fp8_workspaces and stats(model).num_forward_gathers == 4


@ranks(4)
@pytest.mark.parametrize("is_sharded", [True, slow(False)])
def test_tensor_parallelism_of_its_own(rank, world_size, is_sharded):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))

    def build(group=None):
        first, second = (
            {} if group is None else {"tp_group": group, "parallel_mode": mode} for mode in ("column", "row")
        )
        return nn.Sequential(te.LayerNormLinear(32, 48, **first), te.Linear(48, 32, **second))

    with te.installed():
        torch.manual_seed(0)
        reference = build()
        model = build(mesh.get_group("tp"))
        tp_rank = mesh.get_local_rank("tp")
        with torch.no_grad():
            for (name, param), whole in zip(model.named_parameters(), reference.parameters()):
                dims = [dim for dim in range(whole.dim()) if param.shape[dim] != whole.shape[dim]]
                nn.init.uniform_(whole) if whole.dim() == 1 else None
                param.copy_(whole.chunk(2, dims[0])[tp_rank] if dims else whole)
        parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=100 if is_sharded else 10_000))
        gtp_rank = mesh.get_local_rank("gtp")
        mine = mean_square(model(batch_of(gtp_rank, dim=32)))
        mine.backward()
        for peer in range(2):
            (mean_square(reference(batch_of(peer, dim=32))) / 2).backward()
        assert_close_to_reference(full_parameters(model), full_parameters(reference))
        assert_close_to_reference(gradients(model), gradients(reference))
        assert stats(model).num_sharded_weights == (2 if is_sharded else 0)


@ranks(2)
def test_initialisation_and_state(mesh, rank, tmp_path):
    with te.installed():
        recipe = te.Recipe("delayed")
        torch.manual_seed(3)
        expected = [te.Linear(DIM, DIM), te.GroupedLinear(2, DIM, DIM)]
        with te.quantized_model_init(recipe):
            model = nn.Sequential(te.Linear(DIM, DIM, device="meta"), te.GroupedLinear(2, DIM, DIM, device="meta"))
        parallelize_module(model, mesh, GTPStyle())
        model.to_empty(device="cpu")
        torch.manual_seed(3)
        for layer in model:
            layer.reset_parameters()
        assert torch.equal(full(model[0].weight), expected[0].weight)
        assert torch.equal(full(model[1].weight)[1], expected[1].weight1)
        assert model[0].weight.dtype == torch.float32
        x = batch_of(rank, dim=DIM)
        group = amax_group(model)
        for _ in range(2):
            with te.autocast(recipe, group):
                mean_square(model[1](model[0](x), [4, 5])).backward()
        save(model.state_dict(), checkpoint_id=tmp_path)
        fresh = nn.Sequential(te.Linear(DIM, DIM), te.GroupedLinear(2, DIM, DIM))
        state = dict(fresh.state_dict())
        state["1.weight"] = torch.empty(2, DIM, DIM)
        for index in range(2):
            del state[f"1.weight{index}"]
        plain_extra_state(fresh)
        assert state["0._extra_state"].numel() == 0
        load(state, checkpoint_id=tmp_path, planner=CheckedLoadPlanner())
        fresh.load_state_dict(state)
        assert torch.equal(fresh[0].weight, full(model[0].weight))
        assert torch.equal(fresh[1].weight1, full(model[1].weight)[1])
        for one, other in zip(fresh, model):
            assert torch.equal(one.fp8_meta["scaling_fwd"].amax_history, other.fp8_meta["scaling_fwd"].amax_history)
            assert one.fp8_meta["scaling_fwd"].scale[1] != 1


@ranks(2, 4)
def test_bias_and_mixed_precision(mesh, rank):
    """A bias of 100 reaches every output; fp32 parameters take bf16 inputs."""
    with te.installed():
        model = nn.Sequential(te.Linear(32, 64), te.GroupedLinear(2, 64, 32))
        for name, param in model.named_parameters():
            nn.init.constant_(param, 100.0 if "bias" in name else 0.0)
        parallelize_module(model, mesh, GTPStyle(GTPConfig(param_dtype=torch.bfloat16)))
        y = model[0](batch_of(rank, dim=32))
        z = model[1](y, [4, 5])
        assert y.dtype == z.dtype == torch.bfloat16
        assert (y == 100).all() and (z == 100).all()
        x = torch.randn(3, 32).bfloat16()
        model = parallelize_module(nn.Sequential(te.Linear(32, 64)), mesh, GTPStyle())
        assert model(x).shape == (3, 64) and model[0].activation_dtype == torch.bfloat16


def tied_experts():
    """Models, with what is tied in them."""

    def build(holder, name, twin, index):
        model = nn.ModuleList([te.GroupedLinear(2, 64, 64), te.GroupedLinear(2, 64, 64), nn.Linear(64, 64)])
        setattr(model[holder], name, model[twin].get_parameter(f"weight{index}"))
        return model

    yield build(1, "weight1", 0, 0)
    yield build(0, "weight1", 0, 0)
    yield build(2, "weight", 0, 1)


@ranks(2)
def test_experts_that_no_stack_can_hold_are_refused(mesh, rank, world_size):
    """One that is tied, frozen or parametrized by itself; whole stacks may be tied or frozen."""
    with te.installed():
        for model in tied_experts():
            before = dict(model.named_parameters(remove_duplicate=False))
            with pytest.raises(ValueError, match=r"[01]\.weight of shape \(2, 64, 64\) .*tied"):
                parallelize_module(model, mesh, GTPStyle())
            for name, param in model.named_parameters(remove_duplicate=False):
                assert before[name] is param
        for model in tied_experts():
            parts = list(model) if model[2].weight is model[0].weight1 else [model[0], model[1]]
            with pytest.raises(ValueError, match="tied to"):
                for part in parts:
                    parallelize_module(part, mesh, GTPStyle())
        model = te.GroupedLinear(2, 64, 64)
        nn.utils.parametrizations.weight_norm(model, "weight1")
        with pytest.raises(ValueError, match=r"weight0 of shape .*GroupedLinear.*its weight1 is no parameter"):
            parallelize_module(model, mesh, GTPStyle())
        model = te.GroupedLinear(2, 64, 64)
        model.weight1.requires_grad_(False)
        with pytest.raises(ValueError, match=r"weight of shape \(2, 64, 64\).*requires_grad is True for some"):
            parallelize_module(model, mesh, GTPStyle())

        def build():
            model = nn.ModuleList(
                [te.GroupedLinear(2, 64, 64), te.GroupedLinear(2, 64, 64), te.GroupedLinear(2, 64, 8)]
            )
            for index in range(2):
                setattr(model[1], f"weight{index}", model[0].get_parameter(f"weight{index}"))
                model[2].get_parameter(f"weight{index}").requires_grad_(False)
            return model

        model, reference = build_pair(build)
        parallelize_module(model, mesh, GTPStyle())
        assert model[0].weight is model[1].weight and not model[2].weight.requires_grad
        with pytest.raises(ValueError, match=r"0\.weight of shape .* was given to a GTPStyle before"):
            parallelize_module(model, mesh, GTPStyle())
        for net, peers in ((model, [rank]), (reference, range(world_size))):
            for peer in peers:
                x = batch_of(peer, dim=64)
                for layer in net:
                    x = layer(x, [4, 5])
                (mean_square(x) / len(peers)).backward()
        stack = torch.stack([reference[0].get_parameter(f"weight{index}").grad for index in range(2)])
        assert_close_to_reference(full(model[0].weight.grad), stack)
