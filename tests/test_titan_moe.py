"""torchtitan's models with routed experts under GTP: whole jobs on CPUs beside a single process, and what is refused."""

import shutil
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests import titan_runs
from tests.titan_runs import ROOT, SMALL, degrees, gradients, metrics, probes, saved
from titan_integration import cpu

cpu.install()  # before the first import of torchtitan

from torchtitan.models.moe.moe import GroupedExperts, _run_experts_grouped_mm
from torchtitan.models.moe.utils import indices_padding_wrapper

from titan_integration.dims import GTPParallelDims
from titan_integration.experts import check_experts
from titan_integration.families import families

TOML = ROOT / "train_configs" / "deepseek_v3_debug.toml"
STEPS = 4
DEEPSEEK = ("deepseek_v3", "gtp_debug", "AdamW")


@pytest.fixture(scope="module")
def single(titan_jobs, tmp_path_factory):
    """`single(model, flavor, optimizer)`: folder of a single process's run, and the options that other runs share
    with it. The runs of this module share a tokenizer and its tokens."""
    root = tmp_path_factory.mktemp("titan_moe")
    done = {}

    def run(model, flavor, optimizer):
        if (model, flavor, optimizer) in done:
            return done[model, flavor, optimizer]
        folder = root / f"{model}_{flavor}_{optimizer}"
        options = [
            *SMALL,
            f"--training.token_cache_folder={root}/tokens",
            "--training.exact_grad_norm",
            f"--training.steps={STEPS}",
            "--lr_scheduler.warmup_steps=0",
            "--metrics.no_enable_tensorboard",
            f"--model.name={model}",
            f"--model.flavor={flavor}",
            f"--optimizer.name={optimizer}",
            *(["--optimizer.lr=0.1"] if optimizer == "SGD" else []),
        ]
        if done:
            options.append(f"--model.hf_assets_path={next(iter(done.values()))[0]}/checkpoint/tokenizer")
        titan_jobs.run(
            folder, 1, *options, *degrees(), f"--debug.first_gradients_folder={folder}/gradients", config=TOML
        )
        if not done:
            options.append(f"--model.hf_assets_path={folder}/checkpoint/tokenizer")
        done[model, flavor, optimizer] = folder, options
        return folder, options

    return run


def largest_difference(one, other, key):
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(one, other, strict=True))


def gradient_differences(folder, reference):
    """Of every parameter's whole gradient of the first step, relative to its norm."""
    mine, expected = gradients(folder), gradients(reference)
    assert mine.keys() == expected.keys() and len(expected) > 20
    return {name: float((mine[name].double() - g.double()).norm() / g.double().norm()) for name, g in expected.items()}


def assert_gradients_agree(folder, reference):
    differences = gradient_differences(folder, reference)
    assert not {name: difference for name, difference in differences.items() if not difference < 1e-5}


def expert_biases(folder, model, flavor):
    """The expert bias of each MoE layer after the last step, by its name."""
    family = families()[model]
    args = family.flavors[flavor]
    layers = {"deepseek_v3": range(1, 3), "llama4": range(1, 4, 2), "qwen3": range(2)}[model]
    assert len(layers) == family.num_moe_layers(args)
    names = [f"layers.{layer}.moe.expert_bias" for layer in layers]
    return saved(folder, STEPS, {name: torch.zeros(args.moe_args.num_experts) for name in names})


