"""``GTPStyle``: the walk over modules that decides which weights are sharded and which stay whole."""

from __future__ import annotations

import fnmatch
import inspect
import logging
import sys
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import parallelize_module as _torch_parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from .accumulation import idle_switches
from .config import GTPConfig
from .domain import Domain, domain_of
from .handles import sync_handles
from .layout import TPLayout, check_gtp_mesh, replica_axis, weight_layout
from .members import STATE, ModuleState
from .modules import Forward, explicit_forward, keeps_gathered, root_state, sharded_class
from .plan import ModuleFilter, Plan, is_taken_by_experts
from .small import SmallParam
from .steps import SUCCESSOR
from .weight import ShardedWeight

logger = logging.getLogger(__name__)


class GTPStyle(ParallelStyle):
    """Generalized tensor parallelism as a ``ParallelStyle``: ZeRO-3 on a model-parallel axis, one weight at a time.

    ``parallelize_module(model, mesh["gtp"], GTPStyle())`` replaces, in place, every parameter below ``model``. A plan
    may name modules instead; all styles of one call, and of later calls on the same ``model``, share one schedule,
    which looks ahead inside that model's forward and its backward.

    * a large weight (2-D or more, ``min_numel`` elements or more) by a DTensor whose rows are cut over the axis,
      ``Shard(0)``; it is gathered for each use and its gradient is reduce-scattered;
    * every other parameter by a DTensor that is whole on each rank, ``Replicate()``, with its gradient reduced.

    Routed experts take a style of their own, ``is_expert=True``, which is applied first and on an axis of theirs::

        parallelize_module(model, mesh["egtp"], GTPStyle(is_expert=True, modules=["layers.*.moe.experts"]))
        parallelize_module(model, mesh["gtp"], GTPStyle())

    It touches only what ``modules`` names, with everything below; the dense style then passes over that. A stack of
    experts (experts, out, in) is cut by whole experts where the axis divides their number on this rank, else by the out
    features of each. (Where its axes have one rank only and no expert-parallel mesh is there, it changes nothing, and the
    dense style takes the experts with the rest.) Gathers are issued a block ahead: while a block uses its w1, that of the
    next is on its way.

    After a tensor-parallel plan the parameters lie on a private mesh with the axes (tp, gtp): rows of a column-parallel
    weight are cut by tp first. Apply TP before, ``GTPStyle`` after it; ``to_empty`` and initialisation may follow (see
    :func:`~gtp_dtensor.logical_init`). The ranks of the axis read different data, like data-parallel ranks.
    Parameters on a real device are first made equal to those of the axis' rank ``src_data_rank`` (an argument of
    ``parallelize_module``, 0 by default, None: trust the ranks to be equal).

    Args:
        config: settings; ``GTPConfig()`` where None.
        modules: which modules' weights are sharded: a predicate ``(fqn, module) -> bool`` or FQN patterns of modules
            (``fnmatch``). None: all. Weights of other modules stay whole. With ``is_expert``: which modules are experts,
            everything below them included; other modules are left alone.
        exclude: FQN patterns of weights that stay whole. Names, here and in ``modules``, begin below the module that
            the style is applied to.
        min_numel: weights with fewer elements stay whole.
        replicate_mesh: a 1-D mesh of replicas, ranks beside the gtp axis that read other data and hold the same shards
            (torchtitan's ``dp_replicate``). Gradients are reduced over it too.
        optimizer_shard_mesh: a 1-D mesh of replicas over which the parameters themselves are cut further (``dp_shard``
            x ``cp``), so that each holds a part of the gradient and optimizer state of its shards; once an optimizer
            step the parts are gathered into the compute shards. Each rank then keeps its compute shards, in
            ``param_dtype``, beside the parameters.
        is_expert: the weights are those of routed experts; see above. Their axes may differ from the dense weights' and
            their parameters may be DTensors on an expert-parallel mesh (of experts, and of features of each).
        num_data_ranks: over how many ranks' losses gradients are averaged. None: the ranks of the three axes; for
            experts those of the dense weights of the same model, since tokens of expert-parallel peers reach them too.
        forwards: by class, a function ``(module, *args, **kwargs)`` that computes what modules of exactly that class do
            and uses :func:`~gtp_dtensor.grouped_linear` for its weights, which are then gathered for that use only. The
            weights of other modules that the library does not know stay gathered until their backward.
        wire_format_overrides: FQN patterns of weights, each with the format that they travel in instead of
            ``config.wire_format``; the first that matches holds.

    Raises (when applied):
        ValueError: a mesh that is not 1-D, a pattern that matches nothing, a parameter that is sharded already or lies
            on a conflicting mesh, a module whose computation cannot be served. Nothing has been changed then.
    """

    def __init__(
        self,
        config: GTPConfig | None = None,
        *,
        modules: ModuleFilter | None = None,
        exclude: Sequence[str] = (),
        min_numel: int = 1024,
        replicate_mesh: DeviceMesh | None = None,
        optimizer_shard_mesh: DeviceMesh | None = None,
        is_expert: bool = False,
        num_data_ranks: int | None = None,
        forwards: Mapping[type[nn.Module], Forward] | None = None,
        wire_format_overrides: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__()
        if config is not None and not isinstance(config, GTPConfig):
            raise TypeError(f"GTPStyle(config=...) must be a GTPConfig, got {type(config).__name__}")
        if isinstance(modules, str) or isinstance(exclude, str):
            raise TypeError("GTPStyle(modules=..., exclude=...) take a list of patterns, not one string")
        if min_numel < 0:
            raise ValueError(f"GTPStyle(min_numel={min_numel}): must not be negative")
        if num_data_ranks is not None and num_data_ranks < 1:
            raise ValueError(f"GTPStyle(num_data_ranks={num_data_ranks}): must be 1 or more")
        self.config = config or GTPConfig()
        self.modules = modules
        self.exclude = tuple(exclude)
        self.min_numel = min_numel
        self.replicate_mesh = replicate_mesh
        self.optimizer_shard_mesh = optimizer_shard_mesh
        self.is_expert = is_expert
        self.num_data_ranks = num_data_ranks
        self.forwards = dict(forwards or {})
        self.wire_format_overrides = dict(wire_format_overrides or {})

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Called by ``parallelize_module``."""
        check_gtp_mesh(device_mesh)
        root, plan_dict = _outermost_call(module)
        if plan_dict is not None:
            check_plan_keys(root, plan_dict)
        plan = Plan(self, root, module, device_mesh)
        shard_mesh = replica_axis(self.optimizer_shard_mesh, "optimizer_shard_mesh", device_mesh)
        replicate_mesh = replica_axis(self.replicate_mesh, "replicate_mesh", device_mesh)
        if shard_mesh is not None and replicate_mesh is not None:
            replica_axis(self.replicate_mesh, "replicate_mesh", shard_mesh)
        if device_mesh.size() == 1 and shard_mesh is None and replicate_mesh is None:
            # Off is off: parameters, random numbers and results stay bit-identical. But experts that no axis of theirs
            # shares, since expert parallelism has spread them over all ranks, still get tokens of these ranks; and where
            # experts are on, settings such as param_dtype hold for all weights.
            is_on = any(is_taken_by_experts(below) for below in root.modules())
            if self.is_expert:
                is_on = any(isinstance(entry[-1], DTensor) for entry in plan.entries)
            if not is_on:
                return module
        plan.check()
        domain = domain_of(device_mesh, shard_mesh, replicate_mesh, self.is_expert, self.config.transport)
        _Application(self, plan, domain).run()
        return module

    def __repr__(self) -> str:
        return f"GTPStyle({self.config})"


def _outermost_call(module: nn.Module) -> tuple[nn.Module, dict | None]:
    """(model, plan) of the ``parallelize_module`` call that is in progress; ``module`` itself where there is none.

    torch hands a style nothing but the module that it is for. The model is needed to tell which modules belong together
    (one schedule, one storage mesh) and what their parameters are called.
    """
    code = inspect.unwrap(_torch_parallelize_module).__code__
    frame = sys._getframe(2)  # of the caller of _apply
    root, plan = module, None
    while frame is not None and frame.f_code is code:
        root, plan = frame.f_locals["module"], frame.f_locals["parallelize_plan"]
        frame = frame.f_back
    return root, plan if isinstance(plan, dict) else None


def check_plan_keys(root: nn.Module, plan: dict[str, ParallelStyle]) -> None:
    """Raise ``ValueError`` for a key that matches no module below ``root``; torch only warns."""
    for key in plan:
        level = [root]
        for depth, token in enumerate(key.split(".") if key else []):
            names = [name for parent in level for name, _ in parent.named_children()]
            level = [c for parent in level for n, c in parent.named_children() if fnmatch.fnmatch(n, token)]
            if not level:
                prefix = ".".join(key.split(".")[:depth])
                raise ValueError(
                    f"parallelize_module: plan key '{key}' matches no module: nothing below '{prefix}' is called "
                    f"'{token}'; names there are {', '.join(map(repr, dict.fromkeys(names))) or '(none)'}"
                )


class _Application:
    """Carries out a checked plan."""

    def __init__(self, style: GTPStyle, plan: Plan, domain: Domain) -> None:
        self.style = style
        self.plan = plan
        self.domain = domain
        state = root_state(plan.root)
        self.expert_storages = [] if domain.is_expert else state.expert_storages()
        self.runtime = state.runtime_for(domain, style.config, style.num_data_ranks)
        self.storage = state.storage_for(domain, plan.tp_mesh)
        self.members: dict[int, ShardedWeight | SmallParam] = {}
        self.general: set[str] = set()  # classes with sharded weights whose computation we do not know

    def run(self) -> None:
        self.plan.replace_parameters()
        for module, _, name, _, fqn, param in self.plan.entries:
            member = self.members.get(id(param)) or getattr(param, SUCCESSOR, lambda: None)()  # tied to another module
            if member is None:
                member = self._convert(fqn, param)
                self.runtime.adopt(member)
                for replaced in (param, *self.plan.replaced.get(id(param), ())):
                    setattr(replaced, SUCCESSOR, weakref.ref(member))
            self.members[id(param)] = member
            module._parameters[name] = member.param
            member.add_owner(module, name)
            state = self._state(module)
            (state.weights if isinstance(member, ShardedWeight) else state.smalls)[name] = member
        for module, children in self.plan.borrows.items():
            children = [name for name in children if STATE in module.get_submodule(name).__dict__]
            if children:
                self._state(module).borrows = children
        for module in self.plan.modules.values():
            if STATE in module.__dict__:
                self._change_class(module)
            if isinstance(module, nn.TransformerEncoderLayer):
                module.activation_relu_or_gelu = 0  # torch's own switch from its fused kernel, which reads the children
        self._report()

    def _state(self, module: nn.Module) -> ModuleState:
        return module.__dict__.setdefault(STATE, ModuleState(module))

    def _change_class(self, module: nn.Module) -> None:
        state: ModuleState = module.__dict__[STATE]
        state.own_forward = module.__dict__.pop("forward", None)
        is_known = not state.borrows and state.own_forward is None
        explicit = explicit_forward(module, self.style.forwards) if is_known else None
        if state.weights and (explicit is None or keeps_gathered(module)):
            self.general.add(type(module).__name__)
        vectors_only = all(len(small.spec.shape) < 2 for small in state.smalls.values())
        is_other = state.weights or state.borrows or state.own_forward or isinstance(module, nn.RNNBase)
        state.is_simple = vectors_only and not is_other
        module.__class__ = sharded_class(type(module), explicit)
        sync_handles(module)

    def _convert(self, fqn: str, param: nn.Parameter) -> ShardedWeight | SmallParam:
        tp = self.plan.tp[id(param)]
        tp_local = self._source_values(param._local_tensor if tp is not None else param.detach())
        config, transport, replicas = self.style.config, self.domain.transport, self.domain.shard_transport
        if id(param) not in self.plan.sharded:
            whole = [Replicate()] * (1 if replicas is None else 2)
            return SmallParam(self.runtime, 0, fqn, self._parameter(param, tp_local, tp, whole), tp)
        layout = weight_layout(
            tp_local.shape,
            tp,
            transport.size,
            transport.rank,
            None if replicas is None else replicas.size,
            config.pad_for_alignment or 1,
            self.plan.is_stack(param),
        )
        rows = layout.stored_part(tp_local, transport.rank, 0 if replicas is None else replicas.rank)
        cuts = [Shard(cut.dim) for cut in (layout.cut, layout.replica_cut) if cut is not None]
        rows = rows.clone(memory_format=torch.contiguous_format)
        wire = self.plan.wires.get(id(param))
        return ShardedWeight(self.runtime, 0, fqn, self._parameter(param, rows, tp, cuts), layout, wire)

    def _source_values(self, tp_local: torch.Tensor) -> torch.Tensor:
        """The values of the source rank of the data axes, so that the shards are parts of one logical weight."""
        source = self.style.src_data_rank
        if source is None or tp_local.is_meta:
            return tp_local
        tp_local = tp_local.detach().clone()
        for transport in reversed(self.domain.transports):
            is_gtp = transport is self.domain.transport
            dist.broadcast(tp_local, group=transport.mesh_group, group_src=source if is_gtp else 0)
        return tp_local

    def _parameter(
        self, old: nn.Parameter, local: torch.Tensor, tp: TPLayout | None, placements: list[Shard | Replicate]
    ) -> nn.Parameter:
        """``local`` as a registered parameter on the storage mesh, with ``placements`` on the gtp and optimizer shard
        axes; attributes that users set on ``old`` survive."""
        domain = self.domain
        num_tp_axes = self.storage.ndim - len(placements) - (domain.replicate_mesh is not None)
        placements = (*((Replicate(),) * num_tp_axes if tp is None else tp.placements), *placements)
        if domain.replicate_mesh is not None:
            placements = (Replicate(), *placements)
        meta = TensorMeta(old.shape, old.stride(), old.dtype)
        spec = DTensorSpec(self.storage, placements, tensor_meta=meta)
        new = nn.Parameter(DTensor(local, spec, requires_grad=False), requires_grad=old.requires_grad)
        new.__dict__.update({key: value for key, value in old.__dict__.items() if key not in ("_is_param", SUCCESSOR)})
        return new

    def _report(self) -> None:
        """A missing axis must not silently mean "not sharded": say what was done, once, on the model's first rank."""
        weights = [m for m in self.members.values() if isinstance(m, ShardedWeight)]
        numel = sum(w.spec.shape.numel() for w in weights)
        if not any(self.storage.get_coordinate()):
            logger.info(
                "GTP: %d weights (%s elements) sharded over %s, %d parameters whole%s",
                len(weights),
                f"{numel:,}",
                self.plan.axis,
                len(self.members) - len(weights),
                f"; what {', '.join(sorted(self.general))} save for backward stays gathered" if self.general else "",
            )
            formats = Counter(w.wire.name for w in weights if w.wire is not None)
            if formats:
                counts = ", ".join(f"{number} as {name}" for name, number in formats.items())
                logger.info("GTP: weights that travel quantized: %s", counts)
            if self.plan.small_for_wire:
                few = ", ".join(self.plan.small_for_wire)
                logger.info("GTP: smaller than a block of their wire format, so they travel as they are: %s", few)
            dtypes = {w.reduce_dtype for w in weights}
            for line in (
                *idle_switches(self.style.config, self.domain, dtypes),
                *self.domain.transport.unserved(dtypes),
            ):
                logger.info("GTP: %s", line)
            for mesh in self.expert_storages:
                if mesh.size() != self.storage.size():
                    self._warn_of_other_ranks(mesh)

    def _warn_of_other_ranks(self, experts: DeviceMesh) -> None:
        """Replicas that a style was not told of would each train experts of their own."""
        of_experts, of_others = (
            " x ".join(f"{name} {size}" for name, size in zip(mesh.mesh_dim_names, mesh.shape))
            for mesh in (experts, self.storage)
        )
        logger.warning(
            "GTP: the axes of the routed experts (%s) have %d ranks and those of the other weights (%s) %d. Gradients are "
            "summed over a weight's own axes only: right where other ranks hold other experts in modules of their "
            "own; else name the missing axis in optimizer_shard_mesh= or replicate_mesh= of the style that lacks it",
            of_experts,
            experts.size(),
            of_others,
            self.storage.size(),
        )


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | dict[str, ParallelStyle] | None = None,
    **kwargs,
) -> nn.Module:
    """torch's ``parallelize_module``, after a check of the plan: torch only warns about keys that match no module.

    Raises:
        ValueError: a key of the plan matches nothing; nothing has been changed then.
    """
    if isinstance(parallelize_plan, dict):
        check_plan_keys(module, parallelize_plan)
    return _torch_parallelize_module(module, device_mesh, parallelize_plan, **kwargs)
