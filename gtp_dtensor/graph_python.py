"""What Python had decided when a graph was captured, and that somebody may have changed since: replays do not notice."""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_, itemgetter
from types import FunctionType
from typing import Any

import torch
import torch.nn as nn

from .grad_hooks import hooks_of_others
from .plan import clean_fqn

_NUMBERS = (bool, int, float, str, type(None))
_HOOKS_OF_CALLS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOOKS_OF_STEPS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


class Decisions:
    """Numbers, tensors, ``forward`` and hooks that modules have as attributes; submodules; what optimizers optimize.

    What the captured Python changes itself does not count: :meth:`note_captured`.

    Args:
        with_root: hooks and ``forward`` of ``model`` itself count; else they run around graphs.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = (), *, with_root: bool = True
    ) -> None:
        self._modules = [(clean_fqn(name), module) for name, module in model.named_modules()]
        self._types = [type(module) for _, module in self._modules]
        self._children = [(name, m._modules, list(m._modules.values())) for name, m in self._modules if m._modules]
        self._childless = [(name, m._modules) for name, m in self._modules if not m._modules]
        self._params = [(clean_fqn(name), param) for name, param in model.named_parameters()]
        self._optimizers = [(o, [list(group["params"]) for group in o.param_groups]) for o in optimizers]
        self._hooks = [
            (f"the hooks of {name or 'the model'}", getattr(module, kind))
            for name, module in (self._modules if with_root else self._modules[1:])
            for kind in _HOOKS_OF_CALLS
        ] + [(f"the hooks of {type(o).__name__}", getattr(o, kind)) for o in optimizers for kind in _HOOKS_OF_STEPS]
        self._before = [_attributes(module) for _, module in self._modules]
        self._forwards = self._modules if with_root else self._modules[1:]
        if not with_root:
            self._before[0].pop("forward", None)
        self._numbers: list[tuple[str, dict, tuple, Callable, Any]] = []
        self._objects: list[tuple[str, dict, str, Any]] = []
        self.note_captured()

    def note_captured(self) -> None:
        """Again after the capture, where it is over."""
        self._numbers, self._objects = [], []
        for (name, module), before in zip(self._modules, self._before):
            table = module.__dict__
            kept = {key: value for key, value in before.items() if _is_same(table.get(key, table), value)}
            keys = tuple(key for key, value in kept.items() if isinstance(value, _NUMBERS))
            if keys:
                read = itemgetter(*keys)
                self._numbers.append((name, table, keys, read, read(table)))
            objects = ((key, value) for key, value in kept.items() if not isinstance(value, _NUMBERS))
            self._objects += [(_of(name, key), table, key, value) for key, value in objects]
        for name, module in self._forwards:
            if "forward" not in module.__dict__:
                self._objects.append((_of(name, "forward"), module.__dict__, "forward", None))
        self._with_hooks = [(what, hooks, list(hooks)) for what, hooks in self._hooks if hooks]
        self._without = [(what, hooks) for what, hooks in self._hooks if not hooks]
        self._of_gradients = [_hooks_of_gradient(param) for _, param in self._params]

    def changed(self) -> str | None:
        """The first that is another one now."""
        if list(map(type, (module for _, module in self._modules))) != self._types:
            return next(n or "the model" for (n, m), kind in zip(self._modules, self._types) if type(m) is not kind)
        for name, table, children in self._children:
            if len(table) != len(children) or not all(map(is_, table.values(), children)):
                return f"a submodule of {name or 'the model'}"
        for name, table in self._childless:
            if table:
                return f"a submodule of {name or 'the model'}"
        return self._changed_attribute() or self._changed_hooks() or self._changed_optimizer()

    def _changed_attribute(self) -> str | None:
        for name, table, keys, read, values in self._numbers:
            try:
                if read(table) == values:
                    continue
            except KeyError:
                pass
            olds = (values,) if len(keys) == 1 else values
            return next(_of(name, key) for key, old in zip(keys, olds) if not _is_same(table.get(key, table), old))
        return next((name for name, table, key, value in self._objects if table.get(key) is not value), None)

    def _changed_hooks(self) -> str | None:
        for what, hooks, keys in self._with_hooks:
            if list(hooks) != keys:
                return what
        for what, hooks in self._without:
            if hooks:
                return what
        for (name, param), keys in zip(self._params, self._of_gradients):
            if _hooks_of_gradient(param) != keys:
                return f"the hooks of the gradient of {name}"
        return None

    def _changed_optimizer(self) -> str | None:
        for optimizer, groups in self._optimizers:
            found = [group["params"] for group in optimizer.param_groups]
            if list(map(len, found)) != list(map(len, groups)) or not all(
                all(map(is_, *pair)) for pair in zip(found, groups)
            ):
                return f"what {type(optimizer).__name__} optimizes"
        return None


def _of(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _is_same(one: Any, other: Any) -> bool:
    return one is other or isinstance(other, _NUMBERS) and type(one) is type(other) and one == other


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Of ``module``, those that a graph has for good."""
    kinds = (*_NUMBERS, torch.Tensor)
    return {key: value for key, value in module.__dict__.items() if key == "forward" or isinstance(value, kinds)}


def _hooks_of_gradient(param: nn.Parameter) -> list:
    return [key for _, key in hooks_of_others(param)]


def trained_attributes(module: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that gradients flow back from and that forwards left in attributes, by name."""
    return {
        _of(clean_fqn(name), key): value
        for name, part in module.named_modules()
        for key, value in part.__dict__.items()
        if isinstance(value, torch.Tensor) and value.grad_fn is not None
    }


class Names:
    """Numbers, tensors, modules and optimizers that a function reads by the names of variables around it."""

    def __init__(self, function: Callable) -> None:
        self._places = list(_variables(function))
        self._values = [(name, read()) for name, read, _ in self._places]

    def changed(self) -> tuple[str, Any, Any] | None:
        """(name, value then, value now) of the first that names another one."""
        for (name, before), (_, read, _) in zip(self._values, self._places):
            now = read()
            if not _is_same(now, before) and isinstance(before, _OBJECTS):
                return name, before, now
        return None

    def restore(self) -> None:
        """Let them name what they did."""
        for (_, before), (_, read, write) in zip(self._values, self._places):
            if read() is not before and isinstance(before, _OBJECTS):
                write(before)


_OBJECTS = (*_NUMBERS, torch.Tensor, nn.Module, torch.optim.Optimizer)


def _variables(function: Callable) -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    """(name, what reads it, what writes it), of variables of the functions and modules around ``function``."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType):
        return
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        yield name, functools.partial(_cell, cell), functools.partial(setattr, cell, "cell_contents")
    table = function.__globals__
    for name in dict.fromkeys(_global_names(dis.get_instructions(function))):
        if name in table:
            yield name, functools.partial(table.get, name), functools.partial(table.__setitem__, name)


def _global_names(instructions: Iterable[dis.Instruction]) -> Iterator[str]:
    return (one.argval for one in instructions if one.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"))


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return _cell