def slow(*values, **options):
    return pytest.param(*values, **options, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "num_ranks, axes, model",
    [
        pytest.param(4, {"gtp": 4, "ep": 2, "egtp": 2}, DEEPSEEK, id="ep2egtp2gtp4"),
        # Two samples a rank: flat slices of the batch are not pieces of the sequence.
        slow(4, {"tp": 2, "gtp": 2, "ep": 4}, DEEPSEEK, id="tp2ep4gtp2"),
        # In the reference implementation expert gradients are gtp/egtp times too large; Adam would hide it.
        slow(4, {"gtp": 4, "egtp": 2}, ("deepseek_v3", "gtp_debug", "SGD"), id="egtp2gtp4_sgd"),
        slow(4, {"gtp": 4}, DEEPSEEK, id="gtp4"),
        slow(4, {"ep": 2, "egtp": 2}, DEEPSEEK, id="ep2egtp2"),
        slow(4, {"gtp": 2, "ep": 2}, DEEPSEEK, id="dps2ep2gtp2"),
        slow(4, {"dpr": 2, "gtp": 2, "ep": 2}, DEEPSEEK, id="dpr2ep2gtp2"),
        slow(4, {"tp": 2, "gtp": 2, "ep": 2, "etp": 2}, DEEPSEEK, id="tp2ep2etp2gtp2"),
        slow(8, {"tp": 2, "gtp": 2, "ep": 2, "etp": 2, "egtp": 2}, DEEPSEEK, id="dps2tp2ep2etp2egtp2gtp2"),
        slow(8, {"tp": 2, "gtp": 4, "ep": 2, "egtp": 2}, ("deepseek_v3", "gtp_debug_q_lora", "SGD"), id="q_lora"),
        slow(4, {"cp": 2, "gtp": 2, "ep": 2, "egtp": 2}, DEEPSEEK, id="cp2"),
        slow(4, {"gtp": 4, "ep": 2, "egtp": 2}, ("qwen3", "gtp_debug", "AdamW"), id="qwen3"),
        slow(4, {"tp": 2, "gtp": 2, "egtp": 2}, ("qwen3", "gtp_debug", "SGD"), id="qwen3_tp2"),
        slow(4, {"gtp": 2, "ep": 4}, ("llama4", "gtp_debug", "AdamW"), id="llama4"),
        slow(4, {"tp": 2, "gtp": 2, "ep": 2}, ("llama4", "gtp_debug", "SGD"), id="llama4_tp2"),
    ],
)
def test_experts_train_as_in_a_single_process(single, titan_jobs, tmp_path, num_ranks, axes, model):
    """Losses and norms of all steps, every gradient of the first, and where the balancing has moved the expert bias."""
    reference, options = single(*model)
    options = [*options, *degrees(**axes), "--experimental.custom_import=tests.titan_probe"]
    titan_jobs.run(tmp_path, num_ranks, *options, f"--debug.first_gradients_folder={tmp_path}/gradients", config=TOML)
    mine, expected = metrics(tmp_path), metrics(reference)
    assert len(expected) == STEPS and largest_difference(mine, expected, "loss") < 1e-6
    assert largest_difference(mine, expected, "grad_norm") < 1e-6
    assert_gradients_agree(tmp_path, reference)
    biases, expected = expert_biases(tmp_path, *model[:2]), expert_biases(reference, *model[:2])
    for name, bias in biases.items():
        # torchtitan's qwen3 does not balance.
        assert bias.any() == (model[0] != "qwen3")
        torch.testing.assert_close(bias, expected[name], rtol=0, atol=1e-8)
    for rank in probes(tmp_path):
        assert rank["stats"]["num_sharded_weights"] > 0 and rank["stats"]["num_pending"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"gtp": 4, "ep": 2, "egtp": 2}, {"tp": 2, "gtp": 2}], ids=["ep2egtp2", "tp2"])
def test_the_grouped_gemm_has_a_bound_of_bfloat16(single, titan_jobs, tmp_path, axes):
    """torch's grouped GEMM rounds experts and their gradients to bfloat16: before or after a sum over ranks."""
    reference, common = single("qwen3", "gtp_debug_grouped", "AdamW")
    options = [*common, *degrees(**axes), f"--debug.first_gradients_folder={tmp_path}/gradients"]
    titan_jobs.run(tmp_path, 4, *options, "--checkpoint.no_enable", config=TOML)
    mine, expected = metrics(tmp_path), metrics(reference)
    assert largest_difference(mine, expected, "loss") < 1e-4
    assert largest_difference(mine, expected, "grad_norm") < 1e-3
    differences = gradient_differences(tmp_path, reference)
    assert 1e-5 < differences["layers.1.moe.experts.w1"] and max(differences.values()) < 1e-2


@pytest.mark.parametrize(
    "options",
    [
        slow(["--activation_checkpoint.mode=full"], id="full"),
        slow(["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"], id="op"),
    ],
)
def test_experts_are_recomputed(single, titan_jobs, tmp_path, options):
    reference, common = single(*DEEPSEEK)
    titan_jobs.run(tmp_path, 4, *common, *degrees(gtp=4, ep=2, egtp=2), *options, "--checkpoint.no_enable", config=TOML)
    mine, expected = metrics(tmp_path), metrics(reference)
    assert largest_difference(mine, expected, "loss") < 1e-6
    assert largest_difference(mine, expected, "grad_norm") < 1e-6


