"""Imported by every rank of a training job (``--experimental.custom_import=tests.titan_graph_probe``): titan_probe.py, and
step graphs on a CPU, by a stand-in."""

from __future__ import annotations

import titan_integration.graphs
import titan_integration.trainer
from tests import titan_probe  # noqa: F401
from tests.graph_stand_in import graphed


def _graph_step(step, model, optimizers):
    return graphed(step, model, *optimizers)[0]


titan_integration.graphs.graph_step = _graph_step
titan_integration.graphs.device_type = "cuda"
