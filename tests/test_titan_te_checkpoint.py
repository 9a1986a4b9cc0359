"""torchtitan's checkpoints of linears of TransformerEngine's with delayed scaling, on a stand-in for it."""

import pytest
import torch
from torch import nn

from titan_integration import cpu

cpu.install()  # before the first import of torchtitan

from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

from gtp_dtensor.te import plain_extra_state
from tests import te_stand_in as te
from tests.test_titan_checkpoint_manager import Run, alone, path_of  # noqa: F401
from tests.titan_runs import SMALL, degrees, metrics


class InRegion(nn.Sequential):
    def forward(self, x):
        with te.autocast(te.Recipe("delayed")):
            return super().forward(x)


def build():
    return plain_extra_state(InRegion(te.Linear(4, 3), te.Linear(3, 2)))


def scalings(model):
    return [getattr(one.fp8_meta["scaling_fwd"], part) for one in model for part in ("scale", "amax_history")]


def test_extra_state_is_that_of_the_step(alone, tmp_path):  # noqa: F811
    """torchtitan keeps that of before the first step, and an export would convert its bytes."""
    with te.installed():
        run = Run(tmp_path / "run", model=build())
        stale = run.manager.states["model"].state_dict()["0._extra_state"]
        run.train(2)
        expected = [part.clone() for part in scalings(run.model)]
        run.train(1, saves=False)
        assert stale.numel() == 0 and not torch.equal(expected[1], scalings(run.model)[1])
        again = Run(tmp_path / "run", model=build(), seed=1)
        assert again.manager.load(step=2) and again.step == 2
        assert all(map(torch.equal, scalings(again.model), expected))
        again.train(1, saves=False)
        assert all(map(torch.equal, scalings(again.model), scalings(run.model)))
        export = Run(tmp_path / "export", model=run.model, last_save_model_only=True, export_dtype="bfloat16")
        export.manager.save(3, last_step=True)
        path = str(path_of(tmp_path / "export", 3))
        other = Run(tmp_path / "other", model=build(), initial_load_path=path, initial_load_model_only=True)
        assert other.manager.load()
        assert all(map(torch.equal, scalings(other.model), scalings(run.model)))


def test_hugging_face_format_has_weights_only(alone, tmp_path):  # noqa: F811
    args = TransformerModelArgs(dim=32, n_layers=1, n_heads=4, vocab_size=64)
    adapter = Llama3StateDictAdapter(args, None)

    def run(name, seed, **settings):
        torch.manual_seed(seed)
        model = Transformer(args)
        model.layers["0"].attention.wq = plain_extra_state(te.Linear(32, 32, bias=False))
        assert "layers.0.attention.wq._extra_state" in model.state_dict()
        return Run(tmp_path / name, model=model, sd_adapter=adapter, **settings)

    with te.installed():
        first = run("first", 1, last_save_in_hf=True, last_save_model_only=True)
        first.manager.save(1, last_step=True)
        path = str(path_of(tmp_path / "first", 1))
        other = run("other", 2, initial_load_path=path, initial_load_in_hf=True, initial_load_model_only=True)
        before = other.weights()
        assert other.manager.load()
        assert all(map(torch.equal, other.weights(), first.weights()))
        assert not all(map(torch.equal, other.weights(), before))


@pytest.mark.slow
def test_a_job_with_delayed_scaling_goes_on(titan_jobs, tmp_path):
    """As if it had not stopped, on as many ranks to the last bit; and its next step on others."""
    common = [*SMALL, f"--training.token_cache_folder={tmp_path}/tokens", "--training.exact_grad_norm"]
    common += [
        "--gtp.linear_backend=transformer_engine",
        "--gtp.te_recipe=delayed",
        "--activation_checkpoint.mode=none",
    ]
    common += [
        "--training.logical_init",
        "--lr_scheduler.warmup_steps=0",
        "--checkpoint.enable",
        "--checkpoint.interval=2",
    ]
    common += ["--metrics.no_enable_tensorboard", "--experimental.custom_import=tests.titan_te_probe"]
    common += ["--training.global_batch_size=4"]

    def losses(name, num_ranks, num_steps, *options, **axes):
        folder = tmp_path / name
        steps = [f"--training.steps={num_steps}", f"--training.local_batch_size={4 // num_ranks}"]  # one microbatch
        titan_jobs.run(folder, num_ranks, *common, *degrees(**axes), *steps, *options)
        return [record["loss"] for record in metrics(folder)]

    whole = losses("whole", 2, 4, gtp=2)
    assert len(whole) == 4 and len(set(whole)) == 4
    common.append(f"--model.hf_assets_path={tmp_path}/whole/checkpoint/tokenizer")
    losses("parts", 2, 2, "--checkpoint.no_last_save_model_only", gtp=2)
    assert losses("parts", 2, 4, gtp=2)[-2:] == whole[2:]
    for name, num_ranks, axes in (("gtp4", 4, {"gtp": 4}), ("alone", 1, {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "checkpoint").mkdir()
        (tmp_path / name / "checkpoint" / "step-2").symlink_to(tmp_path / "parts" / "checkpoint" / "step-2")
        found = losses(name, num_ranks, 3, **axes)
        assert len(found) == 1 and found[0] == pytest.approx(whole[2], rel=1e-6)
