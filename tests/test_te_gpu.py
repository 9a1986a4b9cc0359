"""TransformerEngine's own modules under GTP, several ranks on one GPU, beside unsharded ones with the same data."""

import os
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import CheckedLoadPlanner, GTPConfig, GTPStyle, reset_stats, stats
from gtp_dtensor.members import STATE
from tests.harness import ranks
from tests.reference import full, relative_error, replica_options

te = pytest.importorskip("transformer_engine.pytorch", reason="needs TransformerEngine 2.19 or later")

IN, ROWS = 272, 384  # columns that blocks of 128 do not divide
OUT = 400  # rows that neither four ranks' blocks nor their halves divide
SPLITS = [128, 0, 256]
CONFIG = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS = ("Linear", "LayerNormLinear", "GroupedLinear")
RECIPES = ("bf16", "delayed", "current", "block")
on_two = ranks(2, device="cuda", timeout=240, group_timeout=120)
on_four = ranks(4, device="cuda", timeout=240, group_timeout=120)


def recipe_of(name):
    from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

    makers = {"delayed": lambda: DelayedScaling(amax_history_len=4), "current": Float8CurrentScaling}
    return None if name == "bf16" else {**makers, "block": Float8BlockScaling}[name]()


def in_region(recipe, group=None):
    return te.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group)


def make(kind, recipe=None, shape=(IN, OUT), **options):
    """A module with parameters in FP8 of ``recipe``, which remembers the values in float32."""
    options = {"params_dtype": torch.float32, "bias": True} | options
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe, preserve_high_precision_init_val=True):
        if kind == "GroupedLinear":
            return te.GroupedLinear(len(SPLITS), *shape, **options)
        if kind == "LayerNormLinear":
            return te.LayerNormLinear(*shape, normalization="RMSNorm", **options)
        return te.Linear(*shape, **options)


def call(module, kind, x):
    return module(x, SPLITS) if kind == "GroupedLinear" else module(x)


def batch_of(rank, step=0, columns=IN):
    device = "cuda"
    generator = torch.Generator(device).manual_seed(100 * step + rank)
    return torch.randn(ROWS, columns, device=device, dtype=torch.bfloat16, generator=generator).requires_grad_()


def by_expert(module, values):
    """Under the names of an unsharded module."""
    if hasattr(module, "num_gemms"):
        stack = values.pop("weight")
        values |= {f"weight{index}": one for index, one in enumerate(stack)}
    return values


def copy_parameters(module, reference, rounds):
    """Into the reference; its wgrads are accumulated in float32, as TE does it for Megatron."""
    values = by_expert(module, {name: full(param) for name, param in module.named_parameters()})
    for name, param in reference.named_parameters():
        param.data.copy_(values[name].bfloat16() if rounds else values[name])
        param.grad = None
        if "layer_norm" not in name and "bias" not in name:
            param.main_grad = torch.zeros_like(param)
    reference.fuse_wgrad_accumulation = True
    reference.__dict__["activation_dtype"] = torch.bfloat16  # else TE refuses parameters in float32


def mean_grads(reference, group=None):
    found = {}
    for name, param in reference.named_parameters():
        grad = getattr(param, "main_grad", None)
        found[name] = (param.grad if grad is None else grad).float().clone()
        dist.all_reduce(found[name], group=group)
        found[name] /= dist.get_world_size(group)
    return found


def compare(what, pairs, faults, rtol=0.0):
    for name, (one, other) in pairs.items():
        error = relative_error(one, other)
        if not error <= rtol:
            faults.append(f"{what} {name}: {error:.2e}")


