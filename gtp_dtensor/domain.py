"""The mesh axes that weights are shared over, with their communicators."""

from __future__ import annotations

import itertools
from collections import OrderedDict

import torch
from torch.distributed.device_mesh import DeviceMesh

from .transport import CollectiveTransport, choose_transport


class Domain:
    """What all models on one gtp axis of one mesh share: communicators and side streams.

    Beside the gtp axis there may be replicas, ranks that hold the same compute shards: along the axis of ``shard_mesh``
    parameters and optimizer state are cut further, along that of ``replicate_mesh`` they are copies. Experts have a
    domain of their own, also where their axes are those of the dense weights: their gathers are long and are issued a
    block ahead, and on one communicator a dense weight's would queue behind them.
    """

    def __init__(
        self,
        gtp_mesh: DeviceMesh,
        shard_mesh: DeviceMesh | None,
        replicate_mesh: DeviceMesh | None,
        is_expert: bool = False,
        transport: str = "auto",
    ) -> None:
        device = torch.device(gtp_mesh.device_type)
        if device.type != "cpu":
            device = torch.device(device.type, torch.get_device_module(device.type).current_device())
        self.device = device
        self.gtp_mesh = gtp_mesh
        self.shard_mesh = shard_mesh
        self.replicate_mesh = replicate_mesh
        self.is_expert = is_expert
        prefix = "egtp" if is_expert else "gtp"
        # Of the gtp axis alone: between replicas bytes move once a step, by collectives.
        self.transport = choose_transport(transport, gtp_mesh, device, prefix)
        self.shard_transport = self.replicate_transport = None
        if shard_mesh is not None:
            self.shard_transport = CollectiveTransport(shard_mesh.get_group(), device, f"{prefix}_shard")
        if replicate_mesh is not None:
            self.replicate_transport = CollectiveTransport(
                replicate_mesh.get_group(), device, f"{prefix}_replicate", gathers=False
            )
        # Numbers members in the order of their making, which is the same on all ranks, for good.
        self.serials = itertools.count()

    @property
    def transports(self) -> list[CollectiveTransport]:
        """Those of all data axes, the gtp axis first."""
        return [t for t in (self.transport, self.shard_transport, self.replicate_transport) if t is not None]

    def __deepcopy__(self, memo: dict) -> Domain:
        return self


class _DomainTable(dict):
    """Domains by the ranks of their axes, kept on the root mesh: a mesh that is pickled or copied leaves them
    behind."""

    def __reduce__(self) -> tuple:
        return (OrderedDict, ())  # a class that torch.load(weights_only=True) knows, and a process without this library

    def __deepcopy__(self, memo: dict) -> _DomainTable:
        return self


def domain_of(
    gtp_mesh: DeviceMesh,
    shard_mesh: DeviceMesh | None = None,
    replicate_mesh: DeviceMesh | None = None,
    is_expert: bool = False,
    transport: str = "auto",
) -> Domain:
    """The one domain of these mesh axes and this ``GTPConfig.transport``; creates communicators on first use (collective
    over each axis)."""
    root = gtp_mesh._get_root_mesh()
    table = root.__dict__.get("_gtp_domains")
    if not isinstance(table, _DomainTable):  # none, or what a pickled mesh brought along
        table = root.__dict__["_gtp_domains"] = _DomainTable()
    meshes = (gtp_mesh, shard_mesh, replicate_mesh)
    key = (is_expert, transport, *(None if mesh is None else tuple(mesh.mesh.tolist()) for mesh in meshes))
    if key not in table:
        table[key] = Domain(*meshes, is_expert, transport)
    return table[key]
