"""Routed experts on axes of their own, beside dense weights on others."""

import copy
import logging

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

import gtp_dtensor.experts
import gtp_dtensor.weight
from gtp_dtensor import (
    GTPConfig,
    GTPStyle,
    grouped_linear,
    logical_init,
    parallelize_module,
    reset_stats,
    schedule_table,
    stats,
)
from gtp_dtensor.members import model_members
from tests.harness import ranks
from tests.moe import ExpertList, ExpertParallel, Experts, MoEModel, grouped_experts
from tests.reference import (
    assert_close_to_reference,
    assert_equal_to_reference,
    build_pair,
    full,
    full_gradients,
    full_parameters,
    local_slice,
    mean_square,
    train_beside_reference,
)

EXACT = 1e-11  # relative, in float64
DIM = 8


def grids(world_size, gtp=1, egtp=1, ep=1, rest="optimizer_shard_mesh", device_type="cpu"):
    """(dense mesh, options of the dense style, expert mesh, options of the experts' style); ``rest`` says what the
    ranks beside are."""
    result = []
    for sizes in ({"rest": world_size // gtp, "gtp": gtp}, {"rest": world_size // egtp // ep, "egtp": egtp, "ep": ep}):
        mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        result += [mesh, {rest: mesh["rest"]}]
    return result


def shard(model, dense, dense_options, experts, expert_options, config=None, explicit=True):
    """Experts first, then what is left."""
    if experts["ep"].size() > 1:
        parallelize_module(model, experts["ep"], {"layers.*.moe.experts": ExpertParallel()})
    style = GTPStyle(
        config,
        is_expert=True,
        modules=["layers.*.moe.experts"],
        min_numel=30,
        forwards={Experts: grouped_experts} if explicit and any(type(m) is Experts for m in model.modules()) else None,
        **expert_options,
    )
    parallelize_module(model, experts["egtp"], style)
    parallelize_module(model, dense["gtp"], GTPStyle(config, min_numel=30, **dense_options))
    return model


def batch(num_samples, seed=0):
    return torch.randn(num_samples, 5, DIM, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expert_members(model):
    return [member for member in model_members(model) if member.runtime.domain.is_expert]


GRIDS = [(ep, egtp, gtp) for ep in (1, 2, 4) for egtp in (1, 2, 4) if ep * egtp <= 4 for gtp in (1, 2, 4)]


@ranks(4)
@pytest.mark.parametrize(
    "num_experts, optimizer, rest, grids_of_all",
    [
        (4, "sgd", "optimizer_shard_mesh", slice(0, None, 5)),
        pytest.param(4, "sgd", "optimizer_shard_mesh", slice(None), marks=pytest.mark.slow),
        pytest.param(6, "sgd", "replicate_mesh", slice(1, None, 5), marks=pytest.mark.slow),
        pytest.param(4, "sgd", "replicate_mesh", slice(None), marks=pytest.mark.slow),
        pytest.param(6, "sgd", "optimizer_shard_mesh", slice(None), marks=pytest.mark.slow),
        pytest.param(6, "adam", "optimizer_shard_mesh", slice(None), marks=pytest.mark.slow),
        pytest.param(4, "adam", "replicate_mesh", slice(None), marks=pytest.mark.slow),
    ],
)
def test_every_grid_trains_like_one_process(rank, world_size, num_experts, optimizer, rest, grids_of_all):
    """Averages: with a wrong count of ranks SGD shows it at once."""
    dims = set()
    for index, (ep, egtp, gtp) in enumerate(GRIDS[grids_of_all]):
        if num_experts % ep:
            continue
        model, reference = build_pair(lambda: MoEModel(2, num_experts=num_experts).double())
        shard(model, *grids(world_size, gtp, egtp, ep, rest), explicit=index % 2 == 0)
        assert_equal_to_reference(full_parameters(model), full_parameters(reference), "weight")
        dims |= {member.cut.dim for member in expert_members(model)}
        train_beside_reference(
            model,
            reference,
            lambda step: batch(2 * world_size, seed=step),
            rank=rank,
            world_size=world_size,
            optimizer=optimizer,
            num_microbatches=2,
            rtol=EXACT if optimizer == "sgd" else 1e-8,
            syncs_last_only=index % 3 == 0,
        )
        s = stats(model)
        assert s.num_pending == s.live_lease_bytes == 0
        assert all(member.counters.num_reductions for member in expert_members(model))
    assert dims == ({0} if num_experts == 4 else {0, 1})


@ranks(4)
def test_expert_gradients_are_not_gtp_over_egtp_times_too_large(rank, world_size):
    """gtp 4, egtp 2: a mean over the experts' own axes of 2 x 1 ranks would be twice the mean over the 4 data ranks."""
    model, reference = build_pair(lambda: MoEModel(1).double())
    dense, _, experts, _ = grids(world_size, gtp=4, egtp=2, ep=2)
    shard(model, dense, {}, experts, {})
    x = batch(8)
    mean_square(model(local_slice(x, rank, world_size))).backward()
    mean_square(reference(x)).backward()
    mine, theirs = full_gradients(model), full_gradients(reference)
    assert_close_to_reference(mine, theirs, "gradient", EXACT)
    names = [name for name in theirs if ".experts." in name]
    assert names and all(theirs[name].norm() > 1e-3 for name in names)
    (member, *_) = expert_members(model)
    own_ranks = [transport.size for transport in member.runtime.domain.transports]
    assert own_ranks == [2] and member.runtime.gradient_scale == 1 / 4


@ranks(4)
def test_sums_where_the_loss_is_divided_already(rank, world_size):
    model, reference = build_pair(lambda: MoEModel(2).double())
    shard(model, *grids(world_size, gtp=2, egtp=2), config=GTPConfig(calculate_per_token_loss=True))
    x = batch(8)
    (model(local_slice(x, rank, world_size)).square().sum() / 1000).backward()
    (reference(x).square().sum() / 1000).backward()
    assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient", EXACT)


@ranks(4)
def test_storage(rank, world_size):
    """Whole experts where the axis divides their number on this rank, else features of each; a stack that is smaller
    than the axis too."""
    wanted = {
        (4, 1, 4): ((Shard(0),), (1, 10, DIM)),
        (4, 1, 2): ((Shard(0), Shard(0)), (1, 10, DIM)),  # over egtp, and over the optimizer's axis
        (6, 1, 2): ((Shard(0), Shard(1)), (3, 5, DIM)),
        (6, 1, 4): ((Shard(1),), (6, 3, DIM)),
        (2, 1, 4): ((Shard(1),), (2, 3, DIM)),
        (6, 2, 2): ((Shard(0), Shard(1)), (3, 5, DIM)),  # over ep, and over egtp
        (12, 2, 1): ((Shard(0), Shard(0), Shard(0)), (3, 10, DIM)),
    }
    for (num_experts, ep, egtp), (placements, shape) in wanted.items():
        model, reference = build_pair(lambda: MoEModel(1, num_experts=num_experts))
        model.layers[0].moe.experts.w1.tag = "kept"
        shard(model, *grids(world_size, 4, egtp, ep))
        w1 = model.layers[0].moe.experts.w1
        assert w1.placements == placements
        assert rank > 2 or w1._local_tensor.shape == shape
        assert_equal_to_reference(full(w1), reference.layers[0].moe.experts.w1, "w1")
        if ep == 1:
            assert w1.tag == "kept"
        with logical_init():
            torch.manual_seed(3)
            nn.init.normal_(w1)
        torch.manual_seed(3)
        assert_equal_to_reference(full(w1), nn.init.normal_(torch.empty(w1.shape)), "initial w1")


@ranks(8)
def test_experts_on_expert_and_expert_tensor_parallel_axes(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("egtp", "ep", "etp"))
    module, reference = build_pair(lambda: Experts(4, DIM, 12))
    cuts = {"w1": [Shard(0), Shard(1)], "w3": [Shard(0), Shard(1)], "w2": [Shard(0), Shard(2)]}
    for name, placements in cuts.items():
        param = nn.Parameter(distribute_tensor(getattr(module, name), mesh["ep", "etp"], placements))
        module.register_parameter(name, param)
    parallelize_module(module, mesh["egtp"], GTPStyle(is_expert=True, num_data_ranks=2, min_numel=0))
    for name, placements in cuts.items():
        param = getattr(module, name)
        assert param.device_mesh.mesh_dim_names == ("ep", "etp", "egtp")
        assert param.placements == (*placements, Shard(0))
        assert_equal_to_reference(full(param), getattr(reference, name), name)


class LeaseCensus:
    """Counts the gathered weights that are in memory at one time, by role. Context manager."""

    def __init__(self):
        self.live, self.most = {}, {}

    def __enter__(self):
        self._init, self._end = gtp_dtensor.weight.Lease.__init__, gtp_dtensor.weight.Lease.end

        def init(lease, weight, *args, **kwargs):
            self._init(lease, weight, *args, **kwargs)
            self.live[weight.role] = self.live.get(weight.role, 0) + 1
            self.most[weight.role] = max(self.live[weight.role], self.most.get(weight.role, 0))

        def end(lease):
            self.live[lease.weight.role] -= 1
            self._end(lease)

        gtp_dtensor.weight.Lease.__init__, gtp_dtensor.weight.Lease.end = init, end
        return self

    def __exit__(self, *exc):
        gtp_dtensor.weight.Lease.__init__, gtp_dtensor.weight.Lease.end = self._init, self._end


@ranks(4)
@pytest.mark.parametrize("look_ahead", [1, 2])
def test_gathers_are_issued_a_block_ahead(rank, world_size, look_ahead):
    model = MoEModel(4).double()
    shard(model, *grids(world_size, 2, 2, 2), config=GTPConfig(look_ahead=look_ahead))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step():
        mean_square(model(local_slice(batch(8), rank, world_size))).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    reset_stats(model)
    with LeaseCensus() as census:
        step()
    roles = {f"layers.*.moe.experts.{name}" for name in ("w1", "w2", "w3")}
    assert {role: census.most[role] for role in roles} == dict.fromkeys(roles, 1 + look_ahead)
    assert all(count == 0 for count in census.live.values())
    s = stats(model)
    num_experts_weights = 3 * 4
    assert s.num_mispredictions == 0
    # Dense: one at the start of the pass. Experts: the first blocks' of the first role, before anything is known.
    assert s.num_on_demand_gathers == 2
    assert sum(m.counters.num_forward_gathers for m in expert_members(model)) == num_experts_weights
    kept = [m.fqn for m in expert_members(model) if m.counters.num_kept_at_turn]
    assert kept == ["layers.3.moe.experts.w2"] and s.num_kept_at_turn == 2  # and the last dense one
    assert sum(m.counters.num_backward_gathers for m in expert_members(model)) == num_experts_weights - 1
    rows = [row for row in schedule_table(model) if ".experts." in row.weight]
    assert len(rows) == 2 * num_experts_weights
    rows = {(row.kind, row.weight): row for row in rows}
    assert [key for key, row in rows.items() if row.issued_at is None] == [("backward", *kept)]
    for kind, step_back in (("forward", -1), ("backward", 1)):
        for block in range(4):
            for name in ("w1", "w2", "w3"):
                before = block + step_back * look_ahead
                if 0 <= before < 4:
                    mine = rows[kind, f"layers.{block}.moe.experts.{name}"]
                    assert mine.issued_at == rows[kind, f"layers.{before}.moe.experts.{name}"].position


@ranks(4)
def test_a_gather_of_features_is_one_collective(rank, world_size):
    """egtp 4 does not divide 6 experts."""
    model, reference = build_pair(lambda: MoEModel(1, num_experts=6).double())
    dense, dense_options, experts, expert_options = grids(world_size, 4, 4)
    shard(model, dense, dense_options, experts, expert_options)
    transport = expert_members(model)[0].runtime.transport

    class Counting:
        def __init__(self, group):
            self.group, self.calls = group, []

        def __getattr__(self, name):
            self.calls.append(name)
            return getattr(self.group, name)

    transport.gather_group, transport.reduce_group = Counting(transport.gather_group), Counting(transport.reduce_group)
    x = batch(8)
    mean_square(model(local_slice(x, rank, world_size))).backward()
    mean_square(reference(x)).backward()
    assert transport.gather_group.calls == ["allgather_into_tensor_coalesced"] * 6
    assert transport.reduce_group.calls == ["reduce_scatter_tensor_coalesced"] * 3
    assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient", EXACT)
    (w1, *_) = expert_members(model)
    assert w1.counters.gather_bytes == 2 * 8 * 6 * 12 * DIM  # 10 rows padded to 12, twice


@ranks(4)
@pytest.mark.parametrize("num_experts", [4, 6])
def test_sixteen_bit_gradients_summed_in_float32(rank, world_size, num_experts):
    model, reference = build_pair(lambda: MoEModel(1, num_experts=num_experts))
    config = GTPConfig(reduce_dtype=torch.bfloat16, reduce_scatter_with_fp32_accumulation=True)
    shard(model, *grids(world_size, 4, 4), config=config)
    x = batch(8).float()
    mean_square(model(local_slice(x, rank, world_size))).backward()
    mean_square(reference(x)).backward()
    assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient", 4e-3)


@ranks(4)
def test_lists_of_linears(rank, world_size):
    model, reference = build_pair(lambda: MoEModel(2, num_experts=3, kind=ExpertList).double())
    shard(model, *grids(world_size, 2, 4))
    members = expert_members(model)
    assert len(members) == 2 * 3 * 4  # biases stay whole, on the experts' axes
    assert {type(member).__name__ for member in members} == {"ShardedWeight", "SmallParam"}
    train_beside_reference(model, reference, lambda step: batch(8, step), rank=rank, world_size=world_size, rtol=EXACT)
    s = stats(model)
    reset_stats(model)
    model(local_slice(batch(8), rank, world_size)).sum().backward()
    assert s.num_pending == 0 and stats(model).num_mispredictions == 0


@ranks(4)
@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_gathers_twice(rank, world_size, reentrant):
    model, reference = build_pair(lambda: MoEModel(3).double())
    shard(model, *grids(world_size, 4, 2, 2))
    for layer in model.layers:
        forward = type(layer).forward
        layer.forward = lambda x, layer=layer, forward=forward: checkpoint(
            forward, layer, x if x.requires_grad else x.detach().requires_grad_(), use_reentrant=reentrant
        )
    train_beside_reference(model, reference, lambda step: batch(8, step), rank=rank, world_size=world_size, rtol=EXACT)
    reset_stats(model)
    mean_square(model(local_slice(batch(8), rank, world_size).requires_grad_())).backward()
    for member in expert_members(model):
        c = member.counters
        assert (c.num_forward_gathers, c.num_recompute_gathers, c.num_backward_gathers) == (1, 1, 0), member.fqn


@ranks(2)
def test_frozen_experts_and_inference(rank, world_size):
    model, reference = build_pair(lambda: MoEModel(2).double())
    for one in (model, reference):
        one.layers[0].moe.experts.requires_grad_(False)
    shard(model, *grids(world_size, 2, 2))
    x = local_slice(batch(4), rank, world_size)
    with torch.inference_mode():
        assert_close_to_reference(model(x), reference(x), "output", EXACT)
    train_beside_reference(model, reference, lambda step: batch(4, step), rank=rank, world_size=world_size, rtol=EXACT)
    assert all(p.grad is None for p in model.layers[0].moe.experts.parameters())


def run_grouped_gemm(module, rows, counts):
    """The forward of Experts by torch's grouped GEMM."""
    offsets = counts.cumsum(0).to(torch.int32)
    gate, up = (grouped_linear(module, name, rows, offsets=offsets) for name in ("w1", "w3"))
    return grouped_linear(module, "w2", nn.functional.silu(gate) * up, offsets=offsets)


def check_grouped_gemm(mesh, rank, device):
    """In bfloat16, against a loop in bfloat16 with the same rounding; 3 experts do not fit 2 ranks."""
    (module, reference), counts = build_pair(lambda: Experts(3, 16, 32).to(device)), torch.tensor([8, 0, 24])
    counts, reference = counts.to(device), reference.bfloat16()
    style = GTPStyle(is_expert=True, forwards={Experts: run_grouped_gemm}, num_data_ranks=1)
    parallelize_module(module, mesh, style)
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(rank)).bfloat16().to(device)
    mine, theirs = module(x, counts), reference(x, counts)
    assert mine.dtype == torch.bfloat16
    assert_close_to_reference(mine, theirs, "output", 1e-2)
    mine.square().sum().backward()
    theirs.square().sum().backward()
    for name, param in reference.named_parameters():
        both = param.grad.float()
        torch.distributed.all_reduce(both)
        grad = full(getattr(module, name).grad)
        assert grad.norm() > 0
        assert_close_to_reference(grad, both, f"gradient of {name}", 1e-2)


@ranks(2)
def test_grouped_gemm(rank, world_size):
    check_grouped_gemm(init_device_mesh("cpu", (2,), mesh_dim_names=("egtp",)), rank, "cpu")


@ranks(2)
def test_bad_input(rank, world_size):
    dense, _, experts, _ = grids(world_size, 2, 2)
    model = MoEModel(1)
    with pytest.raises(ValueError, match=r"pattern 'layers.\*.mlp.experts' matches nothing; names here are such as"):
        parallelize_module(model, experts["egtp"], GTPStyle(is_expert=True, modules=["layers.*.mlp.experts"]))
    with pytest.raises(ValueError, match="num_data_ranks=0"):
        GTPStyle(num_data_ranks=0)
    style = GTPStyle(is_expert=True, modules=["*.experts"], forwards={Experts: grouped_experts}, min_numel=0)
    parallelize_module(model, experts["egtp"], style)
    with pytest.raises(ValueError, match="is_expert=True comes before the dense one"):
        parallelize_module(model, experts["egtp"], style)
    with pytest.raises(
        ValueError, match=r"experts.w1, an expert's .*'egtp'.* size 2.*are not under GTP; pass GTPStyle"
    ):
        model(torch.randn(2, 3, DIM))
    with torch.no_grad():
        model(torch.randn(2, 3, DIM))  # no gradients, no question
    module = model.layers[0].moe.experts
    with pytest.raises(ValueError, match=r"3 groups of rows for .*experts.w1, of shape \(4, 10, 8\)"):
        grouped_linear(module, "w1", torch.randn(6, DIM), splits=[1, 2, 3])
    with pytest.raises(ValueError, match="either offsets= or splits="):
        grouped_linear(module, "w1", torch.randn(6, DIM))
    late = MoEModel(1)
    parallelize_module(late, dense["gtp"], GTPStyle(min_numel=0))
    with pytest.raises(ValueError, match="is_expert=True comes before the dense one"):
        parallelize_module(late, experts["egtp"], style)


@ranks(4)
def test_a_forgotten_axis_of_the_experts_is_told(rank, world_size):
    dense, dense_options, experts, expert_options = grids(world_size, 4, 2)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("gtp_dtensor.style")
    logger.addHandler(handler)
    try:
        shard(MoEModel(1), dense, dense_options, experts, expert_options)
        assert not records
        shard(MoEModel(1), dense, dense_options, experts, {})
    finally:
        logger.removeHandler(handler)
    assert len(records) == (rank == 0)
    assert rank or "experts (egtp 2) have 2 ranks and those of the other weights (gtp 4) 4" in records[0]


@ranks(2)
def test_settings_hold_for_all_weights_where_only_experts_are_spread(rank, world_size):
    """All ranks are one expert-parallel axis: nothing is left to gather, for experts or others."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("one", "ep"))
    config = GTPConfig(param_dtype=torch.bfloat16)
    model, reference = build_pair(lambda: MoEModel(1))
    parallelize_module(model, mesh["ep"], {"layers.*.moe.experts": ExpertParallel()})
    style = GTPStyle(config, is_expert=True, modules=["layers.*.moe.experts"], num_data_ranks=2, min_numel=30)
    parallelize_module(model, mesh["one"], style)
    parallelize_module(model, mesh["one"], GTPStyle(config, num_data_ranks=2, min_numel=30))
    x = torch.randn(4, 3, DIM, generator=torch.Generator().manual_seed(0))  # the same on both
    y = model(x.bfloat16())
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    mean_square(reference(x)).backward()
    names = [name for name, _ in reference.named_parameters() if ".experts." in name]
    mine, theirs = full_gradients(model), full_gradients(reference)
    for name in names:
        assert_close_to_reference(mine[name], theirs[name], name, 5e-2)
    assert stats(model).gather_bytes == 0 and stats(model).num_reductions > 0
    off = MoEModel(1)
    parallelize_module(off, mesh["one"], GTPStyle(config, is_expert=True, modules=["layers.*.moe.experts"]))
    parallelize_module(off, mesh["one"], GTPStyle(config))
    assert not any(isinstance(param, DTensor) for param in off.parameters())


@ranks(4)
@pytest.mark.parametrize("check", [False, True])
def test_optimizer_shards_of_features(rank, world_size, check):
    """6 experts on 4 replicas: parameters are cut by features where gathered weights are not cut at all."""
    model, reference = build_pair(lambda: MoEModel(1, num_experts=6).double())
    shard(model, *grids(world_size, 2, 1), config=GTPConfig(check_param_states=check))
    assert {member.replica_cut.dim for member in expert_members(model)} == {1}
    train_beside_reference(
        model, reference, lambda step: batch(8, step), rank=rank, world_size=world_size, rtol=EXACT, num_steps=2
    )


def lone_experts(world_size, config=None, **options):
    module = Experts(3, 16, 32)
    _, _, experts, _ = grids(world_size, 2, 2)
    parallelize_module(module, experts["egtp"], GTPStyle(config, is_expert=True, num_data_ranks=2, **options))
    return module


@ranks(2)
def test_numbers_of_data_ranks(rank, world_size):
    dense, _, experts, _ = grids(world_size, 2, 2)
    model = MoEModel(2)
    for layer, number in enumerate((2, 3)):
        names = [f"layers.{layer}.moe.experts"]
        style = GTPStyle(is_expert=True, modules=names, min_numel=30, num_data_ranks=number)
        parallelize_module(model, experts["egtp"], style)
    assert sorted({member.runtime.gradient_scale for member in expert_members(model)}) == [1 / 3, 1 / 2]
    copied = copy.deepcopy(model.layers[1].moe.experts)
    copied(torch.randn(4, DIM), torch.tensor([1, 1, 1, 1])).sum().backward()
    assert copied.w1.grad is not None
    model = MoEModel(1)
    style = GTPStyle(is_expert=True, modules=["*.experts"])
    parallelize_module(model, experts["egtp"], style)
    parallelize_module(model, dense["gtp"], GTPStyle(min_numel=30, num_data_ranks=6))
    assert {member.runtime.gradient_scale for member in expert_members(model)} == {1 / 6}
    other = MoEModel(1)
    parallelize_module(other, experts["egtp"], GTPStyle(is_expert=True, modules=["*.experts"]))
    parallelize_module(other, dense["gtp"], GTPStyle(GTPConfig(calculate_per_token_loss=True)))
    with pytest.raises(ValueError, match="calculate_per_token_loss=False and the dense weights of its model have not"):
        other(torch.randn(2, DIM))


@ranks(2)
def test_grouped_linear_by_itself(rank, world_size):
    module = lone_experts(world_size)
    x = torch.randn(16, 16).requires_grad_()
    grouped_linear(module, "w1", x, splits=[4, 0, 4]).sum().backward()
    assert (x.grad[8:] == 0).all() and x.grad[:8].norm() > 0  # rows of no expert
    y = grouped_linear(module, "w1", x, splits=[4, 0, 4])
    with torch.no_grad():
        module.w1.mul_(2)
    with pytest.raises(RuntimeError, match="modified between a forward and its backward"):
        y.sum().backward()
    module.w1.grad = None
    y = grouped_linear(module, "w1", x, splits=[4, 0, 4])
    module.w1.requires_grad_(False)  # after the forward
    y.sum().backward()
    assert module.w1.grad is None
    with pytest.raises(AttributeError, match=r"Experts has no parameter 'w9'; it has \['w1', 'w3', 'w2'\]"):
        grouped_linear(module, "w9", x, splits=[4, 0, 4])
    with pytest.raises(AttributeError, match="Experts is not under GTP"):
        grouped_linear(Experts(3, 16, 32), "w1", x, splits=[4, 0, 4])
    for min_numel in (1024, 10**6):  # sharded, and whole
        half = lone_experts(world_size, GTPConfig(param_dtype=torch.bfloat16), min_numel=min_numel)
        assert grouped_linear(half, "w1", torch.randn(8, 16), splits=[4, 0, 4]).dtype == torch.bfloat16
    seen = []

    def forward(module, rows, counts):
        seen.append(rows.dtype)
        return grouped_experts(module, rows, counts)

    half = lone_experts(world_size, GTPConfig(param_dtype=torch.bfloat16), forwards={Experts: forward})
    half(torch.randn(8, 16), torch.tensor([4, 0, 4]))
    assert seen == [torch.bfloat16]
    features = MoEModel(1, num_experts=3)
    shard(features, *grids(world_size, 2, 2), config=GTPConfig(pad_for_alignment=4))
    features(torch.randn(2, DIM))
    assert expert_members(features)[0].counters.gather_bytes == 4 * 3 * 16 * DIM  # 10 rows: two ranks with 8 each


@ranks(2)
def test_autocast(rank, world_size):
    module, reference = lone_experts(world_size, forwards={Experts: grouped_experts}), Experts(3, 16, 32)
    reference.load_state_dict({name: full(param) for name, param in module.named_parameters()})
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    results = []
    for one in (module, reference):
        with torch.autocast("cpu", torch.bfloat16):
            y = one(x, torch.tensor([4, 0, 4]))
        y.float().square().mean().backward()
        results.append((y, full_gradients(one)))
    (y, grads), (expected, expected_grads) = results
    assert y.dtype == expected.dtype == torch.bfloat16
    assert_close_to_reference(y, expected, "output", 1e-2)
    assert_close_to_reference(grads, expected_grads, "gradient", 2e-2)


@ranks(2)
def test_one_gradient_of_a_stack_is_in_flight_at_a_time(rank, world_size):
    module = lone_experts(world_size, forwards={Experts: grouped_experts})
    groups, most = gtp_dtensor.local.Groups, []
    weight_grad = groups.weight_grad

    def counting(self, *args):
        most.append(len(expert_members(module)[0].runtime.reducer.pending))
        return weight_grad(self, *args)

    groups.weight_grad = counting
    try:
        module(torch.randn(8, 16).requires_grad_(), torch.tensor([4, 0, 4])).sum().backward()
    finally:
        groups.weight_grad = weight_grad
    assert most == [0, 1, 1]


@ranks(4)
def test_experts_that_cannot_be_served(rank, world_size):
    _, _, experts, _ = grids(world_size, 4, 2, 2)

    def refused(module, match, **options):
        with pytest.raises(ValueError, match=match):
            parallelize_module(module, experts["egtp"], GTPStyle(is_expert=True, num_data_ranks=4, **options))

    uneven = parallelize_module(Experts(3, DIM, 10), experts["ep"], ExpertParallel())
    refused(
        uneven,
        r"w1 of shape \(3, 10, 8\), an expert's weight, is cut on dim 0 over mesh axes \('ep',\) of sizes \(2,\)",
    )
    beside = parallelize_module(Experts(4, DIM, 10), experts["ep"], ExpertParallel())
    beside.scale = nn.Parameter(torch.ones(3))
    refused(beside, "scale of shape .* is a plain tensor among experts .* would miss the tokens of other ranks")
    refused(Experts(4, DIM, 10), "no module here is exactly a MoEModel; there are Experts", forwards={MoEModel: print})
