"""torchtitan's checkpoint manager, ours in its place, in one process: what it saves, loads, keeps and refuses."""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils.data import IterableDataset

from titan_integration import cpu

cpu.install()  # before the first import of torchtitan

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.config.job_config import Checkpoint, LRScheduler, Optimizer
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

from titan_integration.checkpoint import GTPCheckpointManager, check_checkpoint
from titan_integration.hugging_face import check_names
from titan_integration.optimizer import build_optimizers


@pytest.fixture
def alone():
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Tokens(IterableDataset):
    def __init__(self) -> None:
        self.position = 0

    def __iter__(self):
        while True:
            self.position += 1
            yield torch.full((4,), float(self.position))

    def state_dict(self):
        return {"token_buffer": [self.position], "sample_idx": self.position}

    def load_state_dict(self, state):
        self.position = state["sample_idx"]


class Positions:
    """Has one state for all ranks, as our own loader."""

    def state_dict(self):
        return {"position": 1, "order": "x"}

    def load_state_dict(self, state):
        pass


class Run:
    """What torchtitan's trainer has, as small as can be."""

    def __init__(
        self,
        folder: Path,
        *,
        seed=0,
        loader=None,
        size=3,
        manager=GTPCheckpointManager,
        model=None,
        sd_adapter=None,
        **settings,
    ) -> None:
        torch.manual_seed(seed)
        self.model = model or nn.Sequential(nn.Linear(4, size), nn.Linear(size, 2))
        self.optimizers = build_optimizers([self.model], Optimizer(implementation="for-loop", lr=0.1), None)
        self.schedulers = build_lr_schedulers(self.optimizers, LRScheduler(warmup_steps=5), 10)
        self.loader = ParallelAwareDataloader(Tokens(), 0, 1, batch_size=1) if loader is None else loader
        self.step, self.ntokens_seen = 0, 0
        ours = {"gathers_for_hf": True} if manager is GTPCheckpointManager else {}
        self.manager = manager(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self},
            checkpoint_config=Checkpoint(**{"enable": True, "interval": 1, "last_save_model_only": False} | settings),
            sd_adapter=sd_adapter,
            base_folder=str(folder),
            **ours,
        )

    def state_dict(self):
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state):
        self.step = state["step"]

    def train(self, num_steps: int, saves=True) -> list:
        """Takes steps; returns the model's weights after them."""
        batches = iter(self.loader)
        for _ in range(num_steps):
            self.optimizers.zero_grad()
            self.model(next(batches)).square().sum().backward()
            self.optimizers.step()
            self.schedulers.step()
            self.step += 1
            if saves:
                self.manager.save(self.step)
        return self.weights()

    def weights(self) -> list:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def path_of(folder: Path, step: int) -> Path:
    return folder / "checkpoint" / f"step-{step}"


def equal(one: list, other: list) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def truncate(folder: Path) -> None:
    file = next(folder.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])


def unfinish(folder: Path) -> None:
    (folder / ".metadata").unlink()


@pytest.mark.parametrize("first_is_skipped", [False, True])
def test_a_save_before_the_first_step_of_an_optimizer_disturbs_nothing(alone, tmp_path, first_is_skipped):
    expected = Run(tmp_path / "other").train(3, saves=False)
    run = Run(tmp_path)
    if first_is_skipped:  # gradients are there
        for parameter in run.model.parameters():
            parameter.grad = torch.ones_like(parameter)
    run.manager.save(0, last_step=True)
    assert (run.model[0].weight.grad is not None) == first_is_skipped
    assert equal(run.train(3), expected)
    # What was saved is what the first step starts from: a run from there is the same.
    again = Run(tmp_path / "again", seed=1, initial_load_path=str(path_of(tmp_path, 0)), initial_load_model_only=False)
    assert again.manager.load() and equal(again.train(3), expected)
    # The trap is armed: a state dict alone counts as a step.
    disturbed = Run(tmp_path / "disturbed")
    disturbed.optimizers.state_dict()
    assert not equal(disturbed.train(3, saves=False), expected)


