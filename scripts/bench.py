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
fsdp_block "prefetch" (the next two blocks are gathered, as told by FSDP2's setters) and "symm" (its gathers in NCCL's
symmetric memory, by copy engine where NCCL_CTA_POLICY=2 is set).

"step" is the time of forward and backward with the device waited for; "host" is the time until both are enqueued, at a
size so small that the device never makes the host wait; both are medians. "us/use" is what a use of a weight costs the
host: (host - host of no sharding) / (gathers of the step), where steps of both are taken in turns, since the speed of a
host changes from second to second.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from fake_world import FakeWorld, use_fake_peers
from shared_gpu import share_gpu
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from gtp_dtensor import GraphedStep, graph_blocks, graph_step, reset_stats, stats
from gtp_dtensor.config import WIRE_FORMATS
from titan_integration.plan.stack import Stack, shard_stack

CONTESTANTS = ("none", "fsdp_block", "fsdp_linear", "gtp")
COMPILED, PARAMS16, REDUCE16, PREFETCH, SYMM = "compiled", "params16", "reduce16", "prefetch", "symm"
STEP_GRAPH, BLOCK_GRAPHS = "step", "block"
TRANSPORTS = ("collective", "symmetric")


def compile_blocks(model: Stack) -> None:
    """As torchtitan does: no graph break inside of a block."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, fullgraph=True, dynamic=False)


def build(contestant: str, args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """The model, sharded as the contestant does. Sharded ones keep float32 parameters and compute in bfloat16; the
    unsharded floor has bfloat16 parameters."""
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Stack(args.layers, args.dim, args.ffn, args.heads, args.kv_heads)
    contestant, *features = contestant.split("+")
    compiled = COMPILED in features
    if compiled and contestant != "gtp":
        compile_blocks(model)  # before FSDP2: its hooks stand outside
    if PARAMS16 in features:
        model = model.bfloat16()
    reduce_dtype = torch.bfloat16 if REDUCE16 in features else torch.float32
    if contestant == "gtp":
        transport = next((name for name in features if name in TRANSPORTS), args.transport)
        wire_format = next((name for name in features if name in WIRE_FORMATS), "auto")
        shard_stack(model, mesh, wire_format, args.look_ahead, transport, reduce_dtype)
        if compiled:
            compile_blocks(model)
    elif contestant.startswith("fsdp"):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        shard_by_fsdp(model, mesh, policy, contestant == "fsdp_linear", features)
    else:
        model = model.bfloat16()
    model.to_empty(device=device)
    with torch.no_grad():
        for param in model.parameters():
            local = param._local_tensor if hasattr(param, "_local_tensor") else param
            local.normal_(std=0.02) if param.dim() > 1 else local.fill_(1.0)
    return model


def shard_by_fsdp(
    model: Stack, mesh: DeviceMesh, policy: MixedPrecisionPolicy, each_linear: bool, features: Sequence[str]
) -> None:
    """FSDP2 with one group a block, or a linear."""
    for block in model.blocks:
        if each_linear:
            for linear in block.modules():
                if isinstance(linear, nn.Linear):
                    fully_shard(linear, mesh=mesh, mp_policy=policy)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    blocks = list(model.blocks)
    for place, block in enumerate(blocks):
        if PREFETCH in features:
            block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 3])
            block.set_modules_to_backward_prefetch(blocks[max(0, place - 2) : place][::-1])
        if SYMM in features:
            block.set_symm_mem_for_comm()


def attach_graphs(contestant: str, model: nn.Module) -> None:
    """CUDA graphs, where the contestant has any, for the size that comes; those of the size before are freed."""
    before = model.__dict__.pop("graphs", None)
    if before is not None:
        before.release()
    if STEP_GRAPH in contestant.split("+"):
        model.__dict__["graphs"] = graph_step(lambda x, grad: model(x).backward(grad), model)
    elif BLOCK_GRAPHS in contestant.split("+"):
        model.__dict__["graphs"] = graph_blocks(model, ["blocks.*"])


@dataclass
class Row:
    """One line of the table. Times are milliseconds, memory is GiB, host_us_per_use microseconds."""

    contestant: str
    tokens: int
    step_ms: float
    host_ms: float
    peak_allocated_gib: float
    peak_reserved_gib: float
    num_uses: int
    host_us_per_use: float | None = None
    over_floor: float | None = None
    num_graphs: int | None = None
    num_graph_breaks: int | None = None


def measure(model: nn.Module, tokens: int, args: argparse.Namespace, device: torch.device) -> float:
    """Median seconds of a step, the device waited for."""
    batch = random_batch(tokens, args, device)
    with contextlib.ExitStack() as stack:
        if args.mode == "fake" and device.type == "cuda":
            of_a_block = sum(param.numel() for param in model.blocks[0].parameters())
            stack.enter_context(args.fake_world.random_gathers(2 * of_a_block, device))
        steps = [one_step(model, *batch)[0] for _ in range(args.warmup + args.steps)]
    return statistics.median(steps[args.warmup :])


def measure_memory(
    model: nn.Module, tokens: int, args: argparse.Namespace, device: torch.device
) -> tuple[float, float]:
    """Peak GiB of a step, after warm-up: (allocated, reserved by the caching allocator). Zeros on a CPU."""
    if device.type != "cuda":
        return 0.0, 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    batch = random_batch(tokens, args, device)
    for _ in range(args.warmup + 1):
        one_step(model, *batch)
    beyond = stats(model).symmetric_bytes  # of which the allocator does not know
    peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return tuple((peak + beyond) / 2**30 for peak in peaks)


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
    del models, rounds[: args.warmup]
    collect_garbage(device)
    return statistics.median(own for _, own in rounds), statistics.median(own - none for none, own in rounds)


def collect_garbage(device: torch.device) -> None:
    """Before the next contestant."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def run(contestant: str, args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> list[Row]:
    """All sizes of one contestant."""
    host_s, added_s = host_seconds(contestant, args, mesh, device)
    torch._dynamo.reset()
    counters.clear()
    model = build(contestant, args, mesh, device)
    rows = []
    for tokens in args.tokens:
        attach_graphs(contestant, model)
        peaks = measure_memory(model, tokens, args, device)
        attach_graphs(contestant, model)
        reset_stats(model)
        step_s = measure(model, tokens, args, device)
        gathers = stats(model)
        num_gathers = gathers.num_forward_gathers + gathers.num_recompute_gathers + gathers.num_backward_gathers
        num_gathers += gathers.num_kept_at_turn
        num_linears = sum(isinstance(module, nn.Linear) for module in model.modules())
        # FSDP2 does not count; a use is the same thing there: a linear's forward or input gradient
        num_uses = round(num_gathers / (args.warmup + args.steps)) or 2 * num_linears
        rows.append(
            Row(
                contestant,
                tokens,
                step_s * 1e3,
                host_s * 1e3,
                *peaks,
                num_uses,
                None if contestant == "none" else added_s * 1e6 / num_uses,
            )
        )
        if COMPILED in contestant:
            rows[-1].num_graphs = counters["stats"]["unique_graphs"]
            rows[-1].num_graph_breaks = sum(counters["graph_break"].values())
    if args.trace is not None and contestant.startswith("gtp"):
        write_trace(model, args, device)
    del model
    collect_garbage(device)
    return rows


