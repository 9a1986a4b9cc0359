"""How a torchtitan model gets its parallelism: torchtitan's own where GTP is off, `GTPStyle` where it is on."""

from __future__ import annotations

import math
from contextlib import nullcontext

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import parallelize_module
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3.infra.parallelize import (
    _op_sac_save_list,
    apply_tp,
)
from torchtitan.models.llama3.infra.parallelize import (
    parallelize_llama as parallelize_llama_titan,
)
from torchtitan.tools.utils import device_type

from gtp_dtensor import GTPStyle
from titan_integration.context_parallel import apply_context_parallel, titan_context_parallel_on_cpu
from titan_integration.settings import check_gtp_job, gtp_config


def _sum_fsdp_gradients_on_gloo(model: nn.Module) -> None:
    """torchtitan's gradient divide factor of 1 makes FSDP2 choose a pre-multiplied sum, which Gloo does not have."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def check_tensor_parallel(model: nn.Module, tp: int, seq_len: int) -> None:
    """Refuses a llama whose heads, hidden dims or sequence axis tp cannot cut evenly: torch fails on these later.

    Raises:
        ValueError: names the size, the axis and numbers that would work.
    """
    heads, hidden = model.model_args.n_heads, set()
    kv_heads = model.model_args.n_kv_heads or heads
    for block in model.layers.values():
        hidden.add(block.feed_forward.w2.in_features)
    common = math.gcd(heads, kv_heads, *hidden)
    working = " or ".join(str(size) for size in range(1, common + 1) if common % size == 0)
    for size, what in (
        (heads, f"{heads} attention heads (n_heads)"),
        (kv_heads, f"{kv_heads} key and value heads (n_kv_heads)"),
        *((size, f"hidden dim of {size} between feed_forward.w1 and feed_forward.w2") for size in sorted(hidden)),
    ):
        if size % tp:
            raise ValueError(
                f"parallelism.tensor_parallel_degree = {tp} (axis tp) does not divide this model's {what}; use {working}"
            )
    if seq_len % tp:
        lower = seq_len // tp * tp
        raise ValueError(
            f"training.seq_len = {seq_len} is not divisible by parallelism.tensor_parallel_degree = {tp} (axis tp), which "
            f"shards the sequence between attention and feed-forward; use {f'{lower} or ' if lower else ''}{lower + tp}"
        )


def _parallelize_as_titan(model: nn.Module, parallel_dims, job_config) -> nn.Module:
    """torchtitan's function, untouched; on a CPU with what Gloo and the CPU's kernels lack."""
    on_cpu = device_type == "cpu"
    with titan_context_parallel_on_cpu(model, job_config) if on_cpu else nullcontext():
        model = parallelize_llama_titan(model, parallel_dims, job_config)
    if on_cpu:
        _sum_fsdp_gradients_on_gloo(model)
    model.draw_logical_weights = on_cpu or job_config.training.logical_init
    return model


def gtp_style(parallel_dims, job_config) -> GTPStyle:
    """The style of a job: its `[gtp]` section, and the axes over which gathered weights are copies."""
    return GTPStyle(
        gtp_config(job_config),
        exclude=job_config.gtp.exclude,
        min_numel=job_config.gtp.min_numel,
        replicate_mesh=parallel_dims.get_optional_mesh("dp_replicate"),
        optimizer_shard_mesh=parallel_dims.get_optional_mesh("optimizer_shard"),
    )


def parallelize_llama(model: nn.Module, parallel_dims, job_config) -> nn.Module:
    """torchtitan's `parallelize_fn` of llama3, with GTP. Under pipelines it is called for every stage's part.

    Off (gtp = 1): torchtitan's function, untouched. On: tensor parallelism, context parallelism and activation
    checkpointing by torchtitan's functions, then `GTPStyle` on the whole part in place of `fully_shard`.

    Raises:
        ValueError, NotImplementedError: a key that has no meaning or does not work under GTP; names it.
    """
    if parallel_dims.tp_enabled:
        check_tensor_parallel(model, parallel_dims.tp, job_config.training.seq_len)
    if not parallel_dims.gtp_enabled:
        return _parallelize_as_titan(model, parallel_dims, job_config)
    check_gtp_job(job_config)
    if parallel_dims.tp_enabled:
        apply_tp(
            model,
            parallel_dims.get_mesh("tp"),
            loss_parallel=not job_config.parallelism.disable_loss_parallel,
            enable_float8_tensorwise_tp=False,
            cp_enabled=parallel_dims.cp_enabled,
        )
    if parallel_dims.cp_enabled:
        apply_context_parallel(model, parallel_dims.get_mesh("cp"), job_config, on_cpu=device_type == "cpu")
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=False,
            op_sac_save_list=_op_sac_save_list,
            base_folder=job_config.job.dump_folder,
        )
    parallelize_module(model, parallel_dims.get_mesh("gtp"), gtp_style(parallel_dims, job_config))
    model.draw_logical_weights = True
    return model
