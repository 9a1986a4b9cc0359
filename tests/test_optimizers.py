"""torch's and torchao's optimizers on what ``named_parameters()`` gives, beside the same on whole parameters."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPStyle
from tests.harness import ranks
from tests.test_muon import built, give_gradients, slow, worst

OPTIMIZERS = {
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "adamw plain": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False),
    "sgd foreach": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=True),
    "sgd plain": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, foreach=False),
}


@ranks(4)
@pytest.mark.parametrize("name", ["adamw foreach", *map(slow, list(OPTIMIZERS)[1:])])
@pytest.mark.parametrize("axes", [{"gtp": 4, "egtp": 2}, slow({"gtp": 2, "tp": 2})], ids=str)
def test_three_steps_in_one_group(axes, name):
    """Dense and expert weights, whole and empty ones, those of tensor parallelism: on several meshes."""
    check(axes, OPTIMIZERS[name])


def by_mesh(params):
    """A group for each mesh."""
    groups = {}
    for param in params:
        groups.setdefault(getattr(param, "device_mesh", None), []).append(param)
    return [{"params": group} for group in groups.values()]


ON_GPU = {
    # torch takes the counts of steps, which are tensors then, for tensors of the first parameter's mesh.
    "adamw capturable": lambda params: torch.optim.AdamW(by_mesh(params), lr=0.01, foreach=True, capturable=True),
    "adamw fused and capturable": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True, capturable=True),
    "adamw plain and capturable": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=False, capturable=True),
}


@ranks(4, device="cuda", timeout=240, group_timeout=120)
@pytest.mark.parametrize("name", ["adamw foreach", *ON_GPU])
def test_three_steps_on_a_gpu(name):
    check({"gtp": 4, "egtp": 2}, (OPTIMIZERS | ON_GPU)[name], "cuda")


def check(axes, make, device="cpu"):
    model, whole, _ = built(axes, device)
    meshes = {param.device_mesh for param in model.parameters() if isinstance(param, DTensor)}
    three_rows = model.linears[1].weight
    assert (
        len(meshes) > 1 and three_rows.shape[0] == 3 and three_rows.placements[-1].is_shard(0)
    )  # none for the last rank
    optimizer, reference = (make(list(one.parameters())) for one in (model, whole))
    for step in range(3):
        give_gradients(model, whole, step)
        optimizer.step()
        reference.step()
    error, where = worst(model, whole)
    assert error < 1e-6, (error, where)


@ranks(4, device="cuda", timeout=240, group_timeout=120)
def test_three_steps_of_te(rank):
    """TransformerEngine's, in one group as well."""
    fused_adam = pytest.importorskip("transformer_engine.pytorch.optimizers").FusedAdam
    check({"gtp": 4, "egtp": 2}, lambda params: fused_adam(params, lr=0.01), "cuda")


@ranks(2)
@pytest.mark.slow
def test_torchao_8_bit_where_its_blocks_agree(mesh):
    """Its state is quantized in blocks of 256 elements of what a rank stores, where that has 4096 or more."""
    pytest.importorskip("torchao")
    from torchao.optim import AdamW8bit

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(128, 64, bias=False), nn.Linear(64, 128)))
    model, whole = models
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    optimizers = [AdamW8bit(one.parameters(), lr=0.01) for one in models]
    for step in range(3):
        give_gradients(model, whole, step)
        with torch.compiler.set_stance("force_eager"):  # it compiles its steps, for minutes
            for optimizer in optimizers:
                optimizer.step()
    states = [optimizer.state[one[0].weight]["exp_avg"] for optimizer, one in zip(optimizers, models)]
    assert isinstance(states[0], DTensor) and "8bit" in type(states[1]).__name__, [type(one) for one in states]
    error, where = worst(model, whole)
    assert error < 1e-6, (error, where)
