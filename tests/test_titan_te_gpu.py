"""torchtitan's Llama on TransformerEngine's linears, four ranks on one GPU, beside an unsharded one on each rank."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from tests.harness import ranks
from tests.reference import full_parameters
from tests.titan_runs import degrees
from titan_integration import cpu

te = pytest.importorskip("transformer_engine.pytorch", reason="needs TransformerEngine 2.19 or later")
cpu.install()  # before the first import of torchtitan

from torchtitan.config import ConfigManager

from gtp_dtensor import finalize_grads, stats
from titan_integration.dims import GTPParallelDims
from titan_integration.families import families
from titan_integration.parallelize import parallelize
from titan_integration.spec import with_logical_init
from titan_integration.transformer_engine import use_te_linears

BACKEND = "--gtp.linear_backend=transformer_engine"
LR = 1e-3
ROWS, COLUMNS = 2, 128  # of a rank's batch
on_four = ranks(4, device="cuda", timeout=240, group_timeout=120)


def job_config(*options):
    common = ["--job.custom_config_module=titan_integration.job_config", "--model.name=llama3"]
    common += ["--parallelism.disable_loss_parallel", "--training.seq_len=128"]
    return ConfigManager().parse_args([*common, "--activation_checkpoint.mode=none", *options])


def llama():
    family = families()["llama3"]
    args = dataclasses.replace(family.flavors["debugmodel"], n_layers=2)
    with torch.device("meta"):
        return family, with_logical_init(family.titan_spec.model_cls)(args)


def reset():
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()  # of the test before, whose process groups are gone


def initialise(model):
    torch.manual_seed(5)
    model.to_empty(device="cuda")
    with torch.no_grad():
        model.init_weights()


def sharded_llama(*options):
    family, model = llama()
    config = job_config(*options)
    dims = GTPParallelDims.from_job_config(config, dist.get_world_size())
    dims.build_mesh()
    model = parallelize(family, model, dims, config)
    initialise(model)
    return model, dims


class Unsharded:
    """All weights on each rank: in float32, which TE's linears quantize or cast by themselves; the others are cast, as GTP
    does it. Wgrads are accumulated in float32, as TE does it for Megatron."""

    def __init__(self, recipe, values, copies=1):
        self.copies = copies  # how many ranks add the same gradient
        _, self.model = llama()
        self.region = use_te_linears(self.model, job_config(BACKEND, f"--gtp.te_recipe={recipe}"), is_sharded=False)
        self.region.amax_group = dist.group.WORLD
        initialise(self.model)
        for name, param in self.model.named_parameters():
            param.data.copy_(values[name])
        self.linears = {}
        for name, module in self.model.named_modules():
            if isinstance(module, te.Linear):
                module.fuse_wgrad_accumulation = True
                module.__dict__["activation_dtype"] = torch.bfloat16  # else TE refuses parameters in float32
                module.weight.main_grad = torch.zeros_like(module.weight)
                self.linears[f"{name}.weight"] = module.weight

    def __call__(self, tokens):
        others = {n: p.bfloat16() for n, p in self.model.named_parameters() if n not in self.linears}
        return functional_call(self.model, others, (tokens,))

    def parameters(self):
        return self.model.parameters()

    def finish(self):
        for name, param in self.model.named_parameters():
            if name in self.linears:
                param.grad = param.main_grad.clone()
                param.main_grad.zero_()
        grads = [param.grad for param in self.model.parameters()]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(part.view_as(grad) / self.copies)  # not the loss: delayed scaling begins with a scale of 1


def batch(step, replica):
    generator = torch.Generator("cuda").manual_seed(7 * step + replica)
    # Something to learn, but no more than log(8): a token follows from the one before but for a number up to 8.
    first = torch.randint(0, 2048, (ROWS, 1), device="cuda", generator=generator)
    tokens = (first + torch.randint(1, 9, (ROWS, COLUMNS + 1), device="cuda", generator=generator).cumsum(1)) % 257
    return tokens[:, :-1], tokens[:, 1:]


def losses(model, finish, dims, num_steps, lr=LR):
    """The mean loss over all ranks in each step."""
    num_replicas = dims.get_mesh("batch").size()
    replica = dims.get_mesh("batch").get_local_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, eps=1e-6)
    found = []
    for step in range(num_steps):
        tokens, labels = batch(step, replica)
        logits = model(tokens).float()
        loss = cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / (num_replicas * ROWS * COLUMNS)
        loss.backward()
        finish()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append(total * num_replicas / dist.get_world_size())
    return torch.stack(found).cpu()


def run_sharded(num_steps, *options):
    """The losses, the first values of the parameters, the axes and the counters of a sharded run."""
    model, dims = sharded_llama("--gtp.transport=symmetric", *options)  # with NCCL over sockets it takes much longer
    values = full_parameters(model)
    found = losses(model, lambda: finalize_grads(model), dims, num_steps)
    return found, values, dims, stats(model)


def distance(one, other):
    return ((one - other).abs() / other).max().item()


def check(found, expected, faster, what, limit):
    assert expected[-1] < 0.9 * expected[0], expected
    print(what, distance(found, expected), "twice the learning rate:", distance(faster, expected))
    assert distance(found, expected) <= limit, (what, found, expected)
    assert distance(faster, expected) > 5 * limit, "a wrong learning rate would not be seen"


@on_four
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "block"])
def test_losses_are_those_of_an_unsharded_model(rank, recipe):
    """Of each step; and in bfloat16 those of torch's linears, too."""
    reset()
    options = [BACKEND, f"--gtp.te_recipe={recipe}", *degrees(gtp=4)]
    found, values, dims, counters = run_sharded(50, *options)
    assert counters.num_quantizations == (0 if recipe == "bf16" else 14 * (50 + 1))
    unsharded = [Unsharded(recipe, values) for _ in range(2)]
    expected, faster = (losses(one, one.finish, dims, 50, lr=lr) for one, lr in zip(unsharded, (LR, 2 * LR)))
    check(found, expected, faster, recipe, 5e-4 if recipe == "bf16" else 2e-3)
    if recipe == "bf16":
        plain, first, *_ = run_sharded(50, *degrees(gtp=4))
        assert all(torch.equal(first[name], value) for name, value in values.items())
        check(found, plain, faster, "plain", 1e-6)


