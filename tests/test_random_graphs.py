"""Random training programs as CUDA graphs of whole steps: losses, norms, weights and counters of the same program without,
bit for bit. On a CPU over the stand-in of graph_stand_in.py."""

from __future__ import annotations

import functools
import gc
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, note, settings
from hypothesis import strategies as st

from gtp_dtensor import clip_grad_norm_, graph_step, stats
from tests.graph_stand_in import graphed as graphed_over_stand_in
from tests.program_runs import _backwards, _shard, data_rank_of
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
from tests.reference import full_parameters
from tests.test_graphs_gpu import same_kernels
from tests.test_random_programs import programs

NUM_STEPS, NUM_WARMUP_STEPS = 6, 2


def _graphable(program: Program, transport: str) -> Program:
    """``program`` with one kind of step, and without what a graph refuses: experts that ask the host, hooks, weights that
    are frozen on the way, backwards that break off."""
    units = tuple(replace(unit, kind="square", rows=DIM) if unit.kind == "experts" else unit for unit in program.units)

    def calm(forward: Forward) -> Forward:
        return replace(forward, mode="train", through_root=True, input_grad=False)

    microbatches = tuple(
        Microbatch(tuple(map(calm, microbatch.forwards)), backward=microbatch.backward)
        for microbatch in program.steps[0].microbatches
    )
    step = replace(program.steps[0], microbatches=microbatches, toggle=())
    config = {**program.config, "check_param_states": False, "transport": transport}
    return replace(
        program, units=units, steps=(step,), ties=(), hooks=(), config=config, egtp=0, is_grouped=False, late_units=(),
        syncs_last_only=False,
    )  # fmt: skip


def _step_of(program: Program, model: Model, optimizer: torch.optim.Optimizer):
    """A step over (x, ids, weights of the loss), each (forwards of the step, samples, ...)."""

    def step(x, ids, weight):
        total, index = torch.zeros((), device=x.device), 0
        for microbatch in program.steps[0].microbatches:
            losses = []
            for forward in microbatch.forwards:
                output = model(x[index], ids[index], forward.paths, forward.selector)
                if output.requires_grad:
                    losses.append((output.float() * weight[index]).mean())
                    total = total + losses[-1].detach()
                index += 1
            for loss, retain in _backwards(microbatch.backward, losses):
                loss.backward(retain_graph=retain)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=program.steps[0].set_to_none)
        return total, norm

    return step


def _train(program: Program, mesh, is_graphed: bool):
    device = torch.device(mesh.device_type)
    model = Model(program).to(device)
    _shard(model, program, mesh)
    options = {"fused": True, "capturable": True} if device.type == "cuda" else {"foreach": program.foreach}
    # On a CPU no learning rate and no state on the host: what the stand-in replays must be on "the device".
    optimizer = (torch.optim.AdamW if device.type == "cuda" else torch.optim.SGD)(
        model.parameters(), lr=2**-5, **options
    )
    step = _step_of(program, model, optimizer)
    graph = None
    if is_graphed and device.type == "cuda":
        graph = graph_step(step, model, optimizer)
    elif is_graphed:
        graph, _ = graphed_over_stand_in(step, model, optimizer)
    rank, num_peers = data_rank_of(program, mesh)
    num_forwards = sum(len(microbatch.forwards) for microbatch in program.steps[0].microbatches)
    generator = torch.Generator().manual_seed(program.seed)

    def deal(low: int, high: int, *shape: int) -> torch.Tensor:
        whole = torch.randint(low, high + 1, (num_peers, num_forwards, SAMPLES_PER_RANK, *shape), generator=generator)
        return whole[rank].to(device)

    values = []
    for _ in range(NUM_STEPS):
        x = deal(-BOUND, BOUND, SAMPLE_ROWS, DIM).float()
        batch = x, deal(0, MAX_WIDTH, SAMPLE_ROWS), deal(-2, 2, SAMPLE_ROWS, DIM)
        values.append([float(value) for value in (graph or step)(*batch)])
    gc.collect()  # cycles of checkpointing hold gathered weights until then, so a peak depends on when it comes
    seen = asdict(stats(model))
    del seen["symmetric_bytes"], seen["peak_lease_bytes"]  # the first is of all models that are alive
    num_replays = 0 if graph is None else graph.num_replays
    weights = full_parameters(model)
    if graph is not None:
        graph.release()
    return values, weights, seen, num_replays


def run_graphed(program: Program, mesh, tamper: bool = False) -> list[str]:
    """What differs between the program as a graph and without; empty if nothing does.

    ``tamper``: the program without trains on other data, to see that it shows.
    """
    with same_kernels():
        one = _train(replace(program, seed=program.seed + 1) if tamper else program, mesh, False)
        other = _train(program, mesh, True)
    found = []
    if other[3] != NUM_STEPS - NUM_WARMUP_STEPS:
        found.append(f"{other[3]} replays")
    if one[0] != other[0]:
        found.append(f"(loss, norm) of steps {one[0]}, and as a graph {other[0]}")
    found += [f"weight {name}" for name, weight in one[1].items() if not torch.equal(weight, other[1][name])]
    if one[2] != other[2]:
        found.append(f"counted {[(k, v, other[2][k]) for k, v in one[2].items() if v != other[2][k]]}")
    return found


@pytest.mark.parametrize(
    "device, world_size, share",
    [
        ("cpu", 2, 0.15),
        pytest.param("cpu", 4, 0.1, marks=pytest.mark.slow),
        pytest.param("cuda", 2, 0.4, marks=pytest.mark.gpu),
        pytest.param("cuda", 4, 0.2, marks=pytest.mark.gpu),
    ],
)
def test_random_programs_as_graphs(rank_pool, device, world_size, share):
    transports = st.just("collective") if device == "cpu" else st.sampled_from(["symmetric", "symmetric", "collective"])

    @settings(max_examples=max(2, int(settings.default.max_examples * share)))
    @given(st.builds(_graphable, programs(world_size), transports))
    def check(program):
        found = rank_pool.run(world_size, run_graphed, program, device=device, timeout=120, group_timeout=60)
        for rank, differences in enumerate(found):
            note(f"world_size={world_size}, rank {rank}: " + ("\n".join(differences) or "no difference"))
            assert not differences

    check()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_other_data_is_seen(rank_pool, device):
    """The comparison can fail; and the program that is compared is not an idle one."""
    path = (Segment((0, 1, 0)), Segment((2, 1), "nonreentrant"))
    microbatch = Microbatch((Forward(paths=(path,)),) * 2)
    units = (Unit("square"), Unit("pair", 7, bias=True), Unit("lookup", 5))
    program = _graphable(Program(units=units, steps=(Step((microbatch,) * 2),)), "collective")
    run = functools.partial(rank_pool.run, 2, run_graphed, program, device=device, timeout=120, group_timeout=60)
    assert run() == [[], []]
    for found in run(tamper=True):
        assert found and "(loss, norm)" in found[0] and any(line.startswith("weight ") for line in found)
