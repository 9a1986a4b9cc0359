"""The compute shard of a weight that travels quantized, and how all of a model are made anew after an optimizer step.

[Note: quantization once a step]
    All stale weights together: the largest absolute values of what each rank stores go into one table, whose entries are
    the whole weights' after one max-reduction over each axis that cuts them. Rows move to the rank that quantizes them
    (float32, only where DTensor's cut splits a block or differs from ours), and each rank quantizes its own: from the
    parameter itself, so bit for bit as the whole weight would be. Microbatches only gather.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard

from .layout import RowCut
from .modes import own_ops
from .schedule import Kind
from .transport import CollectiveTransport, Transfer
from .wire import Amax, Parts, View, WireFormat

if TYPE_CHECKING:
    from .weight import Lease, ShardedWeight

_MOST_BATCH_BYTES = 64 << 20  # of float32 rows that are scaled at once

_AMAX_DIM = {Amax.MATRIX: (-2, -1), Amax.COLUMN: (-2,), Amax.ROW: (-1,)}


def matrices(shape: torch.Size, is_stack: bool) -> torch.Size:
    """(out, in), or (experts, out, in): the matrices that a weight of ``shape`` is; see [Note: matrices]."""
    num_leading = 2 if is_stack else 1
    return torch.Size((*shape[:num_leading], math.prod(shape[num_leading:])))


class QuantizedShard:
    """This rank's rows, quantized: parts of each view, with the same addresses from step to step.

    Attributes:
        shape: of the TP-local weight, as matrices.
        cut: the rows that each rank quantizes and sends: whole blocks of them.
        source: with ``check_param_states``, a copy of what was quantized last.
    """

    def __init__(self, weight: ShardedWeight, wire: WireFormat) -> None:
        self.wire = wire
        self.shape = matrices(weight.tp_local_shape, weight.layout.is_stack)
        self._row_dim = len(self.shape) - 2
        cut = weight.cut
        block = wire.row_block if cut.dim == self._row_dim else 1
        self.cut = RowCut(cut.num_rows, cut.axis_size, 1, cut.dim, math.lcm(block, cut.alignment))
        self._filled_shape = self._filled(self.shape)
        self._send_shape = cut.resized(self._filled_shape, self.cut.chunk)
        self._buffer_shape = cut.resized(self._filled_shape, self.cut.buffer_rows)
        self.parts: dict[View, Parts] = {}
        self.amax: dict[Amax, torch.Tensor] = {}  # of the whole weight
        self.source: torch.Tensor | None = None
        self._generation = -1  # of the weight when it was quantized last
        self._first_row = weight.runtime.transport.rank * self.cut.chunk
        # A rank knows the largest value of a whole row, unless tensor parallelism cuts columns.
        placements = () if weight.tp is None else weight.tp.placements
        num_dims = len(weight.tp_local_shape)
        dims = [p.dim % num_dims if type(p) is Shard else None for p in placements]
        cut_rows = [axis for axis, dim in enumerate(dims) if dim == self._row_dim]
        cut_columns = [axis for axis, dim in enumerate(dims) if dim is not None and dim > self._row_dim]
        self._knows_rows = not cut_columns
        # Model-parallel axes over which an entry is the same; other ranks' experts have entries of their own.
        of_matrix = sorted(cut_rows + cut_columns)
        axes = {Amax.MATRIX: of_matrix if wire.spans_tp else [], Amax.COLUMN: cut_rows, Amax.ROW: cut_columns}
        # Over which what is found of this rank's slice is not found of all.
        self.slice_groups = [] if wire.spans_tp else [weight.tp.mesh.get_group(axis) for axis in of_matrix]
        self.groups = {amax: tuple(weight.tp.mesh.get_group(axis) for axis in of) for amax, of in axes.items()}

    def _filled(self, shape: torch.Size) -> torch.Size:
        """``shape`` of matrices as they are quantized: the last block filled up with rows of zeros."""
        return torch.Size((*shape[:-2], -(-shape[-2] // self.wire.row_block) * self.wire.row_block, shape[-1]))

    # ---- sizes

    def view_of(self, kind: Kind) -> View:
        return self.wire.view_of(kind)

    def num_bytes(self, view: View) -> int:
        """Of a gathered view."""
        return sum(shape.numel() for shape in self.wire.part_shapes(view, self._buffer_shape))

    def sent_tensors(self) -> dict[tuple, tuple[torch.Size, torch.dtype]]:
        """See :meth:`ShardedWeight.sent_tensors`: parts, by view and place."""
        return {
            (view, place): (shape, torch.uint8)
            for view in self.wire.views
            for place, shape in enumerate(self.wire.part_shapes(view, self._send_shape))
        }

    def live_in(self, tensors: dict[tuple, torch.Tensor]) -> None:
        """See :meth:`ShardedWeight.live_in`."""
        self.parts = {
            view: tuple(tensor for (of, _), tensor in tensors.items() if of is view) for view in self.wire.views
        }

    # ---- once a step

    def slot_shapes(self) -> dict[Amax, torch.Size]:
        """What this weight asks of the table: entries of the whole TP-local weight."""
        leading, (num_rows, num_columns) = self.shape[:-2], self.shape[-2:]
        shapes = {Amax.MATRIX: (1, 1), Amax.COLUMN: (1, num_columns), Amax.ROW: (num_rows, 1)}
        wanted = [amax for amax in self.wire.amaxes if amax is not Amax.ROW or not self._knows_rows]
        return {amax: torch.Size((*leading, *shapes[amax])) for amax in wanted}

    def fill_slots(self, slots: dict[Amax, torch.Tensor], weight: ShardedWeight) -> None:
        """Enter what this rank stores into its ``slots``, zeros so far."""
        rows = self._stored(weight)
        if rows.numel() == 0:
            return
        magnitudes = rows.abs()
        for amax, slot in slots.items():
            for dim, first in self._place(weight).items():
                if slot.shape[dim] > 1:
                    slot = slot.narrow(dim, first, rows.shape[dim])
            slot.copy_(magnitudes.amax(_AMAX_DIM[amax], keepdim=True))

    def _stored(self, weight: ShardedWeight) -> torch.Tensor:
        """The parameter's local tensor as matrices, in float32."""
        local = weight.param._local_tensor.detach()
        return local.reshape(matrices(local.shape, weight.layout.is_stack)).float()

    def _place(self, weight: ShardedWeight) -> dict[int, int]:
        """The first index, along each dim that is cut, of what this rank stores."""
        transport, replicas = weight.runtime.transport, weight.runtime.domain.shard_transport
        place = {weight.cut.dim: weight.cut.rows_of(transport.rank)[0]}
        if weight.replica_cut is not None:
            dim, first = weight.replica_cut.dim, weight.replica_cut.rows_of(replicas.rank)[0]
            place[dim] = place.get(dim, 0) + first
        return place

    def begin(self, slots: dict[Amax, torch.Tensor], weight: ShardedWeight) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """``slots`` hold what is known of the whole weight; its parts are rewritten next. Returns what has to be copied before
        that, (destinations, sources)."""
        before = self.amax if self._generation == weight.generation else {}
        self._generation = weight.generation
        weight.counters.num_quantizations += 1
        return self._remember(self.wire.complete(slots, before, weight.owner))

    def places(self, weight: ShardedWeight) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """(float32 rows, their scale, where their codes go) where the rows stay on this rank and go where those of the
        last quantization are; None elsewhere: see :meth:`quantize`."""
        local, transport = weight.param._local_tensor, weight.runtime.transport
        parts = self.parts.get(View.ROWS)
        moves = weight.replica_cut is not None or transport.size > 1 and weight.cut.chunk != self.cut.chunk
        if self.wire.scales_like is None or moves or parts is None or parts[0].device != local.device:
            return None
        if local.dtype is not torch.float32 or local.numel() == 0 or weight.runtime.config.check_param_states:
            return None
        rows = self._stored(weight)
        codes = parts[0]
        for dim, length in enumerate(rows.shape):
            codes = codes.narrow(dim, 0, length)  # behind them are zeros
        return rows, self.amax[Amax.SCALE], codes

    def quantize(self, weight: ShardedWeight) -> None:
        """Rewrite the parts, after :meth:`begin`."""
        runtime, cut = weight.runtime, weight.replica_cut
        rows = self._stored(weight)
        if runtime.config.check_param_states:
            self.source = weight.param._local_tensor.detach().clone()
        with own_ops(weight.fqn, "quantize"):
            if cut is None:
                self._quantize_rows(runtime.transport.move_rows(rows, weight.cut, self.cut))
            elif self._replicas_hold_whole_blocks(weight):
                self._gather_quantized(weight, rows, runtime.domain.shard_transport)
            else:
                piece = _padded(rows, cut.padded, cut.dim).contiguous()
                gathered = rows.new_empty(cut.resized(rows.shape, cut.buffer_rows))
                transfer = runtime.domain.shard_transport.all_gather(gathered, piece, cut.dim)
                transfer.wait()
                rows = cut.unpack(gathered)
                self._quantize_rows(runtime.transport.move_rows(rows, weight.cut, self.cut))
                transfer.release()

    def _remember(self, amax: dict[Amax, torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Make ``amax`` what is known of the whole weight, in the memory of before: CUDA graphs read and rewrite it there."""
        pairs, known, self.amax = [], self.amax, {}
        for key, value in amax.items():
            mine = known.get(key)
            if mine is None or mine.shape != value.shape or mine.device != value.device:
                mine = value  # as it lies there: some formats' GEMMs want entries aligned
            elif mine is not value:
                pairs.append((mine, value))
            self.amax[key] = mine
        return pairs

    def _replicas_hold_whole_blocks(self, weight: ShardedWeight) -> bool:
        cut = weight.replica_cut
        block = self.wire.row_block if cut.dim == self._row_dim else 1
        return self.cut.chunk == weight.cut.chunk and cut.chunk % block == 0 and cut.num_rows % block == 0

    def _quantized(self, rows: torch.Tensor, first: dict[int, int], length: int, dim: int) -> dict[View, Parts]:
        """Parts of ``rows``, which begin at ``first`` in the weight, padded with zeros to ``length`` along ``dim``."""
        rows = _padded(rows, length, dim)
        rows = _padded(rows, self._filled(rows.shape)[-2], self._row_dim)
        amax = {}
        for key, slot in self.amax.items():
            shape = slot.shape
            for cut_dim, start in first.items():
                if shape[cut_dim] > 1:
                    slot = slot.narrow(cut_dim, start, min(rows.shape[cut_dim], slot.shape[cut_dim] - start))
                    slot = _padded(slot, rows.shape[cut_dim], cut_dim)
            amax[key] = slot
        if Amax.ROW in self.wire.amaxes and self._knows_rows:
            amax[Amax.ROW] = rows.abs().amax(-1, keepdim=True)
        return self.wire.quantize(rows.contiguous(), amax)

    def _quantize_rows(self, rows: torch.Tensor) -> None:
        dim = self.cut.dim
        num_rows = rows.shape[dim]
        if num_rows == 0:
            self._store({view: self._zeros(view, self._send_shape, rows.device) for view in self.wire.views})
            return
        first = {dim: self._first_row}
        self._store(self._quantized(rows, first, self.cut.chunk, dim))

    def _zeros(self, view: View, shape: torch.Size, device: torch.device) -> Parts:
        """Parts of matrices of ``shape`` that nobody has quantized."""
        shapes = self.wire.part_shapes(view, shape)
        return tuple(torch.zeros(part, dtype=torch.uint8, device=device) for part in shapes)

    def _store(self, views: dict[View, Parts]) -> None:
        """Keep the memory of before, if it is of the same device."""
        for view, parts in views.items():
            mine = self.parts.get(view)
            if mine is None or mine[0].device != parts[0].device:
                self.parts[view] = parts
            else:
                for part, new in zip(mine, parts, strict=True):
                    part.copy_(new)

    def _gather_quantized(self, weight: ShardedWeight, rows: torch.Tensor, transport: CollectiveTransport) -> None:
        """Each replica quantizes what it stores, and all send that to each other."""
        cut = weight.replica_cut
        filled = self._filled(rows.shape)
        if rows.numel():
            mine = self._quantized(rows, self._place(weight), cut.padded, cut.dim)
        else:
            shape = cut.resized(filled, cut.padded)
            mine = {view: self._zeros(view, shape, rows.device) for view in self.wire.views}
        views = {}
        for view, parts in mine.items():
            whole = cut.resized(filled, cut.buffer_rows)
            buffers = tuple(part.new_empty(s) for part, s in zip(parts, self.wire.part_shapes(view, whole)))
            transfer = transport.all_gather_parts(buffers, parts, cut.dim)
            transfer.wait()
            sent = self._zeros(view, self._send_shape, rows.device)
            for buffer, part in zip(buffers, sent):
                for dim in range(part.dim()):
                    buffer = buffer.narrow(dim, 0, min(buffer.shape[dim], part.shape[dim]))
                part[tuple(slice(length) for length in buffer.shape)].copy_(buffer)
            transfer.release()
            views[view] = sent
        self._store(views)

    # ---- uses

    def buffer_shapes(self, view: View) -> list[torch.Size]:
        """Of gathered parts, bytes."""
        return self.wire.part_shapes(view, self._buffer_shape)

    def gather(self, weight: ShardedWeight, view: View, into: Parts | None = None) -> tuple[Parts, Transfer]:
        """(gathered parts, to be: ``into`` or new ones), and their transfer."""
        parts, transport = self.parts[view], weight.runtime.transport
        if transport.size == 1:
            return parts, Transfer.done()
        buffers = into
        if buffers is None:
            buffers = tuple(part.new_empty(shape) for part, shape in zip(parts, self.buffer_shapes(view)))
        return buffers, transport.all_gather_parts(buffers, parts, self.cut.dim)

    def whole(self, view: View, gathered: Parts) -> Parts:
        """The parts of the TP-local weight, its last block filled up with zeros."""
        shapes = self.wire.part_shapes(view, self._filled_shape)
        dim = self.cut.dim
        return tuple(part.narrow(dim, 0, shape[dim]) for part, shape in zip(gathered, shapes))

    def codes_and_scale(self, lease: Lease) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a format whose codes were multiplied by a scale: the TP-local weight's, for a GEMM that reads them."""
        return self.wire.codes_and_scale(lease.view, self.whole(lease.view, lease.parts), self.amax)

    def read(self, view: View, gathered: Parts, weight: ShardedWeight) -> torch.Tensor:
        """The TP-local weight in its compute dtype."""
        parts = self.whole(view, gathered)
        values = self.wire.dequantize(view, parts, self._filled_shape, self.amax, weight.compute_dtype)
        return values.narrow(self._row_dim, 0, self.shape[self._row_dim]).reshape(weight.tp_local_shape)


def _padded(tensor: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    """``tensor`` with zeros behind it along ``dim``."""
    if tensor.shape[dim] == length:
        return tensor
    shape = [*tensor.shape]
    shape[dim] = length
    padded = tensor.new_zeros(shape)
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return padded


class FiniteCheck:
    """Whether weights held finite values when they were quantized.

    Args:
        fqns: of these weights.
        format_name: how they travel.
    """

    def __init__(self, fqns: tuple[str, ...], format_name: str) -> None:
        self._fqns, self._format_name = fqns, format_name
        self._finite: torch.Tensor | None = None  # on the host
        self._copied: torch.cuda.Event | None = None

    def take(self, finite: torch.Tensor, is_captured: bool) -> None:
        """``finite``: int (weights,), 0 where not. From a GPU it is copied without stopping the host; where that is a part of
        a CUDA graph, nobody knows when it happens."""
        if not finite.is_cuda:
            self._finite = finite
            return
        if self._finite is None:
            self._finite = torch.ones_like(finite, device="cpu", pin_memory=True)
        self._finite.copy_(finite, non_blocking=True)
        self._copied = None if is_captured else torch.cuda.current_stream(finite.device).record_event()

    def raise_if_not(self) -> None:
        """Raise ``RuntimeError`` that names those that did not, on all ranks alike (after replays of a CUDA graph: of
        those that have come to it)."""
        if self._copied is not None:
            self._copied.synchronize()  # of a step ago
        if self._finite is None:
            return
        bad = [fqn for fqn, is_finite in zip(self._fqns, self._finite.tolist()) if not is_finite]
        if bad:
            self._finite.fill_(1)  # told once
            raise RuntimeError(
                f"{', '.join(bad)}: the weight holds NaN or infinity, and its scale, as {self._format_name} travels, would "
                "spread that over others; load or initialise finite values, or skip optimizer steps whose gradients are not "
                "finite"
            )


def refresh_quantized(weights: Sequence[ShardedWeight]) -> None:
    """Quantize these anew; see [Note: quantization once a step]. All of one domain.

    Raises:
        RuntimeError: a weight holds NaN or infinity (on a GPU: held, when it was quantized before); names all such.
    """
    domain = weights[0].runtime.domain
    tables: dict[tuple, list[tuple[ShardedWeight, Amax, torch.Size]]] = {}
    for weight in weights:
        for amax, shape in weight.quantized.slot_shapes().items():
            tables.setdefault(weight.quantized.groups[amax], []).append((weight, amax, shape))
    slots: dict[ShardedWeight, dict[Amax, torch.Tensor]] = {weight: {} for weight in weights}
    flat: dict[tuple, torch.Tensor] = {}
    for groups, entries in tables.items():
        flat[groups] = torch.zeros(sum(shape.numel() for *_, shape in entries), device=weights[0].param.device)
        for (weight, amax, _), entry in zip(entries, _entries(flat[groups], entries)):
            slots[weight][amax] = entry
    _fill(slots)
    for groups, table in flat.items():
        # As integers, whose order is that of magnitudes and keeps NaN largest: a maximum of floats may lose it.
        bits = table.view(torch.int32)
        for transport in (domain.transport, domain.shard_transport):
            if transport is not None:
                transport.all_reduce_max(bits)
        for group in groups:
            dist.all_reduce(bits, dist.ReduceOp.MAX, group=group)
    _check_finite(slots, {groups: torch.isfinite(table) for groups, table in flat.items()}, tables)
    _add_scales(slots, flat, tables)
    _quantize(slots)


Entry = tuple["ShardedWeight", Amax, torch.Size]  # of a table


def _entries(table: torch.Tensor, entries: list[Entry]) -> list[torch.Tensor]:
    parts = table.split([shape.numel() for *_, shape in entries])
    return [part.view(shape) for part, (*_, shape) in zip(parts, entries)]


def _fill(slots: dict[ShardedWeight, dict[Amax, torch.Tensor]]) -> None:
    """Enter what this rank stores, most weights in one kernel."""
    all_rows, their_slots = [], []
    for weight, own in slots.items():
        local = weight.param._local_tensor
        if len(own) == 1 and own[Amax.MATRIX].numel() == 1 and local.dtype is torch.float32 and local.numel():
            all_rows.append(local.detach())
            their_slots.append(own[Amax.MATRIX].view(()))
        else:
            weight.quantized.fill_slots(own, weight)
    if all_rows:
        torch._foreach_copy_(their_slots, torch._foreach_norm(all_rows, math.inf))


def _add_scales(
    slots: dict[ShardedWeight, dict[Amax, torch.Tensor]],
    flat: dict[tuple, torch.Tensor],
    tables: dict[tuple, list[Entry]],
) -> None:
    """Of formats that make them of the largest values alone: of a whole table at once."""
    for groups, entries in tables.items():
        made: dict[tuple, list[torch.Tensor]] = {}
        for place, (weight, amax, _) in enumerate(entries):
            wire = weight.quantized.wire
            if wire.scales_like is not None and amax is Amax.MATRIX:
                if wire.scales_like not in made:
                    made[wire.scales_like] = _entries(wire.scales(flat[groups]), entries)
                slots[weight][Amax.SCALE] = made[wire.scales_like][place]


def _check_finite(
    slots: dict[ShardedWeight, dict[Amax, torch.Tensor]],
    flags: dict[tuple, torch.Tensor],
    tables: dict[tuple, list[Entry]],
) -> None:
    """See :class:`FiniteCheck`."""
    weights = list(slots)
    by_weight = {}
    for groups, entries in tables.items():
        for (weight, amax, _), flag in zip(entries, _entries(flags[groups], entries)):
            if amax is Amax.MATRIX:
                by_weight[weight] = flag.view(()) if flag.numel() == 1 else flag.all()
    finite = torch.stack([by_weight[weight] for weight in weights]).int()
    for group in dict.fromkeys(group for weight in weights for group in weight.quantized.slice_groups):
        dist.all_reduce(finite, dist.ReduceOp.MIN, group=group)
    if finite.is_meta:  # no values
        return
    runtime = weights[0].runtime
    is_captured = runtime.transport.is_capturing
    if finite.is_cuda and not is_captured:  # without stopping the host: told before the next quantization
        runtime.check_finite()
    fqns = tuple(weight.fqn for weight in weights)
    check = runtime.finite_checks.get(fqns)
    if check is None:
        check = runtime.finite_checks[fqns] = FiniteCheck(fqns, weights[0].quantized.wire.name)
    check.take(finite, is_captured)
    if not finite.is_cuda:
        check.raise_if_not()


def _quantize(slots: dict[ShardedWeight, dict[Amax, torch.Tensor]]) -> None:
    """Rewrite the parts of all, those whose format can do several at once in batches that need little memory."""
    batches: dict[tuple, list[tuple]] = {}
    pairs = [pair for weight, own in slots.items() for pair in weight.quantized.begin(own, weight)]
    if pairs:
        torch._foreach_copy_([mine for mine, _ in pairs], [value for _, value in pairs])
    for weight in slots:
        shard = weight.quantized
        places = shard.places(weight)
        if places is None:
            shard.quantize(weight)
            continue
        batch = batches.setdefault(shard.wire.scales_like, [])
        if sum(rows.nbytes for rows, *_ in batch) + places[0].nbytes > _MOST_BATCH_BYTES:
            _quantize_batch(shard.wire, batch)
            batch.clear()
        batch.append((*places, shard.wire))
    for batch in batches.values():
        _quantize_batch(batch[0][-1], batch)


def _quantize_batch(wire: WireFormat, batch: list[tuple]) -> None:
    if batch:
        rows, scales, codes, _ = map(list, zip(*batch))
        with own_ops(f"{len(batch)} weights", "quantize"):
            wire.quantize_many(rows, scales, codes)
