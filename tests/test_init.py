"""Initial weights are those of a run without GTP, whatever the topology, and the float32 masters hold them exactly."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gtp_dtensor import GTPConfig, GTPStyle, logical_init, stats
from tests.checkpoint_cases import TOPOLOGIES, Everything, _tp_plan
from tests.harness import ranks
from tests.hybrid import Hybrid, Mamba2Mixer
from tests.moe import Experts, MoEModel
from tests.reference import assert_equal_to_reference, build_pair, full, full_parameters, replica_options
from tests.test_experts import expert_members, grids, shard
from tests.test_hybrid import shard as shard_hybrid

BF16 = GTPConfig(param_dtype=torch.bfloat16)


def own_params(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(recurse=False)}


@torch.no_grad()
def by_torch(model: nn.Module) -> None:
    """torch's own ``reset_parameters`` where a module has one, else normal numbers; buffers too."""
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
        else:
            for name in sorted(own_params(module)):
                nn.init.normal_(module._parameters[name])
        for buffer in module.buffers(recurse=False):
            buffer.zero_()


@torch.no_grad()
def by_hand(model: nn.Module) -> None:
    """As models do it themselves: functions of ``nn.init``, in-place methods, arithmetic on what they have drawn."""
    for name, module in model.named_modules():
        if isinstance(module, Mamba2Mixer):
            nn.init.uniform_(module.dt_bias, math.log(1e-3), math.log(1e-1))
            module.dt_bias.exp_().expm1_().log_()  # the inverse of softplus
            module.A_log.data.uniform_(1, 16).log_()
            nn.init.ones_(module.D)
        if isinstance(module, Experts):
            for weight in (module.w1, module.w2, module.w3):
                nn.init.trunc_normal_(weight, std=0.3)
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.2)
            if name.endswith("in_proj"):
                module.weight.mul_(0.5)
            if name.endswith("out_proj"):
                nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5))
                module.weight.div_(math.sqrt(3))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
                module.bias.add_(0.125)
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(std=0.3).clamp_(-0.5, 0.5)
        if isinstance(module, nn.Conv1d):
            nn.init.xavier_normal_(module.weight)
            nn.init.constant_(module.bias, 0.25)
        if isinstance(module, nn.RMSNorm):
            nn.init.ones_(module.weight)
        if isinstance(module, Everything):
            nn.init.uniform_(module.scale, 0.5, 1.5)
            module.shift.normal_()
            module.num_seen.zero_()


INITS = {"torch": by_torch, "hand": by_hand}


def poison(model: nn.Module) -> None:
    """What is not initialised shows."""
    for param in model.parameters():
        param._local_tensor.detach().fill_(math.nan)


def init_pair(model: nn.Module, reference: nn.Module, init: Callable[[nn.Module], None], seed: int = 11) -> None:
    """The same draws for both, and what is drawn next is the same too."""
    torch.manual_seed(seed)
    with logical_init():
        init(model)
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    init(reference)
    assert torch.equal(state, torch.get_rng_state())


def assert_exact_masters(model: nn.Module, reference: nn.Module, num_expected: int) -> None:
    """Logical weights are the reference's, bit for bit, in float32; of many of them a bf16 copy would not be."""
    assert_equal_to_reference(full_parameters(model), full_parameters(reference), "initial weight")
    num_inexact = 0
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor) and param.dtype == param._local_tensor.dtype == torch.float32, name
        value = full(param)
        num_inexact += not torch.equal(value, value.bfloat16().float())
    assert num_inexact >= num_expected, num_inexact  # the trap is armed


def on_meta_then_cpu(build: Callable[[], nn.Module], shard_it: Callable[[nn.Module], object]) -> nn.Module:
    """The model as large ones are built: no memory before each rank has its part."""
    with torch.device("meta"):
        model = build()
    shard_it(model)
    assert all(param.is_meta for param in model.parameters())
    model.to_empty(device="cpu")
    poison(model)
    return model


def without_duplicates(model: nn.Module) -> list[tuple[str, str]]:
    """Pairs of names that share a parameter."""
    names: dict[int, str] = {}
    pairs = []
    for name, param in model.named_parameters(remove_duplicate=False):
        if id(param) in names:
            pairs.append((names[id(param)], name))
        names.setdefault(id(param), name)
    return pairs


# ---- dense


def shard_dense(model: nn.Module, topology: str) -> None:
    """As the checkpoint tests do, with compute in bfloat16."""
    sizes = TOPOLOGIES["dense"][topology]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "tp" in sizes:
        parallelize_module(model, mesh["tp"], _tp_plan())
        model.output.weight = model.tok_embeddings.weight  # tensor parallelism parts ties
    parallelize_module(model, mesh["gtp"], GTPStyle(BF16, min_numel=30, **replica_options(mesh)))


@ranks(4)
@pytest.mark.parametrize("topology", ["gtp2_tp2", "dpr2_gtp2"])
@pytest.mark.parametrize("init", INITS)
def test_dense_weights_from_meta(topology, init, rank):
    check_dense(topology, init)


@ranks(8, timeout=120.0)
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["gtp8", "dps2_gtp2_tp2"])
@pytest.mark.parametrize("init", INITS)
def test_dense_weights_from_meta_on_eight_ranks(topology, init, rank):
    check_dense(topology, init)


@ranks(6, timeout=120.0)
@pytest.mark.slow
def test_dense_weights_from_meta_on_uneven_axes(rank):
    for init in INITS:
        check_dense("dps2_gtp3", init)


