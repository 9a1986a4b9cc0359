"""What TransformerEngine's linears read for a sharded weight, and what they give its gradient to.

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
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor

from .functional import Edge, edge_to, fast_apply, param_edge, reduce_weight_grad
from .layout import share_memory
from .modes import plain_ops
from .schedule import Kind
from .te_modules import recipe_in_force, weight_quantizers
from .weight import Lease, ShardedWeight

_running_node = torch._C._current_autograd_node


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
        recipe = recipe_in_force(module)
        if recipe is not None:
            self._note_quantizers(module, recipe)
        lease = weight.runtime.acquire(weight, self.kind)
        self.num_writes = weight.num_writes
        return self._hand_out(lease, False, requires_grad)

    def gather_for_backward(self) -> list[torch.Tensor]:
        weight = self.weight
        return self._hand_out(weight.runtime.acquire(weight, Kind.BACKWARD, True, self.num_writes), True, False)

    def _note_quantizers(self, module: nn.Module, recipe: object) -> None:
        """The backward runs outside of TE's autocast, when scales have moved on."""
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
        node = _attached(self.weight)
        use = node.use  # the original's, where this one is of a recompute: TE took the buffer from its handle
        buffer, use.buffer = use.buffer, None
        edge = param_edge(use.param, edge_to(node.next_functions[0][0]))
        if edge is Edge.UNUSED:
            return
        self.weight.runtime.enter()
        use.returned = reduce_weight_grad(
            self.weight, use.param, self.stacked(wgrads) if buffer is None else buffer, edge
        )

    def stacked(self, wgrads: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """What TE gives to ``finalize_group_grads`` as one tensor like the weight, without a copy where it is."""
        if not self.weight.layout.is_stack:
            return wgrads
        wgrads = [wgrads] if isinstance(wgrads, torch.Tensor) else wgrads  # of one expert
        whole = wgrads[0]._base
        if whole is not None and whole.shape == (len(wgrads), *self.shape):
            if all(map(share_memory, wgrads, whole)):
                return whole
        return torch.stack(list(wgrads))


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


attach = fast_apply(_Attach)
