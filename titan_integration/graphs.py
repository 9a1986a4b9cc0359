"""`[gtp] cuda_graph`: torchtitan's training step as one CUDA graph, or its blocks as two each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torchtitan.tools.utils import device_type

from gtp_dtensor import GraphedBlocks, graph_blocks, graph_step
from titan_integration.gradients import clip_exactly

CUDA_GRAPHS = ("off", "step", "block")
_OPTIMIZERS = ("Adam", "AdamW")


def check_cuda_graph(job_config, *, gtp_enabled: bool) -> None:
    """Refuses jobs whose steps, or blocks, cannot be CUDA graphs.

    Raises:
        ValueError: names the key.
        NotImplementedError: a combination that nobody has tried, or that does not work; names the key.
    """
    section = job_config.gtp
    choice = section.cuda_graph
    if choice not in CUDA_GRAPHS:
        raise ValueError(f"[gtp] cuda_graph = {choice!r}: choose one of {', '.join(CUDA_GRAPHS)}")
    if choice == "off":
        return
    key = f"[gtp] cuda_graph = {choice!r}"
    if device_type != "cuda":
        raise ValueError(f"{key} needs CUDA devices, and these are {device_type}; set it to 'off'")
    if not gtp_enabled:
        raise ValueError(f"{key} needs GTP on: set tensor_parallel_num_weight_shards, or cuda_graph to 'off'")
    if choice == "step":
        _check_step(job_config, key)
    elif not section.cuda_graph_modules:
        raise ValueError(f"{key} and no cuda_graph_modules: name modules by FQN patterns, such as 'layers.*'")
    if section.check_param_states:
        raise ValueError(f"{key} and check_param_states = true, which stops the host at each use: set one of them off")
    checkpointing, parallelism = job_config.activation_checkpoint, job_config.parallelism
    if checkpointing.mode != "none" and checkpointing.preserve_rng_state:
        raise ValueError(
            f"{key}: random states cannot be read in a graph; set activation_checkpoint.preserve_rng_state = false"
        )
    parts = [pattern for pattern in section.cuda_graph_modules if pattern.count(".") > 1]
    if choice == "block" and checkpointing.mode in ("full", "selective") and parts:
        raise ValueError(
            f"{key} and activation_checkpoint.mode = {checkpointing.mode!r} with cuda_graph_modules {parts}: a checkpointed block "
            "would call these again in its backward, and graphs keep their activations. Set the mode to 'none', or name whole "
            "blocks ('layers.*')"
        )
    refused = (
        (parallelism.pipeline_parallel_degree > 1, "parallelism.pipeline_parallel_degree > 1"),
        (parallelism.context_parallel_degree > 1, "parallelism.context_parallel_degree > 1"),
        (job_config.compile.enable and "model" in job_config.compile.components, "compile of the model"),
        (section.linear_backend != "torch", "linear_backend = 'transformer_engine'"),
    )
    for is_set, what in refused:
        if is_set:
            raise NotImplementedError(f"{key} is not supported together with {what} yet: set it to 'off'")


def _check_step(job_config, key: str) -> None:
    optimizer = job_config.optimizer
    if optimizer.name not in _OPTIMIZERS or optimizer.implementation != "fused":
        raise ValueError(
            f"{key} needs an optimizer that a graph can hold: set optimizer.name to one of {', '.join(_OPTIMIZERS)} and "
            "optimizer.implementation = 'fused'"
        )
    if job_config.gtp.skip_nonfinite_steps:
        raise ValueError(
            f"{key} and skip_nonfinite_steps = true, which reads each norm on the host: set one of them off"
        )
    if job_config.parallelism.expert_parallel_degree > 1:
        raise NotImplementedError(
            f"{key} with parallelism.expert_parallel_degree > 1, whose dispatch asks the host: set it to 'block', with "
            "cuda_graph_modules that leave experts out"
        )


class _Divisor:
    """In place of the number of tokens that a loss is divided by: the same product by its inverse that torch makes of a
    division by a number, with the inverse in a tensor, which a graph reads anew each time."""

    def __init__(self, inverse: torch.Tensor) -> None:
        self._inverse = inverse

    def __rtruediv__(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self._inverse


class StepGraph:
    """Makes one graphed step of what torchtitan's `train_step` does between `zero_grad` and the learning-rate schedule.

    torchtitan calls for one microbatch after the other, then for clipping, then for the optimizer's step. Here microbatches
    are only collected; clipping runs all of it.

    Attributes:
        is_running: the graphed step computes now, so microbatches are to be computed.
    """

    def __init__(self, trainer) -> None:
        self._trainer = trainer
        self.is_running = False
        self._microbatches: list[tuple[dict, torch.Tensor]] = []
        self._losses: list[torch.Tensor] = []
        self._num_tokens = 1.0
        self._max_norm, self._norm_type = 0.0, 2.0
        self._step_optimizers = trainer.optimizers.step
        trainer.optimizers.step = lambda *args, **kwargs: None
        self._rates = [torch.zeros((), device=trainer.device) for _ in self._groups()]
        (model,) = trainer.model_parts
        self._graphed = graph_step(self._compute, model, list(trainer.optimizers))

    def collect(self, input_dict: dict, labels: torch.Tensor, num_tokens: float) -> torch.Tensor:
        """Takes one microbatch. Returns its loss, to be."""
        self._microbatches.append((input_dict, labels))
        self._num_tokens = num_tokens
        self._losses.append(torch.zeros((), device=labels.device))
        return self._losses[-1]

    def run(self, max_norm: float, norm_type: float) -> torch.Tensor:
        """The whole step. Returns the norm of its gradients before clipping."""
        self._max_norm, self._norm_type = max_norm, norm_type
        self._trainer.checkpointer.maybe_wait_for_staging()  # torchtitan does before the optimizer writes parameters
        # As torch's kernels invert a number in float32.
        inverse = torch.tensor(1.0 / torch.tensor(self._num_tokens, dtype=torch.float32).item(), dtype=torch.float32)
        microbatches, self._microbatches = self._microbatches, []
        losses, self._losses = self._losses, []
        with self._rates_in_tensors():
            found, norm = self._graphed(microbatches, inverse.to(self._trainer.device))
        for loss, value in zip(losses, found):
            loss.copy_(value)
        return norm

    def _compute(self, microbatches: list[tuple[dict, torch.Tensor]], inverse: torch.Tensor) -> tuple:
        trainer = self._trainer
        self.is_running = True
        trainer.begin_microbatches()
        try:
            losses = [
                trainer.forward_backward_step(
                    input_dict=dict(input_dict), labels=labels, global_valid_tokens=_Divisor(inverse)
                )
                for input_dict, labels in microbatches
            ]
            trainer.complete_gradients()
            parameters = [p for part in trainer.model_parts for p in part.parameters()]
            norm = clip_exactly(parameters, self._max_norm, None, self._norm_type)
            self._step_optimizers()
        finally:
            self.is_running = False
        return losses, norm

    @contextmanager
    def _rates_in_tensors(self) -> Iterator[None]:
        """Inside, optimizers read learning rates from tensors, as a graph has to; outside, schedules, logs and checkpoints
        have the numbers that they know."""
        before = [(group, group["lr"], group["capturable"]) for group in self._groups()]
        for (group, rate, _), tensor in zip(before, self._rates):
            tensor.fill_(rate)
            group["lr"], group["capturable"] = tensor, True
        try:
            yield
        finally:
            for group, rate, capturable in before:
                group["lr"], group["capturable"] = rate, capturable

    def _groups(self) -> list[dict]:
        # A loaded state dict brings new ones.
        return [group for optimizer in self._trainer.optimizers for group in optimizer.param_groups]

    def release(self) -> None:
        """Frees the graph, as has to be done before process groups are destroyed."""
        self._graphed.release()


def graphed_blocks(trainer) -> GraphedBlocks:
    """The modules that `[gtp] cuda_graph_modules` names, as graphs."""
    (model,) = trainer.model_parts
    return graph_blocks(model, trainer.job_config.gtp.cuda_graph_modules)
