"""Grouped GEMMs of experts that read quantized numbers, with the stacks gathered for each of them as they travel.

torchao 0.17 has such functions for a weight in high precision, which they quantize at each GEMM. Casts and scales here
are torchao's. Weight gradients are computed in high precision.

A module whose parameters are such stacks, and whose forward is made of ``grouped_linear``, is marked by
:func:`use_grouped_gemms`. Unsharded, ``grouped_linear`` quantizes each whole stack at each GEMM: the same numbers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
import torch.nn as nn
from torch.autograd.function import FunctionCtx
from torch.distributed.tensor import DTensor
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor

from ..functional import first_order_only
from ..local import Groups
from ..weight import Lease
from ..wires import GROUPED_GEMMS
from .base import Amax, Parts, View, WireFormat
from .float8 import Float8Rows
from .mx import MXFloat8

_E4M3, _BLOCK = torch.float8_e4m3fn, 32


class Stack(NamedTuple):
    """A quantized stack of experts, of ``shape`` (E, out, in), as a GEMM reads it: parts of one view."""

    view: View
    parts: Parts
    shape: torch.Size
    amax: dict[Amax, torch.Tensor]


class GroupedGEMMs(ABC):
    """The products of rows with a stack, both quantized. x (T, in), grad_y (T, out), in float32 or bfloat16.

    Emulated here: quantized, dequantized, and multiplied in the dtype of the rows.

    Attributes:
        name: for people.
        wire: the format that they read.
        feature_block: what in and out features have to be multiples of.
    """

    name: str
    wire: WireFormat
    feature_block: int

    @abstractmethod
    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows`` quantized along their features and dequantized; at least one."""

    def _rounded(self, rows: torch.Tensor) -> torch.Tensor:
        return self.rounded(rows.contiguous()) if rows.numel() else rows

    def output(self, x: torch.Tensor, stack: Stack, groups: Groups) -> torch.Tensor:
        """x W^T by experts, (rows, out)."""
        return groups.product(self._rounded(x), self._values(stack, x.dtype))

    def input_grad(self, grad_y: torch.Tensor, stack: Stack, groups: Groups, num_rows: int) -> torch.Tensor:
        """grad_y W by experts, (num_rows, in)."""
        return groups.input_grad(self._rounded(grad_y), self._values(stack, grad_y.dtype), num_rows)

    def _values(self, stack: Stack, dtype: torch.dtype) -> torch.Tensor:
        return self.wire.dequantize(stack.view, stack.parts, stack.shape, stack.amax, dtype)

    # ---- where stacks come from

    def quantized(self, w: torch.Tensor, view: View) -> Stack:
        """``w`` (E, out, in), quantized here and now."""
        w = w.detach().float().contiguous()
        magnitudes = w.abs()
        amax = {Amax.MATRIX: (-2, -1), Amax.COLUMN: -2, Amax.ROW: -1}
        amax = {key: magnitudes.amax(dim, keepdim=True) for key, dim in amax.items()}
        return Stack(view, self.wire.quantize(w, amax)[view], w.shape, amax)

    def gathered(self, lease: Lease, view: View) -> Stack:
        """What ``lease`` gathered, which is in high precision where the weight travels so."""
        shard = lease.weight.quantized
        if shard is None:
            return self.quantized(lease.read_local(), view)
        return Stack(view, shard.whole(view, lease.parts), shard.shape, shard.amax)

    def products(self, groups: Groups) -> _Products:
        """For the autograd function of sharded stacks."""
        return _Products(self, groups)

    def apply(self, x: torch.Tensor, w: torch.Tensor, groups: Groups) -> torch.Tensor:
        """x (T, in) -> (rows, out), differentiable, with a stack ``w`` that is whole."""
        return _WholeGroupedLinear.apply(x, w, groups, self)


