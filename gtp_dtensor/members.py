"""What a module knows of its parameters: the objects behind them, and the lookup that follows replaced parameters."""

from __future__ import annotations

import copy
import weakref
from typing import TypeVar

import torch.nn as nn

from .runtime import Runtime
from .small import SmallParam
from .weight import ShardedWeight

STATE = "_gtp"  # the attribute, in a module's __dict__, that holds its ModuleState
Member = TypeVar("Member", ShardedWeight, SmallParam)


class ModuleState:
    """The sharded weights and whole parameters of one module, by parameter name.

    ``borrows`` are child modules whose parameters this module's forward reads itself, without calling the child.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.weights: dict[str, ShardedWeight] = {}
        self.smalls: dict[str, SmallParam] = {}
        self.borrows: list[str] = []

    def runtimes(self) -> list[Runtime]:
        """Usually one."""
        return [member.runtime for table in (self.weights, self.smalls) for member in table.values()]

    def __deepcopy__(self, memo: dict) -> ModuleState:
        """A copied model gets members of its own, bound to the copied parameters and to one copied runtime."""
        old = self._module()
        new = memo.get(id(old))
        if new is None:
            raise RuntimeError("a GTP module state can only be copied together with its module: deepcopy the module")
        state = ModuleState(new)
        memo[id(self)] = state
        state.borrows = list(self.borrows)
        for mine, theirs in ((self.weights, state.weights), (self.smalls, state.smalls)):
            for name, member in mine.items():
                theirs[name] = _copy_member(member, memo)
                theirs[name].add_owner(new, name)
        return state


def _copy_member(member: Member, memo: dict) -> Member:
    if id(member) not in memo:
        param = copy.deepcopy(member.param, memo)
        runtime = copy.deepcopy(member.runtime, memo)
        memo[id(member)] = _like(member, param, runtime)
    return memo[id(member)]


def _like(member: Member, param: nn.Parameter, runtime: Runtime) -> Member:
    """A new member of the same layout for ``param``, adopted by ``runtime``."""
    if isinstance(member, ShardedWeight):
        twin = ShardedWeight(runtime, 0, member.fqn, param, member.cut, member.tp, runtime.transport.rank)
    else:
        twin = SmallParam(runtime, 0, member.fqn, param, member.tp)
    runtime.adopt(twin)
    return twin


def weight_of(module: nn.Module, name: str) -> ShardedWeight:
    """The weight behind ``module``'s parameter ``name`` as it is registered now."""
    state = module.__dict__[STATE]
    weight = state.weights[name]
    if module._parameters[name] is not weight.param:
        weight = state.weights[name] = _follow(weight, module, name, weight.runtime.live_weights())
    return weight


def small_of(module: nn.Module, name: str) -> SmallParam:
    """The whole parameter ``name`` of ``module`` as it is registered now."""
    state = module.__dict__[STATE]
    small = state.smalls[name]
    if module._parameters[name] is not small.param:
        small = state.smalls[name] = _follow(small, module, name, small.runtime.live_smalls())
    return small


def _follow(member: Member, module: nn.Module, name: str, peers) -> Member:
    """The member for a parameter that was replaced (``to_empty``, ``assign=True``), re-tied or untied."""
    param = module._parameters[name]
    member.check_param(param)
    for peer in peers:
        if peer.param is param:
            peer.add_owner(module, name)
            return peer
    elsewhere = [(ref(), other) for ref, other in member.owners if not (ref() is module and other == name)]
    if all(owner is None or owner._parameters.get(other) is param for owner, other in elsewhere):
        member.replace_param(param)
        return member
    member.owners = [(ref, other) for ref, other in member.owners if not (ref() is module and other == name)]
    twin = _like(member, param, member.runtime)
    twin.add_owner(module, name)
    return twin


def module_runtimes(root: nn.Module) -> list[Runtime]:
    """The runtimes of the sharded modules below ``root``, each once, in the order of the modules."""
    found: dict[Runtime, None] = {}
    for module in root.modules():
        state: ModuleState | None = module.__dict__.get(STATE)
        if state is not None:
            found.update(dict.fromkeys(state.runtimes()))
    return list(found)


def model_runtimes(model: nn.Module) -> list[Runtime]:
    """Like :func:`module_runtimes`; those that can be one (same axis and settings) are merged, now that we know that
    their modules belong to one model."""
    merged: list[Runtime] = []
    for runtime in module_runtimes(model):
        for other in merged:
            if other.domain is runtime.domain and other.config == runtime.config:
                other.absorb(runtime)
                break
        else:
            merged.append(runtime)
    return merged
