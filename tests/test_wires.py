"""Weights that travel quantized: the bits that arrive, what is computed with them, what is counted and refused."""

from collections import Counter
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gtp_dtensor.wires
from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, stats
from gtp_dtensor.members import STATE
from gtp_dtensor.wire import QUANTIZED, Amax, View, wire_format
from tests.harness import ranks
from tests.reference import (
    assert_close_to_reference,
    build_pair,
    full,
    full_gradients,
    full_parameters,
    local_slice,
    mean_square,
    replica_options,
)

ALL = (*QUANTIZED,)


def amaxes(matrix):
    """Of the whole weight."""
    magnitudes = matrix.abs()
    dims = {Amax.MATRIX: (-2, -1), Amax.COLUMN: -2, Amax.ROW: -1}
    return {amax: magnitudes.amax(dim, keepdim=True) for amax, dim in dims.items()}


def filled_up(matrix, num_rows):
    """With rows of zeros behind it, up to a multiple of ``num_rows``."""
    return torch.nn.functional.pad(matrix, (0, 0, 0, -len(matrix) % num_rows))


def whole_quantized(wire, matrix):
    """Parts of the whole logical weight, one (out, in) matrix."""
    amax = amaxes(matrix)
    matrix = filled_up(matrix, wire.row_block)
    amax[Amax.ROW] = matrix.abs().amax(-1, keepdim=True)
    return wire.quantize(matrix.contiguous(), amax)


def tp_slice(part, dim, tp_rank, tp_size):
    return part if dim is None else part.chunk(tp_size, dim)[tp_rank]


class Weights(nn.Module):
    """Linears with rows that gtp does and does not cut at blocks, fewer blocks than ranks, and partial blocks."""

    def __init__(self, rows, columns=256):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(columns, num_rows, bias=False) for num_rows in rows)

    def forward(self, x):
        return sum(linear(x).sum(-1) for linear in self.linears)


def sharded_weight(linear):
    return linear.__dict__[STATE].weights["weight"]


def check_bits(sizes, tp_dim, device="cpu"):
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    tp_size = sizes.get("tp", 1)
    # 512: even. 384 (768 over tp): at 4 ranks cut inside a block of 128. 328, 40: in every block but rows. 128: ranks without a block.
    rows = [512, 768, 256] if tp_dim is not None else [512, 384, 328, 128, 40]
    for name in ALL:
        torch.manual_seed(0)
        model = Weights(rows, 512 if tp_dim == 1 else 256).to(device)
        with torch.no_grad():
            for linear in model.linears:  # outliers, small values and a row of zeros
                linear.weight.mul_(torch.rand_like(linear.weight) ** 4)
                linear.weight[3], linear.weight[5, 7] = 0, 9.0
        if tp_dim is not None:
            style = (ColwiseParallel(), RowwiseParallel())[tp_dim]
            parallelize_module(model, mesh["tp"], {"linears.*": style})
        style = GTPStyle(GTPConfig(wire_format=name), min_numel=1, **replica_options(mesh))
        with mock.patch.object(gtp_dtensor.wires, "wire_format", partial(wire_format, has_columns=True)):
            parallelize_module(model, mesh["gtp"], style)
        num_quantized = 0
        sharded_weight(model.linears[0]).runtime.refresh_copies()
        for linear in model.linears:
            weight = sharded_weight(linear)
            if weight.quantized is None:  # fewer rows than a block
                assert name == "fp8_block" and linear.out_features < 128
                continue
            num_quantized += 1
            matrix = full(linear.weight)
            expected = whole_quantized(weight.wire, matrix)
            assert expected.keys() == set(weight.wire.views)
            for view, parts in expected.items():
                gathered, transfer = weight.quantized.gather(weight, view)
                transfer.wait()
                found = weight.quantized.whole(view, gathered)
                tp_rank = mesh["tp"].get_local_rank() if tp_dim is not None else 0
                for part, other in zip(parts, found, strict=True):
                    is_scale_of_rows = name == "fp8_rowwise" and part.shape[1] == 4
                    cut = None if tp_dim == 1 and is_scale_of_rows else tp_dim
                    assert torch.equal(tp_slice(part, cut, tp_rank, tp_size), other), (name, view, tuple(matrix.shape))
                transfer.release()
        assert num_quantized == len(rows) - (name == "fp8_block" and 40 in rows)


@ranks(2, device=("cpu", "cuda"), timeout=120, group_timeout=60)
def test_what_arrives_is_the_whole_weight_quantized(rank, device):
    check_bits({"gtp": 2}, None, device.type)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@ranks(4)
@pytest.mark.parametrize(
    "sizes, tp_dim",
    [
        slow({"gtp": 4}, None),
        ({"dps": 2, "gtp": 2}, None),
        slow({"gtp": 2, "tp": 2}, 0),
        ({"gtp": 2, "tp": 2}, 1),
        slow({"dps": 2, "gtp": 1, "tp": 2}, 0),
        slow({"dps": 4, "gtp": 1}, None),
    ],
    ids=str,
)
def test_what_arrives_on_grids(rank, sizes, tp_dim):
    check_bits(sizes, tp_dim)


