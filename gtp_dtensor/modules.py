"""The classes that sharded modules get: one subclass for each original class, which changes ``forward`` only.

A patched ``forward`` or a hook that holds process groups would break ``deepcopy``; a class does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn

from . import functional
from .init import logical_init
from .members import STATE, ModuleState, weight_of


@contextmanager
def _exposed(module: nn.Module) -> Iterator[None]:
    """Inside: ``module.name`` is the gathered (or whole) tensor, for all parameters that its forward reads.

    The tensors sit in the instance's ``__dict__``, which attribute look-up sees before registered parameters, so
    ``named_parameters()`` and ``state_dict()`` meet the sharded ones all the while.
    """
    holders = [module, *(module.get_submodule(name) for name in module.__dict__[STATE].borrows)]
    saved: list[tuple[nn.Module, str, torch.Tensor | None]] = []
    try:
        for holder in holders:
            state: ModuleState = holder.__dict__[STATE]
            for name in (*state.weights, *state.smalls):
                if holder._parameters.get(name) is None:
                    continue
                use = functional.materialize if name in state.weights else functional.use_small
                tensor = use(holder, name)
                saved.append((holder, name, holder.__dict__.get(name)))
                holder.__dict__[name] = tensor
        yield
    finally:
        for holder, name, before in reversed(saved):  # a module may be entered again inside its own forward
            if before is None:
                del holder.__dict__[name]
            else:
                holder.__dict__[name] = before


def _forward_of(base: type[nn.Module]) -> Callable:
    if base.forward is nn.Linear.forward:
        return functional.linear
    if base.forward is nn.Embedding.forward:
        return functional.embedding
    return None


@functools.lru_cache(maxsize=None)
def sharded_class(base: type[nn.Module], explicit: bool) -> type[nn.Module]:
    """The subclass of ``base`` whose forward gathers. ``explicit``: by the autograd function made for ``base``."""
    if explicit:
        forward = _forward_of(base)
    else:

        def forward(self: nn.Module, *args, **kwargs):
            with _exposed(self):
                return base.forward(self, *args, **kwargs)

    namespace = {"forward": forward, "__module__": base.__module__, "__doc__": base.__doc__}
    if hasattr(base, "reset_parameters"):

        def reset_parameters(self: nn.Module) -> None:
            with logical_init():
                base.reset_parameters(self)

        namespace["reset_parameters"] = reset_parameters
    if issubclass(base, nn.Embedding):
        namespace["_fill_padding_idx_with_zero"] = _fill_padding_row
    return type(f"GTP{base.__name__}", (base,), namespace)


def has_explicit_forward(module: nn.Module) -> bool:
    """Whether this class computes exactly what one of our autograd functions does."""
    return _forward_of(type(module)) is not None


def _fill_padding_row(self: nn.Embedding) -> None:
    """Zero the padding row where it is stored: torch's indexing would zero a gathered copy of it."""
    if self.padding_idx is None:
        return
    weight = self.__dict__[STATE].weights.get("weight")
    with torch.no_grad():
        if weight is None:
            self._parameters["weight"]._local_tensor[self.padding_idx].fill_(0)
            return
        weight = weight_of(self, "weight")
        row = self.padding_idx
        if weight.tp is not None and weight.tp.placement.is_shard(0):
            row -= weight.tp.mesh.get_local_rank() * -(-weight.spec.shape[0] // weight.tp.mesh.size())
        start, length = weight.cut.rows_of(weight.runtime.transport.rank)
        if start <= row < start + length:
            weight.param._local_tensor[row - start].fill_(0)
        weight.mark_changed()
