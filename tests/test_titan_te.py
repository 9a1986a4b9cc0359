"""``[gtp] linear_backend = "transformer_engine"``, on a stand-in for it."""

import shutil
import sys

import pytest

from tests.titan_runs import ROOT, SMALL, degrees, metrics, probes
from titan_integration import cpu

cpu.install()  # before the first import of torchtitan

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import ConfigManager
from torchtitan.models.llama3 import Transformer, TransformerModelArgs

from tests import te_stand_in
from titan_integration.transformer_engine import check_linear_backend, checkpoint_blocks, use_te_linears

SHARDED = "--gtp.tensor_parallel_num_weight_shards=2"
TE = ["--job.custom_config_module=titan_integration.job_config", "--gtp.linear_backend=transformer_engine"]


@pytest.fixture
def rank_alone():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def job_config(*options):
    return ConfigManager().parse_args([*TE, "--activation_checkpoint.mode=none", *options])


def options(folder, *others):
    common = [*SMALL, f"--training.token_cache_folder={folder}/tokens", "--training.exact_grad_norm", *TE]
    common += ["--training.steps=3", "--training.logical_init", "--lr_scheduler.warmup_steps=0"]
    common += ["--training.local_batch_size=1", "--training.global_batch_size=2", "--metrics.no_enable_tensorboard"]
    return [*common, "--experimental.custom_import=tests.titan_te_probe", *others]


def losses(folder):
    return torch.tensor([(record["loss"], record["grad_norm"]) for record in metrics(folder)])


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe, num_ranks, axes",
    [(recipe, 2, {"gtp": 2}) for recipe in ("bf16", "current", "block")] + [("current", 4, {"gtp": 2, "tp": 2})],
)
def test_trains_as_a_single_process(titan_jobs, tmp_path, recipe, num_ranks, axes):
    """Sharded, with weights gathered in FP8, beside unsharded linears that quantize theirs in each forward."""
    common = options(tmp_path, f"--gtp.te_recipe={recipe}", "--activation_checkpoint.mode=full")
    common += ["--checkpoint.no_enable"]
    for number, degree in ((1, {}), (num_ranks, axes)):
        folder = tmp_path / str(number)
        job = titan_jobs.run(folder, number, *common, *degrees(**degree))
        assert f"42 linears are TransformerEngine's, recipe {recipe}" in job.output
        common += [f"--model.hf_assets_path={folder}/checkpoint/tokenizer"] if number == 1 else []
    found, expected = losses(folder), losses(tmp_path / "1")
    assert len(found) == 3 and found.allclose(expected, rtol=1e-5)
    # Before the first step and after each.
    num_quantizations = 0 if recipe == "bf16" else 4 * 42
    assert [rank["stats"]["num_quantizations"] for rank in probes(folder)] == [num_quantizations] * num_ranks


@pytest.mark.slow
def test_delayed_scaling_with_activation_checkpointing(titan_jobs, tmp_path):
    """Bit by bit as without."""
    common = options(tmp_path, "--gtp.te_recipe=delayed", "--checkpoint.no_enable", *degrees(gtp=2))
    for mode in ("none", "full"):
        job = titan_jobs.run(tmp_path / mode, 2, *common, f"--activation_checkpoint.mode={mode}")
        assert ("by TransformerEngine" in job.output) == (mode == "full")
        common += [f"--model.hf_assets_path={tmp_path}/none/checkpoint/tokenizer"] if mode == "none" else []
    found = losses(tmp_path / "full")
    assert len(found) == 3 and torch.equal(found, losses(tmp_path / "none"))
    gathers = [probes(tmp_path / mode)[0]["stats"] for mode in ("none", "full")]
    assert gathers[1]["num_recompute_gathers"] and not gathers[0]["num_recompute_gathers"]


