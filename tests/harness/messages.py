"""What travels between pytest and a rank process. Both ends pickle these, so they hold plain data only."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """How a job ended on one rank."""

    OK = "ok"
    SKIPPED = "skipped"
    RAISED = "raised"


@dataclass(frozen=True)
class Job:
    """One function call on one rank.

    Attributes:
        number: position of the job in the pool's life; makes the store prefix of its process group unique.
        module, qualname: where the function is imported from, in the rank process.
        payload: pickled ``(args, kwargs)``; unpickled only after the rank has a place to report failures to.
        rank, world_size: place of the rank in the job's process group.
        device_type: "cpu" (Gloo) or "cuda" (NCCL, with Gloo for CPU tensors).
        group_timeout: seconds after which a collective on any process group of the job gives up.
        seed: seeds every random generator of the rank, the same on all ranks.
    """

    number: int
    module: str
    qualname: str
    payload: bytes
    rank: int
    world_size: int
    device_type: str
    group_timeout: float
    seed: int


@dataclass(frozen=True)
class TearDown:
    """Every rank has finished: destroy the process groups and reset the process."""


@dataclass(frozen=True)
class Stop:
    """Leave the process."""


@dataclass(frozen=True)
class Ready:
    """The rank process is up and waits for jobs."""


@dataclass(frozen=True)
class Clean:
    """The rank has torn the job down and is as good as new."""


@dataclass(frozen=True)
class Outcome:
    """How the job ended.

    Attributes:
        kind: see :class:`Kind`.
        payload: pickled return value (OK), else empty.
        text: traceback (RAISED) or reason (SKIPPED), else empty.
        headline: last line of the traceback, for telling causes from consequences.
        at: ``time.monotonic()`` when it happened; one clock for all processes of a machine.
    """

    kind: Kind
    payload: bytes
    text: str
    headline: str
    at: float
