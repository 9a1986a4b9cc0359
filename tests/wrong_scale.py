"""Imported by a training job (``--experimental.custom_import=tests.wrong_scale``), it makes every scale of gathered
quantized weights twice what it should be."""

from gtp_dtensor.quantized import QuantizedShard

_read = QuantizedShard.read


def _read_doubled(self, *args):
    return _read(self, *args) * 2


QuantizedShard.read = _read_doubled
