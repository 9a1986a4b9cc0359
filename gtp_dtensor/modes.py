"""Running the library's own operators out of sight of the user's modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes

_NOTHING = contextlib.nullcontext()


def plain_ops() -> contextlib.AbstractContextManager:
    """Ordinary operators on ordinary tensors, whatever surrounds the caller.

    Selective activation checkpointing counts the operators it sees in forward and again in recompute, where a
    prefetched gather may be absent: it must see none of ours. And a buffer made under ``inference_mode`` could be
    neither rewritten nor saved for backward later. Free where there is nothing to leave, which is the common case.
    """
    if torch._C._len_torch_dispatch_stack() or torch.is_inference_mode_enabled() or torch.is_grad_enabled():
        return _leave_modes()
    return _NOTHING


@contextlib.contextmanager
def _leave_modes() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        yield


def annotation(what: str, fqn: str) -> contextlib.AbstractContextManager:
    """A range ``gtp::what fqn`` in the trace of a running profiler; costs next to nothing where none runs."""
    if not torch.autograd._profiler_enabled():
        return _NOTHING
    return torch.profiler.record_function(f"gtp::{what} {fqn}")


def in_backward() -> bool:
    """Whether the autograd engine is running: a forward that runs now is a recompute."""
    return torch._C._current_graph_task_id() != -1
