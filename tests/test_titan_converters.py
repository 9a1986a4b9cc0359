"""torchtitan's converters for quantized linears: jobs under GTP beside a single process, what is said, what is refused."""

import json
import re

import pytest

from tests.titan_runs import SMALL, degrees, gradients, metrics, probes
from titan_integration import cpu

cpu.install()  # before the first import of torchtitan

import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan.config import ConfigManager
from torchtitan.protocols import model_converter

from titan_integration.float8 import FLOAT8, check_converters, converters_by_us
from titan_integration.mx import MX, GTPMXLinearConverter

COMPILED = ["--compile.enable", "--compile.backend=aot_eager", "--compile.components=model"]
FLOAT8_JOB = [f"--{FLOAT8}.emulate", f"--{FLOAT8}.recipe_name=rowwise", f"--{FLOAT8}.filter_fqns=output"]


def slow(*values, id):
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "converter, options, gtp_options",
    [
        pytest.param(MX, [], COMPILED, id="mx_compiled"),
        slow(MX, [f"--{MX}.recipe_name=mxfp8_cublas_rceil"], [], id="mx_rceil"),
        slow(FLOAT8, FLOAT8_JOB, COMPILED, id="float8_compiled"),
        slow(FLOAT8, FLOAT8_JOB, [], id="float8"),
    ],
)
def test_trains_as_a_single_process(titan_jobs, tmp_path, converter, options, gtp_options):
    """To the last bit, each sample being a microbatch or a rank's, compiled or not."""
    common = [*SMALL, f"--training.token_cache_folder={tmp_path}/tokens", "--training.exact_grad_norm"]
    common += [
        "--training.steps=2",
        "--training.logical_init",
        "--lr_scheduler.warmup_steps=0",
        "--checkpoint.no_enable",
    ]
    common += ["--training.local_batch_size=1", "--training.global_batch_size=2", "--optimizer.name=SGD"]
    common += ["--model.name=qwen3", "--model.flavor=gtp_debug_tied", "--metrics.no_enable_tensorboard"]
    common += ["--experimental.custom_import=tests.titan_compile_probe", "--model.converters", converter, *options]
    found = []
    for num_ranks, axes, more in ((1, {}, []), (2, {"gtp": 2}, gtp_options)):
        folder = tmp_path / str(num_ranks)
        more = [*degrees(**axes), f"--debug.first_gradients_folder={folder}/gradients", *more]
        job = titan_jobs.run(folder, num_ranks, *common, *more)
        assert len(re.findall("runs emulated", job.output)) == 1
        common += [f"--model.hf_assets_path={folder}/checkpoint/tokenizer"] if num_ranks == 1 else []
        found.append(([(r["loss"], r["grad_norm"]) for r in metrics(folder)], gradients(folder)))
    (numbers, grads), (expected, expected_grads) = found
    assert len(numbers) == 2 and numbers == expected
    assert grads.keys() == expected_grads.keys()
    tied = "tok_embeddings.weight"  # its two uses and two samples are summed in another order
    assert (grads.pop(tied) - expected_grads[tied]).norm() <= 1e-6 * expected_grads[tied].norm()
    for name, grad in grads.items():
        assert grad.equal(expected_grads[name]), name
    compiled = json.loads((tmp_path / "2" / "compiled_0.json").read_text())
    assert not compiled["breaks"] and compiled["num_graphs"] == (1 if gtp_options else 0)
    # Seven linears in each of two blocks, before the first step and after both.
    assert [rank["stats"]["num_quantizations"] for rank in probes(tmp_path / "2")] == [42, 42]


def job_config(*options):
    return ConfigManager().parse_args(["--model.converters", MX, *options])


@pytest.mark.parametrize(
    "options, message",
    [
        ([f"--{MX}.recipe_name=mxfp9"], r"recipe_name = 'mxfp9'.*mxfp8_cublas, .*mxfp8_rceil_wgrad_with_hp"),
        (
            ["--training.local_batch_size=3", "--training.seq_len=16"],
            r"local_batch_size = 3 x training\.seq_len = 16 .*multiple of 32.*wgrad_with_hp",
        ),
        (
            ["--parallelism.pipeline_parallel_degree=2", "--training.seq_len=48"],
            r"pipeline_parallel_microbatch_size = 1 x training\.seq_len = 48",
        ),
    ],
    ids=["recipe", "tokens", "microbatch"],
)
def test_what_mx_cannot_do_is_refused(options, message):
    check_converters(job_config())
    with pytest.raises(ValueError, match=message):
        check_converters(job_config(*options))


def test_high_precision_weight_gradients_take_any_number_of_tokens():
    check_converters(job_config(f"--{MX}.recipe_name=mxfp8_rceil_wgrad_with_hp", "--training.seq_len=49"))


def test_torchtitans_own_converters_stay_registered():
    before = model_converter._registry_model_converter_cls[MX]
    with converters_by_us():
        assert model_converter._registry_model_converter_cls[MX] is GTPMXLinearConverter
    assert model_converter._registry_model_converter_cls[MX] is before is not GTPMXLinearConverter


@pytest.fixture
def rank_alone():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "recipe, mode, wgrad_with_hp",
    [
        ("mxfp8_cublas", "floor", False),
        ("mxfp8_cublas_rceil", "rceil", False),
        ("mxfp8_emulated", "floor", False),
        ("mxfp8_rceil", "rceil", False),
        ("mxfp8_rceil_wgrad_with_hp", "rceil", True),
        ("mxfp8_emulated_rceil", "rceil", False),
    ],
)
def test_recipes(rank_alone, recipe, mode, wgrad_with_hp):
    """Emulated: there is no device of capability 10.0 here."""
    model = nn.ModuleDict({"a": nn.Linear(64, 32)})
    options = [f"--{MX}.recipe_name={recipe}", f"--{MX}.mxfp8_dim1_cast_kernel_choice=cuda"]
    GTPMXLinearConverter(job_config(*options), None).convert(model)
    layer = model["a"]
    assert (layer.mode.value, layer.wgrad_with_hp, layer.emulate) == (mode, wgrad_with_hp, True)
    assert layer.dim1_cast.value == "cuda"


def test_features_that_blocks_do_not_divide_are_named_with_the_key(rank_alone):
    model = nn.ModuleDict({"a": nn.Linear(64, 48), "odd": nn.Linear(20, 20)})
    config = job_config()
    with pytest.raises(
        ValueError, match=r"a: 64 in and 48 out features.*quantize\.linear\.mx\.filter_fqns = \['output'\]"
    ):
        GTPMXLinearConverter(config, None).convert(model)
    config.quantize.linear.mx.filter_fqns = ["a"]
    GTPMXLinearConverter(config, None).convert(model)
    assert [type(module) for module in model.values()] == [nn.Linear] * 2  # torchtitan leaves out 20 features by itself
