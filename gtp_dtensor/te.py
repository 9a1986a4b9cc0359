"""TransformerEngine's modules: what they read for a sharded weight, and how they are made ready for it.

[Note: TransformerEngine's protocol]
    TE (2.19 and later) lets a weight be a tensor with ``is_distributed_weight``, which its linears ask for what their GEMMs
    read (``materialize_group_for_forward``, ``materialize_group_for_backward``), for the memory that the wgrad GEMM
    writes (``grad_buffer``), and give the gradient to (``finalize_group_grads``). While a module's forward runs, its
    instance ``__dict__`` holds such a *handle* for the weight, without memory, made for this use; TE saves it for
    backward. The registered parameter stays the DTensor shard.

    Handle -> graph node ``_Attach`` -> the parameter's own node: so engine edges, ``autograd.grad`` and hooks mean what they
    mean for any parameter. What ``finalize_group_grads`` reduces reaches autograd through ``_Attach``, where wanted.

[Note: what TE leaves to us]
    No call says that reading is over: a forward's lease ends with the module's forward, a backward's with
    ``finalize_group_grads``, or with its use. TE keeps the gathered tensor objects beyond (LayerNormLinear on its ctx), so
    they are emptied, not dropped.
    A weight that arrives in high precision is quantized by TE in a forward, but not in every backward: there we do it, with
    the quantizer, and for delayed scaling the scale, of the forward.

The experts of a GroupedLinear are one parameter, ``weight`` (experts, out, in), in place of ``weight0`` ...: one gather and
one reduction. It is what TE calls such a parameter itself, and finds in a state dict.

This module never imports TransformerEngine: who gets here has met a module of it.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.autograd.function import FunctionCtx
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from .functional import (
    Edge,
    edge_to,
    fast_apply,
    input_dtypes,
    materialize,
    param_edge,
    reduce_weight_grad,
    use_small,
)
from .init import logical_init
from .layout import new_dtensor
from .local import cast_arguments
from .members import STATE, ModuleState, model_members, weight_of
from .modes import plain_ops
from .schedule import Kind
from .weight import Lease, ShardedWeight
from .wire import WireFormat

_running_node = torch._C._current_autograd_node
_GROUPED, _NORM_LINEAR = "GroupedLinear", "LayerNormLinear"
_PROTOCOL = ("Linear", _NORM_LINEAR, _GROUPED)  # classes that ask weights by the protocol
_SHARDED = "_is_sharded_te_class"  # attribute of classes of ours, which say that they are in TE's module
_STACK = "weight"  # TE's own name for the parameter of all experts


# ---- which class it is


@functools.lru_cache(maxsize=None)
def _te_class(cls: type[nn.Module]) -> type[nn.Module]:
    """The class of TE's that ``cls`` is or derives from."""
    bases = (base for base in cls.__mro__ if _SHARDED not in vars(base))
    return next(base for base in bases if base.__module__.startswith("transformer_engine.pytorch."))


def _is_grouped(cls: type[nn.Module]) -> bool:
    return _te_class(cls).__name__ == _GROUPED


def uses_protocol(base: type[nn.Module], module: nn.Module) -> bool:
    """Whether the forward of ``base``, the class of ``module`` without GTP, asks its weight by the protocol. Not where it has
    several, which TE would concatenate, and not where a class derived from TE's has a forward of its own."""
    te_class = _te_class(base)
    names = getattr(module, "weight_names", None) or ["weight"]
    return te_class.__name__ in _PROTOCOL and base.forward is te_class.forward and names == ["weight"]


# ---- what is refused


def _version() -> str:
    return getattr(sys.modules.get("transformer_engine"), "__version__", "of an unknown version")


def _is_set(module: nn.Module, *prefixes: str) -> list[str]:
    return [name for name, value in vars(module).items() if name.startswith(prefixes) and value is True]


