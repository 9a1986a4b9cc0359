"""What pytest shows when a multi-rank run fails: every failing rank, the root cause first."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

MAX_OUTPUT_CHARS = 6000
# Errors that a rank gets because another rank is gone or stuck. They are shown after the errors of other kinds.
_CONSEQUENCE = re.compile(
    r"Connection (closed|reset)|Timed out waiting|Broken pipe|Socket (closed|Timeout)|communicator was aborted"
    r"|Watchdog caught collective"
)


@dataclass(frozen=True)
class RankFault:
    """One rank that did not finish.

    Attributes:
        rank: the rank.
        what: one line, such as "raised" or "killed by SIGKILL".
        text: traceback or stack, may be empty.
        headline: last line of the traceback, may be empty.
        at: ``time.monotonic()``.
        order: 0 the process died, 1 raised, 2 raised in consequence of another rank, 3 still running.
    """

    rank: int
    what: str
    text: str
    headline: str
    at: float
    order: int


class RankFailure(Exception):
    """A multi-rank run that failed. ``str()`` is the whole report; ``faults`` has the ranks, root cause first."""

    def __init__(self, title: str, faults: list[RankFault], outputs: dict[int, str]) -> None:
        self.faults = sorted(faults, key=lambda fault: (fault.order, fault.at))
        super().__init__(_render(title, self.faults, outputs))


def fault_of_exit(rank: int, exit_code: int | None, at: float) -> RankFault:
    """The fault of a rank process that ended by itself; a negative exit code is the signal that killed it."""
    if exit_code is not None and exit_code < 0:
        try:
            what = f"killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            what = f"killed by signal {-exit_code}"
    else:
        what = f"the process ended with exit code {exit_code}"
    return RankFault(rank, what, "", "", at, 0)


def fault_of_exception(rank: int, text: str, headline: str, at: float, what: str = "raised") -> RankFault:
    """The fault of a rank that raised."""
    order = 2 if _CONSEQUENCE.search(headline) else 1
    return RankFault(rank, what, text, headline, at, order)


def tidy_stacks(dump: str) -> str:
    """Leave of a faulthandler dump what a reader wants: no idle reader thread, no frames below the job's call."""
    blocks = []
    for block in dump.split("\n\n"):
        if "in _read_into" in block:
            continue
        lines = block.splitlines()
        bottom = next((n for n, line in enumerate(lines) if "harness/worker.py" in line), len(lines))
        blocks.append("\n".join(lines[:bottom]))
    return "\n".join(blocks)


def _render(title: str, faults: list[RankFault], outputs: dict[int, str]) -> str:
    lines = [title]
    shown: dict[str, int] = {}
    for fault in faults:
        lines.append(f"---- rank {fault.rank}: {fault.what}")
        if fault.text and fault.text in shown:
            lines.append(f"(the same as rank {shown[fault.text]})")
        elif fault.text:
            shown[fault.text] = fault.rank
            lines.append(fault.text.rstrip())
    for rank, output in sorted(outputs.items()):
        if output.strip():
            lines.append(f"---- output of rank {rank}")
            # Of a crash the thread that it was in comes first.
            crash = output.rfind("Fatal Python error")
            shown_output = output[-MAX_OUTPUT_CHARS:] if crash < 0 else output[crash:][:MAX_OUTPUT_CHARS]
            lines.append(shown_output.rstrip())
    return "\n".join(lines)
