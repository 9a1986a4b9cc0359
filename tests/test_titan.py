"""torchtitan with GTP: whole jobs on CPUs, and what is refused at set-up."""

import math
import re
import shutil
import subprocess
import sys

import pytest
import torch

from tests import titan_runs
from tests.titan_runs import DEBUG_TOML, SMALL, gradients, metrics, probes, train


@pytest.fixture(scope="module")
def cache(titan_jobs, tmp_path_factory):
    """Options that share the trained tokenizer and the tokens between the jobs of this module, and a first job's
    folder."""
    folder = tmp_path_factory.mktemp("titan")
    options = [
        *SMALL,
        f"--training.token_cache_folder={folder}/tokens",
        "--training.exact_grad_norm",
        "--lr_scheduler.warmup_steps=0",
        "--metrics.no_enable_tensorboard",
    ]
    titan_jobs.run(
        folder / "single",
        1,
        *options,
        "--gtp.tensor_parallel_num_weight_shards=1",
        "--training.steps=6",
        "--checkpoint.interval=3",
        f"--debug.first_gradients_folder={folder}/single/gradients",
    )
    return folder, [*options, f"--model.hf_assets_path={folder}/single/checkpoint/tokenizer"]


def largest_difference(one, other, key):
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    "num_ranks, options",
    [
        (2, ["--gtp.tensor_parallel_num_weight_shards=2"]),
        pytest.param(
            4,
            ["--gtp.tensor_parallel_num_weight_shards=4", "--parallelism.tensor_parallel_degree=2"],
            marks=pytest.mark.slow,
        ),
        pytest.param(2, ["--activation_checkpoint.mode=full"], marks=pytest.mark.slow),
        pytest.param(
            2,
            ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["gtp2", "tp2gtp2", "full_recompute", "selective_recompute"],
)
def test_losses_and_norms_are_those_of_a_single_process(cache, titan_jobs, tmp_path, num_ranks, options):
    folder, common = cache
    run = titan_jobs.run(tmp_path, num_ranks, *common, *options, "--training.steps=6", "--checkpoint.no_enable")
    mine, single = metrics(tmp_path), metrics(folder / "single")
    assert len(mine) == 6 and largest_difference(mine, single, "loss") < 1e-6
    assert largest_difference(mine, single, "grad_norm") < 1e-6
    assert mine[-1]["loss"] < mine[0]["loss"] - 0.3  # it learns
    described = re.search(r"GTP.*calculate_per_token_loss=True.*", run.output)
    assert described and "look_ahead=1" in described.group()


PROBED = "--experimental.custom_import=tests.titan_probe"
INTERLEAVED = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"]
ZERO_BUBBLE = ["--parallelism.pipeline_parallel_degree=2", "--parallelism.pipeline_parallel_schedule"]


def assert_gradients_agree(folder, reference):
    """Every parameter's whole gradient of the first step, relative to its norm."""
    mine, single = gradients(folder), gradients(reference)
    assert mine.keys() == single.keys() and len(single) > 50
    for name, grad in single.items():
        assert (mine[name].double() - grad.double()).norm() < 1e-5 * grad.double().norm(), name


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "num_ranks, options, num_groups",
    [
        # Two microbatches a step: replicas reduce in the second.
        slow(4, ["--parallelism.data_parallel_shard_degree=2", "--training.local_batch_size=1"], 5),
        slow(4, ["--parallelism.context_parallel_degree=2"], 7),
        slow(4, ["--parallelism.data_parallel_replicate_degree=2", "--training.local_batch_size=1"], 5),
        slow(4, ["--parallelism.context_parallel_degree=2", "--parallelism.context_parallel_load_balancer=None"], 7),
        slow(
            8,
            [
                "--parallelism.data_parallel_replicate_degree=2",
                "--parallelism.tensor_parallel_degree=2",
                "--gtp.tensor_parallel_num_weight_shards=4",
                "--training.local_batch_size=1",
            ],
            7,
        ),
        slow(
            8,
            [
                "--parallelism.context_parallel_degree=2",
                "--parallelism.data_parallel_shard_degree=2",
                "--training.local_batch_size=1",
            ],
            7,
        ),
    ],
    ids=["dps2gtp2", "cp2gtp2", "dpr2gtp2", "cp2gtp2_contiguous", "dpr2tp2gtp2", "dps2cp2gtp2"],
)
def test_replicas_beside_gtp_change_nothing(cache, titan_jobs, tmp_path, num_ranks, options, num_groups):
    """Losses and norms of four steps of two microbatches, gradients of the first."""
    folder, common = cache
    options = [*common, PROBED, f"--debug.first_gradients_folder={tmp_path}/gradients", *options]
    titan_jobs.run(tmp_path, num_ranks, *options, "--training.steps=4", "--checkpoint.no_enable")
    mine, single = metrics(tmp_path), metrics(folder / "single")[:4]
    assert largest_difference(mine, single, "loss") < 1e-6 and largest_difference(mine, single, "grad_norm") < 1e-6
    assert_gradients_agree(tmp_path, folder / "single")
    ranks = probes(tmp_path)
    assert len(ranks) == num_ranks
    for rank in ranks:
        counted = rank["stats"]
        assert counted["num_reductions"] == 2 * 4 * counted["num_sharded_weights"] > 0
        assert counted["num_replica_reductions"] == 4 * counted["num_sharded_weights"] and counted["num_pending"] == 0
        # All ranks', each axis' where torchtitan communicates on it, and the library's own for reductions.
        assert len(rank["groups"]) == num_groups, rank["groups"]
    # Every group, the library's own included, gives up within the time that the job names.
    assert {timeout for rank in ranks for _, timeout in rank["groups"]} == {100.0}


