"""Imported by every rank of a training job (``--experimental.custom_import=tests.titan_graph_probe``): titan_probe.py, and
step graphs on a CPU, by a stand-in."""

from __future__ import annotations

import titan_integration.graphs
from gtp_dtensor.block_graphs import GraphedBlocks
from tests import titan_probe  # noqa: F401
from tests.graph_stand_in import BlockStandIn, graphed


def _graph_step(step, model, optimizers):
    return graphed(step, model, *optimizers)[0]


def _graph_blocks(model, modules):
    return GraphedBlocks(model, modules, recorder=BlockStandIn(model), num_warmup_passes=2)


titan_integration.graphs.graph_step, titan_integration.graphs.graph_blocks = _graph_step, _graph_blocks
titan_integration.graphs.device_type = "cuda"