def write_trace(model: nn.Module, args: argparse.Namespace, device: torch.device) -> None:
    """Three steps of the largest size, for scripts/overlap.py and for a trace viewer."""
    from torch.profiler import ProfilerActivity, profile

    x = torch.randn(1, max(args.tokens), args.dim, device=device, dtype=torch.bfloat16)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiler:
        for _ in range(3):
            model(x).backward(torch.ones_like(x))
            if device.type == "cuda":
                torch.cuda.synchronize()
    if dist.get_rank() == 0:
        args.trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(args.trace))


def table(rows: list[Row]) -> str:
    """The rows, readable."""
    names = (
        "contestant",
        "tokens",
        "step ms",
        "/floor",
        "host ms",
        "us/use",
        "alloc GiB",
        "resv GiB",
        "graphs",
        "breaks",
    )
    lines = ["{:<30} {:>6} {:>9} {:>7} {:>9} {:>8} {:>10} {:>9} {:>6} {:>6}".format(*names)]
    for row in rows:
        floor = "" if row.over_floor is None else f"{row.over_floor:.3f}"
        use = "" if row.host_us_per_use is None else f"{row.host_us_per_use:.1f}"
        graphs = "" if row.num_graphs is None else f"{row.num_graphs:>6} {row.num_graph_breaks:>6}"
        lines.append(
            f"{row.contestant:<30} {row.tokens:>6} {row.step_ms:>9.2f} {floor:>7} {row.host_ms:>9.2f} {use:>8} "
            f"{row.peak_allocated_gib:>10.2f} {row.peak_reserved_gib:>9.2f} {graphs}"
        )
    return "\n".join(line.rstrip() for line in lines)


