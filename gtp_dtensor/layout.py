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
    """How one dim of a tensor is cut over a mesh axis, and padded in communication buffers.

    ``chunk`` rows a rank is DTensor's own rule (the last ranks hold fewer, or none); with a ``block`` it is the next
    multiple of that. In a buffer every rank's part is ``padded`` rows long, a multiple of the alignment, so that all ranks send the same number of bytes. A *row* is an
    index of ``dim``: of dim 0 for most weights, of dim 1 where every expert of a stack is cut.
    """

    num_rows: int
    axis_size: int
    alignment: int = 1
    dim: int = 0
    block: int = 1

    @cached_property
    def chunk(self) -> int:
        num_blocks = -(-self.num_rows // self.block)
        return -(-num_blocks // self.axis_size) * self.block

    @cached_property
    def padded(self) -> int:
        return -(-self.chunk // self.alignment) * self.alignment

    @cached_property
    def buffer_rows(self) -> int:
        return self.padded * self.axis_size

    def rows_of(self, rank: int) -> tuple[int, int]:
        """(first row, number of rows) that ``rank`` of the axis stores."""
        start = min(rank * self.chunk, self.num_rows)
        return start, min(self.chunk, self.num_rows - start)

    def resized(self, shape: torch.Size, num_rows: int) -> torch.Size:
        """``shape`` with another number of rows."""
        return torch.Size((*shape[: self.dim], num_rows, *shape[self.dim + 1 :]))

    def first(self, tensor: torch.Tensor, num_rows: int) -> torch.Tensor:
        """The first ``num_rows`` rows: a view, or ``tensor`` itself where these are all."""
        return tensor if tensor.shape[self.dim] == num_rows else tensor.narrow(self.dim, 0, num_rows)

    def unpack(self, buffer: torch.Tensor) -> torch.Tensor:
        """The tensor with ``num_rows`` rows inside a gathered ``buffer`` with ``buffer_rows``.

        A view, except where the alignment leaves holes between the ranks' parts: then a copy.
        """
        if self.padded != self.chunk:
            parts = buffer.unflatten(self.dim, (self.axis_size, self.padded)).narrow(self.dim + 1, 0, self.chunk)
            buffer = parts.flatten(self.dim, self.dim + 1)
        return self.first(buffer, self.num_rows)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """The inverse of :meth:`unpack`: a contiguous buffer, padding zeroed."""
        if self.buffer_rows == self.num_rows:
            return tensor.contiguous()
        buffer = tensor.new_zeros(self.resized(tensor.shape, self.buffer_rows))
        if self.padded == self.chunk:
            buffer.narrow(self.dim, 0, self.num_rows).copy_(tensor)
        else:
            parts = buffer.unflatten(self.dim, (self.axis_size, self.padded))
            for rank in range(self.axis_size):
                start, length = self.rows_of(rank)
                parts.select(self.dim, rank).narrow(self.dim, 0, length).copy_(tensor.narrow(self.dim, start, length))
        return buffer


def new_dtensor(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """``local`` as a DTensor without a graph. Past ``DTensor.__init__``, which does nothing but costs ten microseconds
    on a slow host."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def share_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are in one piece of memory, on a meta device too."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both are the same elements of one piece of memory."""
    same_part = one.shape == other.shape and one.storage_offset() == other.storage_offset()
    return same_part and share_storage(one, other)


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


def replica_axis(mesh: DeviceMesh | None, option: str, gtp_mesh: DeviceMesh) -> DeviceMesh | None:
    """``mesh`` where it is a 1-D axis beside gtp; None where it has one rank only.

    Raises:
        ValueError: it has several axes, shares ranks with the gtp axis, or lies on other devices.
    """
    if mesh is None:
        return None
    what = (
        f"GTPStyle({option}=...): the mesh with axes {mesh.mesh_dim_names or '(unnamed)'} of sizes {tuple(mesh.shape)}"
    )
    if mesh.ndim != 1:
        raise ValueError(f"{what} has {mesh.ndim} axes and must have one: pass mesh[{mesh.mesh_dim_names}]._flatten()")
    if mesh.device_type != gtp_mesh.device_type:
        raise ValueError(f"{what} is on {mesh.device_type} and the gtp axis on {gtp_mesh.device_type}")
    shared = set(mesh.mesh.tolist()) & set(gtp_mesh.mesh.tolist()) - {dist.get_rank()}
    if shared:
        raise ValueError(
            f"{what} shares ranks {sorted(shared)} with the gtp axis {gtp_mesh.mesh.tolist()}: it has to be another axis "
            "of the same mesh, such as mesh['dp_shard']"
        )
    return mesh if mesh.size() > 1 else None


def axis_name(mesh: DeviceMesh, default: str) -> str:
    """What a 1-D mesh calls its axis."""
    return mesh.mesh_dim_names[0] if mesh.mesh_dim_names else default


def storage_mesh(
    gtp_mesh: DeviceMesh,
    tp_mesh: DeviceMesh | None = None,
    shard_mesh: DeviceMesh | None = None,
    replicate_mesh: DeviceMesh | None = None,
) -> DeviceMesh:
    """The mesh that parameters are stored on, its axes in cutting order: (replicate, all of ``tp_mesh``, gtp, optimizer
    shard), those that are there.

    Built from the existing process groups, so it costs no communicator. Collective over all axes.

    Raises:
        ValueError: the axes do not form one grid, or ranks do not ascend along its lines; on all ranks alike.
    """
    defaults = {"replicate": replicate_mesh, "tp": tp_mesh, "gtp": gtp_mesh, "optimizer_shard": shard_mesh}
    axes = []
    for default, mesh in defaults.items():
        if mesh is not None:
            own_names = mesh.mesh_dim_names or [default, *(f"{default}{axis}" for axis in range(1, mesh.ndim))]
            axes += zip(own_names, mesh.get_all_groups())
    groups = [group for _, group in axes]
    if len(axes) == 1 and gtp_mesh.mesh.tolist() == dist.get_process_group_ranks(groups[0]):
        return gtp_mesh
    grid = torch.tensor(dist.get_process_group_ranks(groups[-1]), device="cpu")  # also under torch.device("meta")
    for group in reversed(groups[:-1]):
        grid = torch.stack(_grids_of_peers(grid, group, gtp_mesh.device_type))
    names = tuple(name for name, _ in axes)
    lines = [] if tp_mesh is None else _lines(tp_mesh)
    descending = [ranks for ranks, group in lines if ranks != dist.get_process_group_ranks(group)]
    is_good = grid.unique().numel() == grid.numel() and dist.get_rank() in grid and not descending
    if not _all_agree(grid, is_good, groups, gtp_mesh.device_type):
        raise ValueError(
            f"mesh axes {names} do not form one grid of ranks in which the ranks of each line ascend (torch sorts the ranks of "
            f"a process group). Rank {dist.get_rank()} finds {grid.tolist()}"
            + "".join(f", and the line {ranks} of the mesh" for ranks in descending)
            + ": build the meshes with ascending ranks along their axes"
        )
    if len(set(names)) != len(names):
        raise ValueError(f"two of the mesh axes {names} have the same name: name them apart")
    mesh = DeviceMesh.from_group(
        groups if len(groups) > 1 else groups[0],
        gtp_mesh.device_type,
        mesh=grid.int() if len(groups) > 1 else None,
        mesh_dim_names=names,
    )
    expected = tuple(group.rank() for group in groups)
    assert tuple(mesh.get_coordinate()) == expected, "a rank's coordinate must be its rank in the group of each axis"
    return mesh


def _all_agree(grid: torch.Tensor, is_good: bool, groups: list[dist.ProcessGroup], device_type: str) -> bool:
    """Whether every rank has the same ``grid`` and finds it good."""
    real = [group for group in groups if group.size() > 1 and dist.get_backend(group) != "fake"]
    for group in [*real, *real]:  # twice: what one rank finds reaches the others by way of all axes
        mine = torch.cat([grid.flatten(), grid.new_tensor([is_good])])
        for peer in _grids_of_peers(mine, group, device_type):
            is_good = is_good and torch.equal(peer[:-1], mine[:-1]) and bool(peer[-1])
    return is_good


def _lines(mesh: DeviceMesh) -> list[tuple[list[int], dist.ProcessGroup]]:
    """For each axis: this rank's peers along it in the order of the mesh, and the group of the axis."""
    coordinate = mesh.get_coordinate()
    lines = []
    for axis in range(mesh.ndim):
        place = tuple(slice(None) if other == axis else at for other, at in enumerate(coordinate))
        lines.append((mesh.mesh[place].tolist(), mesh.get_group(axis)))
    return lines


def _grids_of_peers(grid: torch.Tensor, group: dist.ProcessGroup, device_type: str) -> list[torch.Tensor]:
    """``grid`` (ranks along the axes inside this one) as every rank of ``group`` has it, in their order."""
    if group.size() == 1:
        return [grid]
    if dist.get_backend(group) == "fake":  # no bytes move: rely on the regular grid that init_device_mesh builds
        return [grid - dist.get_rank() + peer for peer in dist.get_process_group_ranks(group)]
    device = torch.device("cpu")
    if device_type != "cpu":
        device = torch.device(device_type, torch.get_device_module(device_type).current_device())
    mine = grid.to(device)
    peers = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(peers, mine, group=group)
    return [peer.cpu() for peer in peers]


@dataclass(frozen=True)
class TPLayout:
    """The model-parallel part of a parameter's layout (tensor parallel, or expert and expert tensor parallel): what a
    module sees of it inside forward."""

    mesh: DeviceMesh
    spec: DTensorSpec  # over the logical shape, in the parameter's own dtype

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One for each axis of the mesh."""
        return self.spec.placements

    def wrap(self, local: torch.Tensor) -> DTensor:
        """``local`` as the DTensor on the mesh that a model-parallel module computes with."""
        spec = self.spec
        if local.dtype != spec.tensor_meta.dtype:
            meta = TensorMeta(spec.tensor_meta.shape, spec.tensor_meta.stride, local.dtype)
            spec = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
        return new_dtensor(local, spec)

    def unwrap_grad(self, grad: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """(this rank's gradient of its local part, whether a sum over the mesh, of one axis then, is still owed)."""
        if not isinstance(grad, DTensor):
            return grad, False
        placements = grad.placements
        if placements == self.placements:
            return grad._local_tensor, False
        if len(placements) == 1 and isinstance(self.placements[0], Replicate):
            (placement,) = placements
            if placement.is_partial() and placement.reduce_op == "sum":
                return grad._local_tensor, True
        return grad.redistribute(self.mesh, self.placements)._local_tensor, False


def tp_layout(param: torch.Tensor, gtp_mesh: DeviceMesh, fqn: str) -> TPLayout | None:
    """The model-parallel layout of ``param``, or None for a plain tensor.

    Raises:
        ValueError: a DTensor on a mesh that cannot be combined with the gtp axis.
    """
    if not isinstance(param, DTensor):
        return None
    mesh = param.device_mesh
    where = f"{fqn} of shape {tuple(param.shape)} is a DTensor on mesh axes {mesh.mesh_dim_names or '(unnamed)'}"
    shared = (set(mesh.mesh.flatten().tolist()) & set(gtp_mesh.mesh.tolist())) - {dist.get_rank()}
    if shared:
        raise ValueError(
            f"{where} of sizes {tuple(mesh.shape)}, which shares ranks {sorted(shared)} with the gtp axis "
            f"{gtp_mesh.mesh.tolist()}: apply tensor parallelism first, to axes of its own that are orthogonal to gtp, "
            "GTPStyle after it, and other sharding last (a weight can be given to GTPStyle only once). Experts on an expert-"
            "parallel mesh take a GTPStyle(is_expert=True) of their own, before the dense weights'"
        )
    for placement in param.placements:
        if type(placement) is not Shard and type(placement) is not Replicate:
            raise ValueError(f"{where} with placement {placement}: only Shard and Replicate can be cut further")
    return TPLayout(mesh, param._spec)


@dataclass(frozen=True)
class WeightLayout:
    """How one weight is stored, on this rank.

    Attributes:
        tp_local_shape: of what a GEMM of this rank reads: the logical weight's, or its part where model parallelism
            cuts it.
        cut: of that, over the gtp axis.
        replica_cut: of this rank's part of that, over the optimizer shard axis; None where there is none.
        tp: the model-parallel layout; None for plain tensors.
        is_stack: whether it is one matrix for each expert.
    """

    tp_local_shape: torch.Size
    cut: RowCut
    replica_cut: RowCut | None
    tp: TPLayout | None
    is_stack: bool = False

    def stored_part(self, tp_local: torch.Tensor, gtp_rank: int, replica_rank: int) -> torch.Tensor:
        """What a rank stores of the TP-local weight: a view."""
        part = tp_local.narrow(self.cut.dim, *self.cut.rows_of(gtp_rank))
        if self.replica_cut is not None:
            part = part.narrow(self.replica_cut.dim, *self.replica_cut.rows_of(replica_rank))
        return part


def weight_layout(
    tp_local_shape: torch.Size,
    tp: TPLayout | None,
    axis_size: int,
    rank: int,
    num_replicas: int | None,
    alignment: int,
    is_expert: bool,
) -> WeightLayout:
    """The layout of a weight on rank ``rank`` of a gtp axis, with ``num_replicas`` along the optimizer shard axis.

    Rows of dim 0 are cut. Of a stack of experts (experts, out, in) these are whole experts; where an axis does not
    divide their number, it cuts the out features of each of them instead, or most of its ranks would hold nothing.
    """

    is_stack = is_expert and len(tp_local_shape) > 2

    def cut_of(shape: torch.Size, size: int, alignment: int, least_dim: int = 0) -> RowCut:
        dim = 1 if is_stack and shape[0] % size else least_dim
        return RowCut(shape[dim], size, 1 if is_stack and dim == 0 else alignment, dim)

    cut = cut_of(tp_local_shape, axis_size, alignment)
    replica_cut = None
    if num_replicas is not None:
        shard_shape = cut.resized(tp_local_shape, cut.rows_of(rank)[1])
        # An axis inside one that cuts dim 1 cuts it further, so that the order of cuts is that of the placements.
        replica_cut = cut_of(shard_shape, num_replicas, 1, cut.dim)
    return WeightLayout(tp_local_shape, cut, replica_cut, tp, is_stack)
