"""One sharded weight.

[Note: vocabulary]
    logical weight   the whole, unpadded weight: what a checkpoint, an init function, a norm and a user see
    shard            this rank's rows of it along the gtp axis
    stored rows      what the registered parameter, a DTensor, always, holds of the shard: all of it, or where an
                     optimizer shard axis cuts it further, this replica's part
    compute shard    what is gathered (on an axis of size 1: what is read): the stored rows themselves where they are
                     the whole shard in the right dtype and length, else a copy in ``param_dtype``, zero-padded to the
                     length that all ranks send; rewritten once an optimizer step
    gathered weight  the TP-local weight that a GEMM reads
    use              one consumption of a weight (see schedule.py)
    lease            one gathered weight in memory. A use takes exactly one lease, nobody overwrites a live one, and
                     its memory returns to the allocator when the lease ends
    generation       counts the changes of a shard; a lease of an older generation is never handed to a use

[Note: life of a lease]
    IN_FLIGHT -> READY -> ENDED, where
    IN_FLIGHT  the collective was issued (on demand, or ahead of its use)
    READY      the reader's stream is ordered after it: it may be read
    ENDED      the reading kernels are enqueued (or nobody wants it any more): it must not be read
"""

from __future__ import annotations

import weakref
from enum import Enum
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .counters import WeightCounters
from .layout import WeightLayout
from .modes import is_plain, own_ops
from .quantized import QuantizedShard
from .schedule import IN_BACKWARD, Kind, role_of_fqn
from .transport import Transfer
from .wire import Parts, View, WireFormat

if TYPE_CHECKING:
    from .runtime import Runtime


class LeaseState(Enum):
    """Where a lease is in its life; see [Note: life of a lease]."""

    IN_FLIGHT = "in flight"
    READY = "ready"
    ENDED = "ended"


_IN_FLIGHT, _READY, _ENDED = LeaseState  # looking a member up in its class costs more than a method call
_RECOMPUTE, _BACKWARD = IN_BACKWARD
_LEGAL = {
    (_IN_FLIGHT, _READY),
    (_IN_FLIGHT, _ENDED),  # a prefetch that nobody used
    (_READY, _ENDED),
}


