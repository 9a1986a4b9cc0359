"""Models with every kind of weight that a checkpoint has to carry, and the topologies that save and load them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gtp_dtensor import CheckedFileSystemReader, CheckedLoadPlanner, GTPConfig, GTPStyle, stats
from tests.hybrid import Mamba2Mixer
from tests.models import Block
from tests.moe import MoEModel
from tests.reference import full, mean_square, replica_options
from tests.test_experts import grids
from tests.test_experts import shard as shard_experts

VOCAB = 2050
NUM_SAMPLES = 24  # divides over 1, 2, 3, 4, 6 and 8 data ranks
NUM_STEPS = 2  # before a checkpoint, and after it

# Sizes of the axes, slowest first. dps: optimizer shards, dpr: copies. Without gtp: models that never saw it.
DENSE: dict[str, dict[str, int]] = {
    "single": {},
    "gtp2": {"gtp": 2},
    "gtp3": {"gtp": 3},
    "gtp8": {"gtp": 8},
    "dps2_gtp3": {"dps": 2, "gtp": 3},
    "dpr2_gtp2": {"dpr": 2, "gtp": 2},
    "gtp2_tp2": {"gtp": 2, "tp": 2},
    "dps2_gtp2_tp2": {"dps": 2, "gtp": 2, "tp": 2},
    "fsdp4": {"fsdp": 4},
    "tp2": {"tp": 2},
}
# Numbers of ranks, and sizes of gtp, egtp and ep; the ranks beside cut optimizer state.
MOE: dict[str, dict[str, int]] = {
    "single": {},
    "gtp2_egtp2": {"world_size": 2, "gtp": 2, "egtp": 2, "ep": 1},
    "gtp1_egtp2_ep2": {"world_size": 4, "gtp": 1, "egtp": 2, "ep": 2},
    "gtp4_egtp1_ep4": {"world_size": 4, "gtp": 4, "egtp": 1, "ep": 4},
    "gtp3_egtp3": {"world_size": 3, "gtp": 3, "egtp": 3, "ep": 1},
    "gtp2_egtp2_of6": {"world_size": 6, "gtp": 2, "egtp": 2, "ep": 1},
    "gtp8_egtp4_ep2": {"world_size": 8, "gtp": 8, "egtp": 4, "ep": 2},
    "gtp2_egtp2_ep2_of8": {"world_size": 8, "gtp": 2, "egtp": 2, "ep": 2},
    "fsdp4": {"fsdp": 4},
}
TOPOLOGIES = {"dense": DENSE, "moe": MOE}


def num_ranks(kind: str, topology: str) -> int:
    """How many ranks ``topology`` takes."""
    sizes = TOPOLOGIES[kind][topology]
    return sizes.get("world_size") or math.prod(sizes.values())


class FusedGLU(nn.Module):
    """A gated feed-forward layer whose gate and up projections are one weight, of 86 rows."""

    def __init__(self, dim: int, hidden: int = 43) -> None:
        super().__init__()
        self.gate_up = nn.Linear(dim, 2 * hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> the same."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Everything(nn.Module):
    """Tied embeddings of 2050 rows, attention, fused gate and up, a Mamba ``in_proj`` of 47 rows, a frozen weight of 5
    rows, a parameter without dims, buffers."""

    def __init__(self, dim: int = 16) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, dim)
        self.block = Block(dim, 4, 2, 40)
        self.fused = FusedGLU(dim)
        self.mixer = Mamba2Mixer(dim)
        self.frozen = nn.Linear(dim, 5).requires_grad_(False)
        self.scale = nn.Parameter(torch.rand(()) + 0.5)
        self.register_buffer("shift", torch.randn(dim))
        self.register_buffer("num_seen", torch.zeros((), dtype=torch.int64))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, VOCAB, bias=False)
        self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 (batch, length) -> logits (batch, length, VOCAB)."""
        x = self.block(self.tok_embeddings(tokens))
        x = x + self.fused(x) + self.shift.to(x.dtype)
        x = x + self.mixer(x) * self.scale + self.frozen(x).mean(-1, keepdim=True)
        return self.output(self.norm(x))


