"""A Mamba-2, attention and mixture-of-experts hybrid, some of whose weights stay whole by choice."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.tensor import Replicate, Shard

from gtp_dtensor import GTPConfig, GTPStyle, logical_init, parallelize_module, reset_stats, schedule_table, stats
from gtp_dtensor.members import model_members
from gtp_dtensor.weight import ShardedWeight
from tests.harness import ranks
from tests.hybrid import Hybrid, LatentMoE, Mamba2Mixer
from tests.models import VOCAB
from tests.moe import ExpertParallel, Experts, grouped_experts
from tests.reference import (
    assert_equal_to_reference,
    build_pair,
    full_parameters,
    local_slice,
    mean_square,
    plain_fqn,
    train_beside_reference,
)
from tests.test_experts import grids

EXACT = 1e-11  # relative, in float64
WHOLE = ["*.latent_down.*", "*.latent_up.*", "*.router.*"]
EXPERTS = ["layers.*.moe.experts"]


def shard(model, dense, dense_options, experts, expert_options, config=None, exclude=WHOLE, min_numel=30):
    if experts["ep"].size() > 1:
        for module in model.modules():
            if isinstance(module, LatentMoE):
                parallelize_module(module.moe.experts, experts["ep"], ExpertParallel())
    style = GTPStyle(
        config,
        is_expert=True,
        modules=EXPERTS,
        min_numel=min_numel,
        forwards={Experts: grouped_experts},
        **expert_options,
    )
    parallelize_module(model, experts["egtp"], style)
    parallelize_module(model, dense["gtp"], GTPStyle(config, exclude=exclude, min_numel=min_numel, **dense_options))


def batch(num_samples, seed=0):
    return torch.randint(VOCAB, (num_samples, 6), generator=torch.Generator().manual_seed(seed))


def sharded_names(model):
    names = {id(p): plain_fqn(name) for name, p in model.named_parameters()}
    return {names[id(m.param)] for m in model_members(model) if isinstance(m, ShardedWeight)}


@ranks(4)
@pytest.mark.parametrize(
    "gtp, egtp, ep, rest, optimizer",
    [
        (4, 2, 2, "optimizer_shard_mesh", "sgd"),
        pytest.param(2, 4, 1, "optimizer_shard_mesh", "adam", marks=pytest.mark.slow),
        pytest.param(1, 2, 1, "replicate_mesh", "sgd", marks=pytest.mark.slow),
        pytest.param(4, 1, 2, "optimizer_shard_mesh", "sgd", marks=pytest.mark.slow),
    ],
)
def test_trains_like_one_process(rank, world_size, gtp, egtp, ep, rest, optimizer):
    model, reference = build_pair(lambda: Hybrid().double())
    shard(model, *grids(world_size, gtp, egtp, ep, rest))
    sharded = sharded_names(model)
    if gtp > 1:
        assert {"layers.0.mixer.in_proj.weight", "layers.2.mixer.wq.weight", "layers.1.mixer.moe.experts.w1"} <= sharded
        # 26 channels of 3 are enough to be sharded here; a norm, A_log, D and dt_bias are not
        assert "layers.0.mixer.conv.weight" in sharded and not any("A_log" in name for name in sharded)
        assert not any("latent" in name or "router" in name for name in sharded)
        assert model.layers[0].mixer.in_proj.weight.shape == (18 + 18 + 4 + 4 + 3, 12)  # 47 rows on 4 ranks
    train_beside_reference(
        model,
        reference,
        lambda step: batch(8, step),
        rank=rank,
        world_size=world_size,
        optimizer=optimizer,
        num_microbatches=2,
        rtol=EXACT if optimizer == "sgd" else 1e-8,
        syncs_last_only=True,
    )
    s = stats(model)
    assert s.num_pending == s.live_lease_bytes == 0


@ranks(4)
@pytest.mark.parametrize("impl", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT], ids=lambda impl: impl.name)
def test_some_blocks_recomputed(rank, world_size, impl):
    """Experts in a recomputed block beside Mamba blocks that are not, and the reverse."""
    model, reference = build_pair(lambda: Hybrid("MEAMEM").double())
    for index in (0, 1, 3, 4):
        model.layers[index] = checkpoint_wrapper(model.layers[index], checkpoint_impl=impl)
    shard(model, *grids(world_size, 4, 2, 2))
    train_beside_reference(model, reference, lambda step: batch(8, step), rank=rank, world_size=world_size, rtol=EXACT)
    reset_stats(model)
    mean_square(model(local_slice(batch(8), rank, world_size))).backward()
    assert stats(model).num_mispredictions == 0
    for member in model_members(model):
        if not isinstance(member, ShardedWeight):
            continue
        layer = int(member.fqn.split(".")[1]) if member.fqn.startswith("layers.") else None
        counted, recomputed = member.counters, layer in (0, 1, 3, 4)
        assert (counted.num_forward_gathers, counted.num_recompute_gathers) == (1, int(recomputed)), member.fqn
        assert counted.num_reductions == 1, member.fqn


@ranks(2)
def test_whole_by_choice(rank, world_size):
    """Patterns and a least size, each alone; what stays whole is not gathered."""
    for options, expected_whole in (
        (dict(exclude=["*.latent_*", "output.*"], min_numel=1), ("latent_down", "latent_up", "output")),
        (dict(exclude=[], min_numel=97), ("latent_down", "latent_up", "router", "shared", "conv")),
        (dict(exclude=["*.in_proj.*"], min_numel=1), ("in_proj",)),
    ):
        model, reference = build_pair(lambda: Hybrid("ME").double())
        shard(model, *grids(world_size, 2, 2), **options)
        for name, param in model.named_parameters():
            is_whole = param.dim() < 2 or any(part in name for part in expected_whole)
            assert param.placements == ((Replicate(),) if is_whole else (Shard(0),)), name
        train_beside_reference(
            model, reference, lambda step: batch(4, step), rank=rank, world_size=world_size, num_steps=1, rtol=EXACT
        )
        gathered = {row.weight for row in schedule_table(model)}
        assert gathered and not any(part in name for name in gathered for part in expected_whole)
    with pytest.raises(ValueError, match=r"exclude=.*pattern '\*.latent_proj.\*' matches nothing"):
        shard(Hybrid("ME"), *grids(world_size, 2, 2), exclude=["*.latent_proj.*"])


@ranks(2)
def test_initial_weights_do_not_depend_on_the_topology(rank, world_size):
    def init(module):
        for one in module.modules():
            if isinstance(one, Mamba2Mixer):
                torch.nn.init.uniform_(one.dt_bias)
            if isinstance(one, Experts):
                for param in one.parameters():
                    torch.nn.init.trunc_normal_(param, std=0.02)
            elif hasattr(one, "reset_parameters"):
                one.reset_parameters()

    model, reference = build_pair(Hybrid)
    shard(model, *grids(world_size, 2, 2), config=GTPConfig(param_dtype=torch.bfloat16))
    for one in (model, reference):
        torch.manual_seed(5)
        with logical_init():
            init(one)
    assert_equal_to_reference(full_parameters(model), full_parameters(reference), "initial weight")
