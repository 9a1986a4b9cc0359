"""Training jobs one after another, in ranks forked from one process that has torchtitan imported.

``titan_runs.train`` starts every rank of every job from nothing, by torchrun; that is what users do, and most of its
time goes into imports. Here the entry is the same, ``titan_integration.train.main``::

    with TitanJobs() as jobs:
        job = jobs.run(folder, 4, "--training.steps=3")
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import types
from dataclasses import dataclass
from pathlib import Path

from tests.titan_runs import DEBUG_TOML, ROOT, environment

_GRACE = 5.0  # seconds that the other ranks get after one has failed
_LAST_CHARACTERS = 6000


@dataclass(frozen=True)
class Job:
    """How a job ended.

    Attributes:
        exit_codes: of the ranks; negative: the signal that ended one.
        outputs: what the ranks wrote.
    """

    exit_codes: list[int]
    outputs: list[str]

    @property
    def output(self) -> str:
        return "\n".join(self.outputs)


class TitanJobs:
    """The process that forks the ranks; see the module's docstring."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.titan_jobs"],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> TitanJobs:
        return self

    def __exit__(self, *_) -> None:
        self._server.stdin.close()
        self._server.wait(timeout=30)

    def run(
        self,
        folder: Path,
        num_ranks: int,
        *options: str,
        config: Path = DEBUG_TOML,
        timeout: float = 120.0,
        check: bool = True,
        env: dict[str, str] | None = None,
    ) -> Job:
        """A job in ``folder``; raises with the end of its output where it fails."""
        logs = folder / "logs" / str(time.monotonic_ns())
        logs.mkdir(parents=True)
        arguments = [f"--job.config_file={config}", f"--job.dump_folder={folder}", *options]
        request = {"num_ranks": num_ranks, "arguments": arguments, "logs": str(logs), "timeout": timeout}
        self._server.stdin.write(json.dumps(request | {"env": env or {}}) + "\n")
        self._server.stdin.flush()
        answer = self._server.stdout.readline()
        job = Job(json.loads(answer), [(logs / str(r)).read_text(errors="replace") for r in range(num_ranks)])
        if check and any(job.exit_codes):
            texts = [text[-_LAST_CHARACTERS:] for code, text in zip(job.exit_codes, job.outputs) if code > 0]
            raise AssertionError("\n".join([f"exit codes {job.exit_codes}: {' '.join(arguments)}", *texts]))
        return job


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def _be_rank(rank: int, request: dict, port: int) -> None:
    """The life of a forked rank."""
    import torchtitan.train
    from torchtitan.config import ConfigManager

    from titan_integration import train

    log = os.open(os.path.join(request["logs"], str(rank)), os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(
        request["env"],
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(request["num_ranks"]),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    sys.argv = ["train", *request["arguments"]]
    # Bound when it was imported, in the parent.
    ConfigManager.parse_args.__defaults__ = (train.with_job_config(request["arguments"]),)
    torchtitan.train.time = types.SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})  # at its end
    code = 1
    try:
        train.main()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(ranks: list[int], timeout: float) -> list[int]:
    """Exit codes; ends all ranks some time after the first failure, or when the time is over."""
    codes: dict[int, int] = {}
    end = time.monotonic() + timeout
    while len(codes) < len(ranks):
        for pid in set(ranks) - codes.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if not ended:
                continue
            codes[pid] = os.waitstatus_to_exitcode(status)
            if codes[pid] != 0:
                end = min(end, time.monotonic() + _GRACE)
        if time.monotonic() > end:
            for pid in set(ranks) - codes.keys():
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return [codes[pid] for pid in ranks]


def serve() -> None:
    """Reads a job a line from stdin, answers with the exit codes of its ranks."""
    from titan_integration import cpu

    cpu.install()
    import torchtitan.train  # noqa: F401

    from titan_integration import spec, trainer  # noqa: F401

    for line in sys.stdin:
        request, port = json.loads(line), _free_port()
        ranks = []
        for rank in range(request["num_ranks"]):
            pid = os.fork()
            if pid == 0:
                _be_rank(rank, request, port)
            ranks.append(pid)
        print(json.dumps(_wait(ranks, request["timeout"])), flush=True)


if __name__ == "__main__":
    serve()
