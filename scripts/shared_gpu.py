#!/usr/bin/env python
"""Runs a module on ranks that share one GPU, so that multi-rank CUDA paths can be tried on a single card:

    torchrun --nproc_per_node 4 scripts/shared_gpu.py titan_integration.train --job.config_file X.toml ...

NCCL refuses two ranks on one GPU unless it takes them for two hosts that talk through sockets. Slow: it proves
correctness and shows streams, not speed.
"""

import os
import runpy
import sys
import time


def share_gpu() -> None:
    """Settings of this rank; before CUDA or NCCL starts."""
    os.environ.update(
        NCCL_HOSTID=os.environ["RANK"],
        NCCL_NET="Socket",
        NCCL_SOCKET_IFNAME="lo",
        NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1",
        LOCAL_RANK="0",
        TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1",
    )


def leave(*args, **kwargs) -> None:
    """Instead of destroying communicators, which hangs where they share a GPU."""
    import torch
    import torch.distributed as dist

    dist.barrier(device_ids=[0])
    torch.cuda.synchronize()
    # This rank is past the barrier; what it sent may still be on its way from a thread that ends with the process.
    store = dist.distributed_c10d._get_default_store()
    store.add("ranks past the barrier", 1)
    while store.add("ranks past the barrier", 0) < dist.get_world_size():
        time.sleep(0.02)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    share_gpu()
    import torch.distributed

    torch.distributed.destroy_process_group = leave
    module, sys.argv = sys.argv[1], sys.argv[1:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    leave()
