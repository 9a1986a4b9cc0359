"""Checks of gradients, and debug checks between ranks (``GTPConfig.check_param_states``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from .modes import plain_ops

if TYPE_CHECKING:
    from .runtime import Runtime
    from .small import SmallParam
    from .weight import ShardedWeight


GRADIENT = "gradient"
GRADIENTS = "gradients"
RETURNED = "gradient for a hook or torch.autograd.grad"
_WHATS = ("forward use", "inference use", "recompute use", "backward use", GRADIENT, GRADIENTS, RETURNED)


def check_peers(runtime: Runtime, members: list[ShardedWeight] | list[SmallParam], what: str) -> None:
    """Every rank of the axis is about to communicate the same thing, for the same purpose (one of ``_WHATS``).

    Raises:
        RuntimeError: they differ; on every rank, with the FQNs of both sides where this rank knows them.
    """
    transport = runtime.transport
    names = {member.serial: member.fqn for member in (*runtime.live_weights(), *runtime.live_smalls())}
    with plain_ops():
        everyones = transport.exchange([_WHATS.index(what), *(member.serial for member in members)])
    mine = everyones[transport.rank]
    for rank, theirs in enumerate(everyones):
        if theirs != mine:
            mine_named, theirs_named = (
                f"{_WHATS[code]} of {[names.get(serial, f'#{serial}') for serial in serials]}"
                for code, *serials in (mine, theirs)
            )
            raise RuntimeError(
                f"ranks of the gtp axis use different weights: {mine_named} on rank {transport.rank} of the axis, "
                f"{theirs_named} on rank {rank}; all of them must run the same modules in the same order, with hooks on the "
                "same parameters"
            )


def check_grad(param: torch.Tensor, fqn: str) -> None:
    """Raise where somebody put a gradient with other placements there, which torch would accept in silence."""
    grad = param.grad
    if grad is not None and (not isinstance(grad, DTensor) or grad._spec.placements != param._spec.placements):
        found = grad._spec.placements if isinstance(grad, DTensor) else type(grad).__name__
        raise RuntimeError(
            f"{fqn}: .grad has placements {found}, the parameter {param._spec.placements}: set .grad to None or to a "
            "DTensor placed like the parameter"
        )