def plot(rows: list[Row], path: Path, title: str) -> bool:
    """Bars of step time and host cost. False where matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    contestants = list(dict.fromkeys(row.contestant for row in rows))
    for index, contestant in enumerate(contestants):
        mine = [row for row in rows if row.contestant == contestant]
        places = [place + index * 0.8 / len(contestants) for place in range(len(mine))]
        left.bar(places, [row.step_ms for row in mine], 0.8 / len(contestants), label=contestant)
    left.set_xticks([place + 0.3 for place in range(len(mine))], [str(row.tokens) for row in mine])
    left.set(xlabel="tokens a rank", ylabel="forward + backward, ms", title=title)
    left.legend()
    with_use = {row.contestant: row.host_us_per_use for row in rows if row.host_us_per_use is not None}
    right.bar(list(with_use), list(with_use.values()))
    right.set(ylabel="host microseconds a use", title="host cost")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


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
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return device


def stop(device: torch.device) -> None:
    """The end of this process, once all ranks have come so far."""
    if dist.get_backend() != "fake":
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the plain teardown of communicators that share a GPU hangs


def add_model_options(parser: argparse.ArgumentParser, **sizes: int) -> None:
    """What ``build`` reads, with these defaults."""
    for name, default in {"layers": 12, **sizes, "look_ahead": 1}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--transport", choices=("auto", *TRANSPORTS), default="auto", help="of gtp")


def add_contestants_option(
    parser: argparse.ArgumentParser, names: Sequence[str], features: dict[str, Sequence[str]] | None = None
) -> None:
    """A comma-separated list of these names, by default all; with features that each may have behind a "+"."""

    def parse(text: str) -> list[str]:
        chosen = text.split(",")
        for contestant in chosen:
            name, *its_features = contestant.split("+")
            if name not in names:
                raise argparse.ArgumentTypeError(f"{name}: choose from {', '.join(names)}")
            known = (features or {}).get(name, ())
            unknown = sorted(set(its_features) - set(known))
            if unknown:
                raise argparse.ArgumentTypeError(
                    f"{contestant}: what may follow {name} is {', '.join(known) or 'nothing'}"
                )
        return chosen

    parser.add_argument("--contestants", type=parse, default=list(names), help=f"of {', '.join(names)} (default: all)")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("fake", "shared", "real", "cpu"), default="fake")
    parser.add_argument("--world", type=int, default=64, help="ranks of the fake world")
    add_model_options(parser, dim=4096, ffn=14336, heads=32, kv_heads=8)
    parser.add_argument(
        "--tokens", type=lambda s: [int(t) for t in s.split(",")], default=[512, 1024, 2048, 4096, 8192]
    )
    parser.add_argument("--host-tokens", type=int, default=16, help="size at which host time is measured")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--host-steps", type=int, default=40, help="steps of which host time is the median")
    parser.add_argument("--warmup", type=int, default=3)
    features = {name: [COMPILED] if name == "none" else [COMPILED, PARAMS16, REDUCE16] for name in CONTESTANTS}
    features["gtp"] += [*TRANSPORTS, *WIRE_FORMATS, STEP_GRAPH, BLOCK_GRAPHS]
    features["fsdp_block"] += [PREFETCH, SYMM]
    add_contestants_option(parser, CONTESTANTS, features)
    parser.add_argument("--out", type=Path, default=None, help="folder for bench.json and bench.png")
    parser.add_argument(
        "--trace", type=Path, default=None, help="file for a profiler trace of three steps of gtp (rank 0)"
    )
    args = parser.parse_args()
    if args.steps < 10:
        parser.error(f"--steps {args.steps}: medians of fewer than 10 steps say little")
    return args


def main() -> None:
    args = parse_args()
    options = {**vars(args), "out": None, "trace": None}
    device = start(args)
    options["num_ranks"] = dist.get_world_size()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("gtp",))
    rows = []
    for contestant in args.contestants:
        rows += run(contestant, args, mesh, device)
        if dist.get_rank() == 0:  # what was measured so far is not lost if the run is stopped
            print(table(rows[-len(args.tokens) :]), file=sys.stderr, flush=True)
    floor = {row.tokens: row for row in rows if row.contestant == "none"}
    for row in rows:
        base = floor.get(row.tokens)
        if base is not None and row is not base:
            row.over_floor = row.step_ms / base.step_ms
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        title = f"{name}, {args.mode}, {dist.get_world_size()} ranks, torch {torch.__version__}"
        print(title, f"{args.layers} blocks, dim {args.dim}, ffn {args.ffn}", sep="\n")
        print(table(rows), flush=True)
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            report = {
                "title": title,
                "options": options,
                "rows": [asdict(row) for row in rows],
            }
            (args.out / "bench.json").write_text(json.dumps(report, indent=1))
            if not plot(rows, args.out / "bench.png", title):
                print("no bench.png: matplotlib is not installed")
    stop(device)


if __name__ == "__main__":
    main()