def _tp_plan() -> dict:
    """Activations between modules are whole on every tp rank."""
    plan = {"tok_embeddings": RowwiseParallel(input_layouts=Replicate())}
    plan |= {f"block.attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
    plan |= {f"block.feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
    plan |= {"block.attention.wo": RowwiseParallel(), "block.feed_forward.w2": RowwiseParallel()}
    return plan | {"output": ColwiseParallel(output_layouts=Replicate())}


class Run:
    """A model of ``kind`` on ``topology`` with its optimizer, drawn from ``seed``; this rank's part.

    Args:
        param_dtype: of compute shards; None: the parameters' own.
    """

    def __init__(self, kind: str, topology: str, seed: int = 0, param_dtype: torch.dtype | None = None) -> None:
        self.kind, self.place, self.num_places = kind, 0, 1
        self.input_dtype = param_dtype or torch.float32
        self.whole_by_hand: list[nn.Parameter] = []  # whose gradients nobody else averages
        torch.manual_seed(seed)
        self.model = Everything() if kind == "dense" else MoEModel(2, hidden=10, num_experts=4)
        sizes, config = TOPOLOGIES[kind][topology], GTPConfig(param_dtype=param_dtype)
        if "fsdp" in sizes:
            self._shard_by_fsdp(sizes["fsdp"])
        elif kind == "dense" and sizes:
            self._shard_dense(sizes, config)
        elif sizes:
            options = {key: size for key, size in sizes.items() if key != "world_size"}
            shard_experts(self.model, *grids(sizes["world_size"], **options), config=config)
            self.place, self.num_places = dist.get_rank(), dist.get_world_size()
        assert "gtp" not in sizes or stats(self.model).num_sharded_weights > 5
        trained = [param for param in self.model.parameters() if param.requires_grad]
        # foreach refuses plain tensors beside DTensors, which a model with tensor parallelism alone has
        self.optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-2, foreach=False)

    def _shard_by_fsdp(self, size: int) -> None:
        scalars = {param for param in self.model.parameters() if param.dim() == 0}  # refused by fully_shard
        fully_shard(self.model, mesh=init_device_mesh("cpu", (size,)), ignored_params=scalars)
        self.whole_by_hand = list(scalars)
        self.place, self.num_places = dist.get_rank(), size

    def _shard_dense(self, sizes: dict[str, int], config: GTPConfig) -> None:
        model, mesh = self.model, init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        if "tp" in sizes:
            parallelize_module(model, mesh["tp"], _tp_plan())
            model.output.weight = model.tok_embeddings.weight
        if "gtp" in sizes:
            parallelize_module(model, mesh["gtp"], GTPStyle(config, min_numel=30, **replica_options(mesh)))
        for axis, size in sizes.items():
            if axis != "tp":  # whose peers read the same samples
                self.place = self.place * size + mesh.get_local_rank(axis)
                self.num_places *= size

    def batch(self, step: int) -> torch.Tensor:
        """This rank's samples."""
        generator = torch.Generator().manual_seed(100 + step)
        if self.kind == "moe":
            whole = torch.randn(NUM_SAMPLES, 5, 8, generator=generator).to(self.input_dtype)
        else:
            whole = torch.randint(VOCAB, (NUM_SAMPLES, 4), generator=generator)
        return whole.chunk(self.num_places)[self.place]

    def loss(self, step: int) -> torch.Tensor:
        """The mean over this rank's samples."""
        return mean_square(self.model(self.batch(step)).float())

    def train(self, first: int, stop: int, between: Callable[[int], None] | None = None) -> list[float]:
        """This rank's losses of steps; ``between`` is called after each."""
        losses = []
        for step in range(first, stop):
            loss = self.loss(step)
            loss.backward()
            for param in self.whole_by_hand:
                dist.all_reduce(param.grad)
                param.grad /= self.num_places
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.kind == "dense":
                self.model.num_seen += 1
            losses.append(loss.item())
            if between is not None:
                between(step)
        return losses

    def state(self) -> dict:
        """What is saved, and loaded into."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def set_state(self, state: dict) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def load(self, folder: str | Path) -> None:
        """Weights and moments."""
        state = self.state()
        dcp.load(state, **checked(folder))
        self.set_state(state)

    def full_state(self) -> dict[str, torch.Tensor]:
        """Logical weights, buffers and moments by name. Collective."""
        state = self.state()
        tensors = dict(state["model"])
        for fqn, moments in state["optimizer"]["state"].items():
            tensors |= {f"{fqn} {name}": value for name, value in moments.items()}
        return {name: full(value) for name, value in tensors.items()}


def mean_losses(run: Run, losses: list[float]) -> list[float]:
    """Over all data ranks."""
    total = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(total)
    return (total / dist.get_world_size()).tolist()


def save_on(folder: str, kind: str, topology: str) -> tuple[list[float], list[float]]:
    """Train, save, go on: (this rank's losses after the checkpoint, their means over ranks). Logical tensors at the
    checkpoint go into a file beside it."""
    run = Run(kind, topology)
    run.train(0, NUM_STEPS)
    dcp.save(run.state(), checkpoint_id=Path(folder) / "checkpoint")
    tensors = run.full_state()
    if dist.get_rank() == 0:
        torch.save(tensors, Path(folder) / "full.pt")
    losses = run.train(NUM_STEPS, 2 * NUM_STEPS)
    return losses, mean_losses(run, losses)


def load_on(folder: str, kind: str, topology: str) -> tuple[list[float], list[float]]:
    """The same losses of a run that starts afresh from other weights and moments, which have to be the saved ones after
    loading, bit by bit."""
    run = Run(kind, topology, seed=77)
    run.train(10, 11)
    expected, before = torch.load(Path(folder) / "full.pt"), run.full_state()
    assert all(not torch.equal(before[name], value) for name, value in expected.items() if value.numel() > 1)
    run.load(Path(folder) / "checkpoint")
    actual = run.full_state()
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype and torch.equal(actual[name], value), name
    losses = run.train(NUM_STEPS, 2 * NUM_STEPS)
    return losses, mean_losses(run, losses)


def with_stale_copies(run: Run) -> None:
    """Compute shards exist and are trusted: an optimizer has stepped, and a training forward has gathered since."""
    run.train(20, 21)
    run.loss(21).backward()
    run.optimizer.zero_grad()


def checked(folder: str | Path) -> dict:
    """Arguments of dcp.load."""
    return {"storage_reader": CheckedFileSystemReader(folder), "planner": CheckedLoadPlanner()}


def load_and_set(run: Run, folder: Path) -> None:
    run.load(folder)


def load_and_load_state_dict(run: Run, folder: Path) -> None:
    state = {"model": run.model.state_dict()}
    dcp.load(state, **checked(folder))
    run.model.load_state_dict(state["model"])


def load_stateful(run: Run, folder: Path) -> None:
    dcp.load({"model": run.model}, **checked(folder))


def load_in_place(run: Run, folder: Path) -> None:
    """Into the tensors of ``model.state_dict()``, with nothing after it."""
    dcp.load({"model": run.model.state_dict()}, **checked(folder))
