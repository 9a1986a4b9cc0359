"""torchtitan's `[compile]` under GTP: compiled jobs beside the same in eager, what was compiled, what is refused."""

import json
import types
from collections import Counter

import pytest

from tests.titan_runs import SMALL, degrees, gradients, metrics, probes
from titan_integration import cpu

cpu.install()  # before the first import of torchtitan

import torch
from torchtitan.config import ConfigManager
from torchtitan.models.moe import moe as moe_module

from titan_integration.compilation import check_compile
from titan_integration.experts import other_experts_stay_eager
from titan_integration.families import families

COMPILE = ["--compile.enable", "--compile.backend=aot_eager"]
FULL = ["--activation_checkpoint.mode=full"]
BY_OPERATOR = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
FORCED = "--activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns=feed_forward.w1,attention.wq"
EVERY_SECOND = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"]
BF16 = ["--training.mixed_precision_param=bfloat16"]
SGD = ["--optimizer.name=SGD", "--optimizer.lr=0.1"]
FLOAT8 = ["--model.converters=quantize.linear.float8", "--quantize.linear.float8.emulate"]
VALIDATION = [
    "--validation.enable",
    "--validation.freq=2",
    "--validation.steps=2",
    "--validation.dataset=python_stdlib",
    "--validation.local_batch_size=1",  # another shape than the training's 2 x 64
    "--validation.seq_len=32",
]
LLAMA, TIED, QWEN = ("llama3", "debugmodel"), ("qwen3", "gtp_debug_tied"), ("qwen3", "gtp_debug")
DEEPSEEK, LLAMA4 = ("deepseek_v3", "gtp_debug"), ("llama4", "gtp_debug")
# What is compiled, by the code object in which a graph starts.
BLOCK, CHECKPOINTED, LOSS = "model.py:forward", "checkpoint_wrapper.py:forward", "loss.py:cross_entropy_loss"
DENSE = {BLOCK: 1, LOSS: 1}
# Of a layer with experts torchtitan compiles the parts: both norms (ours, one graph), attention, router, reorderer and
# shared experts.
NORM, PARTS = "modules.py:forward", "moe.py:forward"
WITH_EXPERTS = {BLOCK: 2, NORM: 1, PARTS: 3, LOSS: 1}


@pytest.fixture(scope="module")
def jobs(titan_jobs, tmp_path_factory):
    """`jobs(folder, num_ranks, *options)` runs a job; all share a tokenizer and its tokens."""
    root = tmp_path_factory.mktemp("titan_compile")
    common = [
        *SMALL,
        f"--training.token_cache_folder={root}/tokens",
        "--training.exact_grad_norm",
        "--training.steps=2",
        "--lr_scheduler.warmup_steps=0",
        "--metrics.no_enable_tensorboard",
        "--checkpoint.no_enable",
    ]
    names = [f"--model.name={TIED[0]}", f"--model.flavor={TIED[1]}"]  # a small one
    titan_jobs.run(root, 1, *common, *names, *degrees(), "--training.steps=1")
    common += [f"--model.hf_assets_path={root}/checkpoint/tokenizer"]
    common += ["--experimental.custom_import=tests.titan_compile_probe"]

    def run(folder, num_ranks, *options, **keywords):
        return titan_jobs.run(folder, num_ranks, *common, *options, **keywords)

    return run


def slow(*values, id):
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


