"""The autograd functions: a weight is gathered where it is used, and its gradient reduced where it is computed.

Each function takes the registered parameter (the DTensor shard) as an input, which keeps the graph alive where the
module's own input needs no gradient, and saves a handle to the weight for backward, never the gathered weight. So
activation checkpointing of every kind just re-runs a use.

A backward computes only what the engine will execute. ``ctx.needs_input_grad`` cannot tell: it does not know that only
the gradient of the input is wanted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from enum import Enum

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import forward_ad as _forward_ad
from torch.autograd.function import FunctionCtx
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from . import compiled
from .grad_hooks import wants_gradient_returned
from .layout import new_dtensor
from .local import cast_inputs, embedding_grad, embedding_placement, linear_weight_grad, look_up, rows_here
from .members import STATE, small_of, state_members, weight_of
from .modes import below_transforms, is_differentiated_otherwise
from .schedule import Kind
from .small import SmallParam
from .weight import Lease, ShardedWeight


def first_order_only(backward: Callable) -> Callable:
    """For gradients that cannot be differentiated again: ``backward`` refuses to become part of a graph.

    torch's ``once_differentiable`` lets it pass where the incoming gradient has no graph of its own (that of a sum), and
    second-order gradients would lack a part without an error. ``ctx.use[0]`` is the weight.
    """

    @functools.wraps(backward)
    def wrapper(ctx: FunctionCtx, *grads: torch.Tensor):
        if _is_grad_enabled():
            refuse_graph(getattr(ctx.use[0], "fqn", "a stack of experts"))
        return backward(ctx, *grads)

    return wrapper


def refuse_graph(fqn: str) -> None:
    """Raise: ``create_graph=True`` came to a gradient that is no differentiable function here."""
    raise RuntimeError(
        f"{fqn}: its gradient is reduced over ranks, or its GEMMs are not torch's, so create_graph=True cannot go through it. "
        "Second-order gradients by way of the gradient of an input work through linears and through modules that GTP does not "
        "know: torch.autograd.grad(loss, [x], create_graph=True)"
    )


def fast_apply(function: type[torch.autograd.Function]) -> Callable:
    """``function.apply``, past a Python layer that only functorch and compilers need, and that looks at every
    argument."""
    direct = direct_apply(function)

    @functools.wraps(function.apply)
    def apply(*args):
        return function.apply(*args) if _is_compiling() or _is_transformed() else direct(*args)

    return apply


def direct_apply(function: type[torch.autograd.Function]) -> Callable:
    """What :func:`fast_apply` calls where neither functorch nor a compiler is at work."""
    return super(torch.autograd.Function, function).apply


def leaf_apply(function: type[torch.autograd.Function]) -> Callable:
    """:func:`fast_apply` of a function whose only tensors are parameters: it works inside of torch.func's transforms."""
    direct = direct_apply(function)

    @functools.wraps(function.apply)
    def apply(*args):
        if _is_compiling():
            return function.apply(*args)
        if not _is_transformed():
            return direct(*args)
        with below_transforms():
            return direct(*args)

    return apply


class Edge(Enum):
    """What the engine will do with the gradient of one input of the running node."""

    UNUSED = 0
    ACCUMULATED = 1  # flows on, or into the leaf's .grad
    CAPTURED = 2  # returned by torch.autograd.grad


# Looking a member up in its class costs more than a method call.
_UNUSED, _ACCUMULATED, _CAPTURED = Edge
_FORWARD, _INFERENCE, _RECOMPUTE, _BACKWARD = Kind
_will_run, _is_grad_enabled = torch._C._will_engine_execute_node, torch.is_grad_enabled
_current_task = torch._C._current_graph_task_id
_is_compiling, _is_transformed = torch.compiler.is_compiling, torch._C._are_functorch_transforms_active
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled


