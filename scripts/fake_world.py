"""One rank of a fake world: the host makes the calls that a real one makes, and next to no bytes move."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import gtp_dtensor.domain
from gtp_dtensor.transport import CollectiveTransport, choose_transport, cuda
from gtp_dtensor.transport.fabric import Address
from gtp_dtensor.transport.symmetric import PeerReads, SymmetricTransport

_BYTES = 16  # of each copy


class FakeWorld:
    """The process group of rank 0 of ``world`` ranks, whose collectives leave their outputs as they are."""

    def __init__(self, world: int) -> None:
        self._numbers: dict[torch.dtype, torch.Tensor] = {}  # that are gathered
        self._scales: torch.Tensor | None = None
        dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
        # torch's fake group handles a buffer as one tensor a rank, 64 views and copies that a real group does not make.
        gather, reduce = (
            names[0] if hasattr(dist.ProcessGroup, names[0]) else names[1]
            for names in (("_allgather_base", "all_gather_single"), ("_reduce_scatter_base", "reduce_scatter_single"))
        )
        setattr(dist.ProcessGroup, gather, lambda group, *arguments: self._all_gather(group, *arguments))
        dist.ProcessGroup.allgather_into_tensor_coalesced = lambda group, *arguments: self._all_gather_parts(
            group, *arguments
        )
        setattr(dist.ProcessGroup, reduce, lambda group, output, input, *options: group.barrier())

    def _all_gather(self, group: dist.ProcessGroup, output: torch.Tensor, input: torch.Tensor, *options) -> dist.Work:
        self.fill(output)
        return group.barrier()

    def _all_gather_parts(
        self, group: dist.ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *options
    ) -> dist.Work:
        self.fill(*outputs)
        return group.barrier()

    def fill(self, *outputs: torch.Tensor) -> None:
        """Inside of :meth:`random_gathers`: other memory for what one gather brings, whose own stays allocated as long as
        it lives."""
        if not self._numbers:
            return
        for place, output in enumerate(outputs):
            output.memory_of_its_own = output.detach()
            numbers = self._scales if place else self._numbers[output.dtype]
            output.set_(numbers.untyped_storage(), 0, output.shape, output.stride())

    @contextlib.contextmanager
    def random_gathers(self, num_bytes: int, device: torch.device) -> Iterator[None]:
        """What is gathered are random numbers, at most ``num_bytes`` of them: whatever lay in a buffer, zeros or NaN,
        would let GEMMs run at another speed."""
        numbers = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device).normal_(std=0.02)
        codes = (50 * numbers).to(torch.float8_e4m3fn).view(torch.uint8)
        self._numbers = {torch.bfloat16: numbers, torch.uint8: codes}
        # A number in the middle of the range of each kind of scale.
        self._scales = torch.full_like(codes, 0x3C)
        try:
            yield
        finally:
            self._numbers, self._scales = {}, None


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


def use_fake_peers(world: FakeWorld) -> None:
    """For the domains made from now on in this process."""

    class Transport(SymmetricTransport):
        def _gather(self, buffers: tuple[torch.Tensor, ...], parts: tuple[torch.Tensor, ...], dim: int) -> PeerReads:
            reads = super()._gather(buffers, parts, dim)
            world.fill(*buffers)
            return reads

    def choose(requested: str, mesh: DeviceMesh, device: torch.device, name: str) -> CollectiveTransport:
        if requested != "symmetric":
            return choose_transport(requested, mesh, device, name)
        return Transport(mesh.get_group(), device, name, FakePeers(device))

    gtp_dtensor.domain.choose_transport = choose
