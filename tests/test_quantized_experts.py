"""Stacks of experts that travel quantized: the bits that arrive for each expert, and training beside one process."""

from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module

import gtp_dtensor.wires
from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, stats
from gtp_dtensor.members import STATE, model_members
from gtp_dtensor.wire import QUANTIZED, View, wire_format
from tests.harness import ranks
from tests.moe import ExpertParallel, Experts, MoEModel, grouped_experts
from tests.reference import (
    assert_close_to_reference,
    build_pair,
    full,
    full_gradients,
    full_parameters,
    local_slice,
    make_optimizer,
    mean_square,
    replica_options,
)
from tests.test_experts import grids
from tests.test_wires import Straight, amaxes, counted_bytes, filled_up, slow, whole_quantized

# On 4 ranks: one and two experts each; six, whose features are cut at blocks of 128, inside them, and into ranks
# without a block. Some have features that are no multiple of a block, or of the ranks.
SHAPES = {"w1": (4, 256, 128), "w2": (8, 160, 128), "w3": (6, 512, 128), "w4": (6, 384, 128), "w5": (6, 150, 128)}
EVEN = {"w1": (4, 256, 256), "w2": (8, 256, 256), "w3": (6, 512, 256)}  # blocks that etp does not cut


class Stacks(nn.Module):
    """Parameters only, of experts whose amplitudes differ ten times from one to the next."""

    def __init__(self, shapes):
        super().__init__()
        for name, shape in shapes.items():
            values = torch.randn(shape) * torch.rand(shape) ** 4
            values[:, 3], values[:, 5, 7] = 0, 9.0  # rows of zeros, and outliers
            amplitudes = 10.0 ** (torch.arange(shape[0]) % 4 - 2)
            self.register_parameter(name, nn.Parameter(values * amplitudes.view(-1, 1, 1)))


def cut(part, mesh, axis, dim):
    """This rank's piece along a model-parallel axis of ``mesh``."""
    if axis not in mesh.mesh_dim_names or dim is None:
        return part
    return part.chunk(mesh[axis].size(), dim)[mesh[axis].get_local_rank()]


def dequantized(wire, view, matrix, parts):
    shape = filled_up(matrix, wire.row_block).shape
    return wire.dequantize(view, parts[view], shape, amaxes(matrix), torch.float32)[: len(matrix)]


def stacks_on(mesh, name, shapes, etp_dim, alignment=None):
    """The stacks, tensor parallel as ``mesh`` has axes for it, then under a style with this wire format."""
    torch.manual_seed(0)
    model = Stacks(shapes)
    axes = [axis for axis in ("ep", "etp") if axis in mesh.mesh_dim_names]
    if axes:
        placements = [Shard({"ep": 0, "etp": etp_dim}[axis]) for axis in axes]
        for key, param in [*model.named_parameters()]:
            param = distribute_tensor(param, mesh[tuple(axes)], placements)
            model.register_parameter(key, nn.Parameter(param))
    style = GTPStyle(
        GTPConfig(wire_format=name, pad_for_alignment=alignment),
        is_expert=True,
        num_data_ranks=mesh.size(),
        min_numel=1,
        **replica_options(mesh),
    )
    with mock.patch.object(gtp_dtensor.wires, "wire_format", partial(wire_format, has_columns=True)):
        return parallelize_module(model, mesh["egtp"], style)


