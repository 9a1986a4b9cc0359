"""te.ops of the stand-in for TransformerEngine (te_stand_in.py): pipelines of operations, and the one that asks its weights
by the protocol. Who holds parameters, reads which attribute when and returns which gradient is as in TE 2.20."""

from __future__ import annotations

import math

import torch
from torch import nn

from tests.te_stand_in import _FP8, _QUANTIZERS, _gemm_operand, _in_fp8, _is_distributed, _Store
from tests.te_stand_in_tensors import Float8Quantizer, QuantizedTensor


class OperationContext:
    saved_tensors = to_save = None
    requires_grad = True


class FusibleOperation(nn.Module):
    num_extra_inputs = 0

    def pre_first_fuser_forward(self):
        pass

    def pre_fuser_forward(self, *, requires_grad):
        pass

    def reset_recipe_state(self, recipe):
        pass

    def forward(self, inp, *extra):
        return OperationFuser([self])(inp, *extra)


class Tanh(FusibleOperation):
    def fuser_forward(self, ctxs, inp, *, basic_op_extra_inputs):
        ctxs[0].to_save = [inp.tanh()]
        return ctxs[0].to_save[0]

    def fuser_backward(self, ctxs, grad, *, basic_op_grad_extra_outputs):
        return grad * (1 - ctxs[0].saved_tensors[0].square()), [()], [()]


def _delayed():
    return Float8Quantizer(torch.ones(1), torch.zeros(1), None)


class GroupedLinear(FusibleOperation):
    num_extra_inputs = 1
    single_grouped_weight = single_grouped_bias = False

    def __init__(self, num_groups, in_features, out_features, *, bias=True, dtype=None, device="cpu", **options):
        super().__init__()
        self.num_groups, self.in_features, self.out_features, self.use_bias = (
            num_groups,
            in_features,
            out_features,
            bias,
        )
        self._accumulate_into_main_grad = options.get("accumulate_into_main_grad", False)
        self._rng_state_tracker_function = options.get("rng_state_tracker_function")
        self.wgrad_store = _Store(options.get("delay_wgrad_compute", False))
        self.packs = options.get("packs", True)  # gradients of weights, as one of TE's two ways does
        self._with_quantized_weight, self._quantizers = _FP8.init_recipe is not None, None
        self.reset_recipe_state(_FP8.init_recipe)
        for index in range(num_groups):
            weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
            self.register_parameter(f"weight{index}", nn.Parameter(weight))
        for index in range(num_groups):
            value = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
            self.register_parameter(f"bias{index}", value)
        if device != "meta":
            self.reset_parameters()

    def reset_parameters(self):
        for index in range(self.num_groups):
            weight = torch.empty_like(self.get_parameter(f"weight{index}"), device="cpu")
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
            if self._with_quantized_weight:
                weight = self.get_quantizer("forward", 2 * index + 1)(weight)
            setattr(self, f"weight{index}", nn.Parameter(weight))
            if self.use_bias:
                setattr(self, f"bias{index}", nn.Parameter(torch.zeros(self.out_features, dtype=weight.dtype)))

    def reset_recipe_state(self, recipe):
        make = None if recipe is None else _QUANTIZERS.get(recipe.kind, _delayed)
        self._quantizers = make and [make() for _ in range(2 * self.num_groups)]

    def get_quantizer(self, mode, index):
        return None if self._quantizers is None else self._quantizers[index]

    def pre_first_fuser_forward(self):
        first = self.weight0
        for index in range(self.num_groups):
            assert type(getattr(self, f"weight{index}").data) is type(first.data)

    def pre_fuser_forward(self, *, requires_grad):
        if _FP8.recipe is not None:
            assert self.weight0.requires_grad in (True, False)

    def _weights(self):
        return [getattr(self, f"weight{index}") for index in range(self.num_groups)]

    def fuser_forward(self, ctxs, inp, *, basic_op_extra_inputs):
        (ctx,), (splits,) = ctxs, basic_op_extra_inputs[0]
        leader = self.weight0
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else leader.dtype
        in_fp8 = _FP8.recipe is not None
        quantizers = [self.get_quantizer("forward", 2 * index + 1) for index in range(self.num_groups)]
        weights = leader.materialize_group_for_forward() if _is_distributed(leader) else self._weights()
        weights = (
            [_in_fp8(w.detach() if w is not q else w, q) for w, q in zip(weights, quantizers)] if in_fp8 else weights
        )
        operands = [_gemm_operand(weight).detach().to(dtype) for weight in weights]
        rows = inp.to(dtype).split(splits.tolist())
        outs = [part @ weight.t() for part, weight in zip(rows, operands)]
        if self.use_bias:
            outs = [out + getattr(self, f"bias{index}").to(dtype) for index, out in enumerate(outs)]
        saved = [None] * self.num_groups if _is_distributed(leader) else operands
        if ctx.requires_grad:
            ctx.to_save, ctx.dtype, ctx.in_fp8 = [splits, *rows, *saved], dtype, in_fp8
            ctx.weight_requires_grad = leader.requires_grad
        return torch.cat(outs)

    def fuser_backward(self, ctxs, grad_output, *, basic_op_grad_extra_outputs):
        (ctx,), num = ctxs, self.num_groups
        weights = self._weights()
        is_dist = _is_distributed(weights[0])
        gathered = weights[0].materialize_group_for_backward() if is_dist else None
        splits, *saved = ctx.saved_tensors
        rows, operands = saved[:num], saved[num:]
        grads = grad_output.to(ctx.dtype).split(splits.tolist())
        if is_dist:
            if ctx.in_fp8:
                assert all(isinstance(w, QuantizedTensor) and w.has_columns for w in gathered), "no columns to read"
            operands = [_gemm_operand(weight, True).detach() for weight in gathered]
        grad_x = torch.cat([grad @ weight for grad, weight in zip(grads, operands)])
        wgrads = [None] * num
        if ctx.weight_requires_grad:
            shape = (num, self.out_features, self.in_features)
            wgrads = list(torch.empty(shape, dtype=ctx.dtype))
            if not self.packs:
                wgrads = [torch.empty_like(one) for one in wgrads]
            for wgrad, grad, part in zip(wgrads, grads, rows):
                wgrad.copy_(grad.t() @ part)
            if is_dist:
                weights[0].finalize_group_grads(wgrads if num > 1 else wgrads[0])
                wgrads = [None] * num
        biases = [grad.sum(0) for grad in grads] if self.use_bias else []
        return grad_x, [[*wgrads, *biases]], [(None,)]


