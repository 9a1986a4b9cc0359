"""Programs that a recorded order of weights gets wrong in other implementations: pipelines' interleaved chunks, frozen
and skipped layers, towers that come and go, replayed blocks. Weights that lie beside each other have different values.

Each program shows, against the whole model and bit for bit: no use of a wrong weight, no lost gradient; and by two
counts, that of ``stats`` and that of the collectives that were really launched: as many gathers as uses once the order
is known, but of the weight that a forward ends and its backward begins with.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPStyle, finalize_grads, stats
from tests.harness import ranks
from tests.harness.collectives import count_collectives
from tests.program_runs import ShardedRun, Trace, WholeRun, differences
from tests.programs import (
    BOUND,
    DIM,
    MAX_WIDTH,
    SAMPLE_ROWS,
    SAMPLES_PER_RANK,
    Forward,
    Microbatch,
    Model,
    Program,
    Segment,
    Step,
    Unit,
)
from tests.reference import full_gradients, full_parameters, local_slice


@dataclass
class StepCounts:
    """What one step did with sharded weights.

    Attributes:
        num_uses, num_turns: as the test counts them by itself; turns: of a forward to the backward that begins with the
            weight that it ended with.
        num_gathers, num_reductions, num_kept_at_turn: by ``stats``.
        num_all_gathers, num_reduce_scatters: as launched.
        num_mispredictions, num_on_demand: by ``stats``.
    """

    num_uses: int = 0
    num_turns: int = 0
    num_gathers: int = 0
    num_reductions: int = 0
    num_all_gathers: int = 0
    num_reduce_scatters: int = 0
    num_mispredictions: int = 0
    num_on_demand: int = 0
    num_kept_at_turn: int = 0

    def add_stats(self, model: nn.Module, sign: int) -> None:
        """Add (or take away) the counters of ``model``."""
        seen = stats(model)
        self.num_gathers += sign * (seen.num_forward_gathers + seen.num_recompute_gathers + seen.num_backward_gathers)
        self.num_reductions += sign * seen.num_reductions
        self.num_mispredictions += sign * seen.num_mispredictions
        self.num_on_demand += sign * seen.num_on_demand_gathers
        self.num_kept_at_turn += sign * seen.num_kept_at_turn

    def check(self, where: str, is_settled: bool) -> None:
        """Both counts agree, no use went without a gather; once settled, nothing is mispredicted."""
        assert self.num_all_gathers == self.num_gathers, f"{where}: {self}"
        assert self.num_reduce_scatters == self.num_reductions, f"{where}: {self}"
        assert not is_settled or self.num_mispredictions == 0, f"{where}: {self}"

    def check_gathers(self, where: str, num_kept: int = 0) -> None:
        """Nothing is gathered that is not used, or twice at a turn."""
        assert self.num_kept_at_turn == self.num_turns, f"{where}: {self}"
        assert self.num_gathers == self.num_uses - self.num_turns - num_kept > 0, f"{where}: {self}"


class CountingRun(ShardedRun):
    """Counts each step by itself."""

    def __init__(self, program: Program, mesh) -> None:
        super().__init__(program, mesh)
        self.steps: list[StepCounts] = []

    def before_step(self, number: int) -> None:
        """A new entry."""
        super().before_step(number)
        self.steps.append(StepCounts())

    def _microbatch(self, microbatch: Microbatch, where: str) -> None:
        step = self.steps[-1]
        step.num_uses -= sum(self._uses.values())
        step.num_turns -= self.num_turns
        step.add_stats(self.model, -1)
        with count_collectives() as log:
            super()._microbatch(microbatch, where)
            finalize_grads(self.model)
        step.num_uses += sum(self._uses.values())
        step.num_turns += self.num_turns
        step.add_stats(self.model, 1)
        step.num_all_gathers += log.count("all_gather")
        step.num_reduce_scatters += log.count("reduce_scatter")


def run_counted(program: Program, mesh, settled_after: int, num_kept: int = 0) -> tuple[list[StepCounts], Trace]:
    """Run ``program`` sharded and whole and compare everything; counts are exact after some steps. Returns counts and
    what the whole model did."""
    sharded = CountingRun(program, mesh)
    expected = WholeRun(program, mesh.size()).run()
    found = differences(sharded.run(), expected, mesh.get_local_rank(), mesh.size())
    assert not found, "\n".join(found)
    assert settled_after < len(sharded.steps)
    for number, step in enumerate(sharded.steps):
        step.check(f"step {number}", is_settled=number >= settled_after)
        if number >= settled_after:
            step.check_gathers(f"step {number}", num_kept)
    return sharded.steps, expected


def trained(trace: Trace, name: str) -> int:
    """In how many steps the parameter ``name`` got a gradient other than zero."""
    gradients = [value[name] for what, value in trace.values if what.startswith("gradient of step")]
    return sum(gradient is not None and bool(gradient.any()) for gradient in gradients)


def path(*units: int, recompute: str = "none", size: int = 1) -> tuple[Segment, ...]:
    """Segments of ``size`` units."""
    return tuple(Segment(units[start : start + size], recompute) for start in range(0, len(units), size))


EMBEDDING, BLOCK, HEAD = Unit("lookup", rows=MAX_WIDTH), Unit("pair", rows=6), Unit("square")
DECODER = (EMBEDDING, BLOCK, BLOCK, BLOCK, HEAD)
ALL = Forward(paths=(path(0, 1, 2, 3, 4),))
FIRST_BLOCK = ("units.1.first.weight", "units.1.second.weight")
SECOND_BLOCK = ("units.2.first.weight", "units.2.second.weight")


def steps_of(*microbatches: Forward, num: int = 3) -> tuple[Step, ...]:
    """``num`` equal steps."""
    return (Step(tuple(Microbatch((forward,)) for forward in microbatches)),) * num


@ranks(2)
def test_plain_microbatches(mesh):
    steps, trace = run_counted(Program(DECODER, steps_of(ALL, ALL)), mesh, settled_after=1)
    assert steps[-1].num_uses == 2 * (8 + 7) and steps[-1].num_on_demand == 1  # the very first
    assert steps[-1].num_turns == 2 and steps[0].num_kept_at_turn == 1  # the order is known from the second pass on
    assert all(trained(trace, name) == 3 for name in FIRST_BLOCK)


@ranks(2)
@pytest.mark.parametrize("frozen", [(0,), (0, 1, 2), (1, 2)], ids=["embedding", "embedding_and_block", "block"])
def test_frozen_beginning(mesh, frozen):
    """What comes after a frozen weight keeps its gradients: they do not hang on the neighbour's backward."""
    steps, trace = run_counted(Program(DECODER, steps_of(ALL, ALL), frozen=frozen), mesh, settled_after=1)
    num_trained = 8 - len(frozen)
    assert steps[-1].num_reductions == 2 * num_trained
    for name in (*(FIRST_BLOCK if 1 not in frozen else ()), *SECOND_BLOCK, "units.4.first.weight"):
        assert trained(trace, name) == 3, name


