#!/usr/bin/env python3
"""Loss curves of one TOML in several parallel arrangements and seeds, in one picture.

    python scripts/curves.py train_configs/llama3_20m.toml --steps 400 --runs single,fsdp4,gtp4,single@7 --png
    curves.png

A run is an arrangement of compare.py, with `@SEED` for other initial weights and another order of the data than the
TOML's seed gives. The final loss is the mean over the last 20 steps. Those of the first run's seed have to agree with
the first run's at least as well as the runs of other seeds do: otherwise the exit status is 1. Curves are kept beside
the picture in a JSON file; a later call with the same TOML and options takes from it what is there. Other options are
compare.py's.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from pathlib import Path

from compare import Arrangement, Comparison, UsageError, parse_arguments, parse_arrangement

NUM_FINAL = 20


def parse_run(text: str) -> tuple[Arrangement, int | None]:
    """(arrangement, seed or None) of "gtp4@7"."""
    name, _, seed = text.partition("@")
    if seed and not seed.isdigit():
        raise UsageError(f"run {text!r}: want ARRANGEMENT or ARRANGEMENT@SEED")
    return parse_arrangement(name), int(seed) if seed else None


def train(comparison: Comparison, number: int, arrangement: Arrangement, seed: int | None) -> list[float]:
    """The loss of every step of one run."""
    options = list(comparison.titan_options)
    before = comparison.toml.get("debug", {})
    if seed is not None:
        comparison.toml["debug"] = {**before, "seed": seed}
        comparison.titan_options = [*options, f"--training.data_seed={seed}"]
    try:
        return [record["loss"] for record in comparison.run(number, arrangement).records]
    finally:
        comparison.toml["debug"], comparison.titan_options = before, options


def plot(curves: dict[str, list[float]], path: Path, title: str) -> None:
    """All curves, each a running mean over 10 steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for style, (name, losses) in zip(["-", "--", "-.", ":"] * len(curves), curves.items()):
        means = [statistics.fmean(losses[max(0, i - 9) : i + 1]) for i in range(len(losses))]
        axes.plot(range(1, len(losses) + 1), means, style, label=name)
    axes.set(xlabel="step", ylabel="loss (mean of 10 steps)", title=title)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def report(curves: dict[str, list[float]], seeds: list[int | None]) -> bool:
    """Print the final losses; whether those of equal seeds lie within the spread of the seeds."""
    final = {name: statistics.fmean(losses[-NUM_FINAL:]) for name, losses in curves.items()}
    first = next(iter(final.values()))
    distance = {name: abs(value - first) for name, value in final.items()}
    same = [name for name, seed in zip(final, seeds) if seed == seeds[0]]
    spread = max((distance[name] for name in final if name not in same), default=None)
    print(f"\n| run | mean loss of the last {NUM_FINAL} steps | difference to {next(iter(final))} |\n|---|---|---|")
    for name, value in final.items():
        print(f"| {name} | {value:.5f} | {distance[name]:.2g} |")
    if spread is None:
        raise UsageError("--runs: give one with another seed, such as single@7, to compare differences with")
    worst = max(distance[name] for name in same)
    agrees = worst <= spread
    print(
        f"largest difference at the first run's seed {worst:.2g}, of other seeds {spread:.2g}: {agrees and 'agree' or 'FAIL'}"
    )
    return agrees


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", default="single,fsdp4,gtp4,single@7")
    parser.add_argument("--png", type=Path, required=True)
    own, rest = parser.parse_known_args()
    sys.argv[1:] = rest
    try:
        if importlib.util.find_spec("matplotlib") is None:
            raise UsageError("the picture needs matplotlib: pip install matplotlib")
        args, titan_options = parse_arguments()
        names = [text.strip() for text in own.runs.split(",")]
        runs = [parse_run(name) for name in names]
        own.png.parent.mkdir(parents=True, exist_ok=True)
        kept = own.png.with_suffix(".json")
        settings = {"toml": args.toml.read_text(), "options": rest}
        before = json.loads(kept.read_text()) if kept.exists() else {}
        known = before.get("curves", {}) if before.get("settings") == settings else {}
        curves = {}
        with tempfile.TemporaryDirectory(prefix="curves_") as folder:
            comparison = Comparison(args, titan_options, Path(folder))
            for number, (name, (arrangement, seed)) in enumerate(zip(names, runs)):
                curves[name] = known.get(name) or train(comparison, number, arrangement, seed)
                print(f"{name}: loss {curves[name][0]:.4f} to {curves[name][-1]:.4f}", flush=True)
                kept.write_text(json.dumps({"settings": settings, "curves": {**known, **curves}}))
        plot(curves, own.png, f"{args.toml.name}, {args.dtype}, {comparison.optimizer}")
        return 0 if report(curves, [seed for _, seed in runs]) else 1
    except UsageError as error:
        print(f"curves.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
