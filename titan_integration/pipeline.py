"""torchtitan's pipelines, with stages that cannot work refused at set-up."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, Schedule1F1B, get_schedule_class
from torchtitan.distributed.pipeline_parallel import pipeline_llm

from titan_integration.experts import drop_token_counts
from titan_integration.parallelize import check_patterns

_PP = "parallelism.pipeline_parallel_degree"
_PARTS = "parallelism.module_fqns_per_model_part"


def _check_number_of_stages(parallelism, num_layers: int, num_per_rank: int) -> None:
    """Every stage gets a layer, the embedding or the output."""
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    num_units = num_layers + first + last
    heaviest = max(first, last, 1)
    num_stages = parallelism.pipeline_parallel_degree * num_per_rank
    if num_units // num_stages >= heaviest:
        return
    largest = num_units // (heaviest * num_per_rank)
    remedy = f"use {_PP} of at most {largest}" if largest > 1 else "use fewer stages"
    if num_per_rank > 1:
        remedy += ", or a schedule with one stage a rank such as '1F1B'"
    raise ValueError(
        f"{_PP} = {parallelism.pipeline_parallel_degree} (axis pp) with schedule "
        f"{parallelism.pipeline_parallel_schedule!r} makes {num_stages} stages of {num_layers} layers, where the embedding "
        f"counts as {first} and the output as {last} layers (pipeline_parallel_first_stage_less_layers, ..._last_...): "
        f"stages would have no weights; {remedy}"
    )


def _check_parts(parts: list[list[str]], model: nn.Module, pp: int) -> None:
    """Stages named in the TOML: each has weights, and together they have every weight once."""
    if len(parts) % pp:
        raise ValueError(f"{_PARTS} names {len(parts)} stages, not a multiple of {_PP} = {pp} (axis pp)")
    modules = dict(model.named_modules())
    stage_of: dict[str, int] = {}
    for stage, names in enumerate(parts):
        for name in names:
            if name not in modules:
                raise ValueError(f"{_PARTS}: stage {stage} names {name!r}, and the model has no such module")
            if name in stage_of:
                raise ValueError(f"{_PARTS}: {name!r} is in stage {stage_of[name]} and in stage {stage}")
            stage_of[name] = stage
        if not any(list(modules[name].parameters()) for name in names):
            raise ValueError(
                f"{_PARTS}: stage {stage} of {len(parts)} has no weights (it names {names}); give it a layer, or use "
                f"fewer stages: {_PP} = {pp} (axis pp)"
            )
    for name, _ in model.named_parameters():
        if not any(name.startswith(f"{part}.") for part in stage_of):
            raise ValueError(f"{_PARTS}: no stage has {name}; name its module in one of the {len(parts)} stages")


def check_pipeline(job_config, model: nn.Module, num_layers: int) -> None:
    """Refuses a pipeline whose stages or microbatches cannot work.

    Raises:
        ValueError: names the keys, the axis and numbers that would work.
    """
    parallelism = job_config.parallelism
    pp = parallelism.pipeline_parallel_degree
    schedule = get_schedule_class(parallelism.pipeline_parallel_schedule)
    if parallelism.module_fqns_per_model_part is not None:
        _check_parts(parallelism.module_fqns_per_model_part, model, pp)
    elif parallelism.pipeline_parallel_layers_per_stage is None:
        _check_number_of_stages(parallelism, num_layers, 1 if issubclass(schedule, PipelineScheduleSingle) else 2)
    size, local = parallelism.pipeline_parallel_microbatch_size, job_config.training.local_batch_size
    if local % size:
        raise ValueError(
            f"training.local_batch_size = {local} is not a multiple of parallelism.pipeline_parallel_microbatch_size = "
            f"{size}; set the latter to 1 or the former to {local // size * size or size}"
        )
    if schedule is Schedule1F1B and local // size < pp:
        raise ValueError(
            f"training.local_batch_size = {local} makes {local // size} microbatches, fewer than the {pp} stages of {_PP} "
            f"(axis pp); set it to {pp * size} or more, or {_PP} to {local // size} or less"
        )


def _forget_tokens_of_trial_runs(schedule) -> None:
    """Routers do not count the tokens with which torch finds out what stages send to each other.

    It runs every stage forward and backward before the first microbatch; where the input comes from another stage it is
    uninitialised memory. Counted, those tokens would move the expert bias in the first step.
    """
    stages = [schedule._stage] if isinstance(schedule, PipelineScheduleSingle) else schedule._stages
    for stage in stages:
        for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
            setattr(stage, name, _then(getattr(stage, name), functools.partial(drop_token_counts, [stage.submod])))


def _then(function: Callable, afterwards: Callable[[], None]) -> Callable:
    @functools.wraps(function)
    def both(*args, **kwargs):
        result = function(*args, **kwargs)
        afterwards()
        return result

    return both


def pipeline(model, parallel_dims, job_config, device, model_args, parallelize_fn, loss_fn):
    """torchtitan's `pipelining_fn`, after checks; every stage's model part is parallelized by itself.

    Raises:
        ValueError: see `check_pipeline`; a pattern of the `[gtp]` section that matches no weight of the whole model.
    """
    check_pipeline(job_config, model, model_args.n_layers)
    if parallel_dims.gtp_enabled:
        check_patterns(model, job_config.gtp)
    built = pipeline_llm(model, parallel_dims, job_config, device, model_args, parallelize_fn, loss_fn)
    if parallel_dims.gtp_enabled:
        _forget_tokens_of_trial_runs(built[0])
    return built