def test_a_job_continues_from_the_newest_whole_checkpoint(alone, tmp_path, caplog):
    run = Run(tmp_path)
    expected = run.train(2)
    run.train(3)
    unfinish(path_of(tmp_path, 5))
    truncate(path_of(tmp_path, 4))
    next(path_of(tmp_path, 3).glob("*.distcp")).unlink()
    (tmp_path / "checkpoint" / "step-9.old").mkdir()
    resumed = Run(tmp_path, seed=1)
    assert resumed.manager.load() and resumed.step == 2 and equal(resumed.weights(), expected)
    passed_over = [text for text in caplog.messages if text.startswith("Passing over")]
    assert [re.search(r"step-(\d)", text)[1] for text in passed_over] == ["5", "4", "3"]
    for text, reason in zip(passed_over, ("its save did not finish", r"is truncated", r"is missing")):
        assert re.search(reason, text), text
    # Continuing gives the same as never stopping.
    assert equal(resumed.train(3, saves=False), run.weights())


def test_where_no_checkpoint_is_whole(alone, tmp_path):
    Run(tmp_path).train(2)
    for step in (1, 2):
        unfinish(path_of(tmp_path, step))
    assert Run(tmp_path).manager.load() is False  # a job that was killed in its first save starts again
    Run(tmp_path / "elsewhere").train(1)
    initial = {"initial_load_path": str(path_of(tmp_path / "elsewhere", 1))}
    for folder in (tmp_path, tmp_path / "new"):  # with the initial load that it began with
        run = Run(folder, seed=1, **initial)
        assert run.manager.load() and run.step == 0
        assert equal(run.weights(), Run(tmp_path / "elsewhere").train(1, saves=False))
    shutil.copytree(path_of(tmp_path / "elsewhere", 1), path_of(tmp_path, 3))
    truncate(path_of(tmp_path, 3))
    with pytest.raises(
        ValueError, match=r"no whole checkpoint, and these were saved whole once(.|\n)*step-3: (.|\n)*trunc"
    ):
        Run(tmp_path, **initial).manager.load()


def test_a_step_that_is_named(alone, tmp_path, caplog):
    run = Run(tmp_path)
    run.train(3)
    back = Run(tmp_path, seed=1)
    assert back.manager.load(2) and back.step == 2
    assert "Going back to step 2" in caplog.text and "up to step 3" in caplog.text
    with pytest.raises(FileNotFoundError, match=r"load_step = 7: .*no such step; there is 1, 2, 3"):
        back.manager.load(7)
    with pytest.raises(FileNotFoundError, match=r"load_step = 7: .*there is none"):
        Run(tmp_path / "new").manager.load(7)
    unfinish(path_of(tmp_path, 2))
    with pytest.raises(FileNotFoundError, match="the save into it did not finish"):
        back.manager.load(2)


def test_a_checkpoint_of_the_model_alone(alone, tmp_path):
    run = Run(tmp_path, last_save_model_only=True, export_dtype="bfloat16")
    run.train(2)
    run.manager.save(3, last_step=True)
    message = r"has no optimizer, lr_scheduler, dataloader, train_state, .*load_step to one that can be \(1, 2\)"
    with pytest.raises(ValueError, match=message):
        Run(tmp_path, seed=1).manager.load()
    rounded = [weight.bfloat16().float() for weight in run.weights()]
    lacking = ["optimizer", "lr_scheduler", "dataloader", "train_state"]
    for other in (
        Run(tmp_path, seed=1, exclude_from_loading=lacking),
        Run(tmp_path / "new", seed=1, initial_load_path=str(path_of(tmp_path, 3))),
    ):
        assert other.manager.load() and equal(other.weights(), rounded) and other.step == 0
    (path_of(tmp_path, 4)).mkdir()
    (path_of(tmp_path, 4) / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"step-4 is a model in Hugging Face format.*\(1, 2\)"):
        Run(tmp_path).manager.load()


