"""Meshes are arguments: whose ranks form a gtp axis, and how many models on which grids live in one process."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, stats
from tests.harness import ranks
from tests.models import MLP, TinyLlama
from tests.reference import (
    RTOL,
    assert_close_to_reference,
    assert_equal_to_reference,
    build_pair,
    full,
    full_gradients,
    full_parameters,
    local_slice,
    make_optimizer,
    mean_over_ranks,
    mean_square,
    replica_options,
    train_beside_reference,
)
from tests.test_parity import _llama_tp_plan

SLOW = pytest.mark.slow
SGD_FIRST = ["sgd", pytest.param("adam", marks=SLOW)]
ADAM_FIRST = ["adam", pytest.param("sgd", marks=SLOW)]
# Grids of four ranks, and whether the axis beside gtp comes first. init_device_mesh makes the first two.
GRIDS = [
    (True, [[0, 1], [2, 3]]),
    (False, [[0, 1], [2, 3]]),
    (True, [[0, 2], [1, 3]]),
    (True, [[1, 0], [3, 2]]),
    (True, [[2, 3], [0, 1]]),
    (False, [[3, 1], [2, 0]]),
]


def grid_of(other: str, other_is_first: bool, grid: list[list[int]]) -> DeviceMesh:
    """A mesh of the axes ``other`` and gtp."""
    return DeviceMesh("cpu", grid, mesh_dim_names=(other, "gtp") if other_is_first else ("gtp", other))


def tokens(step: int, num: int = 8) -> torch.Tensor:
    # The vocabulary that the tensor-parallel plan cuts has more.
    return torch.randint(24, (num, 6), generator=torch.Generator().manual_seed(step))


def vectors(step: int) -> torch.Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(step))


def data_place(mesh: DeviceMesh) -> tuple[int, int]:
    """(data rank, number of data ranks) of this rank; peers along tp read the same data."""
    places = dict(zip(mesh.mesh_dim_names, zip(mesh.get_coordinate(), mesh.shape)))
    places.pop("tp", None)
    data_rank, num_data_ranks = 0, 1
    for _, (place, size) in sorted(places.items()):  # alike for both orders of the axes
        data_rank, num_data_ranks = data_rank * size + place, num_data_ranks * size
    return data_rank, num_data_ranks


def shard(model: nn.Module, mesh: DeviceMesh, tp_plan: dict | None = None, config: GTPConfig | None = None) -> None:
    """Over the axis gtp of ``mesh``, and over those beside it."""
    if "tp" in mesh.mesh_dim_names:
        parallelize_module(model, mesh["tp"], tp_plan)
    parallelize_module(model, mesh["gtp"], GTPStyle(config, min_numel=30, **replica_options(mesh)))
    assert stats(model).num_sharded_weights == sum(param.dim() > 1 for param in model.parameters())


def trained(model: nn.Module, optimizer: str, place: int, size: int) -> dict[str, torch.Tensor]:
    """Losses of the slice ``place`` of ``size``; the gradients of the last step and the weights after it."""
    optimizer = make_optimizer(optimizer, model)
    results = {}
    for step in range(3):
        optimizer.zero_grad()
        for index, whole in enumerate(vectors(step).chunk(2)):
            loss = mean_square(model(local_slice(whole, place, size))) / 2
            loss.backward()
            results[f"loss {step}.{index}"] = loss.detach()
        optimizer.step()
    results |= {f"gradient {name}": value for name, value in full_gradients(model).items()}
    return results | {f"weight {name}": value for name, value in full_parameters(model).items()}


def assert_trains_as_reference(results: dict, expected: dict, num_data_ranks: int) -> None:
    """``results`` of a slice, ``expected`` of the whole batch."""
    mine = {key: mean_over_ranks(value) if key.startswith("loss") else value for key, value in results.items()}
    whole = {key: value.double() if key.startswith("loss") else value for key, value in expected.items()}
    assert_close_to_reference(mine, whole, f"over {num_data_ranks} data ranks")


def run_on(mesh: DeviceMesh, optimizer: str) -> dict[str, torch.Tensor]:
    """Train an MLP on ``mesh`` beside its reference; the results of this rank."""
    model, reference = build_pair(small_mlp)
    shard(model, mesh, {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
    place, size = data_place(mesh)
    results = trained(model, optimizer, place, size)
    assert_trains_as_reference(results, trained(reference, optimizer, 0, 1), size)
    return {f"{key} of slice {place}" if key.startswith("loss") else key: value for key, value in results.items()}


def small_mlp() -> nn.Module:
    return MLP((8, 12, 10, 8))  # rows that four ranks share evenly, unevenly, and evenly again


@ranks(4)
@pytest.mark.parametrize("other", ["dpr", "dps", "tp"])
@pytest.mark.parametrize("optimizer", SGD_FIRST)
def test_membership_of_gtp_groups_changes_no_bit(rank, other, optimizer):
    """Sums are over two ranks, whatever these are called, so they are the same numbers in every grid."""
    first, members = {}, set()
    for other_is_first, grid in GRIDS:
        mesh = grid_of(other, other_is_first, grid)
        if other == "tp" and descends(grid, 0 if other_is_first else 1):
            continue  # refused, see below
        members.add(tuple(sorted(mesh["gtp"].mesh.tolist())))
        results = run_on(mesh, optimizer)
        first = {key: first.get(key, value) for key, value in results.items()} | first
        assert_equal_to_reference(results, {key: first[key] for key in results}, f"{mesh}")
    assert len(members) >= 2  # the trap is armed


def descends(grid: list[list[int]], axis: int) -> bool:
    """Whether ranks descend along some line of ``axis``."""
    return bool((torch.tensor(grid).diff(dim=axis) < 0).any())


@ranks(4)
@pytest.mark.parametrize("order", [[2, 0, 3, 1], pytest.param([3, 2, 1, 0], marks=SLOW)], ids=str)
@pytest.mark.parametrize("optimizer", ADAM_FIRST)
def test_a_permuted_axis(rank, order, optimizer):
    mesh = DeviceMesh("cpu", order, mesh_dim_names=("gtp",))
    assert tuple(mesh.get_coordinate()) == (order.index(rank),) and mesh.get_group().rank() == rank  # torch sorts it
    run_on(mesh, optimizer)


@ranks(4)
def test_a_tensor_parallel_axis_that_descends_is_refused(rank):
    mesh = DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("gtp", "tp"))
    with pytest.raises(
        ValueError, match=r"each line ascend .* the line \[\d, \d\] of the mesh: build .* with ascending ranks"
    ):
        run_on(mesh, "sgd")


TWISTED = [  # ranks do not ascend alike along all lines of the grid: torch's groups, sorted by rank, do not fit it
    ("dpr", [[0, 3], [2, 1]]),
    ("dps", [[0, 3], [2, 1]]),
    ("tp", [[0, 3], [2, 1]]),
    ("dpr", [[0, 3], [1, 2]]),
    ("dps", [[0, 3], [1, 2]]),
    ("tp", [[0, 3], [1, 2]]),
]


@ranks(4, timeout=20.0, group_timeout=5.0)
@pytest.mark.parametrize("other, grid", TWISTED, ids=str)
def test_a_twisted_grid_is_refused_on_every_rank_or_is_right(rank, world_size, other, grid):
    try:
        run_on(grid_of(other, True, grid), "sgd")
        is_refused = False
    except ValueError as error:
        assert "ascend" in str(error)
        is_refused = True
    everyones = [None] * world_size
    dist.all_gather_object(everyones, is_refused)
    assert len(set(everyones)) == 1


# ---- teacher and student


class Teacher(nn.Module):
    """With dropout, so that evaluation mode shows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(8, 48), nn.Dropout(0.5), nn.Linear(48, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) -> (batch, 8)."""
        return self.second(self.dropout(torch.tanh(self.first(x))))


def student_model() -> nn.Module:
    return MLP((8, 32, 40, 8))


def distill(teacher: nn.Module, student: nn.Module, x: torch.Tensor, mode: str) -> torch.Tensor:
    if mode == "through":  # the student is trained through the teacher, which is frozen
        return F.mse_loss(teacher(student(x)), torch.sin(x))
    with torch.set_grad_enabled(mode != "no_grad"):
        target = teacher(x)
    assert not target.requires_grad
    return F.kl_div(student(x).log_softmax(-1), target.softmax(-1), reduction="batchmean")


GRIDS_OF_TWO = [  # of teacher and student: axis sizes by name
    ({"gtp": 4}, {"dpr": 2, "gtp": 2}),
    pytest.param({"gtp": 2, "dpr": 2}, {"gtp": 4}, marks=SLOW),
    ({"dps": 2, "gtp": 2}, {"gtp": 2, "dps": 2}),
]


def named_mesh(sizes: dict[str, int]) -> DeviceMesh:
    grid = torch.arange(4).view(*sizes.values())
    return DeviceMesh("cpu", grid, mesh_dim_names=tuple(sizes))


@ranks(4)
@pytest.mark.parametrize("first, second", GRIDS_OF_TWO, ids=str)
@pytest.mark.parametrize("mode", ["no_grad", "frozen", "through"])
@pytest.mark.parametrize("optimizer", ADAM_FIRST)
def test_frozen_teacher_and_student_on_grids_of_their_own(rank, world_size, first, second, mode, optimizer):
    teachers, students = build_pair(Teacher), build_pair(student_model, seed=1)
    for pair, sizes in zip((teachers, students), (first, second)):
        shard(pair[0], named_mesh(sizes))
    for teacher in teachers:
        teacher.eval().requires_grad_(mode == "no_grad")
    optimizers = [make_optimizer(optimizer, student) for student in students]
    for step in range(4):
        for model in (teachers[0], students[0]):
            reset_stats(model)
        x = vectors(step)
        slices = local_slice(x, rank, world_size), x
        losses = [distill(t, s, x, mode) for t, s, x in zip(teachers, students, slices)]
        for loss in losses:
            loss.backward()
        assert_close_to_reference(mean_over_ranks(losses[0]), losses[1].double(), f"loss of step {step}")
        assert_close_to_reference(*map(full_gradients, students), "gradient")
        for one in optimizers:
            one.step()
            one.zero_grad()
        assert_close_to_reference(*map(full_parameters, students), "weight")
        s = stats(teachers[0])
        num_backwards = 2 if mode == "through" else 0
        kept = int(step > 0)  # once the order is known, what the forward ends with
        assert (s.num_forward_gathers, s.num_backward_gathers + s.num_kept_at_turn) == (2, num_backwards)
        assert s.num_kept_at_turn == (kept if mode == "through" else 0)
        assert (s.num_reductions, s.num_small_reductions) == (0, 0)
        assert all(param.grad is None for teacher in teachers for param in teacher.parameters())
        s = stats(students[0])
        assert (s.num_forward_gathers, s.num_backward_gathers, s.num_reductions) == (3, 2 - kept, 3)
        assert s.num_kept_at_turn == kept
        assert step == 0 or s.num_mispredictions == stats(teachers[0]).num_mispredictions == 0


@ranks(4)
@pytest.mark.parametrize("mode", ["no_grad", "frozen", "through"])
def test_a_deleted_teacher_is_freed_and_the_student_goes_on(rank, world_size, mode):
    teacher, student = Teacher().eval().requires_grad_(False), build_pair(student_model, seed=1)
    for model, sizes in zip((teacher, student[0]), GRIDS_OF_TWO[0]):
        shard(model, named_mesh(sizes))
    x = vectors(0)
    loss = distill(teacher, student[0], local_slice(x, rank, world_size), mode)
    loss.backward()
    student[0].zero_grad()
    runtime = teacher.first._gtp.weights["weight"].runtime
    alive = [weakref.ref(thing) for thing in (teacher, runtime, *teacher.parameters())]
    del teacher, runtime, model, loss
    gc.collect()
    assert [ref() for ref in alive] == [None] * len(alive)
    train_beside_reference(
        *student,
        vectors,
        rank=rank,
        world_size=world_size,
    )


# ---- two models that are both trained


PAIRS_OF_GRIDS = {
    "gtp_on_the_other_axis": ((("dps", "gtp"), (2, 2)), (("gtp", "dpr"), (2, 2))),
    "copies_and_shards": ((("dpr", "gtp"), (2, 2)), (("gtp", "dps"), (2, 2))),
    "gtp4_and_gtp2_tp2": ((("gtp",), (4,)), (("gtp", "tp"), (2, 2))),
}


class TwoModels:
    """Llamas on grids of their own, each beside its reference, with an optimizer each."""

    def __init__(self, name: str, optimizer: str) -> None:
        self.meshes = [named_mesh(dict(zip(*axes))) for axes in PAIRS_OF_GRIDS[name]]
        self.pairs = [build_pair(TinyLlama, seed=seed) for seed in range(2)]
        for (model, _), mesh in zip(self.pairs, self.meshes):
            shard(model, mesh, _llama_tp_plan(2))
        self.optimizers = [[make_optimizer(optimizer, one) for one in pair] for pair in self.pairs]

    def losses(self, which: int, step: int) -> list[torch.Tensor]:
        """[of the model's slice, of the reference's whole batch]"""
        x = tokens(10 * step + which)
        place, size = data_place(self.meshes[which])
        model, reference = self.pairs[which]
        mine, whole = mean_square(model(local_slice(x, place, size))), mean_square(reference(x))
        assert_close_to_reference(mean_over_ranks(mine), whole.double(), f"loss of model {which}, step {step}")
        return [mine, whole]

    def check_gradients(self, which: int) -> None:
        assert_close_to_reference(*map(full_gradients, self.pairs[which]), f"gradient of model {which}")

    def step(self, which: int) -> None:
        for one in self.optimizers[which]:
            one.step()
            one.zero_grad()
        assert_close_to_reference(*map(full_parameters, self.pairs[which]), f"weight of model {which}")

    def check_predictions(self) -> None:
        for model, _ in self.pairs:
            s = stats(model)
            assert (s.num_mispredictions, s.num_pending, s.live_lease_bytes) == (0, 0, 0)
            assert s.num_prefetch_hits > 0
            reset_stats(model)


def backward(*losses: list[torch.Tensor]) -> None:
    for one in map(sum, zip(*losses)):
        one.backward()


@ranks(4)
@pytest.mark.parametrize("grids", PAIRS_OF_GRIDS)
@pytest.mark.parametrize("optimizer", SGD_FIRST)
@pytest.mark.parametrize("how", ["one_loss", "in_turn"])
def test_two_models_trained_together(grids, optimizer, how):
    both = TwoModels(grids, optimizer)
    for step in range(4):
        if how == "one_loss":
            backward(both.losses(0, step), both.losses(1, step))
        else:
            backward(both.losses(0, step))
            both.check_gradients(0)
            both.step(0)
            backward(both.losses(1, step))
        for which in range(2):
            if both.optimizers[which][0].param_groups[0]["params"][0].grad is not None:
                both.check_gradients(which)
                both.step(which)
        if step > 0:
            both.check_predictions()
        for model, _ in both.pairs:
            reset_stats(model)


ORDERS = {  # backwards after the forwards a0, b0, a1, b1: each of a sum of losses, by their numbers
    "b0_a1_a0_b1": ((1,), (2,), (0,), (3,)),
    "reversed": ((3,), (2,), (1,), (0,)),
    "crosswise": ((0, 3), (2, 1)),
    "one": ((2, 1, 3, 0),),
}


@ranks(4)
@pytest.mark.parametrize("grids", [g if i == 0 else pytest.param(g, marks=SLOW) for i, g in enumerate(PAIRS_OF_GRIDS)])
@pytest.mark.parametrize("order", ["crosswise", *(pytest.param(o, marks=SLOW) for o in ORDERS if o != "crosswise")])
def test_interleaved_forwards(grids, order):
    both = TwoModels(grids, "adam")
    for step in range(4):
        losses = [both.losses(which, 2 * step + turn) for turn in range(2) for which in range(2)]
        for numbers in ORDERS[order]:
            backward(*(losses[number] for number in numbers))
        for which in range(2):
            both.check_gradients(which)
            both.step(which)
        if step > 1:  # where the step before ends and that two forwards follow is known from the second step on
            both.check_predictions()
        for model, _ in both.pairs:
            reset_stats(model)


class Chain(nn.Module):
    """One model reads what the other makes: their autograd graph is one."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, 8) -> (batch, 8)."""
        return x + self.second(torch.tanh(self.first(x)))


@ranks(4)
@pytest.mark.parametrize("first, second", GRIDS_OF_TWO, ids=str)
@pytest.mark.parametrize("optimizer", ADAM_FIRST)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=SLOW)], ids=str)
def test_one_model_feeds_the_other(rank, world_size, first, second, optimizer, dtype):
    pairs = build_pair(student_model), build_pair(lambda: MLP((8, 40, 24, 8)), seed=1)
    for (model, _), sizes, config in zip(pairs, (first, second), (GTPConfig(), GTPConfig(look_ahead=2))):
        shard(model.to(dtype), named_mesh(sizes), config=config)
    model, reference = (Chain(*members).to(dtype) for members in zip(*pairs))
    train_beside_reference(
        model,
        reference,
        lambda step: vectors(step).to(dtype),
        rank=rank,
        world_size=world_size,
        optimizer=optimizer,
        num_microbatches=2,
        rtol=RTOL if dtype is torch.float32 else 1e-11,
    )
    for one, _ in pairs:
        assert full(next(one.parameters())).dtype == dtype
        assert stats(one).num_pending == 0 and stats(one).live_lease_bytes == 0
