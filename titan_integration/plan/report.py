"""Plans in words, tables and JSON."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence

from .arrangement import Arrangement, Plan
from .cluster import Cluster
from .record import KINDS
from .search import Ranking, memory_limit

_NUM_REFUSED = 3
_TIE = 0.01  # of the tokens a second


def data_shard(plan: Plan) -> int:
    """Ranks that share the optimizer state of a gtp shard."""
    one = plan.arrangement
    return plan.world // (one.tp * one.gtp * one.pp)


def table(ranking: Ranking, num_rows: int) -> str:
    """The best arrangements as a Markdown table."""
    cluster = ranking.cluster
    lines = [
        f"{cluster.name}, {ranking.world} GPUs of {cluster.gpu.memory_gb:g} GB; {rates_line(cluster)}",
        "",
        "| | arrangement | dp_shard | microbatches | step, s | tokens/s/GPU | MFU | exposed | bubble | memory, GB |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for place, plan in enumerate(ranking.plans[:num_rows], 1):
        lines.append(
            f"| {place} | `{plan.arrangement}` | {data_shard(plan)} | {plan.num_microbatches} | {plan.seconds:.2f} | "
            f"{plan.tokens_per_s:,.0f} | {plan.mfu(cluster):.1%} | {plan.exposed_s / plan.seconds:.1%} | "
            f"{plan.bubble_s / plan.seconds:.1%} | {plan.memory_bytes / 1e9:.1f} |"
        )
    limit = memory_limit(cluster) / 1e9
    lines += ["", f"{len(ranking.plans)} fit into {limit:.0f} GB; {len(ranking.too_large)} do not"]
    if not ranking.plans and ranking.too_large:
        plan = ranking.too_large[0]
        lines[-1] += f", the smallest is `{plan.arrangement}` with {plan.memory_bytes / 1e9:.0f} GB"
    if ranking.refused:
        lines[-1] += f"; {len(ranking.refused)} cannot run, such as"
        lines += [f"  {one}: {reason}" for one, reason in ranking.refused[:_NUM_REFUSED]]
    return "\n".join(lines)


def scaling_table(plans: Sequence[Plan], cluster: Cluster) -> str:
    """Of ``search.weak_scaling``."""
    lines = [
        f"{plans[0].arrangement} on {cluster.name}; {rates_line(cluster)}",
        "",
        "| GPUs | step, s | tokens/s/GPU | efficiency | exposed | memory, GB |",
        "|---|---|---|---|---|---|",
    ]
    for plan in plans:
        lines.append(
            f"| {plan.world:,} | {plan.seconds:.3f} | {plan.tokens_per_s:,.0f} | "
            f"{plan.tokens_per_s / plans[0].tokens_per_s:.1%} | {plan.exposed_s / plan.seconds:.1%} | "
            f"{plan.memory_bytes / 1e9:.1f} |"
        )
    return "\n".join(lines)


def rates_line(cluster: Cluster) -> str:
    """Where the rates come from."""
    if cluster.calibrated:
        return f"rates calibrated by {cluster.calibrated}"
    parts = ", ".join(f"{name} {value:g}" for name, value in dataclasses.asdict(cluster.efficiency).items())
    return f"rates of data sheets, not calibrated; assumed to be reached: {parts}"


def as_json(plan: Plan, cluster: Cluster) -> dict:
    """Everything of a plan but its timeline."""
    counters = {
        name: {
            " ".join(key).strip() if isinstance(key, tuple) else key: value for key, value in counter.items() if value
        }
        for name, counter in (
            ("exposed_s", plan.exposed),
            ("memory_bytes", plan.memory),
            ("link_bytes", plan.link_bytes),
            ("volumes_bytes", plan.volumes),
        )
    }
    return {
        "arrangement": dataclasses.asdict(plan.arrangement),
        "world": plan.world,
        "dp_shard": data_shard(plan),
        "num_microbatches": plan.num_microbatches,
        "seconds": plan.seconds,
        "compute_s": plan.compute_s,
        "host_s": plan.host_s,
        "bubble_s": plan.bubble_s,
        "exposed_total_s": plan.exposed_s,
        "memory_total_bytes": plan.memory_bytes,
        "tokens_per_s_per_gpu": plan.tokens_per_s,
        "mfu": plan.mfu(cluster),
        "extrapolated_from_layers": plan.num_layers,
        **counters,
    }


def ranking_as_json(ranking: Ranking) -> dict:
    """All plans, with the cluster as it was planned with."""
    cluster = ranking.cluster
    return {
        "cluster": dataclasses.asdict(cluster),
        "world": ranking.world,
        "memory_limit_bytes": memory_limit(cluster),
        "plans": [as_json(plan, cluster) for plan in ranking.plans],
        "too_large": [as_json(plan, cluster) for plan in ranking.too_large],
        "refused": [{"arrangement": dataclasses.asdict(one), "reason": reason} for one, reason in ranking.refused],
    }


def details(plan: Plan, cluster: Cluster) -> str:
    """One plan: memory by kind, bytes by link, exposed communication by weight."""
    lines = [
        f"{plan.arrangement}: {plan.seconds:.3f} s a step, {plan.tokens_per_s:,.0f} tokens/s/GPU, "
        f"MFU {plan.mfu(cluster):.1%}",
        f"  computing {plan.compute_s:.3f} s, waiting for communication {plan.exposed_s:.3f} s, for the host "
        f"{plan.host_s:.3f} s, for other stages {plan.bubble_s:.3f} s",
        f"  memory {plan.memory_bytes / 1e9:.2f} GB: "
        + ", ".join(f"{kind} {plan.memory[kind] / 1e9:.2f}" for kind in KINDS if plan.memory[kind] >= 5e6),
    ]
    received = [f"{axis} over {link} {n / 1e9:.2f}" for (axis, link), n in sorted(plan.link_bytes.items()) if n >= 5e6]
    lines.append(f"  received, GB: {', '.join(received) or 'next to nothing'}")
    for (weight, kind), seconds in plan.exposed.most_common(5):
        if seconds >= 1e-5:
            lines.append(f"  exposed {seconds * 1e3:9.2f} ms  {kind} {weight}")
    return "\n".join(lines)


def volume_line(plan: Plan) -> str:
    """What a weight costs on the wire, by format: bytes an element and microbatch."""
    parts = []
    for name in sorted({name for what, name in plan.volumes if what == "elements"}):
        elements = plan.volumes["elements", name]
        gathers, reductions = (plan.volumes[what, name] / elements for what in ("gather", "reduce"))
        parts.append(f"{name} {gathers:.4f} gathered + {reductions:.4f} reduced = {gathers + reductions:.4f} B/element")
    return "; ".join(parts)


# ---- in words


def explain(ranking: Ranking, job_config, hidden: int) -> str:
    """Why the winner wins, what it was compared with, and what to mind."""
    if not ranking.plans and not ranking.too_large:
        return f"No arrangement can run on {ranking.world} ranks; the table says why. Take another number of them."
    if not ranking.plans:
        return "No arrangement fits: use more GPUs, activation checkpointing, or a smaller microbatch."
    cluster, best = ranking.cluster, ranking.plans[0]
    lines = [f"Why `{best.arrangement}`:", f"- {_placement(best, cluster)}."]
    lines.append(
        f"- Of its {best.seconds:.2f} s {best.compute_s / best.seconds:.0%} are computation, "
        f"{_percent(best.exposed_s, best)} exposed communication, {_percent(best.host_s, best)} the host's, "
        f"{_percent(best.bubble_s, best)} a pipeline's bubble."
    )
    kinds = ", ".join(f"{kind} {n / 1e9:.1f}" for kind, n in best.memory.most_common(3))
    lines.append(
        f"- It needs {best.memory_bytes / 1e9:.1f} of {memory_limit(cluster) / 1e9:.0f} GB, most of it {kinds} GB."
    )
    ties = [plan for plan in ranking.plans[1:] if plan.tokens_per_s > (1 - _TIE) * best.tokens_per_s]
    if ties:
        lines.append(f"- {_tie_line(best, ties)}")
    for other in _contrasts(ranking):
        lines.append(f"- {_comparison(best, other)}")
    faster = [plan for plan in ranking.too_large if plan.tokens_per_s > best.tokens_per_s]
    if faster:
        plan = max(faster, key=lambda plan: plan.tokens_per_s)
        lines.append(
            f"- `{plan.arrangement}` would reach {plan.tokens_per_s:,.0f} tokens/s/GPU, and needs "
            f"{plan.memory_bytes / 1e9:.0f} GB."
        )
    lines += [f"- {line}" for line in warnings(best, job_config, hidden)]
    return "\n".join(lines)


def _network_bytes(plan: Plan) -> float:
    return sum(num_bytes for (_, link), num_bytes in plan.link_bytes.items() if link == "network")


def _tie_line(best: Plan, ties: Sequence[Plan]) -> str:
    """What is as fast, as far as such a model can tell, and which of it depends least on the network."""
    names = ", ".join(f"`{plan.arrangement}`" for plan in ties)
    calmest = min((best, *ties), key=_network_bytes)
    text = f"Within {_TIE:.0%}, which is less than a plan can tell: {names}. Of all these "
    text += (
        f"`{calmest.arrangement}` leaves least to the network: {_network_bytes(calmest) / 1e9:.0f} GB a step and GPU"
    )
    return (
        f"{text} ({_network_bytes(best) / 1e9:.0f} GB with `{best.arrangement}`)."
        if calmest is not best
        else f"{text}."
    )


def _percent(seconds: float, plan: Plan) -> str:
    return f"{seconds / plan.seconds:.1%}"


def _placement(plan: Plan, cluster: Cluster) -> str:
    """Which axes stay inside an NVLink domain."""
    bytes_by_axis: dict[str, Counter] = {}
    for (axis, link), num_bytes in plan.link_bytes.items():
        bytes_by_axis.setdefault(axis, Counter())[link] += num_bytes
    near = sorted(axis for axis, links in bytes_by_axis.items() if links["nvlink"] and not links["network"])
    far = sorted(axis for axis, links in bytes_by_axis.items() if links["network"])
    text = f"Axes inside an NVLink domain of {cluster.ranks_per_domain} ranks: {', '.join(near) or 'none'}"
    if far:
        received = (f"{axis} ({bytes_by_axis[axis]['network'] / 1e9:.1f} GB a step)" for axis in far)
        text += f"; over the network go {', '.join(received)}"
    return text


def _contrasts(ranking: Ranking) -> list[Plan]:
    """The runner-up, and the best with another tp, gtp and format."""
    best, chosen = ranking.plans[0], ranking.plans[1:2]
    for name in ("tp", "gtp", "ep", "egtp", "pp", "wire"):
        mine = getattr(best.arrangement, name)
        other = next((plan for plan in ranking.plans if getattr(plan.arrangement, name) != mine), None)
        if other is not None and other not in chosen:
            chosen.append(other)
    return chosen


def _comparison(best: Plan, other: Plan) -> str:
    """What another arrangement loses, for each token."""
    mine, theirs = (_costs(plan) for plan in (best, other))
    differences = {name: theirs[name] - mine[name] for name in mine}
    total = 1 / other.tokens_per_s - 1 / best.tokens_per_s
    worst = max(differences, key=lambda name: differences[name])
    text = f"`{other.arrangement}` reaches {other.tokens_per_s / best.tokens_per_s:.1%} of that"
    if total <= 0:
        return f"{text}."
    gains = [name for name, value in differences.items() if value < -0.02 * total and name != worst]
    text += f": it loses {differences[worst] / total:.0%} of the difference to {worst}"
    if gains:
        text += f", and gains on {' and '.join(gains)}"
    memory = (other.memory_bytes - best.memory_bytes) / 1e9
    return f"{text}; memory {memory:+.1f} GB."


def _costs(plan: Plan) -> dict[str, float]:
    """GPU seconds a token."""
    per_token = plan.world / plan.tokens
    return {
        "computation": plan.compute_s * per_token,
        "exposed communication": plan.exposed_s * per_token,
        "the host": plan.host_s * per_token,
        "the pipeline's bubble": plan.bubble_s * per_token,
    }


def warnings(plan: Plan, job_config, hidden: int) -> list[str]:
    """What the GTP specification advises against, and what a plan leaves out."""
    lines = []
    seq_len, section = job_config.training.seq_len, job_config.activation_checkpoint
    is_sharded = plan.arrangement.gtp > 1 or plan.arrangement.egtp > 1
    if section.mode != "none" and section.mode != "memory_budget" and seq_len <= 2 * hidden and is_sharded:
        lines.append(
            f"Warning: the sequence of {seq_len:,} is no longer than 2 x hidden {hidden:,}, and "
            f"activation_checkpoint.mode = {section.mode!r} recomputes sharded feed-forward layers: sharding their "
            "weights saves more memory than recomputing their activations does, so leave them out of checkpointing "
            "where the memory allows it."
        )
    if getattr(job_config.gtp, "cuda_graph", "off") != "off":
        lines.append("Warning: [gtp] cuda_graph is on; the host is planned as in eager.")
    if job_config.compile.enable:
        lines.append("Warning: [compile] is on; kernels are planned one by one, as in eager.")
    return lines


def figures(arrangement: Arrangement, bits: float, gathered: float, reduce_bytes: float) -> str:
    """The specification's summary of a setting.

    Args:
        arrangement: its tp and gtp.
        bits: of an element in its format, without scales.
        gathered: bytes of an element that a gather brings, scales included.
        reduce_bytes: of an element of a gradient that travels.
    """
    shards = arrangement.tp * arrangement.gtp
    total = 2 * gathered + reduce_bytes
    return (
        f"TP {arrangement.tp} x GTP {arrangement.gtp}: {shards}x less weight memory, {shards * 16 / bits:.0f}x less on "
        f"the wire than whole bf16 weights; gathers {gathered / 2 - 1:+.0%} beside bf16, {total:.4f} B an element and "
        "microbatch "
        f"({total / 6 - 1:+.0%} beside bf16's 6), of which reductions are {reduce_bytes / total:.0%}"
    )