@pytest.mark.parametrize(
    "num_ranks, options",
    [
        slow(4, INTERLEAVED),
        slow(4, ["--parallelism.pipeline_parallel_degree=2"]),
        slow(4, [*ZERO_BUBBLE, "InterleavedZeroBubble"]),
        slow(4, [*ZERO_BUBBLE, "ZBVZeroBubble"]),
        slow(8, [*INTERLEAVED, "--parallelism.data_parallel_shard_degree=2", "--training.local_batch_size=2"]),
        slow(8, [*INTERLEAVED, "--parallelism.tensor_parallel_degree=2", "--gtp.tensor_parallel_num_weight_shards=4"]),
    ],
    ids=["interleaved", "1f1b", "zero_bubble", "zero_bubble_v", "interleaved_dps2", "interleaved_tp2"],
)
def test_pipelines_with_gtp_continue_a_single_process(cache, titan_jobs, tmp_path, num_ranks, options):
    """From step 3 of one process, its optimizer state included; each wgrad and each reduction once a microbatch."""
    folder, common = cache
    shutil.copytree(folder / "single" / "checkpoint" / "step-3", tmp_path / "checkpoint" / "step-3")
    run = titan_jobs.run(
        tmp_path, num_ranks, *common, PROBED, *options, "--training.steps=6", "--checkpoint.interval=100"
    )
    mine, single = metrics(tmp_path), metrics(folder / "single")[3:]
    assert [record["step"] for record in mine] == [4, 5, 6]
    assert largest_difference(mine, single, "loss") < 1e-6 and largest_difference(mine, single, "grad_norm") < 1e-6
    assert "loss:" in run.output  # also where the loss is not on rank 0
    num_microbatches = 3 * 8 // (num_ranks // 2 // (2 if "--parallelism.tensor_parallel_degree=2" in options else 1))
    for rank in probes(tmp_path):
        counted = rank["stats"]
        assert counted["num_reductions"] == num_microbatches * counted["num_sharded_weights"] > 0
        assert counted["num_replica_reductions"] in (0, 3 * counted["num_sharded_weights"])


@pytest.mark.parametrize("implementation", [slow("fused"), slow("for-loop")])
def test_optimizers_step_on_any_mix_of_meshes(cache, titan_jobs, tmp_path, implementation):
    folder, common = cache
    options = [f"--optimizer.implementation={implementation}", "--parallelism.data_parallel_shard_degree=2"]
    titan_jobs.run(tmp_path, 4, *common, *options, "--training.steps=4", "--checkpoint.no_enable")
    mine, single = metrics(tmp_path), metrics(folder / "single")[:4]
    assert largest_difference(mine, single, "loss") < 1e-6 and largest_difference(mine, single, "grad_norm") < 1e-6


