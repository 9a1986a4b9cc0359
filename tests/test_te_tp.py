"""TransformerEngine's own tensor and sequence parallelism under GTP, on a stand-in for it; tests/test_te_gpu_tp.py has the
real one."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPConfig, GTPStyle, stats
from gtp_dtensor.members import STATE
from gtp_dtensor.te import amax_group
from tests import te_stand_in as te
from tests.harness import ranks
from tests.reference import assert_close_to_reference, full, full_parameters, mean_square

DIM = 256


def batch_of(rank, rows=12, dim=32):
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(rank))


def slice_of(whole, shape, mesh):
    """This rank's part of a parameter of ``whole``, where TE holds one of ``shape``."""
    dims = [dim for dim in range(whole.dim()) if shape[dim] != whole.shape[dim]]
    return (whole.chunk(2, dims[0])[mesh.get_local_rank("tp")] if dims else whole).detach().contiguous()


def copy_slices(model, reference, mesh):
    for (name, param), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        value = slice_of(whole, param.shape, mesh)
        if isinstance(param, te.QuantizedTensor):
            param.get_high_precision_init_val = lambda value=value: value
        else:
            param.data.copy_(value)


def randomize_vectors(model):
    for param in model.parameters():
        if param.dim() == 1:
            nn.init.uniform_(param, 0.5, 1.5)


def mode(mesh, name, **options):
    return {} if mesh is None else {"tp_group": mesh.get_group("tp"), "parallel_mode": name, **options}


def gradients(model):
    return {name: full(param.grad) for name, param in model.named_parameters()}


@ranks(4)
@pytest.mark.parametrize("is_sharded", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sequence_parallelism(is_sharded):
    """Norms and biases behind row-parallel linears have gradients of this rank's tokens only."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))

    def build(mesh=None):
        options = {"sequence_parallel": True}
        first = te.LayerNormLinear(32, 48, **mode(mesh, "column", **options))
        return nn.Sequential(first, te.Linear(48, 32, **mode(mesh, "row", **options)))

    with te.installed():
        torch.manual_seed(0)
        reference, model = build(), build(mesh)
        randomize_vectors(reference)
        copy_slices(model, reference, mesh)
        parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=100 if is_sharded else 10_000))
        rank, tokens = mesh.get_local_rank("gtp"), mesh.get_local_rank("tp")
        inputs = [batch_of(peer).requires_grad_() for peer in range(2)]
        for x in inputs:
            (mean_square(reference(x)) / 2).backward()
        mine = inputs[rank].detach().chunk(2)[tokens].clone().requires_grad_()
        (mean_square(model(mine)) / 2).backward()  # of half of the tokens
        assert_close_to_reference(mine.grad, 2 * inputs[rank].grad.chunk(2)[tokens])
        assert_close_to_reference(gradients(model), gradients(reference))
        assert stats(model).num_sharded_weights == (2 if is_sharded else 0)


@ranks(4)
@pytest.mark.parametrize("kind", ["current", "delayed"])
def test_slices_in_fp8_are_those_of_te(kind):
    """Beside TE's own tensor parallelism without GTP: y and dx to the last bit."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))

    def build(recipe):
        with te.quantized_model_init(recipe):
            first = te.LayerNormLinear(DIM, 2 * DIM, **mode(mesh, "column"))
            return nn.Sequential(first, te.Linear(2 * DIM, DIM, **mode(mesh, "row")))

    with te.installed():
        torch.manual_seed(0)
        whole = nn.Sequential(te.LayerNormLinear(DIM, 2 * DIM), te.Linear(2 * DIM, DIM))
        randomize_vectors(whole)
        with torch.no_grad():
            whole[0].weight[0] = whole[1].weight[:, 0] = 3.0  # in the first slice
        recipe = te.Recipe(kind)
        model, reference = build(recipe), build(None)
        for one in (model, reference):
            copy_slices(one, whole, mesh)
        config = GTPConfig(calculate_per_token_loss=True)
        parallelize_module(model, mesh["gtp"], GTPStyle(config, min_numel=1000))
        weight = model[1].__dict__[STATE].weights["weight"]
        assert weight.wire_name == "fp8"
        group = amax_group(model)
        for step in range(3):
            x = [batch_of(step, dim=DIM).requires_grad_() for _ in range(2)]
            with te.autocast(recipe, group):
                y = [one(part) for one, part in zip((model, reference), x)]
            for part in y:
                mean_square(part).backward()
            assert torch.equal(y[0], y[1]) and torch.equal(x[0].grad, x[1].grad), step
            for name, param in reference.named_parameters():
                mine = slice_of(full(model.get_parameter(name).grad), param.shape, mesh)
                assert_close_to_reference(mine, 2 * param.grad)
            with torch.no_grad():
                for one in (model, reference):
                    for param in one.parameters():
                        param.sub_(1e-3)
                        param.grad = None
        inverse = next(value for key, value in weight.quantized.amax.items() if key.value == "inverse").flatten()[:1]
        others = [torch.empty_like(inverse) for _ in range(2)]
        dist.all_gather(others, inverse.contiguous(), group=mesh.get_group("tp"))
        assert torch.equal(*others) == (kind == "delayed")  # the case under test arose
        with torch.no_grad():  # in one slice: all ranks are told
            model[1].weight._local_tensor.fill_(float("nan") if mesh.get_local_rank("tp") else 1.0)
        with pytest.raises(RuntimeError, match=r"1\.weight: the weight holds NaN"), te.autocast(recipe, group):
            model(x[0])


@ranks(4)
def test_experts_whose_features_are_cut():
    """TE leaves the communication to the user, and the weights are slices."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
    splits = [5, 0, 7]

    def build(mesh=None):
        first = te.GroupedLinear(3, 32, 48, bias=False, **mode(mesh, "column"))
        return nn.Sequential(first, te.GroupedLinear(3, 48, 16, bias=False, **mode(mesh, "row")))

    with te.installed():
        torch.manual_seed(0)
        reference, model = build(), build(mesh)
        copy_slices(model, reference, mesh)
        parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=100))
        weights = [layer.__dict__[STATE].weights["weight"] for layer in model]
        assert [tuple(weight.tp_local_shape) for weight in weights] == [(3, 24, 32), (3, 16, 24)]
        assert [tuple(weight.spec.shape) for weight in weights] == [(3, 48, 32), (3, 16, 48)]
        rank = mesh.get_local_rank("gtp")
        inputs = [batch_of(peer).requires_grad_() for peer in range(2)]
        for x in inputs:
            (mean_square(reference[1](reference[0](x, splits).tanh(), splits)) / 2).backward()
        x = inputs[rank].detach().clone().requires_grad_()
        partial = model[1](model[0](x, splits).tanh(), splits)
        y = partial.detach().clone()
        dist.all_reduce(y, group=mesh.get_group("tp"))
        partial.backward(torch.autograd.grad(mean_square(y.requires_grad_()), y)[0])
        dist.all_reduce(x.grad, group=mesh.get_group("tp"))
        assert_close_to_reference(x.grad, 2 * inputs[rank].grad)
        for layer, other in zip(model, reference):
            found, expected = full(layer.weight.grad), torch.stack([param.grad for param in other.parameters()])
            assert_close_to_reference(found, expected)
        values = full_parameters(model)
        assert torch.equal(values["0.weight"][2], reference[0].weight2)
        assert stats(model).num_forward_gathers == 2
