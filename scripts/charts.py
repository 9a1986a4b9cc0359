#!/usr/bin/env python3
"""Tables and pictures of what bench.py and bench_titan.py measured.

    python scripts/charts.py bench.json symm/bench.json bench_titan.json --table             # Markdown, to the screen
    python scripts/charts.py bench.json bench_titan.json --out scripts/pictures --name x2    # x2_*.svg; needs matplotlib

Reports of bench.py on the same machine and layout are put together: each row is over the floor of its own report. A contestant
that several reports have counts once, from the first. Pictures: `step` (step time over that of no sharding, against tokens
of a GPU), `memory` (peak reserved, and allocated dashed), `titan` (tokens/s, memory) and `loss` (loss of every step). Those
in the README are kept in scripts/pictures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

MAX_SVG_BYTES = 60_000
WORDS = {
    "none": "no sharding (bf16 parameters)",
    "fsdp_block": "FSDP2, one group a block",
    "fsdp_linear": "FSDP2, one group a linear",
    "gtp": "GTP",
    "collective": "collectives",
    "symmetric": "symmetric memory",
    "step": "step graph",
    "block": "block graphs",
    "compiled": "compiled",
    "compile": "compiled",
    "params16": "bf16 parameters",
    "reduce16": "bf16 reduction",
    "prefetch": "prefetch of 2",
    "keep": "kept until the backward",
    "registered": "NCCL's allocator",
    "symm": "NCCL's symmetric memory",
    "lr2": "learning rate x 2",
}


class ReportError(Exception):
    """A file that is no report."""


def label(contestant: str) -> str:
    """In words."""
    words = []
    for place, part in enumerate(contestant.split("+")):
        if place == 0 and part not in WORDS:  # an arrangement of bench_titan.py
            bare = part.rstrip("0123456789")
            part = {"fsdp": "FSDP2", "gtp": "GTP", "single": "one rank"}.get(bare, part)
        words.append(WORDS.get(part, part if place == 0 else f"{part} wire"))
    return ", ".join(words)


def read(path: Path) -> dict:
    """A report. Raises ReportError where it lacks something."""
    try:
        report = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ReportError(f"{path}: {error}") from None
    if not isinstance(report, dict) or not {"title", "options", "rows"} <= report.keys():
        raise ReportError(f"{path}: not a report of bench.py or bench_titan.py: title, options or rows are missing")
    return report


def is_titan(report: dict) -> bool:
    """Whether it is bench_titan.py's."""
    return report.get("kind") == "titan"


def layout_of(report: dict) -> str:
    """Machine and degrees, which rows that are put together share."""
    options = report["options"]
    if is_titan(report):
        return f"{report['title']}; {options['model']}, {options['dtype']}"
    degrees = (f"{name} {options[name]}" for name in ("tp", "dp_shard", "dp_replicate") if options.get(name, 1) > 1)
    return "; ".join([report["title"], f"{options['layers']} blocks", *degrees])


def merged(reports: Sequence[dict]) -> dict[str, dict]:
    """Layout -> one report with the rows of all that have it."""
    found: dict[str, dict] = {}
    for report in reports:
        one = found.setdefault(layout_of(report), {**report, "rows": []})
        known = {row["contestant"] for row in one["rows"]}
        one["rows"] += [row for row in report["rows"] if row["contestant"] not in known]
    return found


