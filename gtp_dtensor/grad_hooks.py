"""Hooks on the gradients of parameters: those of others, and the one that orders what autograd adds after our sums."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
import torch.nn as nn

if TYPE_CHECKING:
    from .weight import ShardedWeight

_GUARD = "gtp"  # beside the numbers of others' hooks


class _Guard:
    """The engine calls it, on the stream that it then adds on, before it adds to ``.grad`` by itself what came of a use that
    is not ours (a DTensor operator that read the parameter); with None where nothing did."""

    __torch_unserializable__ = True  # a saved parameter does without, and nobody has to be warned

    def __init__(self, weight: ShardedWeight) -> None:
        self._weight = weakref.ref(weight)

    def __call__(self, grad: torch.Tensor | None) -> None:
        weight = None if grad is None else self._weight()
        if weight is not None:
            weight.runtime.reducer.await_sums(weight)


def guard_gradient(weight: ShardedWeight, param: nn.Parameter) -> None:
    """From now on sums on other streams go into the gradient of ``param``. A tensor's hook, and not one of its node in
    autograd's graph: that one lives as long as it is held, and on the stream that it was made on."""
    hooks = param._backward_hooks
    if hooks is None:
        hooks = param._backward_hooks = OrderedDict()
    if _GUARD not in hooks:
        hooks[_GUARD] = _Guard(weight)


def has_hooks(param: torch.Tensor) -> bool:
    """Whether others have hooks on the gradient of ``param``."""
    hooks = param._backward_hooks
    return bool(hooks) and (len(hooks) > 1 or _GUARD not in hooks) or bool(param._post_accumulate_grad_hooks)


def hooks_of_others(param: torch.Tensor) -> list[tuple[dict, object]]:
    """(where it is kept, its key there) of each of others' hooks on the gradient of ``param``."""
    kept = (param._backward_hooks, param._post_accumulate_grad_hooks)
    return [(hooks, key) for hooks in kept if hooks for key in hooks if key != _GUARD]


def wants_gradient_returned(param: nn.Parameter) -> bool:
    """Whether autograd has to get the reduced gradient itself: hooks must see it, or it flows on from a non-leaf."""
    return not param.is_leaf or has_hooks(param)
