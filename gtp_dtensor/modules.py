"""The classes that sharded modules get: one subclass for each original class, which changes ``forward`` and what goes
with it.

A patched ``forward`` or a hook that holds process groups would break ``deepcopy``; a class does not.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor

from . import compiled, functional, handles
from .explain import explain
from .init import logical_init
from .layout import new_dtensor, share_memory
from .local import cast_arguments
from .members import ROOT, STATE, ModuleState, RootState, state_members
from .modes import in_backward
from .wires import gemm_room, is_te, te_room

_CALL = nn.Module._call_impl.__code__


@contextmanager
def _exposed(module: nn.Module) -> Iterator[None]:
    """Inside: ``module.name`` is the gathered (or whole) tensor, for all parameters that its forward reads.

    The tensors sit in the instance's ``__dict__``, which attribute look-up sees before registered parameters, so
    ``named_parameters()`` and ``state_dict()`` meet the sharded ones all the while.
    """
    state: ModuleState | None = module.__dict__.get(STATE)
    holders = [module, *(module.get_submodule(name) for name in state.borrows)]
    saved: list[tuple[nn.Module, str, torch.Tensor | None]] = []
    exposed: list[tuple[nn.Module, str, torch.Tensor, int]] = []
    try:
        for holder in holders:
            holder_state = holder.__dict__[STATE]
            for name in (*holder_state.weights, *holder_state.smalls):
                if holder._parameters.get(name) is None:
                    continue
                tensor = use(holder, name)
                saved.append((holder, name, holder.__dict__.get(name)))
                holder.__dict__[name] = tensor
                exposed.append((holder, name, tensor, 0 if tensor.is_inference() else tensor._version))
        _refresh_flat_weights(module)
        yield
        for holder, name, tensor, version in exposed:
            _check_not_written(holder, name, tensor, version)
    finally:
        for holder, name, before in reversed(saved):  # a module may be entered again inside its own forward
            if before is None:
                del holder.__dict__[name]
            else:
                holder.__dict__[name] = before
        _refresh_flat_weights(module)


def _forward_with_whole_params(
    base: type[nn.Module], module: nn.Module, state: ModuleState, args: tuple, kwargs: dict
) -> object:
    """What ``_exposed`` does, for the many small modules (norms) that own whole vectors and nothing else."""
    attributes = module.__dict__
    exposed = []
    try:
        for name in state.smalls:
            if module._parameters.get(name) is not None:
                tensor = attributes[name] = functional.use_small(module, name)
                exposed.append((name, tensor, 0 if tensor.is_inference() else tensor._version))
        output = base.forward(module, *args, **kwargs)
        for name, tensor, version in exposed:
            if not tensor.is_inference() and tensor._version != version:
                _check_not_written(module, name, tensor, version)
        return output
    finally:
        for name, _, _ in exposed:
            del attributes[name]


def use(module: nn.Module, name: str) -> torch.Tensor:
    """``module``'s parameter ``name`` as its forward sees it."""
    sharded = name in module.__dict__[STATE].weights
    return functional.materialize(module, name) if sharded else functional.use_small(module, name)


def _refresh_flat_weights(module: nn.Module) -> None:
    """Recurrent modules keep a list of what their attributes were: follow them in, and hold no gathered weight
    after."""
    if isinstance(module, nn.RNNBase):
        module._flat_weights = [getattr(module, name, None) for name in module._flat_weights_names]


def _check_not_written(holder: nn.Module, name: str, tensor: torch.Tensor, version: int) -> None:
    """A forward that writes into a gathered copy would lose what it wrote."""
    state: ModuleState = holder.__dict__[STATE]
    member = state.weights.get(name) or state.smalls[name]
    is_copy = name in state.weights or tensor.dtype != member.param.dtype
    if is_copy and not tensor.is_inference() and tensor._version != version:
        raise RuntimeError(
            f"{member.fqn}: the forward wrote into a gathered copy, which is thrown away; write into the parameter outside "
            "the forward, or name it in exclude="
        )


Forward = Callable[..., object]  # of (module, its arguments)


def explicit_forward(module: nn.Module, forwards: Mapping[type[nn.Module], Forward]) -> Forward | None:
    """The forward that computes what ``module`` does without leaving gathered weights alive for its backward: the one
    given for exactly its class, or ours for linears and embeddings. None: not known."""
    base, weights = type(module), module.__dict__[STATE].weights
    if base in forwards and weights:
        return _with_cast_arguments(forwards[base])
    if is_te(base):
        return te_room().forward_of(base)
    if "weight" in weights:
        if base.forward is nn.Linear.forward:
            return functional.linear
        if base.forward is nn.Embedding.forward:
            return functional.embedding
        room = gemm_room(module)
        if room is not None:
            return room.forward
    return None


def keeps_gathered(module: nn.Module) -> bool:
    """Whether weights of ``module``, which has a forward of ours, stay gathered until its backward."""
    return is_te(type(module)) and not te_room().uses_protocol(type(module), module)


@functools.lru_cache(maxsize=None)
def _with_cast_arguments(function: Forward) -> Forward:
    def forward(self: nn.Module, *args, **kwargs):
        args, kwargs = cast_arguments(functional.input_dtypes(self), args, kwargs)
        return function(self, *args, **kwargs)

    return forward


