"""scripts/bench_checkpoint.py measures what it says."""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.harness import ranks

SCRIPTS = Path(__file__).parent.parent / "scripts"
SIZES = "--layers 1 --dim 32 --ffn 64 --heads 4 --kv-heads 2".split()


@pytest.fixture
def bench(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("bench_checkpoint")


def imported():
    """The same on a rank, which has no fixtures."""
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    return importlib.import_module("bench_checkpoint")


@ranks(2, timeout=120.0)
def test_every_operation_of_every_contestant(rank, tmp_path):
    bench = imported()
    args = bench.parse_args([*SIZES, "--folder", str(tmp_path)])
    args.warmup, args.rounds = 0, 1
    rows, num_bytes = bench.run(args, torch.device("cpu"))
    expected = [(name, operation) for name in ("fsdp", "gtp") for operation in ("save", "load", "checked", "async")]
    assert [(row.contestant, row.operation) for row in rows] == expected
    for row in rows:
        assert row.seconds > 0 and len(row.peak_mib) == 2
        assert (row.operation == "async") == (row.go_on_seconds is not None)
        assert row.go_on_seconds is None or 0 < row.go_on_seconds < row.seconds
    # 2 wide and 2 narrow projections, 3 of the feed-forward layer, 2 norms; float32, with two moments
    assert num_bytes == 12 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 64 * 32 + 2 * 32)
    assert len(bench.table(rows).splitlines()) == 1 + len(rows)
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@ranks(1)
def test_the_peak_of_memory_is_that_between(rank):
    bench = imported()
    with bench.measured(torch.device("cpu")) as sample:
        scratch = np.ones(48 * 2**20, np.uint8)
        time.sleep(300 * bench.SAMPLE_SECONDS)
        del scratch
    assert 48 <= sample.peak_mib < 100 and sample.seconds > 0


def test_too_few_rounds_and_unknown_contestants_are_refused(bench, capsys):
    for arguments, message in ((["--rounds", "4"], "--rounds 4"), (["--contestants", "ddp"], "ddp: choose from")):
        with pytest.raises(SystemExit):
            bench.parse_args(arguments)
        assert message in capsys.readouterr().err
