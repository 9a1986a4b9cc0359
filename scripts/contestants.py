"""The contestants of bench.py: one stack of Llama blocks, sharded as each of them does, and what their names mean."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gtp_dtensor import graph_blocks, graph_step
from gtp_dtensor.config import WIRE_FORMATS
from titan_integration.plan.stack import Stack, shard_stack

COMPILED, PARAMS16, REDUCE16 = "compiled", "params16", "reduce16"
PREFETCH, SYMM, REGISTERED, KEEP = "prefetch", "symm", "registered", "keep"
STEP_GRAPH, BLOCK_GRAPHS = "step", "block"
TRANSPORTS = ("collective", "symmetric")
_SHARDED = (COMPILED, PARAMS16, REDUCE16)
FEATURES: dict[str, tuple[str, ...]] = {
    "none": (COMPILED,),
    "fsdp_block": (*_SHARDED, PREFETCH, SYMM, REGISTERED, KEEP),
    "fsdp_linear": _SHARDED,
    "gtp": (*_SHARDED, *TRANSPORTS, *WIRE_FORMATS, STEP_GRAPH, BLOCK_GRAPHS),
}
CONTESTANTS = tuple(FEATURES)


def mesh_of(
    contestant: str, args: argparse.Namespace, device_type: str, num_ranks: int, known: dict[tuple, DeviceMesh]
) -> DeviceMesh:
    """The axes of a contestant, slowest first; those of one rank are left out, but for what shards.

    Args:
        args: with the degrees ``tp``, ``dp_shard`` and ``dp_replicate``; gtp is what is left of ``num_ranks``. FSDP2
            shards over dp_shard x gtp.
        known: meshes made so far, for each brings communicators.
    """
    gtp, rest = divmod(num_ranks, args.tp * args.dp_shard * args.dp_replicate)
    if rest or not gtp:
        raise SystemExit(
            f"bench.py: --tp {args.tp} x --dp-shard {args.dp_shard} x --dp-replicate {args.dp_replicate} do not divide "
            f"the {num_ranks} ranks"
        )
    if contestant.startswith("fsdp"):
        axes = {"dp_replicate": args.dp_replicate, "fsdp": args.dp_shard * gtp, "tp": args.tp}
    else:
        axes = {"dp_replicate": args.dp_replicate, "dp_shard": args.dp_shard, "gtp": gtp, "tp": args.tp}
    axes = {name: size for name, size in axes.items() if size > 1 or name in ("fsdp", "gtp")}
    names, sizes = tuple(axes), tuple(axes.values())
    if (names, sizes) not in known:
        known[names, sizes] = init_device_mesh(device_type, sizes, mesh_dim_names=names)
    return known[names, sizes]


def build(contestant: str, args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    """The model, sharded as the contestant does. Sharded ones keep float32 parameters and compute in bfloat16; the
    unsharded floor has bfloat16 parameters.

    Args:
        mesh: of one axis, or of :func:`mesh_of`.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Stack(args.layers, args.dim, args.ffn, args.heads, args.kv_heads)
    contestant, *features = contestant.split("+")
    if PARAMS16 in features or contestant == "none":
        model = model.bfloat16()
    if "tp" in mesh.mesh_dim_names:
        cut_by_tensor_parallelism(model, mesh["tp"])
    compiled = COMPILED in features
    if compiled and contestant != "gtp":
        compile_blocks(model)  # before FSDP2: its hooks stand outside
    reduce_dtype = torch.bfloat16 if REDUCE16 in features else torch.float32
    if contestant == "gtp":
        transport = next((name for name in features if name in TRANSPORTS), args.transport)
        wire_format = next((name for name in features if name in WIRE_FORMATS), "auto")
        replicas = {
            f"{key}_mesh": mesh[axis]
            for key, axis in (("optimizer_shard", "dp_shard"), ("replicate", "dp_replicate"))
            if axis in mesh.mesh_dim_names
        }
        shard_stack(model, mesh["gtp"], wire_format, args.look_ahead, transport, reduce_dtype, **replicas)
        if compiled:
            compile_blocks(model)
    elif contestant.startswith("fsdp"):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
        shard_by_fsdp(model, _data_mesh(mesh), policy, contestant == "fsdp_linear", features)
    model.to_empty(device=device)
    with torch.no_grad():
        for param in model.parameters():
            local = param._local_tensor if hasattr(param, "_local_tensor") else param
            local.normal_(std=0.02) if param.dim() > 1 else local.fill_(1.0)
    return model


