"""Compiled parts of a model that are called by themselves: no forward of the model tells them what their parameters are now."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPStyle
from tests.harness import ranks
from tests.reference import build_pair, full_gradients


def assigned(model, whole):
    values = {name: value.clone().mul_(3) for name, value in model.state_dict().items()}
    model.load_state_dict(values, assign=True)
    whole.load_state_dict({name: value.full_tensor() for name, value in values.items()})


def one_by_one(model, whole):
    for part in (*model, *whole):
        part.bias = nn.Parameter(part.bias.detach() + 3)


def in_another_dtype(model, whole):
    model.double()
    whole.double()


@ranks(2)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("replace", [assigned, one_by_one, in_another_dtype])
def test_parameters_that_are_replaced(mesh, replace, trains):
    torch.compiler.reset()
    model, whole = build_pair(lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)))
    parallelize_module(model, mesh, GTPStyle())
    parts = [torch.compile(part, backend="aot_eager", fullgraph=True) for part in model]
    x = torch.randn(4, 64)
    with torch.set_grad_enabled(trains):
        parts[1](x)  # a norm alone: whole parameters only
        before = parts[1](parts[0](x))
        replace(model, whole)
        x = x.to(next(whole.parameters()).dtype)
        norm, after, expected = parts[1](x), parts[1](parts[0](x)), whole(x)
        assert not torch.allclose(after.to(before), before) or replace is in_another_dtype
        torch.testing.assert_close(norm, whole[1](x))
        torch.testing.assert_close(after, expected)
    if trains:
        after.square().mean().backward()
        expected.square().mean().backward()
        ours = full_gradients(model)
        for name, grad in full_gradients(whole).items():
            torch.testing.assert_close(ours[name], grad)


@ranks(2)
@pytest.mark.parametrize("replace", [assigned, one_by_one, in_another_dtype])
def test_a_norm_alone(mesh, replace):
    torch.compiler.reset()
    model, whole = build_pair(lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)))
    parallelize_module(model, mesh, GTPStyle())
    norm = torch.compile(model[1], backend="aot_eager", fullgraph=True)
    x = torch.randn(4, 64)
    with torch.no_grad():
        norm(x)
        replace(model, whole)
        x = x.to(next(whole.parameters()).dtype)
        torch.testing.assert_close(norm(x), whole[1](x))
