"""The pytest side of the pool: rank processes forked from a server that has torch loaded, kept for the whole run."""

from __future__ import annotations

import inspect
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist

from tests.harness import worker
from tests.harness.messages import Clean, Job, Kind, Outcome, Ready, Stop, TearDown
from tests.harness.report import RankFailure, RankFault, fault_of_exception, fault_of_exit, tidy_stacks

_PRELOAD = [
    "numpy",
    "pytest",
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.utils.checkpoint",
]
_START_TIMEOUT = 120.0  # seconds until new processes must be up; the first one waits for the server's imports
_TEAR_DOWN_TIMEOUT = {"cpu": 30.0, "cuda": 10.0}  # seconds
_STACK_DUMP_SECONDS = 0.5
_SEED = 20260


class _Rank:
    """One rank process and the parent's end of its pipe."""

    def __init__(self, context, rank: int, log_path: str, store_port: int, environ: dict[str, str]) -> None:
        self.rank = rank
        self.log_path = log_path
        self.connection, theirs = context.Pipe()
        self.process = context.Process(
            target=worker.serve, args=(theirs, log_path, store_port, environ), name=f"rank{rank}", daemon=True
        )
        self.process.start()
        theirs.close()
        self._log_start = 0

    def is_idle(self) -> bool:
        """Whether the process lives and has nothing to say, as it should between two jobs."""
        # The end of the pipe is seen before the server tells of the exit.
        return self.process.is_alive() and not self.connection.poll()

    def mark_output(self) -> None:
        """Output written before now belongs to an earlier job."""
        self._log_start = os.path.getsize(self.log_path)

    def output(self) -> str:
        """What the rank wrote since :meth:`mark_output`."""
        with open(self.log_path, errors="replace") as log:
            log.seek(self._log_start)
            return log.read()

    def dump_stacks(self) -> str:
        """The Python stacks of the running process, most recent call first; empty if it does not answer.

        They are not part of :meth:`output` afterwards, so read that first.
        """
        self.mark_output()
        try:
            os.kill(self.process.pid, signal.SIGUSR1)
        except ProcessLookupError:
            return ""
        time.sleep(_STACK_DUMP_SECONDS)
        return tidy_stacks(self.output())

    def kill(self) -> None:
        """End the process at once."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class RankPool:
    """Runs functions on several ranks and hands back what each returned.

    Rank processes are forked on first use and serve every later run, each with a process group of its own. After a
    failure they are killed, and the next run forks new ones.

    Args:
        world_limit: runs of more ranks are skipped (``pytest.skip``). None: no limit.
    """

    def __init__(self, world_limit: int | None = None) -> None:
        self._world_limit = world_limit
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._folder = tempfile.TemporaryDirectory(prefix="gtp-ranks-")
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
        )
        self._ranks: dict[tuple, list[_Rank]] = {}
        self._single_use: set[tuple] = set()  # keys of processes that cannot be torn down, so serve one run each
        self._num_jobs = 0
        self._num_processes = 0

    def run(
        self,
        world_size: int,
        function: Callable,
        *args: Any,
        timeout: float = 60.0,
        group_timeout: float = 30.0,
        grace: float = 3.0,
        device: str = "cpu",
        **kwargs: Any,
    ) -> list:
        """Call ``function(*args, **kwargs)`` on every rank of a fresh process group.

        Args:
            world_size: number of ranks.
            function: importable by module and qualified name. Parameters called ``rank``, ``world_size``, ``device``
                or ``mesh`` that the caller does not give are filled in on the rank (see ``worker.INJECTED``).
            timeout: seconds for the whole call; then everything is killed and reported.
            group_timeout: seconds for a single collective.
            grace: seconds that the other ranks get to report too after a first rank failed.
            device: "cpu" (Gloo) or "cuda" (NCCL). With fewer GPUs than ranks, ranks share GPUs.

        Returns:
            What the function returned on rank 0, 1, ... (pickled on the way: no DTensors, no meshes).

        Raises:
            RankFailure: a rank raised, died or hung; the text has every failing rank, the root cause first.
            TypeError: the function or an argument cannot be sent to another process.
            ValueError: ``world_size`` or ``device`` makes no sense.
        """
        __tracebackhide__ = True  # pytest: the report is what counts, not where the pool raised it
        if world_size < 1 or device not in ("cpu", "cuda"):
            raise ValueError(f"run(world_size={world_size}, device={device!r}): at least 1 rank, on 'cpu' or 'cuda'")
        if self._world_limit is not None and world_size > self._world_limit:
            pytest.skip(f"needs {world_size} ranks, --world-limit is {self._world_limit}")
        module, qualname = _importable_name(function)
        payload = _pickled_arguments(function, args, kwargs)
        key = self._key(device, world_size)
        ranks = self._started(key, world_size)
        self._num_jobs += 1
        for rank in ranks:
            rank.mark_output()
            job = Job(self._num_jobs, module, qualname, payload, rank.rank, world_size, device, group_timeout, _SEED)
            rank.connection.send(job)
        title = f"{module}.{qualname} failed on {world_size} rank(s), {device}"
        try:
            outcomes = self._collect(ranks, timeout, grace, title)
            self._tear_down(ranks, key, title)
        except BaseException:  # ctrl-C too: ranks in an unknown state serve nobody
            self._kill(key)
            raise
        return _results(outcomes, title)

    def process_ids(self, world_size: int, device: str = "cpu") -> list[int]:
        """Process ids that serve the given world size now (for tests of the pool); starts missing ones."""
        return [rank.process.pid for rank in self._started(self._key(device, world_size), world_size)]

    def close(self) -> None:
        """Stop all rank processes and remove their logs."""
        for key, ranks in list(self._ranks.items()):
            for rank in ranks:
                try:
                    rank.connection.send(Stop())
                except OSError:
                    pass  # it is gone already, which is what we want
            for rank in ranks:
                rank.process.join(timeout=5)
            self._kill(key)
        self._folder.cleanup()

    @staticmethod
    def _key(device: str, world_size: int) -> tuple:
        """Ranks that share a GPU and ranks that own one need different NCCL settings, so different processes."""
        return (device, device == "cuda" and world_size > torch.cuda.device_count())

    def _started(self, key: tuple, world_size: int) -> list[_Rank]:
        ranks = self._ranks.setdefault(key, [])
        if not all(rank.is_idle() for rank in ranks):
            self._kill(key)  # one died between two runs; the others may wait for it
            ranks = self._ranks.setdefault(key, [])
        new = []
        while len(ranks) < world_size:
            self._num_processes += 1
            log_path = os.path.join(self._folder.name, f"process{self._num_processes}.log")
            open(log_path, "w").close()
            rank = _Rank(self._context, len(ranks), log_path, self._store.port, _environ(*key, len(ranks)))
            ranks.append(rank)
            new.append(rank)
        for rank in new:
            if not rank.connection.poll(_START_TIMEOUT) or not isinstance(_received(rank), Ready):
                output = rank.output()
                self._kill(key)
                raise RuntimeError(f"rank process {rank.rank} did not start; its output:\n{output}")
        return ranks[:world_size]

    def _collect(self, ranks: list[_Rank], timeout: float, grace: float, title: str) -> dict[int, Outcome]:
        """Outcomes by rank; raises RankFailure unless every rank returned or skipped."""
        __tracebackhide__ = True
        outcomes: dict[int, Outcome] = {}
        faults: list[RankFault] = []
        pending = list(ranks)
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait([rank.connection for rank in pending], max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [rank for rank in pending if rank.connection in ready]:
                pending.remove(rank)
                reply = _received(rank)
                if reply is None:
                    rank.process.join(timeout=5)
                    faults.append(fault_of_exit(rank.rank, rank.process.exitcode, time.monotonic()))
                elif reply.kind is Kind.RAISED:
                    faults.append(fault_of_exception(rank.rank, reply.text, reply.headline, reply.at))
                else:
                    outcomes[rank.rank] = reply
            if faults:
                deadline = min(deadline, time.monotonic() + grace)
        if not pending and not faults:
            return outcomes
        outputs = {rank.rank: rank.output() for rank in ranks}
        reason = "had to be killed while others failed" if faults else f"still running after {timeout:g} s"
        for rank in pending:
            faults.append(RankFault(rank.rank, reason, rank.dump_stacks(), "", time.monotonic(), 3))
        if outcomes:
            title += f"; finished without an error: rank(s) {', '.join(map(str, sorted(outcomes)))}"
        raise RankFailure(title, faults, outputs)

    def _tear_down(self, ranks: list[_Rank], key: tuple, title: str) -> None:
        __tracebackhide__ = True
        if key in self._single_use:
            return self._kill(key)
        for rank in ranks:
            rank.connection.send(TearDown())
        timeout = _TEAR_DOWN_TIMEOUT[key[0]]
        deadline = time.monotonic() + timeout
        hung = False
        faults = []
        for rank in ranks:
            if not rank.connection.poll(max(0.0, deadline - time.monotonic())):
                hung = True
                if key[0] == "cpu":
                    what = f"did not tear down within {timeout:g} s"
                    faults.append(RankFault(rank.rank, what, rank.dump_stacks(), "", time.monotonic(), 3))
                continue
            reply = _received(rank)
            if reply is None:
                faults.append(fault_of_exit(rank.rank, rank.process.exitcode, time.monotonic()))
            elif not isinstance(reply, Clean):
                what = "raised while tearing down"
                faults.append(fault_of_exception(rank.rank, reply.text, reply.headline, reply.at, what))
        if faults:
            raise RankFailure(title + " (in tear-down)", faults, {rank.rank: rank.output() for rank in ranks})
        if hung:
            # NCCL communicators that share one GPU are known to hang when they are destroyed. The test itself has
            # passed and its ranks have synchronized, so only the processes are given up, from now on without waiting.
            self._single_use.add(key)
            self._kill(key)

    def _kill(self, key: tuple) -> None:
        for rank in self._ranks.pop(key, []):
            rank.kill()


def _received(rank: _Rank) -> Any:
    """The next message of a rank, or None if its process is gone."""
    try:
        return rank.connection.recv()
    except (EOFError, ConnectionResetError):
        return None


def _results(outcomes: dict[int, Outcome], title: str) -> list:
    skipped = {rank: outcome.text for rank, outcome in outcomes.items() if outcome.kind is Kind.SKIPPED}
    if len(skipped) == len(outcomes):
        pytest.skip(skipped[0])
    if skipped:
        faults = [RankFault(rank, f"skipped: {reason}", "", "", 0.0, 1) for rank, reason in skipped.items()]
        raise RankFailure(f"{title}: only some of the ranks skipped", faults, {})
    return [pickle.loads(outcomes[rank].payload) for rank in sorted(outcomes)]


def _importable_name(function: Callable) -> tuple[str, str]:
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if module is None or qualname is None or "<" in qualname or module == "__main__":
        raise TypeError(f"{function!r} cannot run on ranks: define it with def, at the top level of a module")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    if found is not function and getattr(found, "rank_body", None) is not function:
        raise TypeError(f"{module}.{qualname} is another object than the function to run; ranks would import that one")
    return module, qualname


def _pickled_arguments(function: Callable, args: tuple, kwargs: dict) -> bytes:
    inspect.signature(function).bind_partial(*args, **kwargs)  # a wrong argument fails here, not on every rank
    try:
        return pickle.dumps((args, kwargs))
    except Exception as error:
        raise TypeError(f"the arguments of {function.__qualname__} cannot be sent to the ranks: {error}") from error


def _environ(device: str, shares_gpu: bool, rank: int) -> dict[str, str]:
    """Environment of a rank process, set before CUDA or NCCL is touched."""
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    environ = {} if loopback is None else {"GLOO_SOCKET_IFNAME": loopback}
    if device == "cuda" and shares_gpu:
        # NCCL refuses two ranks on one GPU of one host, so each rank claims a host of its own and talks by sockets.
        environ |= {
            "NCCL_HOSTID": f"rank{rank}",
            "NCCL_NET": "Socket",
            "NCCL_SOCKET_IFNAME": loopback or "lo",
            "NCCL_P2P_DISABLE": "1",
            "NCCL_SHM_DISABLE": "1",
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        }
    return environ
