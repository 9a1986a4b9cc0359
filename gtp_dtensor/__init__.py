"""Generalized tensor parallelism for PyTorch: ZeRO-3 on a model-parallel mesh axis, one weight at a time."""

from .api import (
    GTPStats,
    ScheduleRow,
    ScheduleTable,
    finalize_grads,
    materialized,
    process_groups,
    refresh,
    reset_stats,
    schedule_table,
    set_requires_gradient_sync,
    stats,
    time_next_step,
)
from .block_graphs import GraphedBlocks, graph_blocks
from .checkpoint import CheckedFileSystemReader, CheckedLoadPlanner
from .config import GTPConfig
from .experts import grouped_linear
from .graph_checks import GraphError
from .graphs import GraphedStep, graph_step
from .init import logical_init
from .memory import GTPMemory, MemoryRow, memory_table
from .optim import Muon, clip_grad_norm_, count_zero_grads, muon_param_groups
from .style import GTPStyle, parallelize_module

__all__ = [
    "CheckedFileSystemReader",
    "CheckedLoadPlanner",
    "GTPConfig",
    "GTPMemory",
    "GTPStats",
    "GTPStyle",
    "GraphError",
    "GraphedBlocks",
    "GraphedStep",
    "MemoryRow",
    "Muon",
    "ScheduleRow",
    "ScheduleTable",
    "clip_grad_norm_",
    "count_zero_grads",
    "finalize_grads",
    "graph_blocks",
    "graph_step",
    "grouped_linear",
    "logical_init",
    "materialized",
    "memory_table",
    "muon_param_groups",
    "parallelize_module",
    "process_groups",
    "refresh",
    "reset_stats",
    "schedule_table",
    "set_requires_gradient_sync",
    "stats",
    "time_next_step",
]
