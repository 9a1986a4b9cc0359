"""What a torchtitan job decides and refuses before it trains: axes, products, stages, heads. One process, no
training."""

import itertools
import math
import re
import types

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_integration import cpu

cpu.install()  # before the first import of torchtitan

from torchtitan.config import ConfigManager
from torchtitan.models.llama3 import Transformer, TransformerModelArgs

import titan_integration.dims
from titan_integration.context_parallel import check_context_parallel
from titan_integration.dims import GTPParallelDims
from titan_integration.parallelize import check_tensor_parallel
from titan_integration.pipeline import check_pipeline
from titan_integration.settings import gtp_config

SIZES = {"pp": 2, "dp_replicate": 2, "dp_shard": 2, "cp": 2, "gtp": 2, "tp": 2}


def dims(world_size, **sizes):
    ones = dict.fromkeys((*SIZES, "ep", "etp", "egtp"), 1)
    return GTPParallelDims(**{**ones, **sizes}, world_size=world_size)


@pytest.fixture
def rank_of_64(request):
    """This process is one rank of 64, alone: groups can be made, nothing can be communicated."""
    rank = request.param
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=64)
    yield rank
    dist.destroy_process_group()


@pytest.mark.parametrize("rank_of_64", [0, 27, 63], indirect=True)
def test_every_axis_has_its_ranks(rank_of_64):
    """Slowest to fastest: pp, dp_replicate, then torchtitan's fsdp axis (dp_shard, cp), of which gtp is the inside,
    tp."""
    built = dims(64, **SIZES)
    coordinates = list(itertools.product(range(2), range(2), range(4), range(2), range(2)))  # pp, dpr, outer, gtp, tp
    mine = coordinates[rank_of_64]

    def sharing(*varying):
        return [
            r for r, c in enumerate(coordinates) if all(a == b or i in varying for i, (a, b) in enumerate(zip(c, mine)))
        ]

    expected = {
        "pp": sharing(0),
        "dp_replicate": sharing(1),
        "optimizer_shard": sharing(2),
        "gtp": sharing(3),
        "tp": sharing(4),
        "loss": sharing(1, 2, 3),
    }
    found = {name: mesh.mesh.flatten().tolist() for name, mesh in built.get_all_one_dimensional_meshes().items()}
    # cp lies inside torchtitan's axis, so here the gtp peers are the cp peers and samples are split over the rest.
    expected |= {"cp": sharing(3), "batch": sharing(1, 2)}
    assert found == expected
    assert built.optimizer_shard == 4 and built.dp_shard == 4


@pytest.mark.parametrize("rank_of_64", [5], indirect=True)
def test_without_cp_samples_and_losses_share_a_group(rank_of_64):
    built = dims(64, dp_shard=-1, gtp=4, tp=2)
    assert set(built.get_all_one_dimensional_meshes()) == {"batch", "loss", "gtp", "optimizer_shard", "tp"}
    assert built.optimizer_shard == 8
    assert built.get_mesh("loss").get_group() is built.get_mesh("batch").get_group()
    assert built.get_optional_mesh("fsdp") is None and built.get_optional_mesh("dp_replicate") is None


@pytest.mark.parametrize(
    "world_size, sizes, message, works",
    [
        (8, {"gtp": 2}, "gtp 2 = 2 leaves idle ranks among the 8", {"dp_shard": 4}),
        (8, {"gtp": 3, "dp_shard": -1}, r"gtp 3 = 3 does not divide the 8 ranks.*shards to 1 or 2 or 4 or 8", {"gtp": 4}),
        (8, {"gtp": 3, "cp": 2, "tp": 2, "dp_shard": -1}, r"cp 2 x gtp 3 x tp 2 = 12 .* to 2 or 4$", {"gtp": 2}),
        (8, {"gtp": 2, "dp_shard": 3}, r"dp_shard 3 x gtp 2 = 6 does not divide.*data_parallel_shard_degree to 4", {"dp_shard": 4}),
        (4, {"gtp": 4, "pp": 2}, r"pp 2 x gtp 4 = 8 does not divide the 4 .*start 8 ranks.*shards to 2", {"gtp": 2}),
        (8, {"tp": 3}, r"tp 3 = 3 does not divide the 8 ranks.*start 3 ranks", {"tp": 8}),
        (8, {"cp": 0}, r"context_parallel_degree = 0: must be 1 or more", {"cp": 8}),
        (8, {"dp_shard": 0}, r"data_parallel_shard_degree = 0: must be 1 or more, or -1", {"dp_shard": 8}),
    ],
)  # fmt: skip
def test_impossible_products_are_refused_with_numbers_that_work(world_size, sizes, message, works):
    with pytest.raises(ValueError, match=message) as refusal:
        dims(world_size, **sizes)
    started = re.search(r"start (\d+) ranks", str(refusal.value))
    if started:
        dims(int(started[1]), **sizes)
    built = dims(world_size, **{**sizes, **works})
    assert built.pp * built.dp_replicate * built.dp_shard * built.cp * built.tp == world_size


