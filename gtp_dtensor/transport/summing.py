"""The sum of all ranks' parts of a gradient, in float32 and in rank order, into its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ..kernels import KeptKernel

if TYPE_CHECKING:
    from .fabric import Sum

_BLOCK, _NUM_WARPS = 2048, 8  # one program a block: 0.85 to 1.0 of an H200's copy bandwidth on large gradients


def sum_plainly(job: Sum) -> None:
    """``job`` by torch's operators: what the kernel is compared with, to the last bit."""
    total, num_peers = None, 0
    for rank in range(job.size):
        if rank == job.rank:
            own = job.own.view(-1)[job.own_start :]
            runs = own.as_strided((job.num // job.run, job.run), (job.run_stride, 1))
            part = runs.reshape(-1)
        else:
            part = job.inbox[num_peers * job.stride :][: job.num]
            num_peers += 1
        total = part.float() if total is None else total + part.float()
    total = total * job.scale
    out = job.out.view(-1)[job.out_start : job.out_start + job.num]
    out.copy_(out.float() + total if job.adds else total)


def new_kernel() -> KeptKernel:
    """The kernel that :func:`sum_in_one_kernel` launches, for one device."""
    # Scaled and added in two roundings, as mul and add do.
    return KeptKernel(_kernel, num_warps=_NUM_WARPS, enable_fp_fusion=False)


def sum_in_one_kernel(job: Sum, kernel: KeptKernel, stream: int) -> None:
    """``job`` on ``stream`` (a handle): each element is read once and written once."""
    num, run = job.num, job.run
    kernel.launch(
        -(-num // _BLOCK),
        (job.own, job.inbox, job.out),
        (num, job.own_start, run, job.run_stride, job.stride, job.out_start),
        (job.scale,),
        (job.size, job.rank, job.adds, run == num, _BLOCK),
        stream,
    )


def _kernel() -> Callable:
    from . import triton_sum  # Triton is there only where torch has CUDA

    return triton_sum.sum_slots