@pytest.mark.slow
def test_a_pipeline_with_experts_in_some_stages(single, titan_jobs, tmp_path):
    """Interleaved: the first stage has no experts. It starts from a checkpoint of one process."""
    reference, common = single(*DEEPSEEK)
    axes = degrees(gtp=2, pp=2, ep=2)
    schedule = [
        "--parallelism.pipeline_parallel_schedule=Interleaved1F1B",
        "--gtp.exclude",
        "layers.1.attention.wkv_a.*",
    ]
    titan_jobs.run(
        tmp_path / "seed", 1, *common, *degrees(), "--training.steps=2", "--checkpoint.interval=2", config=TOML
    )
    shutil.copytree(tmp_path / "seed" / "checkpoint" / "step-2", tmp_path / "pp" / "checkpoint" / "step-2")
    titan_jobs.run(tmp_path / "pp", 4, *common, *axes, *schedule, config=TOML)
    mine, expected = metrics(tmp_path / "pp"), metrics(reference)[2:]
    assert [record["step"] for record in mine] == [3, 4]
    assert largest_difference(mine, expected, "loss") < 1e-6
    assert largest_difference(mine, expected, "grad_norm") < 1e-6
    biases, expected = expert_biases(tmp_path / "pp", *DEEPSEEK[:2]), expert_biases(reference, *DEEPSEEK[:2])
    for name, bias in biases.items():
        torch.testing.assert_close(bias, expected[name], rtol=0, atol=1e-8)


@pytest.mark.slow
def test_experts_resume_on_another_grid(single, titan_jobs, tmp_path):
    """Two steps with EP 2 and EGTP 2, two more with EP borrowed from TP: four steps of one process."""
    reference, common = single(*DEEPSEEK)
    first = [*degrees(gtp=4, ep=2, egtp=2), "--training.steps=2", "--checkpoint.interval=2"]
    titan_jobs.run(tmp_path, 4, *common, *first, config=TOML)
    titan_jobs.run(tmp_path, 4, *common, *degrees(tp=2, gtp=2, ep=4), config=TOML)
    mine, expected = metrics(tmp_path), metrics(reference)
    assert [record["step"] for record in mine] == [1, 2, 3, 4]
    assert largest_difference(mine, expected, "loss") < 1e-6
    assert largest_difference(mine, expected, "grad_norm") < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"gtp": 2}, {"tp": 2, "gtp": 2}], ids=["gtp2", "tp2gtp2"])
def test_tied_embeddings_of_a_qwen3(single, titan_jobs, tmp_path, axes):
    reference, common = single("qwen3", "gtp_debug_tied", "AdamW")
    folder = f"--debug.first_gradients_folder={tmp_path}/gradients"
    titan_jobs.run(
        tmp_path, 2 * axes.get("tp", 1), *common, *degrees(**axes), folder, "--checkpoint.no_enable", config=TOML
    )
    mine, expected = metrics(tmp_path), metrics(reference)
    assert largest_difference(mine, expected, "loss") < 1e-6
    assert largest_difference(mine, expected, "grad_norm") < 1e-6
    assert_gradients_agree(tmp_path, reference)


@pytest.mark.slow
def test_a_skipped_step_forgets_its_tokens(single, titan_jobs, tmp_path):
    """One rank's gradient has a NaN in step 2: the bias is that of a run that never saw its batch in the balancing."""
    _, common = single(*DEEPSEEK)
    options = [*common, *degrees(gtp=4, ep=2), "--experimental.custom_import=tests.titan_probe"]
    options += ["--gtp.skip_nonfinite_steps", "--checkpoint.interval=1", "--checkpoint.keep_latest_k=0"]
    titan_jobs.run(tmp_path, 4, *options, config=TOML, env={"PROBE_NAN_STEP": "2"})
    assert [rank["changed"] for rank in probes(tmp_path)] == [[True, False, True, True]] * 4
    names = ("layers.1.moe.expert_bias", "layers.2.moe.expert_bias")
    history = [saved(tmp_path, step, {name: torch.zeros(8) for name in names}) for step in range(1, STEPS + 1)]
    for name in names:
        assert torch.equal(history[0][name], history[1][name])
        assert not torch.equal(history[1][name], history[2][name])


@pytest.mark.slow
def test_off_is_torchtitan_bit_for_bit(single, titan_jobs, tmp_path):
    """Parameters, buffers, random state, state dict and losses equal those of untouched torchtitan."""
    _, common = single(*DEEPSEEK)
    results = []
    for mode in ("stock", "ours"):
        out = tmp_path / f"{mode}.pt"
        options = [f"--job.config_file={TOML}", f"--job.dump_folder={tmp_path / mode}", *common, *degrees()]
        options += ["--checkpoint.no_enable", "--job.custom_config_module=titan_integration.job_config"]
        subprocess.run(
            [sys.executable, "-m", "tests.titan_runs", mode, str(out), *options],
            cwd=ROOT,
            env=titan_runs.environment()
            | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
            check=True,
            timeout=300,
            capture_output=True,
        )
        results.append(torch.load(out, weights_only=False))
    stock, ours = results
    assert stock["state_dict"] == ours["state_dict"] and len(stock["losses"]) == STEPS * 4
    assert torch.equal(stock["rng"], ours["rng"]) and stock["classes"] == ours["classes"]
    for one, other in zip(stock["losses"], ours["losses"], strict=True):
        assert torch.equal(one, other)
    for kind in ("initial", "parameters", "buffers"):
        assert stock[kind].keys() == ours[kind].keys()
        for name, value in stock[kind].items():
            assert torch.equal(value, ours[kind][name]), name


