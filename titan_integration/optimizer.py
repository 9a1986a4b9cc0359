"""torchtitan's optimizers, and SGD."""

from __future__ import annotations

import torch
import torchtitan.components.optimizer as titan_optimizer
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer import build_optimizers as build_titan_optimizers


def build_optimizers(model_parts: list[nn.Module], optimizer_config, parallel_dims) -> OptimizersContainer:
    """torchtitan's `build_optimizers_fn` that also knows `[optimizer] name = "SGD"` (no momentum; lr, weight_decay).

    Raises:
        ValueError: SGD with a setting that it cannot serve; names the key.
    """
    if optimizer_config.name != "SGD":
        return build_titan_optimizers(model_parts, optimizer_config, parallel_dims)
    if optimizer_config.early_step_in_backward:
        raise ValueError(
            "optimizer.early_step_in_backward is not supported with optimizer.name = 'SGD'; set it to false"
        )
    fused = optimizer_config.implementation == "fused"
    if fused and any(isinstance(p, DTensor) for part in model_parts for p in part.parameters()):
        raise ValueError(
            "optimizer.implementation = 'fused': torch has no fused SGD for DTensors, which this model's parameters "
            "are; set it to 'foreach' or 'for-loop'"
        )
    kwargs = {
        "lr": optimizer_config.lr,
        "weight_decay": optimizer_config.weight_decay,
        "fused": fused,
        "foreach": optimizer_config.implementation == "foreach",
    }
    return OptimizersContainer(model_parts, torch.optim.SGD, kwargs)


@torch.no_grad()
def initialize_state(optimizers: OptimizersContainer) -> None:
    """Gives optimizers that have taken no step yet the state that their first step would start from.

    Without it, the state dict of such an optimizer is made by a step at learning rate 0, which counts as a step: Adam's
    next one would be corrected as its second. Where there are gradients (the first step was skipped), no state would be
    saved at all.
    """
    fresh = [optimizer for optimizer in optimizers if not optimizer.state]
    if not fresh:
        return
    params = [p for optimizer in fresh for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad for p in params]
    for p in params:
        p.grad = None
    optimizers.state_dict()
    for optimizer in fresh:
        for state in optimizer.state.values():
            if "step" in state:
                state["step"] *= 0
    for p, grad in zip(params, grads):
        p.grad = grad


def build_balancing_optimizers(model_parts: list[nn.Module], optimizer_config, parallel_dims) -> OptimizersContainer:
    """torchtitan's optimizers for models with experts, ours inside: before each step they move the expert bias of every
    router by the tokens that its experts got, over all ranks. Errors: see `build_optimizers`."""

    def build(model_parts, optimizer_config, parallel_dims, ft_manager=None) -> OptimizersContainer:
        return build_optimizers(model_parts, optimizer_config, parallel_dims)

    # torchtitan's function looks up what it wraps by name.
    original = titan_optimizer.build_optimizers
    titan_optimizer.build_optimizers = build
    try:
        return titan_optimizer.build_optimizers_with_moe_load_balancing(model_parts, optimizer_config, parallel_dims)
    finally:
        titan_optimizer.build_optimizers = original
