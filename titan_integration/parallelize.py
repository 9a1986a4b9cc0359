"""How a torchtitan model gets its parallelism: torchtitan's own where GTP is off, `GTPStyle` where it is on."""

from __future__ import annotations

import fnmatch
import math
from contextlib import nullcontext

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, parallelize_module
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.tools.utils import device_type

from gtp_dtensor import GTPStyle
from gtp_dtensor.config import WIRE_FORMATS
from titan_integration.compilation import checkpoint_by_operator, compiles_model, is_by_operator, wait_before_blocks
from titan_integration.context_parallel import apply_context_parallel, titan_context_parallel_on_cpu
from titan_integration.experts import (
    ROUTER_GATES,
    apply_expert_and_tensor_parallel,
    apply_expert_style,
    check_experts,
    moe_layers,
    other_experts_stay_eager,
    own_overrides,
    own_patterns,
)
from titan_integration.families import Family
from titan_integration.float8 import prepare_float8
from titan_integration.settings import check_gtp_job, gtp_config
from titan_integration.transformer_engine import checkpoint_blocks, finish_region, use_te_linears


def _sum_fsdp_gradients_on_gloo(model: nn.Module) -> None:
    """torchtitan's gradient divide factor of 1 makes FSDP2 choose a pre-multiplied sum, which Gloo does not have."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def _attention_on_local_tensors(model: nn.Module, tp_mesh: DeviceMesh) -> None:
    """The attention of each block works on this rank's heads, as plain tensors: the CPU's kernel has no DTensor rule."""
    heads = (Shard(1),) * 3
    for block in model.layers.values():
        plan = PrepareModuleInput(input_layouts=heads, desired_input_layouts=heads, use_local_output=True)
        parallelize_module(block.attention.inner_attention, tp_mesh, plan)


def _hidden_dims(model: nn.Module, cuts_experts: bool) -> dict[str, set[int]]:
    """What tensor parallelism cuts inside feed-forward networks: which network -> its hidden dims."""
    found: dict[str, set[int]] = {}
    for block in model.layers.values():
        if hasattr(block, "feed_forward"):
            found.setdefault("feed_forward", set()).add(block.feed_forward.w2.in_features)
    for moe in moe_layers(model):
        if moe.shared_experts is not None:
            found.setdefault("moe.shared_experts", set()).add(moe.shared_experts.w2.in_features)
        if cuts_experts:
            found.setdefault("moe.experts", set()).add(moe.experts.w2.shape[2])
    return found


def check_tensor_parallel(model: nn.Module, tp: int, seq_len: int, cuts_experts: bool = True) -> None:
    """Refuses a model whose heads, hidden dims or sequence axis tp cannot cut evenly: torch fails on these later.

    Args:
        model: a model of one of our families, or a pipeline stage of it.
        tp: the tensor-parallel degree.
        seq_len: tokens of a sample.
        cuts_experts: whether routed experts are cut, too.

    Raises:
        ValueError: names the size, the axis and numbers that would work.
    """
    heads = model.model_args.n_heads
    kv_heads = getattr(model.model_args, "n_kv_heads", None) or heads
    hidden = _hidden_dims(model, cuts_experts)
    common = math.gcd(heads, kv_heads, *(size for sizes in hidden.values() for size in sizes))
    working = " or ".join(str(size) for size in range(1, common + 1) if common % size == 0)
    for size, what in (
        (heads, f"{heads} attention heads (n_heads)"),
        (kv_heads, f"{kv_heads} key and value heads (n_kv_heads)"),
        *(
            (size, f"hidden dim of {size} between {name}.w1 and {name}.w2")
            for name, sizes in hidden.items()
            for size in sorted(sizes)
        ),
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


def _parallelize_as_titan(family: Family, model: nn.Module, parallel_dims, job_config) -> nn.Module:
    """torchtitan's function, untouched; on a CPU with what Gloo and the CPU's kernels lack."""
    on_cpu = device_type == "cpu"
    if on_cpu and parallel_dims.tp_enabled and family.attention_on_dtensors:
        _attention_on_local_tensors(model, parallel_dims.get_mesh("tp"))
    with titan_context_parallel_on_cpu(family.infra, job_config) if on_cpu else nullcontext():
        model = family.titan_spec.parallelize_fn(model, parallel_dims, job_config)
    if on_cpu:
        _sum_fsdp_gradients_on_gloo(model)
    model.draw_logical_weights = on_cpu or job_config.training.logical_init
    return model


def check_patterns(model: nn.Module, section) -> None:
    """Every pattern of `[gtp] exclude` and `[gtp] wire_format_overrides` matches a weight of the whole model, and formats
    exist. Raises ValueError."""
    names = [name for name, _ in model.named_parameters()]
    for key, patterns in (("exclude", section.exclude), ("wire_format_overrides", section.wire_format_overrides)):
        for pattern in patterns:
            if not fnmatch.filter(names, pattern):
                raise ValueError(
                    f"[gtp] {key}: pattern {pattern!r} matches nothing; names of weights are such as {', '.join(names[:5])}"
                )
    for pattern, name in section.wire_format_overrides.items():
        if name not in WIRE_FORMATS:
            raise ValueError(
                f"[gtp] wire_format_overrides: {pattern!r} = {name!r}: choose one of {', '.join(WIRE_FORMATS)}"
            )


def gtp_style(model: nn.Module, parallel_dims, job_config) -> GTPStyle:
    """The style of all weights but those of routed experts: the job's `[gtp]` section, and the axes over which gathered
    weights are copies. Router gates stay whole."""
    exclude = own_patterns(model, job_config.gtp.exclude, of_experts=False)
    if moe_layers(model):
        exclude.append(ROUTER_GATES)
    return GTPStyle(
        gtp_config(job_config),
        exclude=exclude,
        wire_format_overrides=own_overrides(model, job_config, of_experts=False),
        min_numel=job_config.gtp.min_numel,
        replicate_mesh=parallel_dims.get_optional_mesh("dp_replicate"),
        optimizer_shard_mesh=parallel_dims.get_optional_mesh("optimizer_shard"),
    )


def parallelize(family: Family, model: nn.Module, parallel_dims, job_config) -> nn.Module:
    """torchtitan's `parallelize_fn` of a family, with GTP. Under pipelines it is called for every stage's part.

    Off (gtp and egtp are 1): torchtitan's function, untouched. On: tensor, expert and context parallelism and
    activation checkpointing by torchtitan's functions; then, in place of `fully_shard`, one `GTPStyle` on the routed
    experts and one on everything else.

    Raises:
        ValueError, NotImplementedError: a key that has no meaning or does not work under GTP; names it.
    """
    if parallel_dims.tp_enabled:
        cuts_experts = parallel_dims.ep == 1 or parallel_dims.etp_enabled
        check_tensor_parallel(model, parallel_dims.tp, job_config.training.seq_len, cuts_experts)
    if not parallel_dims.gtp_enabled:
        use_te_linears(model, job_config, is_sharded=False)
        return _parallelize_as_titan(family, model, parallel_dims, job_config)
    check_gtp_job(job_config)
    check_experts(job_config, family.num_experts(job_config.model.flavor))
    if not parallel_dims.pp_enabled:  # a stage has some of the weights only: `pipeline` has checked for the whole model
        check_patterns(model, job_config.gtp)
    prepare_float8(model, job_config)
    if parallel_dims.tp_enabled:
        family.apply_tp(
            model,
            parallel_dims.get_mesh("tp"),
            loss_parallel=not job_config.parallelism.disable_loss_parallel,
            cp_enabled=parallel_dims.cp_enabled,
        )
        if device_type == "cpu" and family.attention_on_dtensors:
            _attention_on_local_tensors(model, parallel_dims.get_mesh("tp"))
    region = use_te_linears(model, job_config, is_sharded=True)
    if moe_layers(model) and (parallel_dims.tp_enabled or parallel_dims.ep_enabled):
        apply_expert_and_tensor_parallel(model, parallel_dims)
    if parallel_dims.cp_enabled:
        attention = [block.attention.inner_attention for block in model.layers.values()]
        apply_context_parallel(
            attention, parallel_dims.get_mesh("cp"), model.model_args.attn_type, job_config, on_cpu=device_type == "cpu"
        )
    compiles = compiles_model(job_config)
    if compiles and is_by_operator(job_config.activation_checkpoint):
        checkpoint_by_operator(model, job_config.activation_checkpoint, family.infra._op_sac_save_list)
    elif region is not None and region.is_delayed and job_config.activation_checkpoint.mode == "full":
        checkpoint_blocks(model)
    elif job_config.activation_checkpoint.mode != "none":
        apply_ac(
            model,
            job_config.activation_checkpoint,
            model_compile_enabled=compiles,
            op_sac_save_list=family.infra._op_sac_save_list,
            base_folder=job_config.job.dump_folder,
        )
    apply_expert_style(model, parallel_dims, job_config)
    parallelize_module(model, parallel_dims.get_mesh("gtp"), gtp_style(model, parallel_dims, job_config))
    finish_region(region, model)
    if compiles:
        wait_before_blocks(model)
        with other_experts_stay_eager():
            family.apply_compile(model, job_config.compile, parallel_dims.ep_enabled)
    model.draw_logical_weights = True
    return model
