"""An encoder on ranks 0 and 1, a language model on ranks 2 to 7: two grids that share no rank, bridged point to point.

Each side has a random seed, an optimizer and a checkpoint of its own, and knows of the other only what the bridge
brings: features on their way forward, their gradients on the way back.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gtp_dtensor import GTPStyle, clip_grad_norm_, set_requires_gradient_sync, stats
from tests.harness import ranks
from tests.models import MLP, TinyLlama
from tests.reference import (
    assert_close_to_reference,
    build_pair,
    full_gradients,
    full_parameters,
    make_optimizer,
    mean_square,
    replica_options,
)

ENCODER, LANGUAGE = [0, 1], [2, 3, 4, 5, 6, 7]
NUM_SAMPLES, NUM_PATCHES, NUM_TOKENS, FEATURES, DIM = 12, 3, 5, 10, 16
GRIDS = {  # of the language model's six ranks
    "gtp6": {"gtp": 6},
    "gtp3_dps2": {"gtp": 3, "dps": 2},
    "dpr2_gtp3": {"dpr": 2, "gtp": 3},
    "gtp3_tp2": {"gtp": 3, "tp": 2},
}

RUNS = [  # (grid, optimizer)
    ("gtp3_tp2", "sgd"),
    pytest.param("gtp6", "adam", marks=pytest.mark.slow),
    pytest.param("gtp6", "sgd", marks=pytest.mark.slow),
    pytest.param("gtp3_tp2", "adam", marks=pytest.mark.slow),
    *(
        pytest.param(grid, name, marks=pytest.mark.slow)
        for grid in ("gtp3_dps2", "dpr2_gtp3")
        for name in ("sgd", "adam")
    ),
]


class Encoder(nn.Module):
    """Image patches to vectors that the language model reads like embedded tokens."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers, self.dropout = MLP((FEATURES, 24, 24, DIM)), nn.Dropout(dropout)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        """(batch, NUM_PATCHES, FEATURES) -> (batch, NUM_PATCHES, DIM)."""
        return self.dropout(self.layers(patches))


class LanguageModel(TinyLlama):
    """Reads patches before tokens."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dim=DIM)
        self.dropout = nn.Dropout(dropout)

    def forward(self, patches: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """(batch, NUM_PATCHES, DIM), int64 (batch, NUM_TOKENS) -> logits (batch, NUM_PATCHES + NUM_TOKENS, VOCAB)."""
        x = self.dropout(torch.cat([patches, self.tok_embeddings(tokens)], 1))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def tp_plan() -> dict:
    """Activations between blocks are whole on every tp rank, as what the bridge brings is."""
    colwise, rowwise = ColwiseParallel(), RowwiseParallel()
    plan = {"tok_embeddings": RowwiseParallel(input_layouts=Replicate())}
    plan |= {f"layers.*.attention.{name}": colwise for name in ("wq", "wk", "wv")}
    plan |= {f"layers.*.feed_forward.{name}": colwise for name in ("w1", "w3")}
    plan |= {f"layers.*.{name}": rowwise for name in ("attention.wo", "feed_forward.w2")}
    return plan | {"output": ColwiseParallel(output_layouts=Replicate())}


def prediction_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits[:, NUM_PATCHES - 1 : -1].flatten(0, 1), tokens.flatten())


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(patches, tokens) of all samples."""
    generator = torch.Generator().manual_seed(step)
    patches = torch.randn(NUM_SAMPLES, NUM_PATCHES, FEATURES, generator=generator)
    return patches, torch.randint(24, (NUM_SAMPLES, NUM_TOKENS), generator=generator)


# ---- meshes of a part of the world


def mesh_of(members: list[int], sizes: dict[str, int], built_by: str) -> DeviceMesh | None:
    """``members`` as a mesh with these axes; None elsewhere. Built by "everyone", as torch's DeviceMesh is, or by the
    "members" alone from groups of their own."""
    grid = torch.tensor(members).view(*sizes.values())
    if built_by == "everyone":
        mesh = DeviceMesh("cpu", grid, mesh_dim_names=tuple(sizes))
        return mesh if dist.get_rank() in members else None
    if dist.get_rank() not in members:
        return None
    place = (grid == dist.get_rank()).nonzero()[0].tolist()
    groups = []
    for axis in range(grid.ndim):
        line = grid[tuple(slice(None) if other == axis else at for other, at in enumerate(place))].tolist()
        groups.append(dist.new_group(line, use_local_synchronization=True))
    if grid.ndim == 1:
        return DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=tuple(sizes))
    return DeviceMesh.from_group(groups, "cpu", mesh=grid, mesh_dim_names=tuple(sizes))


@dataclass(frozen=True)
class Route:
    """Samples start to stop travel from an encoder's rank to one of the language model's."""

    encoder: int
    language: int
    start: int
    stop: int


class Side:
    """What this rank has of the two: its model with all that belongs to it, and the routes of the bridge.

    ``grid`` names the language model's axes; peers along tp read the same samples, and the first of them answers.
    """

    def __init__(self, grid: str, optimizer: str, dropout: float, seed: int, built_by: str = "everyone") -> None:
        rank, sizes = dist.get_rank(), GRIDS[grid]
        self.is_encoder = rank in ENCODER
        meshes = mesh_of(ENCODER, {"gtp": 2}, built_by), mesh_of(LANGUAGE, sizes, built_by)
        self.mesh = meshes[0] if self.is_encoder else meshes[1]
        num_peers = sizes.get("tp", 1)  # they read the same samples
        peers = [LANGUAGE[start : start + num_peers] for start in range(0, len(LANGUAGE), num_peers)]
        data_ranks = [[rank] for rank in ENCODER] if self.is_encoder else peers
        self.data_rank = next(index for index, group in enumerate(data_ranks) if rank in group)
        self.samples = slices(len(data_ranks))[self.data_rank]
        # Each side averages over its own data ranks.
        self.gradient_scale = len(ENCODER) / len(peers)
        self.routes = [
            Route(encoder, language, max(a.start, b.start), min(a.stop, b.stop))
            for encoder, a in zip(ENCODER, slices(len(ENCODER)))
            for group, b in zip(peers, slices(len(peers)))
            for language in group
            if max(a.start, b.start) < min(a.stop, b.stop)
        ]
        self.answering = {group[0] for group in peers}
        torch.manual_seed(seed)
        self.model = Encoder(dropout) if self.is_encoder else LanguageModel(dropout)
        if "tp" in self.mesh.mesh_dim_names:
            parallelize_module(self.model, self.mesh["tp"], tp_plan())
        parallelize_module(self.model, self.mesh["gtp"], GTPStyle(min_numel=30, **replica_options(self.mesh)))
        assert stats(self.model).num_sharded_weights == sum(p.dim() > 1 for p in self.model.parameters())
        self.optimizer = make_optimizer(optimizer, self.model)
        torch.manual_seed(1000 * seed + 100 * self.is_encoder + self.data_rank)

    def my_routes(self) -> list[Route]:
        return [route for route in self.routes if dist.get_rank() in (route.encoder, route.language)]

    def forward_backward(self, step: int) -> torch.Tensor | None:
        """One step without the optimizer's; the mean loss of this rank's samples, None on an encoder's rank."""
        patches, tokens = (part[self.samples.start : self.samples.stop] for part in batch(step))
        first = self.samples.start
        if self.is_encoder:
            features = self.model(patches)
            sent = features.detach()
            works = [
                dist.isend(sent[r.start - first : r.stop - first].contiguous(), r.language) for r in self.my_routes()
            ]
            gradient = torch.zeros_like(sent)
            for route in self.my_routes():
                if route.language in self.answering:
                    part = torch.empty_like(sent[route.start - first : route.stop - first])
                    dist.recv(part, route.language)
                    gradient[route.start - first : route.stop - first] = part
            for work in works:
                work.wait()
            features.backward(self.gradient_scale * gradient)
            return None
        features = torch.empty(len(self.samples), NUM_PATCHES, DIM)
        for route in self.my_routes():
            part = torch.empty_like(features[route.start - first : route.stop - first])
            dist.recv(part, route.encoder)
            features[route.start - first : route.stop - first] = part
        features.requires_grad_()
        loss = prediction_loss(self.model(features, tokens), tokens)
        loss.backward()
        if dist.get_rank() in self.answering:
            for route in self.my_routes():
                dist.send(features.grad[route.start - first : route.stop - first].contiguous(), route.encoder)
        return loss.detach()

    def train(self, steps: range) -> list[float]:
        """This rank's losses."""
        losses = []
        for step in steps:
            loss = self.forward_backward(step)
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses += [] if loss is None else [loss.item()]
        s = stats(self.model)
        assert (s.num_pending, s.live_lease_bytes) == (0, 0) and s.num_reductions > 0
        return losses

    # ---- checkpoint: of this side alone, by the ranks of this side alone

    def _state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, f"rng{dist.get_rank()}": torch.get_rng_state()}

    def _place(self, folder: str) -> dict:
        groups = [dist.new_group(members) for members in (ENCODER, LANGUAGE)]
        name, group = ("encoder", groups[0]) if self.is_encoder else ("language", groups[1])
        return {"checkpoint_id": Path(folder) / name, "process_group": group}

    def save(self, folder: str) -> None:
        dcp.save(self._state(), **self._place(folder))

    def load(self, folder: str) -> None:
        state = self._state()
        dcp.load(state, **self._place(folder))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        torch.set_rng_state(state[f"rng{dist.get_rank()}"])


