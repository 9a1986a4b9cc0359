"""The planner on real models: what it records is what the library does, at any world size."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections import Counter

import pytest
import torch

from titan_integration import cpu

cpu.install()  # before the first import of torchtitan

from gtp_dtensor import memory_table, schedule_table, stats
from tests.harness import ranks
from tests.titan_runs import DEBUG_TOML, ROOT, environment
from titan_integration.plan import arrangement as arrangements
from titan_integration.plan import checks
from titan_integration.plan.arrangement import Arrangement, make_plan, make_short_plan, with_one_more
from titan_integration.plan.calibrate import Measured, calibrate, read_rows, record_stack
from titan_integration.plan.checks import check_layout
from titan_integration.plan.cluster import read_cluster
from titan_integration.plan.device import fake_world, meta_stands_for_gpu
from titan_integration.plan.rank import RankStep, build_rank, pipeline_actions, read_job
from titan_integration.plan.record import ACTIVATIONS, GATHERED, KINDS, Kernel, Recorder, Start, Sync, Wait
from titan_integration.plan.report import explain, ranking_as_json, table
from titan_integration.plan.search import Choices, model_shape, search, weak_scaling
from titan_integration.plan.simulate import simulate
from titan_integration.plan.stack import Stack, shard_stack
from titan_integration.plan.wire_figures import bytes_per_element, summary

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="a plan is made in a process that sees no GPU, as its command sees to"
)
DEEPSEEK = ROOT / "train_configs" / "deepseek_v3_debug.toml"
SMALL = ["--training.seq_len=64", "--training.local_batch_size=2", "--training.global_batch_size=-1"]
FUSED = ["--optimizer.implementation=fused", "--training.mixed_precision_param=bfloat16"]


def gtp(tp=1, gtp=1, ep=1, egtp=1, pp=1):
    return [
        f"--parallelism.tensor_parallel_degree={tp}",
        f"--gtp.tensor_parallel_num_weight_shards={tp * gtp}",
        f"--parallelism.expert_parallel_degree={ep}",
        f"--gtp.expert_tensor_parallel_num_weight_shards={egtp}",
        f"--parallelism.pipeline_parallel_degree={pp}",
    ]


def job(*options, toml=DEBUG_TOML):
    return read_job(str(toml), [*SMALL, *options])


def built(config, world):
    """A rank of a model of two layers."""
    return build_rank(config, world, num_layers=2)


@pytest.fixture
def cluster():
    return read_cluster("h200x8_infiniband")


def starts(events, kind):
    return [event for event in events if isinstance(event, Start) and event.kind.split()[0] == kind]


# ---- what is recorded


@pytest.mark.parametrize(
    "options, world",
    [
        (gtp(gtp=4), 8),
        (gtp(tp=2, gtp=2), 8),
        ([*gtp(gtp=4), "--activation_checkpoint.mode=full"], 4),
        ([*gtp(gtp=4), "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"], 4),
    ],
)
def test_transfers_are_those_that_the_library_counts(options, world):
    with fake_world(world, 1):
        rank = built(job(*options), world)
        step = RankStep(rank, num_microbatches=2)
        step.record()
        (model,) = rank.parts
        before = dataclasses.asdict(stats(model))
        recorder = step_again(step)
        after = dataclasses.asdict(stats(model))
        rows = schedule_table(model)
    counted = {name: after[name] - before[name] for name in after}
    gathers, reductions = (
        starts(recorder.events, "gather"),
        [event for event in starts(recorder.events, "reduce") if event.axis == "gtp"],
    )
    kinds = ("num_forward_gathers", "num_recompute_gathers", "num_backward_gathers")
    assert len(gathers) == sum(counted[kind] for kind in kinds) > 0
    assert sum(event.num_bytes for event in gathers) == counted["gather_bytes"] > 0
    assert sum(event.num_bytes for event in reductions) == counted["reduce_bytes"] > 0
    assert len(gathers) == sum(row.issued_at is not None for row in rows)
    waited = Counter(event.number for event in recorder.events if isinstance(event, Wait))
    started = [event.number for event in recorder.events if isinstance(event, Start)]
    assert len(started) == len(set(started)) and set(waited) == set(started) and set(waited.values()) == {1}


def step_again(step):
    """One recorded step, without the steps before it that are not."""
    recorder = Recorder()
    step._note_what_lies_there(recorder)
    with meta_stands_for_gpu(recorder), recorder:
        step._passes(recorder)
    return recorder


def test_gathered_memory_is_that_of_the_librarys_formula():
    for options in ([], ["--gtp.look_ahead=3"], ["--activation_checkpoint.mode=full"]):
        with fake_world(4, 0):
            rank = built(job(*gtp(gtp=4), *FUSED, *options), 4)
            recorder = RankStep(rank).record()
            (rows,) = memory_table(rank.parts[0]).rows
        most = max(counts[GATHERED] for counts in recorder.memory.course())
        assert most == pytest.approx(max(row.gathered for row in rows), rel=0.02) and most > 0, options


def test_memory_comes_and_goes():
    with fake_world(8, 0):
        rank = built(job(*gtp(gtp=4), *FUSED), 8)
        recorder = RankStep(rank).record()
        params = sum(p._local_tensor.nbytes for p in rank.parts[0].parameters())
        state = [t for o in rank.optimizers for s in o.state.values() for t in s.values() if t.is_meta]
    peak = recorder.memory.peak()
    assert set(peak) == set(KINDS) and peak["parameters"] == pytest.approx(params, rel=0.05)
    assert peak["optimizer state"] == pytest.approx(sum(t._local_tensor.nbytes for t in state), rel=0.02)
    assert peak["compute shards"] == pytest.approx(2 * sum(n for n in shard_elements(rank)), rel=0.02)
    course = [sum(counts.values()) for counts in recorder.memory.course()]
    assert max(course) == sum(peak.values()) - peak["workspace"]
    assert [counts[ACTIVATIONS] for counts in recorder.memory.course()][-1] < 0.01 * peak[ACTIVATIONS]


def shard_elements(rank):
    return [weight.send_shape.numel() for weight in rank.sharded_weights()]


@pytest.mark.parametrize("wire, per_element", [("bf16", 6.0), ("mxfp8", 4.0625), ("nvfp4", 3.125)])
def test_the_specifications_volume_table(wire, per_element):
    """Counted from what travels of the weights of layers, one microbatch: bytes of gathers and of bf16 reductions for each
    element."""
    options = [*gtp(gtp=4), *FUSED, "--gtp.reduce_dtype=bfloat16", f"--gtp.wire_format={wire}"]
    with fake_world(4, 0):
        rank = build_rank(job(*options), 4, num_layers=1)
        events = RankStep(rank).record().events
        elements = {weight.fqn: weight.tp_local_shape.numel() for weight in rank.sharded_weights()}
    travelled = Counter()
    for event in (*starts(events, "gather"), *starts(events, "reduce")):
        travelled[event.weight] += event.num_bytes
    layers = [name for name in elements if name.startswith("layers.")]
    assert len(layers) == 7
    for name in layers:
        assert travelled[name] / elements[name] == pytest.approx(per_element, rel=2e-3)


def test_the_specifications_summary_figures():
    text = summary(job(*FUSED, "--gtp.reduce_dtype=bfloat16"), Arrangement(tp=4, gtp=8, wire="nvfp4"))
    for figure in ("32x less weight memory", "128x less on the wire", "gathers -72%", "3.1250 B", "reductions are 64%"):
        assert figure in text
    assert "reductions are 78%" in summary(job(*FUSED), Arrangement(tp=4, gtp=8, wire="nvfp4"))
    assert bytes_per_element("mxfp8") == (8.0, 1.03125) and bytes_per_element("bf16") == (16.0, 2.0)


def test_kernels_are_the_models():
    """Operations of a step are six for each parameter of a GEMM and token, and those of attention."""
    with fake_world(4, 0):
        rank = built(job(*gtp(gtp=4), *FUSED), 4)
        recorder = RankStep(rank).record()
        tokens = 2 * 64
        linears = sum(p.numel() for name, p in rank.parts[0].named_parameters() if p.dim() == 2 and "tok_" not in name)
    kernels = [event for event in recorder.events if isinstance(event, Kernel)]
    gemms = sum(kernel.flops for kernel in kernels if kernel.name == "mm")
    assert gemms == 6 * linears * tokens
    attention = [kernel for kernel in kernels if kernel.unit == "attention"]
    assert len(attention) == 2 * rank.model_args.n_layers
    assert sum(k.flops for k in attention) == (4 + 10) * rank.model_args.n_layers * 64 * 64 * 256 * 2 // 2
    assert sum(kernel.name == "rms_norm" for kernel in kernels) == 2 * rank.model_args.n_layers + 1


def test_experts_travel_and_synchronise():
    with fake_world(16, 3):
        rank = build_rank(job(*gtp(gtp=4, ep=2, egtp=2), toml=DEEPSEEK), 16)
        recorder = RankStep(rank).record()
    axes = Counter(event.axis for event in recorder.events if isinstance(event, Start))
    assert {"gtp", "egtp", "egtp_shard", "ep"} <= axes.keys()
    assert sum(isinstance(event, Sync) for event in recorder.events) == 2  # one a layer with experts
    tokens = [event for event in recorder.events if isinstance(event, Start) and event.what == "all_to_all"]
    assert {event.num_bytes for event in tokens} == {2 * 64 * 2 * 64 * 4}  # samples, tokens, top 2, width, float32


# ---- short cuts


@pytest.mark.slow
def test_depth_and_microbatches_are_extrapolated(cluster):
    options = job("--model.flavor=gtp_minimal", *FUSED, "--training.global_batch_size=16")
    arrangement = Arrangement(gtp=4)
    short = make_short_plan(options, cluster, 4, arrangement, model_shape(options))
    whole = make_plan(options, cluster, 4, arrangement)
    assert short.num_layers == 4 and whole.num_layers == 0 and whole.num_microbatches == 2
    assert short.seconds == pytest.approx(whole.seconds, rel=0.03)  # small kernels: the host has no lead at the start
    assert short.memory_bytes == pytest.approx(whole.memory_bytes, rel=1e-3)
    assert short.exposed_s == pytest.approx(whole.exposed_s, rel=0.1)
    assert short.link_bytes == pytest.approx(whole.link_bytes) and short.tokens == whole.tokens == 16 * 64


def test_a_microbatch_more_is_the_one_that_is_recorded(cluster):
    with fake_world(8, 0):
        rank = built(job(*gtp(gtp=4), *FUSED), 8)
        three, four = (RankStep(rank, number).record().events for number in (3, 4))
    grown = with_one_more(three)
    # Once more than needed, the sums of norms' gradients are made float32.
    assert 0 <= len(grown) - len(four) <= 2 * rank.model_args.n_layers + 1
    assert simulate(cluster, grown).seconds == pytest.approx(simulate(cluster, four).seconds, rel=0.02)


# ---- layout


@pytest.mark.parametrize(
    "options, world, rank, toml",
    [
        (gtp(gtp=64), 3072, 3071, DEBUG_TOML),
        (gtp(tp=2, gtp=6), 24, 23, DEBUG_TOML),
        (gtp(gtp=4, ep=2, egtp=4), 16, 5, DEEPSEEK),
    ],
)
def test_every_element_is_owned_once(options, world, rank, toml):
    with fake_world(world, rank):
        report = check_layout(build_rank(job(*options, toml=toml), world).parts)
    assert report.num_weights > 20 and report.num_owners == world and not report.faults
    assert "owned once" in str(report)


def test_faults_of_a_layout_are_found(monkeypatch):
    real = checks.owned_box

    def found(change):
        monkeypatch.setattr(checks, "owned_box", lambda *args: change(real(*args), args[-1]))
        with fake_world(8, 0):
            return check_layout(build_rank(job(*gtp(gtp=4)), 8).parts).faults

    def shrunk(box, place):
        (first, number), *rest = box
        return ((first, max(0, number - 1)), *rest)

    def moved(box, place):
        (first, number), *rest = box
        return ((max(0, first - 1), number), *rest)

    assert not found(lambda box, place: box)
    assert any("owned by nobody" in fault for fault in found(shrunk))
    assert any("owned more than once" in fault for fault in found(moved))


def test_a_cut_that_differs_from_what_is_stored_is_found(monkeypatch):
    with fake_world(8, 1):
        parts = build_rank(job(*gtp(gtp=4)), 8).parts
        from gtp_dtensor.layout import RowCut

        real = RowCut.rows_of
        monkeypatch.setattr(RowCut, "rows_of", lambda cut, rank: (real(cut, rank)[0] + (rank == 1), real(cut, rank)[1]))
        assert any("stores others" in fault for fault in check_layout(parts).faults)


# ---- pipelines


@pytest.mark.parametrize("schedule, stages", [("1F1B", 1), pytest.param("Interleaved1F1B", 2, marks=pytest.mark.slow)])
def test_pipelines_run_in_the_order_of_torch(cluster, schedule, stages):
    options = ["--training.local_batch_size=4", f"--parallelism.pipeline_parallel_schedule={schedule}", *FUSED]
    config = job(*gtp(gtp=2, pp=2), *options)
    with fake_world(4, 2):
        rank = build_rank(config, 4)
        actions = pipeline_actions(rank.schedule)
        events = RankStep(rank).record().events
        assert len(rank.parts) == stages
    for order in actions.values():
        done = Counter(action.kind for action in order)
        assert done == {"forward": 4 * stages, "backward": 4 * stages}
    plan = make_plan(config, cluster, 4, Arrangement(gtp=2, pp=2))
    assert plan.bubble_s > 0 and plan.num_microbatches == 4 and plan.tokens == 4 * 64 * 2
    assert starts(events, "gather")


# ---- search


@pytest.mark.slow
def test_arrangements_are_ranked_and_explained(cluster):
    config = job(*FUSED, "--activation_checkpoint.mode=full")
    ranking = search(config, cluster, 8, Choices(tp=(2, 3), gtp=(4, 8), pp=(1,), wire=("bf16",)))
    speeds = [plan.tokens_per_s for plan in ranking.plans]
    assert len(speeds) == 2 and speeds == sorted(speeds, reverse=True)
    reasons = dict(ranking.refused)
    assert "does not divide" in reasons[Arrangement(tp=3, gtp=4, wire="bf16")]
    assert Arrangement(tp=2, gtp=8, wire="bf16") in reasons
    text = table(ranking, 3)
    assert text.count("| `") == 2 and "not calibrated" in text and f"`{ranking.plans[0].arrangement}`" in text
    words = explain(ranking, config, 256)
    assert f"Why `{ranking.plans[0].arrangement}`" in words and "reaches" in words
    assert "no longer than 2 x hidden 256" in words
    assert "2 x hidden" not in explain(ranking, job(*FUSED), 256)  # nothing is recomputed
    found = json.loads(json.dumps(ranking_as_json(ranking)))
    assert found["plans"][0]["memory_total_bytes"] == pytest.approx(ranking.plans[0].memory_bytes)
    small = dataclasses.replace(cluster, gpu=dataclasses.replace(cluster.gpu, memory_gb=0.01))
    none = search(config, small, 8, Choices(tp=(1,), gtp=(8,), pp=(1,)))
    assert not none.plans and none.too_large and "No arrangement fits" in explain(none, config, 256)
    assert "the smallest is `gtp8`" in table(none, 3)


def test_charts_are_drawn(tmp_path, cluster):
    from titan_integration.plan import charts

    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ImportError, match="pip install matplotlib"):
            charts.draw(None, None, None, tmp_path)
        return
    config = job(*gtp(gtp=4), *FUSED)
    ranking = search(config, cluster, 8, Choices(tp=(1,), gtp=(2, 4), pp=(1,)))
    best = make_plan(config, cluster, 8, ranking.plans[0].arrangement, keeps_timeline=True)
    paths = charts.draw(config, ranking, best, tmp_path)
    assert [path.name for path in paths] == ["timeline.png", "weak_scaling.png", "memory.png"]
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in paths)


@pytest.mark.slow
def test_the_shape_of_the_specifications_weak_scaling():
    """Nothing is fitted to the figure; assumptions are in the TOML. Memory of what replicas share falls; the rest of it is
    another program's."""
    config = read_job(str(ROOT / "train_configs" / "weak_scaling_280b.toml"))
    worlds = (128, 256, 512, 1024, 2048, 3072)
    plans = weak_scaling(config, read_cluster("gb200_nvl72"), arrangements.arrangement_of(config), worlds)
    found = [100 * plan.tokens_per_s / plans[0].tokens_per_s for plan in plans]
    for ours, theirs in zip(found, (100, 98, 97, 93, 94, 93)):
        assert abs(ours - theirs) < 4, found
    memory = [plan.memory_bytes / 1e9 for plan in plans]
    assert memory == sorted(memory, reverse=True)
    # Each doubling saves about half of what the one before saved, as in the figure (15, 9, 4, 2 GB).
    saved = [one - other for one, other in zip(memory, memory[1:-1])]
    assert all(0.35 < later / earlier < 0.65 for earlier, later in zip(saved, saved[1:])), memory


