"""What happens to gradients between the last backward of a step and the optimizer: correction, record, clipping."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from gtp_dtensor import clip_grad_norm_


@torch.no_grad()
def correct_scale(model_parts: Iterable[nn.Module], dims, num_global_tokens: torch.Tensor | float) -> None:
    """Works round two scaling faults of torchtitan 0.2.2; does nothing in any other arrangement.

    Args:
        model_parts: whose complete gradients are scaled in place.
        dims: the job's `GTPParallelDims`.
        num_global_tokens: of the step, over all ranks and microbatches.
    """
    factor = 1.0
    if dims.pp_enabled:
        # The pipeline schedule backpropagates the loss sum; only the logged loss is divided by the token count.
        factor /= float(num_global_tokens)
    if dims.dp_replicate_enabled and not dims.fsdp_enabled and not dims.gtp_enabled:
        # DDP averages over its ranks, on top of the division by the global token count.
        factor *= dims.dp_replicate
    if factor == 1.0:
        return
    for model in model_parts:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)


@torch.no_grad()
def write_whole_gradients(model_parts: Iterable[nn.Module], dims, folder: str) -> None:
    """Writes `pp{rank of axis pp}.pt` into `folder`: parameter name -> whole gradient on the CPU. All ranks call.

    The first rank of each rank of axis pp writes; the whole gradients are on it one at a time.
    """
    stage, rank = divmod(dist.get_rank(), dims.world_size // dims.pp)
    gradients = {}
    for model in model_parts:
        for name, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
            if rank == 0:
                for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod."):  # _orig_mod: torch.compile's
                    name = name.replace(wrapper, "")
                gradients[name] = grad.cpu()
    if rank == 0:
        os.makedirs(folder, exist_ok=True)
        torch.save(gradients, os.path.join(folder, f"pp{stage}.pt"))


def clip_exactly(parameters: Iterable[nn.Parameter], max_norm: float, pp_mesh, norm_type: float = 2.0) -> torch.Tensor:
    """Clips by the exact norm of all gradients, over all pipeline stages; returns the norm before clipping."""
    parameters = list(parameters)
    for parameter in parameters:
        grad = parameter.grad
        # Sequence parallelism leaves the gradients of norms as sums still to be made.
        if isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements):
            parameter.grad = grad.redistribute(placements=parameter.placements)
    groups = () if pp_mesh is None else (pp_mesh.get_group(),)
    return clip_grad_norm_(parameters, max_norm, norm_type, groups=groups)
