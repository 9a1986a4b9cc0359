"""What a model under GTP holds in memory, by kind, at each use of its recorded step.

[Note: the memory formula]
    parameters and compute shards lie there all the time; at the use with the most of the rest,
      gathered      the weight in use, those issued ahead of their uses, those kept from a recompute for the backward
      dequantized   the copy that a GEMM reads of a weight which travels in a format that it does not read
      in flight     unsharded gradients: the one being made, and ``graph_wgrad_ring_size`` at most with it
      gradients     this rank's rows, of all weights whose backward is over
    come on top, with the optimizer's state and the activations, which are not ours. Small things are left out: the
    gradients of parameters that stay whole, while they travel, and what a reduction rounds on its way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn as nn

from .accumulation import sums_here
from .api import issue_positions
from .members import model_members, model_runtimes
from .runtime import Runtime
from .schedule import IN_BACKWARD, Kind, Use
from .weight import ShardedWeight
from .wires import gemm_room


class MemoryRow(NamedTuple):
    """Bytes at one use of one weight; see [Note: the memory formula]."""

    position: int
    kind: str
    weight: str
    gathered: int
    dequantized: int
    in_flight: int
    gradients: int

    @property
    def total(self) -> int:
        return self.gathered + self.dequantized + self.in_flight + self.gradients


@dataclass
class GTPMemory:
    """Bytes on this rank, as a formula of layout, settings and recorded step. Nothing here was measured.

    Attributes:
        parameters: of the registered parameters, sharded and whole.
        compute_shards: copies of shards in the dtype or format that travels.
        symmetric: memory that peers reach; compute shards are in it then.
        rows: of each use, for each runtime (a model has several with experts, or where its style was applied in parts):
            empty before the first step.
    """

    parameters: int = 0
    compute_shards: int = 0
    symmetric: int = 0
    rows: list[list[MemoryRow]] = field(default_factory=list)

    @property
    def transient(self) -> int:
        """The most that all but parameters and compute shards take at one use; of several runtimes, the sum of it."""
        return sum(max((row.total for row in rows), default=0) for rows in self.rows)

    @property
    def peak(self) -> int:
        """All of it at that use: what the caching allocator sees beyond activations and optimizer state, and
        :attr:`symmetric`."""
        return self.parameters + self.compute_shards + self.symmetric + self.transient

    def __str__(self) -> str:
        lines = [f"{name:<16} {getattr(self, name):>16,}" for name in ("parameters", "compute_shards", "symmetric")]
        for rows in self.rows:
            if rows:
                row = max(rows, key=lambda row: row.total)
                lines.append(f"at the {row.kind} use of {row.weight} (position {row.position}):")
                names = ("gathered", "dequantized", "in_flight", "gradients")
                lines += [f"  {name:<14} {getattr(row, name):>16,}" for name in names]
        lines.append(f"{'peak':<16} {self.peak:>16,}")
        return "\n".join(lines)


def memory_table(model: nn.Module) -> GTPMemory:
    """What ``model`` holds in memory for its last whole step, without activations and optimizer state."""
    result = GTPMemory()
    for param in model.parameters():
        local = getattr(param, "_local_tensor", param)
        result.parameters += local.nbytes
    runtimes = model_runtimes(model)
    result.symmetric = sum(transport.num_bytes for transport in {runtime.transport for runtime in runtimes})
    for member in dict.fromkeys(model_members(model)):
        if isinstance(member, ShardedWeight) and not member.is_placed:
            result.compute_shards += _compute_shard_bytes(member)
    result.rows = [list(_Walk(runtime, runtime.schedule.period()).rows()) for runtime in runtimes]
    return result


def _compute_shard_bytes(weight: ShardedWeight) -> int:
    if weight.quantized is None and not weight.is_copied:
        return 0
    return sum(shape.numel() * dtype.itemsize for shape, dtype in weight.sent_tensors().values())


class _Walk:
    """Through the uses of one runtime's step, as the runtime and its reducer go."""

    def __init__(self, runtime: Runtime, uses: list[Use]) -> None:
        self._runtime, self._uses = runtime, uses
        self._ring = runtime.config.graph_wgrad_ring_size
        self._in_flight: deque[tuple[ShardedWeight, int]] = deque()
        self._done: dict[ShardedWeight, int] = {}  # bytes of gradients
        self._gathered = self._gathered_bytes()

    def _weight(self, position: int) -> ShardedWeight | None:
        return self._runtime.weights[self._uses[position].weight]()

    def _gathered_bytes(self) -> list[tuple[int, int]]:
        """Of each use, (while it reads, when it has let go of its own)."""
        uses, num_uses = self._uses, len(self._uses)
        starts = issue_positions(self._runtime, uses)
        changes = [0] * (num_uses + 1)
        own = [0] * num_uses
        before: dict[int, int] = {}  # weight -> its last use so far
        stay = set()  # uses whose weight stays for the next of the same
        for position, (use, start) in enumerate(zip(uses, starts)):
            if start is None:
                stay.add(before[use.weight])
            before[use.weight] = position
        for position, (use, start) in enumerate(zip(uses, starts)):
            weight = self._weight(position)
            if weight is None:
                continue
            num_bytes = weight.gathered_bytes
            if start is not None:
                changes[start] += num_bytes
            if position not in stay:
                changes[position + 1] -= num_bytes
                own[position] = num_bytes
        live, found = 0, []
        for change, num_bytes in zip(changes, own):
            live += change
            found.append((live, live - num_bytes))
        return found

    def rows(self) -> Iterator[MemoryRow]:
        forwards: set[ShardedWeight] = set()  # used in the forward whose backward has not come
        was_backward = False
        for position, use in enumerate(self._uses):
            weight = self._weight(position)
            if weight is None:
                continue
            is_backward = use.kind in IN_BACKWARD
            if was_backward and not is_backward:
                yield from self._end(forwards, position)
            was_backward = is_backward
            if use.kind is Kind.FORWARD:
                forwards.add(weight)
            yield from self._use(position, use.kind, weight)
            if use.kind is Kind.BACKWARD:
                forwards.discard(weight)
        if was_backward:
            yield from self._end(forwards, len(self._uses) - 1)

    def _use(self, position: int, kind: Kind, weight: ShardedWeight) -> Iterator[MemoryRow]:
        while_read, after = self._gathered[position]
        dequantized = _dequantized_bytes(weight)
        makes_gradient = kind is Kind.BACKWARD and weight.param.requires_grad
        if not makes_gradient or not self._runtime.config.wgrad_before_dgrad:
            yield self._row(position, kind.name, weight, while_read, dequantized)
            if makes_gradient:
                yield from self._make_gradient(position, weight, after)
        else:
            yield from self._make_gradient(position, weight, while_read)
            yield self._row(position, kind.name, weight, while_read, dequantized)

    def _row(
        self, position: int, kind: str, weight: ShardedWeight, gathered: int, dequantized: int, making: int = 0
    ) -> MemoryRow:
        in_flight = making + sum(num_bytes for _, num_bytes in self._in_flight)
        return MemoryRow(position, kind.lower(), weight.fqn, gathered, dequantized, in_flight, sum(self._done.values()))

    def _make_gradient(self, position: int, weight: ShardedWeight, gathered: int) -> Iterator[MemoryRow]:
        self._receive(self._ring - 1)
        made, travels = _gradient_bytes(weight)
        yield self._row(position, "gradient", weight, gathered, 0, made)
        self._in_flight.append((weight, travels))

    def _receive(self, most: int) -> None:
        while len(self._in_flight) > most:
            weight, _ = self._in_flight.popleft()
            self._done[weight] = weight.param._local_tensor.nbytes

    def _end(self, forwards: set[ShardedWeight], position: int) -> Iterator[MemoryRow]:
        """Of a backward: first the gradients of weights that needed no gather there, such as an embedding's."""
        for weight in forwards:
            if weight.param.requires_grad:
                yield from self._make_gradient(position, weight, 0)
        forwards.clear()
        self._receive(0)


