"""scripts/bench.py and bench_titan.py measure what they say, and charts.py shows it."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import json
import math
import subprocess
import sys
from argparse import ArgumentTypeError, Namespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.harness import ranks
from tests.titan_runs import DEBUG_TOML, ROOT, environment

SCRIPTS = ROOT / "scripts"
SIZES = {"layers": 2, "dim": 32, "ffn": 64, "heads": 4, "kv_heads": 4}
OPTIONS = {
    **SIZES, "tokens": [16, 8], "mode": "cpu", "warmup": 3, "steps": 2, "host_steps": 0, "host_tokens": 4, "look_ahead": 1,
    "transport": "auto", "trace": None, "tp": 1, "dp_shard": 1, "dp_replicate": 1,
}  # fmt: skip
NUM_LINEARS = 7 * SIZES["layers"]
CPU = torch.device("cpu")


def script(name):
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    return importlib.import_module(name)


def measured(world_size, *contestants, **options):
    """Rows of contestants, and their meshes' axes."""
    bench, contestants_of = script("bench"), script("contestants")
    args, known, rows, axes = Namespace(**OPTIONS | options), {}, [], []
    for contestant in contestants:
        mesh = contestants_of.mesh_of(contestant, args, "cpu", world_size, known)
        axes.append(dict(zip(mesh.mesh_dim_names, mesh.shape)))
        rows += bench.run(contestant, args, mesh, CPU)
    return rows, axes


# ---- bench.py


@ranks(2, timeout=120.0)
def test_every_contestant_that_a_cpu_can_run(world_size):
    names = ["none", "fsdp_block+prefetch+params16", "fsdp_block+keep+registered", "fsdp_linear", "gtp+collective",
             "gtp+collective+fp8+reduce16"]  # fmt: skip
    rows, axes = measured(world_size, *names)
    assert [(row.contestant, row.tokens) for row in rows] == [(name, n) for name in names for n in OPTIONS["tokens"]]
    assert axes == [{"gtp": 2}, {"fsdp": 2}, {"fsdp": 2}, {"fsdp": 2}, {"gtp": 2}, {"gtp": 2}]
    for row in rows:
        assert row.step_ms > 0 and row.host_ms is None and row.num_uses == 2 * NUM_LINEARS
        assert row.tokens_per_s == pytest.approx(1e3 * row.tokens / row.step_ms)
    script("bench").fill_in_floor(rows)
    floor = {row.tokens: row.step_ms for row in rows[:2]}
    assert [row.over_floor for row in rows] == [None, None, *(row.step_ms / floor[row.tokens] for row in rows[2:])]
    assert len(script("bench").table(rows).splitlines()) == 1 + len(rows)


@ranks(4, timeout=120.0)
@pytest.mark.parametrize(
    "degrees, of_fsdp, of_gtp",
    [
        ({"tp": 2}, {"fsdp": 2, "tp": 2}, {"gtp": 2, "tp": 2}),
        ({"dp_replicate": 2}, {"dp_replicate": 2, "fsdp": 2}, {"dp_replicate": 2, "gtp": 2}),
        ({"dp_shard": 2}, {"fsdp": 4}, {"dp_shard": 2, "gtp": 2}),
    ],
    ids=["tp", "replicas", "optimizer shards"],
)
def test_tensor_parallelism_and_replicas(world_size, degrees, of_fsdp, of_gtp):
    rows, axes = measured(world_size, "none", "fsdp_block", "gtp+collective", tokens=[8], **degrees)
    assert axes == [of_gtp, of_fsdp, of_gtp]
    tp = degrees.get("tp", 1)
    assert all(row.tokens_per_s == pytest.approx(1e3 * 8 / tp / row.step_ms) for row in rows)
    with pytest.raises(SystemExit, match="do not divide the 4 ranks"):
        measured(world_size, "none", dp_shard=3)


