"""How rows are cut and padded, and which mesh weights are stored on."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from gtp_dtensor import GTPStyle
from gtp_dtensor.layout import RowCut, storage_mesh
from tests.harness import ranks


@pytest.mark.parametrize("num_rows", [1, 2, 5, 7, 9, 16, 17, 40])
@pytest.mark.parametrize("axis_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("alignment", [1, 4, 16])
def test_rows_are_tiled_and_buffers_invert(num_rows, axis_size, alignment):
    cut = RowCut(num_rows, axis_size, alignment)
    spans = [cut.rows_of(rank) for rank in range(axis_size)]
    assert [row for start, length in spans for row in range(start, start + length)] == list(range(num_rows))
    assert [length for _, length in spans if length] == [len(c) for c in torch.arange(num_rows).chunk(axis_size)]
    assert cut.padded % alignment == 0 and cut.padded >= cut.chunk

    weight = torch.arange(1.0, num_rows * 3 + 1).view(num_rows, 3)
    parts = []
    for start, length in spans:
        part = torch.zeros(cut.padded, 3)
        part[:length] = weight[start : start + length]
        parts.append(part)
    buffer = torch.cat(parts)
    assert buffer.shape[0] == cut.buffer_rows
    assert torch.equal(cut.unpack(buffer), weight)
    assert torch.equal(cut.pack(weight), buffer)


@ranks(4)
@pytest.mark.parametrize("order", [("gtp", "tp"), ("tp", "gtp")])
@pytest.mark.parametrize("num_rows", [5, 7, 9, 17, 40])
def test_column_parallel_rows_are_cut_by_tp_first(rank, order, num_rows):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=order)
    model = torch.nn.Sequential(torch.nn.Linear(64, num_rows), torch.nn.Linear(num_rows, 64))
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(num_rows)[:, None].expand(num_rows, 64))
        model[1].weight.copy_(torch.arange(64)[:, None] + torch.arange(num_rows) / 64)
    expected = [model[0].weight.detach().clone(), model[1].weight.detach().clone()]
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=0))
    column, row = model[0].weight, model[1].weight
    assert column.device_mesh.mesh_dim_names == ("tp", "gtp") and column.device_mesh == row.device_mesh
    assert column.placements == (Shard(0), Shard(0)) and row.placements == (Shard(1), Shard(0))
    tp_rank, gtp_rank = mesh["tp"].get_local_rank(), mesh["gtp"].get_local_rank()
    mine = list(torch.arange(num_rows).chunk(2))[tp_rank].chunk(2)
    mine = mine[gtp_rank] if gtp_rank < len(mine) else torch.empty(0)
    assert column.to_local()[:, 0].tolist() == mine.tolist()
    assert torch.equal(column.full_tensor(), expected[0]) and torch.equal(row.full_tensor(), expected[1])
    for param in model.parameters():
        assert isinstance(param, DTensor) and param.device_mesh == column.device_mesh


@ranks(4)
def test_permuted_axis_gives_the_same_logical_weight(rank):
    permuted = DeviceMesh("cpu", [2, 0, 3, 1], mesh_dim_names=("gtp",))
    assert permuted.mesh.tolist() != sorted(permuted.mesh.tolist())  # the trap is armed
    model = torch.nn.Linear(16, 40)
    full = model.weight.detach().clone()
    dist.broadcast(full, 0)
    parallelize_module(model, permuted, GTPStyle(min_numel=0))
    assert torch.equal(model.weight.full_tensor(), full)
    assert torch.equal(model.weight.to_local(), full.chunk(4)[rank])
    y = model(torch.eye(16))
    assert torch.allclose(y - model.bias.to_local(), full.t())


@ranks(4)
def test_storage_mesh_reuses_groups(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
    num_groups = dist.get_pg_count()
    stored = storage_mesh(mesh["gtp"], mesh["tp"])
    assert dist.get_pg_count() == num_groups
    assert stored.get_group("gtp") is mesh["gtp"].get_group() and stored.get_group("tp") is mesh["tp"].get_group()
    gtp = mesh["gtp"]
    assert storage_mesh(gtp) is gtp


@ranks(2)
def test_whole_parameters_lie_on_the_same_mesh(mesh):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    parallelize_module(model, mesh, GTPStyle())
    assert model[0].weight.placements == (Shard(0),)
    for param in (model[0].bias, model[1].weight, model[1].bias):
        assert param.placements == (Replicate(),) and param.device_mesh == model[0].weight.device_mesh


class Grouped(torch.nn.Module):
    """A weight for each of some experts, used as torchtitan's grouped experts use theirs: locally."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.randn(8, 6, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.w.to_local() if isinstance(self.w, DTensor) else self.w
        return torch.einsum("ni,eoi->neo", x, w)


@ranks(8)
@pytest.mark.parametrize("gtp_first", [True, False])
def test_a_weight_on_two_model_parallel_axes_is_cut_further(rank, gtp_first):
    """Expert and expert tensor parallel axes at once, whole experts over gtp inside them."""
    axes = ("gtp", "ep", "etp") if gtp_first else ("ep", "gtp", "etp")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=axes)
    torch.manual_seed(0)
    model = Grouped()
    full = model.w.detach().clone()
    model.w = torch.nn.Parameter(distribute_tensor(full, mesh["ep", "etp"], [Shard(0), Shard(1)]))
    ep, etp, gtp = (mesh[name].get_local_rank() for name in ("ep", "etp", "gtp"))
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=0))
    assert model.w.device_mesh.mesh_dim_names == ("ep", "etp", "gtp")
    assert model.w.placements == (Shard(0), Shard(1), Shard(0))
    mine = full.chunk(2)[ep].chunk(2, dim=1)[etp]
    assert torch.equal(model.w.to_local(), mine.chunk(2)[gtp]) and torch.equal(model.w.full_tensor(), full)
    x = torch.randn(2, 3, 5)
    whole = full.clone().requires_grad_()
    torch.einsum("ni,eoi->neo", x.flatten(0, 1), whole).square().sum().div(2).backward()
    y = model(x[gtp])
    assert torch.allclose(y, torch.einsum("ni,eoi->neo", x[gtp], mine))
    y.square().sum().backward()
    assert torch.allclose(model.w.grad.full_tensor(), whole.grad, rtol=1e-6, atol=1e-6)