def check_bits(sizes, etp_dim=None, formats=QUANTIZED, alignment=None):
    """Gathered parts of each expert are those of quantizing its whole matrix, alone. Returns the dims that were cut."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    dims = set()
    for name in formats:
        model = stacks_on(mesh, name, SHAPES if etp_dim is None else EVEN, etp_dim, alignment)
        weights = model.__dict__[STATE].weights
        weights["w1"].runtime.refresh_copies()
        for key, weight in weights.items():
            assert weight.quantized is not None and weight.counters.num_quantizations == 1
            stack = full(getattr(model, key))
            dims.add(weight.cut.dim)
            largest = stack.abs().amax((1, 2))
            assert largest.max() > 90 * largest.min()  # a scale of a neighbour's would show
            expected = [whole_quantized(weight.wire, matrix) for matrix in stack]
            for view in weight.wire.views:
                gathered, transfer = weight.quantized.gather(weight, view)
                transfer.wait()
                found = weight.quantized.whole(view, gathered)
                for index, part in enumerate(found):
                    whole = torch.stack([parts[view][index] for parts in expected])
                    is_scale_of_rows = name == "fp8_rowwise" and whole.shape[2] == 4
                    etp_cut = None if etp_dim == 2 and is_scale_of_rows else etp_dim
                    whole = cut(cut(whole, mesh, "ep", 0), mesh, "etp", etp_cut)
                    assert torch.equal(whole, part), (name, key, view, index)
                read = weight.quantized.read(view, gathered, weight)
                values = torch.stack([dequantized(weight.wire, view, *pair) for pair in zip(stack, expected)])
                assert torch.equal(read, cut(cut(values, mesh, "ep", 0), mesh, "etp", etp_dim)), (name, key)
                transfer.release()
    return dims


@ranks(2)
def test_what_arrives_is_each_expert_quantized_alone(rank, world_size):
    assert check_bits({"egtp": 2}) == {0}


@ranks(4)
@pytest.mark.parametrize(
    "sizes, etp_dim, dims, formats",
    [
        ({"egtp": 4}, None, {0, 1}, ("fp8_block", "mxfp8")),
        ({"egtp": 2, "ep": 2}, None, {0, 1}, ("fp8_rowwise", "nvfp4")),
        slow({"egtp": 4}, None, {0, 1}, QUANTIZED),
        slow({"egtp": 2, "ep": 2}, None, {0, 1}, QUANTIZED),
        slow({"dps": 2, "egtp": 2}, None, {0}, QUANTIZED),
        slow({"dps": 4, "egtp": 1}, None, {0}, QUANTIZED),
        slow({"egtp": 2, "etp": 2}, 1, {0}, QUANTIZED),
        slow({"egtp": 2, "etp": 2}, 2, {0}, QUANTIZED),
    ],
    ids=str,
)
def test_what_arrives_on_grids(rank, world_size, sizes, etp_dim, dims, formats):
    assert check_bits(sizes, etp_dim, formats) == dims


@pytest.mark.slow
@ranks(8)
@pytest.mark.parametrize(
    "sizes, etp_dim, dims",
    [
        ({"egtp": 2, "ep": 2, "etp": 2}, 1, {0, 1}),
        ({"egtp": 2, "ep": 2, "etp": 2}, 2, {0, 1}),
        ({"dps": 2, "egtp": 2, "ep": 2}, None, {0, 1}),
        ({"dps": 2, "egtp": 4}, None, {0, 1}),
    ],
    ids=str,
)
def test_what_arrives_on_large_grids(rank, world_size, sizes, etp_dim, dims):
    assert check_bits(sizes, etp_dim) == dims


@ranks(2)
def test_whole_experts_are_not_padded_to_the_alignment(mesh, rank, world_size):
    """It pads rows; experts dealt out whole are none, and 64 of them for each rank would travel instead of 2."""
    check_bits({"egtp": 2}, None, ("mxfp8",), alignment=64)
    model = stacks_on(init_device_mesh("cpu", (2,), mesh_dim_names=("egtp",)), "mxfp8", {"w1": SHAPES["w1"]}, None, 64)
    weight = model.__dict__[STATE].weights["w1"]
    assert weight.quantized.num_bytes(View.ROWS) == weight.param.numel() * 33 // 32


class RoundedExperts(Experts):
    """Experts that compute with what their weights become on a wire, each matrix by itself."""

    wire = "bf16"

    def forward(self, rows, counts):
        if self.wire == "bf16":
            return super().forward(rows, counts)
        w1, w3, w2 = ([Straight.apply(matrix, self.wire) for matrix in stack] for stack in (self.w1, self.w3, self.w2))
        parts = rows.split(counts.tolist())
        return torch.cat(
            [(nn.functional.silu(x @ w1[e].t()) * (x @ w3[e].t())) @ w2[e].t() for e, x in enumerate(parts)]
        )


def shard(model, name, dense, dense_options, experts, expert_options):
    """Only experts travel in the format ``name``."""
    if experts["ep"].size() > 1:
        parallelize_module(model, experts["ep"], {"layers.*.moe.experts": ExpertParallel()})
    style = GTPStyle(
        GTPConfig(wire_format=name),
        is_expert=True,
        modules=["layers.*.moe.experts"],
        forwards={Experts: grouped_experts},
        **expert_options,
    )
    parallelize_module(model, experts["egtp"], style)
    parallelize_module(model, dense["gtp"], GTPStyle(min_numel=30, **dense_options))


def expert_weights(model):
    return [member for member in model_members(model) if member.runtime.domain.is_expert]


def bytes_of_a_stack(name, shape, num_ranks_of_features):
    """Gathered: ranks that cut features send whole blocks of them."""
    num_experts, num_out, num_in = shape
    block = 128 if name == "fp8_block" else 1
    num_out = -(-num_out // block // num_ranks_of_features) * block * num_ranks_of_features
    scales = {"fp8": 0, "fp8_rowwise": 4 / num_in, "fp8_block": 4 / 128**2, "mxfp8": 1 / 32, "nvfp4": 1 / 16}
    return int(num_experts * num_out * num_in * ((0.5 if name == "nvfp4" else 1) + scales[name]))


@ranks(4)
@pytest.mark.parametrize(
    "name, optimizer, num_experts, egtp, ep",
    [
        ("mxfp8", "sgd", 4, 2, 2),
        *(slow(name, "sgd", 6, 4, 1) for name in QUANTIZED),
        *(slow(name, "adam", 4, 2, 2) for name in QUANTIZED),
        *(slow(name, "adam", 4, 2, 1) for name in QUANTIZED),
    ],
)
def test_trains_as_experts_that_round_their_weights(rank, world_size, name, optimizer, num_experts, egtp, ep):
    dim = 128
    pair = build_pair(lambda: MoEModel(2, dim, hidden=256, num_experts=num_experts))
    with torch.no_grad():
        for param in (p for one in pair for layer in one.layers for p in layer.moe.experts.parameters()):
            param.mul_(10.0 ** -(torch.arange(num_experts) % 2).view(-1, 1, 1))
    model, reference = pair
    for layer in reference.layers:
        layer.moe.experts.__class__ = RoundedExperts
        layer.moe.experts.wire = name
    shard(model, name, *grids(world_size, 2, egtp, ep))
    members = [member for member in model_members(model) if member.runtime.domain.is_expert]
    assert len(members) == 6 and {member.wire_name for member in members} == {name}
    own = make_optimizer(optimizer, model)

    def batch(number):
        return torch.randn(2 * world_size, 5, dim, generator=torch.Generator().manual_seed(number))

    for step in range(2):
        reference.load_state_dict(full_parameters(model))  # the last bit of a weight would decide a code
        for microbatch in range(2):
            whole = batch(10 * step + microbatch)
            mine, expected = model(local_slice(whole, rank, world_size)), reference(whole)
            assert_close_to_reference(mine, local_slice(expected, rank, world_size), f"output of step {step}")
            mean_square(mine).backward()
            mean_square(expected).backward()
        assert_close_to_reference(*map(full_gradients, (model, reference)), f"gradient of step {step}")
        for one in (own, make_optimizer("sgd", reference)) if optimizer == "sgd" else (own,):
            one.step()
        if optimizer == "sgd":
            assert_close_to_reference(*map(full_parameters, (model, reference)), f"weight after step {step}")
        own.zero_grad()
        reference.zero_grad()
    x = local_slice(batch(99), rank, world_size)
    for _ in range(2):  # as many as in a step: another one is not expected, and its first weight not gathered before
        mean_square(model(x)).backward()
    reset_stats(model)
    with counted_bytes(type(members[0].runtime.transport)) as sent:
        mean_square(model(x)).backward()
    assert sent["gathered"] == stats(model).gather_bytes
    assert [member.counters.num_kept_at_turn for member in members] == [
        member.fqn == members[-1].fqn for member in members
    ]
    for member in members:
        counters = member.counters
        kept = counters.num_kept_at_turn
        assert (counters.num_forward_gathers, counters.num_backward_gathers, counters.num_quantizations) == (
            1,
            1 - kept,
            0,
        )
        cuts_features = egtp if num_experts // ep % egtp else 1
        assert member.cut.dim == (cuts_features > 1)
        assert counters.gather_bytes == (2 - kept) * bytes_of_a_stack(name, member.tp_local_shape, cuts_features), (
            member.fqn
        )
