"""Symmetric memory for one rank of a fake world: the host makes the same calls, and next to no bytes move."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import gtp_dtensor.domain
from gtp_dtensor.transport import cuda
from gtp_dtensor.transport.fabric import Address
from gtp_dtensor.transport.symmetric import SymmetricTransport

_BYTES = 16  # of each copy


class FakePeers(cuda.CudaFabric):
    """All peers' memory is this rank's own; copies are short, sums are of what lies there, waits are over at once."""

    def share(self, group: dist.ProcessGroup, num_bytes: int) -> cuda.SharedMemory:
        tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        return cuda.SharedMemory(tensor, [tensor.data_ptr()] * group.size(), None)

    def copy(self, to: Address, source: Address, num_bytes: int, lane: int) -> None:
        super().copy(to, source, min(num_bytes, _BYTES), lane)

    def copy_rows(
        self, to: Address, to_pitch: int, source: Address, source_pitch: int, width: int, num_rows: int, lane: int
    ) -> None:
        super().copy_rows(to, to_pitch, source, source_pitch, min(width, _BYTES), num_rows, lane)

    def _wait_for(self, word: Address, value: int) -> cuda._MemOp:
        return cuda._MemOp(cuda._WAIT, 0, word, 0, cuda._AT_LEAST)


def use_fake_peers() -> None:
    """For the domains made from now on in this process."""

    def choose(requested: str, mesh: DeviceMesh, device: torch.device, name: str) -> SymmetricTransport:
        return SymmetricTransport(mesh.get_group(), device, name, FakePeers(device))

    gtp_dtensor.domain.choose_transport = choose