def train(kind, recipe_name, module, rank, *, rounds=False, num_steps=3):
    """Faults of three steps beside an unsharded module on each rank, in one region: amax over all ranks in both."""
    from gtp_dtensor.te import amax_group

    recipe, group = recipe_of(recipe_name), amax_group(module)
    reference = make(kind)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    faults = []
    for step in range(num_steps):
        what = f"{kind} {recipe_name} step {step}"
        copy_parameters(module, reference, rounds)
        x, y = [batch_of(rank, step) for _ in range(2)], []
        with in_region(recipe, group):
            y = [call(one, kind, part) for one, part in zip((module, reference), x)]
        sum(part.float().square().mean() for part in y).backward()
        compare(what, {"y": y, "dx": [part.grad for part in x]}, faults)
        grads = by_expert(module, {name: full(param.grad) for name, param in module.named_parameters()})
        expected = mean_grads(reference)
        pairs = {name: (grads[name], expected[name]) for name in expected}
        vectors = {name: pairs.pop(name) for name in expected if expected[name].dim() == 1}
        compare(what, pairs, faults, 1e-6)
        # Those in high precision are rounded to bfloat16: TE meets these parameters in that.
        compare(what, vectors, faults, 2**-8 if recipe_name == "bf16" else 1e-6)
        if recipe_name == "delayed":
            for way in ("scaling_fwd", "scaling_bwd"):
                mine, theirs = (one.fp8_meta[way] for one in (module, reference))
                for part in ("scale", "amax_history"):
                    one, other = getattr(mine, part), getattr(theirs, part)
                    everyones = [torch.empty_like(one) for _ in range(dist.get_world_size())]
                    dist.all_gather(everyones, one.contiguous())
                    same = all(torch.equal(one, peer) for peer in everyones)
                    if not (same and torch.equal(one, other)):
                        faults.append(f"{what}: {way}.{part}, same on all ranks: {same}")
        optimizer.step()
        optimizer.zero_grad()
    return faults


def reset():
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()
    torch.manual_seed(0)


def check_classes(mesh, rank, recipe_name, config, native, **options):
    faults = []
    for kind in KINDS:
        reset()
        module = make(kind, recipe_of(recipe_name) if native else None)
        for name, param in module.named_parameters():
            if param.dim() == 1:
                nn.init.uniform_(param, 0.5, 1.5)
        dist.barrier()
        parallelize_module(module, mesh, GTPStyle(config, **options))
        reset_stats(module)
        wire = module.__dict__[STATE].weights["weight"].wire_name
        names = {"block": "fp8_block", "bf16": "bf16"} if native else dict.fromkeys(RECIPES, "bf16")
        assert wire == names.get(recipe_name, "fp8"), wire
        faults += train(kind, recipe_name, module, rank, rounds=recipe_name != "bf16" and not native)
        found = stats(module)
        counted = (found.num_forward_gathers, found.num_backward_gathers, found.num_kept_at_turn, found.num_reductions)
        if counted != (3, 1, 2, 3) or found.live_lease_bytes or found.num_pending:
            faults.append(f"{kind} {recipe_name}: {found}")
        if native and recipe_name in ("delayed", "current"):
            numel = OUT * IN * (len(SPLITS) if kind == "GroupedLinear" else 1)
            if found.gather_bytes != 4 * numel:
                faults.append(f"{kind} {recipe_name}: {found.gather_bytes} bytes, not {4 * numel}")
    assert not faults, "\n".join(faults)


@on_two
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_every_class_at_gtp_2(mesh, rank, recipe_name):
    check_classes(mesh, rank, recipe_name, CONFIG, recipe_name != "bf16")


@on_four
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_every_class_at_gtp_4(mesh, rank, recipe_name):
    check_classes(mesh, rank, recipe_name, CONFIG, recipe_name != "bf16")


@on_two
@pytest.mark.parametrize("recipe_name", RECIPES[1:])
def test_weights_gathered_in_bf16(mesh, rank, recipe_name):
    check_classes(mesh, rank, recipe_name, CONFIG, False)


@on_four
@pytest.mark.parametrize("recipe_name", ["delayed", "block"])
def test_replicas_that_shard_the_optimizer(rank, recipe_name):
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dps", "gtp"))
    check_classes(mesh["gtp"], rank, recipe_name, CONFIG, True, **replica_options(mesh))


