"""Imported by every rank of a training job (``--experimental.custom_import=tests.titan_compile_probe``):
titan_probe.py, and what was compiled.

At the end of the training each rank writes ``compiled_{rank}.json`` into the dump folder: the code objects for which
torch compiled a graph, once for each compilation, the number of graphs, and the reasons of graph breaks with their numbers.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch.distributed as dist
from torch._dynamo.utils import counters, get_compilation_metrics

from tests import titan_probe  # noqa: F401
from titan_integration.trainer import GTPTrainer

_train = GTPTrainer.train


def _probed_train(trainer: GTPTrainer) -> None:
    _train(trainer)
    names = [
        f"{'/'.join(metric.co_filename.split(os.sep)[-2:])}:{metric.co_name}"
        for metric in get_compilation_metrics()
        if metric.is_forward and metric.fail_type is None
    ]
    found = {
        "code": names,
        "num_graphs": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
    }
    Path(trainer.job_config.job.dump_folder, f"compiled_{dist.get_rank()}.json").write_text(json.dumps(found))


GTPTrainer.train = _probed_train
