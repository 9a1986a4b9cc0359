"""TransformerEngine's modules under GTP: how they are made ready, and their forward; see te_weight.py for what they
read.

The experts of a GroupedLinear are one parameter, ``weight`` (experts, out, in), in place of ``weight0`` ...: one gather
and one reduction. It is what TE calls such a parameter itself, and finds in a state dict.

This module never imports TransformerEngine: who gets here has met a module of it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from . import te_ops
from .functional import input_dtypes, materialize, use_small
from .init import logical_init
from .layout import new_dtensor
from .local import cast_arguments
from .members import STATE, ModuleState, model_members, weight_of
from .steps import SUCCESSOR
from .te_modules import (
    EXPERT_MESH,
    NORM_LINEAR,
    PROTOCOL,
    SHARDED,
    STACK,
    fp8_index,
    has_fp8_parameters,
    init_meta,
    is_grouped,
    is_op,
    num_experts,
    refusal,
    showing,
    stack_experts,
    te_class,
    uses_protocol,
)
from .te_state import plain_class, state_methods
from .te_weight import WeightUse, attach, gemm_dtype
from .transport.collective import group_of_ranks
from .wire import WireFormat
from .wires import is_te

# ---- parameters as GTP takes them


class Replacements:
    """What TE's modules get in place of parameters of other kinds: values in high precision for those in FP8, DTensors
    for parts of tensor-parallel weights, one stack for the experts' weights. Nothing is changed before
    :meth:`register`.

    Attributes:
        stacks: ids of stacks.
        replaced: the parameters that one replaces, by its id.
    """

    def __init__(self, modules: Iterable[nn.Module], root: nn.Module, gtp_mesh: DeviceMesh) -> None:
        self.stacks: set[int] = set()
        self.replaced: dict[int, list[nn.Parameter]] = {}
        self._root, self._device_type = root, gtp_mesh.device_type
        self._meshes: dict[tuple[int, ...], DeviceMesh] = {}
        self._new: dict[tuple[int, ...], nn.Parameter] = {}
        self._parameters = {module: self._of(module) for module in modules if refusal(module) is None}
        others = [module for module in root.modules() if module not in self._parameters]
        held = {id(param) for module in others for param in module._parameters.values()}
        self._num_holders = Counter(itertools.chain(held, *self._new))  # of ids; tied as a whole counts once

    def of(self, module: nn.Module) -> dict[str, nn.Parameter | None]:
        """The parameters of ``module`` by name, as a plan takes them."""
        return self._parameters.get(module, module._parameters)

    def check(self, param: nn.Parameter, what: str) -> None:
        """Raise ``ValueError`` where ``param``, which a plan takes, cannot stand for those that it replaces."""
        olds = self.replaced.get(id(param), [])
        if len({old.requires_grad for old in olds}) > 1:
            raise ValueError(
                f"{what} is one parameter for all experts, and requires_grad is True for some of them: set it alike "
                "for all"
            )
        successors = [getattr(old, SUCCESSOR, lambda: None)() for old in olds]
        if any(successors) or any(self._num_holders[id(old)] > 1 for old in olds):
            raise ValueError(
                f"{what} replaces a parameter that is tied to another: untie them, or let one GTPStyle serve both, and "
                "of a GroupedLinear all experts in the same order"
            )

    def register(self) -> None:
        """Put them in place."""
        for module, params in self._parameters.items():
            module._parameters.clear()
            module._parameters.update(params)
        for olds in self.replaced.values():
            for old in olds:
                getattr(old, "clear_high_precision_init_val", lambda: None)()
        for module in self._root.modules():
            if is_te(type(module)) and "_module_groups" in module.__dict__:
                module._module_groups = None  # of a te.ops.Sequential: pipelines, which hold parameters

    def _of(self, module: nn.Module) -> dict[str, nn.Parameter | None]:
        params = dict(module._parameters)
        groups = {name: [param] for name, param in params.items() if param is not None}
        if is_grouped(type(module)):
            experts = [groups.pop(f"weight{i}") for i in range(num_experts(module))]
            params = {STACK: None, **{name: param for name, param in params.items() if name in groups}}
            groups[STACK] = [param for (param,) in experts]
        for name, olds in groups.items():
            key = tuple(map(id, olds))  # tied to another module's
            if key not in self._new:
                self._new[key] = self._converted(module, name, olds)
            params[name] = self._new[key]
        return params

    def _converted(self, module: nn.Module, name: str, olds: list[nn.Parameter]) -> nn.Parameter:
        is_native = has_fp8_parameters(module) and fp8_index(module, name) is not None
        values = [_high_precision(old) if is_native else old.detach() for old in olds]
        is_stack = name == STACK and is_grouped(type(module))
        value = torch.stack(values) if is_stack else values[0]
        placement, expert_mesh = _tp_placement(module, name), module.__dict__.get(EXPERT_MESH)
        if placement is not None:
            value = _on_mesh(value, placement, self._mesh_of(module.tp_group))
        elif expert_mesh is not None:
            value = _on_mesh(value, Shard(0), expert_mesh)
        elif not is_stack and not is_native:
            return olds[0]
        new = nn.Parameter(value, requires_grad=olds[0].requires_grad)
        if not is_native:
            new.__dict__.update({key: item for key, item in olds[0].__dict__.items() if key != "_is_param"})
        self.replaced[id(new)] = olds
        if is_stack:
            self.stacks.add(id(new))
        return new

    def _mesh_of(self, group: dist.ProcessGroup) -> DeviceMesh:
        """The mesh of ``group``: that of the model's other tensor-parallel parameters where its ranks are the same."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._meshes:
            meshes = (param.device_mesh for param in self._root.parameters() if isinstance(param, DTensor))
            found = next((m for m in meshes if m.ndim == 1 and tuple(m.mesh.tolist()) == ranks), None)
            self._meshes[ranks] = found or DeviceMesh.from_group(group, self._device_type, mesh_dim_names=("tp",))
        return self._meshes[ranks]