def _refusal(module: nn.Module) -> str | None:
    """Why ``module``, one of TE's with parameters, cannot be served, with the remedy; None: it can be."""
    te_class = _te_class(type(module))
    if "transformer_engine.pytorch.distributed_weight" not in sys.modules:
        return f"TransformerEngine is {_version()}, and weights are gathered for it since 2.19: install 2.19 or later"
    if any(base.__module__.startswith("transformer_engine.pytorch.ops.") for base in type(module).__mro__):
        return (
            f"{te_class.__name__} of te.ops reads registered parameters in its backward too, where they are shards: use a "
            "module of transformer_engine.pytorch such as Linear, LayerNormLinear or GroupedLinear, or of torch.nn"
        )
    store = getattr(module, "wgrad_store", None)
    if store is not None and store.delay_wgrad_compute():
        return (
            "delay_wgrad_compute=True computes weight gradients after TE has handed them on, so they would be lost: "
            "build it with delay_wgrad_compute=False"
        )
    for option in ("single_grouped_weight", "single_grouped_bias"):
        if getattr(module, option, False):
            return f"{option}=True packs experts in a tensor of TE's own, which is not sharded: build it with {option}=False"
    overlaps = _is_set(module, "ub_overlap", "ub_bulk")
    if overlaps:
        return f"{overlaps[0]}=True communicates in TE's own buffers, untested under GTP: build it without"
    if getattr(module, "fsdp_group", None) is not None:
        return "it was given to TE's own FSDP, which cuts what GTP cuts: use one of them"
    return _tp_refusal(module, te_class.__name__)


def _tp_refusal(module: nn.Module, name: str) -> str | None:
    tp_size = getattr(module, "tp_size", 1)
    if tp_size == 1 or getattr(module, "parallel_mode", None) is None and name in _PROTOCOL:
        return None
    if getattr(module, "tp_group", None) is None:
        return f"tp_size={tp_size} without a group, so it is not known which ranks hold its other parts: pass tp_group="
    if name not in ("Linear", _NORM_LINEAR):
        return f"{name} with tp_size={tp_size}: of TE's classes Linear and LayerNormLinear can be tensor parallel under GTP"
    return None


def refuse(module: nn.Module, what: str) -> None:
    """Raise ``ValueError`` where ``module``, one of TE's that owns ``what``, cannot be served."""
    why = _refusal(module)
    if why is not None:
        raise ValueError(f"{what}, of a {type(module).__name__} of TransformerEngine: {why}")


# ---- parameters as GTP takes them


class Replacements:
    """What TE's modules get in place of parameters of other kinds: values in high precision for those in FP8, DTensors for
    parts of tensor-parallel weights, one stack for the experts' weights. Nothing is changed before :meth:`register`.

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
        self._parameters = {module: self._of(module) for module in modules if _refusal(module) is None}

    def of(self, module: nn.Module) -> dict[str, nn.Parameter | None]:
        """The parameters of ``module`` by name, as a plan takes them."""
        return self._parameters.get(module, module._parameters)

    def register(self) -> None:
        """Put them in place."""
        for module, params in self._parameters.items():
            module._parameters.clear()
            module._parameters.update(params)
        for olds in self.replaced.values():
            for old in olds:
                getattr(old, "clear_high_precision_init_val", lambda: None)()

    def _of(self, module: nn.Module) -> dict[str, nn.Parameter | None]:
        params = dict(module._parameters)
        groups = {name: [param] for name, param in params.items() if param is not None}
        if _is_grouped(type(module)):
            experts = [groups.pop(f"weight{i}") for i in range(module.num_gemms)]
            params = {_STACK: None, **{name: param for name, param in params.items() if name in groups}}
            groups[_STACK] = [param for (param,) in experts]
        for name, olds in groups.items():
            key = tuple(map(id, olds))  # tied to another module's
            if key not in self._new:
                self._new[key] = self._converted(module, name, olds)
            params[name] = self._new[key]
        return params

    def _converted(self, module: nn.Module, name: str, olds: list[nn.Parameter]) -> nn.Parameter:
        is_native = getattr(module, "primary_weights_in_fp8", False) and _fp8_index(module, name) is not None
        values = [_high_precision(old) if is_native else old.detach() for old in olds]
        is_stack = name == _STACK and _is_grouped(type(module))
        value = torch.stack(values) if is_stack else values[0]
        placement = _tp_placement(module, name)
        if placement is not None:
            value = self._on_tp_mesh(value, placement, module.tp_group)
        elif not is_stack and not is_native:
            return olds[0]
        new = nn.Parameter(value, requires_grad=olds[0].requires_grad)
        if not is_native:
            new.__dict__.update({key: item for key, item in olds[0].__dict__.items() if key != "_is_param"})
        self.replaced[id(new)] = olds
        if is_stack:
            self.stacks.add(id(new))
        return new

    def _on_tp_mesh(self, local: torch.Tensor, placement: Shard | Replicate, group: dist.ProcessGroup) -> DTensor:
        mesh = self._mesh_of(group)
        shape = list(local.shape)
        if isinstance(placement, Shard):
            shape[placement.dim] *= group.size()
        meta = torch.empty(shape, device="meta", dtype=local.dtype)
        spec = DTensorSpec(mesh, (placement,), tensor_meta=TensorMeta(meta.shape, meta.stride(), meta.dtype))
        return new_dtensor(local, spec)

    def _mesh_of(self, group: dist.ProcessGroup) -> DeviceMesh:
        """The mesh of ``group``: that of the model's other tensor-parallel parameters, where these have the same ranks."""
        ranks = tuple(dist.get_process_group_ranks(group))
        if ranks not in self._meshes:
            meshes = (param.device_mesh for param in self._root.parameters() if isinstance(param, DTensor))
            found = next((m for m in meshes if m.ndim == 1 and tuple(m.mesh.tolist()) == ranks), None)
            self._meshes[ranks] = found or DeviceMesh.from_group(group, self._device_type, mesh_dim_names=("tp",))
        return self._meshes[ranks]


