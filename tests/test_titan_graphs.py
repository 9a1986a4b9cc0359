"""`[gtp] cuda_graph` in torchtitan: a job whose steps are replays, over a stand-in for CUDA graphs, and what is refused."""

from types import SimpleNamespace
from unittest import mock

import pytest

from tests.titan_runs import SMALL, metrics, probes

PROBE = "--experimental.custom_import=tests.titan_graph_probe"


@pytest.mark.slow
def test_replayed_steps_are_torchtitans(titan_jobs, tmp_path):
    """Losses, norms, rates and counters of five steps of two microbatches, three of them replays; a checkpoint between."""
    options = [
        *SMALL,
        f"--training.token_cache_folder={tmp_path}/tokens",
        "--gtp.tensor_parallel_num_weight_shards=2",
        "--optimizer.implementation=fused",
        "--activation_checkpoint.mode=full",
        "--activation_checkpoint.no_preserve_rng_state",
        "--lr_scheduler.warmup_steps=4",
        "--metrics.no_enable_tensorboard",
        "--training.steps=5",
        "--checkpoint.interval=3",
    ]
    eager, step, block = (tmp_path / name for name in ("eager", "step", "block"))
    titan_jobs.run(eager, 2, *options, "--experimental.custom_import=tests.titan_probe")
    options.append(f"--model.hf_assets_path={eager}/checkpoint/tokenizer")
    titan_jobs.run(step, 2, *options, PROBE, "--gtp.cuda_graph=step")
    titan_jobs.run(block, 2, *options, PROBE, "--gtp.cuda_graph=block")
    for one, other, by_blocks in zip(metrics(eager), metrics(step), metrics(block), strict=True):
        for key in ("loss", "grad_norm", "lr"):
            assert one[key] == by_blocks[key]
            # A rate in a tensor is rounded to float32.
            assert abs(one[key] - other[key]) <= 1e-6 * abs(one[key]), (key, one, other)
    assert metrics(step)[-1]["loss"] < metrics(step)[0]["loss"]
    for one, other, by_blocks in zip(probes(eager), probes(step), probes(block), strict=True):
        assert one["stats"] == other["stats"] and one["stats"]["num_reductions"] > 0
        assert by_blocks["stats"]["num_reductions"] == one["stats"]["num_reductions"]
        assert other["num_replays"] == 3 and by_blocks["num_replays"] > 0


def job(**changes):
    from titan_integration import cpu

    cpu.install()
    from torchtitan.config import JobConfig

    from titan_integration.job_config import Gtp

    config = JobConfig()
    config.gtp = Gtp(tensor_parallel_num_weight_shards=2, cuda_graph="step")
    config.optimizer.implementation = "fused"
    config.activation_checkpoint.mode = "none"
    for key, value in changes.items():
        section, name = key.split("__")
        setattr(getattr(config, section), name, value)
    return config


@pytest.mark.parametrize(
    "changes, error, match",
    [
        ({"gtp__cuda_graph": "all"}, ValueError, r"cuda_graph = 'all': choose one of off, step, block"),
        ({"optimizer__implementation": "foreach"}, ValueError, "optimizer.implementation = 'fused'"),
        ({"optimizer__name": "SGD"}, ValueError, "optimizer.name to one of Adam, AdamW"),
        ({"gtp__skip_nonfinite_steps": True}, ValueError, "skip_nonfinite_steps"),
        ({"gtp__check_param_states": True}, ValueError, "check_param_states"),
        ({"activation_checkpoint__mode": "full"}, ValueError, "preserve_rng_state = false"),
        ({"parallelism__expert_parallel_degree": 2}, NotImplementedError, "expert_parallel_degree > 1, whose dispatch"),
        ({"parallelism__pipeline_parallel_degree": 2}, NotImplementedError, "pipeline_parallel_degree > 1"),
        ({"gtp__cuda_graph": "block", "gtp__cuda_graph_modules": []}, ValueError, "no cuda_graph_modules"),
        (
            {
                "gtp__cuda_graph": "block",
                "gtp__cuda_graph_modules": ["layers.*.attention"],
                "activation_checkpoint__mode": "selective",
                "activation_checkpoint__preserve_rng_state": False,
            },
            ValueError,
            r"mode = 'selective' with cuda_graph_modules \['layers\.\*\.attention'\].*mode to 'none'",
        ),
        ({"gtp__linear_backend": "transformer_engine"}, NotImplementedError, "linear_backend"),
    ],
)
def test_jobs_that_are_refused(changes, error, match):
    job()
    from titan_integration import graphs

    with mock.patch.object(graphs, "device_type", "cuda"):
        graphs.check_cuda_graph(job(), gtp_enabled=True)
        blocks = job(gtp__cuda_graph="block", optimizer__name="SGD", parallelism__expert_parallel_degree=2)
        graphs.check_cuda_graph(blocks, gtp_enabled=True)
        with pytest.raises(error, match=match):
            graphs.check_cuda_graph(job(**changes), gtp_enabled=True)
        with pytest.raises(ValueError, match="needs GTP on"):
            graphs.check_cuda_graph(job(), gtp_enabled=False)
    with pytest.raises(ValueError, match="needs CUDA devices, and these are cpu"):
        graphs.check_cuda_graph(job(), gtp_enabled=True)
    graphs.check_cuda_graph(SimpleNamespace(gtp=SimpleNamespace(cuda_graph="off")), gtp_enabled=False)
