#!/usr/bin/env python
"""torchtitan end to end, by one TOML: GTP beside torchtitan's own FSDP2, one after the other in the same processes.

    torchrun --nproc_per_node 2 scripts/bench_titan.py train_configs/llama3_8b_12_layers.toml --out titan_x2 --check
    torchrun --nproc_per_node 2 scripts/bench_titan.py train_configs/llama3_debug.toml --out titan_cpu --steps 12 \
        --contestants fsdp2,gtp2,gtp2+compile --compile.backend aot_eager --training.seq_len 64       # CPUs work, too

A contestant is an arrangement of compare.py (`fsdp2`, `gtp2`, `tp2gtp2`, `dpr2gtp2`; on as many ranks as there are), with
features behind it, each after a "+": "compile" (each block), a transport or a wire format ("gtp2+symmetric+fp8"), "step" or
"block" (CUDA graphs), "lr2" (twice the learning rate). All train the same weights on the same global batches; other
options are handed to torchtitan.

"step" is the median of the seconds from the end of one step to that of the next, after --warmup steps, on the first rank;
memory is the most of any rank after the first step, for which the cache was emptied: peak of what tensors held, peak of
what the allocator had from the device; both with symmetric memory, of which the allocator does not know.

Losses of every step are compared with the first contestant's. Exit status: 1 where one lies further off than --tolerance,
where a contestant failed, or where one left memory to the next; with --check, too, where a run at twice the learning rate
would not have been told from the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
import types
import weakref
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from compare import Arrangement, UsageError, parse_arrangement, relative_difference
from contestants import BLOCK_GRAPHS, STEP_GRAPH, TRANSPORTS, check_arose, empty_device
from shared_gpu import share_gpu
from torch._dynamo.utils import counters

from gtp_dtensor import stats
from gtp_dtensor.config import WIRE_FORMATS

GRAPHS = (STEP_GRAPH, BLOCK_GRAPHS)
COMPILE, TWICE = "compile", "lr2"
FEATURES = (COMPILE, *TRANSPORTS, *GRAPHS, *WIRE_FORMATS, TWICE)
TOKENIZER_SIZE = 32768  # at most: larger ones take long to train and find nothing more in the text
# Of a loss, relative. In bfloat16 arrangements were seen to differ by 3e-4, and twice the learning rate by 1e-1.
TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-2}
LEFT_MIB = 256.0  # of a contestant that is gone: cuBLAS's workspaces and such


@dataclass(frozen=True)
class Contestant:
    """One of --contestants."""

    name: str
    arrangement: Arrangement
    features: tuple[str, ...]

    def options(self, lr: float) -> list[str]:
        """torchtitan's, of this contestant only."""
        found = [*self.arrangement.options(), f"--optimizer.lr={lr * (2 if TWICE in self.features else 1)}"]
        found.append("--compile.enable" if COMPILE in self.features else "--compile.no_enable")
        for key, values in (("transport", TRANSPORTS), ("cuda_graph", GRAPHS), ("wire_format", WIRE_FORMATS)):
            found += [f"--gtp.{key}={feature}" for feature in self.features if feature in values]
        return found


@dataclass
class Row:
    """What one contestant did. Milliseconds, GiB; losses of every step; difference of a loss to the first contestant's,
    relative, the largest."""

    contestant: str
    step_ms: float
    tokens_per_s: float  # of a GPU
    peak_allocated_gib: float
    peak_reserved_gib: float
    left_mib: float  # allocated before this contestant began
    losses: list[float] = field(repr=False)
    step_times_ms: list[float] = field(repr=False)
    difference: float = 0.0


def parse_contestant(text: str, num_ranks: int) -> Contestant:
    """Raises UsageError with what would do."""
    name, *features = text.strip().split("+")
    arrangement = parse_arrangement(name)
    unknown = sorted(set(features) - set(FEATURES))
    if unknown:
        raise UsageError(f"contestant {text!r}: {unknown[0]!r} is no feature; choose from {', '.join(FEATURES)}")
    if arrangement.num_ranks != num_ranks:
        raise UsageError(f"contestant {text!r} has {arrangement.num_ranks} ranks, and torchrun started {num_ranks}")
    if arrangement["gtp"] == 1 and set(features) - {COMPILE, TWICE}:
        raise UsageError(f"contestant {text!r}: without gtp only {COMPILE} and {TWICE} mean something")
    return Contestant(text.strip(), arrangement, tuple(features))