def engine_edges(node: torch.autograd.graph.Node) -> list[Edge]:
    """One entry for each tensor input of ``node``, the autograd node (or its ``ctx``) that is running, in order."""
    edges = []
    for to, _ in node.next_functions:
        try:
            edges.append(_UNUSED if to is None or not _will_run(to) else _ACCUMULATED)
        except RuntimeError:  # raised for a leaf exactly when autograd.grad captures it
            edges.append(_CAPTURED)
    return edges


def edge_to(node: torch.autograd.graph.Node | None) -> Edge:
    """What the engine, which is running, will do with a gradient for ``node``."""
    if node is None:
        return _UNUSED
    try:
        return _ACCUMULATED if _will_run(node) else _UNUSED
    except RuntimeError:  # see engine_edges
        return _CAPTURED


def param_edge(param: nn.Parameter, edge: Edge) -> Edge:
    """Like the engine, drop the gradient of a leaf that was frozen after the forward, unless hooks wait for it."""
    wanted = param.requires_grad or edge is _CAPTURED or wants_gradient_returned(param)
    return edge if wanted else _UNUSED


def reduce_weight_grad(
    weight: ShardedWeight, param: nn.Parameter, grad: torch.Tensor, edge: Edge, is_borrowed: bool = False
) -> DTensor | None:
    """Start the reduction of a gathered weight's gradient. Returns it, reduced, where autograd itself wants it. Unless
    ``is_borrowed``, the memory of ``grad`` is given away."""
    returned = edge is _CAPTURED or wants_gradient_returned(param)
    return weight.runtime.reducer.launch(weight, param, grad, returned, is_borrowed)


# ---- parameters that stay whole


class _UseSmall(torch.autograd.Function):
    """The tensor that a module computes with, for a parameter that is whole on every gtp rank."""

    @staticmethod
    def forward(ctx: FunctionCtx, leaf: nn.Parameter, small: SmallParam) -> torch.Tensor:
        ctx.use = small, small.param
        return small.read()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple:
        small, param = ctx.use
        if _is_grad_enabled():
            refuse_graph(small.fqn)
        (edge,) = engine_edges(ctx)
        if edge is not _UNUSED and not param.requires_grad:
            edge = param_edge(param, edge)
        return reduce_small_grad(small, param, grad, edge), None


def reduce_small_grad(small: SmallParam, param: nn.Parameter, grad: torch.Tensor, edge: Edge) -> DTensor | None:
    """Collect the gradient of a parameter that stays whole. Returns it, reduced, where autograd itself wants it."""
    if edge is _UNUSED:
        return None
    small.runtime.enter()
    if edge is _CAPTURED or wants_gradient_returned(param):
        return small.runtime.reducer.reduce_now(small, param, grad)
    small.runtime.reducer.collect(small, param, grad)
    return None


_apply_use_small = leaf_apply(_UseSmall)


def use_small(module: nn.Module, name: str) -> torch.Tensor:
    """``module``'s whole parameter ``name`` as its forward sees it; gradients flow back into the parameter."""
    small = small_of(module, name)
    return _apply_use_small(small.leaf, small)


# ---- any module


class _Materialize(torch.autograd.Function):
    """The gathered weight as a tensor of the graph: for modules whose computation we do not know."""

    @staticmethod
    def forward(ctx: FunctionCtx, leaf: nn.Parameter, weight: ShardedWeight, kind: Kind) -> torch.Tensor:
        lease = weight.runtime.acquire(weight, kind, may_keep=False)  # the graph itself holds what its backward needs
        ctx.use = weight, weight.param
        ctx.lease = lease  # lives as long as the graph that may have saved the tensor
        gathered = lease.read()
        if weight.runtime.transport.size == 1:
            return gathered.clone()  # not the compute shard itself, which is rewritten while the graph lives
        # A tensor object of its own: the graph hangs on what is returned, and the lease must not hold the graph.
        return gathered if weight.tp is not None else gathered.detach()

    @staticmethod
    @first_order_only
    def backward(ctx: FunctionCtx, grad: torch.Tensor) -> tuple:
        weight, param = ctx.use
        edge = param_edge(param, engine_edges(ctx)[0])
        if edge is _UNUSED:
            return None, None, None
        weight.runtime.enter()
        return reduce_weight_grad(weight, param, grad, edge, is_borrowed=True), None, None