def dims(world_size, **sizes):
    ones = dict.fromkeys(("pp", "dp_replicate", "cp", "tp", "ep", "etp", "gtp", "egtp"), 1)
    return GTPParallelDims(**{**ones, "dp_shard": -1, "has_experts": True, **sizes}, world_size=world_size)


@pytest.mark.parametrize(
    "world_size, sizes, message, works",
    [
        (8, {"gtp": 4, "ep": 2, "egtp": 3}, r"egtp = 3 \(\[gtp\] expert_\w+ = 3\) does not divide the 4 expert data.*to 1 or 2 or 4$", {"egtp": 4}),
        (8, {"tp": 2, "gtp": 4, "ep": 2, "etp": 2, "egtp": 4}, r"egtp = 4 .*_num_weight_shards = 8\).* the 2 expert .*to 2 or 4$", {"egtp": 2}),
        (8, {"tp": 2, "egtp": 8}, r"egtp = 8 .*the 4 expert data ranks: .*8 ranks.*/ \(tp 2\)", {"egtp": 4}),
        (8, {"gtp": 8, "ep": 3}, r"expert_parallel_degree = 3 does not divide the 8 ranks .* to 1 or 2 or 4 or 8$", {"ep": 8}),
        (8, {"tp": 2, "gtp": 4, "ep": 8, "etp": 2}, r"expert_parallel_degree = 8 x \S+ 2 = 16 .* to 1 or 2 or 4$", {"ep": 4}),
        (8, {"tp": 4, "gtp": 2, "ep": 2, "etp": 2}, r"expert_tensor_parallel_degree = 2: .*set it to 1 or 4", {"etp": 4}),
        (8, {"gtp": 8, "egtp": 2, "has_experts": False}, r"egtp = 2 .*no routed experts.*to 1 or leave it out", {"egtp": 1}),
        (8, {"gtp": 8, "ep": 2, "has_experts": False}, r"expert_parallel_degree = 2 .*no routed experts.*to 1", {"ep": 1}),
    ],
)  # fmt: skip
def test_impossible_expert_grids_are_refused_with_numbers_that_work(world_size, sizes, message, works):
    with pytest.raises(ValueError, match=message):
        dims(world_size, **sizes)
    built = dims(world_size, **{**sizes, **works})
    assert built.egtp * built.expert_optimizer_shard * built.ranks_of_an_expert == world_size


