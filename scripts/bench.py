#!/usr/bin/env python
"""Step time, host time and memory of GTP beside its peers, measured one after the other in the same process.

    python scripts/bench.py --mode fake --world 64                      # one GPU (or CPU), one rank of a large world
    torchrun --nproc_per_node 4 scripts/bench.py --mode shared          # ranks that share one GPU
    torchrun --nproc_per_node 8 scripts/bench.py --mode real            # a GPU each
    torchrun --nproc_per_node 2 scripts/bench.py --mode cpu --layers 2 --dim 256 --ffn 688 --heads 8 --kv-heads 4

The model is a stack of Llama blocks (default: 12 with the shape of Llama 3 8B), forward and backward, on random data.
Peers: no sharding, FSDP2 with one group a block, FSDP2 with one group a linear. In the fake world no bytes move, so
that mode tells host time, memory and the schedule, not communication (what is gathered are random numbers, for GEMMs
run faster on zeros); ranks that share a GPU tell correctness and host time.

Behind a contestant's name, each after a "+", may stand what it does otherwise: "compiled" (each block, for each size
anew; "graphs" and "breaks" are what dynamo counted), "params16" (parameters and gradients in bfloat16), "reduce16"
(gradients travel in bfloat16, else in float32), for gtp a transport or a wire format ("gtp+symmetric+fp8"),
"step" (the step is a CUDA graph) or "block" (each block is two), for
fsdp_block "prefetch" (the next two blocks are gathered, as told by FSDP2's setters), "keep" (what is gathered stays from
forward to backward), "registered" (buffers from NCCL's allocator) and "symm" (its communication in NCCL's symmetric
memory, by copy engine where NCCL_CTA_POLICY=2 is set; not in one call with gtp's symmetric memory). --tp cuts all
contestants, --dp-replicate makes copies; --dp-shard is GTP's optimizer shards, where FSDP2 shards over dp_shard x gtp.

"step" is the time of forward and backward with the device waited for; "host" is the time until both are enqueued, at a
size so small that the device never makes the host wait; both are medians. "us/use" is what a use of a weight costs the
host: (host - host of no sharding) / (gathers of the step), where steps of both are taken in turns, since the speed of a
host changes from second to second. Memory is the peak of what tensors held and of what the allocator had from the device,
from an empty cache on. With --trace a step is told apart: "exposed" is while only communication runs, "idle" while nothing
does (between steps, too). charts.py makes tables and pictures of bench.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from contestants import (
    COMPILED,
    CONTESTANTS,
    FEATURES,
    add_contestants_option,
    add_model_options,
    attach_graphs,
    build,
    check_arose,
    empty_device,
    mesh_of,
    release_graphs,
)
from fake_world import FakeWorld, use_fake_peers
from overlap import exposure, read_trace
from shared_gpu import share_gpu
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh

from gtp_dtensor import GraphedStep, reset_stats, stats

NUM_TRACED = 3  # steps in a trace
LEFT_MIB = 256.0  # of a contestant that is gone: cuBLAS's workspaces and such


@dataclass
class Row:
    """One line of the table. Times are milliseconds, memory is GiB, host_us_per_use microseconds."""

    contestant: str
    tokens: int
    step_ms: float
    host_ms: float | None
    peak_allocated_gib: float
    peak_reserved_gib: float
    num_uses: int
    host_us_per_use: float | None = None
    over_floor: float | None = None
    num_graphs: int | None = None
    num_graph_breaks: int | None = None
    tokens_per_s: float | None = None  # of a GPU
    left_mib: float = 0.0  # allocated before this contestant was built
    # Of a step, from a trace: while kernels compute; while only communication runs; while nothing runs.
    compute_ms: float | None = None
    exposed_ms: float | None = None
    idle_ms: float | None = None


def measure(
    contestant: str, model: nn.Module, tokens: int, args: argparse.Namespace, device: torch.device
) -> tuple[float, tuple[float, float]]:
    """(median seconds of a step, the device waited for; peak GiB: (allocated, reserved by the caching allocator))."""
    batch = random_batch(tokens, args, device)
    attach_graphs(contestant, model)
    for param in model.parameters():
        param.grad = None  # of the size before: what is left of a segment would keep all of it reserved
    reset_peaks(device)
    reset_stats(model)
    if args.mode != "fake" or device.type != "cuda":
        seconds = median_step(model, batch, args)
        return seconds, peaks(model, device)
    for _ in range(args.warmup + 1):
        one_step(model, *batch)
    found = peaks(model, device)  # without the random numbers
    attach_graphs(contestant, model)
    reset_stats(model)
    of_a_block = sum(param.numel() for param in model.blocks[0].parameters())
    with args.fake_world.random_gathers(2 * of_a_block, device):
        return median_step(model, batch, args), found


def median_step(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor], args: argparse.Namespace) -> float:
    """Median seconds of the steps that follow the warm-up."""
    steps = [one_step(model, *batch)[0] for _ in range(args.warmup + args.steps)]
    return statistics.median(steps[args.warmup :])


def reset_peaks(device: torch.device) -> None:
    """Peaks are counted from here, with an empty cache."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peaks(model: nn.Module, device: torch.device) -> tuple[float, float]:
    """GiB since ``reset_peaks``: (allocated, reserved), both with symmetric memory, of which the allocator does not know.
    Zeros on a CPU."""
    if device.type != "cuda":
        return 0.0, 0.0
    beyond = stats(model).symmetric_bytes
    found = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return tuple((peak + beyond) / 2**30 for peak in found)