def _init_meta(module: nn.Module, name: str) -> object:
    """What TE knows of how a parameter is made."""
    table = module.param_init_meta
    return table[name] if name in table else table[f"{name}0"]


def _fp8_index(module: nn.Module, name: str) -> int | None:
    """The number of the quantizer of a parameter that is stored in FP8, if the module has such parameters."""
    return _init_meta(module, name).fp8_meta_index


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
    if getattr(module, "tp_size", 1) == 1 or mode is None or _te_class(type(module)).__name__ not in _PROTOCOL:
        return None
    if name.startswith("layer_norm"):
        return Replicate()
    if name.endswith("bias"):
        return Shard(0) if mode == "column" else Replicate()
    return Shard(0) if mode == "column" else Shard(1)


# ---- formats


def check(module: nn.Module, fqn: str) -> None:
    """Nothing: see :func:`refuse`."""


def wire_of(module: nn.Module) -> WireFormat | None:
    """The format that a module with parameters in FP8 reads; None for others, whose GEMMs quantize what they are given.

    Raises:
        ValueError: a recipe whose weights cannot travel as its GEMMs read them.
    """
    if not getattr(module, "primary_weights_in_fp8", False) or not uses_protocol(type(module), module):
        return None
    from .wire.te_float8 import wire_for

    return wire_for(module)


def weight_quantizers(module: nn.Module) -> list:
    """TE's quantizers of the weights of ``module``, one for each, as they are now."""
    names = [f"weight{i}" for i in range(module.num_gemms)] if _is_grouped(type(module)) else ["weight"]
    quantizers = module.quantizers["scaling_fwd"]
    return [quantizers[_fp8_index(module, name)] for name in names]


# ---- uses


