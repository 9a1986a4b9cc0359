"""What ``gtp_dtensor.te`` meets of TransformerEngine, without it: modules, quantizers and tensors that follow its protocol
call by call, with GEMMs of torch on dequantized numbers.

The order of calls, who is asked whether a gradient is wanted, what is saved and what a backward does not quantize by itself
are those of TE 2.20. tests/test_te_gpu.py runs the real one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import types
import weakref

import torch
import torch.distributed as dist
from torch import nn

from tests.te_stand_in_regions import (
    _FP8,
    HISTORY,  # noqa: F401
    SUPPORTED,
    Format,
    Recipe,
    Scaling,
    autocast,
    checkpoint,
    is_available,
    quantized_model_init,
)
from tests.te_stand_in_tensors import (
    Float8BlockQuantizer,
    Float8BlockwiseQTensor,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
    MXFP8Quantizer,
    MXFP8Tensor,
    NVFP4Quantizer,
    NVFP4Tensor,
    QuantizedTensor,
)

_QUANTIZERS = {
    "current": Float8CurrentScalingQuantizer,
    "block": Float8BlockQuantizer,
    "mx": MXFP8Quantizer,
    "nv": NVFP4Quantizer,
}


# ---- modules


def _is_distributed(weight):
    return bool(getattr(weight, "is_distributed_weight", False))


def _gemm_operand(tensor, is_backward=False):
    if not isinstance(tensor, QuantizedTensor):
        return tensor
    return tensor.for_backward() if is_backward and hasattr(tensor, "for_backward") else tensor.dequantize()


def _num_held(tensor):
    held = getattr(tensor, "_data", getattr(tensor, "_rowwise_data", tensor))
    return held.numel()


def _in_fp8(weight, quantizer):
    return weight if quantizer is None or isinstance(weight, QuantizedTensor) else quantizer(weight)


def _gathered(rows, group):
    parts = [torch.empty_like(rows) for _ in range(group.size())]
    dist.all_gather(parts, rows.contiguous(), group=group)
    return torch.cat(parts)


def _own(rows, module):
    return rows.chunk(module.tp_size)[module.tp_group.rank()].contiguous()


class _GEMMs(torch.autograd.Function):
    """All three linears: with a norm before it, with several experts, or neither."""

    @staticmethod
    def forward(ctx, inp, called, splits, norm_weight, *tensors):
        module, ctx.region = called
        num = len(splits)
        weights, biases = tensors[:num], tensors[num:]
        kind = module.kind
        quantizers = module.all_quantizers()
        ctx.fused = module.fuse_wgrad_accumulation
        x = inp.detach()
        rstd = None
        if kind == "norm":
            rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
            x = x * rstd * norm_weight
        if module.gathers("column"):
            x = _gathered(x, module.tp_group)
            splits = [x.shape[0]]
        rows = x.reshape(-1, x.shape[-1]).split(splits)
        rows = [_gemm_operand(_in_fp8(part, q)) for part, q in zip(rows, quantizers["input"])]
        is_dist = _is_distributed(weights[0])
        gathered = weights[0].materialize_group_for_forward() if is_dist else list(weights)
        operands = [_in_fp8(w.detach() if not is_dist else w, q) for w, q in zip(gathered, quantizers["weight"])]
        outs = [part @ _gemm_operand(w).detach().t() for part, w in zip(rows, operands)]
        if kind != "grouped" and module.parallel_mode == "row" and module.tp_size > 1:
            for out in outs:
                dist.all_reduce(out, group=module.tp_group)
            outs = [_own(out, module) if module.gathers("row") else out for out in outs]
        if biases:
            outs = [out + bias for out, bias in zip(outs, biases)]
        # Linear asks the handle whether it wants a gradient, the others what was gathered.
        ctx.wants_weight = (weights if kind == "linear" else gathered)[0].requires_grad
        if ctx.fused and ctx.wants_weight:
            assert is_dist, "the parameter has no main_grad"
            ctx.main_grads = [w.grad_buffer for w in weights]
        ctx.kept = gathered if kind == "norm" else None  # beyond the forward
        ctx.alive = weakref.ref(gathered[0])
        saved = weights if is_dist else [w.detach() for w in operands]
        ctx.save_for_backward(inp.detach(), *rows, *saved, norm_weight)
        ctx.use = module, splits, quantizers, rstd, len(biases), weights[0].dtype
        return torch.cat(outs).view(-1, *inp.shape[1:-1], outs[0].shape[-1])

    @staticmethod
    def backward(ctx, grad_y):
        module, splits, quantizers, rstd, num_biases, dtype = ctx.use
        num, kind = len(splits), module.kind
        inp, *saved = ctx.saved_tensors
        rows, weights, norm_weight = saved[:num], saved[num : 2 * num], saved[-1]
        is_dist = _is_distributed(weights[0])
        if "scaling_bwd" in module.fp8_meta:
            amax = module.fp8_meta["scaling_bwd"].amax_history[0]
            amax.copy_(torch.maximum(amax, grad_y.abs().amax()))
        biases = [grad_y.sum(0)] * num_biases  # of what this rank's tokens are, if gathered
        if module.gathers("row"):
            grad_y = _gathered(grad_y, module.tp_group)
        grads = [part.contiguous() for part in grad_y.reshape(-1, grad_y.shape[-1]).split(splits)]
        buffers = None
        wants_input = kind == "norm" or ctx.needs_input_grad[0]

        def take_buffers():
            return [buffer() for buffer in ctx.main_grads] if ctx.fused and ctx.wants_weight else None

        if kind == "norm":
            if is_dist:
                assert all(_num_held(tensor) == 0 for tensor in ctx.kept), "the gathered weight outlives the forward"
            gathered = weights[0].materialize_group_for_backward() if is_dist else weights
            assert not ctx.fused or ctx.alive() is not None, "weight was removed"
            buffers = take_buffers()
        else:
            buffers = take_buffers()
            gathered = weights[0].materialize_group_for_backward() if is_dist else weights
        grad_rows = None
        if wants_input:
            if quantizers["weight"][0] is not None:
                if kind == "linear":
                    gathered = [_in_fp8(w, q) for w, q in zip(gathered, quantizers["weight"])]
                assert all(isinstance(w, QuantizedTensor) for w in gathered), (
                    "GEMM of FP8 with a weight in high precision"
                )
            grad_rows = torch.cat([g @ _gemm_operand(w, True).detach() for g, w in zip(grads, gathered)])
        wgrads = [None] * num
        if ctx.wants_weight:
            wgrads = [g.t() @ part for g, part in zip(grads, rows)]
            if buffers is not None:
                wgrads = [buffer.copy_(grad) for buffer, grad in zip(buffers, wgrads)]
            if is_dist:
                wgrads = weights[0].finalize_group_grads(wgrads if num > 1 else wgrads[0])
        if wants_input and kind != "grouped" and module.parallel_mode == "column" and module.tp_size > 1:
            dist.all_reduce(grad_rows, group=module.tp_group)
            grad_rows = _own(grad_rows, module) if module.gathers("column") else grad_rows
        grad_x = grad_norm = None
        if wants_input:
            grad_x = grad_rows.view(inp.shape)
        if kind == "norm":
            normed = inp * rstd
            grad_norm = (grad_x * normed).reshape(-1, inp.shape[-1]).sum(0)
            scaled = grad_x * norm_weight
            grad_x = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
        for part in ctx.region[0] if ctx.region and "scaling_bwd" in module.fp8_meta else ():
            part.fp8_meta["scaling_bwd"].roll(ctx.region[1])
        if num_biases and not module.gathers("row"):
            biases = [g.sum(0) for g in grads]
        return grad_x, None, None, grad_norm, *wgrads, *biases


class _Store:
    def __init__(self, delays):
        self._delays = delays

    def delay_wgrad_compute(self):
        return self._delays


class _Meta(types.SimpleNamespace):
    pass


class _Base(nn.Module):
    kind = "linear"
    num_gemms_of_linear = 1

    def __init__(
        self, dtype, device, delay_wgrad_compute=False, tp_group=None, parallel_mode=None, sequence_parallel=False
    ):
        super().__init__()
        self.params_dtype, self.device = dtype or torch.float32, device
        self.primary_weights_in_fp8 = _FP8.init_recipe is not None
        self.fp8, self.fp8_meta, self.quantizers, self.param_init_meta = False, {}, {}, {}
        self.fsdp_group, self._fp8_workspaces, self.activation_dtype = None, {}, None
        self.wgrad_store = _Store(delay_wgrad_compute)
        self.fuse_wgrad_accumulation, self.sequence_parallel = False, sequence_parallel
        self.tp_group, self.parallel_mode = tp_group, parallel_mode
        self.tp_size = 1 if tp_group is None else tp_group.size()

    def gathers(self, mode):
        return self.kind != "grouped" and self.sequence_parallel and self.parallel_mode == mode

    def _add(self, name, shape, init, index=None):
        param = nn.Parameter(torch.empty(shape, dtype=self.params_dtype, device=self.device))
        self.register_parameter(name, param)
        self.param_init_meta[name] = _Meta(init_fn=init, get_rng_state_tracker=None, fp8_meta_index=index)

    def reset_parameters(self, defer_init=False):
        if defer_init:
            return
        for name, param in self._parameters.items():
            meta = self.param_init_meta[name]
            meta.init_fn(param)
            if self.primary_weights_in_fp8 and meta.fp8_meta_index is not None:
                quantized = nn.Parameter(self.quantizers["scaling_fwd"][meta.fp8_meta_index](param.detach()))
                kept = param.detach().clone()
                quantized.get_high_precision_init_val = lambda kept=kept: kept
                self._parameters[name] = quantized

    def init_fp8(self, recipe, num):
        if recipe is not None and self.fp8_meta.get("recipe") is not recipe:
            self.fp8_meta |= {"recipe": recipe, "num_gemms": num}
            self.init_fp8_meta_tensors(recipe)

    def init_fp8_meta_tensors(self, recipe):
        num, meta = self.fp8_meta["num_gemms"], self.fp8_meta
        if recipe.kind != "delayed":
            self.quantizers["scaling_fwd"] = [_QUANTIZERS[recipe.kind]() for _ in range(3 * num)]
            return
        if "scaling_fwd" not in meta:
            meta["scaling_fwd"], meta["scaling_bwd"] = (Scaling(n * num, recipe.amax_history_len) for n in (3, 2))
        state = meta["scaling_fwd"]
        assert len(state.amax_history) == recipe.amax_history_len
        pairs = zip(state.scale.split(1), state.amax_history[0].split(1))
        self.quantizers["scaling_fwd"] = [Float8Quantizer(scale, amax, None) for scale, amax in pairs]

    def all_quantizers(self):
        num = getattr(self, "num_gemms", 1)
        if not self.fp8:
            return {"input": [None] * num, "weight": [None] * num}
        made = self.quantizers["scaling_fwd"]
        # Activations in FP8 only where a scale is known before: what is left out is the same in both modules.
        inputs = made[0 : 3 * num : 3] if self.fp8_meta["recipe"].kind == "delayed" else [None] * num
        return {"input": inputs, "weight": made[1 : 3 * num : 3]}

    def set_activation_dtype(self, inp):
        if torch.is_autocast_enabled():
            self.__dict__["activation_dtype"] = torch.get_autocast_dtype("cpu")
            return
        if self.activation_dtype == inp.dtype:
            return
        for name, param in self.named_parameters():
            if param.dtype != inp.dtype:
                raise TypeError(f"Found input dtype: {inp.dtype} and {name!r} dtype: {param.dtype}")
        self.__dict__["activation_dtype"] = inp.dtype

    def get_extra_state(self):
        if "scaling_fwd" not in self.fp8_meta:
            return torch.empty(0, dtype=torch.uint8)
        scalings = {way: self.fp8_meta[way] for way in ("scaling_fwd", "scaling_bwd")}
        state = {way: {"scale": one.scale, "amax_history": one.amax_history} for way, one in scalings.items()}
        return torch.frombuffer(bytearray(pickle.dumps(state)), dtype=torch.uint8)

    def set_extra_state(self, saved):
        if saved.numel() == 0:
            return
        if os.getenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE") != "1":
            raise RuntimeError("Refusing to load pickled Transformer Engine extra state")
        self.init_fp8(Recipe("delayed"), getattr(self, "num_gemms", 1))
        for way, values in pickle.loads(saved.numpy().tobytes()).items():
            for name, value in values.items():
                getattr(self.fp8_meta[way], name).copy_(value)
        self._update_weight_quantizers()  # TE does where a history's length is another

    def _update_weight_quantizers(self):
        names = [f"weight{index}" for index in range(self.num_gemms)] if self.kind == "grouped" else ["weight"]
        assert [getattr(self, name) for name in names]

    def _call(self, inp, splits, norm_weight, weights, biases, is_first_microbatch):
        self.set_activation_dtype(inp)
        self.fp8 = _FP8.recipe is not None
        self.init_fp8(_FP8.recipe, len(splits))
        region = None
        if self.fp8 and _FP8.checkpoint_phase != "recompute":
            region = None if _FP8.region else (_FP8.region, _FP8.group)
            _FP8.region[self] = True
        if is_first_microbatch is not None:
            self._fp8_workspaces["weight"] = weights[0]
        if not self.fp8:
            weights = [w.dequantize() if isinstance(w, QuantizedTensor) else w for w in weights]
        delayed = self.fp8 and _FP8.recipe.delayed()
        scaling = (
            self.fp8_meta["scaling_fwd"].in_checkpoint(_FP8.checkpoint_phase) if delayed else contextlib.nullcontext()
        )
        with scaling:
            return _GEMMs.apply(inp, (self, region), splits, norm_weight, *weights, *biases)


class Linear(_Base):
    def __init__(
        self, in_features, out_features, bias=True, *, params_dtype=None, device="cpu", parameters_split=(), **rest
    ):
        super().__init__(params_dtype, device, **rest)
        if self.parallel_mode == "column":
            out_features //= self.tp_size
        elif self.parallel_mode == "row":
            in_features //= self.tp_size
        self.in_features, self.out_features = in_features, out_features
        self.weight_names = [f"{name}_weight" for name in parameters_split] or ["weight"]
        for name in self.weight_names:
            shape = (out_features // len(self.weight_names), in_features)
            self._add(name, shape, nn.init.xavier_normal_, 1)
        if self.kind == "norm":
            self._add("layer_norm_weight", (in_features,), nn.init.ones_)
        if bias:
            self._add("bias", (out_features,), nn.init.zeros_)
        self.init_fp8(_FP8.init_recipe, 1)
        self.reset_parameters(device == "meta")

    def forward(self, inp, is_first_microbatch=None, fp8_output=False):
        weights = [getattr(self, name) for name in self.weight_names]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        norm_weight = getattr(self, "layer_norm_weight", None)
        biases = [self.bias] if hasattr(self, "bias") else []
        splits = [inp.numel() // inp.shape[-1]]
        return self._call(inp, splits, norm_weight, [weight], biases, is_first_microbatch)


class LayerNormLinear(Linear):
    kind = "norm"


class GroupedLinear(_Base):
    kind = "grouped"
    single_grouped_weight = single_grouped_bias = False

    def __init__(self, num_gemms, in_features, out_features, *, params_dtype=None, device="cpu", bias=True, **rest):
        single = {name: rest.pop(name) for name in ("single_grouped_weight", "single_grouped_bias") if name in rest}
        super().__init__(params_dtype, device, **rest)
        self.__dict__.update(single)
        self.num_gemms, self.use_bias, self.use_grouped_tensor = num_gemms, bias, True
        assert not (bias and self.tp_size > 1), "no bias where the user communicates"
        out_features //= self.tp_size if self.parallel_mode == "column" else 1
        in_features //= self.tp_size if self.parallel_mode == "row" else 1
        for index in range(num_gemms):
            self._add(f"weight{index}", (out_features, in_features), nn.init.xavier_normal_, 1 + 3 * index)
            if bias:
                self._add(f"bias{index}", (out_features,), nn.init.zeros_)
        self.init_fp8(_FP8.init_recipe, num_gemms)
        self.reset_parameters(device == "meta")

    def _remap_grouped_weight_state_dict_keys(self, state_dict, prefix):
        names = [f"{prefix}weight{index}" for index in range(self.num_gemms)]
        if prefix + "weight" in state_dict and names[0] not in state_dict:
            state_dict.update(zip(names, state_dict.pop(prefix + "weight").unbind(0)))

    def _load_from_state_dict(self, state_dict, prefix, *rest):
        self._remap_grouped_weight_state_dict_keys(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, inp, m_splits, is_first_microbatch=None, out=None):
        assert not self.use_grouped_tensor or not _is_distributed(getattr(self, "weight0", None)), "not by the protocol"
        assert getattr(self, "weight", None) is None, "a single grouped weight"
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms)] if self.use_bias else []
        return self._call(inp, list(m_splits), None, weights, biases, is_first_microbatch)


class LayerNormMLP(_Base):
    """Asks no weight by the protocol."""

    def __init__(self, hidden, ffn, *, params_dtype=None, device="cpu", **rest):
        super().__init__(params_dtype, device, **rest)
        self._add("layer_norm_weight", (hidden,), nn.init.ones_)
        self._add("fc1_weight", (ffn, hidden), nn.init.xavier_normal_, 1)
        self._add("fc2_weight", (hidden, ffn), nn.init.xavier_normal_, 4)
        self.reset_parameters(device == "meta")

    def forward(self, inp, is_first_microbatch=None):
        self.set_activation_dtype(inp)
        assert not self.fuse_wgrad_accumulation and is_first_microbatch is None
        x = nn.functional.rms_norm(inp, inp.shape[-1:], self.layer_norm_weight)
        return torch.tanh(x @ self.fc1_weight.t()) @ self.fc2_weight.t()


class RMSNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


_MODULES = {
    "module.linear": (Linear,),
    "module.layernorm_linear": (LayerNormLinear,),
    "module.grouped_linear": (GroupedLinear,),
    "module.layernorm_mlp": (LayerNormMLP,),
    "module.base": (_Base,),
    "ops.basic.rmsnorm": (RMSNorm,),
    "tensor": (Float8Tensor, Float8BlockwiseQTensor, MXFP8Tensor, NVFP4Tensor, QuantizedTensor),
    "quantizers": (Float8Quantizer, *_QUANTIZERS.values()),
}
for _name, _classes in _MODULES.items():
    for _class in _classes:
        _class.__module__ = f"transformer_engine.pytorch.{_name}"


@contextlib.contextmanager
def installed(version="2.20.2"):
    """Inside: Python finds all this as TransformerEngine of that version."""
    ours = {"transformer_engine": types.ModuleType("transformer_engine")}
    ours["transformer_engine"].__version__ = version
    package = ours["transformer_engine.pytorch"] = types.ModuleType("transformer_engine.pytorch")
    for classes in _MODULES.values():
        vars(package).update({one.__name__: one for one in classes})
    functions = (autocast, quantized_model_init, checkpoint)
    vars(package).update({one.__name__: one for one in functions})
    vars(package).update(dict.fromkeys(SUPPORTED, is_available))
    ours["transformer_engine"].pytorch = package
    recipes = {"DelayedScaling": "delayed", "Float8CurrentScaling": "current", "Float8BlockScaling": "block"}
    common = ours["transformer_engine.common"] = types.ModuleType("transformer_engine.common")
    common.recipe = ours["transformer_engine.common.recipe"] = types.ModuleType("transformer_engine.common.recipe")
    common.recipe.Format = Format
    vars(common.recipe).update({one: functools.partial(Recipe, kind) for one, kind in recipes.items()})
    name = "transformer_engine.pytorch.quantization"
    ours[name] = types.ModuleType(name)
    ours[name].FP8GlobalStateManager = _FP8
    name = "transformer_engine.pytorch.distributed_weight"
    if tuple(map(int, version.split("."))) >= (2, 19):
        ours[name] = types.ModuleType(name)
    bound = [
        f"gtp_dtensor.wire.te_{name}" for name in ("float8", "mx", "nvfp4")
    ]  # hold classes of the one that they met
    others = [key for key in sys.modules if key.startswith("transformer_engine") or key in bound]
    before = {key: sys.modules.pop(key) for key in others}
    sys.modules.update(ours)
    try:
        yield
    finally:
        for key in (*ours, *bound):
            sys.modules.pop(key, None)
        sys.modules.update(before)