# ---- calibration


def stack_options(**changes):
    sizes = {"layers": 2, "dim": 512, "ffn": 1536, "heads": 8, "kv_heads": 4, "look_ahead": 1}
    return {"mode": "fake", "world": 8, **sizes, **changes}


def measured(options, contestant, tokens):
    return Measured(options, contestant, tokens, 1.0, 1.0, 1.0, None, 28)


@pytest.mark.slow
def test_calibration_finds_the_rates_behind_measurements(tmp_path, cluster):
    """Times that a known GPU would show: predictions for sizes, shapes and formats that did not calibrate come out."""
    hidden = dataclasses.replace(
        cluster,
        efficiency=dataclasses.replace(cluster.efficiency, gemm=0.5, attention=0.3, memory=0.6),
        host=dataclasses.replace(cluster.host, launch_us=2.0, collective_us=9.0),
    )
    reports = []
    shapes = (stack_options(dim=2048, ffn=8192, heads=16, kv_heads=8), stack_options(dim=4096, ffn=8192, heads=32))
    for options in shapes:
        rows = []
        for contestant, tokens in (("none", 4096), ("gtp", 1024), ("gtp", 4096), ("gtp", 16384), ("gtp+mxfp8", 4096)):
            one = record_stack(measured(options, contestant, tokens))
            from titan_integration.plan.calibrate import without_links

            num_kernels = sum(isinstance(event, Kernel) for event in one.events)
            num_started = sum(isinstance(event, Start) for event in one.events)
            rows.append(
                {
                    "contestant": contestant,
                    "tokens": tokens,
                    "step_ms": 1e3 * simulate(without_links(hidden), one.events).seconds,
                    "host_ms": (2.0 * num_kernels + 9.0 * num_started) / 1e3,
                    "peak_allocated_gib": one.memory_bytes / 2**30,
                    "num_uses": 28,
                    "host_us_per_use": 9.0 * num_started / 28,
                }
            )
        reports.append({"options": options, "rows": rows})
    file = tmp_path / "bench.json"
    file.write_text(json.dumps({"reports": reports}))
    fitted, text = calibrate(cluster, [file])
    assert fitted.calibrated == "bench.json" and fitted.host.launch_us == pytest.approx(2.0, rel=0.05)
    assert fitted.efficiency.gemm == pytest.approx(0.5, rel=0.05) and "(calibrates)" in text
    errors = [
        float(line.split("median error ")[1].split("%")[0]) for line in text.splitlines() if "median error" in line
    ]
    assert len(errors) == 2 and errors[0] < 2 and errors[1] == 0
    assert text.count("(calibrates)") == 3


