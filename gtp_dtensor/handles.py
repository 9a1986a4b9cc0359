"""What compiled code is given in place of a module's parameters; see [Note: what the compiler may not know]."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .grad_hooks import wants_gradient_returned
from .layout import TPLayout, share_memory
from .members import STATE, ModuleState, small_of, weight_of
from .weight import ShardedWeight

_OWNER = "_gtp_owner"  # attribute of a token: (weak reference to the module, name of the parameter)


@dataclass(eq=False, slots=True)
class WeightHandle:
    """What compiled code knows of a sharded weight; see [Note: what the compiler may not know].

    Attributes:
        token: (TP-local shape), in compute dtype.
        anchor: (1,), requires a gradient if the weight does.
        casts: whether inputs are brought to the compute dtype, autocast or not.
        tp: its model-parallel layout.
    """

    token: torch.Tensor
    anchor: torch.Tensor
    casts: bool
    tp: TPLayout | None


@dataclass(eq=False, slots=True)
class LeafHandle:
    """What compiled code knows of a parameter that stays whole.

    Attributes:
        leaf: shares the parameter's local memory.
        dtype: what it is computed in.
        casts: see WeightHandle.
        tp: its model-parallel layout.
    """

    leaf: torch.Tensor
    dtype: torch.dtype
    casts: bool
    tp: TPLayout | None


def sync_handles(module: nn.Module) -> None:
    """Make ``module``'s handles what its parameters are now: new ones where device, dtype or memory changed."""
    state: ModuleState = module.__dict__[STATE]
    for name in state.weights:
        param = module._parameters.get(name)
        if isinstance(param, DTensor):
            _sync_weight(state, module, name, weight_of(module, name))
    for name in state.smalls:
        param = module._parameters.get(name)
        if isinstance(param, DTensor):
            _sync_leaf(state, module, name)


def _sync_weight(state: ModuleState, module: nn.Module, name: str, weight: ShardedWeight) -> None:
    handle = state.handles.get(name)
    device, dtype, trains = weight.param.device, weight.compute_dtype, weight.param.requires_grad
    if handle is None or handle.token.device != device or handle.token.dtype != dtype:
        shape = weight.tp_local_shape
        token = torch.empty_strided(shape, (0,) * len(shape), dtype=dtype, device=device)
        setattr(token, _OWNER, (weakref.ref(module), name))
        weight.tokens.append(token)
        anchor = torch.zeros(1, device=device)
        casts = weight.runtime.config.param_dtype is not None
        handle = state.handles[name] = WeightHandle(token, anchor, casts, weight.tp)
    if handle.anchor.requires_grad != trains:
        handle.anchor.requires_grad_(trains)


def _sync_leaf(state: ModuleState, module: nn.Module, name: str) -> None:
    small = small_of(module, name)
    param, handle = small.param, state.leaves.get(name)
    local = param._local_tensor
    if handle is None or not share_memory(handle.leaf, local) or handle.dtype != small.compute_dtype:
        leaf = local.detach()
        handle = state.leaves[name] = LeafHandle(
            leaf, small.compute_dtype, small.runtime.config.param_dtype is not None, small.tp
        )
        if leaf.is_floating_point():
            leaf.requires_grad_(True)
            leaf.register_post_accumulate_grad_hook(_LeafHook(module, name))
    if handle.leaf.requires_grad != param.requires_grad:
        handle.leaf.requires_grad_(param.requires_grad)


class _LeafHook:
    """Hands the gradient of a leaf over to the reducer."""

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module, self._name = weakref.ref(module), name

    def __call__(self, leaf: torch.Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        small = small_of(self._module(), self._name)
        param = small.param
        if not param.requires_grad:
            return
        refuse_hooks(small.fqn, param)
        small.runtime.is_compiled = True
        small.runtime.enter()
        small.runtime.reducer.collect(small, param, grad)


def refuse_hooks(fqn: str, param: nn.Parameter) -> None:
    """Raise ``RuntimeError`` where a hook waits for a gradient that compiled code does not bring by."""
    if wants_gradient_returned(param):
        raise RuntimeError(
            f"{fqn}: a hook on this parameter waits for its gradient, which does not pass through autograd in compiled code: "
            "remove the hook, or leave the module that owns the parameter uncompiled (torch.compiler.disable)"
        )


def module_behind(token: torch.Tensor) -> nn.Module:
    """The module that uses the weight that ``token`` stands for."""
    return getattr(token, _OWNER)[0]()


def weight_behind(token: torch.Tensor) -> ShardedWeight:
    """The weight that ``token`` stands for."""
    ref, name = getattr(token, _OWNER)
    return weight_of(ref(), name)


def anchor_of(token: torch.Tensor) -> torch.Tensor:
    """The anchor beside ``token``."""
    ref, name = getattr(token, _OWNER)
    return ref().__dict__[STATE].handles[name].anchor


def input_dtypes(module: nn.Module) -> set[torch.dtype]:
    """``functional.input_dtypes`` in code that is being compiled."""
    state: ModuleState = getattr(module, STATE)
    dtypes = {handle.token.dtype for handle in state.handles.values() if handle.casts and handle.token.dim() > 1}
    return dtypes | {handle.dtype for handle in state.leaves.values() if handle.casts and handle.leaf.dim() > 1}


def whole_local(handle: LeafHandle) -> torch.Tensor:
    """This rank's part of a parameter that stays whole, in compute dtype."""
    leaf = handle.leaf
    return leaf if leaf.dtype == handle.dtype else leaf.to(handle.dtype)
