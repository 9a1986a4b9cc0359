"""Counts collectives by process group, payload and dtype, whoever launches them from Python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Callable
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group


@dataclass(frozen=True)
class CollectiveCall:
    """One collective as it was launched on this rank.

    Attributes:
        op: "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".
        group_name: name of the process group.
        ranks: global ranks of the group.
        dtype: of the payload.
        num_elements, num_bytes: payload: the gathered output of an all-gather, the unreduced input of the others.
        is_async: launched with ``async_op=True`` (functional collectives always are).
    """

    op: str
    group_name: str
    ranks: tuple[int, ...]
    dtype: torch.dtype
    num_elements: int
    num_bytes: int
    is_async: bool


@dataclass
class CollectiveLog:
    """The collectives of a ``with count_collectives()`` block, in launch order."""

    calls: list[CollectiveCall] = field(default_factory=list)

    def select(self, op: str | None = None, group: dist.ProcessGroup | None = None) -> list[CollectiveCall]:
        """The calls of one kind and of one group (None: any)."""
        return [
            call
            for call in self.calls
            if (op is None or call.op == op) and (group is None or call.group_name == group.group_name)
        ]

    def count(self, op: str | None = None, group: dist.ProcessGroup | None = None) -> int:
        """Number of calls."""
        return len(self.select(op, group))

    def num_bytes(self, op: str | None = None, group: dist.ProcessGroup | None = None) -> int:
        """Bytes of payload."""
        return sum(call.num_bytes for call in self.select(op, group))

    def dtypes(self, op: str | None = None, group: dist.ProcessGroup | None = None) -> set[torch.dtype]:
        """The dtypes that travelled."""
        return {call.dtype for call in self.select(op, group)}

    def record(self, op: str, group: dist.ProcessGroup, payload: list[torch.Tensor], is_async: bool) -> None:
        """Add one call."""
        self.calls.append(
            CollectiveCall(
                op=op,
                group_name=group.group_name,
                ranks=tuple(dist.get_process_group_ranks(group)),
                dtype=payload[0].dtype,
                num_elements=sum(tensor.numel() for tensor in payload),
                num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in payload),
                is_async=is_async,
            )
        )


# Methods of ProcessGroup, which every function of torch.distributed ends in: what they do, and which of their
# positional arguments is the payload (output of a gather, else input).
_METHODS = (
    ("_allgather_base", "all_gather", 0),
    ("all_gather_single", "all_gather", 0),
    ("all_gather_single_coalesced", "all_gather", 0),
    ("allgather", "all_gather", 0),
    ("allgather_coalesced", "all_gather", 0),
    ("allgather_into_tensor_coalesced", "all_gather", 0),
    ("_reduce_scatter_base", "reduce_scatter", 1),
    ("reduce_scatter", "reduce_scatter", 1),
    ("reduce_scatter_single", "reduce_scatter", 1),
    ("reduce_scatter_single_coalesced", "reduce_scatter", 1),
    ("reduce_scatter_tensor_coalesced", "reduce_scatter", 1),
    ("allreduce", "all_reduce", 0),
    ("allreduce_coalesced", "all_reduce", 0),
    ("alltoall", "all_to_all", 1),
    ("alltoall_base", "all_to_all", 1),
    ("all_to_all_single", "all_to_all", 1),
)
# Functional collectives (DTensor's redistribution) go past the methods. Payload: 0 the input, -1 the output.
_FUNCTIONAL = (
    ("all_gather_into_tensor", "all_gather", -1),
    ("all_gather_into_tensor_coalesced", "all_gather", -1),
    ("reduce_scatter_tensor", "reduce_scatter", 0),
    ("reduce_scatter_tensor_coalesced", "reduce_scatter", 0),
    ("all_reduce", "all_reduce", 0),
    ("all_reduce_", "all_reduce", 0),
    ("all_reduce_coalesced", "all_reduce", 0),
    ("all_to_all_single", "all_to_all", 0),
)


def _tensors(value: Any) -> list[torch.Tensor]:
    """All tensors in a tensor or in nested lists of tensors."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in _tensors(item)]


def _counting_method(log: CollectiveLog, original: Callable, op: str, position: int) -> Callable:
    def method(group, *args, **kwargs):
        if len(args) <= position:
            raise TypeError(f"count_collectives: {original.__name__} was called with its tensors as keywords")
        options = [value for value in (*args, *kwargs.values()) if hasattr(value, "asyncOp")]
        # Without options (the short overloads) torch runs the operation as an asynchronous one.
        is_async = options[0].asyncOp if options else True
        log.record(op, group, _tensors(args[position]), is_async)
        return original(group, *args, **kwargs)

    return method


class _CountingOp:
    """Stands in for an operator packet of ``torch.ops._c10d_functional``; also counts calls of its overloads."""

    def __init__(self, log: CollectiveLog, packet: Callable, op: str, position: int) -> None:
        self._log, self._packet, self._op, self._position = log, packet, op, position

    def __call__(self, *args, **kwargs):
        output = self._packet(*args, **kwargs)
        group_name = kwargs.get("group_name", args[-1])
        payload = _tensors(output if self._position < 0 else args[self._position])
        self._log.record(self._op, _resolve_process_group(group_name), payload, True)
        return output

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._packet, name)
        if isinstance(value, torch._ops.OpOverload):
            return _CountingOp(self._log, value, self._op, self._position)
        return value


@contextlib.contextmanager
def count_collectives() -> Iterator[CollectiveLog]:
    """Record every all-gather, reduce-scatter, all-reduce and all-to-all that this process launches in the block.

    Seen are the functions of ``torch.distributed``, methods called on a process group itself, sync and async, and
    functional collectives (so DTensor's), on any thread. Not seen: what native code launches by itself.
    Broadcasts, barriers and point-to-point messages are not counted.

    Yields:
        The :class:`CollectiveLog`, filled as the block runs.
    """
    log = CollectiveLog()
    with contextlib.ExitStack() as stack:
        for name, op, position in _METHODS:
            original = getattr(dist.ProcessGroup, name, None)
            if original is not None:  # newer torch renames some of them
                counting = _counting_method(log, original, op, position)
                stack.enter_context(mock.patch.object(dist.ProcessGroup, name, counting))
        namespace = torch.ops._c10d_functional
        for name, op, position in _FUNCTIONAL:
            counting = _CountingOp(log, getattr(namespace, name), op, position)
            stack.enter_context(mock.patch.object(namespace, name, counting))
        yield log