class Lease:
    """One gathered weight in memory; see [Note: life of a lease]."""

    __slots__ = (
        "weight",
        "kind",
        "generation",
        "prefetched",
        "num_bytes",
        "view",
        "state",
        "buffer",
        "transfer",
        "__weakref__",
    )

    def __init__(
        self,
        weight: ShardedWeight,
        kind: Kind,
        buffer: torch.Tensor | Parts,
        transfer: Transfer,
        prefetched: bool,
        view: View | None = None,
    ) -> None:
        self.weight = weight
        self.kind = kind  # of the use that it was gathered for; once kept: that it was kept from
        self.generation = weight.generation
        self.prefetched = prefetched
        self.num_bytes = num_bytes = weight.gathered_bytes
        self.view = view  # which quantization of the weight it is; None where it is not quantized
        self.state = _IN_FLIGHT
        self.buffer: torch.Tensor | Parts | None = buffer
        self.transfer = transfer
        counters = weight.runtime.counters
        live = counters.live_lease_bytes = counters.live_lease_bytes + num_bytes
        if live > counters.peak_lease_bytes:
            counters.peak_lease_bytes = live

    def _check_step_to(self, state: LeaseState) -> None:
        if (self.state, state) not in _LEGAL:
            raise RuntimeError(
                f"{self.weight.fqn}: illegal transition of a gathered weight from '{self.state.value}' to '{state.value}'"
            )

    def wait(self) -> None:
        """IN_FLIGHT -> READY."""
        if self.state is not _READY:
            if self.weight.checks_states:
                self._check_step_to(_READY)
            self.state = _READY
            self.transfer.wait()

    def read_local(self) -> torch.Tensor:
        """The gathered weight in its TP-local shape, plain."""
        weight, buffer = self.weight, self.buffer
        if self.state is not _READY:
            self._refuse_read()
        if weight.quantized is not None:
            return weight.quantized.read(self.view, buffer, weight)
        return buffer if weight.is_buffer_exact else weight.cut.unpack(buffer)

    @property
    def parts(self) -> torch.Tensor | Parts:
        """What was gathered, as it arrived. READY only."""
        if self.state is not _READY:
            self._refuse_read()
        return self.buffer

    def _refuse_read(self) -> None:
        raise RuntimeError(f"{self.weight.fqn}: read of a gathered weight that is '{self.state.value}'")

    def read(self) -> torch.Tensor:
        """The same as what its module computes with: plain, or a DTensor on the tp mesh."""
        weight = self.weight
        if weight.is_read_as_gathered and self.state is _READY:
            return self.buffer
        local, tp = self.read_local(), weight.tp
        return local if tp is None else tp.wrap(local)

    def hand_over(self) -> torch.Tensor:
        """READY -> ENDED. What :meth:`read_local` gives, the caller's to keep: memory of nobody else's."""
        local = self.read_local()
        if self.weight.runtime.transport.size == 1 and self.weight.quantized is None:
            local = local.clone()  # not the compute shard itself
        self.buffer = None
        self.end()
        return local

    def end(self) -> None:
        """READY or IN_FLIGHT -> ENDED. The buffer is let go once the computing stream is ordered after the gather."""
        if self.weight.checks_states:
            self._check_step_to(_ENDED)
        self.state = _ENDED
        self.transfer.release()
        self.buffer = None
        self.weight.runtime.counters.live_lease_bytes -= self.num_bytes

    def leave(self) -> None:
        """IN_FLIGHT or READY -> ENDED. Its memory is another lease's from now on; what the current stream does next comes
        after the gather."""
        self.wait()
        self.transfer.release()
        self.state, self.buffer = _ENDED, None
        self.weight.runtime.counters.live_lease_bytes -= self.num_bytes

    def settle(self) -> None:
        """It was gathered in a capture that has joined all streams: its end is no stream's business any more."""
        self.transfer.discard()

    def discard(self) -> None:
        """It was part of a capture that failed: end it without a word to any stream."""
        if self.state is not _ENDED:
            self.transfer.discard()
            self.weight.runtime.drop(self)

    def __del__(self) -> None:
        # A lease of the general path is held by the graph node that saved the gathered tensor, and ends with it. One in
        # flight dies with its model.
        if self.buffer is None:
            return
        if self.state is _READY:
            self.end()
        else:
            self.transfer.abandon()
            self.weight.runtime.counters.live_lease_bytes -= self.num_bytes


