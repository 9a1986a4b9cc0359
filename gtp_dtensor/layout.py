"""Meshes, cutting order and padding arithmetic: how a logical weight is stored, gathered and reduced.

A weight is cut first by ``tp`` (on the dim its tensor-parallel style chose), then by ``gtp`` on dim 0. The *storage
mesh* lists its axes in that cutting order, so every stored weight is described by plain ``Shard`` placements that
read from left to right. It is private to the library and is never flattened: torch returns wrong ``full_tensor()``
results, without an error, where the ranks of an axis do not ascend as they do in its process group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


@dataclass(frozen=True)
class RowCut:
    """How dim 0 of one TP-local weight is cut over the gtp axis, and padded in communication buffers.

    ``chunk`` rows a rank is DTensor's own rule (the last ranks hold fewer, or none). In a buffer every rank's part
    is ``padded`` rows long, a multiple of the alignment, so that all ranks send the same number of bytes.
    """

    num_rows: int
    axis_size: int
    alignment: int = 1

    @cached_property
    def chunk(self) -> int:
        return -(-self.num_rows // self.axis_size)

    @cached_property
    def padded(self) -> int:
        return -(-self.chunk // self.alignment) * self.alignment

    @cached_property
    def buffer_rows(self) -> int:
        return self.padded * self.axis_size

    def rows_of(self, rank: int) -> tuple[int, int]:
        """(first row, number of rows) that ``rank`` of the gtp axis stores."""
        start = min(rank * self.chunk, self.num_rows)
        return start, min(self.chunk, self.num_rows - start)

    def unpack(self, buffer: torch.Tensor) -> torch.Tensor:
        """The TP-local weight (num_rows, ...) inside a gathered ``buffer`` (buffer_rows, ...).

        A view, except where the alignment leaves holes between the ranks' parts: then a copy.
        """
        if self.padded != self.chunk:
            parts = buffer.view(self.axis_size, self.padded, *buffer.shape[1:])[:, : self.chunk]
            buffer = parts.reshape(self.axis_size * self.chunk, *buffer.shape[1:])
        return buffer[: self.num_rows] if buffer.shape[0] != self.num_rows else buffer

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`unpack`: (num_rows, ...) to a contiguous buffer (buffer_rows, ...), padding zeroed."""
        if self.buffer_rows == self.num_rows:
            return weight.contiguous()
        buffer = weight.new_zeros(self.buffer_rows, *weight.shape[1:])
        if self.padded == self.chunk:
            buffer[: self.num_rows] = weight
        else:
            parts = buffer.view(self.axis_size, self.padded, *weight.shape[1:])
            for rank in range(self.axis_size):
                start, length = self.rows_of(rank)
                parts[rank, :length] = weight[start : start + length]
        return buffer


