"""Linears whose GEMMs read MXFP8: the same bits as torchao's arithmetic unsharded, weights gathered in MXFP8."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, stats
from tests.harness import ranks
from tests.reference import build_pair, mean_square, replica_options
from tests.test_float8_linear import TanhNet, sharded_weight, slow, train


class Net(TanhNet):
    def __init__(self, checkpoints=False, **options):
        from gtp_dtensor.wire.mx_linear import convert_to_mx_training

        super().__init__(lambda layers: convert_to_mx_training(layers, **options), checkpoints)


def options_of(case):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    return {"floor": {"mode": ScaleCalculationMode.FLOOR}, "hp": {"wgrad_with_hp": True}}.get(case, {})


@ranks(4)
@pytest.mark.parametrize(
    "case, checkpoints", [("rceil", False), slow("floor", True), slow("hp", False), slow("rceil", True)]
)
def test_trains_as_unsharded(rank, world_size, case, checkpoints):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dps", "gtp"))
    model, reference = build_pair(lambda: Net(checkpoints, **options_of(case)))
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30, **replica_options(mesh)))
    assert [sharded_weight(layer).wire_name for layer in (*model.layers, model.output)] == ["mxfp8"] * 3 + ["fp32"]
    train(model, reference, 4, rank)
    reset_stats(model)
    mean_square(model(torch.randn(32, 64))).backward()
    # Ranks send whole blocks of rows: 96 and 160 rows are 2 x 64 and 2 x 96 then.
    sent = [128 * 64, 192 * 96, 64 * 160]
    forward, backward = sum(sent) * 33 // 32, sum(sent[1:]) * 33 // 32
    if checkpoints:  # the backward reads other codes than the recompute
        forward *= 2
    assert stats(model).gather_bytes == forward + backward + 2 * 4 * model.output.weight.numel()
    assert stats(model).num_quantizations == 3


@ranks(2)
def test_one_gathered_in_high_precision_is_quantized_at_each_gemm(mesh, rank, world_size):
    model, reference = build_pair(Net)
    parallelize_module(model, mesh["gtp"], GTPStyle(GTPConfig(wire_format="bf16"), min_numel=30))
    assert sharded_weight(model.layers[0]).wire is None
    train(model, reference, 2, rank)


@ranks(2)
def test_what_is_refused(mesh, rank, world_size):
    from gtp_dtensor.wire.mx_linear import convert_to_mx_training

    with pytest.raises(ValueError, match=r"0: 64 in and 40 out features.*multiples of 32"):
        convert_to_mx_training(nn.Sequential(nn.Linear(64, 40)))
    with pytest.raises(ValueError, match=r"layers\.0\.weight: wire format 'nvfp4' for .*MXLinear.*'mxfp8'.*'auto'"):
        parallelize_module(Net(), mesh["gtp"], GTPStyle(GTPConfig(wire_format="nvfp4"), min_numel=30))
    model = parallelize_module(Net(), mesh["gtp"], GTPStyle(min_numel=30))
    with pytest.raises(ValueError, match="20 tokens are not a multiple of 32.*wgrad_with_hp"):
        model(torch.randn(20, 64))
    with torch.no_grad():
        model(torch.randn(20, 64))


@pytest.mark.slow
@ranks(4)
def test_tensor_parallelism_is_refused(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
    model = parallelize_module(Net(), mesh["tp"], {"layers.0": ColwiseParallel()})
    with pytest.raises(NotImplementedError, match="tensor parallelism"):
        parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30))
