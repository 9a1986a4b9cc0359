"""Expert parallelism with te.GroupedLinear, on a stand-in for TransformerEngine."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import CheckedLoadPlanner, GTPStyle, clip_grad_norm_, stats
from gtp_dtensor.te_experts import TEExpertParallel
from tests import te_stand_in as te
from tests import te_stand_in_ops as ops
from tests.harness import ranks
from tests.moe import ExpertParallel, MoEModel
from tests.reference import assert_close_to_reference, full, mean_square

DIM, NUM = 8, 4


class Experts(nn.Module):
    """Of this rank, behind hooks that bring it their tokens."""

    def __init__(self, num, dim, hidden):
        super().__init__()
        self.up, self.down = te.GroupedLinear(num, dim, hidden), ops.GroupedLinear(num, hidden, dim)
        for param in self.parameters():
            nn.init.uniform_(param, -0.5, 0.5)

    def forward(self, rows, counts):
        return self.down(self.up(rows, counts.tolist()).tanh(), counts)


def build(ep_mesh=None):
    size = 1 if ep_mesh is None else ep_mesh.size()
    model = MoEModel(2, DIM, num_experts=NUM, hidden=12, kind=lambda num, *sizes: Experts(num // size, *sizes))
    if ep_mesh is not None:
        for layer in model.layers:
            style = ExpertParallel()
            layer.moe.experts.register_forward_pre_hook(
                lambda module, args, style=style: style._dispatch(module, args, ep_mesh)
            )
            layer.moe.experts.register_forward_hook(
                lambda module, args, y, style=style: style._combine(module, y, ep_mesh)
            )
    return model


def shard(model, mesh):
    plan = {f"layers.*.moe.experts.{name}": TEExpertParallel() for name in ("up", "down")}
    parallelize_module(model, mesh["ep"], plan)
    parallelize_module(model, mesh["egtp"], GTPStyle(is_expert=True, modules=["layers.*.moe.experts"], min_numel=10))
    parallelize_module(model, mesh._flatten("gtp"), GTPStyle(min_numel=10))
    return model


def expected_of(values, name, num_ranks):
    """What an unsharded model's ``values`` are under ``name``."""
    if name.endswith(("up.weight", "down.weight")):
        return torch.stack([values[f"{name}{index}"] for index in range(NUM)])
    prefix, _, index = name.rpartition(".bias")
    if ".experts." in name:
        return torch.cat([values[f"{prefix}.bias{NUM // num_ranks * rank + int(index)}"] for rank in range(num_ranks)])
    return values[name]


@ranks(4)
@pytest.mark.parametrize("num_ep", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_experts_of_other_ranks(rank, num_ep, tmp_path):
    mesh = init_device_mesh("cpu", (4 // num_ep, num_ep), mesh_dim_names=("egtp", "ep"))
    with te.installed():
        torch.manual_seed(0)
        reference, model = build(), build(mesh["ep"])
        first = NUM // num_ep * mesh.get_local_rank("ep")
        with torch.no_grad():
            for name, param in model.named_parameters():
                head = name.rstrip("0123456789")
                name = f"{head}{first + int(name[len(head) :])}" if ".experts." in name else name
                param.copy_(reference.get_parameter(name))
        shard(model, mesh)
        stack = model.layers[0].moe.experts.up.weight
        assert stack.shape == (NUM, 12, DIM) and Shard(0) in stack.placements
        inputs = [torch.randn(5, 3, DIM, generator=torch.Generator().manual_seed(peer)) for peer in range(4)]
        for x in inputs:
            (mean_square(reference(x)) / 4).backward()
        mean_square(model(inputs[rank])).backward()
        wanted = {name: param.grad for name, param in reference.named_parameters()}
        found = {name: full(param.grad) for name, param in model.named_parameters()}
        assert_close_to_reference(found, {name: expected_of(wanted, name, num_ep) for name in found})
        norm = torch.nn.utils.get_total_norm([param.grad for param in reference.parameters()])
        assert_close_to_reference(clip_grad_norm_(model.parameters(), 1.0), norm)
        assert stats(model).live_lease_bytes == stats(model).num_pending == 0
        save(model.state_dict(), checkpoint_id=tmp_path)
        fresh = te.GroupedLinear(NUM, DIM, 12, bias=False)
        state = {"layers.1.moe.experts.up.weight": torch.empty(NUM, 12, DIM)}
        load(state, checkpoint_id=tmp_path, planner=CheckedLoadPlanner(strict=False))
        fresh.load_state_dict({"weight": state.popitem()[1]}, strict=False)
        assert torch.equal(fresh.weight3, reference.layers[1].moe.experts.up.weight3)


@ranks(4)
def test_initialisation_is_that_of_one_logical_stack(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("egtp", "ep"))
    with te.installed():
        torch.manual_seed(3)
        expected = [te.GroupedLinear(NUM, DIM, 12), ops.GroupedLinear(NUM, DIM, 12)]
        for cls, one in zip((te.GroupedLinear, ops.GroupedLinear), expected):
            experts = cls(NUM // 2, DIM, 12, device="meta")
            parallelize_module(experts, mesh["ep"], TEExpertParallel())
            parallelize_module(experts, mesh["egtp"], GTPStyle(is_expert=True, num_data_ranks=4, min_numel=10))
            experts.to_empty(device="cpu")
            torch.manual_seed(3)
            if cls is ops.GroupedLinear:
                expected[0].reset_parameters()
            experts.reset_parameters()
            assert all(
                torch.equal(full(experts.weight)[index], one.get_parameter(f"weight{index}")) for index in range(NUM)
            )


@ranks(2)
def test_bad_input(mesh):
    with te.installed():
        build_one = lambda **options: te.GroupedLinear(2, 32, 32, **options)  # noqa: E731
        with pytest.raises(ValueError, match="got a Linear"):
            parallelize_module(te.Linear(32, 32), mesh, TEExpertParallel())
        square = init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
        with pytest.raises(ValueError, match=r"2-D mesh with axes \('a', 'b'\)"):
            TEExpertParallel()._apply(build_one(), square)
        with pytest.raises(ValueError, match="is under GTP"):
            parallelize_module(parallelize_module(build_one(), mesh, GTPStyle()), mesh, TEExpertParallel())
        tensor_parallel = build_one(bias=False, tp_group=mesh.get_group(), parallel_mode="column")
        with pytest.raises(ValueError, match="tp_size=2"):
            parallelize_module(tensor_parallel, mesh, TEExpertParallel())
        experts = parallelize_module(build_one(), square["b"], TEExpertParallel())
        with pytest.raises(ValueError, match=r"weight of shape .*GTPStyle\(is_expert=True\)"):
            parallelize_module(experts, square["a"], GTPStyle(min_numel=0, replicate_mesh=mesh))
        marked = build_one()
        for param in marked.parameters():
            param.allreduce = False
        for style in (GTPStyle(), GTPStyle(is_expert=True, num_data_ranks=2)):
            with pytest.raises(ValueError, match="allreduce=False.*TEExpertParallel"):
                parallelize_module(marked, mesh, style)