@ranks(2)
@pytest.mark.parametrize("start", [0, 1])
def test_every_other_weight_frozen(mesh, start):
    program = Program(
        (Unit("square"),) * 6, steps_of(Forward((path(*range(6)),)), num=3), frozen=(*range(start, 6, 2),)
    )
    steps, trace = run_counted(program, mesh, settled_after=1)
    assert steps[-1].num_reductions == 3
    assert all(trained(trace, f"units.{index}.first.weight") == 3 for index in range(1 - start, 6, 2))


@ranks(2)
def test_freezing_alternates_between_steps(mesh):
    """Even steps train the even weights, odd steps the odd ones."""
    microbatch = Microbatch((Forward((path(*range(6)),), input_grad=True),))
    steps = (Step((microbatch,)), *(Step((microbatch,), toggle=tuple(range(6))) for _ in range(5)))
    program = Program((Unit("square"),) * 6, steps, frozen=(1, 3, 5))
    steps, trace = run_counted(program, mesh, settled_after=1)
    assert [step.num_reductions for step in steps] == [3] * 6
    assert all(trained(trace, f"units.{index}.first.weight") == 3 for index in range(6))


@ranks(2)
def test_middle_layer_skipped_on_odd_steps(mesh):
    paths = (path(0, 1, 2, 3, 4), path(0, 1, 3, 4))
    steps = tuple(Step((Microbatch((Forward(paths, selector=number % 2),)),)) for number in range(8))
    steps, trace = run_counted(Program(DECODER, steps), mesh, settled_after=5)
    assert [step.num_reductions for step in steps] == [8, 6] * 4
    assert [trained(trace, f"units.{index}.first.weight") for index in range(5)] == [8, 8, 4, 8, 8]


