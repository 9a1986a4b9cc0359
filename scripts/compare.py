#!/usr/bin/env python3
"""Runs one TOML in several parallel arrangements and compares loss and gradient norm of every step.

    python scripts/compare.py train_configs/llama3_debug.toml --steps 20 --arrangements single,fsdp2,gtp2,tp2gtp2

An arrangement is `single`, `fsdpN`, or a product of axes with degrees, such as `tp2gtp2` or `pp2idps2gtp2`: `dpr`
(dp_replicate), `dps` (dp_shard), `pp` (`pp2`: 1F1B, `pp2i`: interleaved 1F1B, `pp2z`: interleaved zero bubble, `pp2v`:
V-shaped zero bubble), `cp`, `tp`, `gtp`, `ep`, `etp`, `egtp`. Every arrangement trains the same weights on the same
global batches, without warm-up and at a constant learning rate, each as a torchrun of its own. Other options are handed
to torchtitan (`--training.seq_len 64`). Compared with the first arrangement are loss and gradient norm of every step
and, of the first step, the whole gradient of every parameter.

Exit status: 0 where all agree with the first arrangement within the tolerance, 1 where one does not, 2 where a run
failed or the arguments are wrong.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
AXIS = re.compile(r"(egtp|etp|ep|dpr|dps|gtp|pp|cp|tp)(\d+)(zb?|i|v)?")
SCHEDULES = {
    None: "1F1B",
    "i": "Interleaved1F1B",
    "z": "InterleavedZeroBubble",
    "zb": "InterleavedZeroBubble",
    "v": "ZBVZeroBubble",
}
LOSS_MODES = ("token",)
# float32 noise is 1e-7. bfloat16 rounds to 4e-3, and differently in every arrangement (autocast or cast weights).
TOLERANCES = {"float32": 1e-6, "bfloat16": 3e-2}
# A gradient's difference is a vector's, relative to its 2-norm; sums over ranks are ordered differently.
GRADIENT_TOLERANCES = {"float32": 1e-5, "bfloat16": 1e-1}
SGD_LR = 0.1


@dataclass
class Arrangement:
    """Degrees of one run, by the axis names of this script."""

    name: str
    degrees: dict[str, int] = field(default_factory=dict)
    schedule: str | None = None
    lr_scale: float = 1.0

    def __getitem__(self, axis: str) -> int:
        return self.degrees.get(axis, 1)

    @property
    def num_ranks(self) -> int:
        """Processes of the run; ep, etp and egtp reuse the ranks of the other axes."""
        return math.prod(self[axis] for axis in ("dpr", "dps", "pp", "cp", "tp", "gtp"))

    @property
    def data_degree(self) -> int:
        """How many ranks read different samples."""
        return self["dpr"] * self["dps"] * self["gtp"]

    def options(self) -> list[str]:
        """The torchtitan options that choose this arrangement, whatever the TOML says."""
        values = {
            "parallelism.data_parallel_replicate_degree": self["dpr"],
            "parallelism.data_parallel_shard_degree": self["dps"],
            "parallelism.pipeline_parallel_degree": self["pp"],
            "parallelism.pipeline_parallel_schedule": SCHEDULES[self.schedule],
            "parallelism.context_parallel_degree": self["cp"],
            "parallelism.tensor_parallel_degree": self["tp"],
            "parallelism.expert_parallel_degree": self["ep"],
            "parallelism.expert_tensor_parallel_degree": self["etp"],
            "gtp.tensor_parallel_num_weight_shards": self["tp"] * self["gtp"],
            "gtp.expert_tensor_parallel_num_weight_shards": self["etp"] * self["egtp"],
        }
        return [f"--{name}={value}" for name, value in values.items()]


class UsageError(Exception):
    """Wrong arguments, or a run that failed: exit status 2."""


def parse_arrangement(name: str) -> Arrangement:
    """`name` as an arrangement. Raises UsageError with the known axes."""
    if name == "single":
        return Arrangement(name)
    text = re.sub(r"^fsdp(?=\d+$)", "dps", name)
    degrees: dict[str, int] = {}
    schedule = None
    position = 0
    while position < len(text):
        match = AXIS.match(text, position)
        if match is None or match[1] in degrees or int(match[2]) < 1 or (match[3] and match[1] != "pp"):
            raise UsageError(
                f"arrangement {name!r}: cannot read {text[position:]!r}; want 'single', 'fsdpN' or a product of dpr, "
                "dps, pp, cp, tp, gtp, ep, etp, egtp, each once with its degree ('ppNi', 'ppNz' and 'ppNv' name a schedule)"
            )
        degrees[match[1]] = int(match[2])
        schedule = match[3] or schedule
        position = match.end()
    if not degrees:
        raise UsageError("an arrangement is empty")
    return Arrangement(name, degrees, schedule)


def parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Our options, and those for torchtitan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("toml", type=Path, help="a torchtitan TOML")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--arrangements", default="single,gtp2", help="comma separated; the first is the reference")
    parser.add_argument("--dtype", choices=sorted(TOLERANCES), default="float32", help="dtype of the computation")
    parser.add_argument("--optimizer", choices=("SGD", "AdamW", "Adam", "Muon"), help="default: the TOML's")
    parser.add_argument("--lr", type=float, help=f"default: the TOML's; {SGD_LR} with --optimizer SGD")
    parser.add_argument("--lr-scale", help="'2': the last arrangement, 'NAME=2': that one runs with another lr")
    parser.add_argument("--loss-mode", default="token", help="how the loss is normalised: token")
    parser.add_argument("--tolerance", type=float, help=f"of loss and norm, relative; default {TOLERANCES}")
    parser.add_argument(
        "--gradient-tolerance",
        type=float,
        help=f"of every parameter's gradient in step 1, relative to its norm; default {GRADIENT_TOLERANCES}",
    )
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for each run")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks on one GPU (see shared_gpu.py)")
    args, titan_options = parser.parse_known_args()
    if args.loss_mode not in LOSS_MODES:
        raise UsageError(
            f"--loss-mode {args.loss_mode!r} is not supported yet; choose one of {', '.join(LOSS_MODES)} "
            "(torchtitan divides the summed loss by the global number of tokens)"
        )
    if not args.toml.is_file():
        raise UsageError(f"{args.toml}: no such file")
    if args.steps < 1:
        raise UsageError(f"--steps {args.steps}: must be 1 or more")
    if args.tolerance is None:
        args.tolerance = TOLERANCES[args.dtype]
    if args.gradient_tolerance is None:
        args.gradient_tolerance = GRADIENT_TOLERANCES[args.dtype]
    return args, titan_options


def apply_lr_scale(text: str | None, arrangements: list[Arrangement]) -> None:
    """Sets `lr_scale` of the arrangement that `--lr-scale` means."""
    if text is None:
        return
    name, _, factor = text.rpartition("=")
    chosen = [a for a in arrangements if a.name == name] if name else arrangements[-1:]
    if not chosen:
        raise UsageError(f"--lr-scale {text}: no arrangement {name!r} among {[a.name for a in arrangements]}")
    try:
        chosen[-1].lr_scale = float(factor)
    except ValueError:
        raise UsageError(f"--lr-scale {text}: want a number or NAME=number") from None


@dataclass
class Run:
    """What one arrangement gave.

    Attributes:
        records: a dict a step with "step", "loss" and "grad_norm".
        gradients_folder: of the files with the whole gradients of step 1.
        gathers: what the last step gathered, in words; empty where GTP was off.
    """

    records: list[dict]
    gradients_folder: Path
    gathers: str


class Comparison:
    """The runs of one invocation, in one temporary folder.

    Args:
        args, titan_options: from `parse_arguments`.
        folder: for the runs' outputs.
    """

    def __init__(self, args: argparse.Namespace, titan_options: list[str], folder: Path) -> None:
        self.args, self.titan_options, self.folder = args, titan_options, folder
        with open(args.toml, "rb") as file:
            self.toml = tomllib.load(file)
        optimizer, training = self.toml.get("optimizer", {}), self.toml.get("training", {})
        self.optimizer = args.optimizer or optimizer.get("name", "AdamW")
        self.lr = args.lr or (SGD_LR if args.optimizer == "SGD" else optimizer.get("lr", 8e-4))
        self.local_batch_size = training.get("local_batch_size", 8)
        self.global_batch_size = training.get("global_batch_size", -1)
        if self.global_batch_size < 0:
            parallelism, gtp = self.toml.get("parallelism", {}), self.toml.get("gtp", {})
            tp = parallelism.get("tensor_parallel_degree", 1)
            degree = gtp.get("tensor_parallel_num_weight_shards", tp) // tp
            degree *= parallelism.get("data_parallel_replicate_degree", 1)
            degree *= max(1, parallelism.get("data_parallel_shard_degree", 1))
            self.global_batch_size = self.local_batch_size * degree
        self.tokenizer: Path | None = None
        self.seed_checkpoint: Path | None = None

    def common_options(self) -> list[str]:
        """What is the same in every arrangement."""
        values = {
            "job.config_file": self.args.toml.resolve(),
            "training.steps": self.args.steps,
            "training.global_batch_size": self.global_batch_size,
            "training.mixed_precision_param": self.args.dtype,
            "training.token_cache_folder": self.folder / "token_cache",
            "optimizer.name": self.optimizer,
            "optimizer.implementation": "foreach",
            # A warm-up or a decay would hide a wrong learning rate.
            "lr_scheduler.warmup_steps": 0,
            "lr_scheduler.decay_ratio": 0.0,
            "debug.seed": self.toml.get("debug", {}).get("seed", 0),
            "metrics.log_freq": 1,
        }
        flags = [
            "--training.exact_grad_norm",
            "--training.logical_init",
            "--metrics.enable_jsonl",
            "--metrics.no_enable_tensorboard",
            "--metrics.disable_color_printing",
        ]
        options = [f"--{name}={value}" for name, value in values.items()] + flags
        if self.tokenizer is not None:
            options.append(f"--model.hf_assets_path={self.tokenizer}")
        return options

    def batch_options(self, arrangement: Arrangement) -> list[str]:
        """The global batch cut into microbatches: the TOML's where they fit, else one."""
        per_rank, rest = divmod(self.global_batch_size, arrangement.data_degree)
        if rest:
            raise UsageError(
                f"arrangement {arrangement.name!r} splits the global batch of {self.global_batch_size} samples over "
                f"{arrangement.data_degree} ranks; set training.global_batch_size in the TOML to a multiple"
            )
        local = self.local_batch_size if per_rank % self.local_batch_size == 0 else per_rank
        return [f"--training.local_batch_size={local}"]

    def launch(self, name: str, num_ranks: int, options: list[str]) -> Path:
        """One torchrun; returns its dump folder. Raises UsageError with the end of its output if it fails."""
        dump_folder = self.folder / name
        dump_folder.mkdir()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
        # Ranks that share a GPU have no module to start but a script that prepares them.
        entry = [str(ROOT / "scripts" / "shared_gpu.py")] if self.args.share_gpu else ["-m"]
        command += [
            *entry,
            "titan_integration.train",
            f"--job.dump_folder={dump_folder}",
            *options,
            *self.titan_options,
        ]
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        log = dump_folder / "log.txt"
        with open(log, "w") as file:
            try:
                status = subprocess.run(
                    command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, timeout=self.args.timeout
                ).returncode
            except subprocess.TimeoutExpired:
                status = f"time-out after {self.args.timeout:.0f} s"
        if status != 0:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-60:])
            raise UsageError(f"{tail}\nthe run of {name!r} on {num_ranks} ranks failed: {status}")
        if self.tokenizer is None and (dump_folder / "checkpoint" / "tokenizer").is_dir():
            self.tokenizer = dump_folder / "checkpoint" / "tokenizer"
        return dump_folder

    def initial_weights(self) -> list[str]:
        """Options that load weights drawn by a single rank: pipeline stages draw theirs from seeds of their own."""
        if self.seed_checkpoint is None:
            options = [*self.common_options(), *Arrangement("seed").options()]
            options += ["--checkpoint.enable", "--checkpoint.create_seed_checkpoint", "--checkpoint.folder=checkpoint"]
            self.seed_checkpoint = self.launch("seed_checkpoint", 1, options) / "checkpoint" / "step-0"
        return [
            "--checkpoint.enable",
            "--checkpoint.load_only",
            f"--checkpoint.initial_load_path={self.seed_checkpoint}",
        ]

    def run(self, number: int, arrangement: Arrangement) -> Run:
        """Trains one arrangement. Raises UsageError if that fails."""
        name = f"{number}_{arrangement.name}"
        gradients_folder = self.folder / name / "gradients"
        checkpoint = self.initial_weights() if arrangement["pp"] > 1 else ["--checkpoint.no_enable"]
        options = [
            *self.common_options(),
            *arrangement.options(),
            *self.batch_options(arrangement),
            f"--optimizer.lr={self.lr * arrangement.lr_scale}",
            f"--debug.first_gradients_folder={gradients_folder}",
            *checkpoint,
        ]
        dump_folder = self.launch(name, arrangement.num_ranks, options)
        with open(dump_folder / "metrics.jsonl") as file:
            records = [json.loads(line) for line in file]
        if [record["step"] for record in records] != list(range(1, self.args.steps + 1)):
            raise UsageError(f"the run of {arrangement.name!r} recorded {len(records)} of {self.args.steps} steps")
        log = (dump_folder / "log.txt").read_text(errors="replace")
        return Run(records, gradients_folder, log.partition("GTP gathers of the last step: ")[2].partition("\n")[0])


