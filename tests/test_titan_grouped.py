"""torchtitan's converters of routed experts, by ours: what they mark and refuse, and jobs beside a single process."""

import types

import pytest
import torch
from torch import nn

from tests.test_titan_moe import (
    DEEPSEEK,
    STEPS,
    TOML,
    assert_gradients_agree,
    gradient_differences,
    largest_difference,
    single,
)
from tests.titan_runs import degrees, metrics, probes
from titan_integration import cpu

cpu.install()  # before the first import of torchtitan

from torchtitan.models.moe import utils as moe_utils
from torchtitan.models.moe.moe import GroupedExperts

from titan_integration.experts import QuantizedGroupedExperts
from titan_integration.grouped_converters import Float8GroupedMMConverter, MXGroupedMMConverter

__all__ = ["single"]  # a fixture
KINDS = {"float8": (Float8GroupedMMConverter, "float8", 16), "mx": (MXGroupedMMConverter, "mxfp8", 32)}


def converter(kind, fqns, monkeypatch, recipe_name="mxfp8"):
    monkeypatch.setattr(moe_utils, "TOKEN_GROUP_ALIGN_SIZE_M", 8)
    sections = types.SimpleNamespace(**{kind: types.SimpleNamespace(fqns=fqns, recipe_name=recipe_name)})
    job_config = types.SimpleNamespace(
        model=types.SimpleNamespace(converters=[f"quantize.grouped_mm.{kind}"]),
        quantize=types.SimpleNamespace(grouped_mm=sections),
    )
    return KINDS[kind][0](job_config, None)


def two_layers():
    torch.manual_seed(0)
    model = nn.ModuleDict({name: nn.ModuleDict({"experts": GroupedExperts(64, 96, 3, True)}) for name in "ab"})
    with torch.no_grad():
        for layer in model.values():
            layer.experts.init_weights(0.5)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_converters_mark_the_experts_that_they_name(monkeypatch, kind):
    _, name, alignment = KINDS[kind]
    for fqns in (["b.experts"], "nothing,b.experts"):  # torchtitan's section allows a string, too
        model = two_layers()
        converter(kind, fqns, monkeypatch).convert(model)
        assert type(model["a"].experts) is GroupedExperts and type(model["b"].experts) is QuantizedGroupedExperts
        assert model["b"].experts.grouped_gemms.name == name
    assert moe_utils.TOKEN_GROUP_ALIGN_SIZE_M == alignment
    x, counts = torch.randn(50, 64), torch.tensor([17, 0, 33])
    for uses_grouped_mm in (True, False):  # bfloat16, and float32
        results = []
        for layer in (two_layers()["b"], model["b"]):
            layer.experts.use_grouped_mm = uses_grouped_mm
            y = layer.experts(x, counts)
            results.append((y, *torch.autograd.grad(y.square().sum(), list(layer.experts.parameters()))))
        for plain, quantized in zip(*results, strict=True):
            assert 0.03 < (quantized - plain).norm() / plain.norm() < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_converters_refuse_what_they_cannot_serve(monkeypatch, kind):
    for fqns in ([], ["c.experts"], ""):
        with pytest.raises(ValueError, match=rf"\[quantize\.grouped_mm\.{kind}\] fqns = .* such as a\.experts, b\.exp"):
            converter(kind, fqns, monkeypatch).convert(two_layers())
    with pytest.raises(ValueError, match="and this model has none"):
        converter(kind, ["experts"], monkeypatch).convert(nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"experts\.w1 of shape \(3, 40, 64\).*multiples of"):
        converter(kind, ["experts"], monkeypatch).convert(nn.ModuleDict({"experts": GroupedExperts(64, 40, 3, True)}))
    if kind == "mx":
        with pytest.raises(ValueError, match="recipe_name = 'mxfp4': choose 'mxfp8'"):
            converter(kind, ["experts"], monkeypatch, "mxfp4")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", [{"gtp": 2, "egtp": 2}, {"gtp": 4, "ep": 2, "egtp": 2}], ids=["egtp2", "ep2egtp2"])
def test_quantized_experts_train_as_in_a_single_process(single, titan_jobs, tmp_path, kind, axes):
    plain, common = single(*DEEPSEEK)
    common = [
        *common,
        "--checkpoint.no_enable",
        *("--model.converters", f"quantize.grouped_mm.{kind}"),
        *(f"--quantize.grouped_mm.{kind}.fqns", "experts"),
    ]
    for name, num_ranks, options in (
        ("single", 1, degrees()),
        ("sharded", axes["gtp"], [*degrees(**axes), "--experimental.custom_import=tests.titan_probe"]),
    ):
        folder = f"--debug.first_gradients_folder={tmp_path / name}/gradients"
        titan_jobs.run(tmp_path / name, num_ranks, *common, *options, folder, config=TOML)
    mine, expected = metrics(tmp_path / "sharded"), metrics(tmp_path / "single")
    # Quantized it is. (At these weights experts are too small a part of the residual stream for the loss to tell.)
    changed = gradient_differences(tmp_path / "single", plain)
    assert all(1e-2 < changed[f"layers.{layer}.moe.experts.w2"] < 0.2 for layer in (1, 2))
    assert_gradients_agree(tmp_path / "sharded", tmp_path / "single")
    assert len(expected) == STEPS
    assert largest_difference(mine, expected, "loss") < 1e-6
    assert largest_difference(mine, expected, "grad_norm") < 1e-6
    for rank in probes(tmp_path / "sharded"):
        assert rank["stats"]["num_quantizations"] >= 6 * (STEPS - 1)


@pytest.mark.slow
def test_compiling_is_refused(titan_jobs, tmp_path, single):
    _, common = single(*DEEPSEEK)
    options = [*common, *degrees(gtp=2, egtp=2), "--model.converters", "quantize.grouped_mm.mx", "--compile.enable"]
    job = titan_jobs.run(tmp_path, 2, *options, "--quantize.grouped_mm.mx.fqns", "experts", config=TOML, check=False)
    assert all(job.exit_codes) and "'quantize.grouped_mm.mx' and compile.components with 'model'" in job.output