def slices(num_ranks: int) -> list[range]:
    """The samples of each data rank."""
    each = NUM_SAMPLES // num_ranks
    return [range(each * index, each * (index + 1)) for index in range(num_ranks)]


class Reference:
    """Both models whole, in one process."""

    def __init__(self, optimizer: str, seed: int) -> None:
        self.models = []
        for build in (Encoder, LanguageModel):
            torch.manual_seed(seed)
            self.models.append(build(0.0))
        self.optimizers = [make_optimizer(optimizer, model) for model in self.models]

    def forward_backward(self, step: int) -> torch.Tensor:
        """The loss of every sample, as the mean over all."""
        patches, tokens = batch(step)
        encoder, language = self.models
        loss = prediction_loss(language(encoder(patches), tokens), tokens)
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        for one in self.optimizers:
            one.step()
            one.zero_grad()


def mean_loss(loss: torch.Tensor | None) -> torch.Tensor:
    """Over the language model's ranks, known everywhere."""
    total = torch.zeros((), dtype=torch.float64) if loss is None else loss.double()
    dist.all_reduce(total)
    return total / len(LANGUAGE)


@ranks(8, timeout=120.0)
@pytest.mark.parametrize("built_by", ["everyone", pytest.param("members", marks=pytest.mark.slow)])
@pytest.mark.parametrize("grid, optimizer", RUNS)
def test_both_train_as_in_one_process(rank, grid, optimizer, built_by):
    side, reference = Side(grid, optimizer, 0.0, 0, built_by), Reference(optimizer, 0)
    mine = reference.models[0 if side.is_encoder else 1]
    for step in range(4):
        loss, expected = mean_loss(side.forward_backward(step)), reference.forward_backward(step)
        assert_close_to_reference(loss, expected.double(), f"loss of step {step}")
        assert_close_to_reference(full_gradients(side.model), full_gradients(mine), f"gradient of step {step}")
        side.optimizer.step()
        side.optimizer.zero_grad()
        reference.step()
        assert_close_to_reference(full_parameters(side.model), full_parameters(mine), f"weight after step {step}")
        assert step == 0 or stats(side.model).num_mispredictions == 0