def relative_difference(values: list[dict], reference: list[dict], key: str) -> float:
    """The largest over the steps; NaN where any value is NaN."""
    differences = [abs(v[key] - r[key]) / max(abs(r[key]), 1e-30) for v, r in zip(values, reference, strict=True)]
    return math.nan if any(math.isnan(d) for d in differences) else max(differences)


def load_gradients(folder: Path) -> dict:
    """Parameter name -> whole gradient of step 1, over all pipeline ranks."""
    import torch  # the launcher needs it for nothing else

    gradients: dict = {}
    for file in sorted(folder.glob("*.pt")):
        gradients.update(torch.load(file))
    return gradients


def largest_gradient_difference(gradients: dict, reference: dict) -> tuple[float, str]:
    """(the largest over all parameters of |difference| / |gradient| in the 2-norm, that parameter's name).

    Infinite where a parameter has a gradient in one run only, NaN where a gradient has.
    """
    only_one = sorted(gradients.keys() ^ reference.keys())
    if only_one or not reference:
        return math.inf, only_one[0] if only_one else "(no gradients)"
    differences = {}
    for name, grad in gradients.items():
        expected = reference[name].double()
        differences[name] = float((grad.double() - expected).norm() / expected.norm().clamp_min(1e-30))
    worst = max(differences, key=lambda name: math.inf if math.isnan(differences[name]) else differences[name])
    return differences[worst], worst


