"""What a module knows of its parameters: the objects behind them, and the lookup that follows replaced parameters."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from .config import GTPConfig
from .domain import Domain
from .layout import check_replacement, storage_mesh
from .runtime import Runtime
from .small import SmallParam
from .weight import ShardedWeight

if TYPE_CHECKING:
    from .handles import LeafHandle, WeightHandle

STATE = "_gtp"  # the attribute, in a module's __dict__, that holds its ModuleState
ROOT = "_gtp_root"  # the same for the RootState of a module that parallelize_module was called on
Member = TypeVar("Member", ShardedWeight, SmallParam)


class ModuleState:
    """The sharded weights and whole parameters of one module, by parameter name.

    ``borrows`` are child modules whose parameters this module's forward reads itself, without calling the child.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self.weights: dict[str, ShardedWeight] = {}
        self.smalls: dict[str, SmallParam] = {}
        # What compiled code knows of them, see handles.py.
        self.handles: dict[str, WeightHandle] = {}
        self.leaves: dict[str, LeafHandle] = {}
        self.borrows: list[str] = []
        self.is_simple = False  # owns whole vectors only
        self.own_forward: Callable | None = None  # that the module had in its __dict__

    def __deepcopy__(self, memo: dict) -> ModuleState:
        """A copied model gets members of its own, bound to the copied parameters and to one copied runtime."""
        old = self._module()
        new = memo.get(id(old))
        if new is None:
            raise RuntimeError("a GTP module state can only be copied together with its module: deepcopy the module")
        state = ModuleState(new)
        memo[id(self)] = state
        state.borrows, state.is_simple = list(self.borrows), self.is_simple
        state.own_forward = copy.deepcopy(self.own_forward, memo)  # a bound method follows the copy
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
        twin = ShardedWeight(runtime, 0, member.fqn, param, member.layout, member.wire)
    else:
        twin = SmallParam(runtime, 0, member.fqn, param, member.tp)
    runtime.adopt(twin)
    return twin


def weight_of(module: nn.Module, name: str) -> ShardedWeight:
    """The weight behind ``module``'s parameter ``name`` as it is registered now."""
    weights = module.__dict__[STATE].weights
    weight = weights[name]
    if module._parameters.get(name) is not weight.param:
        weight = weights[name] = _follow(weight, module, name, weight.runtime.live_weights())
    return weight


def small_of(module: nn.Module, name: str) -> SmallParam:
    """The whole parameter ``name`` of ``module`` as it is registered now."""
    smalls = module.__dict__[STATE].smalls
    small = smalls[name]
    if module._parameters.get(name) is not small.param:
        small = smalls[name] = _follow(small, module, name, small.runtime.live_smalls())
    return small


def _follow(member: Member, module: nn.Module, name: str, peers: list[Member]) -> Member:
    """The member for a parameter that was replaced (``to_empty``, ``assign=True``), re-tied or untied."""
    param = module._parameters.get(name)
    if param is None:
        raise RuntimeError(
            f"{member.fqn}: the parameter is gone from its module; a parametrization or pruning has to be registered "
            "before GTPStyle"
        )
    check_replacement(param, member.spec, member.param._local_tensor.shape, member.fqn)
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
    twin.keeps_back = member.keeps_back
    twin.add_owner(module, name)
    return twin


class RootState:
    """What the module that ``parallelize_module`` was called on keeps: its runtimes, and their members alive.

    Members must live as long as they are part of the model on every rank alike. When garbage collection frees a module
    differs between ranks, and so would their gathers, if the modules alone held the members.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.runtimes: list[Runtime] = []
        self.members: list[ShardedWeight | SmallParam] = []
        self.has_run = False
        # (mesh that parameters are stored on, the model-parallel mesh in it) by gtp axis
        self._storage: dict[Domain, tuple[DeviceMesh, DeviceMesh | None]] = {}

    def storage_for(self, domain: Domain, tp_mesh: DeviceMesh | None) -> DeviceMesh:
        """The one mesh that this model's parameters in ``domain`` are stored on; made on first use.

        ``tp_mesh`` is None where no parameter shows a tensor-parallel axis any more: those were replaced before.
        """
        known = self._storage.get(domain)
        if known is None or tp_mesh not in (None, known[1]):
            mesh = storage_mesh(domain.gtp_mesh, tp_mesh, domain.shard_mesh, domain.replicate_mesh)
            known = self._storage[domain] = (mesh, tp_mesh)
        return known[0]

    def expert_storages(self) -> list[DeviceMesh]:
        """The meshes that experts are stored on."""
        return [mesh for domain, (mesh, _) in self._storage.items() if domain.is_expert]

    def runtime_for(self, domain: Domain, config: GTPConfig, num_data_ranks: int | None) -> Runtime:
        """The runtime of this axis and these settings; made on first use."""
        for runtime in self.runtimes:
            if runtime.domain is domain and runtime.config == config and runtime.num_data_ranks == num_data_ranks:
                return runtime
        runtime = Runtime(domain, config, num_data_ranks)
        runtime.root_state = weakref.ref(self)
        self.runtimes.append(runtime)
        return runtime

    def prune(self) -> None:
        """Let go of members that are no longer part of the model."""
        present = {id(member) for module in self.module().modules() for member in state_members(module)}
        for member in self.members:
            if id(member) not in present:
                member.runtime.expel(member)
        self.members = [member for member in self.members if id(member) in present]

    def __deepcopy__(self, memo: dict) -> RootState:
        copied = RootState(memo[id(self.module())])
        memo[id(self)] = copied
        copied._storage = dict(self._storage)
        copied.runtimes = [copy.deepcopy(runtime, memo) for runtime in self.runtimes]
        for member in self.members:
            _copy_member(member, memo)
        return copied


def state_members(module: nn.Module) -> list[ShardedWeight | SmallParam]:
    """The members of one module."""
    state: ModuleState | None = module.__dict__.get(STATE)
    return [] if state is None else [*state.weights.values(), *state.smalls.values()]


def model_members(model: nn.Module) -> list[ShardedWeight | SmallParam]:
    """The members of ``model``, tied ones once, in the order of its modules."""
    return list(dict.fromkeys(member for module in model.modules() for member in state_members(module)))


def model_runtimes(model: nn.Module) -> list[Runtime]:
    """The runtimes of ``model``'s members, each once. Usually one."""
    return list(dict.fromkeys(member.runtime for member in model_members(model)))
