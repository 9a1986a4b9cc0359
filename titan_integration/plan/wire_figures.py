"""What a wire format costs, from the format itself."""

from __future__ import annotations

import torch

from gtp_dtensor.wire import View, wire_format
from titan_integration.settings import gtp_config

from .arrangement import Arrangement
from .report import figures

_MATRIX = torch.Size((8192, 8192))


def bytes_per_element(name: str) -> tuple[float, float]:
    """(bits of an element without scales, bytes that a gather brings for it) in a format.

    Raises:
        ImportError: torchao is not installed.
    """
    wire = wire_format(name)
    if wire is None:
        return 16.0, 2.0
    codes, *scales = (shape.numel() / _MATRIX.numel() for shape in wire.part_shapes(View.ROWS, _MATRIX))
    return 8 * codes, codes + sum(scales)


def summary(job_config, arrangement: Arrangement) -> str:
    """The specification's summary figures of a job's setting."""
    name = arrangement.wire or job_config.gtp.wire_format
    config = gtp_config(job_config)
    bits, gathered = bytes_per_element("bf16" if name == "auto" else name)
    if bits == 16:
        bits, gathered = 8.0 * config.param_dtype.itemsize, float(config.param_dtype.itemsize)
    return figures(arrangement, bits, gathered, config.reduce_dtype.itemsize)
