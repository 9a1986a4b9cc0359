"""What a device has to offer to :class:`~.symmetric.SymmetricTransport`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

Lane = Any  # a stream
Address = int


class Shared(Protocol):
    """Memory that all ranks have mapped.

    Attributes:
        tensor: ours, uint8 (bytes,).
        ptrs: where each rank's begins, in our address space.
    """

    tensor: torch.Tensor
    ptrs: Sequence[Address]


class Fabric(Protocol):
    """What moves the bytes: streams, events, copies and signals of one device.

    Attributes:
        copying, pushing, summing: the streams for gathers, for what peers are sent, and for sums.
        progress: words on the host, one for each kind of wait (see :class:`~.watchdog.Watchdog`).
    """

    copying: Lane
    pushing: Lane
    summing: Lane
    progress: Sequence[int]

    def current(self) -> Lane:
        """The stream that computes."""

    def share(self, group: dist.ProcessGroup, num_bytes: int) -> Shared:
        """Memory of zeros, on all ranks of ``group``. Collective; stops the host."""

    def new_event(self) -> Any: ...

    def record(self, event: Any, lane: Lane) -> None: ...

    def wait(self, lane: Lane, event: Any) -> None: ...

    def copy(self, to: Address, source: Address, num_bytes: int, lane: Lane) -> None: ...

    def copy_rows(
        self, to: Address, to_pitch: int, source: Address, source_pitch: int, width: int, num_rows: int, lane: Lane
    ) -> None:
        """``num_rows`` pieces of ``width`` bytes, which begin ``pitch`` bytes after each other."""

    def writer(self, words: Sequence[Address], value: int) -> Callable[[Lane], None]:
        """A function that writes ``value`` to all ``words`` after what the lane was given before."""

    def taker(self, words: Sequence[Address], value: int, kind: int) -> Callable[[Lane, int | None], None]:
        """A function (lane, number): the lane waits until all ``words`` are ``value``, sets them to ``1 - value``, and
        ``progress[kind]`` to ``number`` where there is one."""

    def pass_mark(self, lane: Lane, kind: int, number: int) -> None:
        """The lane sets ``progress[kind]`` to ``number`` after what it was given before."""

    def sum(self, lane: Lane, job: Sum) -> None: ...

    def read(self, words: Sequence[Address]) -> list[int] | None:
        """What ``words`` are now, without waiting for any lane; None where that cannot be told."""

    def abort(self, message: str) -> None:
        """End what waits, and say why."""


@dataclass(slots=True)
class Sum:
    """One launch: ``out[out_start + i] (+)= scale * (sum over ranks of their part [i])``, for ``num`` elements.

    Attributes:
        own: this rank's gradient, whose part begins at element ``own_start`` and has runs of ``run`` elements, which
            begin ``run_stride`` apart.
        inbox: 1-D, of the same dtype; the part of peer p (ranks without this one) begins at ``p * stride``.
        out: contiguous, float32, bfloat16 or float16.
    """

    own: torch.Tensor
    own_start: int
    run: int
    run_stride: int
    inbox: torch.Tensor
    stride: int
    out: torch.Tensor
    out_start: int
    num: int
    size: int
    rank: int
    scale: float
    adds: bool
