"""Gradients summed in float32: on which axes, and how.

Instead of a reduce-scatter, which rounds to 16 bits at every hop, each rank is sent all ranks' parts of its rows and
sums them itself. ``reduce_scatter_with_fp32_accumulation`` says so for the gtp axis of a style (experts' too),
``replicate_reduce_with_fp32_accumulation`` for the axes of its replicas.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .layout import axis_name

if TYPE_CHECKING:
    from .config import GTPConfig
    from .domain import Domain

_MOST_BYPASSED = 2  # a sum of two is rounded once whoever makes it


def sums_here(is_on: bool, axis_size: int, dtype: torch.dtype) -> bool:
    """Whether gradients that travel in ``dtype`` are summed in float32 on an axis with its switch ``is_on``."""
    return is_on and axis_size > _MOST_BYPASSED and dtype.itemsize < torch.float32.itemsize


def sum_parts(parts: torch.Tensor, out: torch.Tensor) -> None:
    """Write the sum of ``parts`` (size, ...) over dim 0, any float dtype, to ``out`` (...), float32.

    On a CPU in rank order. On a GPU one kernel, whose order of additions is its own and the same in every run.
    """
    if parts.is_cuda:
        torch.sum(parts, 0, dtype=out.dtype, out=out)
        return
    # torch.sum on a CPU first casts all the parts, and adds up in another order on long axes.
    out.copy_(parts[0])
    for part in parts[1:]:
        out.add_(part)


def idle_switches(config: GTPConfig, domain: Domain, dtypes: set[torch.dtype]) -> list[str]:
    """One line for each switch that is on and changes nothing, for gradients reduced in ``dtypes`` (none, where there are
    none)."""
    gtp = [(axis_name(domain.gtp_mesh, "gtp"), domain.transport)]
    replicas = [
        (axis_name(mesh, default), transport)
        for mesh, default, transport in (
            (domain.shard_mesh, "optimizer_shard", domain.shard_transport),
            (domain.replicate_mesh, "replicate", domain.replicate_transport),
        )
        if transport is not None
    ]
    lines = []
    for name, axes in (
        ("reduce_scatter_with_fp32_accumulation", gtp),
        ("replicate_reduce_with_fp32_accumulation", replicas),
    ):
        if not dtypes or not getattr(config, name):
            continue
        if any(sums_here(True, transport.size, dtype) for _, transport in axes for dtype in dtypes):
            continue
        if any(transport.size > _MOST_BYPASSED for _, transport in axes):
            reason = "gradients are reduced in " + " and ".join(sorted({str(d).removeprefix("torch.") for d in dtypes}))
        else:
            sizes = ", ".join(f"{axis} has {transport.size}" for axis, transport in axes) or "there are no replicas"
            reason = f"{sizes}; it takes an axis of more than {_MOST_BYPASSED} ranks"
        whose = " for experts" if domain.is_expert else ""
        lines.append(f"{name} changes nothing here{whose}: {reason}")
    return lines