@pytest.mark.slow
@ranks(8)
@pytest.mark.parametrize(
    "sizes, tp_dim",
    [
        ({"dps": 2, "gtp": 4}, None),
        ({"dps": 2, "gtp": 2, "tp": 2}, 0),
        ({"dps": 2, "gtp": 2, "tp": 2}, 1),
        ({"gtp": 4, "tp": 2}, 0),
        ({"gtp": 4, "tp": 2}, 1),
    ],
    ids=str,
)
def test_what_arrives_on_large_grids(rank, sizes, tp_dim):
    check_bits(sizes, tp_dim)


class Straight(torch.autograd.Function):
    """The weight's values after a round trip through a format, with the gradient of the weight itself."""

    @staticmethod
    def forward(ctx, weight, name):
        wire = wire_format(name)
        parts = whole_quantized(wire, weight.detach())[View.ROWS]
        shape = torch.Size((sum(filled_up(weight, wire.row_block).shape[:1]), weight.shape[1]))
        return wire.dequantize(View.ROWS, parts, shape, amaxes(weight.detach()), torch.float32)[: len(weight)]

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Rounded(nn.Linear):
    """A linear that computes with what its weight becomes on a wire."""

    wire = "bf16"

    def forward(self, x):
        weight = self.weight if self.wire == "bf16" else Straight.apply(self.weight, self.wire)
        return torch.nn.functional.linear(x, weight, self.bias)


class Net(nn.Module):
    """Linears between an embedding and an output that travel as they are."""

    def __init__(self, linear=nn.Linear):
        super().__init__()
        self.embedding = nn.Embedding(40, 128)
        self.layers = nn.ModuleList([linear(128, 256), linear(256, 160, bias=False), linear(160, 128)])
        self.norm = nn.LayerNorm(128)
        self.output = nn.Linear(128, 40)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.output(self.norm(x))


@ranks(4, device=("cpu", "cuda"), timeout=120, group_timeout=60)
@pytest.mark.parametrize("name", [slow("fp8"), slow("fp8_rowwise"), "mxfp8", "nvfp4"])
def test_trains_as_a_model_that_rounds_its_weights(rank, world_size, device, name):
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("dps", "gtp"))
    rtol = 1e-6 if device.type == "cpu" else 1e-5  # other kernels for other shapes
    model, reference = build_pair(lambda: Net().to(device))
    for layer in reference.layers:
        layer.__class__ = Rounded
        layer.wire = name
    style = GTPStyle(GTPConfig(wire_format=name), min_numel=30, **replica_options(mesh))
    parallelize_module(model, mesh["gtp"], style)
    assert [w.wire_name for w in map(sharded_weight, (*model.layers, model.output))] == [name] * 3 + ["fp32"]
    rank_of_data = mesh["gtp"].get_local_rank() + 2 * mesh["dps"].get_local_rank()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        # The last bit of a weight, from sums in another order, would decide a code in the next step.
        reference.load_state_dict(full_parameters(model))
        batch = torch.randint(0, 40, (16, 3), generator=torch.Generator().manual_seed(step)).to(device).chunk(2)
        for microbatch in batch:
            mine, expected = model(local_slice(microbatch, rank_of_data, world_size)), reference(microbatch)
            assert_close_to_reference(
                mine, local_slice(expected, rank_of_data, world_size), f"output of step {step}", rtol
            )
            mean_square(mine).backward()
            mean_square(expected).backward()
        assert_close_to_reference(*map(full_gradients, (model, reference)), f"gradient of step {step}", rtol)
        losses.append(mean_square(expected).item())
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
    assert losses[-1] < losses[0]
    # Once a step, not once a microbatch; but before an optimizer has stepped once, with each forward.
    assert stats(model).num_quantizations == 3 * (4 + 1)


@contextmanager
def counted_bytes(transport):
    """What the collectives of this class of transports move meanwhile, in bytes of gathered and of unreduced tensors."""
    sent = Counter()

    def counting(method, kind, num_bytes):
        def call(self, *args, **options):
            sent[kind] += num_bytes(*args)
            return method(self, *args, **options)

        return mock.patch.object(transport, method.__name__, call)

    with (
        counting(transport.all_gather, "gathered", lambda buffer, *_: buffer.nbytes),
        counting(
            transport.all_gather_parts,
            "gathered",  # one part alone goes through all_gather
            lambda buffers, *_: sum(part.nbytes for part in buffers) if len(buffers) > 1 else 0,
        ),
        counting(transport.reduce_scatter, "reduced", lambda out, buffer, *_: buffer.nbytes),
    ):
        yield sent


