"""Ranks that are killed while they save: the newest whole checkpoint goes on, what was left broken is refused."""

from __future__ import annotations

import multiprocessing
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from gtp_dtensor import CheckedFileSystemReader, CheckedLoadPlanner
from tests.kill_program import Program, run, step_folder
from tests.reference import assert_close_to_reference

LAST_STEP = 4
START_TIMEOUT = 60.0  # seconds until a save must begin
END_TIMEOUT = 100.0  # seconds until all ranks must have ended, those with a dead peer too
TIMEOUT = START_TIMEOUT + END_TIMEOUT + 30  # seconds for all of that


@dataclass(frozen=True)
class Kill:
    """SIGKILL for ``victims``, ``delay`` seconds after the first file of the checkpoint in ``folder`` has appeared."""

    victims: tuple[int, ...]
    folder: Path
    delay: float


# ---- processes


@pytest.fixture(scope="module")
def launcher(rank_pool):
    """One process that has loaded what ranks need, has no threads, and forks them. (The pool's server, from which it is
    forked itself, has the first settings of its kind: hence ``rank_pool``.)"""
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(1, mp_context=context, initializer=_load_all) as executor:
        yield executor


def _load_all() -> None:
    import torch._dynamo  # noqa: F401  (most of a rank's start is this import, which DTensor makes in the first call)

    torch.set_num_threads(1)


def _fork(function: Callable, num_ranks: int, argument: Any, kill: Kill | None) -> list[int | None]:
    """Call ``function(argument, rank)`` in a process for every rank, kill, wait for the others. Exit codes; None: did
    not end and was killed for that. Runs in the launcher."""
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=function, args=(argument, rank), daemon=True) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    if kill is not None:
        deadline = time.monotonic() + START_TIMEOUT
        while not any(kill.folder.glob("*.distcp")) and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(kill.delay)
        for victim in kill.victims:
            processes[victim].kill()
    deadline = time.monotonic() + END_TIMEOUT
    codes = []
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        codes.append(process.exitcode)
        process.kill()
        process.join()
    return codes


def launch(launcher: ProcessPoolExecutor, program: Program, kill: Kill | None = None) -> list[int | None]:
    """The exit codes of all ranks; without a kill they have to be 0."""
    codes = launcher.submit(_fork, run, program.num_ranks, program, kill).result(TIMEOUT)
    assert kill is not None or codes == [0] * program.num_ranks, program.output()
    return codes


# ---- runs


def losses_of(program: Program) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in program.progress() if "loss" in line}


class Uninterrupted:
    """Losses of whole runs, and how long their saves took, by number of ranks."""

    def __init__(self, launcher: ProcessPoolExecutor, folder: Path) -> None:
        self._launcher, self._folder, self._losses, self._seconds = launcher, folder, {}, {}

    def _run(self, num_ranks: int) -> None:
        if num_ranks in self._losses:
            return
        folder = self._folder / f"whole{num_ranks}"
        folder.mkdir()
        program = Program(folder, "whole", num_ranks, LAST_STEP)
        launch(self._launcher, program)
        self._losses[num_ranks] = losses_of(program)
        seconds = [line["save_seconds"] for line in program.progress() if "save_seconds" in line]
        self._seconds[num_ranks] = statistics.median(seconds)

    def losses(self, num_ranks: int) -> dict[int, float]:
        """By step."""
        self._run(num_ranks)
        return self._losses[num_ranks]

    def save_seconds(self, num_ranks: int) -> float:
        """The median of synchronous saves."""
        self._run(num_ranks)
        return self._seconds[num_ranks]


@pytest.fixture(scope="module")
def uninterrupted(launcher, tmp_path_factory) -> Uninterrupted:
    return Uninterrupted(launcher, tmp_path_factory.mktemp("uninterrupted"))


def is_whole(folder: Path) -> bool:
    return (folder / ".metadata").exists()