class Twins:
    """A job in eager and the same job compiled."""

    def __init__(self, jobs, tmp_path, num_ranks, model, axes, options, compile_options=()):
        self.folders = []
        for name, more in (("eager", ()), ("compiled", (*COMPILE, *compile_options))):
            folder = tmp_path / name
            names = [f"--model.name={model[0]}", f"--model.flavor={model[1]}"]
            names.append(f"--debug.first_gradients_folder={folder}/gradients")
            jobs(folder, num_ranks, *names, *degrees(**axes), *options, *more, timeout=280)
            self.folders.append(folder)
        self.compiled = [json.loads((folder / f"compiled_{rank}.json").read_text()) for rank in range(num_ranks)]

    def assert_same_training(self, tolerance=1e-6):
        """Losses and norms of all steps, and every gradient of the first."""
        eager, compiled = (metrics(folder) for folder in self.folders)
        assert len(eager) >= 2 and eager[0]["loss"] != eager[-1]["loss"]
        for ours, theirs in zip(compiled, eager, strict=True):
            for key in ("loss", "grad_norm"):
                assert abs(ours[key] - theirs[key]) <= tolerance * theirs[key], (key, ours, theirs)
        eager, compiled = (gradients(folder) for folder in self.folders)
        assert eager.keys() == compiled.keys() and len(eager) > 20
        for name, grad in eager.items():
            assert (compiled[name].double() - grad.double()).norm() <= tolerance * grad.double().norm(), name

    def stats(self):
        """Of each rank: (eager, compiled)."""
        return list(zip(*([rank["stats"] for rank in probes(folder)] for folder in self.folders), strict=True))

    def code(self, rank=0):
        """How many graphs start in which code object; asserts that none was broken."""
        assert not self.compiled[rank]["breaks"]
        code = self.compiled[rank]["code"]
        assert len(code) == self.compiled[rank]["num_graphs"]
        return Counter(name.partition("/")[2] for name in code)


@pytest.mark.parametrize(
    "num_ranks, model, axes, options, code",
    [
        # Blocks with and without experts, of one model.
        slow(2, DEEPSEEK, {"gtp": 2, "ep": 2}, [], WITH_EXPERTS, id="deepseek_v3"),
        # What enters the first block is a collective's tensor.
        slow(4, TIED, {"tp": 2, "gtp": 2}, [], DENSE, id="tp2gtp2"),
        slow(2, LLAMA, {"gtp": 2}, SGD, DENSE, id="llama3_sgd"),
        slow(4, LLAMA, {"tp": 2, "gtp": 2}, [], DENSE, id="llama3_tp2"),
        slow(4, LLAMA, {"gtp": 2}, [], DENSE, id="dps2"),
        slow(4, LLAMA, {"gtp": 2, "dpr": 2}, [], DENSE, id="dpr2"),
        slow(4, LLAMA, {"gtp": 2, "cp": 2}, [], DENSE, id="cp2"),
        slow(4, DEEPSEEK, {"gtp": 4, "ep": 2, "egtp": 2}, [], WITH_EXPERTS, id="ep2egtp2gtp4"),
        slow(4, DEEPSEEK, {"cp": 2, "gtp": 2, "ep": 2, "egtp": 2}, [], WITH_EXPERTS, id="deepseek_v3_cp2"),
        slow(2, QWEN, {"gtp": 2}, [], {BLOCK: 1, NORM: 1, PARTS: 2, LOSS: 1}, id="qwen3"),
        slow(2, LLAMA4, {"gtp": 2, "ep": 2}, [], WITH_EXPERTS, id="llama4"),
        # Without tensor parallelism: test_titan_converters.py.
        slow(4, LLAMA, {"tp": 2, "gtp": 2}, ["--model.converters=quantize.linear.mx"], DENSE, id="mx_tp2"),
        slow(4, LLAMA, {"tp": 2, "gtp": 2}, FLOAT8, DENSE, id="float8_tp2"),
    ],
)
def test_compiled_trains_as_eager(jobs, tmp_path, num_ranks, model, axes, options, code):
    """Same losses, gradients, gathers and reductions; one graph for each kind of block, none broken."""
    twins = Twins(jobs, tmp_path, num_ranks, model, axes, options)
    twins.assert_same_training()
    for rank, (eager, compiled) in enumerate(twins.stats()):
        assert eager == compiled and eager["num_forward_gathers"] > 0
        assert twins.code(rank) == code


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, axes, num_graphs",
    [
        (DEEPSEEK, {"tp": 2, "gtp": 2, "ep": 4}, 14),
        (DEEPSEEK, {"tp": 2, "gtp": 2, "ep": 2, "etp": 2}, 10),
        (QWEN, {"tp": 2, "gtp": 2, "egtp": 2}, 9),
        (LLAMA4, {"tp": 2, "gtp": 2, "ep": 2}, 14),
    ],
    ids=["deepseek_v3", "deepseek_v3_etp", "qwen3", "llama4"],
)
def test_experts_under_tensor_parallel(jobs, tmp_path, model, axes, num_graphs):
    """Hooks of the parts that are compiled are graphs of their own."""
    twins = Twins(jobs, tmp_path, 4, model, axes, [])
    twins.assert_same_training()
    for rank, (eager, compiled) in enumerate(twins.stats()):
        assert eager == compiled
        assert sum(twins.code(rank).values()) == num_graphs


