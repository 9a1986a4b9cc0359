"""A training program that saves every step into a folder of its own and, when it is started again, goes on from the
newest whole one. ``torch.distributed.checkpoint`` alone saves; nothing here knows that somebody kills it."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import CheckedFileSystemReader, CheckedLoadPlanner, GTPStyle, stats
from tests.models import TinyLlama

VOCAB = 2050
NUM_SAMPLES = 6  # of every step, dealt to 1, 2 or 3 ranks
GROUP_TIMEOUT = timedelta(seconds=30)  # a rank whose peer is gone gives up after it at the latest


@dataclass(frozen=True)
class Program:
    """One start of the program.

    Args:
        folder: of all checkpoints.
        name: of this start, for the files ``NAME.jsonl`` (a line for every step) and ``NAME.rankR.log`` (output).
        num_ranks: which all share the weights by GTP; one rank has a plain model.
        last_step: steps are counted from 1.
        is_async: saves run while the next step is trained.
    """

    folder: Path
    name: str
    num_ranks: int
    last_step: int
    is_async: bool = False

    def progress(self) -> list[dict]:
        """What rank 0 has written: first "resumed_from" (a step, 0: none), then "step", "loss", "save_seconds"."""
        return [json.loads(line) for line in (self.folder / f"{self.name}.jsonl").read_text().splitlines()]

    def output(self) -> str:
        """Of all ranks, for messages."""
        return "\n".join(path.read_text() for path in sorted(self.folder.glob(f"{self.name}.rank*.log")))


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"


def newest_whole(folder: Path) -> int:
    """The newest step whose folder holds all it should, 0 where there is none. Broken ones are passed over aloud, and
    set aside if they were whole once: ``overwrite=False`` would refuse to save there again."""
    steps = [int(found[1]) for path in folder.iterdir() if (found := re.fullmatch(r"step-(\d+)", path.name))]
    for step in sorted(steps, reverse=True):
        reader = CheckedFileSystemReader(step_folder(folder, step))
        try:
            reader.set_up_storage_reader(reader.read_metadata(), True)
            reader.check_files()
        except (FileNotFoundError, ValueError) as error:
            print(f"passed over: {error}", flush=True)
            if (step_folder(folder, step) / ".metadata").exists():
                step_folder(folder, step).rename(folder / f"step-{step}.broken")
            continue
        return step
    return 0


class Trainer:
    """This rank's part of the model, its optimizer, and saves."""

    def __init__(self, program: Program) -> None:
        torch.manual_seed(0)
        self.program = program
        # 1.3 million parameters in 33 tensors; with moments a checkpoint is 15 MB.
        self.model = TinyLlama(vocab=VOCAB, dim=128, num_layers=4, hidden=344, tied=True)
        nn.init.normal_(self.model.output.weight, std=0.02)
        if program.num_ranks > 1:
            mesh = dist.init_device_mesh("cpu", (program.num_ranks,), mesh_dim_names=("gtp",))
            parallelize_module(self.model, mesh, GTPStyle())
            assert stats(self.model).num_sharded_weights > 20
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, eps=1e-4)
        self.saves = dist.new_group(timeout=GROUP_TIMEOUT)  # the saving thread's own
        self.saving = None

    def state(self, step: int) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": step}

    def resume(self) -> int:
        """The step of the checkpoint that was loaded, 0: none."""
        choice = [newest_whole(self.program.folder)] if dist.get_rank() == 0 else [None]
        dist.broadcast_object_list(choice)
        step = choice[0]
        if step == 0:
            return 0
        state = self.state(0)
        reader = CheckedFileSystemReader(step_folder(self.program.folder, step))
        dcp.load(state, storage_reader=reader, planner=CheckedLoadPlanner())
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert state["step"] == step
        return step

    def train(self, step: int) -> float:
        """One step; the loss over all samples."""
        # The same few batches again and again: what was learned shows in the loss.
        tokens = torch.randint(VOCAB, (NUM_SAMPLES, 9), generator=torch.Generator().manual_seed(step % 2))
        tokens = tokens.chunk(self.program.num_ranks)[dist.get_rank()]
        logits = self.model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        return mean.item() / self.program.num_ranks

    def save(self, step: int) -> None:
        """Into a new folder, or one that a killed save has left."""
        writer = FileSystemWriter(step_folder(self.program.folder, step), overwrite=False)
        if not self.program.is_async:
            dcp.save(self.state(step), storage_writer=writer)
            return
        self.wait()
        self.saving = dcp.async_save(self.state(step), storage_writer=writer, process_group=self.saves)

    def wait(self) -> None:
        """Until the last asynchronous save is done."""
        if self.saving is not None:
            self.saving.result()


def run(program: Program, rank: int) -> None:
    """The whole program of one rank, in a process of its own."""
    log = os.open(program.folder / f"{program.name}.rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{program.folder / program.name}.store",
        rank=rank,
        world_size=program.num_ranks,
        timeout=GROUP_TIMEOUT,
    )
    trainer = Trainer(program)
    with open(program.folder / f"{program.name}.jsonl" if rank == 0 else os.devnull, "a", buffering=1) as progress:
        step = trainer.resume()
        print(json.dumps({"resumed_from": step}), file=progress)
        while step < program.last_step:
            step += 1
            loss = trainer.train(step)
            print(json.dumps({"step": step, "loss": loss}), file=progress)
            start = time.monotonic()
            trainer.save(step)
            print(json.dumps({"step": step, "save_seconds": time.monotonic() - start}), file=progress)
        trainer.wait()
    dist.destroy_process_group()