@pytest.mark.parametrize(
    "changes, num_experts, message",
    [
        (
            {"expert_parallel_comm_backend": "deepep"},
            8,
            r"expert_parallel_comm_backend = 'deepep'.*set it to 'standard'",
        ),
        ({"expert_parallel_degree": 4}, 6, r"expert_parallel_degree = 4 \(axis ep\).*6 experts.*to 1 or 2 or 3 or 6"),
        (
            {"expert_parallel_degree": 2, "pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "DualPipeV"},
            8,
            r"pipeline_parallel_schedule = 'DualPipeV'.*use 'ZBVZeroBubble'",
        ),
    ],
    ids=["deepep", "num_experts", "dual_pipe"],
)
def test_what_experts_cannot_do_under_gtp_is_refused(changes, num_experts, message):
    fine = {
        "expert_parallel_comm_backend": "standard",
        "expert_parallel_degree": 2,
        "pipeline_parallel_degree": 1,
        "pipeline_parallel_schedule": "1F1B",
    }

    def job(values):
        return types.SimpleNamespace(parallelism=types.SimpleNamespace(**values))

    check_experts(job(fine), num_experts)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        check_experts(job(fine | changes), num_experts)
    check_experts(job(fine | changes), num_experts=0)


@pytest.fixture
def rank_of_32(request):
    """This process is one rank of 32, alone: groups can be made, nothing can be communicated."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=32)
    yield request.param
    dist.destroy_process_group()


@pytest.mark.parametrize("rank_of_32", [0, 13, 31], indirect=True)
@pytest.mark.parametrize("etp", [1, 2])
def test_every_expert_axis_has_its_ranks(rank_of_32, etp):
    """Slowest to fastest: dp_replicate 2, expert_optimizer_shard, egtp 2, ep 2, etp. Of size 1: no group."""
    built = dims(32, dp_replicate=2, gtp=2, tp=2, ep=2, etp=etp, egtp=2)
    shape = (2, 4 // etp, 2, 2, etp)
    grid = torch.arange(32).view(shape)
    place = torch.unravel_index(torch.tensor(rank_of_32), shape)
    found = {name: mesh.mesh.flatten().tolist() for name, mesh in built.get_all_one_dimensional_meshes().items()}
    for axis, name in enumerate(("dp_replicate", "expert_optimizer_shard", "egtp", "ep", "etp")):
        ranks = grid[tuple(slice(None) if other == axis else at for other, at in enumerate(place))].tolist()
        assert found.get(name) == (ranks if shape[axis] > 1 else None), name
    assert set(found) - {"etp"} == {
        "batch", "loss", "dp_replicate", "optimizer_shard", "gtp", "tp", "expert_optimizer_shard", "egtp", "ep",
    }  # fmt: skip
    # The bias of the experts moves by the tokens of all data ranks, each once.
    assert found["loss"] == [rank for rank in range(32) if rank % 2 == rank_of_32 % 2]


def test_models_without_experts_get_no_groups_for_them():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        built = dims(8, gtp=4, has_experts=False)
        assert set(built.get_all_one_dimensional_meshes()) == {"batch", "loss", "gtp", "optimizer_shard"}
        with_experts = dims(8, egtp=2)
        assert with_experts.gtp_enabled and with_experts.get_mesh("gtp").size() == 1
        assert with_experts.get_optional_mesh("gtp") is not None and with_experts.optimizer_shard == 8
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("num_ranks, experts_per_rank, alignment", [(1, 1, 8), (1, 4, 16), (3, 2, 8), (4, 5, 1)])
def test_tokens_are_permuted_to_their_experts(num_ranks, experts_per_rank, alignment):
    """Beside a loop over experts and ranks."""
    generator = torch.Generator().manual_seed(num_ranks)
    for _ in range(20):
        counts = torch.randint(0, 20, (num_ranks, experts_per_rank), generator=generator)
        counts[torch.rand(counts.shape, generator=generator) < 0.3] = 0
        num_tokens = int(counts.sum())
        first = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
        expected, sizes = [], []
        for expert in range(experts_per_rank):
            group = [int(first[rank, expert]) + i for rank in range(num_ranks) for i in range(counts[rank, expert])]
            sizes.append(max(alignment, -(-len(group) // alignment) * alignment))
            expected += group + [-1] * (sizes[-1] - len(group))
        max_len = num_tokens + experts_per_rank * alignment
        indices, found_sizes, ends = cpu.generate_permute_indices(
            counts.flatten(), experts_per_rank, num_ranks, max_len, alignment
        )
        assert indices.tolist() == expected + [-1] * (max_len - len(expected)) and indices.dtype == torch.int32
        assert found_sizes.tolist() == sizes and ends.tolist() == torch.tensor(sizes).cumsum(0).tolist()


def test_torch_counts_integers_on_a_cpu():
    chosen = torch.tensor([3, 0, 0, 1, 3, 3])
    counted = torch.histc(chosen, bins=5, min=0, max=5)
    assert counted.tolist() == [2, 1, 0, 3, 0] and counted.dtype == torch.int64
    assert torch.equal(torch.histc(chosen.float(), bins=5, min=0, max=5), counted.float())


def test_the_grouped_gemm_runs_on_a_cpu():
    """torchtitan's grouped path, forward and backward, beside a loop in float32: what bfloat16 leaves of it."""
    torch.manual_seed(0)
    experts = GroupedExperts(32, 48, 3, use_grouped_mm=True)
    with torch.no_grad():
        experts.init_weights(0.5)
    x = torch.randn(21, 32)
    counts = torch.tensor([5, 0, 16])
    weights = experts.w1, experts.w2, experts.w3
    grouped = indices_padding_wrapper(_run_experts_grouped_mm)(*weights, x, counts)
    grad = torch.randn_like(grouped)
    found = torch.autograd.grad(grouped, weights, grad)
    experts.use_grouped_mm = False
    looped = experts(x, counts)
    assert 0 < (grouped - looped).norm() < 2e-2 * looped.norm()
    for one, other in zip(found, torch.autograd.grad(looped, weights, grad), strict=True):
        assert (one - other).norm() < 2e-2 * other.norm()
