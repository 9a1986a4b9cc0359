"""Imported by every rank of a training job (``--experimental.custom_import=tests.titan_faults``): kills it in a save.

``KILL_IN_SAVE`` is the number of the save, ``KILLED_RANKS`` the ranks that die in it, when their files are written and
the checkpoint's table of contents is not.
"""

from __future__ import annotations

import os
import signal

from torch.distributed.checkpoint import FileSystemWriter

_write_data = FileSystemWriter.write_data
_num_saves = 0


def _write_and_die(writer, plan, planner):
    global _num_saves
    _num_saves += 1
    written = _write_data(writer, plan, planner)
    if _num_saves == int(os.environ["KILL_IN_SAVE"]) and os.environ["RANK"] in os.environ["KILLED_RANKS"].split(","):
        os.kill(os.getpid(), signal.SIGKILL)
    return written


FileSystemWriter.write_data = _write_and_die
