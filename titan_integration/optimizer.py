"""torchtitan's optimizers, SGD and Muon."""

from __future__ import annotations

import fnmatch

import torch
import torch.distributed as dist
import torchtitan.components.optimizer as titan_optimizer
from torch import nn
from torch.distributed.tensor import DTensor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer import build_optimizers as build_titan_optimizers

from gtp_dtensor import Muon, muon_param_groups
from gtp_dtensor.plan import clean_fqn


def build_optimizers(model_parts: list[nn.Module], optimizer_config, parallel_dims) -> OptimizersContainer:
    """torchtitan's `build_optimizers_fn` that also knows `[optimizer] name = "SGD"` (no momentum; lr, weight_decay) and
    "Muon" (see job_config.Optimizer).

    Raises:
        ValueError: SGD or Muon with a setting that it cannot serve; names the key.
    """
    if optimizer_config.name not in ("SGD", "Muon"):
        return build_titan_optimizers(model_parts, optimizer_config, parallel_dims)
    if optimizer_config.early_step_in_backward:
        raise ValueError(
            f"optimizer.early_step_in_backward is not supported with optimizer.name = {optimizer_config.name!r}; set it to "
            "false"
        )
    if optimizer_config.name == "Muon":
        return MuonContainer(model_parts, optimizer_config)
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


class MuonContainer(OptimizersContainer):
    """One Muon for each model part. Collective over all ranks: other pipeline stages have other parts.

    Raises:
        ValueError: a pattern that matches no parameter of any part; a setting that Muon cannot serve.
    """

    def __init__(self, model_parts: list[nn.Module], optimizer_config) -> None:
        settings = {
            "lr": optimizer_config.lr,
            "weight_decay": optimizer_config.weight_decay,
            "betas": (optimizer_config.beta1, optimizer_config.beta2),
            "adamw_eps": optimizer_config.eps,
            "momentum": optimizer_config.muon_momentum,
            "adjust_lr_fn": optimizer_config.muon_adjust_lr_fn,
            "algorithm": optimizer_config.muon_algorithm,
        }
        layouts = optimizer_config.muon_row_layouts
        self.model_parts = model_parts
        self.optimizers = []
        matched_here = [_matched([*optimizer_config.muon_adamw, *layouts], part) for part in model_parts]
        _check_matched([*optimizer_config.muon_adamw, *layouts], set().union(*matched_here))
        for part, matched in zip(model_parts, matched_here):
            groups = muon_param_groups(
                part,
                adamw=[pattern for pattern in optimizer_config.muon_adamw if pattern in matched],
                row_layouts={pattern: rows for pattern, rows in layouts.items() if pattern in matched},
            )
            self.optimizers.append(Muon(groups, **settings))
        params = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        self._validate_length(len(model_parts))
        self._post_init(params, {"lr": optimizer_config.lr})


def _matched(patterns: list[str], part: nn.Module) -> set[str]:
    """Those of ``patterns`` that match a parameter of ``part``."""
    names = [clean_fqn(name) for name, _ in part.named_parameters()]
    return {pattern for pattern in patterns if any(fnmatch.fnmatchcase(name, pattern) for name in names)}


def _check_matched(patterns: list[str], matched_here: set[str]) -> None:
    """Every pattern has to match on some rank. Raises on all of them alike."""
    everyones = [matched_here]
    if patterns and dist.is_initialized():
        everyones = [set()] * dist.get_world_size()
        dist.all_gather_object(everyones, matched_here)
    unmatched = sorted(set(patterns).difference(*everyones))
    if unmatched:
        raise ValueError(
            f"optimizer.muon_adamw, optimizer.muon_row_layouts: no parameter matches {', '.join(map(repr, unmatched))}"
        )


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
