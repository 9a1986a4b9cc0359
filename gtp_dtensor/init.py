"""Initialisation that does not depend on the topology.

DTensor's own random numbers do: on a CPU every shard of a weight gets the same ones, on a GPU only the first shard gets
what an unsharded run would. Here every rank draws the logical tensor, as an unsharded run with the same seed does, and
keeps its shard. Ranks that are to hold the same model need the same seed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode

_INIT_FUNCTIONS = frozenset(
    function
    for name, function in vars(nn.init).items()
    if name.endswith("_") and not name.startswith("_") and callable(function)
)
_RANDOM_METHODS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "normal_", "uniform_", "bernoulli_", "exponential_", "random_", "cauchy_", "log_normal_", "geometric_",
    )
)


def local_part(full: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of the logical tensor ``full``, cut as ``like`` is. A view where the placements are plain."""
    if not all(type(p) is Shard or p.is_replicate() for p in like.placements):  # such as FSDP2's strided shards
        return distribute_tensor(full, like.device_mesh, like.placements, src_data_rank=None)._local_tensor
    coordinate = like.device_mesh.get_coordinate()
    for axis, placement in enumerate(like.placements):
        if placement.is_shard():
            size, dim = like.device_mesh.size(axis), placement.dim
            chunk = -(-full.shape[dim] // size)
            start = min(coordinate[axis] * chunk, full.shape[dim])
            full = full.narrow(dim, start, min(chunk, full.shape[dim] - start))
    return full


class _LogicalInit(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _INIT_FUNCTIONS or func in _RANDOM_METHODS:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, DTensor) and not tensor.is_meta:
                return self._fill(func, tensor, args, kwargs)
        return func(*args, **kwargs)

    @staticmethod
    def _fill(func, tensor: DTensor, args: tuple, kwargs: dict) -> DTensor:
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor._local_tensor.device)
        if args:
            func(full, *args[1:], **kwargs)
        else:
            func(**{**kwargs, "tensor": full})
        with torch.no_grad():
            tensor._local_tensor.copy_(local_part(full, tensor))
        return tensor


@contextlib.contextmanager
def logical_init() -> Iterator[None]:
    """Inside, ``torch.nn.init`` functions and random in-place methods fill DTensors as they would fill whole tensors.

    Every rank draws the whole logical tensor with torch's default generator and keeps its part, so with equal seeds
    the logical weights are those of an unsharded run on the same kind of device. Peak extra memory: the largest
    weight. ``reset_parameters()`` of a sharded module enters this by itself; wrap an ``init_weights`` of your own in it::

        model.to_empty(device=device)
        with logical_init():
            model.init_weights()
    """
    with _LogicalInit():
        yield