class WeightUse:
    """One forward's use of the weight of a module, and its backward: what the handles that TE saved lead back to. Holds no
    handle: they hold it."""

    __slots__ = (
        "weight",
        "param",
        "kind",
        "module",
        "dtype",
        "needs_dgrad",
        "num_handles",
        "num_writes",
        "quantizers",
        "scales",
        "lease",
        "handed",
        "buffer",
        "returned",
    )

    def __init__(self, weight: ShardedWeight, module: nn.Module, dtype: torch.dtype, needs_dgrad: bool) -> None:
        self.weight, self.param = weight, weight.param
        self.kind = weight.runtime.forward_kind()
        self.module: nn.Module | None = module  # until its forward is over
        self.dtype = dtype  # that its GEMMs compute in
        self.needs_dgrad = needs_dgrad
        self.num_handles = weight.tp_local_shape[0] if weight.layout.is_stack else 1
        self.num_writes = -1
        self.quantizers: list | None = None
        self.scales: list[torch.Tensor | None] = []  # of delayed scaling, in the forward
        self.lease: Lease | None = None
        self.handed: list[torch.Tensor] = []
        self.buffer: torch.Tensor | None = None  # of the gradient
        self.returned: DTensor | None = None  # the reduced gradient, where autograd wants it

    @property
    def shape(self) -> torch.Size:
        """Of what a handle stands for."""
        shape = self.weight.tp_local_shape
        return shape[1:] if self.weight.layout.is_stack else shape

    def gather_for_forward(self, requires_grad: bool) -> list[torch.Tensor]:
        module, weight = self.module, self.weight
        if module.fp8:
            self._note_quantizers(module)
        lease = weight.runtime.acquire(weight, self.kind)
        self.num_writes = weight.num_writes
        return self._hand_out(lease, False, requires_grad)

    def gather_for_backward(self) -> list[torch.Tensor]:
        weight = self.weight
        return self._hand_out(weight.runtime.acquire(weight, Kind.BACKWARD, True, self.num_writes), True, False)

    def _note_quantizers(self, module: nn.Module) -> None:
        """The backward runs outside of TE's autocast, when scales have moved on."""
        recipe = module.fp8_meta.get("recipe")
        if getattr(recipe, "backward_override", None) is not None:
            raise RuntimeError(
                f"{self.weight.fqn}: backward_override={recipe.backward_override!r} of the recipe reads weights that are not "
                "gathered: use a recipe without it"
            )
        self.quantizers = weight_quantizers(module)
        if self.weight.quantized is None:
            scales = (getattr(quantizer, "scale", None) for quantizer in self.quantizers)
            self.scales = [None if scale is None else scale.clone() for scale in scales]

    def _hand_out(self, lease: Lease, is_backward: bool, requires_grad: bool) -> list[torch.Tensor]:
        with plain_ops():
            self.handed = self._tensors(lease, is_backward)
        self.lease = lease
        for tensor in self.handed:
            tensor.requires_grad_(requires_grad)  # TE asks gathered weights whether they want a gradient
        return list(self.handed)

    def _tensors(self, lease: Lease, is_backward: bool) -> list[torch.Tensor]:
        weight = self.weight
        if weight.quantized is not None and self.quantizers is not None:
            return weight.wire.tensors(lease, self.quantizers, self.dtype, is_backward)
        local = lease.read_local().to(self.dtype)
        # Tensor objects of their own, which can be emptied.
        parts = list(local.unbind(0)) if weight.layout.is_stack else [local.detach()]
        if self.quantizers is None or not is_backward:
            return parts
        from .wire.te_float8 import quantized_for_backward

        return list(map(quantized_for_backward, parts, self.quantizers, self.scales))

    def release(self) -> None:
        """The kernels that read what was handed out are enqueued."""
        lease, self.lease = self.lease, None
        if lease is not None:
            lease.weight.runtime.release(lease)
        for tensor in self.handed:
            if type(tensor) is torch.Tensor:
                tensor.data = tensor.data.new_empty(0)
            else:
                tensor.clear()
        self.handed = []

    def gradient(self, index: int) -> torch.Tensor:
        """Where a wgrad GEMM writes: memory that is sent as it is."""
        weight = self.weight
        if self.buffer is None:
            weight.runtime.enter()
            wide = weight.reduce_dtype.itemsize >= self.dtype.itemsize  # GEMMs do not write less than they read
            self.buffer = weight.runtime.reducer.gradient_buffer(weight, weight.reduce_dtype if wide else self.dtype)
        whole = weight.cut.first(self.buffer, weight.cut.num_rows)
        return whole[index] if weight.layout.is_stack else whole

    def finalize(self, wgrads: torch.Tensor | list[torch.Tensor]) -> None:
        """Start the reduction of the gradient, if the engine wants it."""
        self.release()  # TE computes the input's gradient first
        attach = _attached(self.weight)
        use = attach.use  # the original's, where this one is of a recompute: TE took the buffer from its handle
        buffer, use.buffer = use.buffer, None
        edge = param_edge(use.param, edge_to(attach.next_functions[0][0]))
        if edge is Edge.UNUSED:
            return
        self.weight.runtime.enter()
        if buffer is None:
            buffer = torch.stack(list(wgrads)) if self.weight.layout.is_stack else wgrads
        use.returned = reduce_weight_grad(self.weight, use.param, buffer, edge)


