#!/usr/bin/env python
"""Time and host memory of saving and loading a checkpoint of GTP beside FSDP2, in turns in the same processes.

    torchrun --nproc_per_node 4 scripts/bench_checkpoint.py --mode cpu
    torchrun --nproc_per_node 4 scripts/bench_checkpoint.py --mode shared     # ranks that share one GPU
    torchrun --nproc_per_node 8 scripts/bench_checkpoint.py --mode real       # a GPU each

The model is a stack of Llama blocks (default: 201 million parameters), float32 with AdamW's moments, after one training
step on random data. Saves are `torch.distributed.checkpoint` (DCP) as it comes, files flushed to the disk; each goes
into a new folder, which is deleted afterwards. The page cache stays warm: loads tell what the host does, not the disk.

"save" is the time of `get_state_dict` and `dcp.save`; "go on" that until `dcp.async_save` returns and training may go
on, "done" until its files are complete. "load" is `get_state_dict`, `dcp.load` and `set_state_dict` with DCP's own
reader and planner, "checked" the same with CheckedFileSystemReader and CheckedLoadPlanner. Times are those of the
slowest rank; MiB is the highest resident memory of a rank's process meanwhile, above what it had before (the rank that
took most). All are medians over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from bench import one_step, random_batch, stop
from contestants import add_contestants_option, add_model_options, build
from shared_gpu import share_gpu
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from gtp_dtensor import CheckedFileSystemReader, CheckedLoadPlanner

CONTESTANTS = {"fsdp": "fsdp_block", "gtp": "gtp"}  # the names that bench.py's build knows
SAMPLE_SECONDS = 0.001


@dataclass
class Row:
    """What one operation of one contestant took. Seconds of the slowest rank; MiB of every rank, above before."""

    contestant: str
    operation: str  # save, async, load, checked
    seconds: float
    go_on_seconds: float | None  # of async
    peak_mib: list[float]


@dataclass
class Sample:
    """One operation on this rank."""

    seconds: float = 0.0
    go_on_seconds: float | None = None
    peak_mib: float = 0.0


def resident_mib() -> float:
    """Of this process, now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@contextlib.contextmanager
def measured(device: torch.device) -> Iterator[Sample]:
    """Fills a sample with the time and the highest memory of what is done inside, beginning on all ranks at once."""
    gc.collect()
    with contextlib.suppress(AttributeError):  # glibc only: memory that is free already would not show again
        ctypes.CDLL(None).malloc_trim(0)
    sample, done = Sample(), threading.Event()
    before = highest = resident_mib()

    def watch() -> None:
        nonlocal highest
        while not done.wait(SAMPLE_SECONDS):
            highest = max(highest, resident_mib())

    thread = threading.Thread(target=watch)
    thread.start()
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    try:
        yield sample
        if device.type == "cuda":
            torch.cuda.synchronize()
        sample.seconds = time.perf_counter() - start
    finally:
        done.set()
        thread.join()
    sample.peak_mib = max(highest, resident_mib()) - before


