"""Random training programs give exactly what the unsharded model gives: outputs, gradients, weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from gtp_dtensor.members import STATE
from tests.program_runs import ShardedRun, run_program
from tests.programs import (
    DIM,
    MAX_STEPS,
    MAX_WIDTH,
    Forward,
    Microbatch,
    Model,
    Program,
    Segment,
    Step,
    Unit,
)

# Rows that divide evenly, that do not, and fewer than there are ranks.
ROWS = (1, 2, 3, DIM, 5, 7, 8, 9, 16, MAX_WIDTH)
UNITS = st.one_of(
    st.builds(Unit, st.just("square"), bias=st.booleans()),
    st.builds(Unit, st.just("pair"), rows=st.sampled_from(ROWS), bias=st.booleans()),
    st.builds(Unit, st.just("lookup"), rows=st.sampled_from(ROWS[2:])),
    st.just(Unit("einsum")),
    st.builds(Unit, st.just("experts"), rows=st.integers(1, 5)),
)


def _tuples(elements, low: int, high: int):
    return st.lists(elements, min_size=low, max_size=high).map(tuple)


@st.composite
def _ties(draw, units: tuple[Unit, ...]):
    """Up to two ties between weights of equal shape; no chains, which would tie what is tied already."""
    shapes = [tuple(owner.weight.shape) for owner in Model(Program(units, ())).weight_owners()]
    pairs = [(i, j) for j in range(len(shapes)) for i in range(j) if shapes[i] == shapes[j]]
    ties, used = [], set()
    for pair in draw(st.lists(st.sampled_from(pairs), max_size=2)) if pairs else []:
        if not used & set(pair):
            ties.append(pair)
            used |= set(pair)
    return tuple(ties)


def _configs(world_size: int):
    """Options of GTPConfig. Averages over a number of ranks that is no power of 2 are not exact: sums there."""
    per_token = st.just(True) if world_size & (world_size - 1) else st.booleans()
    dtypes = st.sampled_from(["float32", "bfloat16", "float64"])
    optional = {
        "weight_prefetch": st.booleans(),
        "async_reduction": st.booleans(),
        "check_param_states": st.booleans(),
        "look_ahead": st.integers(1, 3),
        "graph_wgrad_ring_size": st.integers(1, 3),
        "pad_for_alignment": st.sampled_from([None, 3, 4]),
        "recompute_keep_bytes": st.sampled_from([None, 0, 100]),
        "param_dtype": dtypes,
        "reduce_dtype": dtypes,
        "reduce_scatter_with_fp32_accumulation": st.booleans(),
        "replicate_reduce_with_fp32_accumulation": st.booleans(),
        "wgrad_before_dgrad": st.booleans(),
        "wire_format": st.sampled_from(["bf16", "fp8_rowwise"]),
    }
    return st.fixed_dictionaries({"calculate_per_token_loss": per_token}, optional=optional)


def _even(unit: Unit) -> Unit:
    """torch's tensor parallelism needs features between two linears that divide evenly."""
    return replace(unit, rows=max(2, unit.rows - unit.rows % 2)) if unit.kind == "pair" else unit


@st.composite
def _axes(draw, world_size: int) -> dict:
    """What Program says of the mesh."""
    if world_size % 2:
        return {"egtp": draw(st.sampled_from([0, world_size]))}
    axes = {"is_grouped": draw(st.booleans())}
    if world_size >= 4:
        axes["has_tp"] = draw(st.booleans())
        if world_size > 4 or not axes["has_tp"]:
            axes["replicas"] = draw(st.sampled_from(["", "dps", "dpr"]))
    if not axes.get("has_tp"):
        axes["egtp"] = draw(st.sampled_from([0, 1, 2, world_size]))
    return axes


def _without_impossible_freeze(microbatch: Microbatch) -> Microbatch:
    taken = [segment for forward in microbatch.forwards for segment in forward.paths[forward.selector]]
    recomputed = any(segment.recompute == "nonreentrant" for segment in taken)
    return replace(microbatch, freeze=()) if recomputed else microbatch


