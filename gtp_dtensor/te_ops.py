"""te.ops.GroupedLinear under GTP, called by itself or in a te.ops.Sequential.

[Note: te.ops]
    A pipeline of te.ops is one autograd function of TE's, whose inputs are the parameters that the operations had when the
    pipeline was built: here the DTensor shards. It never calls an operation's ``forward``, but ``fuser_forward`` and
    ``fuser_backward``, which read weights as attributes, in the backward too. So both run with handles (see
    te_weight.py) in the instance's ``__dict__``, both for the one use that TE's context of the operation keeps; and
    gradients of parameters are given to the engine, or not, where ``fuser_backward`` returns them.

    TE always computes the gradient of an operation's input there, so a backward always gathers; and gradients of weights
    come in the dtype of activations, in memory of TE's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn as nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor

from .functional import Edge, edge_to, param_edge, reduce_small_grad, reduce_weight_grad
from .init import logical_init
from .members import STATE, ModuleState, small_of, state_members, weight_of
from .te_modules import STACK, num_experts, recipe_in_force, stack_experts, weight_quantizers
from .te_weight import TEWeight, WeightUse
from .weight import Lease

_KIND = "_gtp_forward_kind"  # attribute: of the forward that is running, in which autograd is off
_running_node = torch._C._current_autograd_node


class OpUse(WeightUse):
    """Has no node of its own in the graph: the parameter is an input of TE's."""

    __slots__ = ()

    def _tensors(self, lease: Lease, is_backward: bool) -> Sequence[torch.Tensor]:
        tensors = super()._tensors(lease, is_backward)
        if is_backward and self.quantizers is not None:
            for tensor in tensors:
                tensor.update_usage(columnwise_usage=True)  # which te.GroupedLinear does itself
        return tensors

    def finalize(self, wgrads: torch.Tensor | Sequence[torch.Tensor]) -> None:
        self.release()
        edge = _edge_of(self.param, self.weight.fqn)
        if edge is Edge.UNUSED:
            return
        self.weight.runtime.enter()
        self.returned = reduce_weight_grad(self.weight, self.param, self.stacked(wgrads), edge)


def _edge_of(param: nn.Parameter, fqn: str) -> Edge:
    """What the engine will do with what TE's node, which is running, returns for ``param``."""
    for node, _ in _running_node().next_functions:
        if node is not None and getattr(node, "variable", None) is param:
            return param_edge(param, edge_to(node))
    raise RuntimeError(
        f"{fqn}: TransformerEngine's pipeline of operations was built with another parameter, so this one's gradient would be "
        "lost: build the OperationFuser after GTPStyle, and a new one (Sequential: _module_groups = None) where parameters "
        "are replaced"
    )


@dataclass(slots=True)
class _Passage:
    """What a forward of an operation leaves to its backward: in TE's context of it."""

    use: OpUse | None  # None: the stack is not sharded
    trained: dict[str, nn.Parameter]  # that wanted a gradient in the forward


def overrides(base: type[nn.Module]) -> dict[str, Callable]:
    """What a sharded te.ops.GroupedLinear has instead of ``base``'s methods."""
    methods = (*_preparations(base), *_passes(base), *_state_methods(base))
    return {method.__name__: method for method in methods}


def _preparations(base: type[nn.Module]) -> tuple[Callable, ...]:
    """What a pipeline calls before a forward."""

    def pre_first_fuser_forward(self: nn.Module) -> None:
        """TE initialises parameters on the meta device here, and compares those of experts."""
        for name, param in self._parameters.items():
            if param is not None and param.is_meta:
                raise RuntimeError(
                    f"{_fqn(self, name)}: is on the meta device: call to_empty() and reset_parameters() after GTPStyle"
                )

    def pre_fuser_forward(self: nn.Module, *, requires_grad: bool) -> None:
        if is_dynamo_compiling():
            raise NotImplementedError(f"te.ops ({type(self).__name__}) is not compiled under GTP: leave it uncompiled")
        recipe = recipe_in_force(self)
        if recipe is not None and any(getattr(recipe, kind, bool)() for kind in ("mxfp8", "nvfp4")):
            raise NotImplementedError(
                f"{_fqn(self, STACK)}: with {type(recipe).__name__} TransformerEngine may fuse operations to one that reads their "
                "weights by itself: use te.GroupedLinear, or a recipe of float8"
            )
        self.__dict__[_KIND] = state_members(self)[0].runtime.forward_kind()
        with _showing(self, {"weight0": self._parameters[STACK]}):  # is asked whether it wants a gradient
            base.pre_fuser_forward(self, requires_grad=requires_grad)

    return pre_first_fuser_forward, pre_fuser_forward


