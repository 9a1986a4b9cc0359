"""torchtitan's metrics, and one JSON object a step at full precision."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor, _get_metrics_rank


class JsonlWriter:
    """Writes one JSON object a line. Steps that a resumed run repeats replace the lines of the earlier run.

    Args:
        path: of the file; its folder is made.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._started = False

    def write(self, record: dict[str, Any]) -> None:
        """Appends `record`, which has an integer "step"."""
        if not self._started:
            self._drop_from(record["step"])
            self._started = True
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def _drop_from(self, step: int) -> None:
        os.makedirs(os.path.dirname(self._path) or ".", exist_ok=True)
        if not os.path.isfile(self._path):
            return
        with open(self._path, encoding="utf-8") as file:
            kept = [line for line in file if json.loads(line)["step"] < step]
        with open(self._path, "w", encoding="utf-8") as file:
            file.writelines(kept)


class JsonlMetricsProcessor(MetricsProcessor):
    """torchtitan's `MetricsProcessor` that also writes `{job.dump_folder}/metrics.jsonl`, every step.

    Keys: step; loss (mean over all tokens of the global batch) and max_loss (largest mean of a rank); grad_norm (before
    clipping); lr; num_tokens (of all ranks since the beginning); seconds (since the record before, validation and
    checkpoints included); peak_memory_bytes (of this rank since the last line of the log; on a CPU of the process since
    its start). With pipelining only the rank that knows the loss writes.
    """

    def __init__(self, job_config, parallel_dims, tag: str | None = None) -> None:
        super().__init__(job_config, parallel_dims, tag)
        self._jsonl = None
        if dist.get_rank() == _get_metrics_rank(parallel_dims, job_config):
            self._jsonl = JsonlWriter(os.path.join(job_config.job.dump_folder, "metrics.jsonl"))
        self._last_time = time.perf_counter()

    def should_log(self, step: int) -> bool:
        """True: the record of every step needs its loss; `log` passes on what torchtitan would log."""
        return True

    def log(self, step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None) -> None:
        """Writes the record of `step`, and logs as torchtitan does where it would."""
        now = time.perf_counter()
        if self._jsonl is not None:
            extra = extra_metrics or {}
            self._jsonl.write(
                {
                    "step": step,
                    "loss": float(global_avg_loss),
                    "max_loss": float(global_max_loss),
                    "grad_norm": float(grad_norm),
                    "lr": extra.get("lr"),
                    "num_tokens": extra.get("n_tokens_seen"),
                    "seconds": now - self._last_time,
                    "peak_memory_bytes": round(self.device_memory_monitor.get_peak_stats().max_active_gib * 2**30),
                }
            )
        self._last_time = now
        if super().should_log(step):
            super().log(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics)


def build_metrics_processor(job_config, parallel_dims, model_args=None, tag: str | None = None) -> MetricsProcessor:
    """torchtitan's `build_metrics_processor_fn`, with `[metrics] enable_jsonl`."""
    cls = JsonlMetricsProcessor if job_config.metrics.enable_jsonl else MetricsProcessor
    return cls(job_config, parallel_dims, tag)
