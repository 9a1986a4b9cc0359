"""torchtitan's models under their own names, with this integration's parts in place of some of torchtitan's."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
from torchtitan.protocols.train_spec import ModelProtocol, TrainSpec, register_train_spec

from gtp_dtensor import logical_init
from titan_integration import grouped_converters
from titan_integration.data import build_dataloader
from titan_integration.families import Family, families
from titan_integration.metrics import build_metrics_processor
from titan_integration.optimizer import build_balancing_optimizers, build_optimizers
from titan_integration.parallelize import parallelize
from titan_integration.pipeline import pipeline
from titan_integration.tokenizer import build_tokenizer
from titan_integration.validate import build_validator


@functools.cache
def with_logical_init(model_cls: type[ModelProtocol]) -> type[ModelProtocol]:
    """`model_cls` whose weights at initialisation do not depend on how they are sharded.

    Its attribute `draw_logical_weights` is set by `parallelize`. Each rank then draws whole weights and keeps its part.
    Without it DTensor gives every shard the same numbers on a CPU, and numbers that depend on the mesh on a GPU.
    """

    class LogicalInit(model_cls):
        draw_logical_weights: bool = False

        def init_weights(self, buffer_device: torch.device | None = None) -> None:
            """Initialises all weights and buffers; buffers on `buffer_device`."""
            if not self.draw_logical_weights:
                super().init_weights(buffer_device)
                return
            with logical_init():
                super().init_weights(buffer_device)

    LogicalInit.__name__ = f"LogicalInit{model_cls.__name__}"
    LogicalInit.__qualname__ = LogicalInit.__name__
    return LogicalInit


def _build_tokenizer(family: Family, job_config):
    return build_tokenizer(job_config, family.flavors[job_config.model.flavor].vocab_size)


def train_spec(family: Family) -> TrainSpec:
    """torchtitan's specification of a family, with our parts."""
    titan = family.titan_spec
    balancing = titan.build_optimizers_fn is build_optimizers_with_moe_load_balancing
    return dataclasses.replace(
        titan,
        model_cls=with_logical_init(titan.model_cls),
        model_args=family.flavors,
        parallelize_fn=functools.partial(parallelize, family),
        pipelining_fn=pipeline if titan.pipelining_fn is not None else None,
        build_optimizers_fn=build_balancing_optimizers if balancing else build_optimizers,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=functools.partial(_build_tokenizer, family),
        build_validator_fn=build_validator,
        build_metrics_processor_fn=build_metrics_processor,
    )


def register() -> None:
    """Registers every family and our converters with torchtitan, once per process (torchtitan refuses a second time)."""
    grouped_converters.register()
    for name, family in families().items():
        register_train_spec(name, train_spec(family))