def test_what_is_left_of_the_ranks_becomes_dp_shard():
    for world_size, sizes in ((8, {"gtp": 2}), (16, {"gtp": 2, "pp": 2, "cp": 2}), (8, {"gtp": 4, "tp": 2})):
        built = dims(world_size, dp_shard=-1, **sizes)
        assert built.dp_shard == world_size // math.prod(sizes.values()) * sizes["gtp"]


def job(attention="sdpa", cp=2, tp=1, balancer="headtail", seq_len=64):
    parallelism = types.SimpleNamespace(
        context_parallel_degree=cp, tensor_parallel_degree=tp, context_parallel_load_balancer=balancer
    )
    return types.SimpleNamespace(
        parallelism=parallelism,
        training=types.SimpleNamespace(seq_len=seq_len),
        model=types.SimpleNamespace(flavor=f"debugmodel_{attention}"),
    )


@pytest.mark.parametrize(
    "attention, settings, on_cpu, message",
    [
        ("varlen", {}, False, r"context_parallel_degree = 2 \(axis cp\).*'varlen'.*no context-parallel rule.*'sdpa' or 'flex'"),
        ("flex", {}, True, r"axis cp.*'flex'.*without an accelerator; use a flavor with attention 'sdpa'"),
        ("sdpa", {"balancer": "ptrr"}, False, r"load_balancer = 'ptrr'.*'sdpa'.*use 'headtail' or None"),
        ("sdpa", {"seq_len": 66}, False, r"seq_len = 66 is not divisible by 4.*axis cp of size 2.*use 64 or 68"),
        ("sdpa", {"seq_len": 6, "tp": 4}, False, r"not divisible by 16.*axis tp of size 4.*use 16"),
    ],
)  # fmt: skip
def test_context_parallelism_that_would_fail_later_is_refused(attention, settings, on_cpu, message):
    with pytest.raises((NotImplementedError, ValueError), match=message):
        check_context_parallel(job(attention, **settings), attention, on_cpu)


def test_context_parallelism_that_works_is_not_refused():
    check_context_parallel(job(), "sdpa", True)
    check_context_parallel(job("flex", balancer="ptrr"), "flex", False)
    check_context_parallel(job("varlen", cp=1), "varlen", False)
    check_context_parallel(job(seq_len=6, balancer=None), "sdpa", True)


def llama(num_layers=6, **options):
    with torch.device("meta"):
        return Transformer(
            TransformerModelArgs(**{"dim": 64, "n_heads": 8, "vocab_size": 64, **options}, n_layers=num_layers)
        )


def pipeline_job(pp=2, schedule="1F1B", parts=None, per_stage=None, first=1, last=1, microbatch=1, batch=8):
    parallelism = types.SimpleNamespace(
        pipeline_parallel_degree=pp,
        pipeline_parallel_schedule=schedule,
        module_fqns_per_model_part=parts,
        pipeline_parallel_layers_per_stage=per_stage,
        pipeline_parallel_first_stage_less_layers=first,
        pipeline_parallel_last_stage_less_layers=last,
        pipeline_parallel_microbatch_size=microbatch,
    )
    return types.SimpleNamespace(
        parallelism=parallelism, training=types.SimpleNamespace(local_batch_size=batch), model=None
    )


FRONT = ["tok_embeddings", "layers.0", "layers.1", "layers.2"]
BACK = ["layers.3", "layers.4", "layers.5", "norm", "output"]


