"""A rank process between two tests: what is set before each of them and what is cleared after."""

from __future__ import annotations

import functools
import gc
import os
import random
import warnings
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.tensor import _random, _redistribute, debug

from tests.harness.messages import Job

_LRU_CACHE = type(functools.lru_cache(maxsize=1)(lambda: None))


def _lru_caches() -> list:
    """Every ``lru_cache`` of torch.distributed that the garbage collector sees."""
    return [
        thing
        for thing in gc.get_objects()
        if type(thing) is _LRU_CACHE and (getattr(thing, "__module__", None) or "").startswith("torch.distributed")
    ]


class Isolation:
    """Makes every test on this rank start from the same process state.

    One object per rank process, created before the first test: it remembers the environment, and it freezes the
    garbage collector's view of what is loaded by then, so that a collection after each test costs little.
    """

    def __init__(self) -> None:
        self._environ = dict(os.environ)
        gc.collect()
        self._early_caches = _lru_caches()
        gc.freeze()

    def set_up(self, job: Job, store: dist.Store) -> torch.device:
        """Reset the process and create the job's process group; returns the rank's device."""
        self._reset_process(job.seed)
        timeout = timedelta(seconds=job.group_timeout)
        # Groups made by the code under test (meshes, new_group) read these when they are given no time-out.
        distributed_c10d.default_pg_timeout = timeout
        distributed_c10d.default_pg_nccl_timeout = timeout
        device = torch.device("cpu")
        backend = "gloo"
        if job.device_type == "cuda":
            device = torch.device("cuda", job.rank % torch.cuda.device_count())
            torch.cuda.set_device(device)
            backend = "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"job{job.number}", store),
            rank=job.rank,
            world_size=job.world_size,
            timeout=timeout,
        )
        return device

    def tear_down(self, job: Job) -> None:
        """Destroy the job's process groups and drop what would carry over; raises if something is still switched on."""
        gc.collect()  # models and their groups go before the groups are shut down
        if dist.is_initialized():
            if job.device_type == "cuda":
                torch.cuda.synchronize()
                dist.barrier()
            dist.destroy_process_group()
        device_mesh._mesh_resources.mesh_stack.clear()
        _random._rng_tracker = None
        # Equal meshes hash equal, so these would hand out specs with the mesh, and the groups, of an earlier test.
        debug._clear_sharding_prop_cache()
        _redistribute.clear_redistribute_planner_cache()
        for cache in (*self._early_caches, *_lru_caches()):
            cache.cache_clear()
        os.environ.clear()
        os.environ.update(self._environ)
        torch.set_default_device(None)  # a default device is a function mode
        num_modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
        if num_modes:
            raise RuntimeError(f"the test left {num_modes} dispatch or function mode(s) active")
        gc.collect()
        if job.device_type == "cuda":
            torch.cuda.empty_cache()

    def _reset_process(self, seed: int) -> None:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        warnings.resetwarnings()
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