def random_batch(tokens: int, args: argparse.Namespace, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(input, gradient of the output), each (1, tokens, dim)."""
    x = torch.randn(1, tokens, args.dim, device=device, dtype=torch.bfloat16)
    return x, torch.randn_like(x)


def one_step(model: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> tuple[float, float]:
    """(seconds of a step, seconds until the host has enqueued it)."""
    for param in model.parameters():
        param.grad = None
    if x.is_cuda:
        torch.cuda.synchronize()
    graphs = model.__dict__.get("graphs")
    start = time.perf_counter()
    if isinstance(graphs, GraphedStep):
        graphs(x, grad)
    else:
        model(x).backward(grad)
    enqueued = time.perf_counter()
    if x.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, enqueued - start


def host_seconds(
    contestant: str, args: argparse.Namespace, mesh: DeviceMesh, device: torch.device
) -> tuple[float, float]:
    """(median until a step is enqueued, median of what that is more than without sharding), in turns."""
    models = [build(name, args, mesh, device) for name in ("none", contestant)]
    attach_graphs(contestant, models[1])
    batch = random_batch(args.host_tokens, args, device)
    rounds = [[one_step(model, *batch)[1] for model in models] for _ in range(args.warmup + args.host_steps)]
    release_graphs(models[1])
    del models, rounds[: args.warmup]
    empty_device(device)
    return statistics.median(own for _, own in rounds), statistics.median(own - none for none, own in rounds)


def run(contestant: str, args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> Iterator[Row]:
    """All sizes of one contestant, one after the other."""
    torch._dynamo.reset()
    counters.clear()
    left_mib = empty_device(device)
    host_s, added_s = host_seconds(contestant, args, mesh, device) if args.host_steps else (None, None)
    torch._dynamo.reset()
    counters.clear()
    model = build(contestant, args, mesh, device)
    num_linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    tp = mesh["tp"].size() if "tp" in mesh.mesh_dim_names else 1
    for tokens in args.tokens:
        step_s, memory = measure(contestant, model, tokens, args, device)
        gathers = stats(model)
        check_arose(contestant, gathers.symmetric_bytes, model.__dict__.get("graphs"), args.steps)
        num_gathers = gathers.num_forward_gathers + gathers.num_recompute_gathers + gathers.num_backward_gathers
        num_gathers += gathers.num_kept_at_turn
        # FSDP2 does not count; a use is the same thing there: a linear's forward or input gradient
        num_uses = round(num_gathers / (args.warmup + args.steps)) or 2 * num_linears
        row = Row(contestant, tokens, step_s * 1e3, host_s and host_s * 1e3, *memory, num_uses, left_mib=left_mib)
        row.tokens_per_s = tokens / tp / step_s
        if added_s is not None and contestant != "none":
            row.host_us_per_use = added_s * 1e6 / num_uses
        if COMPILED in contestant:
            row.num_graphs = counters["stats"]["unique_graphs"]
            row.num_graph_breaks = sum(counters["graph_break"].values())
        if args.trace is not None and tokens in (args.trace_tokens or [max(args.tokens)]):
            trace(row, model, args, device)
        yield row
    release_graphs(model)
    del model
    empty_device(device)


def trace(row: Row, model: nn.Module, args: argparse.Namespace, device: torch.device) -> None:
    """A trace of some steps more, for overlap.py and for a trace viewer; fills in what it tells of this rank."""
    from torch.profiler import ProfilerActivity, profile

    # The host's own events cost it time: only where they are asked for.
    activities = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    activities += [ProfilerActivity.CPU] if args.trace_host or not activities else []
    batch = random_batch(row.tokens, args, device)
    one_step(model, *batch)
    with profile(activities=activities) as profiler:
        for _ in range(NUM_TRACED):
            one_step(model, *batch)
    if dist.get_rank() != 0:
        return
    path = args.trace / f"{row.contestant}_{row.tokens}.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(path))
    found = exposure(read_trace(str(path)))
    if found is not None:
        row.compute_ms, row.exposed_ms, row.idle_ms = (
            us / 1e3 / NUM_TRACED for us in (found.compute, found.exposed, found.idle)
        )


def table(rows: list[Row]) -> str:
    """The rows, readable."""
    names = (
        "contestant", "tokens", "step ms", "/floor", "host ms", "us/use", "alloc GiB", "resv GiB", "exposed", "idle",
        "graphs", "breaks",
    )  # fmt: skip
    lines = ["{:<36} {:>6} {:>9} {:>7} {:>8} {:>7} {:>9} {:>9} {:>7} {:>7} {:>6} {:>6}".format(*names)]
    for row in rows:

        def shown(value: float | None, digits: int) -> str:
            return "" if value is None else f"{value:.{digits}f}"

        lines.append(
            f"{row.contestant:<36} {row.tokens:>6} {row.step_ms:>9.2f} {shown(row.over_floor, 3):>7} "
            f"{shown(row.host_ms, 2):>8} {shown(row.host_us_per_use, 1):>7} {row.peak_allocated_gib:>9.2f} "
            f"{row.peak_reserved_gib:>9.2f} {shown(row.exposed_ms, 2):>7} {shown(row.idle_ms, 2):>7} "
            f"{shown(row.num_graphs, 0):>6} {shown(row.num_graph_breaks, 0):>6}"
        )
    return "\n".join(line.rstrip() for line in lines)


def start(args: argparse.Namespace) -> torch.device:
    """The process group of the mode; returns this rank's device."""
    on_gpu = args.mode != "cpu" and torch.cuda.is_available()
    if args.mode in ("shared", "real") and not on_gpu:
        raise SystemExit(f"bench.py: --mode {args.mode} needs a GPU; torch finds none")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if args.mode == "shared":
        share_gpu()
        local_rank = 0
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if args.mode == "fake":
        args.fake_world = FakeWorld(args.world)
        if "symmetric" in (args.transport, *"+".join(args.contestants).split("+")) and not on_gpu:
            raise SystemExit("bench.py: --mode fake with transport symmetric needs a GPU; torch finds none")
        use_fake_peers(args.fake_world)
    else:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=120))
    return device