@pytest.mark.slow
def test_a_checkpoint_loads_with_either_backend(titan_jobs, tmp_path):
    """Saved at gtp 4 by TE's linears, continued at gtp 2 by TE's, by torch's, and again by TE's; and as files in Hugging
    Face's format."""
    every = ["--checkpoint.enable", "--checkpoint.interval=1", "--checkpoint.last_save_model_only"]
    folder = tmp_path / "saved"
    common = [*options(tmp_path, *every, "--gtp.te_recipe=current"), "--training.global_batch_size=4"]
    titan_jobs.run(folder, 4, *common, *degrees(gtp=4))
    keys = list(saved_keys(folder, 2))
    assert "layers.0.attention.wq.weight" in keys and not [key for key in keys if key.endswith("_extra_state")]
    tokenizer = f"--model.hf_assets_path={folder}/checkpoint/tokenizer"
    torchs = ["--gtp.linear_backend=torch", "--gtp.te_recipe=bf16"]
    found = {}
    for name, others in (("te", []), ("torch", torchs)):
        shutil.copytree(folder / "checkpoint" / "step-2", tmp_path / name / "checkpoint" / "step-2")
        hf = ["--checkpoint.last_save_in_hf"]
        titan_jobs.run(tmp_path / name, 2, *common, *degrees(gtp=2), tokenizer, *hf, *others)
        found[name] = losses(tmp_path / name)
    assert len(found["te"]) == 1 and found["te"].allclose(losses(folder)[2:], rtol=1e-5)
    assert found["torch"].allclose(found["te"], rtol=1e-2) and not torch.equal(found["torch"], found["te"])
    from_files = [
        f"--checkpoint.initial_load_path={tmp_path}/torch/checkpoint/step-3",
        "--checkpoint.initial_load_in_hf",
    ]
    titan_jobs.run(tmp_path / "files", 2, *common, *degrees(gtp=2), tokenizer, *from_files, "--training.steps=1")
    assert losses(tmp_path / "files")[0, 0] < found["torch"][0, 0]


def saved_keys(folder, step):
    path = folder / "checkpoint" / f"step-{step}"
    return dcp.FileSystemReader(path).read_metadata().state_dict_metadata


def llama(**sizes):
    with torch.device("meta"):
        return Transformer(TransformerModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=128, **sizes))


@pytest.mark.parametrize("recipe, stores_fp8", [("bf16", False), ("current", True)])
def test_linears_are_replaced(rank_alone, recipe, stores_fp8):
    with te_stand_in.installed():
        model = llama()
        names = {name: param.shape for name, param in model.named_parameters()}
        region = use_te_linears(model, job_config(f"--gtp.te_recipe={recipe}"), is_sharded=True)
        assert {name: param.shape for name, param in model.named_parameters()} == names
        linears = [module for module in model.modules() if isinstance(module, te_stand_in.Linear)]
        assert len(linears) == 14 and type(model.output) is nn.Linear
        assert all(linear.primary_weights_in_fp8 == stores_fp8 and linear.weight.is_meta for linear in linears)
        seen = []
        block = model.layers["0"]
        block.attention.forward = lambda *args: seen.append(te_stand_in._FP8.recipe) or args[0]
        block.feed_forward.forward = lambda x: x
        block(torch.zeros(1, 2, 64, device="meta"), None, None)
        assert seen == [region.recipe] and te_stand_in._FP8.recipe is None
        with pytest.raises(ValueError, match=r"layers\.0\.attention\.wq: 72 in .* multiples of 16"):
            use_te_linears(
                Transformer(TransformerModelArgs(dim=72, n_layers=1, n_heads=4, vocab_size=128)),
                job_config("--gtp.te_recipe=block"),
                is_sharded=True,
            )


@pytest.mark.parametrize("recipe", ["bf16", "current", "delayed"])
def test_only_delayed_scaling_has_state_of_its_own(rank_alone, recipe):
    model = llama()
    keys = list(model.state_dict())
    with te_stand_in.installed():
        use_te_linears(model, job_config(f"--gtp.te_recipe={recipe}"), is_sharded=True)
        extra = [key for key in model.state_dict() if key.endswith("_extra_state")]
        assert [key for key in model.state_dict() if key not in extra] == keys
        assert len(extra) == (14 if recipe == "delayed" else 0)