def _on_mesh(local: torch.Tensor, placement: Shard | Replicate, mesh: DeviceMesh) -> DTensor:
    shape = list(local.shape)
    if isinstance(placement, Shard):
        shape[placement.dim] *= mesh.size()
    meta = torch.empty(shape, device="meta", dtype=local.dtype)
    spec = DTensorSpec(mesh, (placement,), tensor_meta=TensorMeta(meta.shape, meta.stride(), meta.dtype))
    return new_dtensor(local, spec)


def _high_precision(param: nn.Parameter) -> torch.Tensor:
    """The value of a parameter in FP8, in float32: what it was initialised with where TE kept that."""
    if param.is_meta:
        return param.detach().float()
    kept = getattr(param, "get_high_precision_init_val", lambda: None)()
    value = param.dequantize() if kept is None else kept
    return value.detach().to(param.device, torch.float32).clone()


def _tp_placement(module: nn.Module, name: str) -> Shard | Replicate | None:
    """How TE cuts a parameter over its ``tp_group``; None: it does not."""
    mode = getattr(module, "parallel_mode", None)
    if getattr(module, "tp_size", 1) == 1 or mode is None or te_class(type(module)).__name__ not in PROTOCOL:
        return None
    if name.startswith("layer_norm"):
        return Replicate()
    if name.endswith("bias"):
        return Shard(0) if mode == "column" else Replicate()
    num_leading = int(name == STACK and is_grouped(type(module)))
    return Shard(num_leading + (mode == "row"))


# ---- formats


def check(module: nn.Module, fqn: str) -> None:
    """Nothing: a plan asks ``te_modules.refuse`` of all modules of TE's, sharded or not."""


