#!/usr/bin/env python
"""How much of a step's communication a GPU trace shows hidden behind computation.

    python scripts/overlap.py trace.json.gz [--at-least 0.9]

Reads a trace of torch.profiler and tells the device's time apart, whoever's trace it is (also of a replayed graph): while
any kernel computes, while only communication runs (exposed), while nothing runs. FSDP2's copies into and out of its
buffers are kernels that compute.

Of GTP's traces with the host's events (bench.py --trace-host) it tells more. For each gather and reduction it finds the NCCL kernel that
the range ``gtp::...`` launched, and whether a GEMM kernel ran at the same time. The first gather of each pass, and the
first and last communication of each backward, have nothing to hide behind; all others are interior. Exits with 1 where
fewer interior ones than ``--at-least`` overlap a GEMM.

Where there is no such kernel (symmetric memory), it looks at the copies between GPUs, stream by stream, and at the
kernels that sum; a trace does not tell which range made a copy, so there all of them count.
"""

from __future__ import annotations

import argparse
import bisect
import gzip
import json
import re
import sys
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

GEMM = re.compile(r"gemm|cutlass|nvjet|xmma|cublas|wgrad|dgrad", re.IGNORECASE)


@dataclass
class Communication:
    """One gather or reduction: what the range was called, and when its kernel ran (microseconds)."""

    what: str
    fqn: str
    issued: float
    start: float
    end: float
    overlap: float = 0.0
    interior: bool = True


def read_trace(path: str) -> list[dict]:
    """The complete events of a trace, plain or gzipped."""
    opener = gzip.open if path.endswith(".gz") else open
    with opener(path, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


class Exposure(NamedTuple):
    """Microseconds of the device, in all of a trace; ``compute`` + ``exposed`` + ``idle`` = ``span``.

    Attributes:
        span: from the first event to the end of the last.
        compute: while a kernel, or a copy within the GPU, runs that is no communication.
        communication: while communication runs, under ``compute`` or not.
        exposed: while communication runs and nothing else does.
        idle: while nothing runs.
    """

    span: float
    compute: float
    communication: float
    exposed: float
    idle: float


def exposure(events: list[dict]) -> Exposure | None:
    """What the device did. None where the trace has no events of a device."""
    device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    if not device:
        return None
    between = {_stream(event) for event in device if "PtoP" in event["name"]}
    compute, communication = [], []
    for event in device:
        is_copy = event["cat"] == "gpu_memcpy" and _stream(event) in between  # of a rank's own rows, too
        moves = is_copy or "nccl" in event["name"].lower() or event["name"] == "sum_slots"
        (communication if moves else compute).append((event["ts"], event["ts"] + event["dur"]))
    everything = _length(compute + communication)
    span = max(event["ts"] + event["dur"] for event in device) - min(event["ts"] for event in device)
    busy = _length(compute)
    return Exposure(span, busy, _length(communication), everything - busy, span - everything)


def _stream(event: dict) -> object:
    return event.get("pid"), event.get("args", {}).get("stream")


def _length(spans: list[tuple[float, float]]) -> float:
    """Of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def communications(events: list[dict]) -> list[Communication]:
    """Every gather and reduction with its NCCL kernel, by the time the kernel was launched."""
    ranges: dict[tuple, list[tuple[float, float, str]]] = {}
    launches: dict[int, dict] = {}
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith("gtp::"):
            ranges.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"], event["name"])
            )
        elif event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = event
    for spans in ranges.values():
        spans.sort()
    found = []
    for event in events:
        if event.get("cat") != "kernel" or "nccl" not in event["name"].lower():
            continue
        launch = launches.get(event["args"].get("correlation"))
        spans = ranges.get((launch["pid"], launch["tid"]), []) if launch else []
        place = bisect.bisect_right(spans, (launch["ts"], float("inf"), "")) - 1 if spans else -1
        if place >= 0 and spans[place][1] >= launch["ts"]:
            what, _, fqn = spans[place][2].removeprefix("gtp::").rpartition(" ")
            found.append(Communication(what, fqn, launch["ts"], event["ts"], event["ts"] + event["dur"]))
    return sorted(found, key=lambda one: one.issued)


def copies_and_sums(events: list[dict]) -> list[Communication]:
    """Of symmetric memory: a stream that copies between GPUs and copies a rank's own rows too gathers, another pushes
    gradients."""
    moved = [event for event in events if event.get("cat") == "gpu_memcpy" and "PtoP" in event["name"]]
    own = {event["args"]["stream"] for event in events if event.get("cat") == "gpu_memcpy" and "DtoD" in event["name"]}
    found = []
    for event in moved:
        what = "gather" if event["args"]["stream"] in own else "push"
        found.append(Communication(what, "", event["ts"], event["ts"], event["ts"] + event["dur"]))
    for event in events:
        if event.get("cat") == "kernel" and event["name"] == "sum_slots":
            found.append(Communication("sum", "", event["ts"], event["ts"], event["ts"] + event["dur"]))
    return sorted(found, key=lambda one: one.issued)


def mark(found: list[Communication], events: list[dict]) -> None:
    """Fill in the overlap with GEMMs (share of the kernel's time), and which are at an end of a pass."""
    gemms = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "kernel" and GEMM.search(event["name"]) and "nccl" not in event["name"].lower()
    )
    for one in found:
        covered = sum(max(0.0, min(end, one.end) - max(start, one.start)) for start, end in gemms)
        one.overlap = covered / max(one.end - one.start, 1e-9)
    for kind in ("forward gather", "backward gather", "reduce"):
        mine = [one for one in found if one.what == kind]
        first = mine[0].fqn if mine else None
        last = mine[-1].fqn if mine else None
        for one in mine if first else ():
            one.interior = one.fqn != first and not (kind == "reduce" and one.fqn == last)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace")
    parser.add_argument("--at-least", type=float, default=0.9)
    args = parser.parse_args()
    events = read_trace(args.trace)
    whole = exposure(events)
    if whole is not None:
        shares = ((name, getattr(whole, name)) for name in ("compute", "communication", "exposed", "idle"))
        print(
            f"{whole.span / 1e3:.2f} ms: "
            + ", ".join(f"{n} {us / 1e3:.2f} ({us / whole.span:.1%})" for n, us in shares)
        )
    found = communications(events) or copies_and_sums(events)
    if not found:
        print(
            f"overlap.py: {args.trace}: no NCCL kernel of a gtp:: range (bench.py --trace-host writes them), no copy "
            "between GPUs: nothing to tell by weight",
            file=sys.stderr,
        )
        return 2
    mark(found, events)
    interior = [one for one in found if one.interior]
    hidden = [one for one in interior if one.overlap > 0]
    for kind in dict.fromkeys(one.what for one in found):
        mine = [one for one in interior if one.what == kind]
        if mine:
            share = sum(one.overlap > 0 for one in mine) / len(mine)
            mean = sum(one.overlap for one in mine) / len(mine)
            print(f"{kind}: {len(mine)} interior, {share:.1%} overlap a GEMM, {mean:.1%} of their time is under one")
    exposed = Counter(f"{one.what} {one.fqn}".strip() for one in interior if one.overlap == 0)
    for name, times in exposed.most_common():
        print(f"exposed: {name} ({times} times)")
    ends = Counter(f"{one.what} {one.fqn}" for one in found if not one.interior)
    if ends:
        print("at the ends of passes: " + ", ".join(f"{name} ({times})" for name, times in ends.items()))
    share = len(hidden) / len(interior)
    print(f"interior communications that overlap a GEMM: {len(hidden)} of {len(interior)} = {share:.1%}")
    return 0 if share >= args.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
