"""Linears whose GEMMs read MXFP8: the same bits as torchao's arithmetic unsharded, weights gathered in MXFP8."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, stats
from tests.harness import ranks
from tests.reference import assert_close_to_reference, build_pair, full_gradients, mean_square, replica_options
from tests.test_float8_linear import TanhNet, sharded_weight, slow, train


class Net(TanhNet):
    def __init__(self, checkpoints=False, hidden=(96, 160), **options):
        from gtp_dtensor.wire.mx_linear import convert_to_mx_training

        super().__init__(lambda layers: convert_to_mx_training(layers, **options), checkpoints, hidden)


def options_of(case):
    from torchao.prototype.mx_formats.config import ScaleCalculationMode

    return {"floor": {"mode": ScaleCalculationMode.FLOOR}, "hp": {"wgrad_with_hp": True}}.get(case, {})


@ranks(4, device=("cpu", "cuda"), timeout=120, group_timeout=60)
@pytest.mark.parametrize(
    "case, checkpoints", [("rceil", False), slow("floor", True), slow("hp", False), slow("rceil", True)]
)
def test_trains_as_unsharded(rank, world_size, device, case, checkpoints):
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dps", "gtp"))
    model, reference = build_pair(lambda: Net(checkpoints, **options_of(case)).to(device))
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30, **replica_options(mesh)))
    assert [sharded_weight(layer).wire_name for layer in (*model.layers, model.output)] == ["mxfp8"] * 3 + ["fp32"]
    train(model, reference, 4, rank)
    reset_stats(model)
    for _ in range(2):  # as many microbatches as in training, or the first weight of one more would be gathered
        mean_square(model(torch.randn(32, 64, device=device))).backward()
    # Ranks send whole blocks of rows: 96 and 160 rows are 2 x 64 and 2 x 96 then.
    sent = [128 * 64, 192 * 96, 64 * 160]
    forward, backward = sum(sent) * 33 // 32, sum(sent[1:]) * 33 // 32
    if checkpoints:  # the backward reads other codes than the recompute
        forward *= 2
    assert stats(model).num_kept_at_turn == 2  # the output's weight
    assert stats(model).gather_bytes == 2 * (forward + backward + 4 * model.output.weight.numel())
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


def tensor_parallel_mesh():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))


class Halves(Net):
    """The arithmetic of two tensor-parallel ranks, in one process: a sum in another order may round to another code."""

    def body(self, x):
        for layer, dim in zip(self.layers, (0, 1, 0)):
            x = torch.tanh(self.halves(layer, x, dim))
        return x

    def forward(self, x):
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)
        return self.halves(self.output, x, 1)

    @staticmethod
    def halves(layer, x, dim):
        weights = [part.contiguous() for part in layer.weight.chunk(2, dim)]
        bias = torch.zeros(layer.out_features) if layer.bias is None else layer.bias
        biases = bias.chunk(2) if dim == 0 else [bias / 2] * 2  # DTensor's way
        inputs = [x] * 2 if dim == 0 else [part.contiguous() for part in x.chunk(2, -1)]
        values = zip(weights, biases)
        names = ("weight",) if layer.bias is None else ("weight", "bias")
        parts = [functional_call(layer, dict(zip(names, value)), part) for value, part in zip(values, inputs)]
        for part in parts:
            part.register_hook(torch.Tensor.contiguous)  # torchao takes no other
        return torch.cat(parts, -1) if dim == 0 else parts[0] + parts[1]


@ranks(4)
@pytest.mark.parametrize("case", ["rceil", slow("floor"), slow("hp"), slow("bf16_wire")])
@pytest.mark.parametrize("checkpoints", [False, slow(True)])
def test_tensor_parallel_trains_as_unsharded(rank, world_size, case, checkpoints):
    """By columns, by rows, and by columns from a cut sequence."""
    mesh = tensor_parallel_mesh()
    torch.manual_seed(0)
    model, reference = (kind(checkpoints, (128, 192), **options_of(case)) for kind in (Net, Halves))
    plan = {
        "layers.0": ColwiseParallel(use_local_output=False),
        "layers.1": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
        "layers.2": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
        "output": RowwiseParallel(),
    }
    parallelize_module(model, mesh["tp"], plan)
    wire = "bf16" if case == "bf16_wire" else "auto"
    parallelize_module(model, mesh["gtp"], GTPStyle(GTPConfig(wire_format=wire), min_numel=30))
    assert sharded_weight(model.layers[1]).wire_name == ("fp32" if wire == "bf16" else "mxfp8")
    assert sharded_weight(model.layers[1]).tp.placements == (Shard(1),)
    for kind, lr in ((torch.optim.SGD, 0.5), (torch.optim.Adam, 1e-3)):
        optimizer = kind(model.parameters(), lr=lr)
        train(model, reference, 2, rank // 2, optimizer=optimizer)


@ranks(4)
@pytest.mark.parametrize(
    "style, features, is_exact",
    [
        (ColwiseParallel(use_local_output=False), Replicate(), True),
        (RowwiseParallel(use_local_output=False), Shard(-1), False),
        (None, Shard(0), True),
    ],
    ids=["columns", "rows", "whole"],
)
def test_tensor_parallel_reads_the_same_codes(rank, world_size, style, features, is_exact):
    """Forward and gradients of one linear: by columns, by rows, and whole where each rank has its own tokens."""
    from gtp_dtensor.wire.mx_linear import convert_to_mx_training

    mesh = tensor_parallel_mesh()

    def build():
        return convert_to_mx_training(nn.Sequential(nn.Linear(128, 64, bias=False)))

    model, reference = build_pair(build)
    if style is None:
        distribute_module(model[0], mesh["tp"])
    else:
        parallelize_module(model, mesh["tp"], {"0": style})
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30))
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 128, generator=generator)
    grad = torch.randn(64, 64, generator=generator)
    mine = distribute_tensor(x, mesh["tp"], [features]).requires_grad_()
    whole = x.clone().requires_grad_()
    found, expected = model(mine), reference(whole)
    found.full_tensor().backward(grad)
    expected.backward(grad)
    rtol = 0.0 if is_exact else 1e-6
    assert_close_to_reference(found.full_tensor(), expected, "output", rtol)
    assert_close_to_reference(mine.grad.full_tensor(), whole.grad, "gradient of x", 1e-6 if style is not None else 0.0)
    assert_close_to_reference(*map(full_gradients, (model, reference)), "gradient", 1e-6 if style is None else 0.0)


@ranks(4)
def test_tensor_parallelism_that_cuts_a_block_is_refused(rank, world_size):
    mesh = tensor_parallel_mesh()
    for wire in ("auto", "bf16"):
        model = parallelize_module(Net(), mesh["tp"], {"layers.0": ColwiseParallel()})
        message = r"layers\.0\.weight of shape \(96, 64\): dim 0, cut over 2 ranks of mesh axes \('tp',\).*size 1, or"
        with pytest.raises(ValueError, match=message):
            parallelize_module(model, mesh["gtp"], GTPStyle(GTPConfig(wire_format=wire), min_numel=30))
