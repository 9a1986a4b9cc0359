"""torchtitan's Trainer with the `gtp` axis, exact clipping, time-outs on every process group, and clean ends."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
import torchtitan.train as titan_train
from torchtitan.components.metrics import _get_metrics_rank
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import device_module, device_type

from gtp_dtensor import GraphedBlocks, finalize_grads, schedule_table, set_requires_gradient_sync
from titan_integration import cpu
from titan_integration.checkpoint import GTPCheckpointManager, check_checkpoint
from titan_integration.context_parallel import check_context_parallel
from titan_integration.data import GlobalOrderLoader
from titan_integration.dims import GTPParallelDims
from titan_integration.experts import check_experts, drop_token_counts
from titan_integration.families import families
from titan_integration.float8 import converters_by_us
from titan_integration.gradients import clip_exactly, correct_scale, write_whole_gradients
from titan_integration.graphs import StepGraph, check_cuda_graph, graphed_blocks
from titan_integration.settings import check_gtp_job, describe, describe_gathers, gtp_config
from titan_integration.transformer_engine import check_linear_backend


def set_timeouts(timeout: timedelta) -> None:
    """Sets the time-out of every process group of this process, those private to a library included.

    A collective whose peers are dead or stuck then raises within `timeout` instead of torch's 30 minutes. All ranks
    meet in a barrier first, so that none works under the new time-out while another is still in a long set-up.
    """
    dist.barrier(device_ids=[device_module.current_device()] if device_type != "cpu" else None)
    # torchtitan's own set_pg_timeouts knows only the groups of its meshes; torch lists all of them here.
    for group in list(dist.distributed_c10d._world.pg_map):
        if dist.get_backend(group) != "fake":
            dist.distributed_c10d._set_pg_timeout(timeout, group)


class GTPTrainer(titan_train.Trainer):
    """Trains a torchtitan job whose `[gtp]` section may shard weights over the `gtp` axis.

    Where GTP is off this is torchtitan's Trainer, but for two faults of 0.2.2 that it works round: gradients under
    pipeline parallelism are not divided by the number of tokens, and those under DDP alone are divided once too often.
    """

    parallel_dims: GTPParallelDims

    def __init__(self, job_config) -> None:
        self._ended_well = False
        self._timeouts_tightened = False
        self._num_global_tokens: torch.Tensor | float | None = None
        self._num_microbatches = 0
        self._skips_step = False
        self._num_skipped_steps = 0
        self._graph: StepGraph | None = None
        self._blocks: GraphedBlocks | None = None
        with self._checkpoints_by_us(), converters_by_us():
            super().__init__(job_config)
        if job_config.gtp.skip_nonfinite_steps:
            self._make_skippable(self.optimizers)
            self._make_skippable(self.lr_schedulers)
        if job_config.gtp.cuda_graph == "step":
            self._graph = StepGraph(self)
        elif job_config.gtp.cuda_graph == "block":
            self._blocks = graphed_blocks(self)
        set_timeouts(timedelta(seconds=job_config.comm.init_timeout_seconds))
        config = gtp_config(job_config) if self.parallel_dims.gtp_enabled else None
        if dist.get_rank() == 0:
            logger.info(describe(self.parallel_dims, config))

    def init_distributed(self) -> GTPParallelDims:
        """Starts the process group and returns the degrees of this job, all of them checked."""
        job_config = self.job_config
        world_size = dist_utils.init_distributed(
            job_config.comm,
            enable_cpu_backend=job_config.training.enable_cpu_offload and device_type != "cpu",
            base_folder=job_config.job.dump_folder,
        )
        served = families()
        family = served.get(job_config.model.name)
        num_experts = 0 if family is None else family.num_experts(job_config.model.flavor)
        dims = GTPParallelDims.from_job_config(job_config, world_size, has_experts=num_experts > 0)
        if dims.gtp_enabled:
            if family is None:
                raise NotImplementedError(
                    f"model.name = {job_config.model.name!r} is not supported together with gtp; use one of "
                    f"{', '.join(map(repr, served))}"
                )
            check_gtp_job(job_config)
            check_experts(job_config, num_experts)
            gtp_config(job_config)
        check_cuda_graph(job_config, gtp_enabled=dims.gtp_enabled)
        check_linear_backend(job_config)
        check_checkpoint(job_config.checkpoint)
        flavor = None if family is None else family.flavors.get(job_config.model.flavor)
        attention, on_cpu = getattr(flavor, "attn_type", "sdpa"), device_type == "cpu"
        check_context_parallel(job_config, attention, on_cpu, serves_flex=job_config.model.name == "llama3")
        if on_cpu:
            cpu.check_job(job_config, attention)
        self._quiet_other_ranks(dims)
        return dims

    @contextmanager
    def _checkpoints_by_us(self):
        """torchtitan's `__init__` looks its checkpoint manager up in its module; it finds ours while in here."""
        original = titan_train.CheckpointManager

        def build(**arguments) -> GTPCheckpointManager:
            # Whether an adapter of another model can work on one weight at a time, nobody has looked.
            is_known = self.job_config.model.name in families()
            return GTPCheckpointManager(gathers_for_hf=is_known, **arguments)

        titan_train.CheckpointManager = build
        try:
            yield
        finally:
            titan_train.CheckpointManager = original

    def _quiet_other_ranks(self, dims: GTPParallelDims) -> None:
        """Ranks outside LOG_RANK (torchtitan's variable) log warnings and errors only.

        By default rank 0 is shown, and the rank that has the loss: under a pipeline that is one of its last stage.
        """
        default = sorted({0, _get_metrics_rank(dims, self.job_config)})
        shown = os.environ.setdefault("LOG_RANK", ",".join(map(str, default))).split(",")
        if str(dist.get_rank()) not in shown:
            logger.setLevel(logging.WARNING)

    def batch_generator(self, data_iterable: Iterable) -> Iterator:
        """Microbatches; after a resume at another degree the token count continues from what was really read."""
        loader = self.dataloader
        if isinstance(loader, GlobalOrderLoader):
            degree = self.parallel_dims.get_mesh("batch").size() if self.parallel_dims.dp_enabled else 1
            self.ntokens_seen = loader.position * loader.seq_len // degree
        return super().batch_generator(data_iterable)

    def forward_backward_step(self, *, input_dict, labels, global_valid_tokens) -> torch.Tensor:
        """One microbatch, forward and backward; returns its loss sum over the global number of tokens. With a step graph, it
        is computed when the step is."""
        if self._graph is not None and not self._graph.is_running:
            return self._graph.collect(input_dict, labels, global_valid_tokens)
        self._num_global_tokens = global_valid_tokens
        self._num_microbatches += 1
        # A pipeline's microbatches are within its schedule, so there the replicas reduce after it, before clipping.
        is_last = self._num_microbatches == self.gradient_accumulation_steps
        for model in self.model_parts:
            set_requires_gradient_sync(model, is_last and not self.parallel_dims.pp_enabled)
        return super().forward_backward_step(
            input_dict=input_dict, labels=labels, global_valid_tokens=global_valid_tokens
        )

    def train_step(self, data_iterator) -> None:
        """One optimizer step."""
        self.begin_microbatches()
        with self._clipping_by_us():
            super().train_step(data_iterator)
        if not self._timeouts_tightened:
            # Also after a resume, where torchtitan (which looks at the step number) would not.
            self._timeouts_tightened = True
            set_timeouts(timedelta(seconds=self.job_config.comm.train_timeout_seconds))

    def begin_microbatches(self) -> None:
        """The microbatches of a step are counted from here."""
        self._num_microbatches = 0

    @contextmanager
    def _clipping_by_us(self):
        """torchtitan's `train_step` looks its clipping function up in a module; it finds ours while in here."""
        titan_clip = dist_utils.clip_grad_norm_

        def clip(parameters, max_norm, norm_type=2.0, **kwargs) -> torch.Tensor:
            if self._graph is not None:
                return self._graph.run(max_norm, norm_type)
            self.complete_gradients()
            if self.parallel_dims.gtp_enabled or self.job_config.training.exact_grad_norm:
                norm = clip_exactly(parameters, max_norm, self.parallel_dims.get_optional_mesh("pp"), norm_type)
            else:
                norm = titan_clip(parameters, max_norm, norm_type, **kwargs)
            self._decide_skip(norm)
            return norm

        dist_utils.clip_grad_norm_ = clip
        try:
            yield
        finally:
            dist_utils.clip_grad_norm_ = titan_clip

    def complete_gradients(self) -> None:
        """Brings the gradients of all microbatches into `.grad`, rightly scaled; writes them down if the job asks."""
        if self.parallel_dims.gtp_enabled:
            for model in self.model_parts:
                finalize_grads(model)
        correct_scale(self.model_parts, self.parallel_dims, self._num_global_tokens)
        folder = self.job_config.debug.first_gradients_folder
        if folder and self.step == 1:
            write_whole_gradients(self.model_parts, self.parallel_dims, folder)

    def _decide_skip(self, norm: torch.Tensor) -> None:
        """Whether this step leaves everything as it is, the balance of experts too. The norm, and so the answer, is the
        same on all ranks."""
        self._skips_step = self.job_config.gtp.skip_nonfinite_steps and not bool(torch.isfinite(norm))
        if self._skips_step:
            self._num_skipped_steps += 1
            drop_token_counts(self.model_parts)
            if dist.get_rank() == 0:
                logger.warning(
                    f"Step {self.step} skipped: its gradient norm is {norm.item()}. Skipped so far in this run: "
                    f"{self._num_skipped_steps}"
                )

    def _make_skippable(self, stepped) -> None:
        """`stepped.step()` does nothing in a step that is skipped."""
        step = stepped.step

        def step_unless_skipped(*args, **kwargs):
            return None if self._skips_step else step(*args, **kwargs)

        stepped.step = step_unless_skipped

    def train(self) -> None:
        """Trains to the end."""
        super().train()
        if self.parallel_dims.gtp_enabled and dist.get_rank() == 0:
            logger.info(describe_gathers(row for part in self.model_parts for row in schedule_table(part)))
        self._ended_well = True

    def close(self) -> None:
        """Closes writers, frees graphs. After a training that ended well, waits for all ranks: Gloo aborts if one leaves early."""
        super().close()
        for graphs in (self._graph, self._blocks):
            if graphs is not None:
                graphs.release()
        if self._ended_well and dist.is_initialized():
            dist.barrier(device_ids=[device_module.current_device()] if device_type != "cpu" else None)
