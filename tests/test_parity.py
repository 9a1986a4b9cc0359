"""Whole training runs beside an unsharded model: every kind of module, optimizer, setting and axis size."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, stats
from tests.harness import ranks
from tests.models import MLP, MODEL_CASES, TinyLlama, WithConv
from tests.reference import (
    assert_equal_to_reference,
    build_pair,
    full_gradients,
    full_parameters,
    local_slice,
    mean_square,
    train_beside_reference,
)

EXACT = 1e-12  # relative, in float64: shows a wrong formula that float32 rounding would hide


@ranks(2, 3, 4)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("case", MODEL_CASES, ids=str)
def test_every_kind_of_module(mesh, rank, world_size, case, optimizer):
    build, batch = case.in_float64(4 * world_size)
    model, reference = build_pair(build)
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    assert stats(model).num_sharded_weights > 0
    train_beside_reference(
        model,
        reference,
        batch,
        rank=rank,
        world_size=world_size,
        optimizer=optimizer,
        num_microbatches=2,
        num_steps=4,
        rtol=EXACT if optimizer == "sgd" else 1e-9,
    )  # Adam divides by the root of tiny second moments, which lifts rounding
    s = stats(model)
    assert s.num_pending == 0 and s.live_lease_bytes == 0 and s.num_prefetch_hits > 0


@ranks(2, 4)
@pytest.mark.parametrize("case", [c for c in MODEL_CASES if c.name in ("llama", "uneven_mlp")], ids=str)
def test_float32(mesh, rank, world_size, case):
    model, reference = build_pair(case.build)
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    train_beside_reference(
        model, reference, lambda step: case.batch(2 * world_size, seed=step), rank=rank, world_size=world_size
    )


@ranks(2)
def test_a_twofold_learning_rate_fails_this_suite(mesh, rank, world_size):
    case = MODEL_CASES[0]
    model, reference = build_pair(case.build)
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    for param in model.parameters():
        param.register_hook(lambda grad: grad * 2)
    with pytest.raises(AssertionError, match="gradient of step 0"):
        train_beside_reference(model, reference, lambda step: case.batch(4, step), rank=rank, world_size=world_size)


KNOBS = {
    "no_prefetch": GTPConfig(weight_prefetch=False),
    "sync_reduction": GTPConfig(async_reduction=False),
    "checked": GTPConfig(check_param_states=True),
    "aligned_16": GTPConfig(pad_for_alignment=16),
    "look_ahead_3": GTPConfig(look_ahead=3),
    "ring_1": GTPConfig(graph_wgrad_ring_size=1),
    "ring_4": GTPConfig(graph_wgrad_ring_size=4),
    "keep_nothing": GTPConfig(recompute_keep_bytes=0),
    "collective": GTPConfig(transport="collective", wire_format="bf16"),
}


def _train(mesh, config, case, rank, world_size):
    torch.manual_seed(0)
    model = case.build()
    parallelize_module(model, mesh, GTPStyle(config, min_numel=30))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for microbatch in case.batch(4 * world_size, seed=step).chunk(2):
            mean_square(model(local_slice(microbatch, rank, world_size))).backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model), gradients, stats(model)


@ranks(2)
@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("case", [c for c in MODEL_CASES if c.name in ("llama", "uneven_mlp")], ids=str)
def test_knobs_do_not_change_a_bit(mesh, rank, world_size, case, knob):
    weights, gradients, plain = _train(mesh, GTPConfig(), case, rank, world_size)
    other_weights, other_gradients, other = _train(mesh, KNOBS[knob], case, rank, world_size)
    assert_equal_to_reference(other_weights, weights, "weight")
    assert_equal_to_reference(other_gradients, gradients, "gradient")
    if knob == "no_prefetch":
        assert other.num_prefetch_hits == 0 < plain.num_prefetch_hits
    if knob == "aligned_16":
        assert other.gather_bytes > plain.gather_bytes and other.reduce_bytes > plain.reduce_bytes
    if knob in ("collective", "checked", "ring_1", "ring_4"):
        assert other.gather_bytes == plain.gather_bytes


@ranks(2)
def test_sync_reduction_leaves_nothing_pending_after_each_use(mesh):
    seen = {}
    for async_reduction in (True, False):
        torch.manual_seed(0)
        model = MLP((16, 32, 32, 16))
        parallelize_module(model, mesh, GTPStyle(GTPConfig(async_reduction=async_reduction), min_numel=30))
        pending = seen[async_reduction] = []
        for layer in model.layers:  # runs when the backward of the layer is over
            layer.register_full_backward_hook(
                lambda *_, model=model, pending=pending: pending.append(
                    sum(
                        len(r.reducer.pending)
                        for r in {
                            w.runtime
                            for m in model.modules()
                            if "_gtp" in m.__dict__
                            for w in m.__dict__["_gtp"].weights.values()
                        }
                    )
                )
            )
        model(torch.randn(4, 16, requires_grad=True)).sum().backward()
        assert stats(model).num_pending == 0
    assert max(seen[True]) == 2 and seen[False] == [0] * 3  # 2: graph_wgrad_ring_size


@ranks(2, 4)
@pytest.mark.parametrize("per_token", [False, True])
def test_scaling_modes(mesh, rank, world_size, per_token):
    """Per token: the loss is divided by the global number of samples beforehand, and gradients are summed."""
    model, reference = build_pair(lambda: MLP().double())
    parallelize_module(model, mesh, GTPStyle(GTPConfig(calculate_per_token_loss=per_token), min_numel=30))
    x = torch.randn(2 * world_size, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    reference(x).square().sum(-1).mean().backward()
    mine = model(local_slice(x, rank, world_size)).square().sum(-1)
    (mine.sum() / x.shape[0] if per_token else mine.mean()).backward()
    for (name, grad), (_, expected) in zip(full_gradients(model).items(), full_gradients(reference).items()):
        assert torch.allclose(grad, expected, rtol=1e-12, atol=1e-15), name


@ranks(2)
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16])
def test_mixed_precision(mesh, rank, world_size, reduce_dtype):
    """bf16 gathers and computation over float32 parameters: the same as the module cast to bf16 by hand."""
    config = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    model, reference = build_pair(lambda: TinyLlama())
    parallelize_module(model, mesh, GTPStyle(config, min_numel=30))
    tokens = torch.randint(0, 24, (4, 7), generator=torch.Generator().manual_seed(0))
    half = reference.bfloat16()
    y = model(local_slice(tokens, rank, world_size))
    expected = half(local_slice(tokens, rank, world_size))
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    y.float().square().mean().backward()
    expected.float().square().mean().backward()
    for (name, param), other in zip(model.named_parameters(), half.parameters()):
        assert param.dtype == param.grad.dtype == torch.float32, name
        mine = other.grad.to(reduce_dtype or torch.float32)
        total = mine.clone()
        torch.distributed.all_reduce(total)
        expected_grad = total.float() / 2
        assert torch.equal(param.grad.full_tensor(), expected_grad), name


@ranks(4)
def test_fp32_accumulation_rounds_once(mesh, rank, world_size):
    """bf16 rows exchanged, summed in float32: equal to a float32 sum of the bf16 contributions. 2 ranks: bypassed."""

    def grads(accumulate, mesh):
        torch.manual_seed(0)
        layer = nn.Linear(64, 33, bias=False)
        config = GTPConfig(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.bfloat16,
            reduce_scatter_with_fp32_accumulation=accumulate,
            calculate_per_token_loss=True,
        )
        parallelize_module(layer, mesh, GTPStyle(config))
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank))
        y = layer(x)
        y.backward(torch.ones_like(y))
        own = torch.ones(33, 8, dtype=torch.bfloat16) @ x.bfloat16()
        total = own.float()
        torch.distributed.all_reduce(total, group=mesh.get_group())
        return layer.weight.grad.full_tensor(), total

    grad, exact = grads(True, mesh)
    plain, _ = grads(False, mesh)
    assert torch.allclose(grad, exact, rtol=1e-6, atol=1e-6)
    assert (plain - exact).abs().max() > 1e-3  # the trap was armed: bf16 sums do round
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("other", "gtp"))["gtp"]
    on, _ = grads(True, pairs)
    off, _ = grads(False, pairs)
    assert torch.equal(on, off)


def _llama_tp_plan(num_layers: int) -> dict:
    plan = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for index in range(num_layers):
        block = f"layers.{index}."
        plan |= {
            block + "attention_norm": SequenceParallel(),
            block + "ffn_norm": SequenceParallel(),
            block + "attention": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
            block + "feed_forward": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        }
        for name, style in (
            ("attention.wq", ColwiseParallel()),
            ("attention.wk", ColwiseParallel()),
            ("attention.wv", ColwiseParallel()),
            ("attention.wo", RowwiseParallel(output_layouts=Shard(1))),
            ("feed_forward.w1", ColwiseParallel()),
            ("feed_forward.w3", ColwiseParallel()),
            ("feed_forward.w2", RowwiseParallel(output_layouts=Shard(1))),
        ):
            plan[block + name] = style
    return plan


@ranks(4)
@pytest.mark.parametrize("order", [("gtp", "tp"), ("tp", "gtp")])
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=pytest.mark.slow)])
def test_llama_with_tensor_and_sequence_parallel(rank, order, optimizer):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=order)
    model, reference = build_pair(lambda: TinyLlama().double())
    names = {name for name, _ in model.named_modules()}
    plan = _llama_tp_plan(2)
    assert set(plan) <= names
    parallelize_module(model, mesh["tp"], plan)
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30))
    train_beside_reference(
        model,
        reference,
        lambda step: torch.randint(0, 24, (4, 6), generator=torch.Generator().manual_seed(step)),
        rank=mesh["gtp"].get_local_rank(),
        world_size=2,
        optimizer=optimizer,
        num_microbatches=2,
        rtol=EXACT if optimizer == "sgd" else 1e-9,
    )
    assert stats(model).num_pending == 0


@ranks(4)
@pytest.mark.parametrize("plan", ["root", "children", "same_style", "after_another"])
def test_a_plan_may_name_modules(mesh, rank, world_size, plan):
    """One style on the root, one for each module, one instance for several, and modules added later."""
    model, reference = build_pair(lambda: TinyLlama().double())
    shared = GTPStyle(min_numel=30)
    style = (lambda: shared) if plan == "same_style" else (lambda: GTPStyle(min_numel=30))
    if plan == "root":
        parallelize_module(model, mesh, style())
    else:
        parallelize_module(model, mesh, {"tok_embeddings": style(), "layers.*": style(), "output": style()})
        parallelize_module(model, mesh, {"norm": style()})
    train_beside_reference(
        model,
        reference,
        lambda step: torch.randint(0, 24, (8, 6), generator=torch.Generator().manual_seed(step)),
        rank=rank,
        world_size=world_size,
        num_microbatches=2,
        rtol=EXACT,
    )
    tokens = torch.randint(0, 24, (8, 6), generator=torch.Generator().manual_seed(0))
    for _ in range(3):  # by now the modules' schedules have become one
        reset_stats(model)
        model(local_slice(tokens, rank, world_size)).square().mean().backward()
        s = stats(model)
    assert (s.num_on_demand_gathers, s.num_mispredictions, s.num_pending) == (1, 0, 0)


@ranks(2)
@pytest.mark.parametrize("where", ["modules", "predicate", "exclude"])
def test_some_weights_stay_whole(mesh, rank, world_size, where):
    model, reference = build_pair(lambda: MLP().double())
    style = {
        "modules": GTPStyle(modules=["layers.0"], min_numel=30),
        "predicate": GTPStyle(modules=lambda fqn, module: fqn == "layers.0", min_numel=30),
        "exclude": GTPStyle(exclude=["layers.[12]*.weight"], min_numel=30),
    }[where]
    parallelize_module(model, mesh, style)
    assert model.layers[0].weight.placements == (Shard(0),)
    assert model.layers[1].weight.placements == (Replicate(),)
    train_beside_reference(
        model,
        reference,
        lambda step: torch.randn(4, 16, dtype=torch.float64),
        rank=rank,
        world_size=world_size,
        rtol=EXACT,
    )


@ranks(2)
def test_autocast_computes_in_its_own_dtype(mesh, rank, world_size):
    model, reference = build_pair(lambda: MLP())
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = model(local_slice(x, rank, world_size)), reference(local_slice(x, rank, world_size))
    assert y.dtype == expected.dtype == torch.bfloat16 and torch.equal(y, expected)
    y.float().sum().backward()
    expected.float().sum().backward()
    for (name, param), other in zip(model.named_parameters(), reference.parameters()):
        total = other.grad.clone()
        torch.distributed.all_reduce(total)
        assert torch.allclose(param.grad.full_tensor(), total / 2, rtol=1e-2, atol=1e-2), name


@ranks(2)
def test_convolution_in_inference_mode_then_training(mesh, rank, world_size):
    model, reference = build_pair(lambda: WithConv().double())
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    x = torch.randn(4, 6, 16, dtype=torch.float64)
    for _ in range(2):
        with torch.inference_mode():
            assert torch.allclose(model(x), reference(x), rtol=1e-12, atol=1e-14)
        train_beside_reference(model, reference, lambda step: x, rank=rank, world_size=world_size, rtol=EXACT)
