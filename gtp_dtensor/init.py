"""Initialisation that does not depend on the topology.

DTensor's own random numbers do: on a CPU every shard of a weight gets the same ones, on a GPU only the first shard gets
what an unsharded run would. Here every rank draws the logical tensor, as an unsharded run with the same seed does, and
keeps its shard. Ranks that are to hold the same model need the same seed.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.overrides import TorchFunctionMode

_INIT_FUNCTIONS = {
    name: function
    for name, function in vars(nn.init).items()
    if name.endswith("_") and not name.startswith("_") and callable(function)
}
_RANDOM_METHODS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "normal_",
        "uniform_",
        "bernoulli_",
        "exponential_",
        "random_",
        "cauchy_",
        "log_normal_",
        "geometric_",
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


def _fill(function: Callable, tensor: DTensor, args: tuple, kwargs: dict) -> DTensor:
    """``function(tensor, *args, **kwargs)`` on the logical tensor; this rank's part lands in ``tensor``."""
    full = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor._local_tensor.device)
    function(full, *args, **kwargs)
    with torch.no_grad():
        tensor._local_tensor.copy_(local_part(full, tensor))
    return tensor


class _LogicalInit(TorchFunctionMode):
    """Random in-place methods of DTensors, also those inside an init function that was imported by name."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _RANDOM_METHODS and isinstance(args[0], DTensor) and not args[0].is_meta:
            return _fill(func, args[0], args[1:], kwargs or {})
        return func(*args, **(kwargs or {}))


def _whole(function: Callable) -> Callable:
    """An init function that fills DTensors by way of the logical tensor."""

    @functools.wraps(function)
    def wrapper(tensor: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        if isinstance(tensor, DTensor) and not tensor.is_meta:
            return _fill(function, tensor, args, kwargs)
        return function(tensor, *args, **kwargs)

    return wrapper


@contextlib.contextmanager
def logical_init() -> Iterator[None]:
    """Inside, ``torch.nn.init`` functions and random in-place methods fill DTensors as they would fill whole tensors.

    Every rank draws the whole logical tensor with torch's default generator and keeps its part, so with equal seeds
    the logical weights are those of an unsharded run on the same kind of device. Peak extra memory: the largest
    weight. ``reset_parameters()`` of a sharded module enters this by itself; wrap an ``init_weights`` of your own
    in it::

        model.to_empty(device=device)
        with logical_init():
            model.init_weights()
    """
    # Most init functions compute with the tensor (a fan, a QR, an any()) before they return it, so each has to see the
    # whole. Few of them can be intercepted by a mode, hence torch.nn.init itself is dressed for the time of the block.
    before = {name: getattr(nn.init, name) for name in _INIT_FUNCTIONS}
    try:
        for name, function in _INIT_FUNCTIONS.items():
            setattr(nn.init, name, _whole(function))
        with _LogicalInit():
            yield
    finally:
        for name, function in before.items():
            setattr(nn.init, name, function)