def _attached(weight: ShardedWeight) -> torch.autograd.graph.Node:
    """The ``_Attach`` node of ``weight`` above the node that is running."""
    for node, _ in _running_node().next_functions:
        use = getattr(node, "use", None)
        if isinstance(use, WeightUse) and use.weight is weight:
            return node
    raise RuntimeError(f"{weight.fqn}: TransformerEngine computed its gradient outside of its own backward")


class TEWeight(torch.Tensor):
    """What a TE module reads for a sharded weight, or for one expert of a stack; see [Note: TransformerEngine's protocol].
    Has the shape of the TP-local weight and no memory."""

    is_distributed_weight = True
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, use: WeightUse, index: int) -> TEWeight:
        device = use.weight.param.device
        handle = torch.Tensor._make_wrapper_subclass(cls, use.shape, dtype=use.dtype, device=device)
        handle.use, handle.index = use, index
        return handle

    def __repr__(self, **_) -> str:
        return f"TEWeight({self.use.weight.fqn}, {self.index})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (
            torch.ops.aten.detach.default,
            torch.ops.aten.alias.default,
        ):  # activation checkpointing saves these
            return TEWeight(args[0].use, args[0].index)
        handle = next(arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, TEWeight))
        raise RuntimeError(
            f"{handle.use.weight.fqn}: {func} of a weight that is not gathered: of its module only TransformerEngine's own "
            "forward and backward may read it, and activations cannot be offloaded (save_on_cpu, TE's cpu_offload)"
        )

    def materialize_group_for_forward(self) -> list[torch.Tensor]:
        return self.use.gather_for_forward(self.requires_grad)

    def materialize_group_for_backward(self) -> list[torch.Tensor]:
        use = self.use
        if use.needs_dgrad:
            return use.gather_for_backward()
        use.weight.runtime.enter()
        return [TEWeight(use, index) for index in range(use.num_handles)]  # whose sizes are read, and nothing else

    def grad_buffer(self) -> torch.Tensor:
        return self.use.gradient(self.index)

    def finalize_group_grads(self, wgrads: torch.Tensor | list[torch.Tensor]) -> list[None]:
        self.use.finalize(wgrads)
        return [None] * self.use.num_handles


class _Attach(torch.autograd.Function):
    """Handles as tensors of the graph, above the parameter."""

    @staticmethod
    def forward(ctx: FunctionCtx, use: WeightUse, param: nn.Parameter) -> tuple[TEWeight, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        return tuple(TEWeight(use, index) for index in range(use.num_handles))

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: None) -> tuple[None, DTensor | None]:
        returned, ctx.use.returned = ctx.use.returned, None
        return None, returned


_attach = fast_apply(_Attach)


# ---- forward


@functools.lru_cache(maxsize=None)
def forward_of(base: type[nn.Module]) -> Callable:
    """The forward of modules of ``base`` under GTP."""
    names = list(inspect.signature(base.forward).parameters)
    flag = names.index("is_first_microbatch") - 1 if "is_first_microbatch" in names else None

    def run(module: nn.Module, *args, **kwargs):
        # With it TE would keep the whole weight in FP8 from microbatch to microbatch.
        kwargs.pop("is_first_microbatch", None)
        if flag is not None and len(args) > flag:
            args = (*args[:flag], None, *args[flag + 1 :])
        return _forward(base, module, args, kwargs)

    outside = torch.compiler.disable(run, reason="TransformerEngine's modules are not compiled under GTP")

    def forward(self: nn.Module, *args, **kwargs):
        return outside(self, *args, **kwargs) if is_dynamo_compiling() else run(self, *args, **kwargs)

    return forward