def test_a_recompute_has_the_scales_of_the_forward(rank_alone):
    """Of delayed scaling: gradients, scales and histories are those without activation checkpointing."""
    results = []
    with te_stand_in.installed():
        for checkpoints in (False, True):
            torch.manual_seed(0)
            model = llama()
            use_te_linears(model, job_config("--gtp.te_recipe=delayed"), is_sharded=False)
            if checkpoints:
                checkpoint_blocks(model)
            model.to_empty(device="cpu")
            with torch.no_grad():
                model.init_weights()
            found = []
            for step in range(3):
                tokens = torch.arange(32).view(2, 16) + step
                model(tokens).square().mean().backward()
            found += [param.grad for param in model.parameters()]
            for linear in (module for module in model.modules() if isinstance(module, te_stand_in.Linear)):
                state = linear.fp8_meta["scaling_fwd"]
                assert not state.stashed and (state.amax_history != 0).any(1).sum() == 3, "once a forward"
                found += [state.scale, state.amax_history]
            results.append(found)
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(one, other) for one, other in zip(*results))


def test_the_toml_passes():
    toml = f"--job.config_file={ROOT}/train_configs/llama3_te.toml"
    config = ConfigManager().parse_args([toml])
    assert config.gtp.linear_backend == "transformer_engine" and config.gtp.te_recipe == "current"
    with te_stand_in.installed():
        check_linear_backend(config)
        check_linear_backend(ConfigManager().parse_args([toml, SHARDED]))
        with pytest.MonkeyPatch.context() as monkeypatch:
            package = sys.modules["transformer_engine.pytorch"]
            monkeypatch.setattr(package, "is_fp8_available", lambda return_reason: (False, "sm80"), raising=True)
            with pytest.raises(ValueError, match=r"te_recipe = 'current'.*\(sm80\): use 'bf16'"):
                check_linear_backend(config)


@pytest.mark.parametrize(
    "options, error, message",
    [
        (["--gtp.linear_backend=te"], ValueError, r"linear_backend = 'te': choose one of torch, transformer_engine"),
        (["--gtp.te_recipe=fp8"], ValueError, r"te_recipe = 'fp8': choose one of bf16, delayed"),
        (["--gtp.linear_backend=torch", "--gtp.te_recipe=block"], ValueError, r"te_recipe = 'block' has no meaning"),
        (["--model.name=qwen3"], NotImplementedError, r"model\.name = 'qwen3'.*llama3"),
        (
            ["--parallelism.tensor_parallel_degree=2", SHARDED],
            NotImplementedError,
            r"tensor_parallel_degree > 1 and GTP off.*num_weight_shards to a multiple",
        ),
        (["--compile.enable"], NotImplementedError, r"compile\.components with 'model'"),
        (
            ["--gtp.te_recipe=delayed", "--activation_checkpoint.mode=full"],
            NotImplementedError,
            r"'delayed' and activation_checkpoint\.mode = 'full' and GTP off.*mode 'none'$",
        ),
        (
            ["--gtp.te_recipe=delayed", "--activation_checkpoint.mode=selective", SHARDED],
            NotImplementedError,
            r"'delayed' and activation_checkpoint\.mode = 'selective', whose.*mode 'none' or 'full'$",
        ),
    ],
)
def test_what_cannot_work_is_refused(options, error, message):
    with te_stand_in.installed(), pytest.raises(error, match=message):
        check_linear_backend(job_config(*options))


def test_a_library_that_is_missing_or_old_is_named():
    check_linear_backend(ConfigManager().parse_args(TE[:1]))
    with te_stand_in.installed():
        check_linear_backend(job_config())
    with te_stand_in.installed("2.18.0"), pytest.raises(ImportError, match=r"2\.19 or later, found 2\.18\.0"):
        check_linear_backend(job_config())
    if "transformer_engine" not in sys.modules:
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setitem(sys.modules, "transformer_engine", None)
            with pytest.raises(ImportError, match=r"2\.19 or later, found none.*linear_backend = 'torch'"):
                check_linear_backend(job_config())