def by_contestant(rows: Sequence[dict]) -> dict[str, list[dict]]:
    """In order of appearance, sizes ascending."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        found.setdefault(row["contestant"], []).append(row)
    return {name: sorted(own, key=lambda row: row.get("tokens", 0)) for name, own in found.items()}


# ---- tables


def cell(values: Sequence[float | None], digits: int, unit: str = "") -> str:
    """Numbers with commas between them; nothing where there is none."""
    known = [f"{value:,.{digits}f}" for value in values if value is not None]
    return f"{', '.join(known)}{unit if known else ''}"


def stack_table(rows: Sequence[dict], tp: int) -> str:
    """Of bench.py; a row a contestant, sizes one after the other."""
    sizes = sorted({row["tokens"] for row in rows})
    lines = [
        f"| {', '.join(f'{size:,}' for size in sizes)} tokens | step, ms | over no sharding | tokens/s/GPU | peak reserved, GiB | "
        "peak allocated, GiB | exposed communication, ms |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, own in by_contestant(rows).items():
        per_s = [1e3 * row["tokens"] / tp / row["step_ms"] for row in own]
        traced = [
            f"{cell([row['exposed_ms']], 1)} at {row['tokens']:,}" for row in own if row.get("exposed_ms") is not None
        ]
        sizes_of = "" if len(own) == len(sizes) else f" ({', '.join(str(row['tokens']) for row in own)} only)"
        cells = [
            label(name) + sizes_of,
            cell([row["step_ms"] for row in own], 1),
            cell([row.get("over_floor") for row in own], 2),
            cell(per_s, 0).replace(", ", " / "),
            cell([row["peak_reserved_gib"] for row in own], 1),
            cell([row["peak_allocated_gib"] for row in own], 1),
            "; ".join(traced),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def titan_table(rows: Sequence[dict]) -> str:
    """Of bench_titan.py."""
    first = rows[0]["step_ms"] if rows else 0.0
    lines = [
        "| | step, ms | over the first | tokens/s/GPU | peak reserved, GiB | peak allocated, GiB | last loss | worst difference of "
        "a loss |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            label(row["contestant"]),
            cell([row["step_ms"]], 1),
            cell([row["step_ms"] / first], 3),
            cell([row["tokens_per_s"]], 0),
            cell([row["peak_reserved_gib"]], 1),
            cell([row["peak_allocated_gib"]], 1),
            f"{row['losses'][-1]:.4f}",
            f"{row['difference']:.1e}" if row is not rows[0] else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(reports: dict[str, dict]) -> str:
    """All of them, each under its layout, with what failed."""
    parts = []
    for layout, report in reports.items():
        rows, tp = report["rows"], report["options"].get("tp", 1)
        text = titan_table(rows) if is_titan(report) else stack_table(rows, tp)
        failed = "".join(f"\n\nFailed: {label(name)}: {why}" for name, why in report.get("failures", {}).items())
        parts.append(f"{layout}\n\n{text}{failed}")
    return "\n\n".join(parts)


# ---- pictures


def pyplot():
    """matplotlib's, without a window. Raises ImportError."""
    import matplotlib

    matplotlib.use("Agg")
    # Text stays text, and the same figure gives the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "charts", "font.size": 9})
    from matplotlib import pyplot

    return pyplot


def family_colours(plt, contestants: Sequence[str]) -> dict[str, tuple]:
    """Cold ones for GTP, warm ones for FSDP2, gray for the floor."""
    found: dict[str, tuple] = {}
    for family, colours in (("gtp", "winter"), ("fsdp", "autumn"), ("", "gray")):
        mine = [name for name in contestants if name.startswith(family) and name not in found]
        found |= {name: plt.get_cmap(colours)(0.8 * place / max(1, len(mine) - 1)) for place, name in enumerate(mine)}
    return found


def lines_by_size(plt, rows: Sequence[dict], title: str, ylabel: str, keys: Sequence[tuple[str, str]]):
    """A line a contestant and key (key of a row, line style) against tokens."""
    figure, axis = plt.subplots(figsize=(8.5, 4.2))
    contestants = by_contestant(rows)
    colours = family_colours(plt, list(contestants))
    sizes = sorted({row["tokens"] for row in rows})
    for name, own in contestants.items():
        for number, (key, style) in enumerate(keys):
            points = [(row["tokens"], row[key]) for row in own if row.get(key) is not None]
            if points:
                text = label(name) if number == 0 else "_"
                marker = ("o" if name.startswith("gtp") else "s") if number == 0 else ""
                axis.plot(*zip(*points), style, marker=marker, markersize=4, color=colours[name], label=text)
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axis.minorticks_off()
    axis.set(xlabel="tokens of a GPU", ylabel=ylabel, title=title)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, bbox_to_anchor=(1, 1), loc="upper left")
    return figure


