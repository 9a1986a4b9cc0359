"""What ``torch.compile`` sees of a use of a weight: one opaque operator each way.

[Note: what the compiler may not know]
    The gathered weight never appears in a graph, so it can neither be saved for backward nor be gathered once more than
    the eager program does: gather, GEMM and release are one operator, with the same schedule and look-ahead inside.
    (Modules whose computation we do not know are the exception, as in eager: theirs is an output of an operator.)

    Which weight is meant is told by a *token*: a tensor of the weight's shape, dtype and device over one element of
    memory. Being a tensor it is an input of the graph, so that all blocks of one kind share one compilation, and guards
    see what differs: shape, dtype, device. The operator finds the weight through an attribute of the token object,
    which the compiler passes on as it is, to the backward too.

    The gradient of a weight does not flow through the graph either: the backward operator starts its reduction, as in
    eager. What keeps that operator alive, also where its input needs no gradient, is the gradient of an *anchor*, a
    tensor of one element that requires a gradient exactly if the weight does. The engine tells of it whether it was
    asked for. A number that differs between the calls of one graph keeps two backward calls with equal arguments from
    being merged into one.

    Inductor may reorder what does not depend on each other, and weighs sizes for that: ranks with batches of different
    shapes would gather in different orders, which is the end of every collective. So our operators are told to depend on
    each other there, in the order of the program.

    Parameters that stay whole enter as a leaf that shares their memory: their casts fuse with what reads them, and a
    hook on that leaf hands its gradient over.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .handles import WeightHandle, anchor_of, module_behind, refuse_hooks, weight_behind, whole_local
from .local import (
    Groups,
    cast_inputs,
    embedding_grad,
    embedding_placement,
    linear_on_tp,
    linear_weight_grad,
    look_up,
    rows_here,
)
from .members import STATE, ModuleState
from .modes import in_backward
from .operators import define, library
from .schedule import Kind
from .weight import Lease, ShardedWeight
from .wires import gemms_of

_CALLS = "_gtp_calls"  # attribute of a token: how often it was used, in the graph that is being traced


# ---- what uses have in common


def _kind(grad: bool) -> Kind:
    """Of a forward use. In compiled code grad mode is off while a forward runs: it was noted before."""
    if in_backward():
        return Kind.RECOMPUTE
    return Kind.FORWARD if grad else Kind.INFERENCE


def _used_weight(token: torch.Tensor, grad: bool, trains: bool) -> ShardedWeight:
    """The weight, for a forward use. Raises RuntimeError where its gradient would be lost."""
    weight = weight_behind(token)
    weight.runtime.is_compiled = True
    param = weight.param
    if grad and param.requires_grad:
        refuse_hooks(weight.fqn, param)
        if not trains:
            raise RuntimeError(
                f"{weight.fqn}: compiled code was told that this weight is frozen, and it requires a gradient now: run the "
                "forward of the whole model, which notices, or torch.compiler.reset()"
            )
    return weight


def _used(weight: ShardedWeight, kind: Kind, compute: Callable) -> torch.Tensor:
    """``compute`` of a lease of the gathered weight, in a forward."""
    lease = weight.runtime.acquire(weight, kind)
    result = compute(lease)
    weight.runtime.release(lease)
    return result


def _read(lease: Lease, dtype: torch.dtype | None) -> torch.Tensor:
    """The gathered weight, in ``dtype`` where it is given."""
    w = lease.read_local()
    return w if dtype is None else w.to(dtype)


def _next_call(token: torch.Tensor) -> int:
    number = getattr(token, _CALLS, 0)
    setattr(token, _CALLS, number + 1)
    return number


def _wants_weight_grad(weight: ShardedWeight, token: torch.Tensor) -> bool:
    """In a backward: notices the backward, whether the weight was frozen since its forward, and whether gradients of other
    tensors only were asked for (``torch.autograd.grad``, ``inputs=``), as pipelines do: the engine then does not execute
    the anchor's node."""
    weight.runtime.enter()
    if not weight.param.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(anchor_of(token)).node
    return torch._C._will_engine_execute_node(node)