@on_four
def test_delayed_scaling_with_activation_checkpointing(rank):
    """Bit by bit as without."""
    reset()
    options = [BACKEND, "--gtp.te_recipe=delayed", *degrees(gtp=4)]
    runs = [run_sharded(6, *options, f"--activation_checkpoint.mode={mode}") for mode in ("none", "full")]
    assert [run[3].num_recompute_gathers > 0 for run in runs] == [False, True]
    assert torch.equal(runs[0][0], runs[1][0]), (runs[0][0], runs[1][0])


@on_four
@pytest.mark.parametrize("recipe", ["bf16", "delayed", "current", "block"])
def test_tensor_parallelism_of_torchtitan(rank, recipe):
    """At tp 2 x gtp 2, where sums over tp ranks are rounded to bfloat16."""
    reset()
    options = [BACKEND, f"--gtp.te_recipe={recipe}", *degrees(tp=2, gtp=2)]
    found, values, dims, _ = run_sharded(20, *options)
    unsharded = [Unsharded(recipe, values, copies=2) for _ in range(2)]
    expected, faster = (losses(one, one.finish, dims, 20, lr=lr) for one, lr in zip(unsharded, (LR, 2 * LR)))
    check(found, expected, faster, recipe, 2e-3)
    if recipe == "bf16":
        plain, *_ = run_sharded(20, *degrees(tp=2, gtp=2))
        check(found, plain, faster, "plain", 1e-6)
