"""The rank side of the pool: one process, one job after the other."""

from __future__ import annotations

import faulthandler
import importlib
import inspect
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Callable

import pytest
import torch
import torch.distributed as dist

from tests.harness import rewriting
from tests.harness.isolation import Isolation
from tests.harness.messages import Clean, Job, Kind, Outcome, Ready, Stop, TearDown

# Arguments that a function gets from the rank process when it asks for them by name and the caller gave no value.
INJECTED = ("rank", "world_size", "device", "mesh")


def injected_value(name: str, job: Job, device: torch.device) -> Any:
    """The value of one of ``INJECTED``; ``mesh`` is a fresh 1-D DeviceMesh called "gtp" over all ranks of the job."""
    if name == "mesh":
        return dist.device_mesh.init_device_mesh(device.type, (job.world_size,), mesh_dim_names=("gtp",))
    return {"rank": job.rank, "world_size": job.world_size, "device": device}[name]


def _resolve(job: Job) -> Callable:
    function = importlib.import_module(job.module)
    for part in job.qualname.split("."):
        function = getattr(function, part)
    return getattr(function, "rank_body", function)  # the body of a test under @ranks


def _call(job: Job, device: torch.device) -> Any:
    function = _resolve(job)
    args, kwargs = pickle.loads(job.payload)
    signature = inspect.signature(function)
    given = signature.bind_partial(*args, **kwargs).arguments
    for name in INJECTED:
        if name in signature.parameters and name not in given:
            kwargs[name] = injected_value(name, job, device)
    return function(*args, **kwargs)


def _trim(tb: TracebackType | None) -> TracebackType | None:
    """Drop the frames of this file from the front: the reader wants the test."""
    while tb is not None and tb.tb_next is not None and tb.tb_frame.f_code.co_filename == __file__:
        tb = tb.tb_next
    return tb


def _raised(error: BaseException) -> Outcome:
    text = "".join(traceback.format_exception(type(error), error, _trim(error.__traceback__)))
    headline = traceback.format_exception_only(type(error), error)[-1].strip()
    return Outcome(Kind.RAISED, b"", text, headline, time.monotonic())


def _execute(job: Job, isolation: Isolation, store: dist.Store) -> Outcome:
    try:
        device = isolation.set_up(job, store)
        result = _call(job, device)
        if device.type == "cuda":
            torch.cuda.synchronize()  # an asynchronous fault belongs to this job
        return Outcome(Kind.OK, pickle.dumps(result), "", "", time.monotonic())
    except pytest.skip.Exception as skip:
        return Outcome(Kind.SKIPPED, b"", str(skip), "", time.monotonic())
    except BaseException as error:  # SystemExit too: nothing that a test does may end the process unreported
        return _raised(error)


def _tear_down(job: Job, isolation: Isolation) -> Clean | Outcome:
    try:
        isolation.tear_down(job)
        return Clean()
    except BaseException as error:
        return _raised(error)


def _read_into(inbox: queue.SimpleQueue, connection: Connection) -> None:
    """Reader thread. The end of the pipe means that pytest is gone: leave at once, even out of a hung collective."""
    while True:
        try:
            inbox.put(connection.recv())
        except (EOFError, OSError):
            os._exit(1)


def _redirect_output(log_path: str) -> None:
    """Send stdout and stderr, those of native code too, to the rank's log file."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout = open(1, "w", buffering=1, closefd=False)
    sys.stderr = open(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True, chain=False)


def serve(connection: Connection, log_path: str, store_port: int, environ: dict[str, str]) -> None:
    """Run jobs until told to stop. Never returns: the process ends by ``os._exit``, because plain teardown of
    communicators that share one GPU hangs, and because nothing of a rank process is worth an orderly exit.

    Args:
        connection: this rank's end of the pipe to pytest.
        log_path: file that collects stdout and stderr of the rank.
        store_port: port of the pool's TCP store on the loopback interface.
        environ: set before CUDA or NCCL is touched.
    """
    os.environ.update(environ)
    _redirect_output(log_path)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is for pytest, which then stops the ranks
    rewriting.install()
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", store_port, is_master=False, timeout=timedelta(seconds=60))
    isolation = Isolation()
    inbox: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_read_into, args=(inbox, connection), daemon=True).start()
    connection.send(Ready())
    job = None
    while True:
        message = inbox.get()
        if isinstance(message, Stop):
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            os._exit(0)
        elif isinstance(message, Job):
            job = message
            reply = _execute(job, isolation, store)
        elif isinstance(message, TearDown):
            reply = _tear_down(job, isolation)
        else:
            raise TypeError(f"a rank process cannot handle {message!r}")
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(reply)
