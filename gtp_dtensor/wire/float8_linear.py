"""torchao's ``Float8Linear`` with its weight gathered for each GEMM, in float8 where it travels so.

torchao's own function quantizes a weight at each matmul, or keeps one that is quantized alive until the backward. Casts,
tensors and GEMMs here are torchao's; only when a weight is there is ours.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import Shard
from torchao.float8.config import CastConfig, Float8LinearConfig, ScalingGranularity, ScalingType
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import Float8TrainingTensor, GemmInputRole

from ..layout import TPLayout
from ..weight import Lease
from . import linear
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


def check(module: Float8Linear, fqn: str) -> None:
    """Nothing: what one scale holds for may be cut anywhere."""


class GEMMs(linear.GEMMs):
    """torchao's, as in its own function. A scale of what tensor parallelism cuts is made from the largest value of all."""

    def __init__(self, module: Float8Linear, tp: TPLayout | None, cuts_tokens: bool) -> None:
        super().__init__(module, tp, cuts_tokens)
        self._config: Float8LinearConfig = module.config
        self._mm_config = module.linear_mm_config

    def _cast(
        self, tensor: torch.Tensor, cast: CastConfig, role: GemmInputRole, dim: int, cut: int | None
    ) -> torch.Tensor:
        """(rows, columns) as torchao quantizes them for a GEMM.

        Args:
            dim: along which a scale holds, where it is not for all.
            cut: along which tensor parallelism cuts.
        """
        if cast.scaling_type is ScalingType.DISABLED:
            return tensor
        axiswise_dim = get_maybe_axiswise_dim(dim, cast.scaling_granularity)
        return hp_tensor_to_float8_dynamic(
            tensor,
            cast.target_dtype,
            self._mm_config,
            reduce_amax=cut is not None and (axiswise_dim is None or axiswise_dim % 2 == cut),
            gemm_input_role=role,
            device_mesh=self.tp_mesh,
            scaling_granularity=cast.scaling_granularity,
            axiswise_dim=axiswise_dim,
            round_scales_to_power_of_2=self._config.round_scales_to_power_of_2,
        )

    def _transposed(self, lease: Lease, cast: CastConfig, dtype: torch.dtype, dim: int) -> torch.Tensor:
        """The gathered weight, (in, out), for a GEMM."""
        weight = lease.weight
        if weight.quantized is None:
            placements = () if weight.tp is None else weight.tp.placements
            cut = next((1 - p.dim for p in placements if isinstance(p, Shard)), None)
            return self._cast(lease.read_local().to(dtype).t(), cast, GemmInputRole.WEIGHT, dim, cut)
        codes, scale = weight.quantized.codes_and_scale(lease)
        axiswise_dim = get_maybe_axiswise_dim(dim, cast.scaling_granularity)
        scale = scale.t() if axiswise_dim is not None else scale.reshape(())
        return Float8TrainingTensor(codes.t(), scale, dtype, self._mm_config, GemmInputRole.WEIGHT, axiswise_dim)

    def output(self, x_rows: torch.Tensor, lease: Lease) -> torch.Tensor:
        config, dtype = self._config, x_rows.dtype
        x_rows = self._cast(x_rows, config.cast_config_input, GemmInputRole.INPUT, -1, self.x_cut)
        return torch.mm(x_rows, self._transposed(lease, config.cast_config_weight, dtype, 0))

    def input_grad(self, grad_rows: torch.Tensor, lease: Lease) -> torch.Tensor:
        config, dtype = self._config, grad_rows.dtype
        grad_rows = self._cast(grad_rows, config.cast_config_grad_output, GemmInputRole.GRAD_OUTPUT, -1, self.grad_cut)
        return torch.mm(grad_rows, self._transposed(lease, config.cast_config_weight_for_grad_input, dtype, -1).t())

    def weight_grad(self, grad_rows: torch.Tensor, x_rows: torch.Tensor) -> torch.Tensor:
        config, role = self._config, GemmInputRole.GRAD_OUTPUT
        grad = self._cast(grad_rows, config.cast_config_grad_output_for_grad_weight, role, 0, self.grad_cut)
        x = self._cast(x_rows, config.cast_config_input_for_grad_weight, GemmInputRole.INPUT, 0, self.x_cut)
        return torch.mm(grad.t(), x)


def forward(module: Float8Linear, x: torch.Tensor) -> torch.Tensor:
    """``module(x)`` for a ``Float8Linear`` whose weight is sharded."""
    return linear.linear(module, x, GEMMs)
