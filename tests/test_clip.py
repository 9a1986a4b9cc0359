"""Global norm, clipping and zero counts over any mix of meshes, against one process that has all gradients whole."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from gtp_dtensor import GTPConfig, GTPStyle, clip_grad_norm_, count_zero_grads, parallelize_module
from tests.harness import ranks
from tests.harness.collectives import count_collectives
from tests.models import MLP, VOCAB, TinyLlama
from tests.reference import build_pair, full, full_gradients, local_slice

NORM_TYPES = [1.0, 2.0, 3.0, math.inf]
R, S0, S1 = Replicate(), Shard(0), Shard(1)


def gradient(number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The same on every rank, with some zeros in it."""
    grad = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
    return torch.where(grad.abs() < 0.3, 0.0, grad).to(dtype)


def parameter(grad: torch.Tensor | None, mesh: DeviceMesh | None = None, placements=(), like=None) -> nn.Parameter:
    """A parameter of ones with this gradient, cut as ``placements`` say."""

    def place(whole: torch.Tensor) -> torch.Tensor:
        return whole if mesh is None else distribute_tensor(whole, mesh, placements, src_data_rank=None)

    made = nn.Parameter(place(torch.ones_like(grad if grad is not None else like)))
    made.grad = None if grad is None else place(grad.clone())
    return made


def mix(layouts, dtype=torch.float64) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Parameters of (shape, mesh, placements), and the same whole; the last of several has no gradient."""
    mine, whole = [], []
    for number, (shape, mesh, placements) in enumerate(layouts):
        grad = gradient(number, shape, dtype)
        has_none = 0 < number == len(layouts) - 1
        mine.append(parameter(None if has_none else grad, mesh, placements, like=grad))
        whole.append(parameter(None if has_none else grad, like=grad))
    return mine, whole


def layouts_on_four() -> list:
    """Two-axis and one-axis meshes of the same ranks and of some of them, plain tensors; uneven and empty shards."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "gtp"))
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    return [
        ((8, 6), grid, (S0, S0)),
        ((7, 5), grid, (S0, S0)),  # nested uneven cuts: the hole is in the middle
        ((9, 5), grid, (S1, S0)),
        ((1, 3), grid, (R, S0)),  # no rows on half of the ranks
        ((6,), grid, (R, R)),
        ((), grid, (R, R)),
        ((3, 4), line, (S0,)),  # no rows on the last rank
        ((17, 2), line, (S0,)),
        ((5,), line, (R,)),
        ((5, 3), grid["gtp"], (S0,)),  # equal on both tp ranks
        ((4, 4), None, ()),
        ((8, 8), grid, (S0, S0)),
    ]


def layouts_on_eight() -> list:
    """Three axes, as gtp with replicas has, beside experts on two axes of the same ranks."""
    dense = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "gtp", "shard"))
    expert = init_device_mesh("cpu", (2, 4), mesh_dim_names=("egtp", "ep"))
    return [
        ((16, 3), dense, (R, S0, S0)),
        ((7, 3), dense, (R, S0, S0)),
        ((5, 3), dense, (R, S1, S0)),
        ((6,), dense, (R, R, R)),
        ((4, 6, 5), expert, (S1, S0)),
        ((3, 5, 2), expert, (S1, S0)),
        ((4, 6, 5), expert, (S0, S0)),
    ]


LAYOUTS = {4: layouts_on_four, 8: layouts_on_eight}


def assert_equal_on_all_ranks(value: torch.Tensor) -> None:
    everyones = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, value)
    bits = {one.view(torch.int64 if value.element_size() == 8 else torch.int32).item() for one in everyones}
    assert len(bits) == 1, everyones


@ranks(4, 8)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_clipping_equals_one_process(world_size, norm_type):
    mine, whole = mix(LAYOUTS[world_size]())
    expected = torch.nn.utils.get_total_norm([p.grad for p in whole if p.grad is not None], norm_type)
    limit = expected.item() / 3
    norm = clip_grad_norm_(mine, limit, norm_type)
    torch.nn.utils.clip_grad_norm_(whole, limit, norm_type)
    assert norm.dtype == torch.float64 and norm.dim() == 0
    assert_equal_on_all_ranks(norm)
    assert torch.allclose(norm, expected, rtol=1e-13, atol=0)
    for one, other in zip(mine, whole):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert torch.allclose(full(one.grad), other.grad, rtol=1e-12, atol=0)
    again = clip_grad_norm_(mine, math.inf, norm_type)  # only measures
    assert torch.allclose(again, torch.tensor(limit, dtype=again.dtype), rtol=1e-5)