@st.composite
def programs(draw, world_size: int) -> Program:
    """A random :class:`Program` for this number of ranks."""
    units, axes = draw(_tuples(UNITS, 1, 5)), draw(_axes(world_size))
    if axes.get("has_tp"):
        units = tuple(map(_even, units))
    segments = st.builds(
        Segment,
        units=_tuples(st.integers(0, len(units) - 1), 1, 3),
        recompute=st.sampled_from(["none", "none", "reentrant", "nonreentrant"]),
    )
    # A few paths for the whole program, so that steps repeat themselves and the schedule has something to learn.
    path_pool = draw(st.lists(_tuples(segments, 1, 3), min_size=1, max_size=3))
    forwards = st.builds(
        Forward,
        paths=st.just(tuple(path_pool)),
        selector=st.integers(0, len(path_pool) - 1),
        mode=st.sampled_from(["train", "train", "train", "no_grad", "inference"]),
        through_root=st.booleans(),
        input_grad=st.booleans(),
    )
    indices = st.integers(0, 9)
    microbatches = st.builds(
        Microbatch,
        forwards=_tuples(forwards, 1, 2),
        backward=st.sampled_from(["joint", "in_order", "reversed", "twice"]),
        freeze=st.one_of(st.just(()), st.just(()), _tuples(indices, 1, 1)),
        abort_at=st.sampled_from([None, None, None, None, None, 0, 1, 2]),
    ).map(_without_impossible_freeze)
    steps = st.builds(
        Step,
        microbatches=_tuples(microbatches, 1, 3),
        toggle=_tuples(indices, 0, 2),
        set_to_none=st.booleans(),
    )
    if draw(st.booleans()):
        chosen = draw(_tuples(steps, 1, MAX_STEPS))
    else:
        step = draw(steps)
        calm = tuple(replace(microbatch, freeze=(), abort_at=None) for microbatch in step.microbatches)
        chosen = (replace(step, toggle=(), microbatches=calm),) * MAX_STEPS
    hooks = st.tuples(indices, st.sampled_from(["tensor", "post_accumulate"]))
    syncs_last_only, config = draw(st.booleans()), draw(_configs(world_size))
    if syncs_last_only and config.get("reduce_dtype") == "bfloat16":
        config["reduce_dtype"] = "float32"  # a sum over microbatches is no longer exact in bfloat16
    return Program(
        units=units,
        steps=chosen,
        ties=() if axes.get("has_tp") else draw(_ties(units)),
        frozen=draw(_tuples(indices, 0, 2)),
        hooks=draw(st.one_of(st.just(()), _tuples(hooks, 1, 2))),
        config=config,
        min_numel=draw(st.sampled_from([1, 1, 17, 30])),
        foreach=draw(st.booleans()),
        cast_input=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        syncs_last_only=syncs_last_only,
        late_units=draw(_tuples(st.integers(0, 4), 0, 2)),
        **axes,
    )


@pytest.mark.parametrize(
    "world_size, share", [(2, 0.3), (3, 0.15), (4, 0.4), pytest.param(8, 0.15, marks=pytest.mark.slow)]
)
def test_random_programs_equal_the_unsharded_model(rank_pool, world_size, share):
    @settings(max_examples=int(settings.default.max_examples * share))
    @given(programs(world_size))
    def check(program):
        for rank, found in enumerate(rank_pool.run(world_size, run_program, program)):
            note(f"world_size={world_size}, rank {rank}: " + ("\n".join(found) or "no difference"))
            assert not found

    check()


_PLAIN = Forward(paths=((Segment((0, 1, 0, 2)), Segment((1, 2), "nonreentrant")),))
_PROGRAM = Program(
    units=(Unit("square"), Unit("square", bias=True), Unit("pair", 7)),
    steps=(Step((Microbatch((_PLAIN,)), Microbatch((_PLAIN, _PLAIN)))),) * 2,
)


def test_fixed_program_is_right(rank_pool):
    assert rank_pool.run(2, run_program, _PROGRAM) == [[], []]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("config", [{}, {"param_dtype": "float64"}, {"pad_for_alignment": 3}], ids=str)
def test_steps_of_every_kind_reach_the_next_forward(rank_pool, config, foreach):
    program = replace(_PROGRAM, steps=(_PROGRAM.steps[0],) * MAX_STEPS, config=config, foreach=foreach)
    assert rank_pool.run(2, run_program, program) == [[], []]


