"""From torchtitan's JobConfig to degrees and a `GTPConfig`, with every refusal that needs no process group."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gtp_dtensor import ScheduleRow
from gtp_dtensor.config import GTPConfig
from titan_integration.compilation import check_compile
from titan_integration.float8 import check_converters

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Degrees:
    """Sizes of the model-parallel axes of one job.

    Attributes:
        tp: ranks that share a weight and keep it sharded through the GEMM.
        gtp: ranks that share a TP slice of a weight and gather it before the GEMM; a data axis.
        etp, egtp: the same for routed experts.
    """

    tp: int
    gtp: int
    etp: int
    egtp: int

    @property
    def gtp_enabled(self) -> bool:
        """Whether any weight is sharded by this integration; otherwise torchtitan runs as it is."""
        return self.gtp > 1 or self.egtp > 1


def _remaining_shards(key: str, num_shards: int | None, parallel_key: str, parallel: int) -> int:
    """`num_shards` / `parallel`, both validated. None: 1."""
    if num_shards is None:
        return 1
    multiples = f"use {parallel} (off) or a multiple of it, such as {2 * parallel} or {4 * parallel}"
    if num_shards < parallel:
        raise ValueError(
            f"[gtp] {key} = {num_shards} is below [parallelism] {parallel_key} = {parallel}; "
            f"it counts all shards of a weight, so {multiples}"
        )
    if num_shards % parallel:
        raise ValueError(
            f"[gtp] {key} = {num_shards} is not divisible by [parallelism] {parallel_key} = {parallel}; {multiples}"
        )
    return num_shards // parallel


def degrees(job_config) -> Degrees:
    """The model-parallel degrees of a job.

    Raises:
        ValueError: a number of shards is below the TP (ETP) degree or not divisible by it.
        AttributeError: the JobConfig lacks the `[gtp]` section.
    """
    if not hasattr(job_config, "gtp"):
        raise AttributeError(
            "this JobConfig has no [gtp] section; set job.custom_config_module = 'titan_integration.job_config' "
            "or derive your own JobConfig from titan_integration.job_config.JobConfig"
        )
    tp = job_config.parallelism.tensor_parallel_degree
    etp = job_config.parallelism.expert_tensor_parallel_degree
    section = job_config.gtp
    return Degrees(
        tp=tp,
        gtp=_remaining_shards(
            "tensor_parallel_num_weight_shards",
            section.tensor_parallel_num_weight_shards,
            "tensor_parallel_degree",
            tp,
        ),
        etp=etp,
        egtp=_remaining_shards(
            "expert_tensor_parallel_num_weight_shards",
            section.expert_tensor_parallel_num_weight_shards,
            "expert_tensor_parallel_degree",
            etp,
        ),
    )


def _dtype(key: str, name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise ValueError(f"[gtp] {key} = {name!r}: choose one of {', '.join(_DTYPES)}, or '' for torchtitan's setting")
    return _DTYPES[name]


def gtp_config(job_config) -> GTPConfig:
    """The `GTPConfig` of a job, from its `[gtp]` section and torchtitan's mixed-precision keys.

    Raises:
        ValueError: a value that means nothing; names the key.
        NotImplementedError: a value that this release does not serve; names the key.
    """
    section, training = job_config.gtp, job_config.training
    if not section.calculate_per_token_loss:
        raise ValueError(
            "[gtp] calculate_per_token_loss = false: torchtitan divides the summed loss by the global number of "
            "tokens, so gradients have to be summed over GTP ranks; set it to true"
        )
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(GTPConfig)}
    values["param_dtype"] = _dtype("param_dtype", section.param_dtype or training.mixed_precision_param)
    values["reduce_dtype"] = _dtype("reduce_dtype", section.reduce_dtype or training.mixed_precision_reduce)
    # TOML and the command line have no None.
    for name in ("pad_for_alignment", "look_ahead_bytes"):
        if values[name] == 0:
            values[name] = None
    if section.recompute_keep_bytes == -1:
        values["recompute_keep_bytes"] = None
    if section.min_numel < 0:
        raise ValueError(f"[gtp] min_numel = {section.min_numel}: must be 0 or more")
    return GTPConfig(**values)


def check_gtp_job(job_config) -> None:
    """Refuses keys that have no meaning, or do not work yet, where GTP is on.

    Raises:
        ValueError: the key has no meaning under GTP.
        NotImplementedError: the combination does not work yet.
    """
    parallelism, training = job_config.parallelism, job_config.training
    policy = parallelism.fsdp_reshard_after_forward
    if policy != "default":
        raise ValueError(
            f"parallelism.fsdp_reshard_after_forward = {policy!r} has no meaning under GTP, which gathers each weight "
            "for its use and frees it after; set it to 'default'"
        )
    if training.enable_cpu_offload:
        raise ValueError(
            "training.enable_cpu_offload = true has no meaning under GTP, where nothing is offloaded; set it to false"
        )
    refused = [
        (parallelism.enable_async_tensor_parallel, "parallelism.enable_async_tensor_parallel", "set it to false"),
        (job_config.optimizer.early_step_in_backward, "optimizer.early_step_in_backward", "set it to false"),
    ]
    for wrong, key, remedy in refused:
        if wrong:
            raise NotImplementedError(f"{key} is not supported together with gtp yet: {remedy}")
    check_compile(job_config)
    check_converters(job_config)


def describe(parallel_dims, config: GTPConfig | None) -> str:
    """One line with every degree and, where GTP is on, every field of its configuration."""
    d = parallel_dims
    # dp_shard as in the TOML; the two ..optimizer_shard are what cuts the optimizer's parameters further under gtp.
    sizes = {
        "pp": d.pp, "dp_replicate": d.dp_replicate, "dp_shard": d.dp_shard // d.gtp, "cp": d.cp, "gtp": d.gtp, "tp": d.tp,
        "ep": d.ep, "egtp": d.egtp, "etp": d.etp, "optimizer_shard": d.optimizer_shard if d.gtp_enabled else 1,
        "expert_optimizer_shard": d.expert_optimizer_shard if d.gtp_enabled and d.has_experts else 1,
    }  # fmt: skip
    degrees_text = ", ".join(f"{name}={size}" for name, size in sizes.items())
    if config is None:
        return f"GTP disabled (torchtitan as it is). Degrees: {degrees_text}"
    return f"GTP enabled. {config}. Degrees: {degrees_text}"


def describe_gathers(schedule: Iterable[ScheduleRow]) -> str:
    """One line on what a step gathers, by format. ``schedule``: of `gtp_dtensor.schedule_table`."""
    issued = [row for row in schedule if row.issued_at is not None]
    formats = []
    for name in sorted({row.format for row in issued}):
        sizes = [row.num_bytes for row in issued if row.format == name]
        formats.append(f"{len(sizes)} as {name} ({sum(sizes) / 2**20:.2f} MiB)")
    on_demand = sum(row.issued_at == row.position for row in issued)
    return f"GTP gathers of the last step: {', '.join(formats) or 'none'}; {on_demand} of them issued at the use itself"