RECOMPUTE, BACKWARD = "num_recompute_gathers", "num_backward_gathers"


@pytest.mark.parametrize(
    "num_ranks, model, axes, options, num_recomputed, code",
    [
        slow(
            2, DEEPSEEK, {"gtp": 2, "ep": 2}, BY_OPERATOR, (108, 92),
            {CHECKPOINTED: 1, BLOCK: 1, NORM: 1, PARTS: 3, LOSS: 1}, id="deepseek_v3_op",
        ),
        slow(2, LLAMA, {"gtp": 2}, FULL, (168, 144), {CHECKPOINTED: 1, LOSS: 1}, id="full"),
        slow(2, LLAMA, {"gtp": 2}, BY_OPERATOR, (168, 72), {CHECKPOINTED: 1, LOSS: 1}, id="op"),
        slow(2, LLAMA, {"gtp": 2}, EVERY_SECOND, (84, 72), {CHECKPOINTED: 1, BLOCK: 1, LOSS: 1}, id="every_second"),
        slow(4, LLAMA, {"tp": 2, "gtp": 2}, BY_OPERATOR, (168, 48), {CHECKPOINTED: 1, LOSS: 1}, id="tp2_op"),
        slow(4, TIED, {"tp": 2, "gtp": 2}, BY_OPERATOR, (56, 16), {CHECKPOINTED: 1, LOSS: 1}, id="tp2_tied_op"),
        slow(4, TIED, {"tp": 2, "gtp": 2}, [*BY_OPERATOR, FORCED], (56, 32), {CHECKPOINTED: 1, LOSS: 1}, id="forced"),
    ],
)  # fmt: skip
def test_activation_checkpointing(jobs, tmp_path, num_ranks, model, axes, options, num_recomputed, code):
    """Never more gathers than in eager; those that a compiled recompute does without come later, for the backward."""
    twins = Twins(jobs, tmp_path, num_ranks, model, axes, options)
    twins.assert_same_training()
    for rank, (eager, compiled) in enumerate(twins.stats()):
        assert (eager[RECOMPUTE], compiled[RECOMPUTE]) == num_recomputed
        assert eager[RECOMPUTE] + eager[BACKWARD] == compiled[RECOMPUTE] + compiled[BACKWARD]
        assert {key for key in eager if eager[key] != compiled[key]} == {RECOMPUTE, BACKWARD}
        assert twins.code(rank) == code


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, options",
    [
        (LLAMA, []),
        (LLAMA, ["--parallelism.pipeline_parallel_schedule=Interleaved1F1B"]),
        (DEEPSEEK, ["--parallelism.pipeline_parallel_schedule=Interleaved1F1B"]),
    ],
    ids=["llama3", "llama3_interleaved", "deepseek_v3_interleaved"],
)
def test_pipelines(jobs, tmp_path, model, options):
    """torch asks a stage for gradients of its inputs alone to learn their shapes: nothing may be reduced for that."""
    twins = Twins(jobs, tmp_path, 4, model, {"pp": 2, "gtp": 2}, options)
    twins.assert_same_training()
    for rank, (eager, compiled) in enumerate(twins.stats()):
        assert eager == compiled
        assert twins.code(rank)[BLOCK] >= 1


@pytest.mark.slow
@pytest.mark.parametrize("axes, tolerance", [({"gtp": 2}, 0), ({"tp": 2, "gtp": 2}, 3e-2)], ids=["gtp2", "tp2gtp2"])
def test_bfloat16(jobs, tmp_path, axes, tolerance):
    """Alone the same bits; under tensor parallelism sums are rounded elsewhere."""
    twins = Twins(jobs, tmp_path, 4 if "tp" in axes else 2, LLAMA, axes, BF16)
    twins.assert_same_training(tolerance)
    for eager, compiled in twins.stats():
        assert eager == compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, code",
    [
        (["--compile.components=model"], {BLOCK: 1}),
        (["--compile.components=loss"], {LOSS: 1}),
        (["--compile.components=model,loss"], DENSE),
        (["--compile.backend=eager"], DENSE),
        (["--activation_checkpoint.mode=memory_budget", "--activation_checkpoint.memory_budget=0.5"], DENSE),
    ],
    ids=["model", "loss", "both", "backend_eager", "memory_budget"],
)
def test_options(jobs, tmp_path, options, code):
    twins = Twins(jobs, tmp_path, 2, TIED, {"gtp": 2}, [], options)
    twins.assert_same_training()
    assert twins.code() == code