_apply_materialize = leaf_apply(_Materialize)


def input_dtypes(module: nn.Module) -> set[torch.dtype]:
    """What ``param_dtype`` has weights of ``module``, parameters of two dims or more, computed in; see cast_arguments."""
    members = [member for member in state_members(module) if member.runtime.config.param_dtype is not None]
    return {member.compute_dtype for member in members if len(member.spec.shape) > 1}


def materialize(module: nn.Module, name: str) -> torch.Tensor:
    """The gathered weight ``name`` of ``module``, TP-local shape, in compute dtype; gradients flow back."""
    weight = weight_of(module, name)
    return _apply_materialize(weight.leaf, weight, weight.runtime.forward_kind())


# ---- linear


class _Linear(torch.autograd.Function):
    """y = x W^T + b with W gathered for this call only. x (..., in), W (out, in), b (out,) or None."""

    @staticmethod
    def forward(ctx: FunctionCtx, x, leaf, bias, weight: ShardedWeight, kind: Kind, dtype: torch.dtype | None):
        lease = weight.runtime.acquire(weight, kind)
        w = lease.buffer if weight.is_read_as_gathered else lease.read()
        y = F.linear(x, w if dtype is None else w.to(dtype), bias)
        del w
        if weight.kept_lease is not lease:  # Runtime.release, written out
            lease.end()
        ctx.use = weight, weight.param, dtype, weight.num_writes
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None)
        return y

    @staticmethod
    def backward(ctx: FunctionCtx, grad_y: torch.Tensor) -> tuple:
        if _is_grad_enabled():
            return _linear_backward_with_graph(ctx, grad_y)
        # Unpacking comes first: it may re-run the whole checkpointed block, with its own uses of weights.
        (x,) = ctx.saved_tensors
        weight, param, dtype, num_writes = ctx.use
        runtime = weight.runtime
        edges = engine_edges(ctx)
        grad_x = grad_weight = grad_bias = lease = None
        rows = grad_y if grad_y.dim() == 2 else grad_y.reshape(-1, grad_y.shape[-1])
        dgrad_first = runtime.dgrad_first
        if edges[0] is not _UNUSED:
            lease = runtime.acquire(weight, _BACKWARD, True, num_writes, dgrad_first)
            if dgrad_first:
                grad_x = _input_grad(lease, rows, dtype, grad_y, x)
        else:
            runtime.enter()
        weight_edge = edges[1]
        if weight_edge is not _UNUSED and not param.requires_grad:
            weight_edge = param_edge(param, weight_edge)
        if weight_edge is not _UNUSED:
            out = runtime.reducer.make_room(weight)  # before the next unsharded gradient is in memory
            x_rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
            grad = linear_weight_grad(rows, x_rows, weight.reduce_dtype, out)
            returned = weight_edge is _CAPTURED or wants_gradient_returned(param)
            grad_weight = runtime.reducer.launch(weight, param, grad, returned)
            del grad, out
        if lease is not None and not dgrad_first:
            lease.wait()
            grad_x = _input_grad(lease, rows, dtype, grad_y, x)
        if len(edges) > 2 and edges[2] is not _UNUSED:
            grad_bias = rows.sum(0)
        return grad_x, grad_weight, grad_bias, None, None, None


def _input_grad(
    lease: Lease, rows: torch.Tensor, dtype: torch.dtype | None, grad_y: torch.Tensor, x: torch.Tensor | None
) -> torch.Tensor:
    """``rows`` W, with the shape of ``x``, or where that was not saved the leading dims of ``grad_y``. Releases the lease."""
    weight = lease.weight
    w = lease.buffer if weight.is_read_as_gathered else lease.read()
    grad_x = torch.mm(rows, w if dtype is None else w.to(dtype))
    del w
    if weight.kept_lease is not lease:  # Runtime.release, written out
        lease.end()
    if rows is grad_y:
        return grad_x
    return grad_x.view(*grad_y.shape[:-1], grad_x.shape[1]) if x is None else grad_x.view_as(x)