def default_contestants(num_ranks: int, on_gpu: bool) -> str:
    """Compile off and on; graphs, which are not combined with it, last."""
    kinds = [f"fsdp{num_ranks}", *(f"gtp{num_ranks}+{name}" for name in TRANSPORTS[: 2 if on_gpu else 1])]
    graphs = [f"gtp{num_ranks}+symmetric+step"] if on_gpu else []
    return ",".join([*kinds, *(f"{kind}+{COMPILE}" for kind in kinds), *graphs])


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Our options, and those for torchtitan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("toml", type=Path, help="a torchtitan TOML")
    parser.add_argument("--contestants", help="comma separated; the first is what losses are compared with")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warmup", type=int, default=8, help="steps before those whose median counts")
    parser.add_argument("--tolerance", type=float, help=f"of a loss, relative; default by dtype: {TOLERANCES}")
    parser.add_argument("--check", action="store_true", help="train at twice the learning rate, too: has to be found")
    parser.add_argument("--out", type=Path, required=True, help="folder for bench_titan.json and the runs' files")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on one GPU (see shared_gpu.py)")
    args, titan_options = parser.parse_known_args()
    if not args.toml.is_file():
        raise UsageError(f"{args.toml}: no such file")
    if args.steps - args.warmup < 3:
        raise UsageError(f"--steps {args.steps} --warmup {args.warmup}: leaves fewer than 3 steps to measure")
    return args, titan_options


