"""What of TransformerEngine's quantized weights is refused before anything changes, on a stand-in for it."""

import sys
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPStyle
from gtp_dtensor.members import STATE
from tests import te_stand_in as te
from tests.harness import ranks
from tests.reference import relative_error


def native(kind, *shapes, **options):
    with te.quantized_model_init(te.Recipe(kind)):
        return nn.Sequential(*(te.Linear(*shape, **options) for shape in shapes))


@ranks(2)
def test_a_device_without_kernels_is_named(mesh):
    """Where they may do nothing, and leave whatever was in memory."""
    why = "Device compute capability 10.0 or higher required"
    with te.installed():
        package = sys.modules["transformer_engine.pytorch"]
        for kind, function in (
            ("mx", "is_mxfp8_available"),
            ("nv", "is_nvfp4_available"),
            ("delayed", "is_fp8_available"),
        ):
            model = native(kind, (64, 64))
            before = dict(model.named_parameters())
            with mock.patch.object(package, function, lambda return_reason: (False, why)):
                with pytest.raises(ValueError, match=rf"0\.weight of shape .*this device does not have \({why}\)"):
                    parallelize_module(model, mesh, GTPStyle())
                assert all(before[name] is param for name, param in model.named_parameters())
                parallelize_module(nn.Sequential(te.Linear(64, 64)), mesh, GTPStyle())  # quantized where TE checks it
            parallelize_module(model, mesh, GTPStyle())
            assert model[0].__dict__[STATE].weights["weight"].wire is not None


@ranks(2)
def test_nvfp4_of_other_blocks_is_named(mesh):
    with te.installed():
        for option, value, message in (
            ("with_2d_quantization", False, "with blocks along one dim"),
            ("nvfp4_use_4over6", True, "with nvfp4_use_4over6=True"),
            ("with_rht", True, "with with_rht=True"),
            ("stochastic_rounding", True, "with stochastic_rounding=True"),
        ):
            model = native("nv", (64, 64))
            setattr(model[0].quantizers["scaling_fwd"][1], option, value)
            with pytest.raises(
                ValueError, match=rf"0\.weight: Linear .*NVFP4Quantizer, {message}: .*wire_format='bf16'"
            ):
                parallelize_module(model, mesh, GTPStyle())


@ranks(2)
def test_rows_that_blocks_do_not_divide_are_named(mesh):
    """TE makes no such weight; on the meta device nobody has noticed yet."""
    with te.installed():
        for kind, rows, block in (("mx", 80, 32), ("nv", 88, 16)):
            model = native(kind, (64, rows), device="meta")
            with pytest.raises(
                ValueError, match=rf"0\.weight of shape \({rows}, 64\).* blocks of {block} rows.*divide {rows}"
            ):
                parallelize_module(model, mesh, GTPStyle(min_numel=0))


@ranks(2)
def test_nvfp4_read_in_high_precision(mesh):
    """Outside of an autocast: what the codes stand for. Values smaller than e4m3 times float32 could scale, and zeros."""
    with te.installed():
        for factor in (1.0, 1e-20, 0.0):
            model = native("nv", (64, 64), bias=False)
            value = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * factor
            model[0]._parameters["weight"].get_high_precision_init_val = lambda value=value: value
            parallelize_module(model, mesh, GTPStyle(min_numel=0))
            assert model[0].__dict__[STATE].weights["weight"].wire_name == "nvfp4"
            y = model(torch.eye(64)).t() / (factor or 1.0)
            error = relative_error(y, value / (factor or 1.0))
            assert 0.05 < error < 0.2 if factor else error == 0