class Contestant:
    """A model with its optimizer, whose states exist."""

    def __init__(self, name: str, args: argparse.Namespace, device: torch.device) -> None:
        self.name, self.device = name, device
        mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("gtp",))
        self.model = build(CONTESTANTS[name], args, mesh, device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=True)
        one_step(self.model, *random_batch(args.tokens, args, device))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.group = dist.new_group(backend="gloo")  # of saves

    def state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def save(self, folder: Path) -> Sample:
        with measured(self.device) as sample:
            dcp.save(self.state(), checkpoint_id=folder, process_group=self.group)
        return sample

    def save_async(self, folder: Path) -> Sample:
        with measured(self.device) as sample:
            start = time.perf_counter()
            saving = dcp.async_save(self.state(), checkpoint_id=folder, process_group=self.group)
            sample.go_on_seconds = time.perf_counter() - start
            saving.result()
        return sample

    def load(self, folder: Path, checks: bool) -> Sample:
        first = next(self.model.parameters())
        first = first.to_local() if isinstance(first, DTensor) else first
        expected = first.detach().clone()
        first.detach().zero_()
        with measured(self.device) as sample:
            state = self.state()
            reader = CheckedFileSystemReader(folder) if checks else dcp.FileSystemReader(folder)
            planner = CheckedLoadPlanner() if checks else None
            dcp.load(state, storage_reader=reader, planner=planner, process_group=self.group)
            set_state_dict(
                self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        if not torch.equal(first, expected):
            raise AssertionError(f"{self.name}: the checkpoint did not bring back what was saved")
        return sample

    def round(self, folder: Path) -> dict[str, Sample]:
        """Every operation once. ``folder`` is made and deleted again."""
        samples = {
            "save": self.save(folder),
            "load": self.load(folder, checks=False),
            "checked": self.load(folder, checks=True),
        }
        remove(folder)
        samples["async"] = self.save_async(folder)
        remove(folder)
        return samples


def remove(folder: Path) -> None:
    """After all ranks are done with it."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
    dist.barrier()


def of_all_ranks(rounds: list[dict[str, Sample]], name: str) -> list[Row]:
    """One row for each operation."""
    gathered: list[list[dict[str, Sample]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, rounds)
    rows = []
    for operation in rounds[0]:
        ranks = [[samples[operation] for samples in theirs] for theirs in gathered]

        def slowest(value: Callable[[Sample], float]) -> float:
            return statistics.median(max(map(value, samples)) for samples in zip(*ranks))

        go_on = slowest(lambda sample: sample.go_on_seconds) if operation == "async" else None
        peaks = [statistics.median(sample.peak_mib for sample in samples) for samples in ranks]
        rows.append(Row(name, operation, slowest(lambda sample: sample.seconds), go_on, peaks))
    return rows


def run(args: argparse.Namespace, device: torch.device) -> tuple[list[Row], int]:
    """(rows of all contestants, bytes of a checkpoint's tensors). On all ranks of the default group."""
    contestants = [Contestant(name, args, device) for name in args.contestants]
    parent = [tempfile.mkdtemp(prefix="bench_checkpoint_", dir=args.folder)] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(parent)
    rounds: dict[str, list[dict[str, Sample]]] = {contestant.name: [] for contestant in contestants}
    try:
        for number in range(args.warmup + args.rounds):
            for contestant in contestants:
                samples = contestant.round(Path(parent[0]) / f"{contestant.name}{number}")
                rounds[contestant.name].append(samples)
                if dist.get_rank() == 0:
                    seconds = ", ".join(f"{operation} {sample.seconds:.2f}" for operation, sample in samples.items())
                    print(f"round {number}, {contestant.name}, s: {seconds}", file=sys.stderr, flush=True)
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(parent[0], ignore_errors=True)
    num_bytes = 3 * sum(num_bytes_of(param) for param in contestants[0].model.parameters())
    return [row for name, theirs in rounds.items() for row in of_all_ranks(theirs[args.warmup :], name)], num_bytes


def num_bytes_of(param: nn.Parameter) -> int:
    """Of the logical tensor."""
    return param.numel() * param.element_size()


def table(rows: list[Row]) -> str:
    """The rows, readable."""
    lines = [f"{'contestant':<12}{'operation':<10}{'go on s':>9}{'seconds':>9}{'MiB, most':>11}{'all ranks':>11}"]
    for row in rows:
        go_on = "" if row.go_on_seconds is None else f"{row.go_on_seconds:.2f}"
        lines.append(
            f"{row.contestant:<12}{row.operation:<10}{go_on:>9}{row.seconds:>9.2f}"
            f"{max(row.peak_mib):>11.0f}{sum(row.peak_mib):>11.0f}"
        )
    return "\n".join(lines)


def start(args: argparse.Namespace) -> torch.device:
    """The process group of the mode; returns this rank's device."""
    if args.mode == "cpu":
        dist.init_process_group("gloo")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise SystemExit(f"bench_checkpoint.py: --mode {args.mode} needs a GPU; torch finds none")
    if args.mode == "shared":
        share_gpu()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return device


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("cpu", "shared", "real"), default="cpu")
    add_model_options(parser, dim=1024, ffn=4096, heads=16, kv_heads=16)
    parser.add_argument("--tokens", type=int, default=16, help="of the training step before the first save")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=1, help="rounds before those that count")
    add_contestants_option(parser, CONTESTANTS)
    parser.add_argument("--folder", type=Path, default=None, help="where to save (default: the temporary folder)")
    parser.add_argument("--out", type=Path, default=None, help="folder for bench_checkpoint.json")
    args = parser.parse_args(arguments)
    if args.rounds < 5:
        parser.error(f"--rounds {args.rounds}: medians of fewer than 5 rounds say little")
    return args


def main() -> None:
    args = parse_args()
    device = start(args)
    rows, num_bytes = run(args, device)
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
        title = f"{name}, {args.mode}, {dist.get_world_size()} ranks, torch {torch.__version__}"
        print(title, f"{num_bytes / 12e6:.3g} million parameters, {num_bytes / 1e9:.2f} GB a checkpoint", sep="\n")
        print(table(rows), flush=True)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            options = {**vars(args), "folder": None, "out": None}
            report = {"title": title, "num_bytes": num_bytes, "options": options, "rows": [asdict(row) for row in rows]}
            (args.out / "bench_checkpoint.json").write_text(json.dumps(report, indent=1))
    stop(device)


if __name__ == "__main__":
    main()