def print_steps(arrangements: list[Arrangement], runs: list[Run]) -> None:
    """Loss and gradient norm of every step, a column an arrangement."""
    width = max(24, *(len(a.name) + 2 for a in arrangements))
    print("step  " + "".join(f"{a.name:<{width}}" for a in arrangements) + "(loss grad_norm)")
    for records in zip(*(run.records for run in runs), strict=True):
        cells = (f"{record['loss']:.7g} {record['grad_norm']:.7g}" for record in records)
        print(f"{records[0]['step']:4}  " + "".join(f"{cell:<{width}}" for cell in cells))


def print_differences(args: argparse.Namespace, arrangements: list[Arrangement], runs: list[Run]) -> bool:
    """The table of worst relative differences, in Markdown; returns whether all are within the tolerances."""
    agree = True
    worst = {"loss": 0.0, "grad_norm": 0.0, "gradient": 0.0}
    tolerances = {"loss": args.tolerance, "grad_norm": args.tolerance, "gradient": args.gradient_tolerance}
    reference = load_gradients(runs[0].gradients_folder)
    print(f"\n| arrangement | ranks | {' | '.join(worst)} | of parameter | |\n|---|---|---|---|---|---|---|")
    for arrangement, run in zip(arrangements[1:], runs[1:], strict=True):
        found = {key: relative_difference(run.records, runs[0].records, key) for key in ("loss", "grad_norm")}
        found["gradient"], name = largest_gradient_difference(load_gradients(run.gradients_folder), reference)
        # Written so that NaN does not agree.
        failed = [key for key, difference in found.items() if not difference <= tolerances[key]]
        agree &= not failed
        verdict = "agrees" if not failed else f"FAIL ({', '.join(f'{key} > {tolerances[key]:g}' for key in failed)})"
        cells = " | ".join(f"{difference:.3g}" for difference in found.values())
        print(f"| {arrangement.name} | {arrangement.num_ranks} | {cells} | {name} | {verdict} |")
        for key, difference in found.items():
            worst[key] = difference if math.isnan(difference) else max(worst[key], difference)
    if not agree:
        print("FAIL")
    text = " ".join(f"{key} {difference:.3g}" for key, difference in worst.items())
    print(f"max relative difference to {arrangements[0].name}: {text}")
    return agree