def check_dense(topology: str, init: str) -> None:
    """Tied and frozen weights, a fused gate and up, a Mamba mixer, a parameter without dims, 2050, 47 and 5 rows."""
    reference = Everything()
    model = on_meta_then_cpu(Everything, lambda model: shard_dense(model, topology))
    init_pair(model, reference, INITS[init])
    assert_exact_masters(model, reference, num_expected=8)
    assert without_duplicates(model) == without_duplicates(reference) == [("tok_embeddings.weight", "output.weight")]
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in reference.parameters()]
    assert not model.frozen.weight.requires_grad
    for (name, mine), theirs in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(mine, theirs), name


# ---- experts and hybrids


def check_experts(build: Callable[[], nn.Module], shard_it: Callable[[nn.Module], object], init: str) -> set[int]:
    """The dims that stacks of experts are cut in."""
    reference = build()
    model = on_meta_then_cpu(build, shard_it)
    init_pair(model, reference, INITS[init])
    assert_exact_masters(model, reference, num_expected=8)
    return {member.cut.dim for member in expert_members(model)}


# sizes of gtp, egtp and ep on 4 ranks; the dim that egtp cuts stacks of 4 and of 6 experts in
EXPERT_GRIDS = {
    "egtp4": ({"gtp": 2, "egtp": 4}, 0, 1),
    "ep2_egtp2": ({"gtp": 4, "egtp": 2, "ep": 2}, 0, 1),
    "egtp2": ({"gtp": 2, "egtp": 2}, 0, 0),
}


@ranks(4)
@pytest.mark.parametrize(
    "grid, rest, num_experts, init",
    [
        ("egtp4", "replicate_mesh", 6, "hand"),
        ("ep2_egtp2", "optimizer_shard_mesh", 4, "torch"),
        ("ep2_egtp2", "optimizer_shard_mesh", 6, "hand"),
        ("egtp2", "optimizer_shard_mesh", 6, "torch"),  # replicas cut 3 whole experts in dim 1
        *(
            pytest.param(grid, rest, num_experts, init, marks=pytest.mark.slow)
            for grid in EXPERT_GRIDS
            for rest in ("replicate_mesh", "optimizer_shard_mesh")
            for num_experts in (4, 6)
            for init in INITS
        ),
    ],
)
def test_experts_from_meta(grid, rest, num_experts, init, rank, world_size):
    sizes, dim_of_4, dim_of_6 = EXPERT_GRIDS[grid]
    meshes = grids(world_size, **sizes, rest=rest)
    dims = check_experts(
        lambda: MoEModel(2, num_experts=num_experts), lambda model: shard(model, *meshes, config=BF16), init
    )
    assert dims == {dim_of_4 if num_experts == 4 else dim_of_6}


@ranks(4)
@pytest.mark.parametrize("init", ["hand", pytest.param("torch", marks=pytest.mark.slow)])
def test_hybrid_from_meta(init, rank, world_size):
    meshes = grids(world_size, gtp=4, egtp=2, ep=2)
    assert check_experts(lambda: Hybrid("MEA"), lambda model: shard_hybrid(model, *meshes, config=BF16), init) == {1}


# ---- on the CPU, without meta; and after the compute copies exist


@ranks(4)
@pytest.mark.parametrize("case", ["dense", "moe", "hybrid"])
def test_weights_that_were_drawn_before_sharding_stay_exact(case, rank, world_size):
    meshes = grids(world_size, gtp=4, egtp=2, ep=2)
    build, shard_it = {
        "dense": (Everything, lambda model: shard_dense(model, "dpr2_gtp2")),
        "moe": (lambda: MoEModel(2, num_experts=6), lambda model: shard(model, *meshes, config=BF16)),
        "hybrid": (lambda: Hybrid("MEA"), lambda model: shard_hybrid(model, *meshes, config=BF16)),
    }[case]
    model, reference = build_pair(build)
    shard_it(model)
    assert_exact_masters(model, reference, num_expected=8)


@ranks(4)
@pytest.mark.parametrize("axes", [("dpr", "gtp"), ("dps", "gtp"), ("gtp", "tp")], ids="_".join)
def test_masters_do_not_pass_through_compute_copies(axes, rank):
    """Neither in a forward before the initialisation, whose copies are stale then, nor in one after it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)

    def build() -> nn.Module:
        return nn.Sequential(nn.Embedding(23, 16), nn.Linear(16, 42), nn.Linear(42, 7))

    def sharded() -> nn.Module:
        model = build()
        if "tp" in axes:
            parallelize_module(model, mesh["tp"], {"1": ColwiseParallel(), "2": RowwiseParallel()})
        return parallelize_module(model, mesh["gtp"], GTPStyle(BF16, min_numel=30, **replica_options(mesh)))

    tokens = torch.arange(23).view(1, -1)
    used, fresh, reference = sharded(), sharded(), build()
    optimizer = torch.optim.SGD(used.parameters(), lr=0.1)
    used(tokens).float().square().mean().backward()
    optimizer.step()  # from here on compute copies are trusted until something tells otherwise
    before = used(tokens)
    assert stats(used).num_refreshes > 0
    poison(fresh)
    for model in (fresh, used):
        init_pair(model, reference, by_hand)
        assert_exact_masters(model, reference, num_expected=3)
    after = used(tokens)
    assert torch.equal(after, fresh(tokens)) and not torch.equal(after, before)
    after.float().square().mean().backward()
    for model in (fresh, used):
        assert_exact_masters(model, reference, num_expected=3)