class ShardedWeight:
    """A parameter cut over the gtp axis, with its leases, compute shard and counters.

    Several modules may own the same parameter (tied weights): then they share this object. The parameter is looked
    up again at each use, since ``load_state_dict(assign=True)`` or ``to_empty`` replace it. ``leaf`` is what autograd's graph
    hangs on: the parameter, but while a block is captured (:func:`.graph_capture.leaves_apart`).
    """

    # Side by side in memory, first what each use reads: those are thirty reads, of which caches hold few in a step.
    __slots__ = (
        "runtime index next_lease kept_lease generation num_writes compute_shard counters param leaf _local _version "
        "_local_version _counts_versions checks_states quantized is_read_as_gathered buffer_shape cut gathered_bytes _pieces "
        "tp param_dtype _reduce_dtype send_shape shard_shape fqn role spec layout replica_cut first_stored_row num_local_rows "
        "num_stored_rows tp_local_shape num_buffer_elements wire is_buffer_exact stored_shape piece_shape owners serial tokens "
        "_piece _copy is_placed keeps_back route __weakref__"
    ).split()

    def __init__(
        self,
        runtime: Runtime,
        index: int,
        fqn: str,
        param: nn.Parameter,
        layout: WeightLayout,
        wire: WireFormat | None = None,
    ) -> None:
        self.runtime = runtime
        self.index = index
        self.fqn = fqn
        self.role = role_of_fqn(fqn)
        self.param = self.leaf = param
        self.spec: DTensorSpec = param._spec
        self.layout = layout
        self.cut, self.replica_cut, self.tp = layout.cut, layout.replica_cut, layout.tp
        cut, replicas = layout.cut, runtime.domain.shard_transport
        first, self.num_local_rows = cut.rows_of(runtime.transport.rank)  # of the shard
        self.first_stored_row, self.num_stored_rows = first, self.num_local_rows  # of the TP-local weight
        if replicas is not None:
            offset, self.num_stored_rows = self.replica_cut.rows_of(replicas.rank)
            self.first_stored_row += offset
        self.tp_local_shape = layout.tp_local_shape
        self.buffer_shape = cut.resized(self.tp_local_shape, cut.buffer_rows)
        self.send_shape = cut.resized(self.tp_local_shape, cut.padded)
        self.num_buffer_elements = self.buffer_shape.numel()
        self.wire = wire
        self.quantized = None if wire is None else QuantizedShard(self, wire)
        self.is_buffer_exact = self.buffer_shape == self.tp_local_shape
        self.is_read_as_gathered = self.is_buffer_exact and self.quantized is None and self.tp is None
        self.shard_shape = cut.resized(self.tp_local_shape, self.num_local_rows)
        if replicas is not None:  # of what of the shard is stored, and of that with its padding
            self.stored_shape = self.replica_cut.resized(self.shard_shape, self.num_stored_rows)
            self.piece_shape = self.replica_cut.resized(self.shard_shape, self.replica_cut.padded)
        config = runtime.config
        self.checks_states = config.check_param_states
        self.keeps_back = False  # its gradients from the replicas, until a backward that synchronises them
        self.param_dtype, self._reduce_dtype = config.param_dtype, config.reduce_dtype
        self.owners: list[tuple[weakref.ref[nn.Module], str]] = []
        self.counters = WeightCounters()
        self.serial = -1  # unique in the domain, given by the runtime that adopts this
        self.num_writes = 0  # how often its values really changed
        self.tokens: list[torch.Tensor] = []  # of compiled code
        self.generation = 0
        self.gathered_bytes = self._count_gathered_bytes()
        self.next_lease: Lease | None = None  # gathered ahead of its use
        self.kept_lease: Lease | None = None  # of a recompute or the forward's end, waiting for its backward use
        self._piece: torch.Tensor | None = None  # what this replica contributes to it
        self._pieces: Transfer | None = None  # a gather of all replicas' pieces, in flight
        self._copy: torch.Tensor | None = None  # memory of the compute shard, where it is not the shard itself
        self.is_placed = False  # the transport chose the memory of what is sent
        self.route: tuple | None = None  # what the transport remembers of how gradients travel
        # What this rank sends, (cut.padded, ...) in compute dtype: the shard, or its copy; None while it is out of
        # date.
        self.compute_shard: torch.Tensor | None = None
        self._remember_versions()

    # ---- dtypes and sizes

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype that is gathered and computed in."""
        return self.param_dtype or self.param.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self._reduce_dtype or self.param.dtype

    def _count_gathered_bytes(self) -> int:
        """Of a gathered weight, beyond its compute shard."""
        if self.quantized is not None and self.runtime.transport.size > 1:
            return max(self.quantized.num_bytes(view) for view in self.quantized.wire.views)
        return 0 if self.runtime.transport.size == 1 else self.num_buffer_elements * self.compute_dtype.itemsize

    @property
    def has_view_for_backward(self) -> bool:
        """Whether the gradient of the input reads another quantization than forwards do."""
        return self.quantized is not None and len(self.quantized.wire.views) > 1

    @property
    def wire_name(self) -> str:
        """How it travels, for people."""
        if self.quantized is not None:
            return self.quantized.wire.name
        return {torch.bfloat16: "bf16", torch.float32: "fp32", torch.float16: "fp16"}.get(
            self.compute_dtype, str(self.compute_dtype).removeprefix("torch.")
        )

    # ---- the parameter and its changes

    def add_owner(self, module: nn.Module, name: str) -> None:
        self.owners.append((weakref.ref(module), name))

    @property
    def owner(self) -> nn.Module:
        """The first module that owns it."""
        return next(module for module in (ref() for ref, _ in self.owners) if module is not None)

    def replace_param(self, param: nn.Parameter) -> None:
        """Use ``param`` from now on (its layout was checked)."""
        self.param = self.leaf = param
        self.count_write()
        self.mark_changed()

    def mark_changed(self) -> None:
        """The shard was, or may have been, written: leases and the compute shard of before are void."""
        self._remember_versions()
        self.generation += 1
        self.gathered_bytes = self._count_gathered_bytes()
        self.compute_shard = None
        self.drop_leases()

    def drop_leases(self) -> None:
        """End the leases that wait for a use."""
        for lease in (self.next_lease, self.kept_lease):
            if lease is not None:
                self.runtime.drop(lease)

    def notice_writes(self) -> None:
        """Compare version counters. Signals (optimizer step, refresh) call :meth:`mark_changed` themselves, because
        foreach and fused kernels leave the counters of a DTensor and of its local tensor unchanged."""
        param = self.param
        local = param._local_tensor
        if local is not self._local():  # to_empty() and to() put another one into the same parameter
            self.count_write()
        elif self._counts_versions:
            if param._version == self._version and local._version == self._local_version:
                return
            self.count_write()
        self.mark_changed()

    def count_write(self) -> None:
        """The values changed: a backward of a forward before this must not run."""
        self.num_writes += 1
        for token in self.tokens:  # autograd compares the versions of what it saved
            torch.autograd.graph.increment_version(token)

    def refuse_changed(self) -> None:
        """Raise: the weight was written since the forward whose backward runs, and would read other values than it."""
        raise RuntimeError(
            f"{self.fqn}: the weight was modified between a forward and its backward, by an optimizer step, a write "
            "or a load; the gradient of the input needs the values that the forward read"
        )

    def _remember_versions(self) -> None:
        param = self.param
        local = param._local_tensor
        self._local = weakref.ref(local)
        # Inference tensors count no versions: they are taken as written at each use.
        self._counts_versions = not param.is_inference()
        if self._counts_versions:
            self._version, self._local_version = param._version, local._version

    # ---- the compute shard

    def distrust_copy(self) -> None:
        """The shard may have been written without a trace. All ranks have to agree on what is out of date, those too whose
        rows need no copy: what is made anew together with it may communicate."""
        if self.quantized is not None or self._is_copied_somewhere:
            self.compute_shard = None

    @property
    def _is_copied_somewhere(self) -> bool:
        """Whether the compute shard is a copy on any rank."""
        has_padding = self.cut.buffer_rows != self.cut.num_rows
        is_cast = self.param.dtype is not self.compute_dtype
        return has_padding or is_cast or self.replica_cut is not None or self._copy is not None

    @property
    def is_copied(self) -> bool:
        """Whether the compute shard is not the parameter's own memory."""
        return self._copy is not None or self.quantized is not None

    def sent_tensors(self) -> dict[tuple, tuple[torch.Size, torch.dtype]]:
        """What peers read of this rank, by keys of :meth:`live_in`."""
        if self.quantized is not None:
            return self.quantized.sent_tensors()
        return {(): (self.send_shape, self.compute_dtype)}

    def live_in(self, tensors: dict[tuple, torch.Tensor]) -> None:
        """From now on, compute shards are made in these zeros (see :meth:`sent_tensors`), which peers can reach."""
        self.is_placed = True
        if self.quantized is not None:
            self.quantized.live_in(tensors)
        else:
            self._copy = tensors[()]

    def refresh(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Set :attr:`compute_shard`. Returns the (destination, source) that the caller has to copy, or None where
        nothing has to be; :meth:`collect_pieces` follows."""
        local = self.param._local_tensor
        if self.quantized is not None:  # made anew by refresh_quantized()
            self.compute_shard = local
            return None
        dtype = self.compute_dtype
        is_whole = self.replica_cut is None
        fits = is_whole and local.dtype == dtype and local.shape == self.send_shape and local.is_contiguous()
        if fits and not self.is_placed:  # else peers may still read it while an optimizer writes
            self.compute_shard, self._copy = local, None
            return None
        self.await_pieces()
        if self._copy is None or self._copy.device != local.device or self._copy.dtype != dtype:
            self._copy = torch.zeros(self.send_shape, dtype=dtype, device=local.device)
        self.compute_shard = self._copy
        if is_whole:
            return self._shard_rows(), local.detach()
        cut = self.replica_cut
        if local.dtype == dtype and local.shape == self.piece_shape and local.is_contiguous():
            self._piece = local.detach()
            return None
        self._piece = local.new_empty(self.piece_shape, dtype=dtype)
        return cut.first(self._piece, self.num_stored_rows), local.detach()

    def _shard_rows(self) -> torch.Tensor:
        """The shard in the copy, without its padding: a view."""
        return self.cut.first(self._copy, self.num_local_rows)

    def collect_pieces(self) -> None:
        """Start gathering the replicas' pieces into the compute shard."""
        piece, self._piece = self._piece, None
        if self.quantized is not None or self.num_local_rows == 0:  # of all replicas of this rank alike
            return
        cut = self.replica_cut
        if cut.buffer_rows == cut.num_rows:
            rows = self._shard_rows()
        else:
            rows = piece.new_empty(cut.resized(piece.shape, cut.buffer_rows))
        with own_ops(self.fqn, "refresh gather"):
            self._pieces = self.runtime.domain.shard_transport.all_gather(rows, piece, cut.dim)

    def await_pieces(self) -> None:
        """The compute shard is complete when what the current stream does next begins."""
        if self._pieces is None:
            return
        pieces, self._pieces = self._pieces, None
        pieces.wait()
        rows, cut = pieces.tensors[0], self.replica_cut
        if rows.shape[cut.dim] != cut.num_rows:
            self._shard_rows().copy_(cut.unpack(rows))
        pieces.release()

    def discard_pieces(self) -> None:
        """They were part of a capture that failed."""
        pieces, self._pieces, self._piece = self._pieces, None, None
        if pieces is not None:
            pieces.discard()

    def check_copy(self) -> None:
        """Debug check (``check_param_states``): the compute shard still holds the parameter's values."""
        local = self.param._local_tensor
        if self.compute_shard is None:
            return
        if self.quantized is not None:
            stored = self.quantized.source
        elif self.compute_shard is self._copy:
            self.await_pieces()
            stored, cut = self._shard_rows(), self.replica_cut
            if cut is not None:
                stored = stored.narrow(cut.dim, *cut.rows_of(self.runtime.domain.shard_transport.rank))
        else:
            return
        if not torch.equal(stored, local.to(stored.dtype)):
            raise RuntimeError(
                f"{self.fqn}: illegal transition of the compute shard from 'stale' to 'gathered': the parameter was "
                "written without a signal; call gtp_dtensor.refresh(model) after writing into parameters by hand"
            )

    def __del__(self) -> None:
        pieces = getattr(self, "_pieces", None)  # not there where __init__ raised
        if pieces is not None:
            pieces.abandon()

    # ---- leases

    def gathered_shapes(self, kind: Kind) -> tuple[tuple[torch.Size, torch.dtype], ...]:
        """Of the tensors that a gather for a use of ``kind`` fills."""
        if self.quantized is None:
            return ((self.buffer_shape, self.compute_dtype),)
        return tuple((shape, torch.uint8) for shape in self.quantized.buffer_shapes(self.quantized.view_of(kind)))

    def gather(
        self, kind: Kind, prefetched: bool, is_hidden: bool = False, into: tuple[torch.Tensor, ...] | None = None
    ) -> Lease:
        """Issue a gather of the (fresh) compute shard.

        Args:
            kind: of the use that it is for.
            prefetched: ahead of it.
            is_hidden: from the user's modes and in a trace's range already.
            into: memory to fill, see :meth:`gathered_shapes`; None: new.
        """
        if not (is_hidden or is_plain()):
            with own_ops(self.fqn, "gather", kind):
                return self.gather(kind, prefetched, True, into)
        counters, transport, view = self.counters, self.runtime.transport, None
        captured = self.runtime.in_capture(self) if transport.is_capturing else None
        if kind is _BACKWARD:
            counters.num_backward_gathers += 1
        elif kind is _RECOMPUTE:
            counters.num_recompute_gathers += 1
        else:
            counters.num_forward_gathers += 1
        if self._pieces is not None:
            self.await_pieces()
        shard, num_bytes = self.compute_shard, self.gathered_bytes
        if self.quantized is not None:
            view = self.quantized.view_of(kind)
            buffer, transfer = self.quantized.gather(self, view, into)
            if num_bytes:
                num_bytes = self.quantized.num_bytes(view)
        elif transport.size == 1:
            buffer, transfer = shard, Transfer.done()
        else:
            # Parsed faster than one argument.
            buffer = shard.new_empty(*self.buffer_shape) if into is None else into[0]
            transfer = transport.all_gather(buffer, shard, self.cut.dim)
        counters.gather_bytes += num_bytes
        lease = Lease(self, kind, buffer, transfer, prefetched, view)
        if captured is not None:
            captured.note(lease)
        return lease