def stop(device: torch.device, status: int = 0) -> None:
    """The end of this process, once all ranks have come so far."""
    if dist.get_backend() != "fake":
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the plain teardown of communicators that share a GPU hangs


def numbers(text: str) -> list[int]:
    """Of a comma-separated list."""
    return [int(number) for number in text.split(",")]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("fake", "shared", "real", "cpu"), default="fake")
    parser.add_argument("--world", type=int, default=64, help="ranks of the fake world")
    add_model_options(parser, dim=4096, ffn=14336, heads=32, kv_heads=8)
    for name, of in (("tp", "tensor parallelism"), ("dp-shard", "optimizer shards"), ("dp-replicate", "replicas")):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"degree of {of}; gtp is what is left of the ranks")
    parser.add_argument("--tokens", type=numbers, default=[512, 1024, 2048, 4096, 8192], help="of a rank's sequence")
    parser.add_argument("--host-tokens", type=int, default=16, help="size at which host time is measured")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--host-steps", type=int, default=40, help="steps of which host time is the median; 0: none")
    parser.add_argument("--warmup", type=int, default=3)
    add_contestants_option(parser, CONTESTANTS, FEATURES)
    parser.add_argument("--out", type=Path, default=None, help="folder for bench.json")
    parser.add_argument("--trace", type=Path, default=None, help="folder for a profiler trace of each contestant")
    parser.add_argument("--trace-tokens", type=numbers, default=None, help="sizes to trace (default: the largest)")
    parser.add_argument("--trace-host", action="store_true", help="traces with the host's events and gtp:: ranges")
    args = parser.parse_args()
    if args.steps < 10:
        parser.error(f"--steps {args.steps}: medians of fewer than 10 steps say little")
    if args.trace_tokens and set(args.trace_tokens) - set(args.tokens):
        parser.error(f"--trace-tokens {args.trace_tokens}: not among --tokens {args.tokens}")
    return args


