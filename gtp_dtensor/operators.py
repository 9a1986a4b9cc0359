"""How our operators are made known to torch: one namespace, and an order that compilers keep."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch.library import Library

_LAST = "_gtp_last"  # attribute of inductor's graph: the buffer that our operator before this one makes

library = Library("gtp", "DEF")


def define(schema: str, implementation: Callable, fake: Callable) -> None:
    """Make ``torch.ops.gtp``'s operator of this schema.

    Args:
        schema: torch's, without the namespace.
        implementation: on tensors, for any device.
        fake: on fake tensors; gives what ``implementation`` gives, empty.
    """
    name = schema.partition("(")[0]
    # A CUDA graph that inductor records would replay the gather and nothing of what decides on it.
    library.define(schema, tags=(torch.Tag.cudagraph_unsafe,))
    library.impl(name, implementation, "CompositeExplicitAutograd")

    def fake_and_lowering(*args):
        _lower_in_order(getattr(torch.ops.gtp, name).default)
        return fake(*args)

    torch.library.register_fake(f"gtp::{name}", fake_and_lowering, lib=library)


def _lower_in_order(operator: torch._ops.OpOverload) -> None:
    """Tell inductor, where it is in use, to keep ``operator`` behind those of ours that come before it in the graph.

    Done when a fake runs, which is before inductor lowers: importing inductor takes seconds and is not for us to do.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None or operator in lowering.lowerings:
        return
    from torch._inductor.virtualized import V

    lower = lowering.fallback_handler(operator, add_to_fallback_set=False)

    def lower_in_order(*args):
        graph = V.graph
        num_before = len(graph.operations)
        result = lower(*args)
        kernel = next(op for op in graph.operations[num_before:] if getattr(op, "op_overload", None) is operator)
        # The last one of the graph that is being lowered lives with that graph.
        previous = graph.__dict__.get(_LAST)
        if previous is not None:
            graph.additional_buffer_deps[kernel.get_operation_name()].add(previous)
        setattr(graph, _LAST, kernel.get_name())
        return result

    lowering.register_lowering(operator, type_promotion_kind=None)(lower_in_order)
