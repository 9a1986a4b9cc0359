"""The kernel behind :func:`~.summing.sum_in_one_kernel`; see :class:`~.fabric.Sum` for the arguments."""

import triton
import triton.language as tl


@triton.jit
def sum_slots(
    own,
    inbox,
    out,
    num,
    own_start,
    run,
    run_stride,
    stride,
    out_start,
    scale,
    SIZE: tl.constexpr,
    RANK: tl.constexpr,
    ADDS: tl.constexpr,
    IS_ONE_RUN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``num`` elements of the sum of ``SIZE`` ranks' parts in rank order, a program for each ``BLOCK`` of them."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num
    stride = tl.cast(stride, tl.int64)
    if IS_ONE_RUN:
        own_at = at
    else:
        own_at = at // run * run_stride + at % run
    total = tl.zeros((BLOCK,), tl.float32)
    for rank in tl.static_range(SIZE):
        if rank == RANK:
            part = tl.load(own + own_start + own_at, mask=mask, other=0.0)
        else:
            peer = rank if rank < RANK else rank - 1
            # past the first-level cache, which does not see what peers write
            part = tl.load(inbox + peer * stride + at, mask=mask, other=0.0, cache_modifier=".cg")
        if rank == 0:  # not 0 + part, which would lose a negative zero
            total = part.to(tl.float32)
        else:
            total += part.to(tl.float32)
    total = total * scale
    if ADDS:
        total = tl.load(out + out_start + at, mask=mask, other=0.0).to(tl.float32) + total
    tl.store(out + out_start + at, total.to(out.dtype.element_ty), mask=mask)
