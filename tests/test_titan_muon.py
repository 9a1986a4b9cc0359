"""``[optimizer] name = "Muon"`` in torchtitan's jobs."""

import shutil
from types import SimpleNamespace

import pytest

from tests.harness import ranks
from tests.titan_runs import SMALL, degrees, metrics
from titan_integration import cpu

cpu.install()  # before the first import of torchtitan

import torch
from torchtitan.config import ConfigManager
from torchtitan.models.llama3 import Transformer, TransformerModelArgs

from gtp_dtensor import Muon
from titan_integration.optimizer import build_optimizers

MUON = ["--optimizer.name=Muon", "--optimizer.lr=5e-3"]


def llama():
    return Transformer(TransformerModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=128))


def built(*options, parts=None):
    config = ConfigManager().parse_args(
        ["--job.custom_config_module=titan_integration.job_config", "--optimizer.name=Muon", *options]
    )
    return build_optimizers(parts or [llama()], config.optimizer, SimpleNamespace(pp_enabled=parts is not None))


def test_settings_reach_the_optimizer():
    options = ["--optimizer.lr=0.5", "--optimizer.beta2=0.9", "--optimizer.muon_momentum=0.8", "--optimizer.eps=1e-5"]
    container = built(*options, "--optimizer.muon_algorithm=duplicated", "--optimizer.muon_adamw", "*.wo.weight")
    (optimizer,) = container
    assert type(optimizer) is Muon and optimizer.algorithm == "duplicated"
    matrices, others = optimizer.param_groups
    assert matrices["lr"] == others["lr"] == 0.5 and others["betas"] == (0.9, 0.9) and others["adamw_eps"] == 1e-5
    assert matrices["momentum"] == 0.8 and matrices["adjust_lr_fn"] == "match_rms_adamw"
    assert len(matrices["params"]) == 2 * 6 and len(others["params"]) == 2 + 5 + 2  # 7 matrices a layer, one for AdamW
    assert len(container.param_groups[0]["params"]) == len(list(llama().parameters()))


@pytest.mark.parametrize(
    "options, message",
    [
        (["--optimizer.muon_adamw", "*.wq"], r"no parameter matches '\*\.wq'"),
        (["--optimizer.muon_algorithm=all"], r"algorithm='all'.*duplicated"),
        (["--optimizer.early_step_in_backward"], r"early_step_in_backward.*'Muon'"),
    ],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        built(*options)


def test_patterns_of_other_pipeline_stages():
    parts = [llama(), llama()]
    del parts[0].output, parts[1].tok_embeddings
    del parts[0].layers["1"], parts[1].layers["0"]
    first, second = built("--optimizer.muon_adamw", "layers.1.*", parts=parts)
    assert [len(one.param_groups[0]["params"]) for one in (first, second)] == [7, 9 + 2]
    with pytest.raises(ValueError, match=r"optimizer\.muon_adamw.*no parameter matches 'layers\.7\.\*'"):
        built("--optimizer.muon_adamw", "layers.1.*,layers.7.*", parts=parts)


@ranks(2)
def test_patterns_that_no_stage_matches(rank):
    """Each rank has a stage: a pattern of the other's is fine, one of nobody's is refused on both."""
    part = llama()
    del part.layers[str(1 - rank)]
    (optimizer,) = built("--optimizer.muon_adamw", "layers.1.*", parts=[part])
    assert [len(group["params"]) for group in optimizer.param_groups if group["uses_muon"]] == ([] if rank else [7])
    with pytest.raises(ValueError, match=r"no parameter matches 'layers\.7\.\*'"):
        built("--optimizer.muon_adamw", "layers.1.*,layers.7.*", parts=[part])


@pytest.mark.slow
def test_trains_and_resumes_as_a_single_process(titan_jobs, tmp_path):
    """At gtp 2 x tp 2 for two steps, then at gtp 4, beside one process; the momentum moves with it."""
    common = [*SMALL, f"--training.token_cache_folder={tmp_path}/tokens", "--training.exact_grad_norm", *MUON]
    common += ["--training.logical_init", "--lr_scheduler.warmup_steps=0", "--metrics.no_enable_tensorboard"]
    common += ["--checkpoint.interval=2", "--checkpoint.keep_latest_k=0"]
    found = {}
    for name, num_ranks, axes in (("single", 1, {}), ("first", 4, {"tp": 2, "gtp": 2}), ("second", 4, {"gtp": 4})):
        folder = tmp_path / name
        if name == "second":
            shutil.copytree(tmp_path / "first" / "checkpoint", folder / "checkpoint")
        steps = 2 if name == "first" else 4
        titan_jobs.run(folder, num_ranks, *common, *degrees(**axes), f"--training.steps={steps}")
        common += [f"--model.hf_assets_path={folder}/checkpoint/tokenizer"] if num_ranks == 1 else []
        found[name] = torch.tensor([(r["loss"], r["grad_norm"]) for r in metrics(folder)])
    single = found["single"]
    assert (single[0] - single[3]).abs().max() > 1e-2
    assert found["first"].allclose(single[:2], rtol=1e-5)
    assert found["second"][-2:].allclose(single[2:], rtol=1e-5), (found["second"], single)