@ranks(2)
def test_tower_on_even_microbatches(mesh):
    """Units 0 and 1 are the tower, before the language part."""
    paths = (path(0, 1, 2, 3, 4), path(2, 3, 4))
    units = (BLOCK, BLOCK, EMBEDDING, BLOCK, HEAD)
    microbatches = [Forward(paths, selector=number % 2) for number in range(4)]
    steps, trace = run_counted(Program(units, steps_of(*microbatches, num=5)), mesh, settled_after=3)
    assert steps[-1].num_reductions == 2 * 8 + 2 * 4
    assert all(trained(trace, f"units.{index}.first.weight") == 5 for index in range(5))


@ranks(2)
@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_teacher_and_student_below_one_root(mesh, mode):
    """The teacher (units 0 to 2, frozen) looks first."""
    units = (BLOCK, BLOCK, HEAD, BLOCK, BLOCK, HEAD)
    teacher, student = Forward((path(0, 1, 2),), mode=mode), Forward((path(3, 4, 5),))
    step = Step((Microbatch((teacher, student)),) * 2)
    steps, trace = run_counted(Program(units, (step,) * 4, frozen=tuple(range(5))), mesh, settled_after=2)
    assert steps[-1].num_reductions == 2 * 5 and steps[-1].num_uses == 2 * (5 + 5 + 4)
    assert trained(trace, "units.3.first.weight") == 4 and trained(trace, "units.0.first.weight") == 0


@ranks(2)
@pytest.mark.parametrize("mode", ["no_grad", "inference"])
def test_evaluation_between_steps(mesh, mode):
    evaluation = replace(ALL, mode=mode)
    steps, trace = run_counted(
        Program(DECODER, steps_of(ALL, ALL, evaluation, evaluation, num=6)), mesh, settled_after=3
    )
    assert steps[-1].num_uses == 2 * 15 + 2 * 8
    assert trained(trace, "units.1.first.weight") == 6


@ranks(2)
def test_evaluation_on_some_steps_only(mesh):
    train, both = steps_of(ALL, num=1)[0], steps_of(ALL, replace(ALL, mode="inference"), num=1)[0]
    run_counted(Program(DECODER, (train, train, both, train) * 3), mesh, settled_after=8)


@ranks(2)
def test_block_replayed_twice_with_a_shared_output_weight(mesh):
    """The block of units 1 and 2 runs three times; the table of the embedding is the head's weight."""
    units = (Unit("lookup", rows=DIM), BLOCK, HEAD, Unit("square"))
    program = Program(units, steps_of(Forward((path(0, 1, 2, 1, 2, 1, 2, 3),)), num=6), ties=((0, 4),))
    steps, trace = run_counted(program, mesh, settled_after=3)
    assert steps[-1].num_uses == 1 + 3 * 3 + 1 + (3 * 3 + 1)
    assert steps[-1].num_reductions == 1 + 3 * 3 + 1
    assert trained(trace, "units.0.first.weight") == trained(trace, "units.1.first.weight") == 6


@ranks(2)
@pytest.mark.parametrize("keep_bytes", [None, 0])
@pytest.mark.parametrize("recompute", ["reentrant", "nonreentrant"])
def test_full_recompute(mesh, recompute, keep_bytes):
    """8 blocks of 4 weights: 96 uses. What a recompute gathers may stay for the backward of its block: 64 gathers."""
    forward = Forward((path(*range(16), recompute=recompute, size=2),), input_grad=True)
    program = Program((BLOCK,) * 16, steps_of(forward, num=5), config={"recompute_keep_bytes": keep_bytes})
    num_kept = 32 if keep_bytes is None else 0
    steps, trace = run_counted(program, mesh, settled_after=3, num_kept=num_kept)
    assert steps[-1].num_uses == 96 and steps[-1].num_turns == 0  # the backward begins with a recompute
    assert steps[-1].num_gathers == 96 - num_kept and steps[-1].num_reductions == 32
    assert trained(trace, "units.0.first.weight") == 5


