"""In logical_init, writes into parts of weights and with plain tensors give what they give without GTP, or raise."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.init import dirac_, eye_, normal_, orthogonal_, sparse_, trunc_normal_

from gtp_dtensor import GTPStyle, logical_init
from gtp_dtensor.init import _Twin
from tests.harness import ranks
from tests.moe import Experts, MoEModel
from tests.reference import assert_equal_to_reference, build_pair, full, full_parameters, replica_options
from tests.test_experts import expert_members, grids, shard
from tests.test_init import BF16, EXPERT_GRIDS, assert_exact_masters, by_torch, init_pair, without_duplicates


def first_rows(weight: torch.Tensor) -> None:
    nn.init.normal_(weight[:10], std=0.5)
    normal_(weight[-3:])


def parts_of_data(weight: torch.Tensor) -> None:
    weight.data[-1].zero_()
    weight.detach()[2].fill_(3.0)
    weight.narrow(0, 1, 2).uniform_()
    weight.data.view(-1)[3:40].exp_()
    for index, row in enumerate(weight):
        row.add_(index)


def parts_of_a_fused_weight(weight: torch.Tensor) -> None:
    size = weight.shape[0]
    for index, part in enumerate(weight.split((size // 3, size - size // 3))):
        nn.init.normal_(part, std=1.0 + index)
    for index, part in enumerate(weight.chunk(2, dim=1)):
        nn.init.trunc_normal_(part, std=0.5, a=-0.4, b=0.3 + index)


def transposed(weight: torch.Tensor) -> None:
    nn.init.normal_(weight.transpose(0, 1))
    weight.mT[..., :2].uniform_()
    weight.T.reshape(-1)[5:7] = 1  # a copy: lost without GTP too
    torch.einsum("i...->...i", weight)[0].mul_(2)


def random_like(weight: torch.Tensor) -> None:
    weight.add_(torch.randn_like(weight))
    weight.data *= torch.rand_like(weight.data)
    weight.copy_(torch.bernoulli(torch.full_like(weight, 0.3)) + weight)


def assigned(weight: torch.Tensor) -> None:
    weight[-1] = 0
    weight[:2] = torch.rand(weight[:2].shape)
    weight[torch.tensor([1, 3]), 1] = 7.0
    weight[weight > 0.3] = 0.25
    weight[1] += 2
    weight.data = weight.data * torch.rand(weight.shape)


def with_plain_tensors(weight: torch.Tensor) -> None:
    values = torch.arange(1.0, weight.numel() + 1).view(weight.shape).log()
    weight.copy_(values)
    weight.mul_(values[0]).add_(values, alpha=0.3)
    weight.masked_fill_(torch.rand(weight.shape) > 0.5, 0.125)
    weight.index_fill_(0, torch.tensor([1, weight.shape[0] - 1]), 0.5).tril_()
    torch.normal(0.0, 1.0, weight.shape, out=weight)


def what_reads_other_rows(weight: torch.Tensor) -> None:
    """Has to gather: this rank's rows depend on those of others."""
    weight.div_(weight.norm())
    weight.renorm_(2, 0, 0.5)
    weight[0].copy_(weight[-1])
    weight.add_(weight.flip(0)).sub_(weight[2:].mean())
    weight.copy_(weight.clone().cumsum(0))
    torch._foreach_mul_([weight], 3.0)
    weight[:1].add_(weight[1:].sum(0))


def copies_instead_of_views(weight: torch.Tensor) -> None:
    weight[-1].add_(weight.T.reshape(-1)[:1])
    weight[0].add_(weight[torch.tensor([-1, 2])][0])


def a_copy(weight: torch.Tensor) -> None:
    other = weight.clone()
    other[1].normal_()
    weight.data.add_(other, alpha=2)
    weight.clone()[0].zero_()


WRITES = [
    first_rows,
    parts_of_data,
    parts_of_a_fused_weight,
    transposed,
    random_like,
    assigned,
    with_plain_tensors,
    what_reads_other_rows,
    copies_instead_of_views,
    a_copy,
]


@torch.no_grad()
def by_parts(model: nn.Module) -> None:
    """All of ``WRITES`` on all matrices, stacks and convolutions; the rest drawn at once."""
    for param in model.parameters():
        nn.init.normal_(param)
        if param.ndim > 1:
            for write in WRITES:
                write(param)
        elif param.ndim == 1:
            param[::2].uniform_()
            param[1:].mul_(torch.arange(1.0, param.numel()))