def test_calibration_reports_what_is_missing(tmp_path, cluster):
    file = tmp_path / "bench.json"
    row = {"contestant": "gtp", "tokens": 8, "step_ms": 1, "host_ms": 1, "peak_allocated_gib": 0, "num_uses": 28}
    for content, message in (
        ("[", "not a JSON file"),
        ('{"rows": []}', "has no 'options'"),
        (json.dumps({"options": {"mode": "fake"}, "rows": []}), "options.world is missing"),
        (json.dumps({"options": stack_options(), "rows": [{"contestant": "gtp"}]}), "a row has no host_ms"),
        (json.dumps({"options": stack_options(), "rows": [row]}), "needs three steps of 'gtp'"),
        (
            json.dumps({"options": stack_options(), "rows": [row | {"step_ms": 0}]}),
            "step_ms = 0: must be a number above",
        ),
        (json.dumps({"options": stack_options(), "rows": [row | {"host_ms": "1"}]}), "host_ms = '1': must be a number"),
        (json.dumps({"options": stack_options(), "rows": 3 * [row | {"host_ms": None}]}), "needs host times"),
    ):
        file.write_text(content)
        with pytest.raises(ValueError, match=message):
            calibrate(cluster, [file])
    file.write_text(json.dumps({"options": stack_options(), "rows": [row, row | {"contestant": "gtp+compiled"}]}))
    assert [one.contestant for one in read_rows(file)] == ["gtp"]


