#!/usr/bin/env python
"""Step time and bytes on the wire of Muon, for the two algorithms and for FSDP2 whose gradients are gathered whole.

    torchrun --nproc_per_node 8 scripts/bench_muon.py --dim 256 --ffn 704 --heads 8 --kv-heads 4 --layers 2   # on CPUs
    torchrun --nproc_per_node 4 scripts/bench_muon.py --mode shared --dim 2048 --ffn 7168      # ranks that share a GPU
    torchrun --nproc_per_node 8 scripts/bench_muon.py --mode real                               # a GPU each

The model is bench.py's stack of Llama blocks with random gradients. "home_rank" and "duplicated" are gtp_dtensor's Muon on
GTP weights; "fsdp_gather" is what FSDP2 users write: each momentum is gathered whole on every rank, in float32, and
orthogonalized there. Steps are taken in turns; times are medians, with the device waited for. "sent" is what a rank sends to
others in a step (all-gathers: its own part to each of them). "balance" is the largest Newton-Schulz cost of a rank over
the mean.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from bench import start, stop
from contestants import add_contestants_option, add_model_options, build
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gtp_dtensor import Muon, muon_param_groups
from gtp_dtensor.optim.muon import newton_schulz, scale_of

CONTESTANTS = ("home_rank", "duplicated", "fsdp_gather")
SETTINGS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}


class SentBytes(TorchDispatchMode):
    """Counts what collectives below it send to other ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        size, rank = dist.get_world_size(), dist.get_rank()
        name = str(func)
        if "all_gather_into_tensor" in name or "_allgather_base" in name or "all_gather_single" in name:
            part = args[0] if "c10d_functional" in name else args[1]
            self.total += part.nbytes * (size - 1)
        elif "alltoall_base" in name or "all_to_all_single" in name:
            sent, splits = args[1], args[4] or [len(args[1]) // size] * size
            self.total += (sum(splits) - splits[rank]) * sent.itemsize
        return result


class GatheredMuon(torch.optim.Optimizer):
    """The peer: whole momentum on every rank, orthogonalized there."""

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.dim() != 2:
                    continue
                state = self.state[param]
                buffer = state.setdefault("momentum_buffer", torch.zeros_like(param))
                buffer.lerp_(param.grad, 1 - group["momentum"])
                whole = param.grad.lerp(buffer, group["momentum"]).full_tensor()
                update = newton_schulz(whole, (3.4445, -4.775, 2.0315), 5, 1e-7)
                update = distribute_tensor(update, param.device_mesh, param.placements, src_data_rank=None)
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(update, alpha=-group["lr"] * scale_of("original", *param.shape))


@dataclass
class Row:
    """One contestant. Milliseconds, and bytes of this rank."""

    contestant: str
    step_ms: float
    sent_bytes: int
    balance: float


def optimizer_of(contestant: str, model: nn.Module) -> torch.optim.Optimizer:
    if contestant == "fsdp_gather":
        return GatheredMuon(model.parameters(), SETTINGS)
    return Muon(muon_param_groups(model), algorithm=contestant, **SETTINGS)


def give_gradients(model: nn.Module) -> None:
    """Random ones, of each rank's shards."""
    for param in model.parameters():
        local = torch.randn_like(param._local_tensor)
        param.grad = DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )


def timed(step: Callable[[], None], device: torch.device) -> float:
    """Milliseconds."""
    dist.barrier()
    begin = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin)


def balance(optimizer: torch.optim.Optimizer) -> float:
    """The largest cost of a rank over the mean."""
    if getattr(optimizer, "algorithm", None) != "home_rank":
        return 1.0
    loads = [0.0] * dist.get_world_size()
    for rounds in optimizer._plans.values():
        for matrix in (matrix for one in rounds for matrix in one.matrices):
            loads[matrix.home] += matrix.cost
    return max(loads) / statistics.mean(loads)


def run(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> list[Row]:
    """All contestants, in turns."""
    steps, optimizers, times, sent = {}, {}, {}, {}
    for contestant in args.contestants:
        model = build("fsdp_block" if contestant == "fsdp_gather" else "gtp", args, mesh, device)
        give_gradients(model)
        optimizers[contestant], times[contestant] = optimizer_of(contestant, model), []
        steps[contestant] = optimizers[contestant].step
    for number in range(args.warmup + args.steps):
        for contestant, step in steps.items():
            took = timed(step, device)
            if number >= args.warmup:
                times[contestant].append(took)
    for contestant, step in steps.items():
        with SentBytes() as counted:
            step()
        sent[contestant] = counted.total
    return [Row(c, statistics.median(times[c]), sent[c], balance(optimizers[c])) for c in args.contestants]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("cpu", "shared", "real"), default="cpu")
    add_model_options(parser, dim=4096, ffn=14336, heads=32, kv_heads=8)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2)
    add_contestants_option(parser, CONTESTANTS)
    parser.add_argument("--out", type=Path, default=None, help="folder for bench_muon.json")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = start(args)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("gtp",))
    rows = run(args, mesh, device)
    if dist.get_rank() == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        print(
            f"{name}, {args.mode}, {dist.get_world_size()} ranks; {args.layers} blocks, dim {args.dim}, ffn {args.ffn}"
        )
        print(f"{'contestant':<12} {'step ms':>10} {'sent MiB':>10} {'balance':>8}")
        for row in rows:
            print(f"{row.contestant:<12} {row.step_ms:>10.1f} {row.sent_bytes / 2**20:>10.2f} {row.balance:>8.3f}")
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "bench_muon.json").write_text(json.dumps([asdict(row) for row in rows], indent=1))
    stop(device)


if __name__ == "__main__":
    main()