@functools.lru_cache(maxsize=None)
def sharded_class(base: type[nn.Module], explicit: Forward | None) -> type[nn.Module]:
    """The subclass of ``base`` whose forward gathers: ``explicit``, or else one that gathers around ``base``'s."""
    forward = explicit
    if forward is None:

        def forward(self: nn.Module, *args, **kwargs):
            if is_dynamo_compiling():
                args, kwargs = cast_arguments(handles.input_dtypes(self), args, kwargs)
                own = getattr(self, STATE).own_forward
                return base.forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)
            state: ModuleState = self.__dict__[STATE]
            if state.is_simple and not state.smalls.keys() & self.__dict__.keys():
                return _forward_with_whole_params(base, self, state, args, kwargs)
            args, kwargs = cast_arguments(functional.input_dtypes(self), args, kwargs)
            with _exposed(self):
                own = state.own_forward
                return base.forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)

    def __getattr__(self: nn.Module, name: str):
        # A forward that checkpoints a method of its own: the recompute runs that method alone, outside of _exposed.
        # Hooks that look at parameters inside a backward run without gradients and see the DTensor.
        if is_dynamo_compiling():
            state: ModuleState = self.__dict__[STATE]
            if name in state.handles or name in state.leaves:
                return compiled.use(self, name)
        else:
            state = self.__dict__.get(STATE)
            if state is not None and (name in state.weights or name in state.smalls):
                if self._parameters.get(name) is not None:
                    if in_backward() and torch.is_grad_enabled():
                        return use(self, name)
                    member = state.weights.get(name) or state.smalls[name]
                    member.runtime.last_read_outside = member.fqn
        return base.__getattr__(self, name)

    def _save_to_state_dict(self: nn.Module, destination: dict, prefix: str, keep_vars: bool) -> None:
        base._save_to_state_dict(self, destination, prefix, keep_vars)
        if not keep_vars:
            _share_versions(self, destination, prefix)

    def register_parameter(self: nn.Module, *args, **kwargs) -> None:
        base.register_parameter(self, *args, **kwargs)
        _tell_compiled_code(self)

    def _apply(self: nn.Module, *args, **kwargs) -> nn.Module:
        base._apply(self, *args, **kwargs)
        _tell_compiled_code(self)
        return self

    namespace = {
        "forward": forward,
        "register_parameter": register_parameter,
        "_apply": _apply,
        "__getattr__": __getattr__,
        "_save_to_state_dict": _save_to_state_dict,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
    }
    if hasattr(base, "reset_parameters"):

        def reset_parameters(self: nn.Module) -> None:
            with logical_init():
                base.reset_parameters(self)

        namespace["reset_parameters"] = reset_parameters
    if is_te(base):
        namespace.update(te_room().overrides(base))
    return type(f"GTP{base.__name__}", (base,), namespace)


def _tell_compiled_code(module: nn.Module) -> None:
    """A parameter of ``module`` may be another one now. The model's forward tells compiled code so, too, but a compiled part
    may be called without it."""
    state: ModuleState = module.__dict__[STATE]
    # Compiled code that uses a sharded weight says so; that of whole parameters is silent.
    if not state.weights or any(member.runtime.is_compiled for member in state_members(module)):
        handles.sync_handles(module)


def _share_versions(module: nn.Module, destination: dict, prefix: str) -> None:
    """Make writes into ``module``'s part of a state dict count as writes into its weights, as they do without GTP.

    ``detach()`` of a DTensor makes a local tensor with a version counter of its own: a ``dcp.load`` into
    ``model.state_dict()`` would change the parameters without a trace.
    """
    state: ModuleState = module.__dict__[STATE]
    for name in (*state.weights, *state.smalls):
        param, value = module._parameters.get(name), destination.get(prefix + name)
        if isinstance(param, DTensor) and isinstance(value, DTensor) and value is not param:
            local = param._local_tensor
            if share_memory(value._local_tensor, local):
                destination[prefix + name] = new_dtensor(local.detach(), param._spec)


def root_state(root: nn.Module) -> RootState:
    """The RootState of ``root``, made on first use together with the hooks that tell when its forward runs."""
    state = root.__dict__.get(ROOT)
    if state is None:
        state = root.__dict__[ROOT] = RootState(root)
        root.register_forward_pre_hook(_enter_root)
        root.register_forward_hook(_exit_root, always_call=True)
    return state


@torch.compiler.disable(recursive=True, reason="GTP's bookkeeping at the borders of a model's forward is not traced")
def _enter_root(module: nn.Module, args: tuple) -> None:
    state: RootState = module.__dict__[ROOT]
    if not in_backward() and any(runtime.is_in_root for runtime in state.runtimes):
        # Nested; or a forward was left by a KeyboardInterrupt, after which torch calls no hook.
        num_outer = max(0, _num_calls_in_progress(module) - 1)
        for runtime in state.runtimes:
            runtime.forget_interrupted(num_outer)
    for runtime in state.runtimes:
        runtime.enter_root()
    if not state.has_run or any(runtime.is_compiled for runtime in state.runtimes):
        state.has_run = True
        for part in module.modules():
            if STATE in part.__dict__:
                handles.sync_handles(part)


@torch.compiler.disable(recursive=True, reason="GTP's bookkeeping at the borders of a model's forward is not traced")
def _exit_root(module: nn.Module, args: tuple, output: object) -> None:
    for runtime in module.__dict__[ROOT].runtimes:
        runtime.exit_root()
    error = sys.exc_info()[1]
    if error is not None:
        explain(error, module.__dict__[ROOT])


def _num_calls_in_progress(module: nn.Module) -> int:
    """How often ``module`` is being called on this thread, up to the caller's caller."""
    number, frame = 0, sys._getframe(1)
    while frame is not None:
        number += frame.f_code is _CALL and frame.f_locals.get("self") is module
        frame = frame.f_back
    return number
