"""A parameter that stays whole on every rank of the gtp axis: norms, biases, routers, excluded weights.

It is a DTensor on the storage mesh like the sharded ones, ``Replicate()`` over gtp, so that optimizers and clipping
meet one mesh; only inside its module's forward is it seen as the plain (or tp) tensor that the module expects.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec

from .layout import TPLayout, new_dtensor
from .pending import scaled

if TYPE_CHECKING:
    from .runtime import Runtime


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

    def read(self) -> torch.Tensor:
        """What the module computes with: a new tensor object over the parameter's memory, in compute dtype."""
        local = self.param._local_tensor.detach()
        dtype = self._param_dtype
        if dtype is not None and local.dtype is not dtype and local.is_floating_point():
            local = local.to(dtype)
        return local if self.tp is None else self.tp.wrap(local)

    def local_grad(self, grad: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """(this rank's part of ``grad``, whether a sum over tp is still owed)."""
        if self.tp is not None:
            return self.tp.unwrap_grad(grad)
        return (grad.to_local() if isinstance(grad, DTensor) else grad), False


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
