"""Bad input is refused at set-up, by name, and nothing has been changed then."""

import re
import warnings

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import gtp_dtensor
from gtp_dtensor import GTPConfig, GTPStyle
from tests.harness import ranks


def refused(model, mesh, message, style=None, error=ValueError):
    """Applying the style raises, the message has all parts, and the model is as it was."""
    before = [(module, type(module), dict(module._parameters), set(module.__dict__)) for module in model.modules()]
    with pytest.raises(error) as info:
        parallelize_module(model, mesh, style or GTPStyle())
    for part in message:
        assert re.search(part, str(info.value)), (part, str(info.value))
    for module, cls, params, attributes in before:
        assert type(module) is cls and module._parameters == params and set(module.__dict__) == attributes


@ranks(2)
def test_meshes(mesh):
    model = nn.Linear(64, 64)
    with pytest.raises(ValueError, match=r'needs the 1-D mesh.*got none.*mesh\["gtp"\]'):
        GTPStyle()._apply(model, None)
    both = init_device_mesh("cpu", (2, 1), mesh_dim_names=("gtp", "tp"))
    refused(model, both, ["2-D mesh", "gtp=2, tp=1", r'mesh\["gtp"\]'])
    with pytest.raises(KeyError):
        both["gpt"]


@ranks(2)
def test_applied_twice(mesh):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    parallelize_module(model, mesh, {"1": GTPStyle()})
    refused(model, mesh, [r"1\.weight of shape \(64, 64\)", "given to a GTPStyle before", "modules="])
    with pytest.raises(ValueError, match="given to a GTPStyle before"):
        parallelize_module(model, mesh, {"1": GTPStyle()})


@ranks(4)
def test_conflicting_meshes(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
    sharded = nn.Linear(64, 64)
    fully_shard(sharded, mesh=mesh["gtp"])
    refused(sharded, mesh["gtp"], [r"weight of shape \(64, 64\)", "shares ranks", "gtp axis", "axes of its own"])
    on_two = nn.Linear(64, 64, bias=False)
    on_two.weight = nn.Parameter(distribute_tensor(on_two.weight.detach(), mesh, [Shard(0), Shard(1)]))
    refused(
        on_two,
        mesh["gtp"],
        [r"weight of shape \(64, 64\)", r"\('gtp', 'tp'\)", "axes of its own that are orthogonal to gtp"],
    )
    other = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("a", "b"))["b"]
    mixed = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    parallelize_module(mixed[0], mesh["tp"], ColwiseParallel())
    parallelize_module(mixed[1], other, ColwiseParallel())
    refused(mixed, mesh["gtp"], ["2 different tensor-parallel meshes"])


@ranks(2)
def test_patterns_that_match_nothing(mesh):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    refused(model, mesh, [r"exclude=.*'2\.weight' matches nothing", r"0\.weight"], GTPStyle(exclude=["2.weight"]))
    refused(model, mesh, [r"modules=.*'layers\.\*' matches nothing"], GTPStyle(modules=["layers.*"]))
    for options in ({"exclude": "0.weight"}, {"modules": "0"}):
        with pytest.raises(TypeError, match="list of patterns"):
            GTPStyle(**options)


@ranks(2)
def test_plan_keys_that_match_nothing(mesh):
    """torch warns only; our own entry refuses."""
    model = nn.Sequential(nn.Linear(64, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"plan key 'layers\.\*' matches no module.*'0'"):
            gtp_dtensor.parallelize_module(model, mesh, {"0": GTPStyle(), "layers.*": GTPStyle()})
        assert not isinstance(model[0].weight, DTensor)
        gtp_dtensor.parallelize_module(model, mesh, {"0": GTPStyle()})
    assert isinstance(model[0].weight, DTensor)


@ranks(2)
def test_modules_that_cannot_be_served(mesh):
    refused(
        nn.Embedding(64, 64, sparse=True), mesh, [r"weight of shape \(64, 64\)", "axis 'gtp' of size 2", "sparse=True"]
    )
    refused(nn.Embedding(64, 64, max_norm=1.0), mesh, ["max_norm", "exclude="])
    strided = nn.Linear(64, 64)
    strided.weight = nn.Parameter(torch.empty(64, 64).t())
    refused(strided, mesh, ["weight of shape", r"strides \(1, 64\)", "contiguous"])
    refused(nn.ReLU(), mesh, ["no parameters"])


@ranks(2)
def test_hooks_and_gradients_from_before(mesh):
    hooked = nn.Linear(64, 64)
    hooked.weight.register_hook(lambda grad: grad)
    refused(hooked, mesh, ["weight of shape", "gradient hooks", "register them afterwards"])
    late = nn.Linear(64, 64)
    late.bias.register_post_accumulate_grad_hook(lambda param: None)
    refused(late, mesh, [r"bias of shape \(64,\)", "gradient hooks"])
    used = nn.Linear(64, 64)
    used(torch.ones(1, 64)).sum().backward()
    refused(used, mesh, ["has a gradient", r"zero_grad\(set_to_none=True\)"])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"wire_format": "fp4"}, "choose one of bf16, fp8, fp8_rowwise, fp8_block, mxfp8, nvfp4, auto"),
        ({"transport": "nccl"}, "choose one of auto, collective, symmetric"),
        ({"look_ahead": 0}, r"look_ahead=0: must be an integer of at least 1"),
        ({"graph_wgrad_ring_size": 0}, "graph_wgrad_ring_size=0"),
        ({"pad_for_alignment": 0}, "pad_for_alignment=0: must be None or"),
        ({"recompute_keep_bytes": -1}, "recompute_keep_bytes=-1"),
        ({"param_dtype": torch.int8}, "param_dtype=torch.int8"),
        ({"reduce_dtype": "bfloat16"}, "reduce_dtype='bfloat16'"),
    ],
)
def test_configuration(options, message):
    with pytest.raises(ValueError, match=message):
        GTPConfig(**options)


def test_style_arguments():
    with pytest.raises(TypeError, match="must be a GTPConfig, got dict"):
        GTPStyle({"look_ahead": 1})
    with pytest.raises(ValueError, match="min_numel=-1"):
        GTPStyle(min_numel=-1)
    with pytest.raises(TypeError):
        GTPConfig(ring=2)
    with pytest.raises(AttributeError):  # frozen
        GTPConfig().look_ahead = 2


@ranks(2)
def test_single_process_error_reaches_the_user_in_the_forward(mesh):
    """A weight that cannot be used as given says which one it is."""
    model = nn.Sequential(nn.Linear(64, 64))
    parallelize_module(model, mesh, GTPStyle())
    model[0].weight = nn.Parameter(torch.zeros(64, 64))
    with pytest.raises(RuntimeError, match=r"0\.weight: the parameter was replaced by a Parameter of shape \(64, 64\)"):
        model(torch.ones(1, 64))
