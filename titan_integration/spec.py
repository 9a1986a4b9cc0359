"""torchtitan's llama3 under its own name, with this integration's parts in place of some of torchtitan's."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from torchtitan.models.llama3 import (
    Transformer,
    TransformerModelArgs,
    llama3_args,
)
from torchtitan.models.llama3 import (
    get_train_spec as get_llama3_spec,
)
from torchtitan.protocols.train_spec import register_train_spec

from gtp_dtensor import logical_init
from titan_integration.data import build_dataloader
from titan_integration.metrics import build_metrics_processor
from titan_integration.optimizer import build_optimizers
from titan_integration.parallelize import parallelize_llama
from titan_integration.pipeline import pipeline_llama
from titan_integration.tokenizer import build_tokenizer
from titan_integration.validate import build_validator


class LogicalInitTransformer(Transformer):
    """torchtitan's llama3 whose weights at initialisation do not depend on how they are sharded.

    Attributes:
        draw_logical_weights: set by `parallelize_llama`. Each rank draws whole weights and keeps its part. Without it
            DTensor gives every shard the same numbers on a CPU, and numbers that depend on the mesh on a GPU.
    """

    draw_logical_weights: bool = False

    def init_weights(self, buffer_device: torch.device | None = None) -> None:
        """Initialises all weights and buffers; buffers on `buffer_device`."""
        if not self.draw_logical_weights:
            super().init_weights(buffer_device)
            return
        with logical_init():
            super().init_weights(buffer_device)


def llama3_flavors() -> dict[str, TransformerModelArgs]:
    """torchtitan's flavors of llama3 and those that our train_configs need."""
    return {
        **llama3_args,
        # The model of section 2.3 of the GTP specification.
        "gtp_minimal": TransformerModelArgs(dim=1024, n_layers=12, n_heads=16, vocab_size=32000, rope_theta=500000),
        # 18 million parameters: large enough to learn, small enough to be trained many times over.
        "20M": TransformerModelArgs(dim=576, n_layers=4, n_heads=9, vocab_size=2048, rope_theta=500000),
    }


def _build_tokenizer(flavors: dict[str, TransformerModelArgs], job_config):
    return build_tokenizer(job_config, flavors[job_config.model.flavor].vocab_size)


def register() -> None:
    """Registers llama3 with torchtitan, once per process (torchtitan refuses a second time)."""
    flavors = llama3_flavors()
    spec = dataclasses.replace(
        get_llama3_spec(),
        model_cls=LogicalInitTransformer,
        model_args=flavors,
        parallelize_fn=parallelize_llama,
        pipelining_fn=pipeline_llama,
        build_optimizers_fn=build_optimizers,
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=partial(_build_tokenizer, flavors),
        build_validator_fn=build_validator,
        build_metrics_processor_fn=build_metrics_processor,
    )
    register_train_spec("llama3", spec)
