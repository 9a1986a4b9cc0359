"""torchtitan's checkpoints: whole jobs that stop, are killed, and continue, there or elsewhere."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.titan_jobs import TitanJobs
from tests.titan_runs import DEBUG_TOML, ROOT, SMALL, metrics

MOE_TOML = ROOT / "train_configs" / "deepseek_v3_debug.toml"
NUM_STEPS, STOP = 4, 2


def slow(*values, **options):
    return pytest.param(*values, **options, marks=pytest.mark.slow)


def degrees(tp=1, gtp=1, pp=1, ep=1, egtp=1):
    """Options for all axes but dp_shard, which takes the other ranks."""
    return [
        f"--parallelism.tensor_parallel_degree={tp}",
        f"--parallelism.pipeline_parallel_degree={pp}",
        f"--parallelism.expert_parallel_degree={ep}",
        f"--gtp.tensor_parallel_num_weight_shards={tp * gtp}",
        f"--gtp.expert_tensor_parallel_num_weight_shards={egtp}",
    ]


TOPOLOGIES = {
    "single": (1, degrees()),
    "gtp2": (2, degrees(gtp=2)),
    "gtp4": (4, degrees(gtp=4)),
    "dps2gtp2": (4, degrees(gtp=2)),
    "tp2gtp2": (4, degrees(tp=2, gtp=2)),
    "pp2gtp2": (4, degrees(pp=2, gtp=2)),
    "pp2tp2gtp2": (8, degrees(tp=2, gtp=2, pp=2)),
    "fsdp4": (4, degrees()),
    "ep2egtp2gtp4": (4, degrees(gtp=4, ep=2, egtp=2)),
    "egtp4gtp4": (4, degrees(gtp=4, egtp=4)),
    "ep4fsdp4": (4, degrees(ep=4)),
}


class Jobs:
    """Jobs that share a tokenizer and its tokens, and what was run once for several tests."""

    def __init__(self, jobs: TitanJobs, root: Path) -> None:
        self._jobs, self._root = jobs, root
        self._options = [
            *SMALL,
            f"--training.token_cache_folder={root}/tokens",
            "--training.exact_grad_norm",
            "--lr_scheduler.warmup_steps=2",
            "--metrics.no_enable_tensorboard",
        ]
        self._done: dict[str, Path] = {}
        first = self.once("tokenizer", "single", "--training.steps=1")
        self._options.append(f"--model.hf_assets_path={first}/checkpoint/tokenizer")

    def run(self, folder: Path, topology: str, *options: str, config=DEBUG_TOML, **others):
        num_ranks, axes = TOPOLOGIES[topology]
        steps = [f"--training.steps={NUM_STEPS}"]
        return self._jobs.run(folder, num_ranks, *self._options, *axes, *steps, *options, config=config, **others)

    def once(self, name: str, topology: str, *options: str, **others) -> Path:
        """The folder of a job that is run the first time it is asked for."""
        if name not in self._done:
            self.run(self._root / name, topology, *options, **others)
            self._done[name] = self._root / name
        return self._done[name]


@pytest.fixture(scope="module")
def jobs(titan_jobs, tmp_path_factory):
    return Jobs(titan_jobs, tmp_path_factory.mktemp("titan_checkpoint"))


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in metrics(folder)]


def differences(mine: list[dict], expected: list[dict]) -> dict[str, float]:
    """The largest of each figure, relative."""
    assert [record["step"] for record in mine] == [record["step"] for record in expected]
    return {
        key: max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(mine, expected))
        for key in ("loss", "grad_norm", "lr", "num_tokens")
    }


EVERY_STEP = ["--checkpoint.interval=1", "--checkpoint.keep_latest_k=0"]
DEEPSEEK = {"config": MOE_TOML}


@pytest.mark.parametrize(
    "mode, source, config",
    [
        slow("async", "gtp2", {}),
        slow("disabled", "tp2gtp2", {}),
        slow("async", "pp2gtp2", {}),
        slow("async", "ep2egtp2gtp4", DEEPSEEK),
    ],
)
def test_saves_disturb_nothing_and_a_resume_is_the_uninterrupted_run(jobs, tmp_path, mode, source, config):
    """Bit by bit, on one topology: data, learning rates, optimizer and random state included."""
    saving = jobs.once(f"{mode}_{source}", source, *EVERY_STEP, f"--checkpoint.async_mode={mode}", **config)
    uninterrupted = jobs.once(f"plain_{source}", source, "--checkpoint.no_enable", **config)
    assert losses(saving) == losses(uninterrupted) and len(set(losses(saving))) == NUM_STEPS
    checkpoints = sorted(path.name for path in (saving / "checkpoint").glob("step-*"))
    assert checkpoints == [f"step-{step}" for step in range(1, NUM_STEPS + 1)]
    shutil.copytree(saving / "checkpoint" / f"step-{STOP}", tmp_path / "checkpoint" / f"step-{STOP}")
    jobs.run(tmp_path, source, f"--checkpoint.async_mode={mode}", **config)
    assert losses(tmp_path) == losses(uninterrupted)[STOP:]
    assert differences(metrics(tmp_path), metrics(uninterrupted)[STOP:]) == dict.fromkeys(
        ("loss", "grad_norm", "lr", "num_tokens"), 0
    )


@pytest.mark.parametrize(
    "source, destination",
    [
        ("gtp2", "tp2gtp2"),
        slow("gtp4", "tp2gtp2"),
        slow("gtp4", "dps2gtp2"),
        slow("gtp4", "single"),
        slow("gtp4", "fsdp4"),
        slow("gtp4", "pp2gtp2"),
        slow("fsdp4", "gtp4"),
        slow("pp2gtp2", "gtp4"),
        slow("pp2tp2gtp2", "single"),
        slow("ep2egtp2gtp4", "egtp4gtp4"),
        slow("egtp4gtp4", "ep4fsdp4"),
        slow("ep4fsdp4", "ep2egtp2gtp4"),
    ],
)
def test_a_run_continues_on_another_topology(jobs, tmp_path, source, destination):
    config = DEEPSEEK if "ep" in source or "eg" in source else {}
    saving = jobs.once(f"async_{source}", source, *EVERY_STEP, "--checkpoint.async_mode=async", **config)
    shutil.copytree(saving / "checkpoint" / f"step-{STOP}", tmp_path / "checkpoint" / f"step-{STOP}")
    jobs.run(tmp_path, destination, **config)
    found = differences(metrics(tmp_path), metrics(saving)[STOP:])
    assert found["loss"] < 1e-6 and found["grad_norm"] < 1e-6 and found["lr"] == found["num_tokens"] == 0


HF = ["--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"]
NO_CHANGE = ["--training.steps=1", "--optimizer.lr=0", "--optimizer.weight_decay=0"]


@pytest.mark.parametrize(
    "model, flavor, topologies",
    [
        slow("deepseek_v3", "gtp_debug", ["ep2egtp2gtp4"]),
        slow("llama3", "debugmodel", ["gtp4", "tp2gtp2", "pp2gtp2"]),
        slow("deepseek_v3", "gtp_debug_q_lora", ["egtp4gtp4", "ep4fsdp4"]),
        slow("qwen3", "gtp_debug", ["ep2egtp2gtp4"]),
        slow("qwen3", "gtp_debug_tied", ["gtp4"]),
        slow("llama4", "gtp_debug", ["ep2egtp2gtp4"]),
    ],
)
def test_hugging_face_files_are_those_of_an_unsharded_run(jobs, tmp_path, model, flavor, topologies):
    """From a seed checkpoint to files in Hugging Face format, and from those to a run; weights bit by bit."""
    options = [f"--model.name={model}", f"--model.flavor={flavor}"]
    seed = jobs.once(
        f"seed_{model}_{flavor}", "single", *options, "--checkpoint.create_seed_checkpoint", config=MOE_TOML
    )
    files = {}
    for topology in ("single", *topologies):
        from_seed = f"--checkpoint.initial_load_path={seed}/checkpoint/step-0"
        jobs.run(tmp_path / topology, topology, *options, *NO_CHANGE, *HF, from_seed, config=MOE_TOML)
        files[topology] = load_file(tmp_path / topology / "checkpoint" / "step-1" / "model-00001-of-00001.safetensors")
    expected = files.pop("single")
    assert any("experts" in name for name in expected) == ("gtp_debug" in flavor and "tied" not in flavor)
    for tensors in files.values():
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    from_files = f"--checkpoint.initial_load_path={tmp_path}/single/checkpoint/step-1"
    for topology in ("single", topologies[0]):
        shorter = ["--training.steps=2", "--checkpoint.initial_load_in_hf", from_files]
        jobs.run(tmp_path / f"{topology}_again", topology, *options, *shorter, config=MOE_TOML)
    found = differences(metrics(tmp_path / f"{topologies[0]}_again"), metrics(tmp_path / "single_again"))
    assert found["loss"] < 1e-6 and found["grad_norm"] < 1e-6


@pytest.mark.parametrize("mode, killed", [slow("disabled", "1"), slow("async", "0"), slow("async", "0,1")])
def test_a_run_killed_in_a_save_continues_from_the_save_before(jobs, tmp_path, mode, killed):
    """In the second save over a folder that was whole, of a run that went back."""
    saving = jobs.once("async_gtp2", "gtp2", *EVERY_STEP, "--checkpoint.async_mode=async")
    for step in range(1, NUM_STEPS):
        shutil.copytree(saving / "checkpoint" / f"step-{step}", tmp_path / "checkpoint" / f"step-{step}")
    options = [*EVERY_STEP, f"--checkpoint.async_mode={mode}", "--comm.train_timeout_seconds=20"]
    faults = {"KILL_IN_SAVE": "2", "KILLED_RANKS": killed}
    back = ["--checkpoint.load_step=1", "--experimental.custom_import=tests.titan_faults"]
    job = jobs.run(tmp_path, "gtp2", *options, *back, env=faults, check=False)
    assert -9 in job.exit_codes and "Going back to step 1" in job.output
    assert (tmp_path / "checkpoint" / "step-3").is_dir()
    assert not (tmp_path / "checkpoint" / "step-3" / ".metadata").exists()
    job = jobs.run(tmp_path, "gtp2", *options)
    assert re.search(r"Passing over checkpoint \S+step-3: its save did not finish", job.output)
    assert "Training starts at step 3" in job.output
    assert losses(tmp_path)[-2:] == losses(saving)[-2:]


@pytest.mark.slow
def test_torchtitans_own_data_sets_continue_on_the_same_number_of_ranks(jobs, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    lines = [f'{{"text": "{" ".join(str(n * m) for m in range(60))}"}}' for n in range(400)]
    (text / "text.json").write_text("\n".join(lines))
    data = ["--training.dataset=c4_test", f"--training.dataset_path={text}"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    folder = tmp_path / "run"
    jobs.run(folder, "dps2gtp2", *data, *EVERY_STEP, env=offline)
    for name, topology in (("gtp4", "gtp4"), ("tp2gtp2", "tp2gtp2")):
        shutil.copytree(folder / "checkpoint" / f"step-{STOP}", tmp_path / name / "checkpoint" / f"step-{STOP}")
        job = jobs.run(tmp_path / name, topology, *data, env=offline, check=name == "gtp4")
    assert losses(tmp_path / "gtp4") == pytest.approx(losses(folder)[STOP:], rel=1e-6)
    assert any(job.exit_codes)
    assert re.search(r"that of 4 data-parallel ranks .*this job has 2.*exclude_from_loading dataloader", job.output)
    anew = ["--checkpoint.exclude_from_loading", "dataloader"]
    jobs.run(tmp_path / "tp2gtp2", "tp2gtp2", *data, *anew, env=offline)
    assert [record["step"] for record in metrics(tmp_path / "tp2gtp2")] == [3, 4]