# ---- checkpoints, through fresh process groups, models and optimizers


def train_and_save(folder: str, grid: str, optimizer: str) -> tuple[list[float], torch.Tensor]:
    """(losses after the checkpoint of a run that goes on, its last random state)."""
    side = Side(grid, optimizer, 0.2, 0)
    side.train(range(3))
    side.save(folder)
    return side.train(range(3, 6)), torch.get_rng_state()


def load_and_train(folder: str, grid: str, optimizer: str) -> tuple[list[float], torch.Tensor]:
    """The same of a run that starts afresh, from other weights."""
    side = Side(grid, optimizer, 0.2, 77)
    side.load(folder)
    return side.train(range(3, 6)), torch.get_rng_state()


@pytest.mark.slow
@pytest.mark.parametrize("grid, optimizer", RUNS)
def test_started_afresh_from_two_checkpoints(rank_pool, tmp_path, grid, optimizer):
    expected = rank_pool.run(8, train_and_save, str(tmp_path), grid, optimizer, timeout=120.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["encoder", "language"]
    actual = rank_pool.run(8, load_and_train, str(tmp_path), grid, optimizer, timeout=120.0)
    for rank, ((losses, state), (other_losses, other_state)) in enumerate(zip(actual, expected)):
        assert losses == other_losses and len(losses) == (0 if rank in ENCODER else 3), rank
        assert torch.equal(state, other_state)
    assert len({losses[0] for losses, _ in expected[2:]}) == (3 if grid == "gtp3_tp2" else 6)


def save_or_load(folder: str, grid: str, seed: int) -> list[float]:
    """Losses after the checkpoint, which seed 0 writes and another one reads."""
    side = Side(grid, "adam", 0.0, seed)
    if seed == 0:
        side.train(range(3))
        side.save(folder)
    else:
        side.load(folder)
    return side.train(range(3, 6))


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["gtp3_dps2", "dpr2_gtp3"])
def test_started_afresh_on_another_grid(rank_pool, tmp_path, grid):
    expected = rank_pool.run(8, save_or_load, str(tmp_path), "gtp6", 0, timeout=120.0)
    actual = rank_pool.run(8, save_or_load, str(tmp_path), grid, 77, timeout=120.0)
    assert_close_to_reference(torch.tensor(actual[2:]), torch.tensor(expected[2:]), "losses")


