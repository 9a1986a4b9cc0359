"""torchao's ``Float8Linear`` with its weight gathered for each GEMM, in float8 where it travels so.

torchao's own function quantizes a weight at each matmul, or keeps one that is quantized alive until the backward. Casts,
tensors and GEMMs here are torchao's; only when a weight is there is ours.
"""

from __future__ import annotations

import torch
from torch.autograd.function import FunctionCtx
from torch.compiler import is_dynamo_compiling
from torch.distributed.tensor import DTensor, Shard
from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole, LinearMMConfig

from ..functional import Edge, engine_edges, once_differentiable, param_edge, reduce_weight_grad, use_small
from ..local import cast_inputs
from ..members import weight_of
from ..schedule import Kind
from ..weight import Lease, ShardedWeight
from .base import Amax, WireFormat
from .float8 import Float8Matrix, Float8Rows

_AXISWISE = ScalingGranularity.AXISWISE


def wire_of(module: Float8Linear) -> WireFormat | None:
    """The format that ``module``'s GEMMs read; None where they read its weight in high precision."""
    config: Float8LinearConfig = module.config
    forward, backward = config.cast_config_weight, config.cast_config_weight_for_grad_input
    if ScalingType.DISABLED in (forward.scaling_type, backward.scaling_type):
        return None
    power_of_2 = config.round_scales_to_power_of_2
    if forward.scaling_granularity is not _AXISWISE and backward.scaling_granularity is not _AXISWISE:
        return Float8Matrix(power_of_2)
    if forward.scaling_granularity is not _AXISWISE:
        return None  # no recipe of torchao's
    return Float8Rows(Amax.COLUMN if backward.scaling_granularity is _AXISWISE else Amax.MATRIX, power_of_2)


def _cast(
    tensor: torch.Tensor,
    cast: CastConfig,
    use: tuple[Float8LinearConfig, LinearMMConfig],
    role: GemmInputRole,
    dim: int,
) -> torch.Tensor:
    """``tensor`` as torchao quantizes it for a GEMM; ``dim``: along which a scale holds, where it is not for all."""
    config, mm_config = use
    if cast.scaling_type is ScalingType.DISABLED:
        return tensor
    return hp_tensor_to_float8_dynamic(
        tensor,
        cast.target_dtype,
        mm_config,
        gemm_input_role=role,
        scaling_granularity=cast.scaling_granularity,
        axiswise_dim=get_maybe_axiswise_dim(dim, cast.scaling_granularity),
        round_scales_to_power_of_2=config.round_scales_to_power_of_2,
    )


def _transposed(lease: Lease, cast: CastConfig, use: tuple, dtype: torch.dtype, dim: int) -> torch.Tensor:
    """The gathered weight, (in, out), for a GEMM."""
    weight = lease.weight
    if weight.quantized is None:
        return _cast(lease.read().to(dtype).t(), cast, use, GemmInputRole.WEIGHT, dim)
    codes, scale = weight.quantized.codes_and_scale(lease)
    axiswise_dim = get_maybe_axiswise_dim(dim, cast.scaling_granularity)
    scale = scale.t() if axiswise_dim is not None else scale.reshape(())
    local = Float8TrainingTensor(codes.t(), scale, dtype, use[1], GemmInputRole.WEIGHT, axiswise_dim)
    tp = weight.tp
    if tp is None:
        return local
    placements = [Shard(1 - p.dim) if isinstance(p, Shard) else p for p in tp.placements]
    num_out, num_in = weight.spec.shape
    return DTensor.from_local(
        local, tp.mesh, placements, run_check=False, shape=torch.Size((num_in, num_out)), stride=(1, num_in)
    )


class _Float8Linear(torch.autograd.Function):
    """y = x W^T, W gathered for this call only; see functional._Linear."""

    @staticmethod
    def forward(ctx: FunctionCtx, x, param, weight: ShardedWeight, kind: Kind, use: tuple):
        runtime, config = weight.runtime, use[0]
        lease = runtime.acquire(weight, kind)
        rows = x.reshape(-1, x.shape[-1])
        y = torch.mm(
            _cast(rows, config.cast_config_input, use, GemmInputRole.INPUT, -1),
            _transposed(lease, config.cast_config_weight, use, x.dtype, 0),
        )
        runtime.release(lease)
        ctx.use = weight, param, use, weight.num_writes
        ctx.save_for_backward(x if param.requires_grad else None)
        return y.reshape(*x.shape[:-1], y.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_y: torch.Tensor) -> tuple:
        (x,) = ctx.saved_tensors
        weight, param, use, num_writes = ctx.use
        runtime, config = weight.runtime, use[0]
        edges = engine_edges()
        grad_x = grad_weight = None
        rows = grad_y.reshape(-1, grad_y.shape[-1])
        if edges[0] is not Edge.UNUSED:
            lease = runtime.acquire(weight, Kind.BACKWARD, True, num_writes)
            grad_x = torch.mm(
                _cast(rows, config.cast_config_grad_output, use, GemmInputRole.GRAD_OUTPUT, -1),
                _transposed(lease, config.cast_config_weight_for_grad_input, use, grad_y.dtype, -1).t(),
            )
            runtime.release(lease)
            grad_x = grad_x.reshape(*grad_y.shape[:-1], grad_x.shape[-1])
        else:
            runtime.enter()
        weight_edge = param_edge(param, edges[1])
        if weight_edge is not Edge.UNUSED:
            runtime.reducer.make_room()
            grad = torch.mm(
                _cast(rows, config.cast_config_grad_output_for_grad_weight, use, GemmInputRole.GRAD_OUTPUT, 0).t(),
                _cast(
                    x.reshape(-1, x.shape[-1]), config.cast_config_input_for_grad_weight, use, GemmInputRole.INPUT, 0
                ),
            )
            grad_weight = reduce_weight_grad(weight, param, grad, weight_edge)
        return grad_x, grad_weight, None, None, None


def forward(module: Float8Linear, x: torch.Tensor) -> torch.Tensor:
    """``module(x)`` for a ``Float8Linear`` whose weight is sharded."""
    if is_dynamo_compiling():
        raise NotImplementedError(
            "a Float8Linear under GTP is not served in compiled code yet: leave it uncompiled (torch.compiler.disable)"
        )
    weight = weight_of(module, "weight")
    bias = None if module._parameters.get("bias") is None else use_small(module, "bias")
    x, _, _ = cast_inputs(x, None, weight.compute_dtype, weight.runtime.config.param_dtype is not None)
    use = module.config, module.linear_mm_config
    y = _Float8Linear.apply(x, weight.param, weight, weight.runtime.forward_kind(), use)
    return y if bias is None else y + bias.to(y.dtype)