@pytest.mark.parametrize(
    "settings, message, works",
    [
        (
            {"pp": 16},
            r"_degree = 16 \(axis pp\) with schedule '1F1B' makes 16 stages of 6 layers.*no weights.*at most 8$",
            {"pp": 8},
        ),
        (
            {"pp": 8, "schedule": "Interleaved1F1B"},
            r"makes 16 stages.*at most 4, or a schedule with one stage a rank",
            {"pp": 4},
        ),
        ({"pp": 4, "first": 3}, r"the embedding counts as 3 .*at most 3", {"pp": 3}),
        ({"parts": [FRONT, BACK, []], "pp": 3}, r"stage 2 of 3 has no weights.*axis pp", {"parts": [FRONT, BACK], "pp": 2}),
        ({"parts": [FRONT, BACK[1:]]}, r"no stage has layers\.3\.", {"parts": [FRONT, BACK]}),
        ({"parts": [FRONT, ["layers.2", *BACK]]}, r"'layers\.2' is in stage 0 and in stage 1", {"parts": [FRONT, BACK]}),
        ({"parts": [FRONT, [*BACK, "head"]]}, r"stage 1 names 'head', and the model has no", {"parts": [FRONT, BACK]}),
        ({"parts": [FRONT, BACK], "pp": 4}, r"names 2 stages, not a multiple of .* = 4", {"pp": 2}),
        ({"microbatch": 3}, r"local_batch_size = 8 is not a multiple of .*microbatch_size = 3; .*to 6", {"microbatch": 4}),
        ({"pp": 4, "batch": 3}, r"local_batch_size = 3 makes 3 microbatches.*4 stages.*to 4 or more.*to 3 or less", {"pp": 3}),
    ],
)  # fmt: skip
def test_pipelines_that_cannot_work_are_refused(settings, message, works):
    with pytest.raises(ValueError, match=message):
        check_pipeline(pipeline_job(**settings), llama(), 6)
    check_pipeline(pipeline_job(**{**settings, **works}), llama(), 6)


@pytest.mark.parametrize(
    "options, tp, message, works",
    [
        ({"n_heads": 6, "dim": 96}, 4, r"= 4 \(axis tp\) does not divide this model's 6 attention heads.*use 1 or 2$", 2),
        ({"n_kv_heads": 2}, 4, r"axis tp.*2 key and value heads \(n_kv_heads\); use 1 or 2$", 2),
        ({"multiple_of": 2}, 4, r"axis tp.*hidden dim of 170 between feed_forward.w1 and feed_forward.w2; use 1 or 2$", 2),
        ({}, 8, r"seq_len = 36.*tensor_parallel_degree = 8 \(axis tp\).*use 32 or 40", 4),
    ],
)  # fmt: skip
def test_what_tensor_parallelism_cannot_cut_evenly_is_refused(options, tp, message, works):
    model = llama(**options)
    with pytest.raises(ValueError, match=message):
        check_tensor_parallel(model, tp, seq_len=36)
    check_tensor_parallel(model, works, seq_len=36)


def test_each_switch_of_float32_sums_is_a_key_of_its_own(tmp_path):
    file = tmp_path / "job.toml"
    for key in ("reduce_scatter_with_fp32_accumulation", "replicate_reduce_with_fp32_accumulation"):
        file.write_text(f'[job]\ncustom_config_module = "titan_integration.job_config"\n[gtp]\n{key} = true\n')
        config = gtp_config(ConfigManager().parse_args([f"--job.config_file={file}"]))
        on = {name for name, value in vars(config).items() if name.endswith("fp32_accumulation") and value}
        assert on == {key}


@pytest.mark.parametrize("rank_of_64", [0], indirect=True)
def test_axes_of_high_priority(rank_of_64, monkeypatch):
    """Options of a communicator go to the axes that are named and have one."""
    config = types.SimpleNamespace(gtp=types.SimpleNamespace(high_priority_stream_groups=["gtp_remat", "tp", "pp"]))
    names = titan_integration.dims.high_priority_axes(config)
    assert names == ("gtp", "tp", "pp")
    given = []

    def options():
        given.append(len(given))
        return "fake", None  # in place of NCCL's

    monkeypatch.setattr(titan_integration.dims, "device_type", "cuda")
    monkeypatch.setattr(titan_integration.dims, "_high_priority", options)
    monkeypatch.setattr(
        titan_integration.dims,
        "init_device_mesh",
        lambda kind, *args, **kwargs: init_device_mesh("cpu", *args, **kwargs),
    )
    dims(64, dp_shard=4, gtp=4, tp=4, high_priority=names).build_mesh()
    assert len(given) == 2  # gtp and tp; of pp there is one rank
    config.gtp.high_priority_stream_groups = ["gpt"]
    with pytest.raises(ValueError, match="no axis 'gpt'; use some of tp, ep"):
        titan_integration.dims.high_priority_axes(config)
