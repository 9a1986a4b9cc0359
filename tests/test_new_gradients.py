"""Gradients that a backward begins are scaled when it ends, all at once; whatever adds to them before must know."""

from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPConfig, GTPStyle, stats
from gtp_dtensor.members import model_runtimes
from tests.harness import ranks
from tests.reference import assert_close_to_reference, build_pair, full_gradients, local_slice, mean_square

_foreach_mul_ = torch._foreach_mul_


class _Chain(nn.Module):
    """Linears of which the first one is used three times, with others between, so that its gradient begins, and is added to
    while it waits for its scale."""

    def __init__(self):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x, hook=None):
        for place in (0, 1, 0, 2, 3, 0):
            x = self.linears[place](x)
            if place == 1 and hook is not None:
                x.register_hook(hook)
        return x


def _pair(mesh, config):
    model, reference = build_pair(_Chain)
    parallelize_module(model, mesh, GTPStyle(config, min_numel=30))
    return model, reference


def _batch(number):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(number))


@ranks(3)
@pytest.mark.parametrize(
    "config",
    [
        GTPConfig(),
        GTPConfig(async_reduction=False),
        GTPConfig(param_dtype=torch.float32, reduce_dtype=torch.float64),
        GTPConfig(calculate_per_token_loss=True),
    ],
    ids=["one kernel", "at once", "sums wider than gradients", "no scale"],
)
def test_gradients_that_begin_and_grow_in_one_backward(mesh, rank, world_size, config):
    model, reference = _pair(mesh, config)
    scaled = []

    def note(tensors, scale):
        scaled.append((len(tensors), scale))
        _foreach_mul_(tensors, scale)

    with mock.patch.object(torch, "_foreach_mul_", note):
        for number in range(2):  # the second one adds to the first one's
            mean_square(model(local_slice(_batch(number), rank, world_size))).backward()
            mean_square(reference(_batch(number))).mul(3 if config.calculate_per_token_loss else 1).backward()
            assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient")
    assert scaled == ([(4, 1 / 3)] if config == GTPConfig() else [])
    assert stats(model).num_reductions == 2 * 6


@ranks(3)
def test_a_backward_that_raises_leaves_no_gradient_unscaled(mesh, rank, world_size):
    """As before, ``.grad`` may hold a part of its gradients; each as large as it should be, and the next one is clean."""
    model, reference = _pair(mesh, GTPConfig())
    (runtime,) = model_runtimes(model)
    unscaled = []

    def hook(grad):
        unscaled.extend(runtime.reducer._unscaled.values())
        raise ZeroDivisionError

    y = model(local_slice(_batch(0), rank, world_size), hook)
    with pytest.raises(ZeroDivisionError):
        mean_square(y).backward()
    assert unscaled  # the trap is armed
    mean_square(model(local_slice(_batch(1), rank, world_size))).backward()  # notices it, and adds
    found = full_gradients(model)["linears.3.weight"]
    for number in range(2):
        mean_square(reference(_batch(number))).backward()
    expected = full_gradients(reference)["linears.3.weight"]
    assert_close_to_reference({"linears.3": found}, {"linears.3": expected}, "gradient")
    for module in (model, reference):
        module.zero_grad()
    mean_square(model(local_slice(_batch(2), rank, world_size))).backward()
    mean_square(reference(_batch(2))).backward()
    assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient")
