"""What a CUDA graph cannot hold, found before it is captured or before it is replayed."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .grad_hooks import has_hooks, hooks_of_others
from .plan import clean_fqn
from .weight import ShardedWeight

_SAID = "called a synchronizing CUDA operation"  # by torch's debug mode


class GraphError(RuntimeError):
    """A step cannot be captured, or no longer be replayed. Nothing was computed; it can be run without a graph."""


class Places:
    """Names where in a model, or in the code around it, something happens."""

    def __init__(self, model: nn.Module) -> None:
        self._fqns = {id(module): clean_fqn(name) for name, module in model.named_modules()}

    def of_frame(self, frame: FrameType | None) -> str:
        """Of the running code: the innermost module, weight or hook that it is in, and the line."""
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return self._name(frames)

    def of_traceback(self, traceback: TracebackType | None) -> str:
        """Of an error."""
        frames = []
        while traceback is not None:
            frames.append(traceback.tb_frame)
            traceback = traceback.tb_next
        return self._name(frames[::-1])

    def _name(self, frames: list[FrameType]) -> str:
        """``frames``: innermost first."""
        line = next((f"{f.f_code.co_filename}:{f.f_lineno}" for f in frames if _is_users(f)), "")
        for frame in frames:
            found = self._named_by(frame.f_locals)
            if found:
                return f"{found} ({line})" if line else found
        return f"the step ({line})" if line else "the step"

    def _named_by(self, names: dict[str, Any]) -> str | None:
        hook = names.get("_gtp_hook_of")
        if hook is not None:
            return f"{hook}: a hook of its gradient"
        for module in (names.get("self"), names.get("module")):
            if isinstance(module, nn.Module) and id(module) in self._fqns:
                name = self._fqns[id(module)] or "the model"
                return f"{name}: {type(module).__name__}"
        weight = names.get("weight")
        return weight.fqn if isinstance(weight, ShardedWeight) else None


def _is_users(frame: FrameType) -> bool:
    """Whether code that somebody may change runs in ``frame``: not torch, and not this library."""
    package = frame.f_globals.get("__name__", "").partition(".")[0]
    return package not in ("torch", __name__.partition(".")[0], "warnings", "contextlib")


class HostReads:
    """Finds where a step stops the host for the device, while it runs without a graph; torch tells.

    Attributes:
        found: where, in this order.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places = Places(model)
        self.found: dict[str, None] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around a step."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(), named_hooks(self._model):
            warnings.simplefilter("always")
            show, warnings.showwarning = warnings.showwarning, self._note
            self._show = show
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode(before)

    def _note(self, message, category, filename, lineno, file=None, line=None) -> None:
        text = str(message)
        if _SAID in text:
            self.found.setdefault(self._places.of_frame(sys._getframe(1)), None)
        elif not text.startswith("Synchronization debug mode is a prototype"):
            self._show(message, category, filename, lineno, file, line)

    def refuse(self) -> None:
        """Raise :class:`GraphError` where there are any."""
        if self.found:
            raise GraphError(
                f"the step cannot be captured, because the host waits for the device in {'; in '.join(self.found)}. A graph "
                "replays what the host decided once: keep the value on the device (.item(), .tolist(), if on a tensor, "
                "nonzero, copies from and to the CPU do not), leave that part out of the step, or run without a graph"
            )


@contextlib.contextmanager
def named_hooks(model: nn.Module) -> Iterator[None]:
    """Inside, hooks of parameters' gradients can be told by :class:`Places`."""
    saved = []
    try:
        for name, param in model.named_parameters():
            for hooks, key in hooks_of_others(param):
                saved.append((hooks, key, hooks[key]))
                hooks[key] = _named_hook(hooks[key], clean_fqn(name))
        yield
    finally:
        for hooks, key, hook in saved:
            if key in hooks:
                hooks[key] = hook


def _named_hook(hook: Callable, fqn: str) -> Callable:
    def named(*args):
        _gtp_hook_of = fqn  # noqa: F841  read from the frame
        return hook(*args)

    return named


def autocast_modes() -> tuple:
    """Autocast as it is now."""
    return tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cuda", "cpu"))


def refuse_written(inputs: Iterable[tuple[torch.Tensor, int]], what: str) -> None:
    """Raise :class:`GraphError` where an input was written since it had that version: it is a copy of what was given.

    Args:
        what: was captured.
    """
    for number, (tensor, version) in enumerate(inputs):
        if tensor._version != version:
            raise GraphError(
                f"{what} writes to tensor {number} of its inputs, of shape {tuple(tensor.shape)}: a graph has inputs of its own, "
                "and what was given would stay as it is. Return what it computes, or write to a tensor that is no argument"
            )