def check_refused(folder: Path) -> None:
    """By the reader alone and in ``dcp.load``, for the reason that it is."""
    with pytest.raises(FileNotFoundError, match="not a whole checkpoint.*the save into it did not finish"):
        CheckedFileSystemReader(folder).read_metadata()
    state = {"step": -1}
    with pytest.raises(CheckpointException, match="the save into it did not finish"):
        reader = CheckedFileSystemReader(folder)
        dcp.load(state, storage_reader=reader, planner=CheckedLoadPlanner(), no_dist=True)
    assert state == {"step": -1}


def check_continued(program: Program, newest: int, uninterrupted: Uninterrupted, source: int) -> None:
    """``program`` went on after ``newest`` as a run of ``source`` ranks that nobody has killed."""
    assert program.progress()[0] == {"resumed_from": newest}, program.output()
    expected, actual = uninterrupted.losses(source), losses_of(program)
    steps = list(range(newest + 1, program.last_step + 1))
    assert list(actual) == steps
    if program.num_ranks == source:
        assert actual == {step: expected[step] for step in steps}
    actual, expected = (torch.tensor([losses[step] for step in steps]) for losses in (actual, expected))
    assert_close_to_reference(actual, expected, "losses", rtol=1e-5)
    assert all(is_whole(step_folder(program.folder, step)) for step in range(1, program.last_step + 1))


@dataclass(frozen=True)
class Trial:
    """A run of ``source`` ranks that is killed, and one of ``destination`` ranks that goes on."""

    source: int
    destination: int
    is_async: bool
    victims: tuple[int, ...]
    step: int
    fraction: float  # of a save's time, between its first file and the kill

    def run(self, launcher: ProcessPoolExecutor, folder: Path, uninterrupted: Uninterrupted) -> int:
        """The number of folders that the kill left broken, after all checks."""
        delay = self.fraction * uninterrupted.save_seconds(self.source)
        killed = Program(folder, "killed", self.source, LAST_STEP, self.is_async)
        codes = launch(launcher, killed, Kill(self.victims, step_folder(folder, self.step), delay))
        assert all(codes[victim] == -9 for victim in self.victims), (codes, killed.output())
        assert None not in codes, f"a rank hung after its peer's death: {codes}\n{killed.output()}"
        expected = uninterrupted.losses(self.source)
        before = losses_of(killed)
        assert before and before == {step: expected[step] for step in before}  # saving disturbs nothing
        folders = {step: step_folder(folder, step) for step in range(1, LAST_STEP + 1)}
        written = {step: path for step, path in folders.items() if path.exists()}
        broken = [path for path in written.values() if not is_whole(path)]
        for path in broken:
            check_refused(path)
        whole = [step for step, path in written.items() if is_whole(path)]
        assert self.step - 1 <= max(whole, default=0)  # the previous one, in spite of the kill
        resumed = replace(killed, name="resumed", num_ranks=self.destination)
        launch(launcher, resumed)
        check_continued(resumed, max(whole, default=0), uninterrupted, self.source)
        return len(broken)


def draw(rng: random.Random, number: int) -> Trial:
    """Trial ``number``: kinds of saves, ranks and victims in turn, the moment by chance."""
    source, destination = [(2, 3), (3, 2), (2, 1), (3, 1), (2, 2), (3, 3)][number // 4 % 6]
    victims = tuple(range(source)) if number // 2 % 2 else (rng.randrange(source),)
    return Trial(source, destination, bool(number % 2), victims, rng.randint(1, LAST_STEP - 1), rng.uniform(0, 0.8))


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(Trial(2, 3, is_async=False, victims=(1,), step=2, fraction=0.0), marks=pytest.mark.slow),
        Trial(2, 2, is_async=True, victims=(0, 1), step=3, fraction=0.3),
    ],
    ids=["one_rank_sync", "all_ranks_async"],
)
def test_a_killed_save_leaves_the_previous_checkpoint(launcher, uninterrupted, tmp_path, trial):
    for attempt in range(5):  # a busy machine may let a save finish before the kill
        folder = tmp_path / str(attempt)
        folder.mkdir()
        if trial.run(launcher, folder, uninterrupted):
            return
    pytest.fail("the trap is not armed: no kill came before the end of a save")