class _Pipeline(torch.autograd.Function):
    @staticmethod
    def forward(func_ctx, inp, fuser, *params_and_extra):
        ctxs = [OperationContext() for _ in fuser.ops]
        extra = list(params_and_extra[len(fuser.params) :])
        for place, (op, ctx) in enumerate(zip(fuser.ops, ctxs)):
            ctx.requires_grad = place >= fuser.first_op_requiring_backward
            mine, extra = extra[: op.num_extra_inputs], extra[op.num_extra_inputs :]
            inp = op.fuser_forward([ctx], inp, basic_op_extra_inputs=[tuple(mine)])
        if func_ctx is not None:
            func_ctx.fuser, func_ctx.ctxs = fuser, ctxs
            func_ctx.num_saved = [len(ctx.to_save or ()) for ctx in ctxs]
            func_ctx.save_for_backward(*(tensor for ctx in ctxs for tensor in ctx.to_save or ()))
            for ctx in ctxs:
                ctx.to_save = None
        return inp

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(func_ctx, grad):
        saved, fuser = list(func_ctx.saved_tensors), func_ctx.fuser
        for ctx, num in zip(func_ctx.ctxs, func_ctx.num_saved):
            ctx.saved_tensors, saved = saved[:num], saved[num:]
        of_params, of_extra = (
            [[None] * num for num in fuser.num_params],
            [(None,) * o.num_extra_inputs for o in fuser.ops],
        )
        for place in reversed(range(len(fuser.ops))):
            if not func_ctx.ctxs[place].requires_grad:
                grad = None
                break
            options = {"basic_op_grad_extra_outputs": [()]}
            grad, (mine,), (extra,) = fuser.ops[place].fuser_backward([func_ctx.ctxs[place]], grad, **options)
            assert len(mine) == fuser.num_params[place], (
                f"expected {fuser.num_params[place]} gradients, got {len(mine)}"
            )
            of_params[place], of_extra[place] = mine, extra
            func_ctx.ctxs[place].saved_tensors = None
        return grad, None, *(one for each in of_params for one in each), *(one for each in of_extra for one in each)


class OperationFuser:
    """Holds the parameters that the operations have now."""

    def __init__(self, ops):
        self.ops, self.recipe_type = ops, None
        params = [list(op.parameters()) for op in ops]
        self.num_params, self.params = list(map(len, params)), sum(params, [])
        self.num_extra_inputs = sum(op.num_extra_inputs for op in ops)

    def __call__(self, inp, *extra):
        num, enabled = len(self.ops), torch.is_grad_enabled()
        trains = [any(param.requires_grad for param in op.parameters()) for op in self.ops]
        first = 0 if inp.requires_grad else next((place for place, train in enumerate(trains) if train), num)
        self.first_op_requiring_backward = first if enabled else num
        kind = getattr(_FP8.recipe, "kind", "none")
        if kind != self.recipe_type:
            for op in self.ops:
                op.reset_recipe_state(_FP8.recipe)
                if self.recipe_type is None:
                    op.pre_first_fuser_forward()
            self.recipe_type = kind
        for place, op in enumerate(self.ops):
            op.pre_fuser_forward(requires_grad=place >= self.first_op_requiring_backward)
        args = inp, self, *self.params, *extra
        return _Pipeline.apply(*args) if enabled else _Pipeline.forward(None, *args)


class Sequential(nn.Module):
    def __init__(self, *ops):
        super().__init__()
        self._module_groups = None
        for index, op in enumerate(ops):
            self.add_module(str(index), op)

    def __getitem__(self, index):
        return self._modules[str(index)]

    def forward(self, inp, *extra):
        if self._module_groups is None:
            self._module_groups = [OperationFuser(list(self.children()))]
        return self._module_groups[0](inp, *extra)


_MODULES = {"fuser": OperationFuser, "sequential": Sequential, "op": FusibleOperation}
for _name, _class in {**_MODULES, "basic.grouped_linear": GroupedLinear, "basic.activation": Tanh}.items():
    _class.__module__ = f"transformer_engine.pytorch.ops.{_name}"