def compare(args: argparse.Namespace, titan_options: list[str]) -> int:
    """Runs and compares; returns the exit status."""
    arrangements = [parse_arrangement(name.strip()) for name in args.arrangements.split(",")]
    apply_lr_scale(args.lr_scale, arrangements)
    if len(arrangements) < 2:
        raise UsageError(f"--arrangements {args.arrangements}: give at least two")
    runs = []
    with tempfile.TemporaryDirectory(prefix="compare_") as folder:
        comparison = Comparison(args, titan_options, Path(folder))
        for arrangement in arrangements:
            comparison.batch_options(arrangement)  # bad batch sizes show before the first run
        print(
            f"{args.toml}: {args.steps} steps, {args.dtype}, {comparison.optimizer}, lr {comparison.lr:g}, "
            f"global batch {comparison.global_batch_size}, loss mode {args.loss_mode}",
            flush=True,
        )
        for number, arrangement in enumerate(arrangements):
            runs.append(comparison.run(number, arrangement))
            scaled = f", lr x {arrangement.lr_scale:g}" if arrangement.lr_scale != 1.0 else ""
            print(f"ran {arrangement.name} on {arrangement.num_ranks} rank(s){scaled}", flush=True)
        print_steps(arrangements, runs)
        return 0 if print_differences(args, arrangements, runs) else 1


def main() -> int:
    """The command line."""
    try:
        return compare(*parse_arguments())
    except UsageError as error:
        print(f"compare.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