class Bench:
    """The runs of one invocation, on this rank.

    Args:
        args, titan_options: from `parse_arguments`.
    """

    def __init__(self, args: argparse.Namespace, titan_options: list[str]) -> None:
        import torchtitan.train as titan_train
        from torchtitan.tools.logging import init_logger
        from torchtitan.tools.utils import device_type

        from titan_integration import spec

        init_logger()
        spec.register()
        self.args, self.titan_options, self.out = args, titan_options, args.out.resolve()
        self.device = torch.device(device_type)
        self.on_gpu = self.device.type == "cuda"
        if self.on_gpu:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        self.num_ranks, self.rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        self.out.mkdir(parents=True, exist_ok=True)
        base = self.config([])
        self.lr = base.optimizer.lr
        self.global_batch_size = base.training.global_batch_size
        if self.global_batch_size < 0:
            self.global_batch_size = base.training.local_batch_size * self.num_ranks
        self.dtype = base.training.mixed_precision_param
        self.model = f"{base.model.name} {base.model.flavor}, {base.training.seq_len} tokens a sample"
        self.tolerance = TOLERANCES[self.dtype] if args.tolerance is None else args.tolerance
        self.base = base
        # After its last step, for logs of other ranks: two seconds of each contestant.
        titan_train.time = types.SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
        self.still_alive: list[str] = []  # contestants whose models nobody could free
        self.tokenizer: str | None = base.model.hf_assets_path or None

    def config(self, options: list[str]):
        """torchtitan's JobConfig with these options."""
        from torchtitan.config import ConfigManager

        from titan_integration.train import with_job_config

        arguments = [f"--job.config_file={self.args.toml}", *self.titan_options, *options]
        return ConfigManager().parse_args(with_job_config(arguments))

    def common_options(self, contestant: Contestant) -> list[str]:
        """What is the same for all, but for the folder."""
        values = {
            "job.dump_folder": self.out / "runs" / contestant.name,
            "training.steps": self.args.steps,
            "training.global_batch_size": self.global_batch_size,
            "training.token_cache_folder": self.out / "token_cache",
            "model.hf_assets_path": self.tokenizer or "",
            # torchtitan resets peaks of memory where it logs; that is after the first step only.
            "metrics.log_freq": 10 * self.args.steps,
        }
        flags = [
            "checkpoint.no_enable",
            "training.logical_init",
            "metrics.enable_jsonl",
            "metrics.no_enable_tensorboard",
        ]
        return [f"--{name}={value}" for name, value in values.items()] + [f"--{name}" for name in flags]

    def train_tokenizer(self) -> None:
        """One for all contestants, where the job names none. Needs no process group."""
        from titan_integration.families import families
        from titan_integration.text import DATASETS, load_documents
        from titan_integration.tokenizer import train_tokenizer

        training = self.base.training
        if self.tokenizer or training.dataset not in DATASETS:
            return
        flavor = families()[self.base.model.name].flavors[self.base.model.flavor]
        size = min(TOKENIZER_SIZE, flavor.vocab_size)
        folder = self.out / f"tokenizer_{size}"
        self.tokenizer = str(folder)
        if self.rank == 0 and not folder.exists():
            train_tokenizer(load_documents(training.dataset, training.dataset_path), size, self.tokenizer)
        while not folder.exists():
            time.sleep(0.05)

    def run(self, contestant: Contestant) -> Row:
        """Trains one contestant. Raises RuntimeError where it was not what it is called."""
        from titan_integration.trainer import GTPTrainer

        class Measured(GTPTrainer):
            def train_step(self, data_iterator) -> None:
                super().train_step(data_iterator)
                if self.step == 1 and torch.cuda.is_available():
                    torch.cuda.empty_cache()  # of what initialization and compilation left in it
                    torch.cuda.reset_peak_memory_stats()

        torch._dynamo.reset()
        counters.clear()
        left_mib = empty_device(self.device)
        trainer = Measured(self.config([*self.common_options(contestant), *contestant.options(self.lr)]))
        model = weakref.ref(trainer.model_parts[0])
        try:
            trainer.train()
            symmetric = sum(stats(part).symmetric_bytes for part in trainer.model_parts)
            step, blocks = trainer._graph, trainer._blocks
            graphs = blocks if step is None else step._graphed
            check_arose(contestant.name, symmetric, graphs, self.args.steps - self.args.warmup)
            if COMPILE in contestant.features and not counters["stats"]["unique_graphs"]:
                raise RuntimeError(f"{contestant.name}: nothing was compiled")
            peaks = self.most_of_ranks(symmetric)
        finally:
            trainer.close()
        del trainer, step, blocks, graphs
        torch._dynamo.reset()
        empty_device(self.device)
        if model() is not None:
            self.still_alive.append(contestant.name)
        return self.row(contestant, peaks, left_mib)

    def most_of_ranks(self, symmetric_bytes: int) -> list[float]:
        """GiB: the largest peaks of (allocated, reserved) of any rank. Zeros on a CPU."""
        found = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if self.on_gpu else [0, 0]
        peaks = torch.tensor([peak + symmetric_bytes for peak in found], dtype=torch.float64, device=self.device)
        dist.all_reduce(peaks, dist.ReduceOp.MAX)
        return [peak / 2**30 for peak in peaks.tolist()]

    def row(self, contestant: Contestant, peaks: list[float], left_mib: float) -> Row:
        """From the records that the first rank wrote."""
        with open(self.out / "runs" / contestant.name / "metrics.jsonl", encoding="utf-8") as file:
            records = [json.loads(line) for line in file]
        if [record["step"] for record in records] != list(range(1, self.args.steps + 1)):
            raise RuntimeError(f"{contestant.name}: recorded {len(records)} of {self.args.steps} steps")
        times = [1e3 * record["seconds"] for record in records]
        step_ms = statistics.median(times[self.args.warmup :])
        num_tokens = self.global_batch_size * self.base.training.seq_len
        per_gpu = 1e3 * num_tokens / step_ms / self.num_ranks
        return Row(contestant.name, step_ms, per_gpu, *peaks, left_mib, [record["loss"] for record in records], times)

    def report(self, rows: list[Row], failures: dict[str, str]) -> None:
        """bench_titan.json, so far."""
        if self.rank != 0:
            return
        device = torch.cuda.get_device_name() if self.on_gpu else "CPU"
        options = {
            "toml": self.args.toml.name, "model": self.model, "steps": self.args.steps, "warmup": self.args.warmup,
            "num_ranks": self.num_ranks, "dtype": self.dtype, "global_batch_size": self.global_batch_size,
            "tolerance": self.tolerance, "titan_options": self.titan_options,
        }  # fmt: skip
        content = {
            "kind": "titan",
            "title": f"{device}, {self.num_ranks} ranks, torch {torch.__version__}",
            "options": options,
            "rows": [asdict(row) for row in rows],
            "failures": failures,
        }
        (self.out / "bench_titan.json").write_text(json.dumps(content, indent=1))


