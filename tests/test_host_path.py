"""What one use of a weight costs the host, counted in Python calls: the same number on every machine."""

import gc
import os
import sys

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, stats

_TORCH = os.path.dirname(torch.__file__) + os.sep
_WIDTH = 64


@pytest.fixture
def world_of_64():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    yield
    dist.destroy_process_group()


def build(num_linears: int, replicas: str | None, config: GTPConfig, num_norms: int = 0) -> nn.Module:
    model = nn.Sequential(
        *[nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(num_linears)],
        *[nn.RMSNorm(_WIDTH) for _ in range(num_norms)],
    )
    if replicas is None:
        mesh, options = init_device_mesh("cpu", (64,), mesh_dim_names=("gtp",)), {}
    else:
        mesh = init_device_mesh("cpu", (2, 32), mesh_dim_names=("replicas", "gtp"))
        options = {replicas: mesh["replicas"]}
    parallelize_module(model, mesh["gtp"], GTPStyle(config, min_numel=_WIDTH + 1, **options))
    return model


def step(model: nn.Module) -> None:
    y = model(torch.ones(2, _WIDTH, requires_grad=True))
    y.backward(torch.ones_like(y))


def num_calls(num_linears: int, replicas: str | None, config: GTPConfig, num_norms: int = 0) -> int:
    """Calls of Python functions that are not torch's in a forward and its backward, after warm-up."""
    model = build(num_linears, replicas, config, num_norms)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    step(model)
    optimizer.step()
    for _ in range(2):
        step(model)
    reset_stats(model)
    seen = []

    def note(frame, event, argument):
        if event == "call" and not frame.f_code.co_filename.startswith(_TORCH):
            seen.append(frame.f_code)

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        step(model)
    finally:
        sys.setprofile(None)
        gc.enable()
    found = stats(model)
    assert found.num_forward_gathers == found.num_reductions == num_linears
    assert (found.num_backward_gathers, found.num_kept_at_turn) == (num_linears - 1, 1)
    assert found.num_prefetch_hits == 2 * num_linears - 2 and found.num_mispredictions == 0
    assert found.num_small_reductions == (num_norms > 0)
    return len(seen)


# Measured, and two more. Who lowers a number by work lowers its bound.
@pytest.mark.parametrize(
    ("replicas", "config", "most"),
    [
        (None, GTPConfig(), 54),
        (None, GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.float32), 54),
        ("optimizer_shard_mesh", GTPConfig(param_dtype=torch.bfloat16), 70),
        ("replicate_mesh", GTPConfig(param_dtype=torch.bfloat16), 72),
    ],
    ids=["float32", "bfloat16", "optimizer_shards", "copies"],
)
def test_python_calls_of_one_linear(world_of_64, replicas, config, most):
    """Gathered for its forward and for its backward, its gradient reduced."""
    assert (num_calls(16, replicas, config) - num_calls(8, replicas, config)) / 8 <= most


def test_python_calls_of_one_norm(world_of_64):
    """A weight that stays whole: read in the forward, its gradient collected, summed with all others, and added."""
    config = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert (num_calls(1, None, config, 16) - num_calls(1, None, config, 8)) / 8 <= 18
