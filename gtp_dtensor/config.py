"""The settings of one sharded model: one frozen dataclass, no process-wide configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .wire import QUANTIZED

WIRE_FORMATS = ("bf16", *QUANTIZED, "auto")
TRANSPORTS = ("auto", "collective", "symmetric")


@dataclass(frozen=True)
class GTPConfig:
    """Settings of one :class:`~gtp_dtensor.GTPStyle`. The first seven keep the names of the GTP specification (2.4).

    Attributes:
        pad_for_alignment: every rank's rows of a weight are padded, in communication buffers only, to a multiple of
            this. None: what the wire format needs (bf16: 1). Parameters, gradients and checkpoints never see padding.
        weight_prefetch: issue gathers ahead of their use, from the recorded schedule. False: every gather is on demand.
        async_reduction: reduce gradients one step behind the backward. False: each is waited for where it is launched.
        check_param_states: check every state transition of every weight; raises ``RuntimeError`` with the weight's FQN.
        calculate_per_token_loss: True: gradients are summed over the data axes, because the loss is already divided by
            the global number of tokens. False: gradients are averaged over the data axes, because each rank's loss is a
            mean over its own samples.
        reduce_scatter_with_fp32_accumulation: over the gtp axis (an experts' style: its own), exchange 16-bit gradient
            rows by all-to-all and sum them locally in float32, straight into the gradient, instead of a reduce-scatter
            that rounds at each hop. Bypassed on axes of size 2 or less and where ``reduce_dtype`` has 32 bits already;
            where it then changes nothing at all, a log line says so. Receiving takes as much memory as one unsharded
            gradient, for each that is in flight.
        replicate_reduce_with_fp32_accumulation: the same over the axes of replicas, each by its own size. Where
            parameters are cut over them the sum goes straight into the gradient; over copies each rank sums a part, and
            these are gathered in ``reduce_dtype``, rounded once more. Independent of the other switch.
        graph_wgrad_ring_size: how many unsharded weight gradients may be in flight at once, so it bounds the
            memory that asynchronous reductions hold. For CUDA graphs of blocks, how many blocks' gradients: each weight of a
            block shares so many slots, which stay allocated, with those of its role in other blocks. With 1, a block's
            backward waits until the gradients of the one before it are reduced.
        wgrad_before_dgrad: the backward of a linear (of a stack of experts too) computes its weight's gradient before its
            input's, so that the reduction hides behind its own layer's computation. Bits are the same; each gathered weight
            is in memory together with its own gradient. Modules of TransformerEngine, and those
            that gather around a forward of their own, keep the order that they have.
        look_ahead: how many uses before its own use a gather is issued.
        look_ahead_bytes: instead, each gather is issued as early as it has to be to arrive in time, by times measured
            once in a training step, while the gathered weights that wait for their uses stay within this many bytes on
            this axis (the next one is always gathered). ``look_ahead`` holds until then. None: no plan.
        wire_format: how a shard travels: "bf16" ("as it is, in ``param_dtype``"), or quantized once an optimizer step
            and dequantized where it is used: "fp8" (e4m3, one scale for a matrix), "fp8_rowwise" (for a row), "fp8_block"
            (for 128 x 128), "mxfp8" (for 32), "nvfp4" (e2m1, for 16). Needs torchao. Embeddings and modules called
            ``output`` or ``lm_head`` travel as they are; see ``wire_format_overrides`` of :class:`~gtp_dtensor.GTPStyle`.
            "auto": what the module's own GEMM reads.
        param_dtype: the dtype that is gathered and computed in. None: the parameter's own.
        reduce_dtype: the dtype that gradients travel in, over every axis. None: the parameter's own. A sum in float32 is
            rounded to it before it goes on to the next axis.
        transport: how bytes move over the gtp axis. "collective": by the process group. "symmetric": through memory that
            all its ranks have mapped, by copy engines; needs GPUs of one NVLink domain, sums gradients in float32, keeps
            a copy of each shard in ``param_dtype`` and inboxes for ``graph_wgrad_ring_size`` gradients outside of torch's
            caching allocator, and needs all ranks to write parameters alike (where one alone does, it waits for the
            others until the process group's time-out ends it). "auto": symmetric where it can be, collective elsewhere; a
            log line says which and why. Between replicas, and for parameters that stay whole, always collective.
        recompute_keep_bytes: a weight gathered for recomputation is kept for its backward use while the kept weights
            of this model stay within this many bytes. None: eight times the largest gathered weight. 0: never.
    """

    pad_for_alignment: int | None = None
    weight_prefetch: bool = True
    async_reduction: bool = True
    check_param_states: bool = False
    calculate_per_token_loss: bool = False
    reduce_scatter_with_fp32_accumulation: bool = False
    replicate_reduce_with_fp32_accumulation: bool = False
    graph_wgrad_ring_size: int = 2
    wgrad_before_dgrad: bool = False
    look_ahead: int = 1
    look_ahead_bytes: int | None = None
    wire_format: str = "auto"
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    transport: str = "auto"
    recompute_keep_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.wire_format not in WIRE_FORMATS:
            raise ValueError(f"GTPConfig.wire_format={self.wire_format!r}: choose one of {', '.join(WIRE_FORMATS)}")
        if self.transport not in TRANSPORTS:
            raise ValueError(f"GTPConfig.transport={self.transport!r}: choose one of {', '.join(TRANSPORTS)}")
        for name, least in (("graph_wgrad_ring_size", 1), ("look_ahead", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"GTPConfig.{name}={value!r}: must be an integer of at least {least}")
        for name, least in (("pad_for_alignment", 1), ("look_ahead_bytes", 1), ("recompute_keep_bytes", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"GTPConfig.{name}={value!r}: must be None or an integer of at least {least}")
        for name in ("param_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, torch.dtype) and value.is_floating_point):
                raise ValueError(f"GTPConfig.{name}={value!r}: must be None or a floating-point torch.dtype")