@ranks(2)
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_writes_into_parts_and_from_plain_tensors(mesh, write):
    model, reference = build_pair(lambda: nn.Linear(16, 47))
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    before = full(model.weight)
    with torch.no_grad():
        init_pair(model, reference, lambda module: write(module.weight))
    assert_equal_to_reference(full_parameters(model), full_parameters(reference), write.__name__)
    assert not torch.equal(full(model.weight), before)


@ranks(4)
@pytest.mark.parametrize("axes", [("dps", "gtp"), ("gtp", "tp"), ("dpr", "gtp")], ids="_".join)
def test_parts_on_several_axes(axes, rank):
    """Cut in both dims, and nested uneven cuts; tied, and without dims."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)

    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(23, 16), nn.Linear(16, 42), nn.Linear(42, 7), nn.Linear(16, 23, bias=False))
        model[3].weight = model[0].weight
        return model

    model, reference = build(), build()
    if "tp" in axes:
        parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
    parallelize_module(model, mesh["gtp"], GTPStyle(BF16, min_numel=30, **replica_options(mesh)))
    init_pair(model, reference, by_parts)
    assert_exact_masters(model, reference, num_expected=3)
    assert without_duplicates(model) == [("0.weight", "3.weight")]


@ranks(4)
@pytest.mark.parametrize("grid, num_experts", [("egtp4", 6), ("ep2_egtp2", 6), ("ep2_egtp2", 4)])
def test_parts_of_stacks_of_experts(grid, num_experts, rank, world_size):
    """Whole experts of a rank, and slices of every expert."""
    sizes, dim_of_4, dim_of_6 = EXPERT_GRIDS[grid]
    meshes = grids(world_size, **sizes)

    @torch.no_grad()
    def by_expert(model: nn.Module) -> None:
        by_parts(model)
        for module in model.modules():
            if isinstance(module, Experts):
                for expert in range(num_experts):
                    nn.init.normal_(module.w1[expert], std=1.0 + expert)
                    nn.init.orthogonal_(module.w2[expert])
                    module.w3[expert, ::2].uniform_()

    reference = MoEModel(1, num_experts=num_experts)
    model = MoEModel(1, num_experts=num_experts)
    shard(model, *meshes, config=BF16)
    assert {member.cut.dim for member in expert_members(model)} == {dim_of_4 if num_experts == 4 else dim_of_6}
    init_pair(model, reference, by_expert)
    assert_exact_masters(model, reference, num_expected=4)


@ranks(2)
def test_functions_imported_by_name(mesh):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.zeros(47, 16))
            self.stack = nn.Parameter(torch.zeros(5, 7, 8))

    def init(net: nn.Module) -> None:
        for function in (eye_, orthogonal_, trunc_normal_, lambda weight: sparse_(weight, 0.3)):
            total = net.matrix.detach().clone()
            function(net.matrix)
            with torch.no_grad():
                net.matrix.add_(total)
        dirac_(net.stack)
        assert net.stack[0].detach().sum() == 1

    model, reference = build_pair(Net)
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    init_pair(model, reference, init)
    assert_equal_to_reference(full_parameters(model), full_parameters(reference), "by name")


def num_twins() -> int:
    return sum(type(one) is _Twin for one in gc.get_objects())


@ranks(2)
def test_one_weight_is_whole_at_a_time_and_draws_do_not_communicate(mesh):
    model, reference = build_pair(lambda: nn.Sequential(*(nn.Linear(16, 47, bias=False) for _ in range(4))))
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    whole = []

    @torch.no_grad()
    def init(net: nn.Module) -> None:
        for module in net:
            weight = module.weight
            nn.init.normal_(weight[:18])
            weight[40].zero_()
            weight[3:30].mul_(0.5)
            weight.add_(torch.rand_like(weight)).masked_fill_(torch.eye(47, 16) > 0, 2)
            for row in weight.split(5):
                row.add_(torch.randn(16))
            del row
            whole.append(num_twins())

    with CommDebugMode() as comm:
        init_pair(model, reference, init)
    assert whole == [1] * 4 + [0] * 4 and comm.get_total_counts() == 0
    assert num_twins() == 0
    assert_equal_to_reference(full_parameters(model), full_parameters(reference), "weight")


@ranks(2)
def test_views_that_are_held_stay_good_until_the_block_ends(mesh):
    model, reference = build_pair(lambda: nn.Sequential(*(nn.Linear(16, 47) for _ in range(3))))
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    held = []

    @torch.no_grad()
    def init(net: nn.Module) -> None:
        views = [module.weight[20:28] for module in net]  # of both ranks
        for _ in range(2):
            for view, module in zip(views, net):
                view.add_(1)
                nn.init.uniform_(module.weight[5:25])
            for view in views:
                view.t()[:4].add_(view.mean()).mul_(views[0].norm())
            for module in net:  # past the twins of all but the last
                module.weight.mul_(2)
            last = views[0][-1:]
            for _ in range(2):
                views[1].add_(last)
                net[0].weight.mul_(2)  # past the twin that was only read
        held.extend([*views, net[0].bias[:3]])

    init_pair(model, reference, init)
    assert_equal_to_reference(full_parameters(model), full_parameters(reference), "weight")
    *views, of_bias = held[:4]
    for view in views:
        assert view.shape == (8, 16) and "(47, 16)" in repr(view)
        for use in (lambda: view.zero_(), lambda: view.sum(), lambda: view.data, lambda: nn.init.ones_(view)):
            with pytest.raises(RuntimeError, match=r"part of a weight of shape \(47, 16\) .*which has ended"):
                use()
        with logical_init(), pytest.raises(RuntimeError, match="which has ended"):
            view.zero_()
    with torch.no_grad():
        of_bias.zero_()  # every rank has all of it: the view is one of the parameter
    assert not full(model[0].bias)[:3].any()


@ranks(2)
def test_what_cannot_be_exact_is_refused(mesh):
    model = parallelize_module(nn.Linear(16, 47), mesh, GTPStyle(min_numel=30))
    weight, before = model.weight, full(model.weight)
    activation = DTensor.from_local(torch.ones(4, 6), mesh, [Shard(0)])
    with torch.no_grad(), logical_init():
        for refused, message in [
            (lambda: weight.t_(), r"t_\(\) would change the shape .* \(47, 16\)"),
            (lambda: weight[:3].resize_(2, 2), r"resize_\(\) would change the shape .* \(3, 16\)"),
            (lambda: setattr(weight, "data", torch.ones(5, 16)), r"shape \(47, 16\), torch.float32, .* \(5, 16\)"),
            (lambda: setattr(weight, "data", torch.ones(47, 16).double()), "torch.float64"),
            (lambda: activation[3:5].zero_(), r"gathered copy of a part, \(2, 6\), of a DTensor"),
            (lambda: DTensor.from_local(torch.ones(2), mesh, [Partial()]).normal_(), "terms of a sum"),
        ]:
            with pytest.raises(RuntimeError, match="logical_init: .*" + message):
                refused()
    assert torch.equal(full(weight), before) and full(activation).eq(1).all()


@ranks(2)
def test_forwards_and_copies_inside_stay_what_they_are(mesh):
    """Activations are let alone, a forward sees what was just drawn, and state is not made whole."""
    x = torch.randn(4, 16)
    plan = {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()}
    by_tp, by_gtp, reference = (nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(3))
    parallelize_module(by_tp, mesh, plan)
    parallelize_module(by_gtp, mesh, GTPStyle(min_numel=30))

    def init(net: nn.Module) -> torch.Tensor:
        for param in net.parameters():
            nn.init.normal_(param.data[:2])
        outputs = [net(x)]
        with torch.no_grad():
            net[0].weight.div_(net(x).abs().max())
            outputs.append(net(x))
        outputs[0].sum().backward()
        return torch.stack(outputs).detach()

    for net in (by_tp, by_gtp, reference):
        for param in net.parameters():
            nn.init.ones_(param)
    for net in (by_tp, by_gtp):
        torch.manual_seed(4)
        with logical_init():
            outputs = init(net)
            copies = [*copy.deepcopy(nn.ParameterList(param.detach() for param in net.parameters()))]
            copies += [*net.state_dict().values(), *map(torch.zeros_like, net.parameters())]
        assert len(copies) == 12 and all(isinstance(one, DTensor) for one in copies)
        torch.manual_seed(4)
        reference.zero_grad()
        for param in reference.parameters():
            nn.init.ones_(param)
        torch.testing.assert_close(outputs, init(reference), rtol=1e-6, atol=1e-6)
        assert all(param.grad is not None for param in net.parameters())


@ranks(4)
def test_parallelize_under_a_meta_device(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dps", "gtp"))
    with torch.device("meta"):
        model = nn.Linear(16, 47)
        parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30, **replica_options(mesh)))
    model.to_empty(device="cpu")
    reference = nn.Linear(16, 47)
    init_pair(model, reference, by_torch)
    assert_equal_to_reference(full_parameters(model), full_parameters(reference), "weight")
