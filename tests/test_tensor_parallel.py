"""Tensor parallelism below gtp, in detail: every style, uneven rows, biases, losses, vocabularies, scaling, either
order."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from gtp_dtensor import GTPConfig, GTPStyle, clip_grad_norm_, count_zero_grads, reset_stats, stats
from tests.harness import ranks
from tests.harness.collectives import count_collectives
from tests.reference import assert_close_to_reference, build_pair, full_gradients, full_parameters, local_slice

ORDERS = [("gtp", "tp"), ("tp", "gtp")]
ROWS = (5, 7, 9, 17, 40)
EXACT = 1e-12


def grid(order: tuple[str, str]) -> DeviceMesh:
    """tp 2 x gtp 2 on four ranks."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=order)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard(model: nn.Module, mesh: DeviceMesh, plan: dict, config: GTPConfig | None = None) -> nn.Module:
    parallelize_module(model, mesh["tp"], plan)
    return parallelize_module(model, mesh["gtp"], GTPStyle(config, min_numel=10))


def compare_step(model: nn.Module, reference: nn.Module, mesh: DeviceMesh, x: torch.Tensor, seed: int = 1) -> None:
    """Forward and backward of a global batch x (samples, ...): outputs, gradients of the input and of the weights."""
    rank = mesh["gtp"].get_local_rank()
    mine, theirs = (local_slice(x, rank, 2).clone().requires_grad_(), x.clone().requires_grad_())
    y, expected = whole(model(mine)), reference(theirs)
    assert_close_to_reference(y, local_slice(expected, rank, 2), "output", EXACT)
    factor = draw(*expected.shape, seed=seed)
    (y * local_slice(factor, rank, 2)).sum().backward()
    ((expected * factor).sum() / 2).backward()  # gradients are means over gtp
    assert_close_to_reference(mine.grad, 2 * local_slice(theirs.grad, rank, 2), "input gradient", EXACT)
    assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient", EXACT)