@ranks(4, 8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_few_bits(world_size, dtype):
    mine, whole = mix(LAYOUTS[world_size](), dtype)
    for norm_type in NORM_TYPES:
        exact = torch.nn.utils.get_total_norm([p.grad.double() for p in whole if p.grad is not None], norm_type)
        norm = clip_grad_norm_(mine, math.inf, norm_type)
        assert norm.dtype == torch.float32
        assert_equal_on_all_ranks(norm)
        assert torch.allclose(norm.double(), exact, rtol=1e-7, atol=0)


@ranks(4, 8)
def test_zeros_are_counted_once(world_size):
    mine, whole = mix(LAYOUTS[world_size]())
    num_zeros = count_zero_grads(mine)
    expected = sum(int((p.grad == 0).sum()) for p in whole if p.grad is not None)
    assert num_zeros.dtype == torch.int64 and num_zeros.item() == expected > 0
    assert sum(p.numel() for p in whole if p.grad is None) > 0  # armed: those without a gradient add nothing
    minus_zero = torch.tensor([-0.0, 0.0, math.nan, math.inf, 1e-45])
    assert count_zero_grads(parameter(minus_zero)).item() == 2


@ranks(4)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_bad_element_reaches_all_ranks(rank, norm_type, bad):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "gtp"))
    for place in (0, 3, 6):  # rows of different ranks
        grad = torch.ones(7, 3)
        grad[place, 1] = bad
        mine = [parameter(grad, mesh, (S0, S0)), parameter(torch.ones(4), mesh, (R, R))]
        norm = clip_grad_norm_(mine, math.inf, norm_type)
        assert torch.isnan(norm) if math.isnan(bad) else norm == math.inf
        assert torch.isfinite(full(mine[1].grad)).all()  # measuring changes nothing
        with pytest.raises(RuntimeError, match=f"total norm of order {norm_type} is (nan|inf)"):
            clip_grad_norm_(mine, 1.0, norm_type, error_if_nonfinite=True)
        assert torch.equal(full(mine[1].grad), torch.ones(4))


def collectives(call) -> list[tuple]:
    with count_collectives() as log:
        call()
    return [(one.op, one.ranks, one.num_bytes) for one in log.calls]


@ranks(4)
def test_collectives_do_not_depend_on_gradients(rank):
    layouts = layouts_on_four()
    mine, _ = mix(layouts)
    seen = collectives(lambda: clip_grad_norm_(mine, 1.0))
    # The grid's ranks are also the line's, so one gather of the line serves both; one of "gtp" for what lies on it
    # alone.
    assert [(op, len(group)) for op, group, _ in seen] == [("all_gather", 4), ("all_gather", 2)]
    if rank == 1:
        for one in mine:
            one.grad = None
    assert collectives(lambda: clip_grad_norm_(mine, 1.0)) == seen
    assert collectives(lambda: count_zero_grads(mine)) == seen
    for one in mine:
        one.grad = None
    assert collectives(lambda: clip_grad_norm_(mine, 1.0)) == seen
    assert clip_grad_norm_(mine, 1.0) == 0 and count_zero_grads(mine) == 0
    grid = [one for one, (_, mesh, _) in zip(mine, layouts) if mesh is not None and mesh.ndim == 2]
    assert len(collectives(lambda: clip_grad_norm_(grid, 1.0))) == 2  # one for each axis


@ranks(2)
def test_axes_of_size_one_cost_nothing(mesh):
    world = init_device_mesh("cpu", (2,), mesh_dim_names=("world",))
    sizes = {"a": 1, "gtp": 2, "b": 1}
    fake = {"a": "fake", "b": "fake"}
    flat = world._unflatten(0, tuple(sizes.values()), tuple(sizes), backend_override=fake)
    mine = [parameter(gradient(0, (5, 2), torch.float64), flat, (S0, S0, R))]
    seen = collectives(lambda: clip_grad_norm_(mine, 1.0, groups=[flat.get_group("a")]))
    assert [(op, group) for op, group, _ in seen] == [("all_gather", (0, 1))]
    single = DeviceMesh("cpu", [dist.get_rank()], mesh_dim_names=("gtp",))
    alone = [parameter(torch.ones(3), single, (S0,)), parameter(torch.ones(6))]
    assert collectives(lambda: clip_grad_norm_(alone, math.inf)) == []
    assert clip_grad_norm_(alone, math.inf) == 3 and clip_grad_norm_([], 1.0) == 0


