#!/usr/bin/env python3
"""Loss curves of one TOML in several parallel arrangements, settings and seeds, in one picture.

    python scripts/curves.py train_configs/llama3_20m.toml --steps 400 --runs single,fsdp4,gtp4,single@7 --png
    curves.png
    python scripts/curves.py train_configs/llama3_debug.toml --steps 200 --within 0.01 --png wires.png --runs
    "gtp2,mxfp8: gtp2 --gtp.wire_format=mxfp8"

A run is an arrangement of compare.py, with `@SEED` for other initial weights and another order of the data than the
TOML's seed gives, with torchtitan's options of this run only behind it, and with `LABEL:` before it. The final loss is
the mean over the last 20 steps. Those of the first run's seed have to agree with the first run's at least as well as the
runs of other seeds do, or with `--within` to that fraction of it: otherwise the exit status is 1. Curves are kept beside
the picture in a JSON file; a later call with the same TOML and options takes from it what is there. Other options are
compare.py's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from charts import pyplot
from compare import Arrangement, Comparison, UsageError, parse_arguments, parse_arrangement

NUM_FINAL = 20


class Run(NamedTuple):
    """One of --runs."""

    label: str
    arrangement: Arrangement
    seed: int | None
    options: list[str]


def parse_run(text: str) -> Run:
    """The run of "gtp4", "gtp4@7" or "fp8: gtp4 --gtp.wire_format=fp8"."""
    label, _, rest = text.strip().rpartition(":")
    name, *options = shlex.split(rest) or [""]
    name, _, seed = name.partition("@")
    if seed and not seed.isdigit() or options and not label:
        raise UsageError(f"run {text!r}: want ARRANGEMENT, ARRANGEMENT@SEED or LABEL: ARRANGEMENT OPTIONS")
    return Run(label or rest.strip(), parse_arrangement(name), int(seed) if seed else None, options)


def parse_within(texts: list[str] | None, labels: list[str]) -> dict[str, float] | None:
    """Label -> how far its final loss may lie from the first's, as a fraction; None without --within."""
    if not texts:
        return None
    within = {}
    for text in texts:
        label, _, number = text.rpartition("=")
        if label and label not in labels:
            raise UsageError(f"--within {text}: no run {label!r} among {labels}")
        try:
            within.update(dict.fromkeys([label] if label else labels, float(number)))
        except ValueError:
            raise UsageError(f"--within {text}: want a number or LABEL=number") from None
    return within


def train(comparison: Comparison, number: int, run: Run) -> dict[str, list[float] | str]:
    """What one run recorded of every step: "loss", "seconds" and "peak_memory_bytes" of its first rank; and "gathers"."""
    options = list(comparison.titan_options)
    before = comparison.toml.get("debug", {})
    comparison.titan_options = [*options, *run.options]
    if run.seed is not None:
        comparison.toml["debug"] = {**before, "seed": run.seed}
        comparison.titan_options.append(f"--training.data_seed={run.seed}")
    try:
        result = comparison.run(number, run.arrangement)
        keys = ("loss", "seconds", "peak_memory_bytes")
        return {key: [record[key] for record in result.records] for key in keys} | {"gathers": result.gathers}
    finally:
        comparison.toml["debug"], comparison.titan_options = before, options


def plot(curves: dict[str, dict[str, list[float] | str]], path: Path, title: str) -> None:
    """All curves, each a running mean over 10 steps."""
    figure, axes = pyplot().subplots(figsize=(8, 5))
    for style, (name, records) in zip(["-", "--", "-.", ":"] * len(curves), curves.items()):
        losses = records["loss"]
        means = [statistics.fmean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
        axes.plot(range(1, len(losses) + 1), means, style, label=name)
    axes.set(xlabel="step", ylabel="loss (mean of 10 steps)", title=title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def report(curves: dict[str, dict[str, list[float] | str]], runs: list[Run], within: dict[str, float] | None) -> bool:
    """Print the final losses; whether those of equal seeds lie ``within``, or else within the spread of the seeds."""
    final = {name: statistics.fmean(records["loss"][-NUM_FINAL:]) for name, records in curves.items()}
    first = next(iter(final.values()))
    distance = {name: abs(value - first) for name, value in final.items()}
    same = {run.label for run in runs if run.seed == runs[0].seed}
    spread = max((distance[name] for name in final if name not in same), default=None)
    if within is None and spread is None:
        raise UsageError(
            "--runs: give one with another seed, such as single@7, to compare differences with, or --within"
        )
    print(
        f"\n| run | mean loss of the last {NUM_FINAL} steps | difference to {runs[0].label} | median step (s) | peak memory "
        "(MiB) | |\n|---|---|---|---|---|---|"
    )
    agree = True
    for name, value in final.items():
        limit = spread if within is None else within[name] * first
        agrees = name not in same or distance[name] <= limit
        agree &= agrees
        verdict = ("agrees" if agrees else f"FAIL (more than {limit:.2g})") if name in same else "another seed"
        seconds, memory = statistics.median(curves[name]["seconds"]), max(curves[name]["peak_memory_bytes"]) / 2**20
        loss = f"{value:.5f} | {distance[name]:.2g} ({distance[name] / first:.2%})"
        print(f"| {name} | {loss} | {seconds:.3f} | {memory:,.0f} | {verdict} |")
    print("all agree" if agree else "FAIL")
    return agree


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="single,fsdp4,gtp4,single@7")
    parser.add_argument("--png", type=Path, required=True)
    parser.add_argument("--within", action="append", help="0.01, or LABEL=0.02 for one run; may be given several times")
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    try:
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError("the picture needs matplotlib: pip install matplotlib")
        args, titan_options = parse_arguments()
        runs = [parse_run(text) for text in own.runs.split(",")]
        labels = [run.label for run in runs]
        if len(set(labels)) < len(labels):
            raise UsageError(f"--runs: two have the same label among {labels}")
        within = parse_within(own.within, labels)
        own.png.parent.mkdir(parents=True, exist_ok=True)
        kept = own.png.with_suffix(".json")
        settings = {"toml": args.toml.read_text(), "options": rest}
        before = json.loads(kept.read_text()) if kept.exists() else {}
        known = before.get("curves", {}) if before.get("settings") == settings else {}
        curves = {}
        with tempfile.TemporaryDirectory(prefix="curves_") as folder:
            comparison = Comparison(args, titan_options, Path(folder))
            for number, (name, run) in enumerate(zip(labels, runs)):
                text = " ".join([run.arrangement.name, str(run.seed), *run.options])
                known[text] = curves[name] = known.get(text) or train(comparison, number, run)
                losses = curves[name]["loss"]
                print(
                    f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}; gathers: {curves[name]['gathers']}", flush=True
                )
                kept.write_text(json.dumps({"settings": settings, "curves": known}))
        plot(curves, own.png, f"{args.toml.name}, {args.dtype}, {comparison.optimizer}")
        return 0 if report(curves, runs, within) else 1
    except UsageError as error:
        print(f"curves.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