def test_what_does_not_fit_is_not_loaded(alone, tmp_path):
    Run(tmp_path).train(1)
    other = Run(tmp_path, seed=1, size=5)
    expected = other.weights()
    with pytest.raises(CheckpointException, match=r"0\.weight: has shape \(5, 4\) here and \(3, 4\) in the checkpoint"):
        other.manager.load()
    assert equal(other.weights(), expected) and other.step == 0
    excluded = Run(tmp_path, seed=1, exclude_from_loading=["optimizer", "train_state"])
    assert excluded.manager.load() and excluded.step == 0 and excluded.schedulers.schedulers[0].last_epoch == 1
    assert not excluded.optimizers.optimizers[0].state


def test_the_latest_k_that_are_kept_are_whole(alone, tmp_path):
    run = Run(tmp_path, keep_latest_k=2)
    run.train(3)

    def there():
        return sorted(int(path.name.removeprefix("step-")) for path in (tmp_path / "checkpoint").glob("step-*"))

    run.manager.close()
    assert there() == [2, 3]
    unfinish(path_of(tmp_path, 3))
    run = Run(tmp_path, keep_latest_k=2, interval=2)
    assert run.manager.load() and run.step == 2
    shutil.copytree(path_of(tmp_path, 2), path_of(tmp_path, 9))  # of a run that this one went back from
    run.train(2)
    run.manager.close()
    assert there() == [2, 4, 9]  # torchtitan would have kept the unfinished one, and what lies ahead


def test_a_save_over_a_checkpoint_takes_it_away_first(alone, tmp_path, monkeypatch):
    run = Run(tmp_path)
    run.train(1)
    seen = []

    def write(writer, plan, planner):
        seen.extend(path.name for path in Path(writer.path).iterdir())
        raise OSError("no space left")

    monkeypatch.setattr(FileSystemWriter, "write_data", write)
    assert (path_of(tmp_path, 1) / ".metadata").exists()
    with pytest.raises(CheckpointException, match="no space left"):
        run.manager.save(1)
    assert seen == [] and not (path_of(tmp_path, 1) / ".metadata").exists()
    assert Run(tmp_path).manager.load() is False


def test_an_asynchronous_save_is_waited_for_and_its_failure_is_raised(alone, tmp_path, monkeypatch):
    write = FileSystemWriter.write_data
    goes_on, fails = threading.Event(), False

    def write_late(writer, plan, planner):
        assert goes_on.wait(60)
        if fails:
            raise OSError("no space left")
        return write(writer, plan, planner)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_late)
    run = Run(tmp_path, async_mode="async")
    expected = run.train(1)
    assert not run.manager.save_future.done()
    with torch.no_grad():
        run.model[0].weight.add_(1)  # the next step does not wait
    timer = threading.Timer(0.2, goes_on.set)
    timer.start()
    run.manager.close()
    assert goes_on.is_set() and (path_of(tmp_path, 1) / ".metadata").exists()
    resumed = Run(tmp_path, seed=1)
    assert resumed.manager.load() and equal(resumed.weights(), expected)
    fails = True
    run.manager.save(2)
    with pytest.raises(CheckpointException, match="no space left"):
        run.manager.save(3)
    run.manager.save_future = None
    run.manager.save(4)
    with pytest.raises(CheckpointException, match="no space left"):
        run.manager.close()


# ---- the data loader's state


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


class EvilLoader(Positions):
    def __init__(self, evil: Evil) -> None:
        self.evil = evil

    def state_dict(self):
        return {"dp_rank_0": pickle.dumps(self.evil), "world_size": 1}


def test_code_in_the_state_of_torchtitans_data_loader_is_not_run(alone, tmp_path):
    trace = tmp_path / "it was run"
    Run(tmp_path, loader=EvilLoader(Evil(trace))).manager.save(1)
    run = Run(tmp_path, seed=1)
    expected = run.weights()
    with pytest.raises(
        CheckpointException, match=r"dataloader\.dp_rank_0: not loaded, it is more than plain data.*mkdir"
    ):
        run.manager.load()
    assert not trace.exists() and equal(run.weights(), expected)
    stock = Run(tmp_path, seed=1, manager=CheckpointManager)
    with contextlib.suppress(TypeError, AttributeError):  # what it loads is no state
        stock.manager.load()
    assert trace.exists()  # the trap is armed: torchtitan's own runs it


