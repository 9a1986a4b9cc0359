"""Gradients of parameters that had none are scaled when the backward ends, all at once, and given to them then."""

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
    """Linears of which the first one is used three times, with others between, so that more is added to its gradient
    while that waits for its scale."""

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
def test_a_backward_that_raises_gives_no_gradient_unscaled(mesh, rank, world_size):
    """What was not in ``.grad`` by then is dropped with it, and the next one is clean."""
    model, reference = _pair(mesh, GTPConfig())
    (runtime,) = model_runtimes(model)
    new = []

    def hook(grad):
        new.extend(runtime.reducer._new)
        raise ZeroDivisionError

    y = model(local_slice(_batch(0), rank, world_size), hook)
    with pytest.raises(ZeroDivisionError):
        mean_square(y).backward()
    assert new and all(param.grad is None for param in model.parameters())  # the trap is armed
    mean_square(model(local_slice(_batch(1), rank, world_size))).backward()
    mean_square(reference(_batch(1))).backward()
    assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient")


@ranks(3)
def test_autograd_gives_a_gradient_too_in_the_same_backward(mesh, rank, world_size):
    """Where a DTensor operator reads the parameter, what comes of it is in ``.grad`` before ours, and is not scaled."""
    model, reference = _pair(mesh, GTPConfig())
    for number in range(2):
        penalty = sum(param.square().sum().full_tensor() for param in model.parameters())
        (mean_square(model(local_slice(_batch(number), rank, world_size))) + penalty).backward()
        (mean_square(reference(_batch(number))) + sum(p.square().sum() for p in reference.parameters())).backward()
        assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient")