def draw_step(plt, rows: Sequence[dict], title: str):
    """Step time over the floor against tokens."""
    figure = lines_by_size(plt, rows, title, "step time over no sharding", [("over_floor", "-")])
    axis = figure.axes[0]
    axis.axhline(1.0, color="gray", linewidth=0.8)
    axis.set_yscale("log")
    highest = max((row["over_floor"] for row in rows if row.get("over_floor") is not None), default=1.0)
    ticks = [1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16] if highest > 2 else [1, 1.03, 1.08, 1.15, 1.25, 1.4, 1.6, 1.8, 2]
    ticks = [tick for tick in ticks if tick <= 1.2 * highest]
    axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    return figure


def draw_memory(plt, rows: Sequence[dict], title: str):
    """Peak memory against tokens."""
    keys = [("peak_reserved_gib", "-"), ("peak_allocated_gib", "--")]
    figure = lines_by_size(plt, rows, title, "peak memory, GiB (dashed: allocated)", keys)
    figure.axes[0].set_ylim(bottom=0)
    return figure


def draw_titan(plt, rows: Sequence[dict], title: str):
    """Bars of speed and memory, a contestant a line."""
    rows = [row for row in rows if "lr2" not in row["contestant"].split("+")]
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 1 + 0.35 * len(rows)), sharey=True)
    places = range(len(rows))
    left.barh(places, [row["tokens_per_s"] for row in rows], color="#4878cf")
    left.set_yticks(places, [label(row["contestant"]) for row in rows])
    left.invert_yaxis()
    left.set_xlabel("tokens/s/GPU")
    right.barh(places, [row["peak_reserved_gib"] for row in rows], color="#d0d0d0", label="reserved")
    right.barh(places, [row["peak_allocated_gib"] for row in rows], 0.4, color="#6acc65", label="allocated")
    right.set_xlabel("peak memory, GiB")
    right.legend(fontsize=8, bbox_to_anchor=(1, 1), loc="upper left")
    figure.suptitle(title, fontsize=9)
    return figure


def draw_loss(plt, rows: Sequence[dict], title: str):
    """Losses of all steps, thick below thin, so that lines on top of each other show."""
    figure, axis = plt.subplots(figsize=(8.5, 4.2))
    for place, row in enumerate(rows):
        twice = "lr2" in row["contestant"].split("+")
        style = {"color": "gray", "linestyle": ":"} if twice else {"linewidth": 1 + 7 * (len(rows) - place) / len(rows)}
        axis.plot(range(1, len(row["losses"]) + 1), row["losses"], label=label(row["contestant"]), **style)
    axis.set(xlabel="step", ylabel="loss", title=title)
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8, bbox_to_anchor=(1, 1), loc="upper left")
    return figure


DRAWN: dict[bool, dict[str, Callable]] = {
    False: {"step": draw_step, "memory": draw_memory},
    True: {"titan": draw_titan, "loss": draw_loss},
}


def draw(reports: dict[str, dict], folder: Path, name: str, suffix: str) -> list[Path]:
    """All pictures; returns their files.

    Raises:
        ReportError: an SVG grew too large for a repository.
    """
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for layout, report in reports.items():
        for kind, function in DRAWN[is_titan(report)].items():
            path = folder / f"{name}_{kind}.{suffix}"
            if path in paths:
                raise ReportError(f"{path}: reports of several layouts: draw them one at a time, by other --name")
            figure = function(plt, report["rows"], layout)
            figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Date": None} if suffix == "svg" else None)
            plt.close(figure)
            size = path.stat().st_size
            if suffix == "svg" and size > MAX_SVG_BYTES:
                raise ReportError(f"{path}: {size:,} bytes, more than {MAX_SVG_BYTES:,}: use --format png")
            paths.append(path)
    return paths


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--table", action="store_true", help="print Markdown tables")
    parser.add_argument("--out", type=Path, default=None, help="folder for pictures")
    parser.add_argument("--name", default="bench", help="what the pictures' names begin with")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    args = parser.parse_args()
    if not args.table and args.out is None:
        parser.error("give --table, --out or both")
    try:
        reports = merged([read(path) for path in args.reports])
        if args.table:
            print(tables(reports))
        if args.out is not None:
            for path in draw(reports, args.out, args.name, args.format):
                print(f"{path}: {path.stat().st_size:,} bytes")
    except ReportError as error:
        print(f"charts.py: {error}", file=sys.stderr)
        return 1
    except ImportError:
        print("charts.py: pictures need matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