_apply_linear = direct_apply(_Linear)


def _linear_backward_with_graph(ctx: FunctionCtx, grad_y: torch.Tensor) -> tuple:
    """What ``_Linear.backward`` gives, differentiable (``create_graph=True``, for a gradient penalty say): of the gradients
    of x and of the bias. The gathered weight stays until the graph that it is in now has gone."""
    _ = ctx.saved_tensors  # a checkpointed block is re-run here
    weight, param, dtype, num_writes = ctx.use
    edges = engine_edges(ctx)
    if param_edge(param, edges[1]) is not _UNUSED:
        refuse_graph(weight.fqn)
    grad_x = grad_bias = None
    if edges[0] is not _UNUSED:
        w = _apply_materialize(param, weight, _BACKWARD)
        if num_writes != weight.num_writes:
            weight.refuse_changed()
        grad_x = grad_y @ (w if dtype is None else w.to(dtype))
    if len(edges) > 2 and edges[2] is not _UNUSED:
        grad_bias = grad_y.reshape(-1, grad_y.shape[-1]).sum(0)
    return grad_x, None, grad_bias, None, None, None


def gathered_backward(
    weight: ShardedWeight,
    param: nn.Parameter,
    num_writes: int,
    input_grad: Callable[[Lease], torch.Tensor],
    weight_grad: Callable[[], torch.Tensor],
) -> tuple[torch.Tensor | None, DTensor | None]:
    """What the backward of an autograd function whose first two inputs are x and ``param`` returns for them.

    ``_Linear`` has this written out: it is used most, and each call costs.

    Args:
        num_writes: of ``weight``, in the forward.
        input_grad: the gradient of x, from the weight that the lease holds.
        weight_grad: the gradient of the gathered weight, in memory of its own.
    """
    runtime = weight.runtime
    edges = engine_edges(torch._C._current_autograd_node())
    grad_x = grad_weight = lease = None
    dgrad_first = runtime.dgrad_first
    if edges[0] is not _UNUSED:
        lease = runtime.acquire(weight, _BACKWARD, True, num_writes, dgrad_first)
    else:
        runtime.enter()
    if lease is not None and dgrad_first:
        grad_x = input_grad(lease)
        runtime.release(lease)
    weight_edge = param_edge(param, edges[1])
    if weight_edge is not _UNUSED:
        runtime.reducer.make_room()
        grad_weight = reduce_weight_grad(weight, param, weight_grad(), weight_edge)
    if lease is not None and not dgrad_first:
        lease.wait()
        grad_x = input_grad(lease)
        runtime.release(lease)
    return grad_x, grad_weight


def linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """``module(x)`` for a linear whose weight is sharded."""
    apply = _apply_linear
    if _is_compiling() or _is_transformed() or _forward_ad._current_level >= 0:
        if is_dynamo_compiling():
            return compiled.linear(module, x)
        if is_differentiated_otherwise():
            return _linear_of_gathered(module, x)
        apply = _Linear.apply
    # What weight_of and Runtime.forward_kind do, written out: each call costs.
    parameters = module._parameters
    weight = module.__dict__[STATE].weights["weight"]
    if parameters.get("weight") is not weight.param:
        weight = weight_of(module, "weight")
    bias = None if parameters.get("bias") is None else use_small(module, "bias")
    param_dtype, dtype = weight.param_dtype, None
    if bias is not None or param_dtype is not None and x.dtype is not param_dtype or _is_any_autocast_enabled():
        x, bias, dtype = cast_inputs(x, bias, weight.compute_dtype, param_dtype is not None)
    kind = _RECOMPUTE if _current_task() != -1 else _FORWARD if _is_grad_enabled() else _INFERENCE
    return apply(x, weight.leaf, bias, weight, kind, dtype)