@pytest.mark.slow
def test_a_checkpoint_knows_nothing_of_compilation(jobs, tmp_path):
    """Saved compiled, resumed in eager, and the other way round: bit for bit what an eager job does."""
    names = [f"--model.name={TIED[0]}", f"--model.flavor={TIED[1]}", *degrees(gtp=2)]
    names += ["--checkpoint.enable", "--checkpoint.interval=2", "--checkpoint.no_last_save_model_only"]
    seen = []
    for name, before, after in (("eager", [], []), ("first", COMPILE, []), ("last", [], COMPILE)):
        for num_steps, more in ((2, before), (4, after)):
            jobs(tmp_path / name, 2, *names, f"--training.steps={num_steps}", *more)
            code = json.loads((tmp_path / name / "compiled_0.json").read_text())["code"]
            assert bool(code) == bool(more)
        seen.append([(record["step"], record["loss"], record["grad_norm"]) for record in metrics(tmp_path / name)])
    assert [step for step, *_ in seen[0]] == [1, 2, 3, 4]
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.slow
def test_evaluation_of_other_shapes_compiles_once_more(jobs, tmp_path):
    twins = Twins(jobs, tmp_path, 2, LLAMA, {"gtp": 2}, [*VALIDATION, "--training.steps=5"])
    twins.assert_same_training()
    assert all(eager == compiled for eager, compiled in twins.stats())
    assert twins.code() == {BLOCK: 2, LOSS: 2}


@pytest.mark.slow
@pytest.mark.parametrize("model, options", [(LLAMA, []), (DEEPSEEK, BY_OPERATOR)], ids=["llama3", "deepseek_v3_op"])
def test_inductor(jobs, tmp_path, model, options):
    """Its kernels sum in other orders."""
    twins = Twins(jobs, tmp_path, 2, model, {"gtp": 2}, options, ["--compile.backend=inductor"])
    twins.assert_same_training()
    for eager, compiled in twins.stats():
        assert eager["num_reductions"] == compiled["num_reductions"]
        assert eager[RECOMPUTE] + eager[BACKWARD] == compiled[RECOMPUTE] + compiled[BACKWARD]


def job_config(*options):
    return ConfigManager().parse_args(["--compile.enable", "--parallelism.pipeline_parallel_degree=2", *options])


@pytest.mark.parametrize(
    "options, error, message",
    [
        (["--compile.components=model,los"], ValueError, r"compile\.components.*\['los'\].*model, loss"),
        (["--compile.backend=cudagraphs"], NotImplementedError, r"compile\.backend = 'cudagraphs'.*inductor"),
        (
            ["--parallelism.pipeline_parallel_schedule=interleavedZeroBubble"],
            NotImplementedError,
            r"schedule = 'interleavedZeroBubble'.*Interleaved1F1B",
        ),
        (["--parallelism.pipeline_parallel_schedule_csv=x.csv"], NotImplementedError, r"schedule_csv.*1F1B"),
    ],
    ids=["component", "backend", "zero_bubble", "csv"],
)
def test_what_cannot_be_compiled_is_refused(options, error, message):
    check_compile(job_config())
    check_compile(job_config(*options, "--compile.no_enable"))
    with pytest.raises(error, match=message):
        check_compile(job_config(*options))


def test_zero_bubbles_go_with_a_compiled_loss():
    schedule = "--parallelism.pipeline_parallel_schedule=InterleavedZeroBubble"
    check_compile(job_config(schedule, "--compile.components=loss"))


def test_experts_of_a_model_built_later_are_not_compiled():
    """torchtitan replaces its function for experts in its module."""
    family, section = families()["llama4"], types.SimpleNamespace(backend="aot_eager")
    with torch.device("meta"):
        model = family.titan_spec.model_cls(family.flavors["gtp_debug"])
    original = moe_module._run_experts_grouped_mm
    with other_experts_stay_eager():
        family.apply_compile(model, section, True)
        assert moe_module._run_experts_grouped_mm is not original
    assert moe_module._run_experts_grouped_mm is original
