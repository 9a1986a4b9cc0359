"""torchtitan 0.2.2 on a machine without an accelerator.

torchtitan binds its device type and device module at import time, imports triton unconditionally, and calls
`torch.cuda` functions that `torch.cpu` lacks. `install()` repairs that for the process, and only where
`torch.accelerator` finds no device: on a GPU machine it changes nothing.
"""

from __future__ import annotations

import functools
import os
import resource
import sys
import types
from collections.abc import Callable

import torch
import torch._utils

_MOE_KERNELS = "torchtitan.models.moe.kernels"


class CpuDeviceModule(types.ModuleType):
    """`torch.cpu` plus the functions of `torch.cuda` that torchtitan calls.

    Memory figures are those of the whole process: `memory_stats` gives its peak resident size in bytes, which the
    operating system cannot reset between steps.
    """

    def __init__(self) -> None:
        super().__init__("titan_integration.cpu.device_module")

    def __getattr__(self, name: str):
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        """The device index, 0. (`torch.cpu` answers "cpu", which `barrier(device_ids=...)` refuses.)"""
        return 0

    def set_device(self, device: object) -> None:
        """Does nothing: there is one CPU device."""

    def get_device_name(self, device: object = None) -> str:
        """A name for logs."""
        return "CPU"

    def get_device_properties(self, device: object = None) -> types.SimpleNamespace:
        """`total_memory`: the machine's physical memory in bytes."""
        total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return types.SimpleNamespace(name="CPU", total_memory=total_memory)

    def memory_stats(self, device: object = None) -> dict[str, int]:
        """Peak resident size of this process in bytes, under the names that torchtitan reads."""
        kib = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS and in KiB on Linux
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * kib
        return {
            "active_bytes.all.peak": peak,
            "reserved_bytes.all.peak": peak,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: object = None) -> None:
        """Does nothing: the peak resident size cannot be reset."""

    def empty_cache(self) -> None:
        """Does nothing: the CPU allocator keeps no cache of its own."""


def generate_permute_indices(
    tokens_per_expert_group: torch.Tensor,
    experts_per_rank: int,
    num_ranks: int,
    max_len: int,
    alignment: int,
    use_cpu: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """From tokens grouped by (source rank, expert) to tokens grouped by expert, each group padded: what torchtitan's
    triton kernel of the same name computes.

    Args:
        tokens_per_expert_group: integers of shape (num_ranks * experts_per_rank,), by source rank, then expert.
        experts_per_rank, num_ranks: the experts of this rank, and the ranks that sent tokens.
        max_len: length of the result.
        alignment: each group is as long as the next multiple of it, an empty one as long as one.
        use_cpu: accepted as torchtitan's function does.

    Returns:
        Indices of shape (max_len,), int32, -1 for padding; the length of each expert's group, and where it ends, both
        int32 of shape (experts_per_rank,).
    """
    counts = tokens_per_expert_group.long().view(num_ranks, experts_per_rank)
    starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
    sizes = (counts.sum(0).clamp_min(alignment) + alignment - 1) // alignment * alignment
    ends = sizes.cumsum(0)
    destinations = (ends - sizes) + counts.cumsum(0) - counts  # of each piece, (rank, expert)
    # All tokens of a piece move by the same distance.
    lengths = counts.flatten()
    source = torch.arange(int(lengths.sum()))
    target = source + torch.repeat_interleave((destinations - starts).flatten(), lengths)
    indices = torch.full((max_len,), -1, dtype=torch.int32)
    indices[target] = source.int()
    return indices, sizes.int(), ends.int()


def _moe_kernels_without_triton() -> types.ModuleType:
    """Stands in for torchtitan's triton kernels, which cannot be imported (or run) without a GPU."""
    module = types.ModuleType(_MOE_KERNELS)
    module.generate_permute_indices = generate_permute_indices
    return module


def _with_integers_on_cpu(histc: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`torch.histc`, also for integers on a CPU, where torch has a kernel for floating point only.

    torchtitan's router counts the tokens of each expert with it. Integers below 2**53 are counted exactly.
    """

    @functools.wraps(histc)
    def wrapper(input: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if input.device.type != "cpu" or input.is_floating_point() or input.is_complex() or "out" in kwargs:
            return histc(input, *args, **kwargs)
        return histc(input.double(), *args, **kwargs).to(input.dtype)

    return wrapper


def install() -> bool:
    """Prepares torchtitan for the CPU; returns whether it did. Does nothing where an accelerator is available.

    Must run before the first import of torchtitan, which binds the device type.

    Raises:
        RuntimeError: torchtitan was imported already, for another device.
    """
    if torch.accelerator.is_available():
        return False
    bound = sys.modules.get("torchtitan.tools.utils")
    if bound is not None:
        if bound.device_type == "cpu":
            return True
        raise RuntimeError(
            f"torchtitan was imported before titan_integration.cpu.install() and is bound to {bound.device_type!r}; "
            "import titan_integration.train (or call install()) first"
        )
    sys.modules[_MOE_KERNELS] = _moe_kernels_without_triton()
    device_module = CpuDeviceModule()
    original = torch._utils._get_available_device_type, torch._utils._get_device_module
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda name: device_module if name == "cpu" else original[1](name)
    try:
        # Every torchtitan module that binds the device type is imported here, while torch answers "cpu".
        import torchtitan.tools.utils as titan_utils
        import torchtitan.train  # noqa: F401
    finally:
        torch._utils._get_available_device_type, torch._utils._get_device_module = original
    # torchtitan would assume an A100 and run `lspci`. The peak of this CPU is unknown: utilization then shows 0 %.
    titan_utils.get_peak_flops = lambda device_name: float("inf")
    torch.histc = _with_integers_on_cpu(torch.histc)
    return True


def check_job(job_config, attn_type: str) -> None:
    """Refuses what torch or torchtitan cannot do on a CPU. Call it only where `install()` returned True.

    Args:
        job_config: torchtitan's JobConfig.
        attn_type: the attention of the model flavor: "sdpa", "flex" or "varlen".

    Raises:
        NotImplementedError: names the key and what to set instead.
    """
    refused = [
        (
            job_config.training.enable_cpu_offload,
            "training.enable_cpu_offload",
            "everything is on the CPU already; set it to false",
        ),
        (
            job_config.checkpoint.enable and job_config.checkpoint.async_mode == "async_with_pinned_mem",
            "checkpoint.async_mode = 'async_with_pinned_mem'",
            "pinned memory needs an accelerator; use 'async' or 'disabled'",
        ),
        (job_config.profiling.enable_profiling, "profiling.enable_profiling", "torchtitan 0.2.2 profiles GPUs only"),
        (attn_type != "sdpa", f"a model flavor with attention {attn_type!r}", "use a flavor with sdpa attention"),
    ]
    for wrong, key, remedy in refused:
        if wrong:
            raise NotImplementedError(f"{key} is not supported without an accelerator: {remedy}")
