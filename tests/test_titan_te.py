"""``[gtp] linear_backend = "transformer_engine"``, on a stand-in for it."""

import sys

import pytest

from tests.titan_runs import SMALL, degrees, metrics, probes
from titan_integration import cpu

cpu.install()  # before the first import of torchtitan

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import ConfigManager
from torchtitan.models.llama3 import Transformer, TransformerModelArgs

from tests import te_stand_in
from titan_integration.transformer_engine import check_linear_backend, use_te_linears

SHARDED = "--gtp.tensor_parallel_num_weight_shards=2"
TE = ["--job.custom_config_module=titan_integration.job_config", "--gtp.linear_backend=transformer_engine"]


@pytest.fixture
def rank_alone():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def job_config(*options):
    return ConfigManager().parse_args([*TE, "--activation_checkpoint.mode=none", *options])


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "current", "block"])
def test_trains_as_a_single_process(titan_jobs, tmp_path, recipe):
    """Sharded, with weights gathered in FP8, beside unsharded linears that quantize theirs in each forward."""
    common = [*SMALL, f"--training.token_cache_folder={tmp_path}/tokens", "--training.exact_grad_norm"]
    common += ["--training.steps=3", "--training.logical_init", "--lr_scheduler.warmup_steps=0", *TE]
    common += ["--training.local_batch_size=1", "--training.global_batch_size=2", "--checkpoint.no_enable"]
    common += ["--metrics.no_enable_tensorboard", "--experimental.custom_import=tests.titan_te_probe"]
    common += [f"--gtp.te_recipe={recipe}", "--activation_checkpoint.mode=full"]
    found = []
    for num_ranks, axes in ((1, {}), (2, {"gtp": 2})):
        folder = tmp_path / str(num_ranks)
        job = titan_jobs.run(folder, num_ranks, *common, *degrees(**axes))
        assert f"42 linears are TransformerEngine's, recipe {recipe}" in job.output
        common += [f"--model.hf_assets_path={folder}/checkpoint/tokenizer"] if num_ranks == 1 else []
        found.append([(r["loss"], r["grad_norm"]) for r in metrics(folder)])
    assert len(found[0]) == 3 and torch.tensor(found[1]).allclose(torch.tensor(found[0]), rtol=1e-5)
    # Before the first step and after each.
    num_quantizations = 0 if recipe == "bf16" else 4 * 42
    assert [rank["stats"]["num_quantizations"] for rank in probes(tmp_path / "2")] == [num_quantizations] * 2


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
        (
            ["--gtp.te_recipe=delayed", "--checkpoint.enable"],
            NotImplementedError,
            r"'delayed' and checkpoint\.enable.*'block'",
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