def hooked_parameters(model: nn.Module) -> list[str]:
    """FQNs of parameters with hooks on their gradients."""
    return [clean_fqn(n) for n, p in model.named_parameters() if has_hooks(p)]


# ---- optimizers


class Steppers:
    """Optimizers that step, while a step runs without a graph, on parameters of none that was named: their numbers would not be
    looked after.

    Args:
        named: those that were.
    """

    def __init__(self, named: Sequence[torch.optim.Optimizer]) -> None:
        self._named = named
        self.found: dict[str, None] = {}

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Around a step."""
        handle = register_optimizer_step_pre_hook(self._note)
        try:
            yield
        finally:
            handle.remove()

    def _note(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        # One that holds others may be called in their place.
        named = {id(param) for one in self._named for group in one.param_groups for param in group["params"]}
        if any(id(param) not in named for group in optimizer.param_groups for param in group["params"]):
            self.found[type(optimizer).__name__] = None

    def refuse(self) -> None:
        """Raise :class:`GraphError` where there are any."""
        if self.found:
            raise GraphError(
                f"the step calls step() of {' and '.join(self.found)}, which graph_step() was not given: give it all optimizers, "
                "graph_step(step, model, [...]), those inside of others too"
            )


def check_optimizers(optimizers: Iterable[torch.optim.Optimizer], names: dict[int, str]) -> None:
    """Raise :class:`GraphError` where an optimizer keeps on the host what changes from step to step.

    Args:
        names: FQNs of parameters, by identity.
    """
    for optimizer in optimizers:
        what = type(optimizer).__name__
        for number, group in enumerate(optimizer.param_groups):
            if group.get("capturable") is False:
                raise GraphError(
                    f"{what} with capturable=False (param_groups[{number}]) cannot be captured: make it with capturable=True "
                    f"(and fused=True, which is fastest), or call step() outside of the graph"
                )
            on_device = any(param.device.type != "cpu" for param in group["params"])
            for key, value in group.items():
                if isinstance(value, torch.Tensor) and value.device.type == "cpu" and on_device:
                    raise GraphError(
                        f"{what}.param_groups[{number}]['{key}'] is a tensor on the CPU, whose value a graph has for good, or "
                        f'reads too late: make it on the device of the weights ({key}=torch.tensor(..., device="cuda"))'
                    )
        for param, state in optimizer.state.items():
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, torch.Tensor) and value.device.type == "cpu" and param.device.type != "cpu":
                    raise GraphError(
                        f"{names.get(id(param), 'a parameter')}: {what} keeps its state '{key}' on the CPU, where a graph "
                        "cannot change it: make the optimizer with capturable=True before its first step"
                    )


def host_numbers(optimizers: Iterable[torch.optim.Optimizer]) -> dict[tuple, Any]:
    """What optimizers hold that is not on a device, by where it is: a graph has these values for good. A tensor among the
    settings (a learning rate) counts by its version: it may change between replays, not within one."""
    found: dict[tuple, Any] = {}
    for place, optimizer in enumerate(optimizers):
        what = f"{type(optimizer).__name__}"
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                if key != "params" and not isinstance(value, torch.Tensor):
                    found[place, f"{what}.param_groups[{number}]['{key}']"] = value
        for number, state in enumerate(optimizer.state.values()):
            for key, value in state.items() if isinstance(state, dict) else ():
                if isinstance(value, (int, float)):
                    found[place, f"{what}.state['{key}'] of parameter {number}"] = value
    return found


def setting_versions(optimizers: Iterable[torch.optim.Optimizer]) -> dict[tuple, int]:
    """How often each tensor among the settings of ``optimizers`` was written."""
    return {
        (place, f"{type(optimizer).__name__}.param_groups[{number}]['{key}']"): value._version
        for place, optimizer in enumerate(optimizers)
        for number, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if isinstance(value, torch.Tensor)
    }


def first_difference(before: dict[tuple, Any], after: dict[tuple, Any]) -> tuple[str, Any, Any] | None:
    """(name, value before, value after) of the first entry that differs."""
    for key in before.keys() | after.keys():
        one, other = before.get(key), after.get(key)
        if one is not other and one != other:
            return key[-1], one, other
    return None


# ---- what a graph has the addresses of


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


class _Tensor(NamedTuple):
    """A tensor in a table, and where it is in memory."""

    name: str
    key: Any
    tensor: torch.Tensor
    local: torch.Tensor
    address: int

    @classmethod
    def of(cls, name: str, key: Any, tensor: torch.Tensor) -> _Tensor:
        local = _local(tensor)
        return cls(name, key, tensor, local, local.data_ptr())

    def is_in(self, table: Mapping) -> bool:
        """Whether it is there still, at the same address."""
        found = table.get(self.key)
        return found is self.tensor and _local(found) is self.local and self.local.data_ptr() == self.address


class Held:
    """The tensors that a graph reads and writes and that others could replace: parameters, buffers, optimizer state."""

    def __init__(self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        names = {id(param): clean_fqn(name) for name, param in model.named_parameters()}
        self._of_modules: list[tuple[dict, _Tensor]] = []
        for prefix, module in model.named_modules():
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is not None:
                        name = clean_fqn(f"{prefix}.{key}" if prefix else key)
                        self._of_modules.append((table, _Tensor.of(name, key, tensor)))
        self._trained = [(names[id(param)], param, param.requires_grad) for param in model.parameters()]
        # Loading a state dict replaces the tables, too.
        self._optimizers = list(optimizers)
        self._states = [
            [
                [
                    _Tensor.of(f"the state '{key}' of {names.get(id(param), 'a parameter')}", key, value)
                    for key, value in state.items()
                    if isinstance(value, torch.Tensor)
                ]
                for param, state in optimizer.state.items()
                if isinstance(state, dict)
            ]
            for optimizer in self._optimizers
        ]
        self._settings = [
            [
                [
                    _Tensor.of(f"the setting '{key}' of {type(optimizer).__name__}", key, value)
                    for key, value in group.items()
                    if isinstance(value, torch.Tensor)
                ]
                for group in optimizer.param_groups
            ]
            for optimizer in self._optimizers
        ]

    def replaced(self) -> str | None:
        """The first that is not where it was."""
        for table, one in self._of_modules:
            if not one.is_in(table):
                return one.name
        for name, param, trains in self._trained:
            if param.requires_grad is not trains:
                return name
        for optimizer, states, settings in zip(self._optimizers, self._states, self._settings):
            found = [state for state in optimizer.state.values() if isinstance(state, dict)]
            if len(found) != len(states) or len(optimizer.param_groups) != len(settings):
                return f"what {type(optimizer).__name__} optimizes"
            for table, ones in (*zip(found, states), *zip(optimizer.param_groups, settings)):
                for one in ones:
                    if not one.is_in(table):
                        return one.name
        return None


class Gradients:
    """``.grad`` of all parameters around a captured step, and so around each replay."""

    def __init__(self, model: nn.Module) -> None:
        self._params = [(clean_fqn(name), param) for name, param in model.named_parameters()]
        self._before = [param.grad for _, param in self._params]
        self._after: list[torch.Tensor | None] = []

    def dropped(self) -> set[str]:
        """FQNs of parameters whose gradient the step, which is over, began by dropping. Where none is there any more, the
        step may have ended by that, and have added to it before."""
        grads = ((fqn, before, param.grad) for (fqn, param), before in zip(self._params, self._before))
        return {fqn for fqn, before, now in grads if before is not None and now is not None and now is not before}

    def note_captured(self, dropped: set[str]) -> None:
        """The step was captured, and none of its replays has run. ``dropped``: of steps before, see there."""
        self._after = [param.grad for _, param in self._params]
        dropped = dropped | self.dropped()
        self.restore()
        self._before = [_ANY if fqn in dropped else before for (fqn, _), before in zip(self._params, self._before)]

    def restore(self) -> None:
        """A capture computes nothing."""
        for (_, param), grad in zip(self._params, self._before):
            param.grad = grad

    def check(self) -> None:
        """Before a replay. Raises :class:`GraphError` where a gradient is there that the graph does not add to."""
        for (fqn, param), before in zip(self._params, self._before):
            if before is not _ANY and param.grad is not before:
                raise GraphError(
                    f"{fqn}: its gradient is not the one that was there when the step was captured, and which the step adds to: "
                    "call zero_grad() within the step, first or last, or always before it"
                )

    def replayed(self) -> None:
        """After a replay."""
        for (_, param), grad in zip(self._params, self._after):
            if param.grad is not grad:
                param.grad = grad


_ANY = object()