# ---- one norm over both


@ranks(4)
def test_norm_over_two_sets_of_equal_size(rank):
    """Each rank of one set has a partner in the other."""
    members = [[0, 1], [2, 3]][rank // 2]
    meshes = [DeviceMesh("cpu", ranks_of, mesh_dim_names=("gtp",)) for ranks_of in ([0, 1], [2, 3])]
    partners = [dist.new_group(pair) for pair in ([0, 2], [1, 3])][rank % 2]
    wholes = []
    for index, widths in enumerate([(8, 16, 8), (8, 24, 4)]):
        torch.manual_seed(index)
        wholes.append(MLP(widths))
    torch.manual_seed(rank // 2)
    model = MLP([(8, 16, 8), (8, 24, 4)][rank // 2])
    parallelize_module(model, meshes[rank // 2], GTPStyle(min_numel=30))
    for one in (*wholes, model):
        one(torch.ones(2, 8)).square().sum().backward()
    params = [param for whole in wholes for param in whole.parameters()]
    expected = torch.nn.utils.get_total_norm([param.grad for param in params])
    norm = clip_grad_norm_(model.parameters(), expected.item() / 2, groups=[partners])
    assert_close_to_reference(norm, expected, f"norm on {members}")


@ranks(8, timeout=120.0)
@pytest.mark.parametrize("grid", ["gtp6", pytest.param("gtp3_tp2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("norm_type", [2.0, *(pytest.param(p, marks=pytest.mark.slow) for p in (1.0, float("inf")))])
def test_norm_over_both_sets(rank, grid, norm_type):
    side, reference = Side(grid, "sgd", 0.0, 0), Reference("sgd", 0)
    side.forward_backward(0)
    reference.forward_backward(0)
    params = [param for model in reference.models for param in model.parameters()]
    expected = torch.nn.utils.get_total_norm([param.grad for param in params], norm_type)
    both = dist.new_group(ENCODER + LANGUAGE)
    norm = clip_grad_norm_(side.model.parameters(), expected.item() / 2, norm_type, groups=[both])
    assert_close_to_reference(norm, expected, "norm")
    torch.nn.utils.clip_grad_norm_(params, expected.item() / 2, norm_type)
    mine = reference.models[0 if side.is_encoder else 1]
    assert_close_to_reference(full_gradients(side.model), full_gradients(mine), "gradient")


# ---- groups that only some ranks belong to


@ranks(4, timeout=20.0, group_timeout=5.0)
def test_ranks_that_belong_to_unequal_numbers_of_groups(rank):
    """A bridge's group, say, or that of the first and last stage of a pipeline."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("gtp",))
    bridge = dist.new_group([0, 1])
    model = MLP((8, 16, 8))
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    model(torch.ones(2, 8)).sum().backward()
    assert stats(model).num_reductions == 2 and bridge is not None


@ranks(4)
def test_the_start_line_of_a_model_without_rank_zero(rank):
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("gtp_dtensor.style")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    meshes = [DeviceMesh("cpu", members, mesh_dim_names=("gtp",)) for members in ([0, 1], [2, 3])]
    try:
        parallelize_module(MLP((8, 16, 8)), meshes[rank // 2], GTPStyle(min_numel=30))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    everyones = [None] * 4
    dist.all_gather_object(everyones, sum("2 weights" in line for line in lines))
    assert everyones == [1, 0, 1, 0]


@ranks(4, timeout=20.0, group_timeout=5.0)
@pytest.mark.parametrize("replicas", ["dps", "dpr"])
def test_a_step_on_some_ranks_leaves_kept_back_gradients_alone(rank, replicas):
    """Half of the ranks train a second model between the microbatches of the first."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=(replicas, "gtp"))
    meshes = [DeviceMesh("cpu", members, mesh_dim_names=("gtp",)) for members in ([0, 1], [2, 3])]
    model, reference = build_pair(lambda: MLP((8, 16, 8)))
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30, **replica_options(mesh)))
    other = parallelize_module(MLP((8, 24, 8)), meshes[rank // 2], GTPStyle(min_numel=30))
    optimizer, others_optimizer = make_optimizer("sgd", model), make_optimizer("sgd", other)
    for index in range(2):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(index))
        set_requires_gradient_sync(model, index == 1)
        mean_square(model(x.chunk(4)[rank])).backward()
        mean_square(reference(x)).backward()
        if index == 0:
            assert stats(model).num_pending > 0
            if rank < 2:
                mean_square(other(x)).backward()
                others_optimizer.step()
    assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient")
    optimizer.step()