def compare_losses(rows: list[Row], tolerance: float) -> list[str]:
    """Fills in the differences to the first row's losses. Complaints: who lies further off; or who does not, at twice the
    learning rate. NaN agrees with nothing."""
    found = []
    reference = [{"loss": loss} for loss in rows[0].losses] if rows else []
    for row in rows[1:]:
        row.difference = relative_difference([{"loss": loss} for loss in row.losses], reference, "loss")
        agrees = row.difference <= tolerance  # NaN does not
        if TWICE in row.contestant.split("+"):
            if agrees:
                found.append(
                    f"{row.contestant}: twice the learning rate moves no loss by more than {tolerance:g}, so the comparison "
                    "would find nothing: give more --steps, a larger optimizer.lr or a smaller --tolerance"
                )
        elif not agrees:
            found.append(f"{row.contestant}: a loss is off by {row.difference:.3g}, more than {tolerance:g}")
    return found


def table(rows: list[Row]) -> str:
    """The rows, readable."""
    lines = [
        f"{'contestant':<34} {'step ms':>9} {'tokens/s/GPU':>12} {'alloc GiB':>9} {'resv GiB':>9} {'first loss':>10} "
        f"{'last':>8} {'difference':>10}"
    ]
    for row in rows:
        lines.append(
            f"{row.contestant:<34} {row.step_ms:>9.2f} {row.tokens_per_s:>12.0f} {row.peak_allocated_gib:>9.2f} "
            f"{row.peak_reserved_gib:>9.2f} {row.losses[0]:>10.4f} {row.losses[-1]:>8.4f} {row.difference:>10.2g}"
        )
    return "\n".join(lines)


def run_all(bench: Bench, contestants: list[Contestant]) -> int:
    """All of them; returns the exit status. One that fails on all ranks alike does not take the others with it."""
    rows: list[Row] = []
    failures: dict[str, str] = {}
    for contestant in contestants:
        begin = time.perf_counter()
        try:
            rows.append(bench.run(contestant))
        except Exception as error:
            traceback.print_exc()
            failures[contestant.name] = f"{type(error).__name__}: {error}"
            traceback.clear_frames(error.__traceback__)  # which hold its model
        else:
            compare_losses(rows, bench.tolerance)
            if bench.rank == 0:
                took = time.perf_counter() - begin
                print(f"{table(rows[-1:])}\n{contestant.name}: {took:.1f} s in all", file=sys.stderr, flush=True)
        bench.report(rows, failures)
    complaints = compare_losses(rows, bench.tolerance)
    complaints += [
        f"{name}: its model is still alive, so its memory counts for the next one" for name in bench.still_alive
    ]
    complaints += [
        f"{row.contestant}: {row.left_mib:.0f} MiB were allocated before it" for row in rows if row.left_mib > LEFT_MIB
    ]
    complaints += [f"{name} failed: {text}" for name, text in failures.items()]
    if bench.rank == 0:
        print(f"{bench.model}, {bench.dtype}, global batch {bench.global_batch_size}\n{table(rows)}", flush=True)
        print("\n".join([f"FAIL: {text}" for text in complaints] or ["all losses agree"]), flush=True)
    return 1 if complaints else 0


def main() -> None:
    """The command line."""
    try:
        args, titan_options = parse_arguments()
        if args.share_gpu:
            share_gpu()
        from titan_integration import cpu

        on_gpu = not cpu.install()
        num_ranks = int(os.environ["WORLD_SIZE"])
        names = (args.contestants or default_contestants(num_ranks, on_gpu)).split(",")
        if args.check:
            names.append(f"{names[0].partition('+')[0]}+{TWICE}")
        contestants = [parse_contestant(name, num_ranks) for name in names]
    except UsageError as error:
        sys.exit(f"bench_titan.py: {error}")
    bench = Bench(args, titan_options)
    bench.train_tokenizer()
    status = run_all(bench, contestants)
    dist.barrier(device_ids=[torch.cuda.current_device()] if on_gpu else None)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the plain teardown of communicators that share a GPU hangs


if __name__ == "__main__":
    main()
