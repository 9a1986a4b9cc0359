"""Work that one rank does for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def run_on_rank_zero(work: Callable[[], T]) -> T:
    """Runs `work` on rank 0 and returns its (picklable) result on every rank; the other ranks wait for it.

    Without a process group it just runs. An exception on rank 0 is raised on every rank, so that none waits for a
    rank that has given up.
    """
    if not dist.is_initialized():
        return work()
    answer: list = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = work()
        except Exception as error:
            answer[1] = f"{type(error).__name__}: {error}"
            dist.broadcast_object_list(answer, src=0)
            raise
    dist.broadcast_object_list(answer, src=0)
    if answer[1] is not None:
        raise RuntimeError(f"rank 0 failed: {answer[1]}")
    return answer[0]