def _reduce(weight: ShardedWeight, grad: torch.Tensor, owes_tp_sum: bool = False) -> None:
    if owes_tp_sum:
        grad = DTensor.from_local(grad, weight.tp.mesh, (Partial(),), run_check=False)
    weight.runtime.reducer.launch(weight, weight.param, grad, returned=False)


def _gradients(
    weight: ShardedWeight,
    token: torch.Tensor,
    input_grad: Callable[[Lease], torch.Tensor] | None,
    weight_grad: Callable[[], torch.Tensor] | None,
    owes_tp_sum: bool = False,
) -> torch.Tensor | None:
    """Of a linear: its input's, returned, and its weight's, whose reduction starts, in the order that the config says;
    None: not wanted."""
    runtime = weight.runtime
    dgrad_first = runtime.dgrad_first
    grad_x = lease = None
    if input_grad is not None:
        # A write since the forward that is noticed only now differs from the number of a moment ago. Earlier ones change
        # the token's version, which autograd compares.
        lease = runtime.acquire(weight, Kind.BACKWARD, True, weight.num_writes, dgrad_first)
    if lease is not None and dgrad_first:
        grad_x = input_grad(lease)
        runtime.release(lease)
    if weight_grad is not None and _wants_weight_grad(weight, token):
        runtime.reducer.make_room()
        _reduce(weight, weight_grad(), owes_tp_sum)
    if lease is not None and not dgrad_first:
        lease.wait()
        grad_x = input_grad(lease)
        runtime.release(lease)
    return grad_x


def _none(like: torch.Tensor) -> torch.Tensor:
    """In place of a result that is not wanted."""
    return like.new_empty(0)