class _Products:
    """See experts.Products."""

    def __init__(self, gemms: GroupedGEMMs, groups: Groups) -> None:
        self._gemms, self._groups = gemms, groups

    def output(self, x: torch.Tensor, lease: Lease) -> torch.Tensor:
        return self._gemms.output(x, self._gemms.gathered(lease, View.ROWS), self._groups)

    def input_grad(self, grad_y: torch.Tensor, lease: Lease, num_rows: int) -> torch.Tensor:
        return self._gemms.input_grad(grad_y, self._gemms.gathered(lease, View.COLUMNS), self._groups, num_rows)

    def weight_grad(self, grad_y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self._groups.weight_grad(grad_y, x)


class _WholeGroupedLinear(torch.autograd.Function):
    """y = x W^T by experts, with a stack that is not sharded."""

    @staticmethod
    def forward(ctx: FunctionCtx, x, w, groups: Groups, gemms: GroupedGEMMs):
        ctx.save_for_backward(x, w)
        ctx.use = groups, gemms
        return gemms.output(x, gemms.quantized(w, View.ROWS), groups)

    @staticmethod
    @first_order_only
    def backward(ctx: FunctionCtx, grad_y: torch.Tensor) -> tuple:
        x, w = ctx.saved_tensors
        groups, gemms = ctx.use
        grad_x = grad_w = None
        if ctx.needs_input_grad[0]:
            grad_x = gemms.input_grad(grad_y, gemms.quantized(w, View.COLUMNS), groups, x.shape[0])
        if ctx.needs_input_grad[1]:
            grad_w = groups.weight_grad(grad_y, x)
        return grad_x, grad_w, None, None


class Float8GroupedGEMMs(GroupedGEMMs):
    """e4m3 with a power of 2 as scale for a token, for an out feature of an expert, and in the GEMM of the input
    gradient for an in feature of an expert: torchao's rowwise recipe.

    Args:
        emulate: see GroupedGEMMs. False: torch's scaled grouped GEMM, for groups given as offsets, which have to be
            multiples of 16 rows; what is given as splits is emulated.

    Raises:
        ValueError: no emulation, and no GPU of compute capability 9.0 or more.
    """

    name = "float8"
    feature_block = 16

    def __init__(self, emulate: bool = True) -> None:
        if not emulate and not has_scaled_grouped_mm():
            raise ValueError(
                "Float8GroupedGEMMs(emulate=False): torch's scaled grouped GEMM needs a GPU of compute capability 9.0; "
                "use emulate=True"
            )
        self.emulate = emulate
        self.wire = Float8Rows(Amax.COLUMN, power_of_2=True)

    @staticmethod
    def _cast(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes (T, features), float32 scale (T, 1) that multiplied them)."""
        scale = tensor_to_scale(
            rows,
            _E4M3,
            scaling_granularity=ScalingGranularity.AXISWISE,
            axiswise_dim=-1,
            round_scales_to_power_of_2=True,
        )
        return to_fp8_saturated(rows.float() * scale, _E4M3), scale

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        codes, scale = self._cast(rows)
        return (codes.float() / scale).to(rows.dtype)

    def output(self, x: torch.Tensor, stack: Stack, groups: Groups) -> torch.Tensor:
        if self.emulate or groups.offsets is None:
            return super().output(x, stack, groups)
        codes, scale = self.wire.codes_and_scale(stack.view, stack.parts, stack.amax)
        return self._scaled(x, codes.transpose(-2, -1), scale.squeeze(-1), groups)

    def input_grad(self, grad_y: torch.Tensor, stack: Stack, groups: Groups, num_rows: int) -> torch.Tensor:
        if self.emulate or groups.offsets is None:
            return super().input_grad(grad_y, stack, groups, num_rows)
        codes, scale = self.wire.codes_and_scale(stack.view, stack.parts, stack.amax)
        codes = codes.transpose(-2, -1).contiguous().transpose(-2, -1)  # the GEMM reads columns
        return self._scaled(grad_y, codes, scale.squeeze(-2), groups)

    def _scaled(self, rows: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, groups: Groups) -> torch.Tensor:
        """rows (T, k) with codes (E, k, n), columns contiguous, and a scale (E, n) -> bfloat16 (T, n)."""
        row_codes, row_scale = self._cast(rows.contiguous())
        return torch._scaled_grouped_mm(
            row_codes,
            codes,
            row_scale.squeeze(-1).reciprocal(),
            scale.reciprocal(),
            offs=groups.offsets,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )


class MXFloat8GroupedGEMMs(GroupedGEMMs):
    """MXFP8 (e4m3, blocks of 32 along what is summed over), emulated on every device: torchao's GEMMs are for compute
    capability 10.0, on which nobody has tried them here.

    Args:
        mode: how scales are chosen, torchao's.
    """

    name = "mxfp8"
    feature_block = _BLOCK
    emulate = True

    def __init__(self, mode: ScaleCalculationMode = ScaleCalculationMode.RCEIL) -> None:
        self.wire = MXFloat8(True, mode)

    def rounded(self, rows: torch.Tensor) -> torch.Tensor:
        return MXTensor.to_mx(rows, _E4M3, _BLOCK, self.wire.mode).dequantize(rows.dtype)


def has_scaled_grouped_mm() -> bool:
    """Whether this process's GPU has torch's grouped GEMM of float8 with a scale for each row."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def use_grouped_gemms(module: nn.Module, gemms: GroupedGEMMs, name: str = "") -> None:
    """Make :func:`~gtp_dtensor.grouped_linear` of ``module``'s stacks read quantized numbers, sharded or not. Before it
    is parallelized.

    Args:
        module: its parameters of three dims are stacks of experts (experts, out, in).
        name: of it, for messages.

    Raises:
        ValueError: it has no such parameters, or their features are not multiples of ``gemms.feature_block``.
    """
    stacks = {key: param for key, param in module.named_parameters(recurse=False) if param.dim() == 3}
    where = name or type(module).__name__
    if not stacks:
        raise ValueError(f"{where} has no stacks of experts, parameters of shape (experts, out, in)")
    for key, param in stacks.items():
        _check_features(f"{where}.{key}", param, gemms)
    module.__dict__[GROUPED_GEMMS] = gemms


def _check_features(fqn: str, param: torch.Tensor, gemms: GroupedGEMMs) -> None:
    local = param._local_tensor if isinstance(param, DTensor) else param
    if local.shape[1] % gemms.feature_block or local.shape[2] % gemms.feature_block:
        where = f", {tuple(local.shape)} on this rank" if local is not param else ""
        raise ValueError(
            f"{fqn} of shape {tuple(param.shape)}{where}: out and in features of grouped GEMMs in {gemms.name} have to "
            f"be multiples of {gemms.feature_block}: leave these experts out, or cut them less"
        )


def check(module: nn.Module, fqn: str) -> None:
    """Raise ``ValueError`` where the features of a stack of ``module``, named ``fqn``, are no multiples of what they have
    to be."""
    gemms: GroupedGEMMs = module.__dict__[GROUPED_GEMMS]
    param = module._parameters[fqn.rpartition(".")[2]]
    if param.dim() == 3:
        _check_features(fqn, param, gemms)


def wire_of(module: nn.Module) -> WireFormat:
    """The format that ``module``'s GEMMs read."""
    return module.__dict__[GROUPED_GEMMS].wire
