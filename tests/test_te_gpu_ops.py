"""te.ops.GroupedLinear and te.LayerNormMLP under GTP, several ranks on one GPU, beside unsharded ones with the same data."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPStyle, reset_stats, stats
from gtp_dtensor.members import STATE
from tests.reference import full
from tests.test_te_gpu import (
    CONFIG,
    IN,
    OUT,
    SPLITS,
    batch_of,
    compare,
    in_region,
    mean_grads,
    on_four,
    on_two,
    recipe_of,
    reset,
    te,
)


def round_parameters(module):
    """Unsharded modules have their weights in bfloat16: those of which codes are made have to be representable in it."""
    with torch.no_grad():
        for param in module.parameters():
            param._local_tensor.copy_(param._local_tensor.bfloat16())


def beside(what, module, reference, recipe, rank, faults, call, by_name):
    """Faults of two steps: y and dx to the last bit."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(2):
        round_parameters(module)
        for name, value in by_name({n: full(p) for n, p in module.named_parameters()}).items():
            param = reference.get_parameter(name)
            param.data.copy_(value)
            param.grad = None
        x, y = [batch_of(rank, step) for _ in range(2)], []
        with in_region(recipe, dist.group.WORLD):
            y = [call(one, part) for one, part in zip((module, reference), x)]
        sum(part.float().square().mean() for part in y).backward()  # whose end updates the scales of both
        compare(f"{what} step {step}", {"y": y, "dx": [part.grad for part in x]}, faults)
        grads = by_name({name: full(param.grad) for name, param in module.named_parameters()})
        expected = mean_grads(reference)
        compare(f"{what} step {step}", {name: (grads[name], expected[name]) for name in expected}, faults, 1e-6)
        optimizer.step()
        optimizer.zero_grad()


def by_expert(values):
    found = {}
    for name, value in values.items():
        stack = name.rpartition(".")[2] == "weight"
        found |= {f"{name}{index}": one for index, one in enumerate(value)} if stack else {name: value}
    return found


def build_ops(in_pipeline, recipe, dtype):
    num = len(SPLITS)
    with te.quantized_model_init(enabled=recipe is not None, recipe=recipe):
        first = te.ops.GroupedLinear(num, IN, OUT, dtype=dtype, device="cuda")
        if not in_pipeline:
            return first
        return te.ops.Sequential(first, te.ops.GELU(), te.ops.GroupedLinear(num, OUT, IN, dtype=dtype, device="cuda"))


def refuses(module, recipe, splits):
    """Whether TE has no GEMM for an operation: its own way for a device may lack that of a recipe."""
    with in_region(recipe, dist.group.WORLD), torch.no_grad():
        try:
            module(batch_of(0), splits)
        except RuntimeError as error:
            assert "cuBLAS" in str(error), error
            return True
    return False


def check_ops(mesh, rank, recipe_name):
    recipe, faults = recipe_of(recipe_name), []
    splits = torch.tensor(SPLITS, device="cuda")
    reset()
    if recipe_name == "block" and refuses(build_ops(False, None, torch.bfloat16), recipe, splits):
        for native in (False, True):
            module = build_ops(False, recipe if native else None, torch.float32)
            parallelize_module(module, mesh, GTPStyle(CONFIG))
            assert refuses(module, recipe, splits) and stats(module).live_lease_bytes == 0
        return
    for in_pipeline in (False, True):
        for native in (False, True) if recipe_name in ("current", "block") else (False,):
            reset()
            what = f"{recipe_name} pipeline={in_pipeline} native={native}"
            module = build_ops(in_pipeline, recipe if native else None, torch.float32)
            reference = build_ops(in_pipeline, None, torch.bfloat16)
            for index, bias in enumerate(param for name, param in module.named_parameters() if "bias" in name):
                torch.nn.init.constant_(bias, 0.5 + index)
            dist.barrier()
            parallelize_module(module, mesh, GTPStyle(CONFIG))
            ops = [op for op in module.modules() if STATE in op.__dict__]
            wires = {op.__dict__[STATE].weights["weight"].wire_name for op in ops}
            assert wires == {"fp8" if recipe_name == "current" else "fp8_block"} if native else {"bf16"}, wires
            reset_stats(module)
            extra = [splits] * len(ops)
            beside(what, module, reference, recipe, rank, faults, lambda one, x: one(x, *extra), by_expert)
            found, num = stats(module), 2 * len(ops)
            counted = (found.num_forward_gathers, found.num_backward_gathers, found.num_reductions)
            # In the second step the last weight stays for its backward.
            if (
                counted != (num, num - 1, num)
                or found.num_kept_at_turn != 1
                or found.live_lease_bytes
                or found.num_pending
            ):
                faults.append(f"{what}: {found}")
    assert not faults, "\n".join(faults)


OPS_RECIPES = ["bf16", "delayed", "current", "block"]


@on_two
@pytest.mark.parametrize("recipe_name", OPS_RECIPES)
def test_operations_at_gtp_2(mesh, rank, recipe_name):
    check_ops(mesh, rank, recipe_name)


@on_four
@pytest.mark.parametrize("recipe_name", OPS_RECIPES)
def test_operations_at_gtp_4(mesh, rank, recipe_name):
    check_ops(mesh, rank, recipe_name)


@on_two
@pytest.mark.parametrize("recipe_name", ["bf16", "current"])
def test_layer_norm_mlp(mesh, rank, recipe_name):
    """By the general path: weights stay gathered until their backward."""
    recipe, faults = recipe_of(recipe_name), []
    for activation in ("gelu", "swiglu"):
        reset()
        options = {"normalization": "RMSNorm", "activation": activation, "device": "cuda"}
        module = te.LayerNormMLP(IN, OUT, params_dtype=torch.float32, **options)
        reference = te.LayerNormMLP(IN, OUT, params_dtype=torch.bfloat16, **options)
        dist.barrier()
        parallelize_module(module, mesh, GTPStyle(CONFIG))
        reset_stats(module)
        beside(f"{recipe_name} {activation}", module, reference, recipe, rank, faults, lambda one, x: one(x), dict)
        found = stats(module)
        if (found.num_forward_gathers, found.num_backward_gathers, found.num_reductions) != (4, 0, 4):
            faults.append(f"{activation}: {found}")
        if found.live_lease_bytes or found.num_pending:
            faults.append(f"{activation}: {found}")
    assert not faults, "\n".join(faults)
