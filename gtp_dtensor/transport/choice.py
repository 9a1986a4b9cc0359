"""Which transport an axis gets: symmetric memory where it is asked for and all ranks reach each other's devices."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .collective import CollectiveTransport
from .fabric import Fabric
from .symmetric import SymmetricTransport

logger = logging.getLogger(__name__)

_MOST_RANKS = 72  # that torch's symmetric memory serves
_SHARES_DEVICES = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@dataclass(frozen=True)
class Surroundings:
    """What one rank sees.

    Attributes:
        host: of the running kernel of its host.
        device: its GPU, by UUID.
        reached: the GPUs that this one reaches over NVLink.
        lacks: why it cannot take part at all; None where it can.
        is_alone: whether this process sees no GPU but its own.
    """

    host: str
    device: str
    reached: frozenset[str] = field(default_factory=frozenset)
    lacks: str | None = None
    is_alone: bool = False


def reason_against(everyones: Sequence[Surroundings], may_share: bool = False) -> str | None:
    """Why ranks with these surroundings, in rank order, cannot use symmetric memory; None where they can.

    Args:
        may_share: several ranks may be on one device.
    """
    if len(everyones) > _MOST_RANKS:
        return f"it serves at most {_MOST_RANKS} ranks"
    for rank, mine in enumerate(everyones):
        if mine.lacks is not None:
            return f"rank {rank}: {mine.lacks}"
        for peer, theirs in enumerate(everyones[:rank]):
            if theirs.host != mine.host:
                return f"ranks {peer} and {rank} are on different hosts"
            if theirs.device == mine.device:
                if not may_share:
                    return f"ranks {peer} and {rank} share one GPU"
            elif mine.is_alone or theirs.is_alone:
                return (
                    f"rank {rank if mine.is_alone else peer} sees its own GPU only, and not that of rank "
                    f"{peer if mine.is_alone else rank} (CUDA_VISIBLE_DEVICES, or a launcher that gives each task one GPU)"
                )
            elif theirs.device not in mine.reached or mine.device not in theirs.reached:
                return f"the GPUs of ranks {peer} and {rank} do not reach each other over NVLink"
    return None


def choose_transport(requested: str, mesh: DeviceMesh, device: torch.device, name: str) -> CollectiveTransport:
    """The transport of a 1-D gtp mesh, as ``GTPConfig.transport`` asks for. Collective over the mesh.

    Raises:
        ValueError: "symmetric" cannot be served; the message names the axis, the ranks and the remedy.
    """
    group = mesh.get_group()
    axis = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else "gtp"
    where = f"mesh axis '{axis}' of size {group.size()}"
    if requested == "collective" or group.size() == 1:
        return CollectiveTransport(group, device, name)
    reason = _reason_against(
        group, device, may_share=requested == "symmetric" and os.environ.get(_SHARES_DEVICES) == "1"
    )
    if reason is not None and requested == "symmetric":
        raise ValueError(
            f"GTPConfig.transport='symmetric' on {where}: {reason}; set it to 'auto' or 'collective', or lay the axis "
            "over GPUs of one NVLink domain"
        )
    if reason is None:
        if requested == "symmetric":
            transport = _symmetric(group, device, name, axis, _fabric(device))
        else:
            transport, reason = _symmetric_if_all_can(group, device, name, axis)
    if group.rank() == 0:
        what = "symmetric memory, by copy engine" if reason is None else f"collectives: {reason}"
        logger.info("GTP: %s: transport %s is %s", where, f"'{requested}'", what)
    return transport if reason is None else CollectiveTransport(group, device, name)


def _fabric(device: torch.device) -> Fabric:
    from .cuda import CudaFabric

    return CudaFabric(device)


def _symmetric(
    group: dist.ProcessGroup, device: torch.device, name: str, axis: str, fabric: Fabric
) -> SymmetricTransport:
    return SymmetricTransport(group, device, name, fabric, axis)


def _symmetric_if_all_can(
    group: dist.ProcessGroup, device: torch.device, name: str, axis: str
) -> tuple[SymmetricTransport | None, str | None]:
    """(the transport, None), or where sharing memory fails on some rank, as in containers that forbid it, (None, the
    reason): on all ranks alike."""
    # Whoever has no fabric must not be waited for in what follows, which is collective.
    fabric, reason = _if_all_can(group, lambda: _fabric(device))
    if reason is not None:
        return None, reason
    return _if_all_can(group, lambda: _symmetric(group, device, name, axis, fabric))


def _if_all_can(group: dist.ProcessGroup, make: Callable[[], Any]) -> tuple[Any, str | None]:
    """(what it made, None), or where it raised on some rank, (None, the reason)."""
    made = error = None
    try:
        made = make()
    except RuntimeError as failure:
        error = str(failure).partition("\n")[0]
    errors: list = [None] * group.size()
    dist.all_gather_object(errors, error, group=group)
    rank = next((rank for rank, found in enumerate(errors) if found is not None), None)
    return (made, None) if rank is None else (None, f"rank {rank} could not share memory: {errors[rank]}")


def _reason_against(group: dist.ProcessGroup, device: torch.device, may_share: bool) -> str | None:
    """The same on all ranks."""
    if device.type != "cuda":
        return f"it needs CUDA devices, and these are {device.type}"
    if dist.get_backend(group) == "fake":
        return "the process group is fake"
    everyones: list = [None] * group.size()
    dist.all_gather_object(everyones, surroundings(device), group=group)
    return reason_against(everyones, may_share)


def surroundings(device: torch.device) -> Surroundings:
    """This rank's."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else ''}"
    uuids = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    links = _nvlinks(len(uuids))
    reached = {
        uuid
        for index, uuid in enumerate(uuids)
        if index != device.index
        and torch.cuda.can_device_access_peer(device.index, index)
        and links[device.index][index]
    }
    return Surroundings(
        host, uuids[device.index], frozenset(reached), _what_is_missing(device), is_alone=len(uuids) == 1
    )


def _nvlinks(num_devices: int) -> list[list[int]]:
    """How many links each device has to each other one; 1 where torch cannot tell."""
    from torch._C import _distributed_c10d as c10d
    from torch._C._autograd import DeviceType

    try:
        return c10d._detect_dma_connectivity(DeviceType.CUDA, "nvlink").matrix
    except (AttributeError, RuntimeError):
        return [[1] * num_devices for _ in range(num_devices)]


def _what_is_missing(device: torch.device) -> str | None:
    from .cuda import Driver

    try:
        Driver()
    except (OSError, AttributeError) as error:
        return f"the CUDA driver does not serve it ({error})"
    try:
        from torch.distributed import _symmetric_memory as symmetric_memory

        backend = symmetric_memory.get_backend(device)
    except (ImportError, AttributeError, RuntimeError) as error:
        return f"torch has no symmetric memory here ({error})"
    if backend not in (None, "CUDA"):
        return f"torch's symmetric memory is set to {backend}, and CUDA's is needed"
    return None