def _anchor_grad(anchor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if anchor is None:
        return _none(like)
    anchor.grad = None  # what autograd is given becomes the gradient then, without a kernel that adds
    return torch.empty_like(anchor)


# linear


def _linear(x, bias, token, anchor, dtype, grad, trains, partial):
    weight = _used_weight(token, grad, trains)
    gemms = gemms_of(module_behind(token), weight.tp, partial)
    if gemms is None:
        return _used(weight, _kind(grad), lambda lease: F.linear(x, _read(lease, dtype), bias))
    rows = _rows(x)
    if grad:
        gemms.check_tokens(rows.shape[0])
    y = _used(weight, _kind(grad), lambda lease: gemms.output(rows, lease))
    return y.view(*x.shape[:-1], y.shape[1])


def _linear_fake(x, bias, token, anchor, dtype, grad, trains, partial):
    return x.new_empty(*x.shape[:-1], token.shape[0])


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _linear_backward(grad_y, x, token, anchor, dtype, wants_input, partial, call):
    weight = weight_behind(token)
    gemms = gemms_of(module_behind(token), weight.tp, partial)
    rows = _rows(grad_y)

    def input_grad(lease: Lease) -> torch.Tensor:
        return torch.mm(rows, _read(lease, dtype)) if gemms is None else gemms.input_grad(rows, lease)

    def weight_grad() -> torch.Tensor:
        if gemms is None:
            return linear_weight_grad(rows, _rows(x), weight.reduce_dtype)
        return gemms.weight_grad(rows, _rows(x))

    wanted = input_grad if wants_input else None
    grad_x = _gradients(weight, token, wanted, None if x is None else weight_grad, partial)
    grad_x = _none(grad_y) if grad_x is None else grad_x.view(*grad_y.shape[:-1], grad_x.shape[1])
    return grad_x, _anchor_grad(anchor, grad_y)


def _linear_backward_fake(grad_y, x, token, anchor, dtype, wants_input, partial, call):
    grad_x = grad_y.new_empty(*grad_y.shape[:-1], token.shape[1]) if wants_input else _none(grad_y)
    return grad_x, _none(grad_y) if anchor is None else torch.empty_like(anchor)


def _save_linear(ctx, inputs, output):
    x, bias, token, anchor, dtype, grad, trains, partial = inputs
    ctx.save_for_backward(x if trains else None, token, anchor)
    ctx.options = dtype, partial, _next_call(token)


def _differentiate_linear(ctx, grad_y):
    x, token, anchor = ctx.saved_tensors
    dtype, partial, call = ctx.options
    wants_input, wants_bias, _, wants_anchor, *_ = ctx.needs_input_grad
    grad_x = grad_anchor = grad_bias = None
    if wants_input or x is not None:
        grad_x, grad_anchor = torch.ops.gtp.linear_backward(
            grad_y, x, token, anchor if wants_anchor else None, dtype, wants_input, partial, call
        )
    if wants_bias:
        grad_bias = grad_y.reshape(-1, grad_y.shape[-1]).sum(0)
    return (
        grad_x if wants_input else None,
        grad_bias,
        None,
        grad_anchor if wants_anchor else None,
        None,
        None,
        None,
        None,
    )


define(
    "linear(Tensor x, Tensor? bias, Tensor token, Tensor? anchor, ScalarType? dtype, bool grad, bool trains, bool partial) "
    "-> Tensor",
    _linear,
    _linear_fake,
)
define(
    "linear_backward(Tensor grad_y, Tensor? x, Tensor token, Tensor? anchor, ScalarType? dtype, bool wants_input, "
    "bool partial, int call) -> (Tensor, Tensor)",
    _linear_backward,
    _linear_backward_fake,
)
torch.library.register_autograd("gtp::linear", _differentiate_linear, setup_context=_save_linear, lib=library)


def linear(module: nn.Linear, x: torch.Tensor, with_bias: bool = True) -> torch.Tensor:
    """``functional.linear``, or that of quantized GEMMs, in code that is being compiled."""
    state = getattr(module, STATE)
    handle: WeightHandle = state.handles["weight"]
    bias = whole_local(state.leaves["bias"]) if with_bias and "bias" in state.leaves else None
    x, bias, dtype = cast_inputs(x, bias, handle.token.dtype, handle.casts)
    tp = handle.tp
    if tp is None:
        return _call_linear(x, bias, handle, dtype, False)
    late_bias = bias is not None and tp.placements[0] == Shard(1)  # not once a rank
    early_bias = None if late_bias else bias
    y = linear_on_tp(x, tp, lambda local, partial: _call_linear(local, early_bias, handle, dtype, partial))
    if late_bias:
        y = y.redistribute(tp.mesh, (Replicate(),)) + DTensor.from_local(bias, tp.mesh, (Replicate(),), run_check=False)
    return y


def _call_linear(x, bias, handle: WeightHandle, dtype: torch.dtype | None, partial: bool) -> torch.Tensor:
    anchor = handle.anchor
    trains = anchor.requires_grad
    return torch.ops.gtp.linear(
        x, bias, handle.token, anchor if trains else None, dtype, torch.is_grad_enabled(), trains, partial
    )


# stacks of experts


def _grouped(x, offsets, splits, token, anchor, dtype, grad, trains):
    weight = _used_weight(token, grad, trains)
    groups = Groups(offsets, splits)
    groups.check(weight.fqn, token.shape)
    return _used(weight, _kind(grad), lambda lease: groups.product(x, _read(lease, dtype)))


def _grouped_fake(x, offsets, splits, token, anchor, dtype, grad, trains):
    return x.new_empty(x.shape[0] if splits is None else sum(splits), token.shape[1])


def _grouped_backward(grad_y, x, offsets, splits, num_rows, token, anchor, dtype, wants_input, call):
    weight = weight_behind(token)
    groups = Groups(offsets, splits)

    def input_grad(lease: Lease) -> torch.Tensor:
        return groups.input_grad(grad_y, _read(lease, dtype), num_rows)

    def weight_grad() -> torch.Tensor:
        return groups.weight_grad(grad_y, x)

    grad_x = _gradients(weight, token, input_grad if wants_input else None, None if x is None else weight_grad)
    return _none(grad_y) if grad_x is None else grad_x, _anchor_grad(anchor, grad_y)


def _grouped_backward_fake(grad_y, x, offsets, splits, num_rows, token, anchor, dtype, wants_input, call):
    grad_x = grad_y.new_empty(num_rows, token.shape[2]) if wants_input else _none(grad_y)
    return grad_x, _none(grad_y) if anchor is None else torch.empty_like(anchor)


def _save_grouped(ctx, inputs, output):
    x, offsets, splits, token, anchor, dtype, grad, trains = inputs
    ctx.save_for_backward(x if trains else None, offsets, token, anchor)
    ctx.options = splits, x.shape[0], dtype, _next_call(token)


def _differentiate_grouped(ctx, grad_y):
    x, offsets, token, anchor = ctx.saved_tensors
    splits, num_rows, dtype, call = ctx.options
    wants_input, _, _, _, wants_anchor, *_ = ctx.needs_input_grad
    grad_x = grad_anchor = None
    if wants_input or x is not None:
        anchor = anchor if wants_anchor else None
        grad_x, grad_anchor = torch.ops.gtp.grouped_linear_backward(
            grad_y, x, offsets, splits, num_rows, token, anchor, dtype, wants_input, call
        )
    return grad_x if wants_input else None, None, None, None, grad_anchor if wants_anchor else None, None, None, None


define(
    "grouped_linear(Tensor x, Tensor? offsets, SymInt[]? splits, Tensor token, Tensor? anchor, ScalarType? dtype, bool grad, "
    "bool trains) -> Tensor",
    _grouped,
    _grouped_fake,
)
define(
    "grouped_linear_backward(Tensor grad_y, Tensor? x, Tensor? offsets, SymInt[]? splits, SymInt num_rows, Tensor token, "
    "Tensor? anchor, ScalarType? dtype, bool wants_input, int call) -> (Tensor, Tensor)",
    _grouped_backward,
    _grouped_backward_fake,
)
torch.library.register_autograd("gtp::grouped_linear", _differentiate_grouped, setup_context=_save_grouped, lib=library)


def grouped_linear(
    module: nn.Module, name: str, x: torch.Tensor, offsets: torch.Tensor | None, splits: list[int] | None
) -> torch.Tensor:
    """``experts.grouped_linear`` in code that is being compiled."""
    state: ModuleState = getattr(module, STATE)
    groups = Groups(offsets, splits)
    if name in state.leaves:
        leaf = state.leaves[name]
        w = whole_local(leaf)
        x, dtype = groups.cast(x, w.dtype, leaf.casts)
        return groups.product(x, w if dtype is None else w.to(dtype))
    handle: WeightHandle = state.handles[name]
    x, dtype = groups.cast(x, handle.token.dtype, handle.casts)
    trains = handle.anchor.requires_grad
    anchor = handle.anchor if trains else None
    options = dtype, torch.is_grad_enabled(), trains
    return torch.ops.gtp.grouped_linear(x, offsets, splits, handle.token, anchor, *options)


# embedding


def _embedding(ids, token, anchor, padding_idx, scale_by_freq, grad, trains):
    weight = _used_weight(token, grad, trains)
    ids, outside, _ = rows_here(ids, token.shape[0], weight.tp, padding_idx)
    lease = weight.runtime.acquire(weight, _kind(grad), may_keep=False)
    y = look_up(ids, outside, lease.read_local())
    weight.runtime.release(lease)
    return y


def _embedding_fake(ids, token, anchor, padding_idx, scale_by_freq, grad, trains):
    return token.new_empty(*ids.shape, token.shape[1])


def _embedding_backward(grad_y, ids, token, anchor, padding_idx, scale_by_freq, call):
    weight = weight_behind(token)
    if _wants_weight_grad(weight, token):
        weight.runtime.reducer.make_room()
        num_rows = token.shape[0]
        ids, outside, padding_idx = rows_here(ids, num_rows, weight.tp, padding_idx)
        _reduce(weight, embedding_grad(grad_y, ids, outside, num_rows, padding_idx, scale_by_freq))
    return _anchor_grad(anchor, grad_y)


def _embedding_backward_fake(grad_y, ids, token, anchor, padding_idx, scale_by_freq, call):
    return torch.empty_like(anchor)


def _save_embedding(ctx, inputs, output):
    ids, token, anchor, padding_idx, scale_by_freq, grad, trains = inputs
    ctx.save_for_backward(ids, token, anchor)
    ctx.options = padding_idx, scale_by_freq, _next_call(token)


def _differentiate_embedding(ctx, grad_y):
    grad_anchor = None
    if ctx.needs_input_grad[2]:
        grad_anchor = torch.ops.gtp.embedding_backward(grad_y, *ctx.saved_tensors, *ctx.options)
    return None, None, grad_anchor, None, None, None, None


define(
    "embedding(Tensor ids, Tensor token, Tensor anchor, int padding_idx, bool scale_by_freq, bool grad, bool trains) -> Tensor",
    _embedding,
    _embedding_fake,
)
define(
    "embedding_backward(Tensor grad_y, Tensor ids, Tensor token, Tensor anchor, int padding_idx, bool scale_by_freq, int call) "
    "-> Tensor",
    _embedding_backward,
    _embedding_backward_fake,
)
torch.library.register_autograd("gtp::embedding", _differentiate_embedding, setup_context=_save_embedding, lib=library)


def embedding(module: nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
    """``functional.embedding`` in code that is being compiled."""
    handle: WeightHandle = getattr(module, STATE).handles["weight"]
    tp, anchor = handle.tp, handle.anchor
    padding_idx = -1 if module.padding_idx is None else module.padding_idx
    ids = ids.to_local() if isinstance(ids, DTensor) else ids
    options = padding_idx, module.scale_grad_by_freq, torch.is_grad_enabled(), anchor.requires_grad
    y = torch.ops.gtp.embedding(ids, handle.token, anchor, *options)
    if tp is None:
        return y
    return DTensor.from_local(y, tp.mesh, (embedding_placement(tp, y.dim()),), run_check=False)


# any module


def _gathered(token, anchor, grad, trains):
    weight = _used_weight(token, grad, trains)
    lease = weight.runtime.acquire(weight, _kind(grad), may_keep=False)
    return lease.hand_over()


def _gathered_fake(token, anchor, grad, trains):
    return token.new_empty(token.shape)


def _gathered_backward(grad_w, token, anchor, call):
    weight = weight_behind(token)
    if _wants_weight_grad(weight, token):
        # Inductor writes other things into the memory of what it was told is read no more, and the reduction goes on.
        _reduce(weight, grad_w.clone())
    return _anchor_grad(anchor, grad_w)


def _gathered_backward_fake(grad_w, token, anchor, call):
    return torch.empty_like(anchor)


def _save_gathered(ctx, inputs, output):
    token, anchor, grad, trains = inputs
    ctx.save_for_backward(token, anchor)
    ctx.call = _next_call(token)


def _differentiate_gathered(ctx, grad_w):
    grad_anchor = None
    if ctx.needs_input_grad[1]:
        grad_anchor = torch.ops.gtp.gathered_backward(grad_w, *ctx.saved_tensors, ctx.call)
    return None, grad_anchor, None, None


define("gathered(Tensor token, Tensor anchor, bool grad, bool trains) -> Tensor", _gathered, _gathered_fake)
define(
    "gathered_backward(Tensor grad_w, Tensor token, Tensor anchor, int call) -> Tensor",
    _gathered_backward,
    _gathered_backward_fake,
)
torch.library.register_autograd("gtp::gathered", _differentiate_gathered, setup_context=_save_gathered, lib=library)


def use(module: nn.Module, name: str) -> torch.Tensor:
    """``module``'s parameter ``name`` as its forward sees it, in code that is being compiled."""
    state: ModuleState = getattr(module, STATE)
    if name in state.leaves:
        handle = state.leaves[name]
        tensor = whole_local(handle)
    else:
        handle = state.handles[name]
        anchor = handle.anchor
        tensor = torch.ops.gtp.gathered(handle.token, anchor, torch.is_grad_enabled(), anchor.requires_grad)
    tp = handle.tp
    return tensor if tp is None else DTensor.from_local(tensor, tp.mesh, tp.placements, run_check=False)
