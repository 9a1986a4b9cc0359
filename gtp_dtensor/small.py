"""A parameter that stays whole on every rank of the gtp axis: norms, biases, routers, excluded weights.

It is a DTensor on the storage mesh like the sharded ones, ``Replicate()`` over gtp, so that optimizers and clipping
meet one mesh; only inside its module's forward is it seen as the plain (or tp) tensor that the module expects.

[Note: copies in compute dtype]
    Where that is not the parameter's own dtype, each use casts. In training all but large ones are cast together
    instead, by one kernel when the root's forward begins, and then no more until something may have written them: an
    optimizer's step, ``refresh``, a replay of a step, an evaluation. Each time these are new tensors, since a graph may
    still hold the ones of before. A parameter that was written since, as far as its versions tell, is cast at each use
    again; so is one whose module is called outside of the root's forward and its backward, and everything in a CUDA
    graph, whose replays would read memory of one step.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .layout import TPLayout, new_dtensor
from .modes import plain_ops
from .pending import scaled

if TYPE_CHECKING:
    from .runtime import Runtime

_current_task = torch._C._current_graph_task_id
_MOST_COPIED = 1 << 16  # elements of a copy that stays


class SmallParam:
    """One such parameter. Tied ones share this object; compared and hashed by identity. ``leaf``: see ShardedWeight."""

    def __init__(self, runtime: Runtime, index: int, fqn: str, param: nn.Parameter, tp: TPLayout | None) -> None:
        self.runtime = runtime
        self.index = index
        self.serial = -1  # unique in the domain, given by the runtime that adopts this
        self.fqn = fqn
        self.param = self.leaf = param
        self.spec: DTensorSpec = param._spec
        self.tp = tp
        self._param_dtype, self._reduce_dtype = runtime.config.param_dtype, runtime.config.reduce_dtype
        self.owners: list[tuple[weakref.ref[nn.Module], str]] = []
        self.keeps_back = False  # its gradients, until a backward that synchronises them
        self._copy: _Copy | None = None

    @property
    def compute_dtype(self) -> torch.dtype:
        dtype = self.param.dtype
        return self._param_dtype or dtype if dtype.is_floating_point else dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        dtype = self.param.dtype
        return self._reduce_dtype or dtype if dtype.is_floating_point else dtype

    def add_owner(self, module: nn.Module, name: str) -> None:
        self.owners.append((weakref.ref(module), name))

    def replace_param(self, param: nn.Parameter) -> None:
        """Use ``param`` from now on (its layout was checked)."""
        self.param = self.leaf = param
        self._copy = None

    def read(self) -> torch.Tensor:
        """What the module computes with, in compute dtype: a new tensor object, over the parameter's memory where it is
        not cast."""
        copy, param, runtime = self._copy, self.param, self.runtime
        local = param._local_tensor
        if (
            copy is not None
            and copy.of is local
            and (copy.tensor._version, local._version, param._version) == copy.versions
            and runtime.captured is None
            and (runtime.depth > 0 or _current_task() != -1)
        ):
            local = copy.tensor.detach()
        else:
            local = local.detach()
            dtype = self._param_dtype
            if dtype is not None and local.dtype is not dtype and local.is_floating_point():
                local = local.to(dtype)
        return local if self.tp is None else self.tp.wrap(local)

    def keep_copy(self, tensor: torch.Tensor | None) -> None:
        """``tensor`` is what :meth:`read` would cast, until the parameter is written. None: cast at each use."""
        if tensor is None:
            self._copy = None
        else:
            local = self.param._local_tensor
            self._copy = _Copy(tensor, local, (tensor._version, local._version, self.param._version))

    def local_grad(self, grad: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """(this rank's part of ``grad``, whether a sum over tp is still owed)."""
        if self.tp is not None:
            return self.tp.unwrap_grad(grad)
        return (grad.to_local() if isinstance(grad, DTensor) else grad), False


class _Copy(NamedTuple):
    """A parameter in compute dtype, and of what: its local tensor, and the versions of the copy, of that, and of it."""

    tensor: torch.Tensor
    of: torch.Tensor
    versions: tuple[int, int, int]


def copy_together(smalls: list[SmallParam]) -> None:
    """See [Note: copies in compute dtype]."""
    smalls = [small for small in smalls if small.param.numel() <= _MOST_COPIED]
    smalls = [small for small in smalls if small.compute_dtype is not small.param.dtype]
    smalls = [small for small in smalls if not small.param.is_inference()]  # these count no versions
    if not smalls:
        return
    with plain_ops():
        sources = [small.param._local_tensor.detach() for small in smalls]
        copies = [torch.empty_like(local, dtype=small.compute_dtype) for local, small in zip(sources, smalls)]
        torch._foreach_copy_(copies, sources)
        for small, copied in zip(smalls, copies):
            small.keep_copy(copied)


def joined(tensors: list[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Their elements in one vector of ``dtype``."""
    return torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors]).to(dtype)


def parts_of(flat: torch.Tensor, like: list[torch.Tensor], copies: bool = False) -> list[torch.Tensor]:
    """Views (or ``copies``) of ``flat``'s parts, one after the other, with the shapes of ``like``."""
    split = torch.split_with_sizes_copy if copies else torch.split
    parts = split(flat, [tensor.numel() for tensor in like])
    return [part if tensor.dim() == 1 else part.view(tensor.shape) for part, tensor in zip(parts, like)]


def accumulate(params: list[nn.Parameter], flat: torch.Tensor, like: list[torch.Tensor], scale: float) -> None:
    """``param.grad += scale * its part of flat``, which is ours to change."""
    dtype, *others = dict.fromkeys(param.dtype for param in params)
    if not others:
        flat = scaled(flat, dtype, scale)
    grads, added = [], []
    # New gradients have memory of their own: deepcopy takes a DTensor that starts inside of other memory for one that does.
    is_new = any(param.grad is None for param in params)
    for param, part in zip(params, parts_of(flat, like, copies=is_new)):
        if others:
            part = scaled(part, param.dtype, scale)
        grad = param.grad
        if grad is None:
            param.grad = new_dtensor(part, param._spec)
        else:
            grads.append(grad._local_tensor)
            added.append(part)
    if grads:
        torch._foreach_add_(grads, added)