@on_four
def test_what_travels_is_what_te_quantizes(mesh, rank):
    """Codes and scales, bit for bit, with scales that are powers of two and that are not."""
    from transformer_engine.common.recipe import Float8BlockScaling, Float8CurrentScaling, QParams

    faults = []
    for power_of_2 in (False, True):
        params = QParams(power_2_scale=power_of_2)
        for recipe in (
            Float8CurrentScaling(fp8_quant_fwd_weight=params),
            Float8BlockScaling(fp8_quant_fwd_weight=params, x_block_scaling_dim=1),
        ):
            reset()
            for kind in ("Linear", "GroupedLinear"):
                module = make(kind, recipe, bias=False)
                parallelize_module(module, mesh, GTPStyle(CONFIG))
                quantizers = module.quantizers["scaling_fwd"][1::3]
                x = batch_of(0)
                with in_region(recipe), torch.no_grad():
                    call(module, kind, x)
                weight = module.__dict__[STATE].weights["weight"]
                (view,) = weight.wire.views
                buffers, transfer = weight.quantized.gather(weight, view)
                transfer.wait()
                parts = weight.quantized.whole(view, buffers)
                whole = full(module.weight)
                stack = [whole] if kind == "Linear" else whole.unbind(0)
                for index, (one, quantizer) in enumerate(zip(stack, quantizers)):
                    quantizer = quantizer.copy()
                    quantizer.internal = False
                    quantizer.set_usage(rowwise=True, columnwise=False)
                    expected = quantizer(one.contiguous())
                    mine = [part if kind == "Linear" else part[index] for part in parts]
                    what = f"{kind} {type(recipe).__name__} power of 2 {power_of_2} matrix {index}"
                    if len(mine) == 1:
                        scale = weight.quantized.amax
                        inverse = next(v for k, v in scale.items() if k.value == "inverse").flatten()[index]
                        same = torch.equal(mine[0], expected._data), torch.equal(inverse.view(1), expected._scale_inv)
                    else:
                        num = -(-IN // 128)
                        scales = mine[1].view(torch.float32)[:, :num]
                        same = (
                            torch.equal(mine[0][:OUT], expected._rowwise_data),
                            torch.equal(scales, expected._rowwise_scale_inv[:, :num]),
                        )
                    if same != (True, True):
                        faults.append(f"{what}: codes, scales {same}")
    assert not faults, "\n".join(faults)


@on_two
@pytest.mark.parametrize("recipe_name", ["bf16", "delayed", "block"])
def test_te_checkpoint(mesh, rank, recipe_name):
    """TE's own activation checkpointing: what is gathered for the recompute serves the backward."""
    faults = []
    for kind in KINDS:
        results = []
        for reentrant in (None, True, False):
            reset()
            recipe = recipe_of(recipe_name)
            module = make(kind, recipe)
            parallelize_module(module, mesh, GTPStyle(CONFIG))
            x = batch_of(rank)
            with in_region(recipe, dist.group.WORLD):
                if reentrant is None:
                    y = call(module, kind, x)
                else:
                    y = te.checkpoint(lambda part: call(module, kind, part), x, use_reentrant=reentrant)
            y.float().square().mean().backward()
            results.append([y, x.grad, full(module.weight.grad)])
            found = stats(module)
            counted = (found.num_forward_gathers, found.num_recompute_gathers, found.num_backward_gathers)
            if counted != ((1, 0, 1) if reentrant is None else (1, 1, 0)) or found.live_lease_bytes:
                faults.append(f"{kind} reentrant={reentrant}: {found}")
        for reentrant, found in zip((True, False), results[1:]):
            pairs = dict(zip(("y", "dx", "dw"), zip(found, results[0])))
            compare(f"{kind} {recipe_name} reentrant={reentrant}", pairs, faults)
    assert not faults, "\n".join(faults)


def cast_kernels(function):
    """How many kernels quantize something in ``function()``."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        function()
        torch.cuda.synchronize()
    counts = Counter()
    for event in found.events():
        name = event.name.lower().replace("nocast", "")  # torch's name for copies within one dtype
        if "transformer_engine" in name or "cast" in name or "quantize" in name or "amax" in name:
            if "transpose_kernel" not in name or "cast" in name:
                counts[event.name[:100]] += 1
    return counts


@on_two
@pytest.mark.parametrize("recipe_name", ["delayed", "current", "block"])
def test_no_microbatch_quantizes_a_weight(mesh, rank, recipe_name):
    """The kernels of the second microbatch are at most those of an unsharded module with its weight in FP8."""
    reset()
    recipe = recipe_of(recipe_name)
    modules = [make("Linear", recipe, bias=False) for _ in range(2)]
    parallelize_module(modules[0], mesh, GTPStyle(CONFIG))
    optimizer = torch.optim.SGD(modules[0].parameters(), lr=0.1)
    x, found = batch_of(rank), []
    for module in modules:
        module.__dict__["activation_dtype"] = torch.bfloat16

        def step(module=module):
            with in_region(recipe, dist.group.WORLD):
                module(x).float().square().mean().backward()

        step()
        if module is modules[0]:
            optimizer.step()
            reset_stats(module)
            step()
            assert stats(module).num_quantizations == 1
        found.append(cast_kernels(step))
    assert stats(modules[0]).num_quantizations == 1
    mine, theirs = (sum(counts.values()) for counts in found)
    assert 0 < mine <= theirs, found


class Net(nn.Module):
    def __init__(self, recipe):
        super().__init__()
        self.a, self.c = make("LayerNormLinear", recipe), make("GroupedLinear", recipe)
        self.b = nn.Linear(OUT, IN, bias=False, device="cuda")

    def forward(self, x):
        return self.c(self.b(self.a(x).float()).to(x.dtype), SPLITS)


@on_four
@pytest.mark.parametrize("recipe_name", ["delayed", "block"])
def test_state_and_fused_adam(rank, recipe_name, tmp_path):
    """Trained at gtp 2 with FusedAdam, loaded at gtp 4 and into unsharded modules."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    from gtp_dtensor.te import plain_extra_state

    assert "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE" not in os.environ
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dps", "gtp"))
    reset()
    recipe = recipe_of(recipe_name)
    model = Net(recipe)
    parallelize_module(model, mesh["gtp"], GTPStyle(CONFIG, **replica_options(mesh)))
    optimizer = FusedAdam(model.parameters(), lr=1e-2)

    def losses(model, optimizer, steps, sharded=True):
        found = []
        for step in steps:
            with in_region(recipe, dist.group.WORLD):
                loss = model(batch_of(rank if sharded else 0, step)).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    before = losses(model, optimizer, range(4))
    assert before[-1] < 0.9 * before[0], before
    save(model.state_dict(), checkpoint_id=tmp_path)
    reset()
    other = Net(recipe)
    parallelize_module(other, init_device_mesh("cuda", (4,), mesh_dim_names=("gtp",)), GTPStyle(CONFIG))
    state = other.state_dict()
    load(state, checkpoint_id=tmp_path, planner=CheckedLoadPlanner())
    other.load_state_dict(state)
    reset()
    plain = plain_extra_state(Net(None))
    state = dict(plain.state_dict())
    for index in range(len(SPLITS)):
        del state[f"c.weight{index}"]
    state["c.weight"] = torch.empty(len(SPLITS), OUT, IN, device="cuda")
    load(state, checkpoint_id=tmp_path, planner=CheckedLoadPlanner())
    plain.load_state_dict(state)
    for name, param in model.named_parameters():
        assert torch.equal(full(param), full(other.get_parameter(name))), name
        if name != "c.weight":
            assert torch.equal(full(param), plain.get_parameter(name)), name
    assert torch.equal(full(model.c.weight)[2], plain.c.weight2)
    if recipe_name == "delayed":
        for one in (other, plain):
            for part in ("a", "c"):
                for way in ("scaling_fwd", "scaling_bwd"):
                    metas = [getattr(net, part).fp8_meta[way] for net in (model, one)]
                    assert torch.equal(metas[0].amax_history, metas[1].amax_history), part
                    assert torch.equal(metas[0].scale, metas[1].scale) and metas[0].scale.max() > 1, part
    for one in (plain.a, plain.c):
        one.__dict__["activation_dtype"] = torch.bfloat16
    outs = []
    for net in (model, other, plain):
        with in_region(recipe, dist.group.WORLD), torch.no_grad():
            outs.append(net(batch_of(rank, 9)))
    assert torch.equal(outs[0], outs[1])
    assert relative_error(outs[0], outs[2]) < 0.05  # its linear of torch computes in float32


@on_two
def test_states_that_te_has_pickled(mesh, rank):
    """Load where TE is told to, with histories of another length too; and TE loads none by default."""
    from transformer_engine.common.recipe import DelayedScaling

    for kind in KINDS:
        reset()
        plain = make(kind)
        plain.__dict__["activation_dtype"] = torch.bfloat16
        with in_region(DelayedScaling(amax_history_len=6), dist.group.WORLD):
            y = call(plain, kind, batch_of(rank))
        y.float().square().mean().backward()
        reset()
        recipe = recipe_of("delayed")
        module = make(kind, recipe)
        parallelize_module(module, mesh, GTPStyle(CONFIG))
        state = plain.get_extra_state()
        with pytest.raises(RuntimeError, match="NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"):
            module.set_extra_state(state)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
            module.set_extra_state(state)
        for way in ("scaling_fwd", "scaling_bwd"):
            mine, theirs = (one.fp8_meta[way] for one in (module, plain))
            assert torch.equal(mine.scale, theirs.scale) and mine.scale.max() > 1
            assert torch.equal(mine.amax_history, theirs.amax_history) and len(mine.amax_history) == 6
        with in_region(recipe, dist.group.WORLD):
            call(module, kind, batch_of(rank, 1)).float().square().mean().backward()
        assert len(module.fp8_meta["scaling_fwd"].amax_history) == 4 and stats(module).live_lease_bytes == 0