class Pair(nn.Module):
    """Two linears with ``rows`` features between them."""

    def __init__(self, rows: int, dim: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, rows), nn.Linear(rows, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(..., dim) -> (..., dim)."""
        return self.down(torch.tanh(self.up(x)))


@ranks(4)
@pytest.mark.parametrize("style", ["column", "row"])
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_uneven_rows(order, style):
    """Rows of a column-parallel weight are cut by tp and then by gtp; those of a row-parallel one by gtp alone."""
    mesh = grid(order)
    tp, gtp = mesh["tp"].get_local_rank(), mesh["gtp"].get_local_rank()
    styles = {
        "column": lambda: ColwiseParallel(output_layouts=Replicate()),
        "row": lambda: RowwiseParallel(input_layouts=Replicate()),
    }
    for rows in ROWS:
        model, reference = build_pair(lambda rows=rows: nn.Sequential(nn.Linear(6, rows)).double())
        shard(model, mesh, {"0": styles[style]()})
        weight = model[0].weight
        assert weight.device_mesh.mesh_dim_names == ("tp", "gtp")
        assert weight.placements == (Shard(0 if style == "column" else 1), Shard(0))
        kept = reference[0].weight.chunk(2, 0 if style == "column" else 1)[tp].chunk(2)
        expected_rows = kept[gtp].shape[0] if gtp < len(kept) else 0
        assert weight.to_local().shape[0] == expected_rows
        for step in range(2):
            compare_step(model, reference, mesh, draw(4, 3, 6, seed=step))
            for one in (model, reference):
                torch.optim.SGD(one.parameters(), lr=0.1).step()
                one.zero_grad()
            assert_close_to_reference(full_parameters(model), full_parameters(reference), "weight", EXACT)


@ranks(4)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
def test_norms_and_zeros_of_uneven_rows(order):
    """No hole of a nested uneven cut, and no padding, is counted."""
    mesh = grid(order)
    for rows in ROWS:
        model, reference = build_pair(lambda rows=rows: nn.Sequential(nn.Linear(6, rows)).double())
        shard(model, mesh, {"0": ColwiseParallel()}, GTPConfig(pad_for_alignment=16))
        x = draw(4, 6)
        x[:, 2] = 0  # a column of the gradient is zero
        mine = model(local_slice(x, mesh["gtp"].get_local_rank(), 2))
        (whole(mine).sum() if isinstance(mine, DTensor) else mine.sum()).backward()
        (reference(x).sum() / 2).backward()
        assert count_zero_grads(model.parameters()) == rows
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        assert torch.allclose(clip_grad_norm_(model.parameters(), 1.0), expected, rtol=EXACT)
        assert_close_to_reference(full_gradients(model), full_gradients(reference), "clipped gradient", EXACT)


@ranks(4)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("output", [Replicate(), Shard(1)], ids=["replicated", "sequence"])
def test_bias_of_a_row_parallel_linear_counts_once(order, output):
    mesh = grid(order)
    model, reference = build_pair(lambda: Pair(8).double())
    sequence = isinstance(output, Shard)
    plan = {
        "up": ColwiseParallel(input_layouts=Replicate()),
        "down": RowwiseParallel(output_layouts=output, use_local_output=not sequence),
    }
    shard(model, mesh, plan)
    with torch.no_grad():
        for one in (model, reference):  # nothing but the bias is left
            one.up.weight.zero_(), one.up.bias.zero_(), one.down.weight.zero_()
    x = draw(4, 6, 6)
    y = whole(model(local_slice(x, mesh["gtp"].get_local_rank(), 2)))
    assert torch.equal(y, reference.down.bias.expand(2, 6, 6))
    y.sum().backward()
    # Each of 2 x 6 rows adds 1 on every gtp rank, and the ranks are averaged.
    assert torch.equal(whole(model.down.bias.grad), torch.full((6,), 12.0, dtype=torch.float64))


@ranks(4)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per_token"])
def test_sequence_parallel_norms_in_both_modes(order, per_token):
    """Each tp rank sees a part of the sequence: gradients of norms and of row-parallel biases are sums over tp,
    once."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.pair, self.last = nn.LayerNorm(6), Pair(8), nn.RMSNorm(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.pair(self.norm(x)))

    mesh = grid(order)
    model, reference = build_pair(lambda: Net().double())
    plan = {
        "norm": SequenceParallel(),
        "pair.up": ColwiseParallel(input_layouts=Shard(1)),
        "pair.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        "last": SequenceParallel(),
    }
    shard(model, mesh, plan, GTPConfig(calculate_per_token_loss=per_token))
    rank, slope = mesh["gtp"].get_local_rank(), draw(6, seed=9)
    for step in range(2):
        for microbatch in draw(8, 6, 6, seed=step).chunk(2):
            part = DTensor.from_local(local_slice(microbatch, rank, 2), mesh["tp"], [Replicate()])
            y = model(part.redistribute(placements=[Shard(1)]))
            assert isinstance(y, DTensor) and y.placements == (Shard(1),)
            losses = (whole(y) * slope).sum(-1)  # not a norm of y, which is constant behind a norm
            # Per token the loss is divided by the number of tokens of all ranks, and gradients are summed.
            (losses.sum() / (2 * 4 * 6) if per_token else losses.mean() / 2).backward()
            ((reference(microbatch) * slope).sum(-1).mean() / 2).backward()
        assert_close_to_reference(full_gradients(model), full_gradients(reference), f"gradient {step}", EXACT)
        for one in (model, reference):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()
    assert stats(model).num_pending == 0


class Language(nn.Module):
    """Embedding, a linear pair, output head."""

    def __init__(self, vocab: int, dim: int = 8) -> None:
        super().__init__()
        self.table, self.pair, self.head = nn.Embedding(vocab, dim), Pair(12, dim), nn.Linear(dim, vocab)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 (batch, length) -> logits (batch, length, vocab)."""
        return self.head(self.pair(self.table(tokens)))


@ranks(4)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("vocab", [24, 26, 37])
@pytest.mark.parametrize("per_token", [False, True], ids=["mean", "per_token"])
def test_loss_parallel(order, vocab, per_token):
    """Logits stay cut over the vocabulary; no tensor as long as it is gathered for the loss."""
    mesh = grid(order)
    model, reference = build_pair(lambda: Language(vocab).double())
    plan = {
        "table": RowwiseParallel(input_layouts=Replicate()),
        "pair.up": ColwiseParallel(),
        "pair.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    shard(model, mesh, plan, GTPConfig(calculate_per_token_loss=per_token))
    rank, group = mesh["gtp"].get_local_rank(), mesh["gtp"].get_group()
    for step in range(3):
        tokens, labels = torch.randint(vocab, (2, 4, 5), generator=torch.Generator().manual_seed(step))
        with loss_parallel(), count_collectives() as log:
            logits = model(local_slice(tokens, rank, 2))
            assert logits.placements == (Shard(2),)
            loss = F.cross_entropy(
                logits.flatten(0, 1),
                local_slice(labels, rank, 2).flatten(),
                reduction="sum" if per_token else "mean",
            )
            loss = loss / labels.numel() if per_token else loss
            loss.backward()
        over_tp = [call for call in log.calls if len(call.ranks) == 2 and call.ranks == tuple(mesh["tp"].mesh.tolist())]
        assert over_tp and max(call.num_elements for call in over_tp) <= 10 * 8  # hidden states, never logits
        expected = F.cross_entropy(reference(tokens).flatten(0, 1), labels.flatten())
        expected.backward()
        total = whole(loss).detach().clone()
        dist.all_reduce(total, group=group)
        assert_close_to_reference(total if per_token else total / 2, expected, "loss", EXACT)
        assert_close_to_reference(full_gradients(model), full_gradients(reference), f"gradient {step}", EXACT)
        for one in (model, reference):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()


class Largest(TorchDispatchMode):
    """The most elements of any tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


@ranks(4)
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("vocab", [64, 50, 67])
def test_gradient_of_a_vocabulary_stays_local(order, vocab):
    """Backward of an embedding cut over the vocabulary makes nothing larger than this tp rank's rows."""
    mesh = grid(order)
    model, reference = build_pair(lambda: nn.Sequential(nn.Embedding(vocab, 16)).double())
    shard(model, mesh, {"0": RowwiseParallel(input_layouts=Replicate())})
    rank = mesh["gtp"].get_local_rank()
    rows_of_first = -(-vocab // 2)
    padded_rows = 2 * -(-rows_of_first // 2)
    for step in range(2):
        tokens = torch.randint(vocab, (4, 5), generator=torch.Generator().manual_seed(step))
        reset_stats(model)
        with Largest() as largest:
            y = whole(model(local_slice(tokens, rank, 2)))
            y.square().sum().backward()
        assert rows_of_first // 2 * 16 < largest.numel <= padded_rows * 16 < vocab * 16  # armed: it does see the table
        assert stats(model).reduce_bytes <= padded_rows * 16 * 8
        (reference(tokens).square().sum() / 2).backward()
        assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient", EXACT)
        for one in (model, reference):
            torch.optim.SGD(one.parameters(), lr=0.1).step()
            one.zero_grad()
        assert_close_to_reference(full_parameters(model), full_parameters(reference), "weight", EXACT)
