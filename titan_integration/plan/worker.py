"""A process that plans: each plan has a fake process group, and so a process at a time, of its own."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .arrangement import Arrangement, Plan
    from .cluster import Cluster

_context: tuple = ()


def start(toml: str, options: tuple[str, ...], cluster: Cluster, world: int) -> None:
    """Begins the process. The job is read here: torchtitan's JobConfig does not travel between processes."""
    global _context
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from titan_integration import cpu

    cpu.install()
    import logging

    import torch

    from .rank import read_job

    logging.getLogger().setLevel(logging.ERROR)
    torch.set_num_threads(1)
    _context = read_job(toml, options), cluster, world


def plan(arrangement: Arrangement, is_exact: bool) -> Plan | str:
    """A plan, or why there is none."""
    from .search import plan_or_reason

    return plan_or_reason(*_context, arrangement, is_exact)