def wire_of(module: nn.Module) -> WireFormat | None:
    """The format that a module with parameters in FP8 reads; None for others, whose GEMMs quantize what they are given.

    Raises:
        ValueError: a recipe whose weights cannot travel as its GEMMs read them.
    """
    if not has_fp8_parameters(module) or not uses_protocol(type(module), module):
        return None
    if is_op(type(module)):
        te_ops.check_format(module)
    from .wire.te_float8 import wire_for

    return wire_for(module)


# ---- forward


@functools.lru_cache(maxsize=None)
def forward_of(base: type[nn.Module]) -> Callable:
    """The forward of modules of ``base`` under GTP."""
    if is_op(base):  # which te.ops calls for an operation by itself only; see te_ops.py
        run = base.forward
    else:
        run = _module_forward(base)
    outside = torch.compiler.disable(run, reason="TransformerEngine's modules are not compiled under GTP")

    def forward(self: nn.Module, *args, **kwargs):
        return outside(self, *args, **kwargs) if is_dynamo_compiling() else run(self, *args, **kwargs)

    return forward


def _module_forward(base: type[nn.Module]) -> Callable:
    names = list(inspect.signature(base.forward).parameters)
    flag = names.index("is_first_microbatch") - 1 if "is_first_microbatch" in names else None

    def run(module: nn.Module, *args, **kwargs):
        # With it TE would keep the whole weight in FP8 from microbatch to microbatch.
        kwargs.pop("is_first_microbatch", None)
        if flag is not None and len(args) > flag:
            args = (*args[:flag], None, *args[flag + 1 :])
        return _forward(base, module, args, kwargs)

    return run


def _forward(base: type[nn.Module], module: nn.Module, args: tuple, kwargs: dict) -> object:
    dtypes = input_dtypes(module)
    if args:
        args = (*cast_arguments(dtypes, args[:1], {})[0], *args[1:])  # what follows may be memory for an output
    elif "inp" in kwargs:
        kwargs = {**kwargs, **cast_arguments(dtypes, (), {"inp": kwargs["inp"]})[1]}
    inp = args[0] if args else kwargs.get("inp")
    has_protocol = inp is not None and uses_protocol(base, module)  # without an input TE says what is missing
    shown, use = _shown(module, has_protocol, inp)
    try:
        with showing(module, shown):
            output = base.forward(module, *args, **kwargs)
        if use is not None and module._fp8_workspaces:
            module._fp8_workspaces.clear()
            raise RuntimeError(
                f"{use.weight.fqn}: TransformerEngine kept the gathered weight in FP8, as for CUDA graphs with "
                "cache_quantized_params=True: call it without"
            )
        return output
    finally:
        if use is not None:
            use.release()
            use.module = None


def _shown(
    module: nn.Module, has_protocol: bool, inp: torch.Tensor | None
) -> tuple[dict[str, object], WeightUse | None]:
    """What ``module``'s forward finds in its ``__dict__``, and the use of a weight that it asks by the protocol."""
    state: ModuleState = module.__dict__[STATE]
    has_experts = is_grouped(type(module))
    use = None
    shown: dict[str, object] = {"use_grouped_tensor": False} if has_experts else {}
    for name in state.weights:
        if not has_protocol:
            shown[name] = _local(module, materialize(module, name))
            continue
        weight = weight_of(module, name)
        needs_dgrad = inp.requires_grad or te_class(type(module)).__name__ == NORM_LINEAR
        use = WeightUse(weight, module, gemm_dtype(inp, inp.dtype), needs_dgrad)
        handles = attach(use, weight.leaf)
        shown[name] = handles if has_experts else handles[0]
    for name in state.smalls:
        if module._parameters.get(name) is not None:
            shown[name] = _local(module, use_small(module, name))
    if has_experts:
        experts = shown.pop(STACK)
        experts = experts.unbind(0) if isinstance(experts, torch.Tensor) else experts
        shown |= {f"weight{index}": expert for index, expert in enumerate(experts)}
        shown[STACK] = None
    # The wgrad GEMM writes into the memory that is reduced. (What TE does with the parameter's own main_grad, it does
    # not.)
    shown["fuse_wgrad_accumulation"] = use is not None
    return shown, use


