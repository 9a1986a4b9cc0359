"""How a torchtitan model gets its parallelism: torchtitan's own where GTP is off, `GTPStyle` where it is on."""

from __future__ import annotations

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
from titan_integration.settings import check_gtp_job, gtp_config


def _sum_fsdp_gradients_on_gloo(model: nn.Module) -> None:
    """torchtitan's gradient divide factor of 1 makes FSDP2 choose a pre-multiplied sum, which Gloo does not have."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def parallelize_llama(model: nn.Module, parallel_dims, job_config) -> nn.Module:
    """torchtitan's `parallelize_fn` of llama3, with GTP.

    Off (gtp = 1): torchtitan's function, untouched. On: tensor parallelism and activation checkpointing by torchtitan's
    functions, then `GTPStyle` on the whole model in place of `fully_shard`.

    Raises:
        ValueError, NotImplementedError: a key that has no meaning or does not work under GTP; names it.
    """
    on_cpu = device_type == "cpu"
    if not parallel_dims.gtp_enabled:
        model = parallelize_llama_titan(model, parallel_dims, job_config)
        if on_cpu:
            _sum_fsdp_gradients_on_gloo(model)
        model.draw_logical_weights = on_cpu or job_config.training.logical_init
        return model
    check_gtp_job(job_config)
    seq_len, tp = job_config.training.seq_len, parallel_dims.tp
    if seq_len % tp:
        raise ValueError(
            f"training.seq_len = {seq_len} is not divisible by tensor_parallel_degree = {tp}, which shards the "
            "sequence between attention and feed-forward"
        )
    if parallel_dims.tp_enabled:
        apply_tp(
            model,
            parallel_dims.get_mesh("tp"),
            loss_parallel=not job_config.parallelism.disable_loss_parallel,
            enable_float8_tensorwise_tp=False,
        )
    if job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=False,
            op_sac_save_list=_op_sac_save_list,
            base_folder=job_config.job.dump_folder,
        )
    style = GTPStyle(gtp_config(job_config), exclude=job_config.gtp.exclude, min_numel=job_config.gtp.min_numel)
    parallelize_module(model, parallel_dims.get_mesh("gtp"), style)
    model.draw_logical_weights = True
    return model