@ranks(2)
def test_the_cut_stack_computes_what_the_whole_one_does(world_size):
    stack, contestants = importlib.import_module("titan_integration.plan.stack"), script("contestants")
    torch.manual_seed(0)
    whole = stack.Stack(2, 32, 64, 4, 2)
    cut = copy.deepcopy(whole)
    contestants.cut_by_tensor_parallelism(cut, init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)))
    sizes = {p._local_tensor.numel() for p in cut.parameters() if hasattr(p, "_local_tensor")}
    assert sizes == {p.numel() // 2 for p in whole.parameters() if p.dim() > 1}
    x = torch.randn(1, 8, 32)
    torch.testing.assert_close(cut(x), whole(x), rtol=1e-5, atol=1e-6)


@ranks(2, timeout=120.0)
@pytest.mark.parametrize("feature", ["step", "block"])
def test_graphs_are_measured_and_released(world_size, feature):
    """Over the stand-in: a GPU is needed for the real ones."""
    from gtp_dtensor.block_graphs import GraphedBlocks
    from tests.graph_stand_in import BlockStandIn, graphed

    contestants, made, released = script("contestants"), [], []

    def counted(graphs):
        release = graphs.release
        made.append(graphs)
        graphs.release = lambda: (release(), released.append(len(made)))
        return graphs

    before = contestants.graph_step, contestants.graph_blocks
    contestants.graph_step = lambda step, model: counted(graphed(step, model)[0])
    contestants.graph_blocks = lambda model, modules: counted(
        GraphedBlocks(model, modules, recorder=BlockStandIn(model), num_warmup_passes=2)
    )
    try:
        rows, _ = measured(world_size, f"gtp+collective+{feature}")
    finally:
        contestants.graph_step, contestants.graph_blocks = before
    assert len(rows) == 2 and released == [1, 2]  # of the first size before the second's, and those at the end
    assert all(row.num_uses == 2 * NUM_LINEARS for row in rows)


def test_memory_counts_symmetric_memory_and_from_an_empty_cache(monkeypatch):
    bench, contestants = script("bench"), script("contestants")
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: calls.append("reset"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("wait"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 << 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 5 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 7 << 20)
    monkeypatch.setattr(bench, "stats", lambda model: Namespace(symmetric_bytes=1 << 30))
    gpu = torch.device("cuda")
    bench.reset_peaks(gpu)
    assert calls == ["empty", "reset"] and bench.peaks(None, gpu) == (4.0, 6.0)
    assert contestants.empty_device(gpu) == 7.0 and calls[2:] == ["wait", "empty"]
    assert bench.peaks(None, CPU) == (0.0, 0.0) and contestants.empty_device(CPU) == 0.0


def test_a_contestant_that_is_not_what_it_is_called_is_refused():
    check = script("contestants").check_arose
    graphs = Namespace(num_replays=10, num_eager=0)
    check("gtp+collective", 0, None, 10)
    check("gtp+symmetric+step", 1, graphs, 10)
    for name, symmetric_bytes, graphs, message in (
        ("gtp+symmetric", 0, None, "no symmetric memory"),
        ("gtp+step", 0, None, "0 replays"),
        ("gtp+step", 0, Namespace(num_replays=9), "9 replays"),
        ("gtp+block", 0, Namespace(num_replays=240, num_eager=3), "3 calls without a graph"),
    ):
        with pytest.raises(RuntimeError, match=message):
            check(name, symmetric_bytes, graphs, 10)


def test_what_was_measured_stays_where_a_larger_size_fails(monkeypatch):
    bench, rows = script("bench"), []
    monkeypatch.setattr(bench, "build", lambda *args: torch.nn.Linear(1, 1))
    monkeypatch.setattr(bench, "measure", lambda contestant, model, tokens, *args: (1 / (16 - tokens), (0.0, 0.0)))
    mesh = Namespace(mesh_dim_names=("gtp",))
    with pytest.raises(ZeroDivisionError):
        for row in bench.run("none", Namespace(**OPTIONS | {"tokens": [8, 16]}), mesh, CPU):
            rows.append(row)
    assert [row.tokens for row in rows] == [8]


def test_two_backends_of_symmetric_memory_are_refused():
    check = script("contestants").check_symmetric
    check(["none", "fsdp_block+symm", "gtp+collective"])
    check(["none", "fsdp_block", "gtp+symmetric", "gtp"])
    for ours in ("gtp", "gtp+symmetric+step"):
        with pytest.raises(ArgumentTypeError, match="measure them in two calls"):
            check(["fsdp_block+prefetch+symm", ours])


def test_a_contestant_that_fails_does_not_take_the_others_with_it(tmp_path):
    """NCCL's symmetric memory, on a CPU."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
    options += [
        "--mode=fake",
        "--host-steps=0",
        "--tokens=8",
        "--contestants=fsdp_block+symm,none",
        f"--out={tmp_path}",
    ]
    result = subprocess.run(
        [sys.executable, SCRIPTS / "bench.py", *options], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1 and "FAIL: fsdp_block+symm: " in result.stdout, result.stdout + result.stderr
    report = json.loads((tmp_path / "bench.json").read_text())
    assert list(report["failures"]) == ["fsdp_block+symm"]
    assert [row["contestant"] for row in report["rows"]] == ["none"]


# ---- overlap.py


def event(cat, name, start, end, stream=7):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "pid": 0, "args": {"stream": stream}}


def test_a_traces_time_is_told_apart():
    overlap = script("overlap")
    events = [
        event("kernel", "nvjet_gemm", 0, 10),
        event("kernel", "ncclDevKernel_AllGather", 5, 15, 8),  # 5 exposed
        event("kernel", "elementwise", 20, 24),  # 5 idle before
        event("gpu_memset", "Memset (Device)", 22, 26),
        event("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 24, 30, 9),  # 4 exposed
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 28, 31, 9),  # a rank's own rows: 1 more
        event("kernel", "sum_slots", 31, 33, 10),  # 2 exposed
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 33, 35),  # computes
        event("cpu_op", "aten::mm", 0, 100),
    ]
    found = overlap.exposure(events)
    assert found == overlap.Exposure(span=35, compute=18, communication=19, exposed=12, idle=5)
    assert found.compute + found.exposed + found.idle == found.span
    assert overlap.exposure([events[-1]]) is None


# ---- bench_titan.py


@pytest.fixture(scope="module")
def titan_report(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench_titan")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [SCRIPTS / "bench_titan.py", DEBUG_TOML, f"--out={folder}", "--check", "--steps=6", "--warmup=2"]
    command += ["--contestants=fsdp2,gtp2+collective", "--training.seq_len=32", "--training.exact_grad_norm"]
    command += ["--training.dataset_path", str(ROOT / "scripts")]
    command += ["--training.dataset=text_files", "--training.local_batch_size=2", "--training.global_batch_size=4"]
    result = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, (result.stdout + result.stderr)[-6000:]
    assert "all losses agree" in result.stdout
    return json.loads((folder / "bench_titan.json").read_text())


@pytest.mark.slow
def test_titan_contestants_train_alike_and_twice_the_learning_rate_shows(titan_report):
    rows = titan_report["rows"]
    assert [row["contestant"] for row in rows] == ["fsdp2", "gtp2+collective", "fsdp2+lr2"]
    assert not titan_report["failures"] and all(len(row["losses"]) == 6 for row in rows)
    assert all(row["tokens_per_s"] == pytest.approx(1e3 * 4 * 32 / 2 / row["step_ms"]) for row in rows)
    assert rows[1]["difference"] < 1e-6 and rows[2]["difference"] > 10 * titan_report["options"]["tolerance"]


def row_of(contestant, *losses):
    return script("bench_titan").Row(contestant, 1.0, 1.0, 0.0, 0.0, 0.0, list(losses), [])


def test_losses_that_differ_and_checks_that_cannot_fail_are_found():
    compare = script("bench_titan").compare_losses
    reference = row_of("fsdp2", 8.0, 7.0)
    good = row_of("gtp2", 8.0, 7.01)
    assert compare([reference, good, row_of("fsdp2+lr2", 8.0, 6.5)], 1e-2) == []
    assert good.difference == pytest.approx(0.01 / 7)
    (far,) = compare([reference, row_of("gtp2", 8.0, 7.1)], 1e-2)
    assert "a loss is off by 0.0143" in far
    (lost,) = compare([reference, row_of("gtp2", 8.0, math.nan)], 1e-2)
    assert "off by nan" in lost
    (blind,) = compare([reference, row_of("fsdp2+lr2", 8.0, 7.01)], 1e-2)
    assert "would find nothing" in blind


def test_titan_contestants_are_read():
    bench, compare = script("bench_titan"), script("compare")
    options = bench.parse_contestant("tp2gtp2+symmetric+step+lr2", 4).options(1e-3)
    for option in ("gtp.transport=symmetric", "gtp.cuda_graph=step", "optimizer.lr=0.002", "compile.no_enable"):
        assert f"--{option}" in options
    assert "--gtp.tensor_parallel_num_weight_shards=4" in options
    for text, num_ranks, message in (
        ("gtp2+graph", 2, "'graph' is no feature; choose from compile"),
        ("gtp2", 4, "has 2 ranks, and torchrun started 4"),
        ("fsdp2+symmetric", 2, "without gtp only compile and lr2 mean something"),
    ):
        with pytest.raises(compare.UsageError, match=message):
            bench.parse_contestant(text, num_ranks)
    for on_gpu in (False, True):
        for name in bench.default_contestants(2, on_gpu).split(","):
            bench.parse_contestant(name, 2)


# ---- charts.py


def stack_report(contestants=("none", "fsdp_block", "gtp+symmetric+step"), title="H200"):
    rows = [
        {"contestant": name, "tokens": tokens, "step_ms": tokens / 40 * (1 + place), "peak_allocated_gib": 9.0 + place,
         "peak_reserved_gib": 10.0 + place, "over_floor": 1.0 + place if place else None,
         "exposed_ms": 3.21 if tokens == 2048 else None}
        for place, name in enumerate(contestants) for tokens in (4096, 2048)
    ]  # fmt: skip
    options = {"layers": 12, "tp": 2, "dp_shard": 1, "dp_replicate": 1}
    return {"title": title, "options": options, "rows": rows, "failures": {"gtp+nvfp4": "ValueError: no"}}


def test_tables():
    charts = script("charts")
    later = stack_report(["none", "fsdp_block+symm"])
    (layout,) = (reports := charts.merged([stack_report(), later]))
    assert layout == "H200; 12 blocks; tp 2"
    lines = charts.tables(reports).splitlines()
    assert lines[2].startswith("| 2,048, 4,096 tokens | step, ms | over no sharding |")
    assert [line.split(" | ")[0][2:] for line in lines[4:8]] == [
        "no sharding (bf16 parameters)",
        "FSDP2, one group a block",
        "GTP, symmetric memory, step graph",
        "FSDP2, one group a block, NCCL's symmetric memory",
    ]
    assert lines[6].split(" | ")[1:] == [
        "153.6, 307.2", "3.00, 3.00", "6,667 / 6,667", "12.0, 12.0", "11.0, 11.0", "3.2 at 2,048 |",
    ]  # fmt: skip
    assert lines[-1] == "Failed: GTP, nvfp4 wire: ValueError: no"
    assert len(charts.merged([stack_report(), stack_report(title="B200")])) == 2


@pytest.mark.slow
def test_the_titan_table(titan_report):
    text = script("charts").tables(script("charts").merged([titan_report]))
    assert "llama3 debugmodel, 32 tokens a sample, float32" in text
    assert "| GTP, collectives |" in text and "| FSDP2, learning rate x 2 |" in text


def test_what_is_no_report_is_refused(tmp_path, capsys, monkeypatch):
    charts, file = script("charts"), tmp_path / "x.json"
    for content in ("[", "[]", '{"rows": []}'):
        file.write_text(content)
        monkeypatch.setattr(sys, "argv", ["charts.py", str(file), "--table"])
        assert charts.main() == 1 and str(file) in capsys.readouterr().err


@pytest.mark.slow
def test_pictures(tmp_path, titan_report):
    charts = script("charts")
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(ImportError):
            charts.draw({}, tmp_path, "x", "svg")
        pytest.skip("matplotlib is not installed")
    contestants = [
        f"{name}+{feature}" for name in ("none", "fsdp_block", "gtp") for feature in ("a", "b", "c", "d", "e")
    ]
    reports = charts.merged([stack_report(["none", *contestants]), titan_report])
    paths = charts.draw(reports, tmp_path, "x2", "svg")
    assert [path.name for path in paths] == ["x2_step.svg", "x2_memory.svg", "x2_titan.svg", "x2_loss.svg"]
    assert all(5_000 < path.stat().st_size < 60_000 for path in paths)
    assert "GTP, collectives" in paths[3].read_text()
    with pytest.raises(charts.ReportError, match="reports of several layouts"):
        charts.draw(charts.merged([stack_report(), stack_report(title="B200")]), tmp_path, "x", "svg")
