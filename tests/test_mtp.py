"""Multi-token prediction: embedding and output head are used three times a microbatch, tied to each other or not."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from gtp_dtensor import GTPStyle, reset_stats, schedule_table, stats
from tests.harness import ranks
from tests.models import VOCAB, MultiTokenLlama
from tests.reference import build_pair, local_slice, make_optimizer, train_beside_reference

NUM_USES = 3  # of embedding and head, a microbatch
SLOW = pytest.mark.slow
CASES = [  # (whether embedding and head are tied, how prediction modules are recomputed)
    (False, "no"),
    (True, "nonreentrant"),
    pytest.param(True, "no", marks=SLOW),
    pytest.param(True, "reentrant", marks=SLOW),
    pytest.param(False, "reentrant", marks=SLOW),
    pytest.param(False, "nonreentrant", marks=SLOW),
]


def tokens(step: int, num: int = 16) -> torch.Tensor:
    return torch.randint(VOCAB, (num, 9), generator=torch.Generator().manual_seed(step))


def prediction_loss(logits: torch.Tensor) -> torch.Tensor:
    """Cross entropy with one token as every target, the further predictions at three tenths of the weight."""
    entropies = (logits.logsumexp(-1) - logits[..., 3]).mean((0, 2))
    return entropies[0] + 0.3 * entropies[1:].mean()


def build(mesh, **kwargs):
    """(sharded, reference): every matrix is sharded, the norms are whole. The reference recomputes nothing."""
    reference, model = build_pair(lambda: MultiTokenLlama(**kwargs))
    reference.recompute = "no"
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    names = {name for name, param in model.named_parameters() if param.placements[0].is_shard()}
    assert names == {name for name, param in model.named_parameters() if param.dim() == 2}
    return model, reference


def train_step(model, optimizer, rank: int, world_size: int, step: int, num_microbatches: int = 2):
    for whole in tokens(step).chunk(num_microbatches):
        prediction_loss(model(local_slice(whole, rank, world_size))).backward()
    optimizer.step()
    optimizer.zero_grad()


@ranks(2, 4)
@pytest.mark.parametrize("tied, recompute", CASES)
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adam", marks=SLOW)])
def test_gradients_are_the_references(mesh, rank, world_size, tied, recompute, optimizer):
    model, reference = build(mesh, tied=tied, recompute=recompute)
    train_beside_reference(
        model,
        reference,
        tokens,
        rank=rank,
        world_size=world_size,
        optimizer=optimizer,
        num_microbatches=2,
        loss=prediction_loss,
    )
    s = stats(model)
    assert s.num_pending == 0 and s.live_lease_bytes == 0


def weight_counters(model) -> dict[str, tuple[int, ...]]:
    """(forward, recompute, backward gathers, kept at the turn, reductions) by name; a tied weight's under its first
    name."""
    found = {}
    for name, _ in model.named_parameters():
        module, _, leaf = name.rpartition(".")
        weight = model.get_submodule(module)._gtp.weights.get(leaf)
        if weight is not None:
            c = weight.counters
            gathers = c.num_forward_gathers, c.num_recompute_gathers, c.num_backward_gathers
            assert sum(gathers) == c.num_prefetch_hits + c.num_on_demand_gathers, name  # none gathered in vain
            found[name] = (*gathers, c.num_kept_at_turn, c.num_reductions)
    return found


def expected_counters(model, tied: bool, recompute: str, num_microbatches: int) -> dict[str, tuple[int, ...]]:
    """Uses a step: each is one gather, but a backward that finds what its recompute gathered, and the first of a
    microbatch's backwards: it is of the head, which the forward ended with."""
    expected = {}
    for name, param in model.named_parameters():
        if param.dim() == 2:
            is_recomputed = recompute != "no" and name.startswith("ahead.")
            counts = (1, 1, 0, 0, 1) if is_recomputed else (1, 0, 1, 0, 1)
            if name == "tok_embeddings.weight":  # its gradient needs no weight
                counts = (2 * NUM_USES, 0, NUM_USES - 1, 1, 2 * NUM_USES) if tied else (NUM_USES, 0, 0, 0, NUM_USES)
            elif name == "output.weight":
                counts = (NUM_USES, 0, NUM_USES - 1, 1, NUM_USES)
            expected[name] = tuple(num_microbatches * count for count in counts)
    return expected


@ranks(2, 4)
@pytest.mark.parametrize("tied, recompute", CASES)
def test_gathers_are_uses(mesh, rank, world_size, tied, recompute):
    model, _ = build(mesh, tied=tied, recompute=recompute)
    optimizer = make_optimizer("adam", model)
    train_step(model, optimizer, rank, world_size, 0)
    for step in (1, 2, 3):
        reset_stats(model)
        train_step(model, optimizer, rank, world_size, step)
        expected = expected_counters(model, tied, recompute, num_microbatches=2)
        assert weight_counters(model) == expected
        s = stats(model)
        totals = s.num_forward_gathers, s.num_recompute_gathers, s.num_backward_gathers, s.num_kept_at_turn
        assert (*totals, s.num_reductions) == tuple(map(sum, zip(*expected.values())))
        # The first weight of each forward, and once a whole step was seen of the first one.
        assert s.num_on_demand_gathers == (2 if step == 1 else 1)
        assert (s.num_mispredictions, s.num_pending, s.live_lease_bytes) == (0, 0, 0)
    rows = schedule_table(model)
    heads = [row for row in rows if row.weight == ("tok_embeddings.weight" if tied else "output.weight")]
    assert len(heads) == 2 * NUM_USES * (3 if tied else 2)


class EmbedsInBlock(nn.Module):
    """Looks its table up inside what is recomputed, as a prediction module with an embedding of its own would."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table, self.last = nn.Linear(16, 16), nn.Embedding(400, 16), nn.Linear(16, 16)
        self.bytes_after_block: list[int] = []

    def block(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(x) + self.table(ids))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """(batch, 16), int64 (batch,) -> (batch, 16)."""
        x = self.first(x)
        x.register_hook(lambda grad: self.bytes_after_block.append(stats(self).live_lease_bytes))
        return checkpoint(self.block, x, ids, use_reentrant=False)


@ranks(2)
def test_a_recomputed_table_is_let_go(mesh):
    model = EmbedsInBlock()
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    for _ in range(2):
        model(torch.randn(4, 16), torch.arange(4)).sum().backward()
    assert stats(model).num_recompute_gathers == 4
    assert max(model.bytes_after_block) < model.table.weight.numel() * 4