# ---- several roots in one process: what one rank of a pipeline runs


@dataclass(frozen=True)
class Action:
    """One step of a rank's pipeline schedule: the forward or the backward of a chunk for a microbatch."""

    kind: str
    chunk: int
    microbatch: int


def pipeline_order(num_stages: int, num_chunks: int, num_microbatches: int, rank: int) -> Iterator[Action]:
    """1F1B; interleaved where ``num_chunks`` > 1, microbatches in rounds of ``num_stages``."""
    total = num_chunks * num_microbatches
    num_warmup = num_stages - rank - 1
    if num_chunks > 1:
        num_warmup = 2 * num_warmup + (num_chunks - 1) * num_stages
    num_warmup = min(num_warmup, total)

    def action(kind: str, number: int) -> Action:
        round_, place = divmod(number, num_stages * num_chunks)
        chunk, microbatch = divmod(place, num_stages)
        return Action(kind, chunk if kind == "F" else num_chunks - 1 - chunk, round_ * num_stages + microbatch)

    for number in range(total + num_warmup):
        if number < total:
            yield action("F", number)
        if number >= num_warmup:
            yield action("B", number - num_warmup)


def num_turns(order: list[Action]) -> int:
    """How often a chunk's forward is followed by a backward of that chunk, whatever other chunks do in between."""
    by_chunk: dict[int, str] = {}
    for action in order:
        by_chunk[action.chunk] = by_chunk.get(action.chunk, "") + action.kind
    return sum(kinds.count("FB") for kinds in by_chunk.values())


SLOW_PIPELINES = [pytest.param(4, num_chunks, marks=pytest.mark.slow) for num_chunks in (3, 4)]
CHUNK = (BLOCK, Unit("square"), BLOCK)
CHUNK_PATH = path(0, 1, 2)
NUM_CHUNK_WEIGHTS = 5


class ChunkRun:
    """Runs the actions of one rank of a pipeline. Activations and gradients of its neighbours are random integers."""

    def __init__(self, order: list[Action], num_chunks: int, mesh=None, num_peers: int = 1) -> None:
        self.order = order
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        self.num_slices = 1 if mesh is None else num_peers
        self.num_samples = num_peers * SAMPLES_PER_RANK
        self.is_whole = mesh is None
        self.chunks = nn.ModuleList(Model(Program(CHUNK, (), seed=seed)) for seed in range(num_chunks))
        if mesh is not None:
            for chunk in self.chunks:
                parallelize_module(chunk, mesh, GTPStyle(min_numel=1))
        self.optimizer = torch.optim.SGD(self.chunks.parameters(), lr=1.0)
        self.trace, self.steps = Trace(), []
        self._generator = torch.Generator().manual_seed(0)

    def _deal(self, bound: int) -> torch.Tensor:
        whole = torch.randint(-bound, bound + 1, (self.num_samples, SAMPLE_ROWS, DIM), generator=self._generator)
        return local_slice(whole, self.rank, self.num_slices).float()

    def _actions(self, step: int) -> None:
        running: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        for action in self.order:
            key, where = (action.chunk, action.microbatch), f"{action} in step {step}"
            if action.kind == "F":
                x = self._deal(BOUND).requires_grad_()
                ids = torch.zeros(x.shape[:-1], dtype=torch.int64)
                y = self.chunks[action.chunk](x, ids, (CHUNK_PATH,), torch.tensor(0))
                running[key] = x, y
                self.trace.add(f"output of {where}", y.detach())
            else:
                x, y = running.pop(key)
                y.backward(self._deal(2))
                self.trace.add(f"gradient of the input of {where}", x.grad)
        assert not running

    def run(self, num_steps: int) -> Trace:
        """Steps, with the sign of the gradient as update."""
        for step in range(num_steps):
            counts = StepCounts(len(self.order) * NUM_CHUNK_WEIGHTS, num_turns(self.order))
            counts.add_stats(self.chunks, -1)
            with count_collectives() as log:
                self._actions(step)
            counts.add_stats(self.chunks, 1)
            counts.num_all_gathers, counts.num_reduce_scatters = log.count("all_gather"), log.count("reduce_scatter")
            self.steps.append(counts)
            divisor = self.num_samples // SAMPLES_PER_RANK if self.is_whole else 1
            gradients = full_gradients(self.chunks)
            self.trace.add(f"gradient of step {step}", {name: grad / divisor for name, grad in gradients.items()})
            for parameter in self.chunks.parameters():
                grad = parameter.grad
                (grad.to_local() if isinstance(grad, DTensor) else grad).sign_()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.trace.add(f"weight after step {step}", full_parameters(self.chunks))
        return self.trace


