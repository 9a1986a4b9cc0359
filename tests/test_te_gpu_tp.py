"""TransformerEngine's own tensor and sequence parallelism under GTP, several ranks on one GPU."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPStyle
from gtp_dtensor.members import STATE
from tests.reference import full
from tests.test_te_gpu import (
    CONFIG,
    RECIPES,
    batch_of,
    by_expert,
    call,
    compare,
    in_region,
    make,
    mean_grads,
    on_four,
    recipe_of,
    reset,
)
from tests.test_te_tp import slice_of

SHAPE = (256, 512)
CASES = (
    ("Linear", "column", False),
    ("Linear", "row", False),
    ("LayerNormLinear", "column", False),
    ("Linear", "column", True),
    ("Linear", "row", True),
    ("LayerNormLinear", "column", True),
    ("GroupedLinear", "column", False),
    ("GroupedLinear", "row", False),
)


def logical(module):
    return by_expert(module, {name: full(param) for name, param in module.named_parameters()})


def fill(module, values, mesh):
    """Before GTP: this rank's slices of ``values``."""
    for name, param in module.named_parameters():
        value = slice_of(values[name], param.shape, mesh)
        if type(param) is nn.Parameter:
            param.data.copy_(value)
        else:
            param.get_high_precision_init_val = lambda value=value: value


def follow(reference, module, mesh):
    """TE's module without GTP gets this rank's slices of the parameters; its wgrads are accumulated in float32."""
    values = logical(module)
    for name, param in reference.named_parameters():
        param.data.copy_(slice_of(values[name], param.shape, mesh))
        param.grad = None
        if "layer_norm" not in name and "bias" not in name:
            param.main_grad = torch.zeros_like(param)
    reference.fuse_wgrad_accumulation = True
    reference.__dict__["activation_dtype"] = torch.bfloat16


def check_grads(what, module, reference, mesh, mode, is_sequence, faults, recipe_name):
    grads = by_expert(module, {name: full(param.grad) for name, param in module.named_parameters()})
    for name, expected in mean_grads(reference, mesh.get_group("gtp")).items():
        if is_sequence and ("layer_norm" in name or name == "bias" and mode == "row"):
            dist.all_reduce(expected, group=mesh.get_group("tp"))  # of the tokens of each rank
        mine = slice_of(grads[name], expected.shape, mesh)
        is_rounded = expected.dim() == 1 and recipe_name == "bf16"  # TE meets these parameters in bfloat16
        compare(what, {name: (mine, expected)}, faults, 2**-8 if is_rounded else 1e-6)


@on_four
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_tensor_parallelism_is_that_of_te(rank, recipe_name):
    """tp 2 x gtp 2 beside TE's tp 2: y and dx to the last bit. A module on one rank is no such reference in FP8: TE scales
    slices of weights, inputs and gradients by themselves."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("gtp", "tp"))
    tp_rank, gtp_rank = mesh.get_local_rank("tp"), mesh.get_local_rank("gtp")
    recipe, faults = recipe_of(recipe_name), []
    for kind, mode, is_sequence in CASES:
        if kind == "GroupedLinear" and recipe_name == "current":
            continue  # which TE refuses
        reset()
        whole = make(kind, shape=SHAPE, bias=kind != "GroupedLinear")
        for param in whole.parameters():
            if param.dim() == 1:
                nn.init.uniform_(param, 0.5, 1.5)
            else:
                param.data[0, 0] = 2.0  # in the first slice
        options = {"tp_group": mesh.get_group("tp"), "parallel_mode": mode, "sequence_parallel": is_sequence}
        options["bias"] = kind != "GroupedLinear"
        module, reference = make(kind, recipe, SHAPE, **options), make(kind, None, SHAPE, **options)
        fill(module, dict(whole.named_parameters()), mesh)
        parallelize_module(module, mesh["gtp"], GTPStyle(CONFIG))
        assert (module.__dict__[STATE].weights["weight"].wire is None) == (recipe is None)
        for name, value in logical(module).items():
            assert torch.equal(value, whole.get_parameter(name)), f"{kind} {mode} {name} before the first step"
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(2):
            what = f"{kind} {mode} sequence={is_sequence} {recipe_name} step {step}"
            follow(reference, module, mesh)
            x = batch_of(gtp_rank, step, SHAPE[0]).detach()
            x = x.chunk(2, -1)[tp_rank] if mode == "row" else x.chunk(2)[tp_rank] if is_sequence else x
            x = [x.contiguous().clone().requires_grad_() for _ in range(2)]
            with in_region(recipe, dist.group.WORLD):
                y = [call(one, kind, part) for one, part in zip((module, reference), x)]
            seed = 10 * gtp_rank + (tp_rank if is_sequence or mode == "column" else 0)
            grad = torch.randn(y[1].shape, generator=torch.Generator().manual_seed(seed)).to(y[1])
            torch.autograd.backward(y, [grad, grad.clone()])  # whose end updates the scales of both
            compare(what, {"y": y, "dx": [part.grad for part in x]}, faults)
            check_grads(what, module, reference, mesh, mode, is_sequence, faults, recipe_name)
            optimizer.step()
            optimizer.zero_grad()
    assert not faults, "\n".join(faults)


@on_four
@pytest.mark.parametrize("recipe_name", RECIPES)
def test_tensor_parallelism_and_one_rank(rank, recipe_name):
    """Slices are right: a module on one rank gives the same but for rounding. bf16: partial sums of GEMMs. FP8: slices of
    gradients are scaled by themselves, and E5M2 has two bits behind its first."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("gtp", "tp"))
    tp_rank, gtp_rank = mesh.get_local_rank("tp"), mesh.get_local_rank("gtp")
    recipe, rtol, faults = recipe_of(recipe_name), 2**-7 if recipe_name == "bf16" else 2**-3, []
    for kind, mode, _ in CASES[:3]:
        reset()
        whole = make(kind, shape=SHAPE)
        options = {"tp_group": mesh.get_group("tp"), "parallel_mode": mode}
        module = make(kind, recipe, SHAPE, **options)
        fill(module, dict(whole.named_parameters()), mesh)
        parallelize_module(module, mesh["gtp"], GTPStyle(CONFIG))
        whole.__dict__["activation_dtype"] = torch.bfloat16
        inputs = [batch_of(gtp_rank, 0, SHAPE[0]) for _ in range(2)]
        if mode == "row":
            inputs[0] = inputs[0].detach().chunk(2, -1)[tp_rank].contiguous().requires_grad_()
        with in_region(recipe, dist.group.WORLD):
            y, expected = (call(one, kind, x) for one, x in zip((module, whole), inputs))
        grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(gtp_rank)).to(y)
        expected.backward(grad)
        dx = inputs[1].grad
        if mode == "column":
            expected, grad = (one.chunk(2, -1)[tp_rank] for one in (expected, grad))
        else:
            dx = dx.chunk(2, -1)[tp_rank]
        y.backward(grad.contiguous())
        grads, wanted = (
            {n: full(p.grad) for n, p in module.named_parameters()},
            mean_grads(whole, mesh.get_group("gtp")),
        )
        pairs = {name: (grads[name], wanted[name]) for name in wanted}
        compare(f"{kind} {mode} {recipe_name}", {"y": (y, expected), "dx": (inputs[0].grad, dx)} | pairs, faults, rtol)
    assert not faults, "\n".join(faults)