@pytest.mark.slow
@ranks(2)
def test_the_recorded_stack_is_the_one_that_runs(mesh):
    """Gathers, reductions and their bytes of bench.py's model, on two real ranks."""
    from gtp_dtensor import reset_stats

    options = stack_options(world=2)
    model = Stack(2, 512, 1536, 8, 4)
    shard_stack(model, mesh, "auto", 1, "collective")
    x = torch.randn(1, 16, 512, dtype=torch.bfloat16)
    for _ in range(3):
        reset_stats(model)
        for param in model.parameters():
            param.grad = None
        model(x).backward(torch.ones_like(x))
    found = stats(model)
    expected = planned_in_a_process(options, 16)
    assert expected == [
        found.num_forward_gathers + found.num_backward_gathers,
        found.gather_bytes,
        found.num_reductions,
        found.reduce_bytes,
    ]


def planned_in_a_process(options, tokens):
    """[gathers, their bytes, reductions, their bytes] of a plan, which has a process group of its own."""
    program = (
        "import json, sys\n"
        "from tests.test_plan import measured, record_stack, starts\n"
        f"events = record_stack(measured({options!r}, 'gtp', {tokens})).events\n"
        "kinds = [starts(events, kind) for kind in ('gather', 'reduce')]\n"
        "print(json.dumps([n for found in kinds for n in (len(found), sum(e.num_bytes for e in found))]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])