@ranks(8)
@pytest.mark.parametrize("norm_type", NORM_TYPES)
def test_pipeline_stages_hold_other_parameters(norm_type):
    """pp 2 x tp 2 x gtp 2: the first stage has one parameter more, and later none at all."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "tp", "gtp"))
    stage, grid, pp = mesh["pp"].get_local_rank(), mesh["tp", "gtp"], mesh["pp"].get_group()
    layouts = [((7, 3), (S0, S0)), ((6,), (R, R)), ((5, 4), (S1, S0))]
    wholes = [gradient(number, shape, torch.float64) for number, (shape, _) in enumerate(layouts)]
    mine = [parameter(wholes[0], grid, layouts[0][1]), parameter(wholes[1], grid, layouts[1][1])]
    if stage == 1:
        mine = [parameter(wholes[2], grid, layouts[2][1])]
    expected = torch.nn.utils.get_total_norm(wholes, norm_type)
    norm = clip_grad_norm_(mine, expected.item() / 2, norm_type, groups=[pp])
    assert_equal_on_all_ranks(norm)
    assert torch.allclose(norm, expected, rtol=1e-13)
    assert torch.allclose(full(mine[0].grad), wholes[2 if stage else 0] / 2, rtol=1e-5)
    num_zeros = count_zero_grads(mine, [pp])
    assert num_zeros == sum((whole == 0).sum() for whole in wholes)
    seen = collectives(lambda: clip_grad_norm_(mine, math.inf, groups=[pp]))
    assert [op for op, *_ in seen] == ["all_gather"] * 3  # tp, gtp, pp
    only_first = mine if stage == 0 else []
    norm = clip_grad_norm_(only_first, math.inf, norm_type, groups=[pp])
    expected = clip_grad_norm_([parameter(whole / 2) for whole in wholes[:2]], math.inf, norm_type)
    assert torch.allclose(norm.double(), expected, rtol=1e-5)
    assert_equal_on_all_ranks(norm.float())
    assert count_zero_grads(only_first, [pp]) == sum((whole == 0).sum() for whole in wholes[:2])


@ranks(4)
def test_groups_over_ranks_of_a_mesh_count_once_and_others_are_refused(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "gtp"))
    mine = [parameter(torch.ones(4, 4), mesh, (S0, S0))]
    alone = [torch.nn.Parameter(torch.ones(3))]
    alone[0].grad = torch.full((3,), float(rank))
    for group in (mesh.get_group("gtp"), dist.group.WORLD):
        assert clip_grad_norm_(mine, float("inf"), groups=[group]) == clip_grad_norm_(mine, float("inf"))
    # Plain tensors are each rank's own.
    norm = clip_grad_norm_(mine + alone, float("inf"), groups=[dist.group.WORLD])
    torch.testing.assert_close(norm, (clip_grad_norm_(mine, float("inf")) ** 2 + 3 * (1 + 4 + 9)).sqrt())
    with pytest.raises(TypeError, match="takes process groups .*got DeviceMesh"):
        count_zero_grads(mine, [mesh["gtp"]])
    other = (rank + 1) % 4
    with pytest.raises(ValueError, match=f"rank {rank} is not a member of one of the process groups"):
        clip_grad_norm_([], 1.0, groups=[[dist.new_group([one]) for one in range(4)][other]])


@ranks(2)
def test_what_cannot_be_summed_is_refused(mesh):
    whole = torch.ones(4, 4)
    mine = parameter(whole, mesh, (S0,))
    with pytest.raises(ValueError, match="norm_type=0.0 must be positive"):
        clip_grad_norm_(mine, 1.0, norm_type=0)
    with pytest.raises(ValueError, match="max_norm=-1.0 must not be negative"):
        clip_grad_norm_(mine, -1)
    mine.grad = DTensor.from_local(whole, mesh, [Partial()])
    for function in (lambda p: clip_grad_norm_(p, 1.0), count_zero_grads):
        with pytest.raises(ValueError, match=r"shape \(4, 4\) has placement P.* on mesh axis 'gtp': reduce it"):
            function([mine])
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    mine.grad = distribute_tensor(whole, other, [S0], src_data_rank=None)
    with pytest.raises(ValueError, match=r"is on mesh axes \('gtp',\).*its gradient on mesh axes \('data',\)"):
        clip_grad_norm_(mine, 1.0)


@ranks(2)
def test_a_tied_parameter_named_twice_counts_once(mesh):
    one = parameter(torch.full((4, 4), 2.0), mesh, (S0,))
    assert clip_grad_norm_([one, one], math.inf) == 8
    clip_grad_norm_((p for p in (one, one)), 4.0)
    assert torch.allclose(full(one.grad), torch.full((4, 4), 1.0))


@ranks(2)
def test_a_gradient_that_is_still_being_redistributed(mesh):
    grad = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    mine = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [R], src_data_rank=None))
    mine.grad = grad.redistribute(placements=[R])
    assert clip_grad_norm_(mine, 4.0) == 8
    assert torch.allclose(full(mine.grad), torch.ones(4, 4))


@ranks(2)
@pytest.mark.parametrize("norm_type", [2.0, 1.0, math.inf])
def test_stock_clipping_meets_one_mesh(mesh, rank, world_size, norm_type):
    torch.manual_seed(0)
    model = TinyLlama().double()
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    tokens = torch.randint(VOCAB, (4, 7), generator=torch.Generator().manual_seed(0))
    model(local_slice(tokens, rank, world_size)).square().mean().backward()
    norm = clip_grad_norm_(model.parameters(), math.inf, norm_type)
    stock = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf, norm_type)
    assert torch.allclose(stock.full_tensor(), norm, rtol=1e-9)


class Parts(nn.Module):
    """A tensor-parallel part, a part without, and a parameter that nobody parallelizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MLP((8, 18, 8)), MLP((8, 7, 8))
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., 8) -> (..., 8)."""
        return self.second(torch.tanh(self.first(x))) * self.scale


OPTIMIZERS = {
    "sgd_foreach": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=True),
    "sgd_plain": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, foreach=False),
    "adamw_foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-2, foreach=True),
    "adamw_fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-2, fused=True),
    "adamw_plain": lambda groups: torch.optim.AdamW(groups, lr=1e-2, eps=1e-2, foreach=False),
}


@ranks(4)
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_step_on_the_mix(name, norm_type):
    """Parameters on (tp, gtp), on another mesh of the same ranks, and plain: one parameter group for each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "gtp"))
    model, reference = build_pair(lambda: Parts().double())
    parallelize_module(model.first, mesh["tp"], {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
    parallelize_module(model.first, mesh["gtp"], GTPStyle(min_numel=30))
    parallelize_module(model.second, mesh["gtp"], GTPStyle(GTPConfig(pad_for_alignment=4), min_numel=30))
    by_mesh: dict = {}
    for one in model.parameters():
        by_mesh.setdefault(one.device_mesh if isinstance(one, DTensor) else None, []).append(one)
    assert len(by_mesh) == 3
    optimizer = OPTIMIZERS[name]([{"params": group} for group in by_mesh.values()])
    expected_optimizer = OPTIMIZERS[name](list(reference.parameters()))
    for step in range(3):
        x = torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model(local_slice(x, mesh["gtp"].get_local_rank(), 2)).square().mean().backward()
        dist.all_reduce(model.scale.grad, group=mesh["gtp"].get_group())  # nobody else averages it
        model.scale.grad /= 2
        reference(x).square().mean().backward()
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05, norm_type)
        norm = clip_grad_norm_(model.parameters(), 0.05, norm_type)
        assert expected > 0.05  # armed: gradients are scaled
        assert_equal_on_all_ranks(norm)
        assert torch.allclose(norm, expected, rtol=1e-9)
        for (fqn, mine), theirs in zip(full_gradients(model).items(), reference.parameters()):
            assert torch.allclose(mine, theirs.grad, rtol=1e-8, atol=1e-14), fqn
        optimizer.step(), expected_optimizer.step()
        optimizer.zero_grad(), expected_optimizer.zero_grad()
    for (fqn, mine), theirs in zip(model.named_parameters(), reference.parameters()):
        assert torch.allclose(full(mine), theirs, rtol=1e-8, atol=1e-12), fqn