@pytest.mark.parametrize("tamper, where", [("swap", "output"), ("skip_step", "weight"), ("scale", "gradient")])
def test_broken_run_is_seen(rank_pool, tamper, where):
    for found in rank_pool.run(2, run_program, _PROGRAM, tamper=tamper):
        assert found and f"{where} " in found[0]


def _one_forward(**options) -> Program:
    forward = Forward(paths=((Segment((0,)),),), input_grad=True)
    microbatch = Microbatch((forward,), **options.pop("microbatch", {}))
    return Program(units=(Unit("square"),), steps=(Step((microbatch,)),), **options)


def test_whole_linear_takes_float32_input(rank_pool):
    """A linear casts its input to param_dtype, whether it is sharded or stays whole."""
    for min_numel in (1, 30):
        program = _one_forward(config={"param_dtype": "bfloat16"}, min_numel=min_numel)
        assert rank_pool.run(2, run_program, program) == [[], []]


@pytest.mark.parametrize("min_numel", [1, 30])
def test_hook_of_a_parameter_frozen_after_the_forward(rank_pool, min_numel):
    """torch calls the hook with the gradient, which then goes nowhere."""
    program = _one_forward(hooks=((0, "tensor"),), microbatch={"freeze": (0,)}, min_numel=min_numel)
    assert rank_pool.run(2, run_program, program) == [[], []]


_EVERYTHING = Program(
    units=(Unit("square", bias=True), Unit("experts", 3), Unit("pair", 6), Unit("lookup", 5), Unit("einsum")),
    steps=(Step((Microbatch((Forward(paths=((Segment((3, 0, 1)), Segment((2, 1, 4), "nonreentrant")),)),)),) * 2),) * 3,
    config={"wire_format": "fp8_rowwise", "calculate_per_token_loss": False},
    is_grouped=True,
)
_GRIDS = {
    "experts_on_their_own_axis": ({"egtp": 2}, 4),
    "experts_beside_replicas": ({"egtp": 4, "replicas": "dpr"}, 4),
    "tensor_parallel": ({"has_tp": True}, 4),
    "everything": ({"has_tp": True, "replicas": "dps", "syncs_last_only": True, "late_units": (0, 2)}, 8),
}


def _describe(program: Program, mesh) -> dict[str, str]:
    """How each weight of the sharded run is stored and travels."""
    model = ShardedRun(program, mesh).model
    found = {}
    for name, owner in zip(("square", "experts", "up", "down", "lookup", "einsum"), model.weight_owners()):
        weight = owner.__dict__[STATE].weights["weight"]
        axes = "x".join(f"{axis}{size}" for axis, size in zip(weight.spec.mesh.mesh_dim_names, weight.spec.mesh.shape))
        found[name] = f"{weight.wire_name} on {axes}"
    return found


@pytest.mark.parametrize(
    "grid", [pytest.param(grid, marks=[pytest.mark.slow] * (grid == "everything")) for grid in _GRIDS]
)
def test_fixed_programs_on_grids(rank_pool, grid):
    """Those axes and formats are there, the program is right on them, and a wrong scale shows."""
    options, world_size = _GRIDS[grid]
    program = replace(_EVERYTHING, **options)
    seen = rank_pool.run(world_size, _describe, program)[0]
    dense = {
        "experts_on_their_own_axis": "gtp4",
        "experts_beside_replicas": "dpr2xgtp2",
        "tensor_parallel": "tp2xgtp2",
        "everything": "tp2xgtp2xdps2",
    }[grid]
    experts = {"experts_on_their_own_axis": "egtp2xdps2", "experts_beside_replicas": "egtp4"}.get(grid, dense)
    expected = dict.fromkeys(("square", "up", "down", "einsum"), f"fp8_rowwise on {dense}")
    expected |= {"experts": f"fp8_rowwise on {experts}", "lookup": f"fp32 on {dense}"}
    assert seen == expected
    assert rank_pool.run(world_size, run_program, program) == [[]] * world_size
    for found in rank_pool.run(world_size, run_program, program, tamper="scale"):
        assert found and "gradient " in found[0]