def _local(module: nn.Module, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part. TE computes gradients for it; of what all ranks have, by its own tokens under sequence
    parallelism."""
    if not isinstance(tensor, DTensor):
        return tensor
    is_sum = getattr(module, "sequence_parallel", False)
    placements = [Partial() if is_sum and placement.is_replicate() else placement for placement in tensor.placements]
    return tensor.to_local(grad_placements=placements)


# ---- methods of sharded classes


def overrides(base: type[nn.Module]) -> dict[str, object]:
    """What a sharded class of TE's has instead of ``base``'s methods, ``forward`` aside."""
    if is_op(base):
        return {SHARDED: True, **te_ops.overrides(base)}

    def reset_parameters(self: nn.Module, defer_init: bool | None = False) -> None:
        """Initialise the logical parameters, in place."""
        if not defer_init:
            with logical_init():
                for name, param in self._parameters.items():
                    if param is not None:
                        _initialise(self, name, param)

    def set_activation_dtype(self: nn.Module, inp: torch.Tensor) -> None:
        if not torch.is_autocast_enabled():
            self.__dict__["activation_dtype"] = inp.dtype  # TE would compare the shards' dtype with it
        base.set_activation_dtype(self, inp)

    def _remap_grouped_weight_state_dict_keys(self: nn.Module, state_dict: dict, prefix: str) -> None:
        """One stack, where the state dict has the experts by themselves."""
        stack_experts(self, state_dict, prefix)

    def _update_weight_quantizers(self: nn.Module) -> None:
        """Nothing: parameters are in high precision."""

    ours = (
        reset_parameters,
        set_activation_dtype,
        _remap_grouped_weight_state_dict_keys,
        _update_weight_quantizers,
    )
    methods = {method.__name__: method for method in ours if hasattr(base, method.__name__)}
    return {SHARDED: True, **methods, **state_methods(base)}


def _initialise(module: nn.Module, name: str, param: nn.Parameter) -> None:
    meta = init_meta(module, name)
    if meta.get_rng_state_tracker is not None:
        raise NotImplementedError(
            f"reset_parameters of a {type(module).__name__}: get_rng_state_tracker draws other numbers on each rank, "
            "GTP one logical weight for all: build it without"
        )
    is_stack = name == STACK and is_grouped(type(module))
    for part in [param[index] for index in range(len(param))] if is_stack else [param]:
        meta.init_fn(part)


# ---- state


def plain_extra_state(model: nn.Module) -> nn.Module:
    """Give TE's modules in ``model``, which GTP does not shard, the ``_extra_state`` that they have under it: scales
    and histories of delayed scaling as bytes (uint8, on the CPU) in place of a pickle, which TE does not load by
    default.

    Checkpoints then load into sharded and unsharded models alike, through ``CheckedLoadPlanner`` also into modules that
    have not run. TE's own pickles still load where TE allows it (``NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE=1``).

    Returns:
        ``model``, with other classes for these modules.
    """
    for module in model.modules():
        cls = type(module)
        if is_te(cls) and SHARDED not in vars(cls) and state_methods(cls):
            module.__class__ = plain_class(cls)
    return model


# ---- amax


def amax_group(model: nn.Module) -> dist.ProcessGroup:
    """The ranks over which TE has to reduce largest values of delayed scaling, for ``te.autocast(...,
    amax_reduction_group=amax_group(model))``: all that compute with the same weights, tp x gtp x dp x cp, and not other
    pipeline stages. Call it once, on all of these ranks together.

    Raises:
        ValueError: ``model`` is not under GTP.
    """
    meshes = [m.param.device_mesh for m in model_members(model) if not m.runtime.domain.is_expert]
    if not meshes:
        raise ValueError(f"amax_group: {type(model).__name__} has no parameters under GTP; apply GTPStyle first")
    ranks = sorted(max(meshes, key=DeviceMesh.size).mesh.flatten().tolist())
    return group_of_ranks(ranks, "gtp amax")