def test_a_step_whose_norm_is_not_finite_is_skipped_by_all_ranks(cache, titan_jobs, tmp_path):
    """One rank's shard of one gradient has a NaN in step 2."""
    folder, common = cache
    options = [*common, PROBED, "--gtp.skip_nonfinite_steps", "--training.steps=4", "--checkpoint.no_enable"]
    run = titan_jobs.run(tmp_path, 2, *options, env={"PROBE_NAN_STEP": "2"})
    mine, single = metrics(tmp_path), metrics(folder / "single")
    assert [rank["changed"] for rank in probes(tmp_path)] == [[True, False, True, True]] * 2
    assert math.isnan(mine[1]["grad_norm"]) and all(math.isfinite(mine[i]["grad_norm"]) for i in (0, 2, 3))
    assert mine[1]["loss"] == pytest.approx(single[1]["loss"], rel=1e-6)
    assert abs(mine[2]["loss"] - single[2]["loss"]) > 1e-4  # the same batch, without the update of step 2
    warnings = re.findall(r"Step (\d+) skipped.* (\d+)$", run.output, re.MULTILINE)
    assert warnings == [("2", "1")]


def test_a_twofold_learning_rate_shows(cache, titan_jobs, tmp_path):
    folder, common = cache
    titan_jobs.run(tmp_path, 2, *common, "--optimizer.lr=4e-3", "--training.steps=3", "--checkpoint.no_enable")
    assert largest_difference(metrics(tmp_path), metrics(folder / "single")[:3], "loss") > 1e-3


@pytest.mark.slow  # tests/test_titan_checkpoint.py has the like without torchrun
def test_a_checkpoint_resumes_at_another_degree(cache, titan_jobs, tmp_path):
    """Three steps on two ranks, three more on four: the losses and norms of six steps on one."""
    folder, common = cache
    titan_jobs.run(tmp_path, 2, *common, "--training.steps=3", "--checkpoint.interval=3")
    titan_jobs.run(
        tmp_path,
        4,
        *common,
        "--training.steps=6",
        "--checkpoint.interval=100",
        "--gtp.tensor_parallel_num_weight_shards=4",
        "--parallelism.tensor_parallel_degree=2",
    )
    mine, single = metrics(tmp_path), metrics(folder / "single")
    assert [record["step"] for record in mine] == [1, 2, 3, 4, 5, 6]
    assert largest_difference(mine, single, "loss") < 1e-6 and largest_difference(mine, single, "grad_norm") < 1e-6


def test_off_is_torchtitan_bit_for_bit(cache, tmp_path):
    """Shards = TP: parameters, random state, state dict and 20 losses equal those of untouched torchtitan."""
    _, common = cache
    runs = {}
    for mode in ("stock", "ours"):  # side by side
        dump = tmp_path / mode
        options = [
            f"--job.config_file={DEBUG_TOML}",
            f"--job.dump_folder={dump}",
            *common,
            "--checkpoint.no_enable",
            "--training.no_exact_grad_norm",
            "--gtp.tensor_parallel_num_weight_shards=1",
            "--training.steps=20",
        ]
        environment = {
            **titan_runs.environment(),
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
        command = [sys.executable, "-m", "tests.titan_runs", mode, str(tmp_path / f"{mode}.pt"), *options]
        runs[mode] = subprocess.Popen(
            command, cwd=titan_runs.ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    for run in runs.values():
        output, _ = run.communicate(timeout=300)
        assert run.returncode == 0, output[-6000:]
    stock, ours = (torch.load(tmp_path / f"{mode}.pt") for mode in runs)
    assert len(ours["losses"]) == 20 * 4  # four microbatches a step
    for key in ("initial", "parameters"):
        assert list(ours[key]) == list(stock[key])
        for name, value in ours[key].items():
            assert torch.equal(value, stock[key][name]), (key, name)
    assert all(torch.equal(a, b) for a, b in zip(ours["losses"], stock["losses"], strict=True))
    assert torch.equal(ours["rng"], stock["rng"])
    assert ours["state_dict"] == stock["state_dict"] and ours["types"] == stock["types"]
    assert ours["classes"] == stock["classes"]
    assert set(ours["stats"].values()) == {0}
    assert ours["optimizer"].keys() == stock["optimizer"].keys()
    for name, value in ours["optimizer"].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, stock["optimizer"][name]), name


@pytest.mark.slow
def test_a_dead_rank_takes_the_others_down(cache, tmp_path):
    _, common = cache
    killer = tmp_path / "killer.py"
    killer.write_text(
        "import os, signal\n"
        "from titan_integration.trainer import GTPTrainer\n"
        "step = GTPTrainer.train_step\n"
        "def train_step(self, data):\n"
        "    if self.step == 2 and os.environ['RANK'] == '1':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "    step(self, data)\n"
        "GTPTrainer.train_step = train_step\n"
    )
    environment = titan_runs.environment()
    environment["PYTHONPATH"] = f"{tmp_path}:{environment['PYTHONPATH']}"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "-m",
        "titan_integration.train",
        f"--job.config_file={DEBUG_TOML}",
        f"--job.dump_folder={tmp_path}/out",
        *common,
        "--training.steps=5",
        "--checkpoint.no_enable",
        "--experimental.custom_import=killer",
    ]
    run = subprocess.run(command, cwd=titan_runs.ROOT, env=environment, capture_output=True, text=True, timeout=200)
    output = run.stdout + run.stderr
    assert run.returncode != 0
    assert re.search(r"Signal 9 \(SIGKILL\)|exitcode\s*:\s*-9", output), output[-3000:]


