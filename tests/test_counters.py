"""What the counters say, and that they say what really travelled."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, schedule_table, stats
from tests.harness import count_collectives, ranks


class Block(nn.Module):
    """Three linears; ``recompute`` says how it is checkpointed: "no", "reentrant" or "nonreentrant"."""

    def __init__(self, dim: int, recompute: str = "no") -> None:
        super().__init__()
        self.recompute = recompute
        self.up = nn.Linear(dim, 2 * dim)
        self.gate = nn.Linear(dim, 2 * dim, bias=False)
        self.down = nn.Linear(2 * dim, dim, bias=False)

    def inner(self, x):
        return x + self.down(torch.tanh(self.gate(x)) * self.up(x))

    def forward(self, x):
        if self.recompute == "no":
            return self.inner(x)
        return checkpoint(self.inner, x, use_reentrant=self.recompute == "reentrant")


class Model(nn.Module):
    """Embedding, blocks, head: ``num_weights`` sharded weights."""

    def __init__(self, recompute: list[str], dim: int = 32, vocab: int = 40) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, mode) for mode in recompute)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.num_weights = 2 + 3 * len(recompute)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build(mesh, recompute, config=GTPConfig(), dtype=torch.float32) -> Model:
    torch.manual_seed(0)
    model = Model(recompute).to(dtype)
    parallelize_module(model, mesh, GTPStyle(config))
    assert stats(model).num_sharded_weights == model.num_weights
    return model


def train_step(model, optimizer, num_microbatches: int = 1):
    for _ in range(num_microbatches):
        model(torch.randint(0, 40, (2, 5))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@ranks(2)
@pytest.mark.parametrize("num_microbatches", [1, 3])
def test_steady_state_without_recompute(mesh, num_microbatches):
    model = build(mesh, ["no"] * 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, optimizer, num_microbatches)
    for number in range(3):
        reset_stats(model)
        train_step(model, optimizer, num_microbatches)
        s = stats(model)
        num_weights, n = model.num_weights, num_microbatches
        assert s.num_forward_gathers == num_weights * n
        assert s.num_kept_at_turn == n  # the head: each forward ends and each backward begins with it
        assert s.num_backward_gathers == (num_weights - 2) * n  # nor does the embedding's gradient need its weight
        assert s.num_reductions == num_weights * n
        assert s.num_small_reductions == n  # one coalesced all-reduce a backward
        # The first weight of the first forward; of each forward while no whole step was seen to tell where steps end.
        on_demand = n if number == 0 else 1
        assert s.num_on_demand_gathers == on_demand
        assert s.num_prefetch_hits == (2 * num_weights - 2) * n - on_demand
        assert (s.num_mispredictions, s.num_recompute_gathers, s.num_pending, s.live_lease_bytes) == (0, 0, 0, 0)


@ranks(2)
@pytest.mark.parametrize("mode", ["reentrant", "nonreentrant"])
def test_full_recompute_needs_two_gathers(mesh, mode):
    model = build(mesh, [mode] * 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        train_step(model, optimizer)
    for _ in range(2):
        reset_stats(model)
        train_step(model, optimizer)
        s = stats(model)
        assert s.num_forward_gathers == model.num_weights
        assert s.num_recompute_gathers == 9
        # The head is still there from the forward, all else from its recompute.
        assert (s.num_backward_gathers, s.num_kept_at_turn) == (0, 1)
        assert s.num_reductions == model.num_weights
        assert s.num_on_demand_gathers <= 2
        assert (s.num_mispredictions, s.num_pending, s.live_lease_bytes) == (0, 0, 0)
        assert all((row.issued_at is None) == (row.kind == "backward") for row in schedule_table(model))


@ranks(2)
@pytest.mark.parametrize("mode", ["reentrant", "nonreentrant"])
def test_partial_recompute_needs_at_most_two_gathers(mesh, mode):
    model = build(mesh, ["no", mode, "no", mode])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        train_step(model, optimizer)
    reset_stats(model)
    train_step(model, optimizer)
    s = stats(model)
    assert (s.num_forward_gathers, s.num_recompute_gathers, s.num_backward_gathers) == (14, 6, 6)
    assert s.num_kept_at_turn == 1
    assert s.num_on_demand_gathers <= 2 and s.num_mispredictions == 0 and s.num_pending == 0


@ranks(2)
def test_recompute_gathers_three_times_where_a_block_does_not_fit(mesh):
    model = build(mesh, ["nonreentrant"] * 2, GTPConfig(recompute_keep_bytes=0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        train_step(model, optimizer)
    reset_stats(model)
    train_step(model, optimizer)
    s = stats(model)
    assert (s.num_forward_gathers, s.num_recompute_gathers, s.num_backward_gathers) == (8, 6, 6)
    assert s.num_kept_at_turn == 1
    assert s.num_mispredictions == 0 and s.live_lease_bytes == 0


@ranks(2, 4)
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_stats_equal_the_payload_that_travelled(mesh, param_dtype):
    model = build(mesh, ["no", "nonreentrant"], GTPConfig(param_dtype=param_dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, optimizer)
    reset_stats(model)
    with count_collectives() as log:
        train_step(model, optimizer, num_microbatches=2)
    s = stats(model)
    assert s.num_kept_at_turn == 2
    num_gathers = s.num_forward_gathers + s.num_recompute_gathers + s.num_backward_gathers
    assert log.count("all_gather") == num_gathers > 0
    assert log.num_bytes("all_gather") == s.gather_bytes > 0
    assert log.count("reduce_scatter") == s.num_reductions > 0
    assert log.num_bytes("reduce_scatter") == s.reduce_bytes > 0
    assert log.count("all_reduce") == s.num_small_reductions == 2
    assert log.dtypes("all_gather") == {param_dtype or torch.float32}
    assert log.dtypes("reduce_scatter") == {torch.float32}
    gathers = {call.group_name for call in log.select("all_gather")}
    reductions = {call.group_name for call in log.select("reduce_scatter")}
    assert gathers.isdisjoint(reductions)  # a communicator each


@ranks(4)
def test_stats_equal_what_is_exchanged_for_a_sum_in_float32(mesh):
    config = GTPConfig(reduce_dtype=torch.bfloat16, reduce_scatter_with_fp32_accumulation=True)
    model = build(mesh, ["no"], config)
    with count_collectives() as log:
        train_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    s = stats(model)
    assert log.count("all_to_all") == s.num_reductions == model.num_weights
    assert log.num_bytes("all_to_all") == s.reduce_bytes > 0
    assert log.dtypes("all_to_all") == {torch.bfloat16}
    assert log.count("reduce_scatter") == 0 and s.num_pending == 0


@ranks(2)
def test_bytes_follow_the_formula(mesh):
    """Forward and backward gather in bf16, reduction in bf16: 6 bytes an element and microbatch, but where no weight is
    gathered for the backward."""
    config = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    model = build(mesh, ["no"] * 2, config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, optimizer)
    reset_stats(model)
    train_step(model, optimizer)
    s = stats(model)
    sharded = [p.numel() for p in model.parameters() if any(q.is_shard() for q in p.placements)]
    not_gathered = model.embedding.weight.numel() + model.head.weight.numel()
    assert s.gather_bytes + s.reduce_bytes == 6 * sum(sharded) - 2 * not_gathered
    assert s.num_refreshes == model.num_weights  # once an optimizer step


@ranks(2)
def test_compute_shards_are_refreshed_once_a_step(mesh):
    model = build(mesh, ["nonreentrant"] * 2, GTPConfig(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_step(model, optimizer)
    for _ in range(2):
        reset_stats(model)
        train_step(model, optimizer, num_microbatches=3)
        assert stats(model).num_refreshes == model.num_weights
    reset_stats(model)
    with torch.no_grad():
        for _ in range(3):  # before each the user may have swapped weights in ways that leave no trace
            model(torch.randint(0, 40, (2, 5)))
    assert stats(model).num_refreshes == 3 * model.num_weights


@ranks(2)
@pytest.mark.parametrize("look_ahead", [1, 2, 3])
def test_look_ahead_bounds_what_is_gathered(mesh, look_ahead):
    model = build(mesh, ["no"] * 4, GTPConfig(look_ahead=look_ahead))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, optimizer)
    reset_stats(model)
    train_step(model, optimizer)
    s = stats(model)
    assert s.num_on_demand_gathers == 1 and s.num_mispredictions == 0
    largest = 32 * 64 * 4
    assert largest * min(look_ahead, 3) < s.peak_lease_bytes <= largest * (look_ahead + 1)
    for row in schedule_table(model):
        if (row.weight, row.kind) == ("head.weight", "backward"):
            assert row.issued_at is None
        else:
            assert row.position - look_ahead <= row.issued_at <= row.position


@ranks(2)
def test_neighbours_of_equal_shape_do_not_share_a_buffer(mesh):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(4))

        def forward(self, x):
            return [layer(x) for layer in self.layers]

    model = Pair()
    for index, layer in enumerate(model.layers):
        nn.init.constant_(layer.weight, -1.0 if index % 2 else 1.0)
    parallelize_module(model, mesh, GTPStyle(GTPConfig(look_ahead=2)))
    x = torch.arange(64.0).expand(3, 64).clone().requires_grad_()
    for _ in range(3):
        reset_stats(model)
        outputs = model(x)
        for index, y in enumerate(outputs):
            assert torch.equal(y, torch.full((3, 64), 2016.0 * (-1 if index % 2 else 1)))
        x.grad = None
        (outputs[0].sum() + 3 * outputs[1].sum() + 5 * outputs[2].sum() + 7 * outputs[3].sum()).backward()
        assert torch.equal(x.grad, torch.full((3, 64), 64.0 * (1 - 3 + 5 - 7)))
    # The trap was armed: neighbours were in flight together.
    assert (stats(model).num_prefetch_hits, stats(model).num_kept_at_turn) == (6, 1)


@ranks(2)
def test_schedule_table_is_readable(mesh):
    model = build(mesh, ["no"])
    assert str(schedule_table(model)) == "(no schedule recorded yet)"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train_step(model, optimizer)
    table = schedule_table(model)
    assert [row.weight for row in table][:2] == ["embedding.weight", "blocks.0.gate.weight"]
    assert len(table) == 9 and "blocks.0.down.weight" in str(table) and len(str(table).splitlines()) == 10


@ranks(1)
def test_size_one_changes_nothing(mesh):
    torch.manual_seed(0)
    model = Model(["no"])
    before = {name: (param, type(param)) for name, param in model.named_parameters()}
    classes = [type(module) for module in model.modules()]
    state = torch.get_rng_state()
    parallelize_module(model, mesh, GTPStyle())
    assert torch.equal(state, torch.get_rng_state())
    assert [type(module) for module in model.modules()] == classes
    for name, param in model.named_parameters():
        assert param is before[name][0]
    model(torch.randint(0, 40, (2, 5))).sum().backward()
    assert stats(model) == type(stats(model))()