def new_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """``local`` as a DTensor without a graph. Past ``DTensor.__init__``, which does nothing but costs ten microseconds on
    a slow host."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def check_replacement(param: torch.Tensor, spec: DTensorSpec, local_shape: torch.Size, fqn: str) -> None:
    """Raise ``RuntimeError`` where ``param``, which took the place of a parameter, is not stored as that one was."""
    is_dtensor = isinstance(param, DTensor)
    if (
        is_dtensor
        and param._spec.placements == spec.placements
        and param._spec.mesh == spec.mesh
        and param.shape == spec.shape
        and param._local_tensor.shape == local_shape
    ):
        return
    found = f"DTensor{tuple(param.placements)}" if is_dtensor else type(param).__name__
    raise RuntimeError(
        f"{fqn}: the parameter was replaced by a {found} of shape {tuple(param.shape)}; GTP needs a DTensor with "
        f"placements {spec.placements} on mesh axes {spec.mesh.mesh_dim_names} and shape {tuple(spec.shape)} (load such a "
        "one, or copy values into the existing parameter)"
    )


def gtp_axis_name(mesh: DeviceMesh) -> str:
    """What a 1-D gtp mesh calls its axis; "gtp" where it has no names."""
    return mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "gtp"


def check_gtp_mesh(mesh: DeviceMesh | None) -> DeviceMesh:
    """``mesh`` where it is a 1-D gtp axis.

    Raises:
        ValueError: it is missing, or has more than one axis; the message names the axes and what to pass instead.
    """
    if mesh is None:
        raise ValueError(
            "GTPStyle needs the 1-D mesh of the gtp axis and got none: "
            'call parallelize_module(model, mesh["gtp"], GTPStyle())'
        )
    if mesh.ndim != 1:
        axes = ", ".join(f"{n}={s}" for n, s in zip(mesh.mesh_dim_names or ["?"] * mesh.ndim, mesh.shape))
        names = mesh.mesh_dim_names or ()
        hint = "gtp" if "gtp" in names or not names else names[0]
        raise ValueError(
            f"GTPStyle needs the 1-D mesh of the gtp axis and got a {mesh.ndim}-D mesh ({axes}): "
            f'pass a slice of it, such as mesh["{hint}"]'
        )
    return mesh


def storage_mesh(gtp_mesh: DeviceMesh, gtp_group: dist.ProcessGroup, tp_mesh: DeviceMesh | None) -> DeviceMesh:
    """The mesh that parameters are stored on: axes (tp, gtp), or (gtp,) where nothing is tensor parallel.

    Built from the existing process groups, so it costs no communicator. Collective over gtp where tp is present.

    Raises:
        ValueError: the ranks of the tp axis do not ascend, or tp and gtp do not form a grid.
    """
    gtp_ranks = dist.get_process_group_ranks(gtp_group)
    if tp_mesh is None:
        if gtp_mesh.mesh.tolist() == gtp_ranks:
            return gtp_mesh
        return DeviceMesh.from_group(gtp_group, gtp_mesh.device_type, mesh_dim_names=(gtp_axis_name(gtp_mesh),))
    tp_group = tp_mesh.get_group()
    tp_ranks = dist.get_process_group_ranks(tp_group)
    if tp_mesh.mesh.tolist() != tp_ranks:
        raise ValueError(
            f"the ranks of mesh axis {tp_mesh.mesh_dim_names} must ascend and are {tp_mesh.mesh.tolist()}: "
            "build the mesh with ascending ranks along its tensor-parallel axis"
        )
    columns = _tp_ranks_of_gtp_peers(tp_ranks, gtp_ranks, gtp_group, gtp_mesh.device_type)
    grid = torch.tensor(columns, dtype=torch.int).t().contiguous()
    if grid.unique().numel() != grid.numel() or dist.get_rank() not in grid:
        raise ValueError(f"tp ranks {tp_ranks} and gtp ranks {gtp_ranks} do not form a grid: {grid.tolist()}")
    tp_name = tp_mesh.mesh_dim_names[0] if tp_mesh.mesh_dim_names else "tp"
    names = (tp_name, gtp_axis_name(gtp_mesh))
    mesh = DeviceMesh.from_group([tp_group, gtp_group], gtp_mesh.device_type, mesh=grid, mesh_dim_names=names)
    expected = (tp_ranks.index(dist.get_rank()), gtp_ranks.index(dist.get_rank()))
    assert tuple(mesh.get_coordinate()) == expected, "a rank's coordinate must be its rank in the group of each axis"
    return mesh


def _tp_ranks_of_gtp_peers(
    tp_ranks: list[int], gtp_ranks: list[int], gtp_group: dist.ProcessGroup, device_type: str
) -> list[list[int]]:
    """For each gtp peer, in order, the ranks of its tp group."""
    if dist.get_backend(gtp_group) == "fake":  # no bytes move: rely on the regular grid that init_device_mesh builds
        return [[rank - dist.get_rank() + peer for rank in tp_ranks] for peer in gtp_ranks]
    device = (
        torch.device(device_type, torch.get_device_module(device_type).current_device())
        if device_type != "cpu"
        else torch.device("cpu")
    )
    mine = torch.tensor(tp_ranks, dtype=torch.int64, device=device)
    peers = [torch.empty_like(mine) for _ in gtp_ranks]
    dist.all_gather(peers, mine, group=gtp_group)
    return [peer.tolist() for peer in peers]


@dataclass(frozen=True)
class TPLayout:
    """The tensor-parallel part of a parameter's layout: what a module sees of it inside forward."""

    mesh: DeviceMesh
    placement: Placement
    spec: DTensorSpec  # over the logical shape, in the parameter's own dtype

    def wrap(self, local: torch.Tensor) -> DTensor:
        """``local`` as the DTensor on the tp mesh that a tensor-parallel module computes with."""
        spec = self.spec
        if local.dtype != spec.tensor_meta.dtype:
            meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
        return new_dtensor(local, spec)

    def unwrap_grad(self, grad: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """(this rank's gradient of its TP-local part, whether a sum over tp is still owed)."""
        if not isinstance(grad, DTensor):
            return grad, False
        placement = grad.placements[0]
        if placement == self.placement:
            return grad._local_tensor, False
        if placement.is_partial() and placement.reduce_op == "sum" and isinstance(self.placement, Replicate):
            return grad._local_tensor, True
        return grad.redistribute(self.mesh, [self.placement])._local_tensor, False


def tp_layout(param: torch.Tensor, gtp_mesh: DeviceMesh, fqn: str) -> TPLayout | None:
    """The tensor-parallel layout of ``param``, or None for a plain tensor.

    Raises:
        ValueError: a DTensor on a mesh that cannot be combined with the gtp axis.
    """
    if not isinstance(param, DTensor):
        return None
    mesh = param.device_mesh
    where = f"{fqn} of shape {tuple(param.shape)} is a DTensor on mesh axes {mesh.mesh_dim_names or '(unnamed)'}"
    if mesh.ndim != 1:
        raise ValueError(
            f"{where} of sizes {tuple(mesh.shape)}: GTPStyle can be combined with one tensor-parallel axis; "
            "apply TP to a 1-D mesh first, GTPStyle after it, and other sharding last"
        )
    own = {dist.get_rank()}
    shared = (set(mesh.mesh.tolist()) & set(gtp_mesh.mesh.tolist())) - own
    if shared:
        raise ValueError(
            f"{where}, which shares ranks {sorted(shared)} with the gtp axis {gtp_mesh.mesh.tolist()}: tensor "
            "parallelism needs an axis of its own, orthogonal to gtp (a weight can be given to GTPStyle only once)"
        )
    placement = param.placements[0]
    if type(placement) is not Shard and type(placement) is not Replicate:
        raise ValueError(f"{where} with placement {placement}: only Shard and Replicate can be cut further")
    return TPLayout(mesh, placement, param._spec)
