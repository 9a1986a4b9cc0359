"""Optimizer steps, which are the signal that shards change."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .modes import in_backward

if TYPE_CHECKING:
    from .runtime import Runtime

SUCCESSOR = "_gtp_successor"  # left on a parameter that GTPStyle replaced: a weak reference to its member


def watch_optimizers(runtime: Runtime) -> None:
    """Tell ``runtime`` of every optimizer's steps. torch keeps these hooks; they hold it weakly."""
    this = weakref.ref(runtime)

    def before(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        runtime = this()
        if runtime is not None:
            _refuse_replaced_params(optimizer)
            runtime.is_stepping = True
            # Another model's step, which may be other ranks' too, must not bring out what is kept back here.
            if runtime.reducer.num_pending and not in_backward() and runtime.is_stepped_by(optimizer):
                runtime.finalize()

    def after(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        runtime = this()
        if runtime is not None:
            runtime.is_stepping = False
            runtime.note_step(optimizer)

    for handle in (register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)):
        weakref.finalize(runtime, handle.remove)


def _refuse_replaced_params(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            member = getattr(param, SUCCESSOR, lambda: None)()
            if member is not None:
                raise RuntimeError(
                    f"{member.fqn}: this optimizer was built before GTPStyle replaced the model's parameters and would "
                    "train nothing; build it from model.parameters() afterwards"
                )
