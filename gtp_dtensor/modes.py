"""Running the library's own operators out of sight of the user's modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack
from torch.autograd import _profiler_enabled, forward_ad
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

from .schedule import Kind

_NOTHING = contextlib.nullcontext()
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_inference, _is_grad_enabled = torch.is_inference_mode_enabled, torch.is_grad_enabled


class Observer(TorchDispatchMode):
    """A dispatch mode that sees the library's own operators too, which are hidden from all others, and is told what for."""

    def begin(self, what: str, fqn: str, kind: Kind | None) -> None:
        """Operators until :meth:`end` are the library's, for weight ``fqn``: its "gather" for a use of ``kind``, say."""

    def end(self) -> None:
        """See :meth:`begin`."""


def _observers() -> list[Observer]:
    return [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Observer)]


def is_plain() -> bool:
    """Whether :func:`own_ops` would change nothing here. Asking costs less than half of entering it."""
    return not (_is_grad_enabled() or _num_dispatch_modes() or _is_inference() or _profiler_enabled())


def plain_ops() -> contextlib.AbstractContextManager:
    """Ordinary operators on ordinary tensors, whatever surrounds the caller.

    Selective activation checkpointing counts the operators it sees in forward and again in recompute, where a
    prefetched gather may be absent: it must see none of ours. And a buffer made under ``inference_mode`` could be
    neither rewritten nor saved for backward later. Free where there is nothing to leave, which is the common case.
    """
    if _num_dispatch_modes() or torch.is_inference_mode_enabled() or torch.is_grad_enabled():
        return _leave_modes()
    return _NOTHING


@contextlib.contextmanager
def _leave_modes() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if _num_dispatch_modes():
            observers = _observers()
            stack.enter_context(_disable_current_modes())
            for observer in observers:
                stack.enter_context(observer)
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield


def own_ops(fqn: str, what: str, kind: Kind | None = None) -> contextlib.AbstractContextManager:
    """:func:`plain_ops`, as a range ``gtp::[kind] what fqn`` in the trace of a running profiler."""
    if _num_dispatch_modes() and (observers := _observers()):
        return _observed(observers, what, fqn, kind)
    if not _profiler_enabled():
        return plain_ops()
    return _traced(f"gtp::{what} {fqn}" if kind is None else f"gtp::{kind.name.lower()} {what} {fqn}")


@contextlib.contextmanager
def _traced(name: str) -> Iterator[None]:
    with plain_ops(), torch.profiler.record_function(name):
        yield


@contextlib.contextmanager
def _observed(observers: list[Observer], what: str, fqn: str, kind: Kind | None) -> Iterator[None]:
    with plain_ops(), contextlib.ExitStack() as stack:
        for observer in observers:
            observer.begin(what, fqn, kind)
            stack.callback(observer.end)
        yield


@contextlib.contextmanager
def below_transforms() -> Iterator[None]:
    """Outside of all transforms of torch.func, which autograd functions that we define cannot be part of: what is made of
    parameters alone is a constant to each of them, and belongs to the graph around them all."""
    with contextlib.ExitStack() as stack:
        while torch._C._are_functorch_transforms_active():
            stack.enter_context(temporarily_pop_interpreter_stack())
        yield


def is_differentiated_otherwise() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is at work, to which our gradients mean nothing."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def in_backward() -> bool:
    """Whether the autograd engine is running: a forward that runs now is a recompute."""
    return torch._C._current_graph_task_id() != -1
