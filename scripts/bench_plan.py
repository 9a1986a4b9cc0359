#!/usr/bin/env python
"""Measures the steps that calibrate the planner and those that judge it, one GPU, one rank of a fake world:

    python scripts/bench_plan.py --out measured.json                                        # fake world of 64
    torchrun --nproc_per_node 4 scripts/bench_plan.py --mode shared --out shared.json       # memory, real transfers
    python -m titan_integration.plan --cluster h200x8_infiniband --calibrate measured.json

The first shape's "gtp" at its fewest, middle and most tokens calibrates, everything else judges: no sharding, wire
formats, other widths, depths and numbers of tokens. Options are bench.py's but for sizes, which are fixed here. With
--mode cpu or on a machine without a GPU sizes are small: that proves that the machinery works and says nothing of a
GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from bench import run, start, stop
from torch.distributed.device_mesh import init_device_mesh


class Case(NamedTuple):
    """Contestants of bench.py on one shape, each at all these numbers of tokens."""

    layers: int
    dim: int
    ffn: int
    heads: int
    kv_heads: int
    contestants: tuple[str, ...]
    tokens: tuple[int, ...]


GPU_CASES = (
    Case(12, 4096, 14336, 32, 8, ("gtp", "none"), (1024, 4096, 8192)),  # its "gtp" calibrates
    Case(12, 4096, 14336, 32, 8, ("gtp+fp8", "gtp+mxfp8"), (2048, 6144)),
    Case(16, 2048, 8192, 32, 8, ("gtp", "none"), (4096, 16384)),
    Case(4, 8192, 28672, 64, 8, ("gtp", "none"), (2048, 4096)),
    Case(24, 3072, 8192, 24, 8, ("gtp",), (3072,)),
)
SHARED_CASES = (
    Case(2, 4096, 14336, 32, 8, ("gtp", "gtp+fp8"), (1024, 2048)),
    Case(4, 2048, 8192, 32, 8, ("gtp",), (2048,)),
)
CPU_CASES = (
    Case(2, 512, 1536, 8, 4, ("gtp", "none"), (256, 512, 1024)),
    Case(4, 256, 1024, 8, 4, ("gtp", "none"), (512,)),
)


def cases_of(mode: str, on_gpu: bool) -> tuple[Case, ...]:
    """What is measured."""
    if not on_gpu:
        return CPU_CASES
    return SHARED_CASES if mode == "shared" else GPU_CASES


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("fake", "shared"), default="fake")
    parser.add_argument("--world", type=int, default=64, help="ranks of the fake world")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for plan --calibrate")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--host-steps", type=int, default=20, help="steps of which host time is the median")
    parser.add_argument("--warmup", type=int, default=3)
    args = parser.parse_args()
    if args.mode == "shared":  # for memory; sockets are slow, and times of a GPU that is shared say nothing
        args.steps, args.host_steps, args.warmup = 1, 0, 2
    vars(args).update(host_tokens=16, look_ahead=1, transport="auto", contestants=[], trace=None)
    return args


def main() -> None:
    args = parse_args()
    device = start(args)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("gtp",))
    reports = []
    for case in cases_of(args.mode, device.type == "cuda"):
        options = vars(args) | case._asdict() | {"num_ranks": dist.get_world_size(), "out": None, "fake_world": None}
        vars(args).update(case._asdict())
        rows = []
        for contestant in case.contestants:
            rows += run(contestant, args, mesh, device)
            if dist.get_rank() == 0:
                print(case, rows[-1], file=sys.stderr, flush=True)
        reports.append({"options": options, "rows": [asdict(row) for row in rows]})
        if dist.get_rank() == 0:  # what was measured so far is not lost if the run is stopped
            title = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
            args.out.write_text(
                json.dumps({"title": f"{title}, torch {torch.__version__}", "reports": reports}, indent=1)
            )
    stop(device)


if __name__ == "__main__":
    main()