@pytest.mark.slow
def test_twenty_kills_at_random_moments(launcher, uninterrupted, tmp_path, record_property):
    rng = random.Random(6)
    num_broken = []
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        trial = draw(rng, number)
        num_broken.append(trial.run(launcher, folder, uninterrupted))
        print(f"{number}: {trial}: {num_broken[-1]} broken", flush=True)
    num_hits = sum(num > 0 for num in num_broken)
    print(f"{len(num_broken)} of 20 resumed; {num_hits} kills left a broken folder")
    record_property("kills_that_left_a_broken_folder", num_hits)
    assert num_hits >= 7, "the trap is not armed: most saves had finished before the kill"


def test_damaged_newest_checkpoints_are_passed_over(launcher, uninterrupted, tmp_path):
    """A truncated file, and one that is missing, as a full disk or a hasty clean-up leaves them."""
    launch(launcher, Program(tmp_path, "first", 2, last_step=3))
    path = step_folder(tmp_path, 3) / "__1_0.distcp"
    path.write_bytes(path.read_bytes()[:-1000])
    (step_folder(tmp_path, 2) / "__0_0.distcp").unlink()
    resumed = Program(tmp_path, "resumed", 3, LAST_STEP)
    launch(launcher, resumed)
    output = resumed.output()
    assert "__1_0.distcp has" in output and "it is truncated" in output and "__0_0.distcp is missing" in output
    check_continued(resumed, 1, uninterrupted, source=2)
    assert {path.name for path in tmp_path.glob("*.broken")} == {"step-2.broken", "step-3.broken"}


# ---- saving over a checkpoint


class DyingWriter(FileSystemWriter):
    """Ends its process when it is to write tensors: what a kill between two ranks' files does."""

    def write_data(self, plan, planner):
        os._exit(9)


def _save_over(case: tuple[Path, bool], rank: int) -> None:
    """One of 2 ranks: saves zeros and, over them, ones, when rank 1 dies before it has written any."""
    folder, overwrite = case
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}.store", rank=rank, world_size=2, timeout=timedelta(seconds=10)
    )
    mesh = init_device_mesh("cpu", (2,))
    zeros, ones = (distribute_tensor(torch.full((4,), value), mesh, [Shard(0)]) for value in (0.0, 1.0))
    dcp.save({"weight": zeros}, storage_writer=FileSystemWriter(folder))
    shutil.copytree(folder, f"{folder}.before{rank}")
    dist.barrier()
    writer = (DyingWriter if rank == 1 else FileSystemWriter)(folder, overwrite=overwrite)
    try:
        dcp.save({"weight": ones}, storage_writer=writer)
    except (CheckpointException, RuntimeError) as error:
        Path(f"{folder}.error{rank}").write_text(str(error))
    os._exit(0)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def load_weight(folder: Path) -> list[float]:
    state = {"weight": torch.full((4,), -1.0)}
    reader = CheckedFileSystemReader(folder)
    dcp.load(state, storage_reader=reader, planner=CheckedLoadPlanner(), no_dist=True)
    return state["weight"].tolist()


@pytest.mark.parametrize("overwrite", [True, False])
def test_only_new_folders_are_safe_from_kills(launcher, tmp_path, overwrite):
    """DCP keeps the old table of contents until all ranks have written over what it is about: a kill between leaves
    two checkpoints mixed, which nothing in the folder tells. ``overwrite=False`` refuses before anything is written."""
    folder = tmp_path / "checkpoint"
    codes = launcher.submit(_fork, _save_over, 2, (folder, overwrite), None).result(TIMEOUT)
    before = contents(Path(f"{folder}.before0"))
    assert before.keys() == {".metadata", "__0_0.distcp", "__1_0.distcp"}
    if overwrite:
        assert codes == [0, 9]
        assert load_weight(folder) == [1, 1, 0, 0]
        changed = {name for name, content in contents(folder).items() if content != before[name]}
        assert changed == {"__0_0.distcp"}
    else:
        assert codes == [0, 0]
        assert all("already exists" in Path(f"{folder}.error{rank}").read_text() for rank in range(2))
        assert contents(folder) == before and load_weight(folder) == [0, 0, 0, 0]