@pytest.mark.parametrize(
    "num_ranks, options, message",
    [
        slow(
            2,
            ["--gtp.tensor_parallel_num_weight_shards=1", "--parallelism.tensor_parallel_degree=2"],
            r"tensor_parallel_num_weight_shards = 1.*tensor_parallel_degree = 2",
        ),
        slow(
            2,
            ["--gtp.tensor_parallel_num_weight_shards=3", "--parallelism.tensor_parallel_degree=2"],
            r"tensor_parallel_num_weight_shards = 3.*(divisible|multiple)",
        ),
        slow(2, ["--gtp.tensor_parallel_num_weight_shards=3"], r"does not divide the 2 ranks.*start 3 ranks"),
        slow(
            4,
            ["--parallelism.data_parallel_shard_degree=1"],
            r"gtp 2 = 2 leaves idle ranks among the 4 ranks.*degree to 2",
        ),
        slow(
            4,
            ["--parallelism.expert_parallel_degree=2"],
            r"expert_parallel_degree = 2.*not supported together with gtp",
        ),
        slow(
            4,
            ["--parallelism.context_parallel_degree=2", "--model.flavor=debugmodel_varlen_attn"],
            r"context_parallel_degree = 2 \(axis cp\) with attention 'varlen'",
        ),
        slow(2, ["--parallelism.pipeline_parallel_degree=16"], r"gtp 2 .*= 32 does not divide the 2 ranks"),
        slow(1, ["--gtp.look_ahed=2"], r"look_ahed"),
        slow(2, ["--gtp.exclude", "layers.9.*"], r"exclude.*'layers\.9\.\*' matches nothing"),
        slow(2, ["--gtp.wire_format=mxfp9"], r"mxfp9.*choose one of.*mxfp8"),
        slow(
            2,
            ["--gtp.wire_format_overrides", "layers.9.*", "fp8"],
            r"wire_format_overrides.*'layers\.9\.\*' matches nothing",
        ),
        slow(2, ["--gtp.wire_format_overrides", "layers.1.*", "fp9"], r"wire_format_overrides.*'fp9'.*choose one of"),
        slow(
            2,
            ["--model.converters", "quantize.linear.fp8"],
            r"no converter 'quantize\.linear\.fp8'.*quantize\.linear\.float8",
        ),
        slow(
            2,
            ["--model.converters", "quantize.grouped_mm.float8"],
            r"\[quantize\.grouped_mm\.float8\] fqns = \[\] names no routed experts, and this model has none",
        ),
        slow(2, ["--gtp.no_calculate_per_token_loss"], r"calculate_per_token_loss"),
        slow(2, ["--parallelism.fsdp_reshard_after_forward=never"], r"fsdp_reshard_after_forward"),
        slow(2, ["--training.enable_cpu_offload"], r"enable_cpu_offload"),
    ],
    ids=[
        "below_tp",
        "not_divisible",
        "not_dividing_ranks",
        "idle_ranks",
        "ep",
        "cp_varlen",
        "pp_ranks",
        "unknown_key",
        "exclude",
        "wire_format",
        "override",
        "override_format",
        "converter",
        "grouped_converter",
        "mean_loss",
        "reshard",
        "offload",
    ],
)
def test_bad_input_is_refused_by_name(cache, tmp_path, num_ranks, options, message):
    _, common = cache
    run = train(tmp_path, num_ranks, *common, "--training.steps=1", "--checkpoint.no_enable", *options, check=False)
    assert run.returncode != 0
    assert re.search(message, run.stdout + run.stderr), (run.stdout + run.stderr)[-3000:]


def test_an_unknown_key_of_the_toml_is_refused_with_a_hint(tmp_path):
    toml = tmp_path / "bad.toml"
    toml.write_text(DEBUG_TOML.read_text().replace("[gtp]", "[gtp]\nlook_ahaed = 2"))
    run = train(tmp_path / "out", 1, config=toml, check=False)
    assert run.returncode != 0 and "did you mean 'look_ahead'" in run.stdout + run.stderr