@ranks(2)
@pytest.mark.parametrize("num_stages, num_chunks", [(2, 1), (4, 1), (2, 2), (2, 3), (4, 2), *SLOW_PIPELINES])
def test_pipeline_ranks(mesh, world_size, num_stages, num_chunks):
    """Every rank of a pipeline, one after the other, as a program of one process."""
    for stage in range(num_stages):
        order = list(pipeline_order(num_stages, num_chunks, 4, stage))
        assert len(order) == len(set(order)) == 2 * 4 * num_chunks
        assert num_turns(order) == 4 or num_chunks > 1 or stage < num_stages - 1  # at the last stage of 1F1B: each
        sharded = ChunkRun(order, num_chunks, mesh, world_size)
        trace = sharded.run(5)
        expected = ChunkRun(order, num_chunks, num_peers=world_size).run(5)
        found = differences(trace, expected, mesh.get_local_rank(), world_size)
        assert not found, f"pipeline rank {stage}:\n" + "\n".join(found)
        for number, step in enumerate(sharded.steps):
            step.check(f"pipeline rank {stage}, step {number}", is_settled=number > 2)
            if number > 2:
                step.check_gathers(f"pipeline rank {stage}, step {number}")
            assert step.num_reductions == 4 * num_chunks * NUM_CHUNK_WEIGHTS
        seen = stats(sharded.chunks)
        assert (seen.live_lease_bytes, seen.num_pending) == (0, 0) and seen.num_prefetch_hits > 0
        for name in (f"{chunk}.units.{unit}.first.weight" for chunk in range(num_chunks) for unit in range(3)):
            assert trained(trace, name) == 5, name


@ranks(2)
def test_teacher_and_student_as_two_roots(mesh, rank, world_size):
    """A frozen teacher's output is the student's target; both are sharded, in one process."""

    def forwards(teacher: Model, student: Model, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = teacher(x, ids, (CHUNK_PATH,), torch.tensor(0))
        return student(x, ids, (CHUNK_PATH,), torch.tensor(0)) * target

    def pair() -> nn.ModuleList:
        models = nn.ModuleList(Model(Program(CHUNK, (), seed=seed)) for seed in (0, 1))
        models[0].requires_grad_(False)
        return models

    models, reference = pair(), pair()
    for model in models:
        parallelize_module(model, mesh, GTPStyle(min_numel=1))
    generator = torch.Generator().manual_seed(0)
    for step in range(4):
        counts = StepCounts(num_uses=2 * (5 + 5 + 4), num_turns=2)
        counts.add_stats(models, -1)
        for _ in range(2):
            whole = torch.randint(-2, 3, (4, SAMPLE_ROWS, DIM), generator=generator).float()
            x, ids = local_slice(whole, rank, world_size), torch.zeros(4, SAMPLE_ROWS, dtype=torch.int64)
            with count_collectives() as log:
                mine = forwards(*models, x, local_slice(ids, rank, world_size))
                mine.sum().backward()
            expected = forwards(*reference, whole, ids)
            expected.sum().backward()  # gradients of activations are clamped: scale afterwards
            assert torch.equal(mine, local_slice(expected, rank, world_size))
            counts.num_all_gathers += log.count("all_gather")
            counts.num_reduce_scatters += log.count("reduce_scatter")
        counts.add_stats(models, 1)
        counts.check(f"step {step}", is_settled=step >= 2)
        if step >= 2:
            counts.check_gathers(f"step {step}")
        gradients = [full_gradients(one[1]) for one in (models, reference)]
        for name, expected in gradients[1].items():
            assert expected.any() and torch.equal(gradients[0][name], expected / world_size), name
        assert all(parameter.grad is None for parameter in models[0].parameters())
        for one in (models, reference):
            one.zero_grad()
