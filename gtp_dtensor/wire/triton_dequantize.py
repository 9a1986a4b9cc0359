"""The kernel behind :func:`~.dequantizing.divide_in_one_kernel`."""

import triton
import triton.language as tl


@triton.jit
def divide(codes, scales, values, num, of_matrix, IS_ONE: tl.constexpr, BLOCK: tl.constexpr):
    """``num`` codes over the scales of their matrices, of ``of_matrix`` codes each; a program for each ``BLOCK``."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < num
    if IS_ONE:
        scale = tl.load(scales)
    else:
        scale = tl.load(scales + at // of_matrix, mask=mask, other=1.0)
    value = tl.div_rn(tl.load(codes + at, mask=mask, other=0.0).to(tl.float32), tl.zeros((BLOCK,), tl.float32) + scale)
    tl.store(values + at, value.to(values.dtype.element_ty), mask=mask)