def test_what_stock_torchtitan_saved_is_loaded(alone, tmp_path):
    stock = Run(tmp_path, manager=CheckpointManager)
    stock.train(2)
    resumed = Run(tmp_path, seed=1)
    assert resumed.manager.load() and equal(resumed.train(2, saves=False), stock.train(2, saves=False))
    assert resumed.loader.dataset.position == stock.loader.dataset.position > 2


def test_the_state_of_the_data_belongs_to_a_number_of_ranks(alone, tmp_path):
    Run(tmp_path).train(1)
    two = ParallelAwareDataloader(Tokens(), 0, 2, batch_size=1)
    message = r"that of 1 data-parallel ranks .*this job has 2.*use 1, or --checkpoint\.exclude_from_loading dataloader"
    with pytest.raises(ValueError, match=message):
        Run(tmp_path, loader=two).manager.load()
    with pytest.raises(ValueError, match=r"another kind of data set \(training\.dataset\).*exclude_from_loading"):
        Run(tmp_path, loader=Positions()).manager.load()
    assert Run(tmp_path, loader=two, exclude_from_loading=["dataloader"]).manager.load()
    Run(tmp_path / "ours", loader=Positions()).manager.save(1)
    with pytest.raises(ValueError, match=r"another kind of data set"):
        Run(tmp_path / "ours").manager.load()
    assert Run(tmp_path / "ours", loader=Positions()).manager.load()


# ---- what is refused at set-up


@pytest.mark.parametrize(
    "settings, message, works",
    [
        ({"exclude_from_loading": ["optimiser"]}, r"'optimiser': choose from 'model', 'optimizer'", ["optimizer"]),
        ({"keep_latest_k": 1}, r"keep_latest_k = 1: set it to 0 .* or to 2", 2),
        ({"keep_latest_k": -1}, r"keep_latest_k = -1", 0),
        ({"last_save_in_hf": True, "last_save_model_only": False}, r"last_save_in_hf.* needs .*last_save_model_only", False),
        ({"initial_load_in_hf": True, "initial_load_model_only": False}, r"needs .*initial_load_model_only", False),
        ({"initial_load_in_hf_quantized": True}, r"_quantized = true needs .*initial_load_in_hf = true", False),
    ],
)  # fmt: skip
def test_settings_that_fail_later_are_refused(settings, message, works):
    with pytest.raises(ValueError, match=message):
        check_checkpoint(Checkpoint(enable=True, **settings))
    check_checkpoint(Checkpoint(enable=False, **settings))
    check_checkpoint(Checkpoint(enable=True, **{**settings, next(iter(settings)): works}))


def test_pinned_memory_is_refused_without_an_accelerator():
    section = {"enable_cpu_offload": False, "enable_profiling": False, "enable": True}
    for mode, is_refused in (("async_with_pinned_mem", True), ("async", False), ("disabled", False)):
        job = type("Job", (), {})()
        job.training = job.profiling = job.checkpoint = type("Section", (), section | {"async_mode": mode})
        if is_refused:
            with pytest.raises(NotImplementedError, match="pinned memory needs an accelerator; use 'async'"):
                cpu.check_job(job, "sdpa")
        else:
            cpu.check_job(job, "sdpa")


def test_weights_that_hugging_face_format_does_not_know_are_refused(tmp_path):
    args = TransformerModelArgs(dim=32, n_layers=1, n_heads=4, vocab_size=64)
    with torch.device("meta"):
        model = Transformer(args)
    check_names(Llama3StateDictAdapter(args, None), [model], saves=True)
    with pytest.raises(ValueError, match="no adapter for this model"):
        check_names(None, [model], saves=True)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}')
    other = Llama3StateDictAdapter(args, str(tmp_path))
    with pytest.raises(ValueError, match=r"names no file for model\.embed_tokens\.weight.*it is of another model"):
        check_names(other, [model], saves=True)
    check_names(other, [model], saves=False)
    model.layers["0"].extra = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"adapter does not know layers\.0\.extra\.weight"):
        check_names(Llama3StateDictAdapter(args, None), [model], saves=True)
