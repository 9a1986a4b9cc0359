"""The planner's command: what it says and what it refuses."""

import json
import subprocess
import sys

import pytest
import torch

from titan_integration import cpu

cpu.install()  # before the first import of torchtitan

from tests.test_plan import FUSED, SMALL, gtp, job
from tests.titan_runs import DEBUG_TOML, ROOT, environment
from titan_integration.plan import command as commands
from titan_integration.plan.arrangement import Arrangement, make_plan
from titan_integration.plan.cluster import read_cluster
from titan_integration.plan.command import dry_run

pytestmark = pytest.mark.skipif(
    torch.accelerator.is_available(), reason="a plan is made in a process that sees no GPU, as its command sees to"
)


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "titan_integration.plan", *map(str, arguments)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_a_dry_run_of_3072_ranks():
    result = command(DEBUG_TOML, "--dry-run", "--world", 3072, "--rank", 77, *gtp(gtp=64))
    assert result.returncode == 0, result.stderr
    for text in ("rank 77 of 3072", "every logical element is owned once", "uses a step", "memory at the peak"):
        assert text in result.stdout
    assert "training would refuse this batch: training.global_batch_size = 8 is not a multiple" in result.stdout


def test_a_dry_run_keeps_gradients_back_as_the_plan_does(capsys):
    """A step of several microbatches needs memory for sums of gradients that one microbatch does not."""
    config = job(*gtp(gtp=4), *FUSED, "--training.global_batch_size=64")
    assert dry_run(config, 8, 0) == 0
    told = capsys.readouterr().out
    plan = make_plan(config, read_cluster("workstation"), 8, Arrangement(gtp=4))
    assert plan.num_microbatches == 4 and "batch: 4 microbatches of 2 x 64 tokens a step" in told
    assert plan.memory["gradients"] > 1e6
    assert f"gradients        {plan.memory['gradients'] / 1e9:10.3f} GB" in told


def test_wrong_files_and_options_name_the_field(tmp_path, monkeypatch, capsys):
    def run(*arguments):
        code = commands.main("", [str(argument) for argument in arguments])
        return code, capsys.readouterr().err

    for options, message in (
        (["--model.flavor=80B"], "model.flavor = '80B': choose one of"),
        (["--model.name=flux"], "model.name = 'flux': choose one of llama3"),
        (["--parallelism.context_parallel_degree=2"], "parallelism.context_parallel_degree is not planned yet"),
        (["--optimizer.name=Muon"], "optimizer.name = 'Muon' is not planned yet"),
        ([*gtp(gtp=1), "--training.global_batch_size=-1", "--only"], "gtp = egtp = 1"),
        ([*gtp(gtp=5), "--training.global_batch_size=-1", "--only"], "does not divide the 64 ranks"),
        ([*gtp(gtp=4), "--only"], "global_batch_size = 8 is not a multiple of 4 samples x 64 data ranks"),
        (
            [*gtp(gtp=4), "--training.global_batch_size=-1", "--gtp.transport=symmetric", "--only"],
            'transport = "symmetric" is not planned',
        ),
        (["--training.seq_len=0", "--only"], "training.seq_len = 0: must be at least 1"),
        (["--training.local_batch_size=-4", "--only"], "training.local_batch_size = -4: must be at least 1"),
        (["--training.global_batch_size=0", "--only"], "training.global_batch_size = 0: must be at least 1, or -1"),
        (["--training.steps=0"], "training.steps = 0: must be at least 1"),
        (["--parallelism.tensor_parallel_degree=0"], "parallelism.tensor_parallel_degree = 0: must be at least 1"),
        (["--gtp.tensor_parallel_num_weight_shards=-2"], "tensor_parallel_num_weight_shards = -2: must be at least 0"),
        (["--dry-run", "--world", "4", "--rank", "4"], "--rank 4: there are 4 ranks"),
        (["--json", "/nowhere/plans.json"], "--json /nowhere/plans.json: there is no such folder"),
    ):
        code, error = run(DEBUG_TOML, "--cluster", "h200x8_infiniband", *options)
        assert code == 2 and message in error, (options, error)
    bad = tmp_path / "job.toml"
    bad.write_text(DEBUG_TOML.read_text().replace("tensor_parallel_num_weight_shards", "tensor_parallel_num_shards"))
    code, error = run(bad, "--cluster", "workstation", "--only")
    assert code == 2 and "tensor_parallel_num_shards: unknown key" in error
    for text, message in (
        (
            DEBUG_TOML.read_text().replace("seq_len = 128", 'seq_len = "long"'),
            "training.seq_len = 'long': must be an integer",
        ),
        (DEBUG_TOML.read_text().replace("steps = 280", "steps = true"), "training.steps = True: must be an integer"),
        ("[model", "job.toml: not a TOML file"),
        ("", "set [gtp] tensor_parallel_num_weight_shards"),
    ):
        bad.write_text(text)
        code, error = run(bad, "--cluster", "workstation", "--only")
        assert code == 2 and message in error, error
    with pytest.raises(SystemExit):
        commands.main("", [str(DEBUG_TOML), "--cluser", "workstation"])
    for option, value, message in (
        ("--world", "0", "0 is below 1"),
        ("--gtp", "4,-2", "-2 is below 1"),
        ("--rank", "-1", "-1 is below 0"),
        ("--processes", "-1", "-1 is below 0"),
        ("--wire", "bf16,fp9", "'fp9': choose from bf16, fp8"),
    ):
        with pytest.raises(SystemExit):
            commands.main("", [str(DEBUG_TOML), "--cluster", "workstation", option, value])
        assert f"argument {option}: {message}" in capsys.readouterr().err


def test_a_world_that_no_arrangement_divides_is_told(capsys):
    options = ["--training.global_batch_size=-1", "--world", "7", "--processes", "0", "--explain"]
    assert commands.main("", [str(DEBUG_TOML), "--cluster", "workstation", *options]) == 1
    told = capsys.readouterr().out
    assert "No arrangement can run on 7 ranks" in told and "does not divide the 7 ranks" in told


def test_missing_matplotlib_is_told_before_the_planning(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(commands, "search", None)
    arguments = [str(DEBUG_TOML), "--cluster", "workstation", "--charts", str(tmp_path)]
    assert commands.main("", arguments) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


def test_weak_scaling_is_written(tmp_path):
    file = tmp_path / "scaling.json"
    options = ["--weak-scaling", "4,8", "--json", str(file), *gtp(gtp=4), *SMALL]
    assert commands.main("", [str(DEBUG_TOML), "--cluster", "h200x8_infiniband", *options]) == 0
    assert [plan["world"] for plan in json.loads(file.read_text())] == [4, 8]