def fill_in_floor(rows: list[Row]) -> None:
    """What each row is over the unsharded one of its size."""
    floor = {row.tokens: row.step_ms for row in rows if row.contestant == "none"}
    for row in rows:
        if row.tokens in floor and row.contestant != "none":
            row.over_floor = row.step_ms / floor[row.tokens]


def report(args: argparse.Namespace, device: torch.device, rows: list[Row], failures: dict[str, str]) -> str:
    """Writes bench.json, so far; returns its title."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    title = f"{name}, {args.mode}, {dist.get_world_size()} ranks, torch {torch.__version__}"
    if args.out is not None and dist.get_rank() == 0:
        options = {**vars(args), "out": None, "trace": None, "fake_world": None, "num_ranks": dist.get_world_size()}
        args.out.mkdir(parents=True, exist_ok=True)
        content = {"title": title, "options": options, "rows": [asdict(row) for row in rows], "failures": failures}
        (args.out / "bench.json").write_text(json.dumps(content, indent=1))
    return title


def main() -> None:
    args = parse_args()
    device = start(args)
    rows: list[Row] = []
    failures: dict[str, str] = {}
    meshes: dict[tuple, DeviceMesh] = {}
    for contestant in args.contestants:
        mesh = mesh_of(contestant, args, device.type, dist.get_world_size(), meshes)
        try:
            for row in run(contestant, args, mesh, device):
                rows.append(row)  # and stays, where a larger size fails
        except Exception as error:  # one that fails on all ranks alike does not take the others with it
            traceback.print_exc()
            failures[contestant] = f"{type(error).__name__}: {error}"
            traceback.clear_frames(error.__traceback__)  # which hold its model
            continue
        finally:
            fill_in_floor(rows)
            title = report(args, device, rows, failures)  # what was measured so far is not lost if the run is stopped
        if dist.get_rank() == 0:
            print(table([row for row in rows if row.contestant == contestant]), file=sys.stderr, flush=True)
    left = {row.contestant: row.left_mib for row in rows if row.left_mib > LEFT_MIB}
    if dist.get_rank() == 0:
        print(title, f"{args.layers} blocks, dim {args.dim}, ffn {args.ffn}", table(rows), sep="\n", flush=True)
        for contestant, text in failures.items():
            print(f"FAIL: {contestant}: {text}")
        for contestant, mib in left.items():
            print(f"FAIL: {contestant}: {mib:.0f} MiB were allocated before it was built")
    stop(device, 1 if failures or left else 0)


if __name__ == "__main__":
    main()
