"""PNG charts of plans, where matplotlib is installed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from .arrangement import Arrangement, Plan
from .cluster import Cluster
from .record import KINDS
from .search import Ranking, memory_limit, weak_scaling, worlds_of

_COLOURS = {"compute": "#4878cf", "wait": "#d65f5f", "gathers": "#6acc65", "reductions": "#ee854a", "other": "#956cb4"}


def pyplot():
    """matplotlib's, without a window.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ImportError("--charts needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw(job_config, ranking: Ranking, best: Plan, folder: Path) -> list[Path]:
    """All charts of a ranking; returns their files.

    Args:
        best: the plan to show in detail, with its timeline.
    """
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    title = f"{job_config.model.name} {job_config.model.flavor}, {ranking.cluster.name}"
    paths = [folder / name for name in ("timeline.png", "weak_scaling.png", "memory.png")]
    _save(plt, draw_timeline(plt, best, title), paths[0])
    plans = weak_scaling(job_config, ranking.cluster, best.arrangement, worlds_of(best.arrangement))
    _save(plt, draw_scaling(plt, plans, ranking.cluster, title), paths[1])
    _save(plt, draw_memory(plt, ranking, best.arrangement, title), paths[2])
    return paths


def draw_weak_scaling(plans: Sequence[Plan], cluster: Cluster, folder: Path) -> Path:
    """The chart of weak scaling alone; returns its file."""
    plt = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "weak_scaling.png"
    _save(plt, draw_scaling(plt, plans, cluster, cluster.name), path)
    return path


def _save(plt, figure, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_timeline(plt, plan: Plan, title: str):
    """The streams of one rank: the whole step above, two windows of it below."""
    spans, end = plan.timeline.spans, plan.timeline.seconds
    streams = ["compute", *dict.fromkeys(span.stream for span in spans if span.stream != "compute")]
    turn = max((at for name, at in plan.timeline.marks.items() if name.startswith("backward")), default=end / 3)
    window = end / 60
    figure, axes = plt.subplots(3, 1, figsize=(12, 2 + 0.9 * len(streams)))
    for axis, (first, last) in zip(
        axes, ((0, end), (turn / 2, turn / 2 + window), ((turn + end) / 2, (turn + end) / 2 + window))
    ):
        for row, stream in enumerate(streams):
            for colour, pieces in _pieces(spans, stream, first, last).items():
                axis.broken_barh(pieces, (row - 0.4, 0.8), facecolors=colour)
        axis.set_yticks(range(len(streams)), [_short(stream) for stream in streams])
        axis.set_xlim(first, last)
        axis.set_ylim(len(streams) - 0.5, -0.5)
    num = sum(name.startswith("forward") for name in plan.timeline.marks)
    of = "" if plan.num_microbatches <= num else f", {num} of its {plan.num_microbatches} microbatches"
    axes[0].set_title(
        f"{title}: a step of {plan.arrangement}{of} (blue: kernels, red: exposed communication)", fontsize=9
    )
    axes[-1].set_xlabel("seconds")
    return figure


def _pieces(spans: Sequence, stream: str, first: float, last: float) -> dict[str, list[tuple[float, float]]]:
    """By colour, (start, length) of what is in the window; neighbours are joined, which a picture cannot show apart."""
    found: dict[str, list[tuple[float, float]]] = {}
    least = (last - first) / 2000
    for span in sorted(
        (s for s in spans if s.stream == stream and s.end > first and s.start < last), key=lambda s: s.start
    ):
        name = span.kind if span.kind == "wait" else "compute" if stream == "compute" else stream.split()[-1]
        pieces = found.setdefault(_COLOURS.get(name, _COLOURS["other"]), [])
        if pieces and span.start - sum(pieces[-1]) < least:
            pieces[-1] = pieces[-1][0], span.end - pieces[-1][0]
        else:
            pieces.append((span.start, span.end - span.start))
    return found


def _short(stream: str) -> str:
    """Streams of the library have names; those of torch's groups are the ranks themselves."""
    return "tp, ep" if stream.startswith("(") else stream


def draw_scaling(plt, plans: Sequence[Plan], cluster: Cluster, title: str):
    """Efficiency and memory of ``search.weak_scaling``."""
    figure, left = plt.subplots(figsize=(8, 4))
    worlds = [plan.world for plan in plans]
    left.plot(
        worlds, [100 * plan.tokens_per_s / plans[0].tokens_per_s for plan in plans], "o-", color=_COLOURS["compute"]
    )
    left.set(
        xlabel="GPUs", ylabel="efficiency, %", xscale="log", ylim=(0, 108), title=f"{title}: {plans[0].arrangement}"
    )
    left.set_xticks(worlds, [str(world) for world in worlds])
    left.minorticks_off()
    right = left.twinx()
    right.plot(worlds, [plan.memory_bytes / 1e9 for plan in plans], "s--", color=_COLOURS["wait"])
    right.axhline(memory_limit(cluster) / 1e9, color="gray", linewidth=0.8)
    right.set_ylabel("memory, GB (dashed; line: limit)")
    right.set_ylim(bottom=0)
    return figure


def draw_memory(plt, ranking: Ranking, arrangement: Arrangement, title: str):
    """Memory by kind against GTP, all other degrees as in ``arrangement``."""
    same = {}
    for plan in (*ranking.plans, *ranking.too_large):
        if dataclasses.replace(plan.arrangement, gtp=arrangement.gtp) == arrangement:
            same[plan.arrangement.gtp] = plan
    plans = [same[gtp] for gtp in sorted(same)]
    figure, axis = plt.subplots(figsize=(8, 4))
    places, bottom = range(len(plans)), [0.0] * len(plans)
    for kind in KINDS:
        heights = [plan.memory[kind] / 1e9 for plan in plans]
        axis.bar(places, heights, 0.7, bottom=bottom, label=kind)
        bottom = [low + height for low, height in zip(bottom, heights)]
    axis.axhline(memory_limit(ranking.cluster) / 1e9, color="gray", linewidth=0.8)
    axis.set_xticks(places, [str(plan.arrangement.gtp) for plan in plans])
    axis.set(xlabel="GTP", ylabel="memory at the peak, GB", title=f"{title}: {arrangement} with other GTP sizes")
    axis.legend(fontsize=8, bbox_to_anchor=(1, 1), loc="upper left")
    return figure