def _linear_of_gathered(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """``linear`` by torch's own derivatives of every kind; the gathered weight stays as long as the graph."""
    weight = weight_of(module, "weight")
    bias = None if module._parameters.get("bias") is None else use_small(module, "bias")
    x, bias, dtype = cast_inputs(x, bias, weight.compute_dtype, weight.param_dtype is not None)
    w = materialize(module, "weight")
    return F.linear(x, w if dtype is None else w.to(dtype), bias)


# ---- embedding


class _Embedding(torch.autograd.Function):
    """Rows of a gathered table. ids (...) integer, table (V, d); its backward needs no gather.

    On a tp mesh, a table cut by rows (the vocabulary) is looked up locally: rows of other ranks give zeros in a Partial
    sum, and the gradient stays as large as this rank's rows. DTensor's own rule would make a gradient of the whole
    vocabulary on every rank.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, ids, leaf, weight: ShardedWeight, padding_idx: int, scale_by_freq: bool, kind: Kind):
        tp, num_rows = weight.tp, weight.tp_local_shape[0]
        ids = ids._local_tensor if isinstance(ids, DTensor) else ids
        ids, outside, padding_idx = rows_here(ids, num_rows, tp, padding_idx)
        lease = weight.runtime.acquire(weight, kind, may_keep=False)
        y = look_up(ids, outside, lease.read_local())
        weight.runtime.release(lease)
        ctx.use = weight, weight.param, num_rows, padding_idx, scale_by_freq
        ctx.save_for_backward(ids, outside)
        if tp is None:
            return y
        placement = embedding_placement(tp, y.dim())
        shape = torch.Size((*ids.shape, weight.spec.shape[1]))
        meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), y.dtype)
        return new_dtensor(y, DTensorSpec(tp.mesh, (placement,), tensor_meta=meta))

    @staticmethod
    @first_order_only
    def backward(ctx: FunctionCtx, grad_y: torch.Tensor) -> tuple:
        ids, outside = ctx.saved_tensors
        weight, param, num_rows, padding_idx, scale_by_freq = ctx.use
        edge = param_edge(param, engine_edges(ctx)[1])
        if edge is _UNUSED:
            return (None,) * 6
        weight.runtime.enter()
        weight.runtime.reducer.make_room()
        if isinstance(grad_y, DTensor):
            placement = embedding_placement(weight.tp, grad_y.dim())
            wanted = placement if isinstance(placement, Shard) else Replicate()
            grad_y = grad_y.redistribute(weight.tp.mesh, [wanted])._local_tensor
        grad = embedding_grad(grad_y, ids, outside, num_rows, padding_idx, scale_by_freq)
        return None, reduce_weight_grad(weight, param, grad, edge), None, None, None, None


_apply_embedding = fast_apply(_Embedding)


def embedding(module: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    """``module(ids)`` for an embedding whose table is sharded."""
    if is_dynamo_compiling():
        return compiled.embedding(module, ids)
    weight = weight_of(module, "weight")
    if isinstance(ids, DTensor) and not isinstance(ids.placements[0], Replicate):
        raise RuntimeError(
            f"{weight.fqn}: ids with placement {ids.placements[0]} on mesh axes {ids.device_mesh.mesh_dim_names}; "
            "a tensor-parallel embedding needs them replicated"
        )
    if is_differentiated_otherwise() and weight.tp is None:
        table = materialize(module, "weight")
        return F.embedding(ids, table, module.padding_idx, scale_grad_by_freq=module.scale_grad_by_freq)
    padding_idx = -1 if module.padding_idx is None else module.padding_idx
    return _apply_embedding(
        ids, weight.leaf, weight, padding_idx, module.scale_grad_by_freq, weight.runtime.forward_kind()
    )