@ranks(2)
@pytest.mark.parametrize(
    "name, reduce_dtype, expected",
    [
        ("bf16", torch.bfloat16, 6.0),
        ("mxfp8", torch.bfloat16, 4.0625),
        ("nvfp4", torch.bfloat16, 3.125),
        ("fp8", torch.bfloat16, 4.0),
        ("bf16", torch.float32, 8.0),
        ("mxfp8", torch.float32, 6.0625),
        ("nvfp4", torch.float32, 5.125),
    ],
)
def test_bytes_of_a_dense_block(mesh, rank, world_size, name, reduce_dtype, expected):
    """Of an element and microbatch: a gather for the forward, one for the backward, a reduction. In a whole model the
    weight at the turn is of no consequence, here it is half of all: what it did without is counted in."""
    model = nn.Sequential(nn.Linear(256, 512, bias=False), nn.SiLU(), nn.Linear(512, 256, bias=False))
    numel = sum(param.numel() for param in model.parameters())
    config = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype, wire_format=name)
    parallelize_module(model, mesh["gtp"], GTPStyle(config))
    transport = type(sharded_weight(model[0]).runtime.transport)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):  # the schedule is known, and the shards of this step are made
        optimizer.step()
        model(torch.randn(4, 256, requires_grad=True)).float().sum().backward()
    reset_stats(model)
    with counted_bytes(transport) as sent:
        model(torch.randn(4, 256, requires_grad=True)).float().sum().backward()
    found = stats(model)
    assert found.num_quantizations == 0
    assert sent["gathered"] == found.gather_bytes and sent["reduced"] == found.reduce_bytes
    last = sharded_weight(model[2])
    assert last.counters.num_kept_at_turn == found.num_kept_at_turn == 1
    per_element = (found.gather_bytes + last.gathered_bytes + found.reduce_bytes) / numel
    assert abs(per_element - expected) <= 0.005 * expected, per_element


@ranks(2)
def test_a_weight_that_is_not_finite_is_named_on_all_ranks(mesh, rank, world_size):
    for name in QUANTIZED:
        for value in (float("nan"), float("inf")):
            model = Weights([128, 256])
            parallelize_module(model, mesh["gtp"], GTPStyle(GTPConfig(wire_format=name)))
            x = torch.randn(2, 256)
            model(x).sum().backward()
            with torch.no_grad():
                if rank == 1:
                    model.linears[1].weight._local_tensor[5, 5] = value
                gtp_dtensor.refresh(model)
            with pytest.raises(RuntimeError, match=r"^linears\.1\.weight: .*NaN or infinity"):
                model(x)
            with torch.no_grad():
                model.linears[1].weight.zero_()  # a weight of zeros is fine
            assert model(x).isfinite().all()


@ranks(2)
def test_what_cannot_travel_is_refused(mesh, rank, world_size):
    def apply(match, error=ValueError, build=Net, wire="mxfp8", **options):
        with pytest.raises(error, match=match):
            parallelize_module(build(), mesh["gtp"], GTPStyle(GTPConfig(wire_format=wire), min_numel=30, **options))

    def odd():
        return nn.Sequential(nn.Linear(40, 64))

    apply(r"0\.weight of shape \(64, 40\): wire format 'mxfp8' has blocks of 32 columns.*40.*fp8_rowwise", build=odd)
    apply(r"blocks of 16 columns", build=odd, wire="nvfp4")
    apply(r"blocks of 128 columns.*160", wire="fp8_block")
    apply(r"pattern 'layers\.7\.\*' matches nothing.*layers\.0\.weight", wire_format_overrides={"layers.7.*": "fp8"})
    apply(r"'norm\.weight' matches only.*not sharded", wire_format_overrides={"norm.weight": "fp8"})
    apply(r"'fp9' is no wire format.*mxfp8", wire_format_overrides={"layers.0.*": "fp9"})
    apply(r"wire_format='fp9'.*nvfp4", wire="fp9")


@ranks(2)
def test_formats_by_name(mesh, rank, world_size):
    """The first pattern that matches holds, also for embeddings; what is smaller than a block travels as it is."""
    overrides = {"layers.0.*": "nvfp4", "layers.*": "fp8_rowwise", "embedding.*": "mxfp8"}
    style = GTPStyle(GTPConfig(wire_format="fp8"), min_numel=30, wire_format_overrides=overrides)
    model = parallelize_module(Net(), mesh["gtp"], style)
    modules = (model.embedding, *model.layers, model.output)
    assert [sharded_weight(module).wire_name for module in modules] == [
        "mxfp8",
        "nvfp4",
        "fp8_rowwise",
        "fp8_rowwise",
        "fp32",
    ]
    model(torch.randint(0, 40, (2, 3))).sum().backward()
    assert stats(model).num_quantizations == 4 and stats(model).num_reductions == 5
    small = parallelize_module(
        nn.Sequential(nn.Linear(12, 64)), mesh["gtp"], GTPStyle(GTPConfig(wire_format="nvfp4"), min_numel=30)
    )
    assert sharded_weight(small[0]).wire is None
