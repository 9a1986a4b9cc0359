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
            if runtime.reducer.num_pending and not in_backward() and _is_stepped_by(runtime, optimizer):
                runtime.finalize()

    def after(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        runtime = this()
        if runtime is not None:
            runtime.is_stepping = False
            runtime.drop_small_copies()
            _note_step(runtime, optimizer)

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


def _is_stepped_by(runtime: Runtime, optimizer: torch.optim.Optimizer) -> bool:
    """Whether ``optimizer`` has parameters of ``runtime``'s."""
    mine = {id(member.param) for member in (*runtime.live_weights(), *runtime.live_smalls())}
    return any(id(param) in mine for group in optimizer.param_groups for param in group["params"])


def _note_step(runtime: Runtime, optimizer: torch.optim.Optimizer) -> None:
    """``optimizer`` has stepped."""
    by_id = {id(weight.param): weight for weight in runtime.live_weights()}
    stepped = [by_id[id(p)] for group in optimizer.param_groups for p in group["params"] if id(p) in by_id]
    if not stepped:
        return
    for weight in stepped:
        if weight.param.grad is not None:
            weight.count_write()
    # All but frozen ones: an optimizer may have been given fewer parameters on a rank whose shards are empty.
    for weight in runtime.live_weights():
        if weight.param.requires_grad or weight.param.grad is not None:
            weight.mark_changed()
    runtime.has_optimizer = True
    if runtime.schedule.mark_step():
        runtime.look_ahead.after_step()