def _forward(base: type[nn.Module], module: nn.Module, args: tuple, kwargs: dict) -> object:
    dtypes = input_dtypes(module)
    if args:
        args = (*cast_arguments(dtypes, args[:1], {})[0], *args[1:])  # what follows may be memory for an output
    elif "inp" in kwargs:
        kwargs = {**kwargs, **cast_arguments(dtypes, (), {"inp": kwargs["inp"]})[1]}
    inp = args[0] if args else kwargs.get("inp")
    attributes = module.__dict__
    shown, use = _shown(module, uses_protocol(base, module), inp)
    before = {name: attributes[name] for name in shown if name in attributes}
    try:
        attributes.update(shown)
        output = base.forward(module, *args, **kwargs)
        if use is not None and attributes.get("_fp8_workspaces"):
            attributes["_fp8_workspaces"].clear()
            raise RuntimeError(
                f"{use.weight.fqn}: TransformerEngine kept the gathered weight in FP8, as for CUDA graphs with "
                "cache_quantized_params=True: call it without"
            )
        return output
    finally:
        if use is not None:
            use.release()
            use.module = None
        for name in shown:
            if name in before:
                attributes[name] = before[name]
            else:
                attributes.pop(name, None)


def _shown(
    module: nn.Module, has_protocol: bool, inp: torch.Tensor | None
) -> tuple[dict[str, object], WeightUse | None]:
    """What ``module``'s forward finds in its ``__dict__``, and the use of a weight that it asks by the protocol."""
    state: ModuleState = module.__dict__[STATE]
    is_grouped = _is_grouped(type(module))
    use = None
    shown: dict[str, object] = {"use_grouped_tensor": False} if is_grouped else {}
    for name in state.weights:
        if not has_protocol:
            shown[name] = _local(module, materialize(module, name))
            continue
        weight = weight_of(module, name)
        needs_dgrad = inp.requires_grad or _te_class(type(module)).__name__ == _NORM_LINEAR
        use = WeightUse(weight, module, _compute_dtype(inp), needs_dgrad)
        handles = _attach(use, weight.param)
        shown[name] = handles if is_grouped else handles[0]
    for name in state.smalls:
        if module._parameters.get(name) is not None:
            shown[name] = _local(module, use_small(module, name))
    if is_grouped:
        experts = shown.pop(_STACK)
        experts = experts.unbind(0) if isinstance(experts, torch.Tensor) else experts
        shown |= {f"weight{index}": expert for index, expert in enumerate(experts)}
        shown[_STACK] = None
    # The wgrad GEMM writes into the memory that is reduced. (What TE does with the parameter's own main_grad, it does not.)
    shown["fuse_wgrad_accumulation"] = use is not None
    return shown, use


def _compute_dtype(inp: torch.Tensor) -> torch.dtype:
    kind = inp.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inp.dtype


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
        names = [f"{prefix}weight{index}" for index in range(self.num_gemms)]
        if prefix + _STACK not in state_dict and all(name in state_dict for name in names):
            state_dict[prefix + _STACK] = torch.stack([state_dict.pop(name) for name in names])

    ours = (reset_parameters, set_activation_dtype, _remap_grouped_weight_state_dict_keys)
    return {_SHARDED: True, **{method.__name__: method for method in ours if hasattr(base, method.__name__)}}


def _initialise(module: nn.Module, name: str, param: nn.Parameter) -> None:
    meta = _init_meta(module, name)
    if meta.get_rng_state_tracker is not None:
        raise NotImplementedError(
            f"reset_parameters of a {type(module).__name__}: get_rng_state_tracker draws other numbers on each rank, GTP one "
            "logical weight for all: build it without"
        )
    is_stack = name == _STACK and _is_grouped(type(module))
    for part in [param[index] for index in range(module.num_gemms)] if is_stack else [param]:
        meta.init_fn(part)


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
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    return dist.new_group(ranks, use_local_synchronization=True)
