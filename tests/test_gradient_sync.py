"""``set_requires_gradient_sync`` on a model, a part of one, and a list of parts; weights used in some microbatches only."""

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPConfig, GTPStyle, finalize_grads, reset_stats, set_requires_gradient_sync, stats
from gtp_dtensor.members import model_runtimes
from tests.harness import ranks
from tests.models import MLP
from tests.reference import build_pair, full_gradients, local_slice, mean_square, relative_error, replica_options

WIDTHS = (16, 32, 32, 8)


def sharded(kind, config=GTPConfig(), build=lambda: MLP(WIDTHS).double()):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(kind, "gtp"))
    model, reference = build_pair(build)
    parallelize_module(model, mesh["gtp"], GTPStyle(config, min_numel=30, **replica_options(mesh)))
    return model, reference


def batch(seed, num=8):
    return torch.randn(num, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def run(model, reference, seed, rank, world_size, **kwargs):
    x = batch(seed)
    mean_square(model(local_slice(x, rank, world_size), **kwargs)).backward()
    mean_square(reference(x, **kwargs)).backward()


def assert_same_grads(model, reference, rtol=1e-11):
    expected = full_gradients(reference)
    for name, grad in full_gradients(model).items():
        assert relative_error(grad, expected[name]) < rtol, name
    assert stats(model).num_pending == 0


@ranks(4)
@pytest.mark.parametrize("kind", ["dps", "dpr"])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_part_keeps_back_and_the_rest_does_not(rank, world_size, kind, as_list):
    """Three microbatches: two layers are synchronised in the last, the third in each. Setting it twice changes nothing."""
    model, reference = sharded(kind)
    parts = [model.layers[0], model.layers[2]]
    for index in range(3):
        for part in [parts] if as_list else [*parts, *parts]:
            set_requires_gradient_sync(part, index == 2)
        reset_stats(model)
        run(model, reference, index, rank, world_size)
        seen, has_grads = stats(model), [layer.weight.grad is not None for layer in model.layers]
        assert seen.num_reductions == 3 and seen.num_small_reductions == 1
        assert seen.num_replica_reductions == (3 if index == 2 else 1)
        assert has_grads == ([True] * 3 if index == 2 else [False, True, False])
        assert seen.num_pending == (0 if index == 2 else 4)  # two weights, two biases
        assert [r.syncs_gradients for r in model_runtimes(model)] == [index == 2]
    assert_same_grads(model, reference)


@ranks(4)
@pytest.mark.parametrize("kind", ["dps", "dpr"])
def test_finalize_brings_out_what_a_part_keeps_back(rank, world_size, kind):
    model, reference = sharded(kind)
    set_requires_gradient_sync(model.layers[1], False)
    for seed in range(2):
        run(model, reference, seed, rank, world_size)
    assert stats(model).num_pending == 2 and model.layers[1].weight.grad is None
    finalize_grads(model)
    assert_same_grads(model, reference)
    set_requires_gradient_sync(model, True)
    run(model, reference, 2, rank, world_size)
    assert_same_grads(model, reference)


@ranks(4)
def test_an_untied_weight_goes_on_keeping_back(rank, world_size):
    class Tied(MLP):
        def __init__(self):
            super().__init__((16, 16, 16), bias=False)
            self.layers[1].weight = self.layers[0].weight

    model, reference = sharded("dps", build=lambda: Tied().double())
    set_requires_gradient_sync(model, False)
    for one in (model, reference):
        one.layers[1].weight = nn.Parameter(one.layers[1].weight.detach().clone())
    run(model, reference, 0, rank, world_size)
    assert stats(model).num_pending == 2 and all(p.grad is None for p in model.parameters())
    set_requires_gradient_sync(model, True)
    run(model, reference, 1, rank, world_size)
    assert_same_grads(model, reference)


class Branches(nn.Module):
    """``b`` is used where the microbatch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x, uses_b):
        x = torch.tanh(self.a(x))
        return self.head(torch.tanh(self.b(x)) if uses_b else x)


@ranks(4)
@pytest.mark.parametrize("kind", ["dps", "dpr"])
@pytest.mark.parametrize("syncs", ["last", "always"])
def test_a_layer_of_the_last_microbatch_only_in_two_dtypes(rank, world_size, kind, syncs):
    """16-bit parameters, gradients reduced in float32: the first gradient of one meets accumulated ones of others."""
    config = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, reference = sharded(kind, config, lambda: Branches().bfloat16())
    reference = reference.double()
    for index in range(3):
        set_requires_gradient_sync(model, syncs == "always" or index == 2)
        x = batch(index)
        mean_square(model(local_slice(x, rank, world_size).bfloat16(), index == 2).float()).backward()
        mean_square(reference(x, index == 2)).backward()
    assert all(param.grad.dtype is torch.bfloat16 for param in model.parameters())
    assert stats(model).num_pending == 0
    expected = full_gradients(reference)
    for name, grad in full_gradients(model).items():
        assert relative_error(grad, expected[name]) < 2e-2, name  # bfloat16's rounding of the activations


@ranks(4)
@pytest.mark.parametrize("kind", ["dps", "dpr"])
@pytest.mark.parametrize("checks", [False, True])
def test_a_hook_that_one_rank_alone_has(rank, world_size, kind, checks):
    """To log a weight's gradient: what the others communicate meanwhile keeps its order."""
    model, reference = sharded(kind, GTPConfig(check_param_states=checks))
    seen = []
    if rank == 0:
        model.layers[1].weight.register_hook(lambda grad: seen.append(grad.to_local().norm()))
    for seed in range(3):
        run(model, reference, seed, rank, world_size)
        assert_same_grads(model, reference)
    assert len(seen) == (3 if rank == 0 else 0)


@ranks(2)
def test_a_hook_on_a_whole_parameter_of_one_rank_alone_is_told(mesh, rank):
    """With ``check_param_states``: its gradient is reduced by itself there, and with all others elsewhere."""
    model = MLP(WIDTHS).double()
    parallelize_module(model, mesh, GTPStyle(GTPConfig(check_param_states=True), min_numel=30))
    if rank == 0:
        model.layers[1].bias.register_hook(lambda grad: None)
    with pytest.raises(RuntimeError, match=r"gradient for a hook.*'layers\.1\.bias'.*hooks on the same parameters"):
        mean_square(model(batch(0))).backward()