def _dequantized_bytes(weight: ShardedWeight) -> int:
    if weight.quantized is None or gemm_room(weight.owner) is not None:
        return 0
    return weight.tp_local_shape.numel() * weight.compute_dtype.itemsize


def _gradient_bytes(weight: ShardedWeight) -> tuple[int, int]:
    """Of an unsharded gradient: (while it is made and started on its way, while it travels), with where its rows arrive."""
    runtime, itemsize = weight.runtime, weight.reduce_dtype.itemsize
    computed = weight.tp_local_shape.numel() * itemsize
    on_gpu = runtime.domain.device.type == "cuda" or weight.param.is_meta
    if not (on_gpu and weight.reduce_dtype is torch.float32) and weight.reduce_dtype != weight.compute_dtype:
        made = weight.tp_local_shape.numel() * weight.compute_dtype.itemsize  # and then converted
    else:
        made = 0
    if runtime.transport.pushes(weight.reduce_dtype):
        rows = weight.shard_shape.numel() * torch.float32.itemsize
        return made + computed + rows, computed + rows
    sent = weight.num_buffer_elements * itemsize
    if weight.num_buffer_elements != weight.tp_local_shape.numel():
        made += computed  # and then packed
    if sums_here(runtime.config.reduce_scatter_with_fp32_accumulation, runtime.transport.size, weight.reduce_dtype):
        arrives = sent
    else:
        arrives = weight.send_shape.numel() * itemsize
    return made + sent + arrives, sent + arrives
