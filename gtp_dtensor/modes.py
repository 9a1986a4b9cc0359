"""Running the library's own operators out of sight of the user's modes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def plain_ops() -> Iterator[None]:
    """Ordinary operators on ordinary tensors, whatever surrounds the caller.

    Selective activation checkpointing counts the operators it sees in forward and again in recompute, where a
    prefetched gather may be absent: it must see none of ours. And a buffer made under ``inference_mode`` could be
    neither rewritten nor saved for backward later.
    """
    with contextlib.ExitStack() as stack:
        if torch._C._len_torch_dispatch_stack():
            stack.enter_context(_disable_current_modes())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
        if torch.is_grad_enabled():
            stack.enter_context(torch.no_grad())
        yield


_NO_ANNOTATION = contextlib.nullcontext()


def annotation(what: str, fqn: str) -> contextlib.AbstractContextManager:
    """A range ``gtp::what fqn`` in the trace of a running profiler; costs next to nothing where none runs."""
    if not torch.autograd._profiler_enabled():
        return _NO_ANNOTATION
    return torch.profiler.record_function(f"gtp::{what} {fqn}")


def in_backward() -> bool:
    """Whether the autograd engine is running: a forward that runs now is a recompute."""
    return torch._C._current_graph_task_id() != -1
