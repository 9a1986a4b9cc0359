"""Imported by every rank of a training job (``--experimental.custom_import=tests.titan_probe``).

At the end of the training each rank writes ``probe_{rank}.json`` into the dump folder: its process groups with their
time-outs, and gtp_dtensor's counters summed over its model parts. With ``PROBE_NAN_STEP`` set, rank 1 spoils one
element of a gradient in that step, and every rank compares its state before and after it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist

from gtp_dtensor import stats
from titan_integration.trainer import GTPTrainer

_train, _train_step, _microbatch = GTPTrainer.train, GTPTrainer.train_step, GTPTrainer.forward_backward_step


def _state(trainer: GTPTrainer) -> list:
    """Copies of all that a skipped step must leave as it is: local parameters, optimizer state, learning rates."""
    values = [p for part in trainer.model_parts for p in part.parameters()]
    for optimizer in trainer.optimizers.optimizers:
        values += [v for p in optimizer.param_groups[0]["params"] for v in optimizer.state.get(p, {}).values()]
    copies = [getattr(value, "_local_tensor", value).detach().clone() for value in values]
    return [*copies, *(schedule.last_epoch for schedule in trainer.lr_schedulers.schedulers)]


def _equal(before: list, after: list) -> bool:
    return len(before) == len(after) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(before, after)
    )


def _probed_microbatch(trainer: GTPTrainer, **inputs) -> torch.Tensor:
    loss = _microbatch(trainer, **inputs)
    if trainer.step == int(os.environ.get("PROBE_NAN_STEP", "0")) and dist.get_rank() == 1:
        weight = next(p for p in trainer.model_parts[0].parameters() if p.dim() == 2 and p.grad is not None)
        weight.grad._local_tensor.view(-1)[3] = float("nan")
    return loss


def _probed_train_step(trainer: GTPTrainer, data_iterator) -> None:
    before = _state(trainer)
    _train_step(trainer, data_iterator)
    trainer.changed = [*getattr(trainer, "changed", []), not _equal(before, _state(trainer))]


def _probed_train(trainer: GTPTrainer) -> None:
    _train(trainer)
    groups = [
        (dist.get_process_group_ranks(group), group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
        for group in dist.distributed_c10d._world.pg_map
        if dist.get_backend(group) != "fake"
    ]
    counters: dict[str, int] = {}
    for part in trainer.model_parts:
        for name, value in dataclasses.asdict(stats(part)).items():
            counters[name] = counters.get(name, 0) + value
    found = {"groups": groups, "stats": counters, "changed": trainer.changed}
    graphs = trainer._blocks if trainer._graph is None else trainer._graph._graphed
    if graphs is not None:
        found["num_replays"] = graphs.num_replays
    Path(trainer.job_config.job.dump_folder, f"probe_{dist.get_rank()}.json").write_text(json.dumps(found))


GTPTrainer.train, GTPTrainer.train_step = _probed_train, _probed_train_step
GTPTrainer.forward_backward_step = _probed_microbatch