def _data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """All axes but tp."""
    names = tuple(name for name in mesh.mesh_dim_names if name != "tp")
    return mesh if names == mesh.mesh_dim_names else mesh[names]


def compile_blocks(model: Stack) -> None:
    """As torchtitan does: no graph break inside of a block."""
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, fullgraph=True, dynamic=False)


def cut_by_tensor_parallelism(model: Stack, mesh: DeviceMesh) -> None:
    """PyTorch's own; attention and the feed-forward layer each end in an all-reduce."""
    plan = {name: ColwiseParallel() for name in ("wq", "wk", "wv", "w1", "w3")}
    plan |= {name: RowwiseParallel() for name in ("wo", "w2")}
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


def shard_by_fsdp(
    model: Stack, mesh: DeviceMesh, policy: MixedPrecisionPolicy, each_linear: bool, features: Sequence[str]
) -> None:
    """FSDP2 with one group a block, or a linear."""
    options = {"mesh": mesh, "mp_policy": policy} | ({"reshard_after_forward": False} if KEEP in features else {})
    for block in model.blocks:
        if each_linear:
            for linear in block.modules():
                if isinstance(linear, nn.Linear):
                    fully_shard(linear, **options)
        fully_shard(block, **options)
    fully_shard(model, **options)
    blocks = list(model.blocks)
    for place, block in enumerate(blocks):
        if PREFETCH in features:
            block.set_modules_to_forward_prefetch(blocks[place + 1 : place + 3])
            block.set_modules_to_backward_prefetch(blocks[max(0, place - 2) : place][::-1])
        if SYMM in features:
            block.set_symm_mem_for_comm()
        if REGISTERED in features:
            block.set_allocate_memory_from_process_group_for_comm(True)


def attach_graphs(contestant: str, model: nn.Module) -> None:
    """CUDA graphs, where the contestant has any, for the size that comes; those of the size before are freed."""
    release_graphs(model)
    if STEP_GRAPH in contestant.split("+"):
        model.__dict__["graphs"] = graph_step(lambda x, grad: model(x).backward(grad), model)
    elif BLOCK_GRAPHS in contestant.split("+"):
        model.__dict__["graphs"] = graph_blocks(model, ["blocks.*"])


def release_graphs(model: nn.Module) -> None:
    """Frees the graphs of a model, if it has any, and what they hold."""
    before = model.__dict__.pop("graphs", None)
    if before is not None:
        before.release()


def check_arose(contestant: str, symmetric_bytes: int, graphs: object, num_steps: int) -> None:
    """That what a contestant is called is what was measured.

    Args:
        symmetric_bytes: of its model's ``stats``.
        graphs: a GraphedStep or GraphedBlocks, or None.
        num_steps: that were measured.

    Raises:
        RuntimeError: it had no symmetric memory, or some of these steps did not replay its graphs.
    """
    features = contestant.split("+")
    if "symmetric" in features and not symmetric_bytes:
        raise RuntimeError(f"{contestant}: its model has no symmetric memory")
    if STEP_GRAPH in features or BLOCK_GRAPHS in features:
        num_replays, num_eager = getattr(graphs, "num_replays", 0), getattr(graphs, "num_eager", 0)
        if num_replays < num_steps or num_eager:
            raise RuntimeError(
                f"{contestant}: {num_replays} replays and {num_eager} calls without a graph in {num_steps} measured steps"
            )


def empty_device(device: torch.device) -> float:
    """Frees what a contestant left behind. Returns the MiB that are allocated nevertheless; 0 on a CPU."""
    gc.collect()
    if device.type != "cuda":
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated() / 2**20


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
        check_symmetric(chosen)
        return chosen

    parser.add_argument("--contestants", type=parse, default=list(names), help=f"of {', '.join(names)} (default: all)")


def check_symmetric(contestants: Sequence[str]) -> None:
    """FSDP2's symmetric memory is NCCL's, ours CUDA's, and torch has one backend in a process."""
    split = [contestant.split("+") for contestant in contestants]
    of_nccl = [name for name, *features in split if SYMM in features]
    if of_nccl and not hasattr(FSDPModule, "set_symm_mem_for_comm"):
        raise argparse.ArgumentTypeError(
            f"fsdp_block+symm: FSDP2 of torch {torch.__version__} has no symmetric memory; +registered takes NCCL's allocator"
        )
    of_cuda = [name for name, *features in split if name == "gtp" and "collective" not in features]
    if of_nccl and of_cuda:
        raise argparse.ArgumentTypeError(
            "fsdp_block+symm and gtp with another transport than collective need different backends of torch's symmetric "
            "memory, and a process has one: measure them in two calls"
        )