def _passes(base: type[nn.Module]) -> tuple[Callable, ...]:
    """Forward and backward of an operation."""

    def fuser_forward(self: nn.Module, basic_op_ctxs: list, input_: torch.Tensor, **options) -> tuple:
        use = None
        if STACK in self.__dict__[STATE].weights:
            weight = weight_of(self, STACK)
            use = OpUse(weight, self, _compute_dtype(weight.compute_dtype, input_), True)
            use.kind = self.__dict__[_KIND]
        trained = {name: param for name, param in self._parameters.items() if param is not None and param.requires_grad}
        basic_op_ctxs[0].gtp = _Passage(use, trained)
        try:
            with _showing(self, _shown(self, use)):
                return base.fuser_forward(self, basic_op_ctxs, input_, **options)
        finally:
            if use is not None:
                use.release()

    def fuser_backward(self: nn.Module, basic_op_ctxs: list, grad_output: torch.Tensor, **options) -> tuple:
        passage: _Passage = basic_op_ctxs[0].gtp
        try:
            with _showing(self, _shown(self, passage.use)):
                grad_input, (grads,), extra = base.fuser_backward(self, basic_op_ctxs, grad_output, **options)
        finally:
            if passage.use is not None:
                passage.use.release()
        return grad_input, [_returned(self, passage, list(grads))], extra

    return fuser_forward, fuser_backward


def _state_methods(base: type[nn.Module]) -> tuple[Callable, ...]:
    """How parameters get their values."""

    def reset_parameters(self: nn.Module) -> None:
        """Initialise the logical parameters, in place."""
        if self._rng_state_tracker_function is not None:
            raise NotImplementedError(
                f"reset_parameters of a {type(self).__name__}: rng_state_tracker_function draws other numbers on each rank, GTP "
                "one logical weight for all: build it without"
            )
        with logical_init():
            stack = self._parameters[STACK]
            for index in range(len(stack)):
                nn.init.kaiming_uniform_(stack[index], a=math.sqrt(5))
            for name, param in self._parameters.items():
                if name != STACK and param is not None:
                    nn.init.zeros_(param)

    def _load_from_state_dict(self: nn.Module, state_dict: dict, prefix: str, *rest) -> None:
        stack_experts(self, state_dict, prefix)
        base._load_from_state_dict(self, state_dict, prefix, *rest)

    return reset_parameters, _load_from_state_dict


def check_format(module: nn.Module) -> None:
    """Raise ``ValueError`` where weights made in FP8 cannot travel so."""
    kind = type(weight_quantizers(module)[0]).__name__
    if kind not in ("Float8CurrentScalingQuantizer", "Float8BlockQuantizer"):
        raise ValueError(
            f"{type(module).__name__} of te.ops with {num_experts(module)} weights made in FP8 by TransformerEngine's {kind}, which "
            "te.ops forgets in each call outside of an autocast: use wire_format='bf16' (or wire_format_overrides), and TE "
            "quantizes them where they are used"
        )


def _fqn(module: nn.Module, name: str) -> str:
    state: ModuleState = module.__dict__[STATE]
    return (state.weights.get(name) or state.smalls[name]).fqn


def _compute_dtype(dtype: torch.dtype, inp: torch.Tensor) -> torch.dtype:
    """That TE computes in: its weights', without autocast."""
    kind = inp.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else dtype


@contextmanager
def _showing(module: nn.Module, shown: dict[str, torch.Tensor]) -> Iterator[None]:
    """Inside: ``module`` has these as attributes."""
    try:
        module.__dict__.update(shown)
        yield
    finally:
        for name in shown:
            module.__dict__.pop(name, None)


def _shown(module: nn.Module, use: OpUse | None) -> dict[str, torch.Tensor]:
    """What an operation reads: handles or whole weights of experts, and biases."""
    state: ModuleState = module.__dict__[STATE]
    shown = {
        name: _read(module, name) for name in state.smalls if name != STACK and module._parameters[name] is not None
    }
    if use is None:
        experts = _read(module, STACK).unbind(0)
    else:
        experts = [TEWeight(use, index) for index in range(use.num_handles)]
    trains = module._parameters[STACK].requires_grad
    return shown | {f"weight{index}": expert.requires_grad_(trains) for index, expert in enumerate(experts)}


def _read(module: nn.Module, name: str) -> torch.Tensor:
    tensor = small_of(module, name).read()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _returned(module: nn.Module, passage: _Passage, grads: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """What the engine gets for each parameter: reduced gradients where it wants them itself.

    Args:
        grads: of the experts' weights, then of their biases; of weights by the protocol there are none.
    """
    num = num_experts(module)
    names = [name for name, param in module._parameters.items() if param is not None]
    found = dict(zip((name for name in names if name != STACK), grads[num:], strict=True))
    if passage.use is None and grads[0] is not None:
        found[STACK] = torch.stack(grads[:num])
    for name, grad in found.items():
        param = passage.trained.get(name)
        small = small_of(module, name)
        edge = Edge.UNUSED if param is None or grad is None else _edge_of(param, small.fqn)
        found[name] = reduce_small_grad(small, param, grad, edge)
    if passage.use is not None:
        found[STACK], passage.use.returned = passage.use.returned, None
    return [found.get(name) for name in names]
