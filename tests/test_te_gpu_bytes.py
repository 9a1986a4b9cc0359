"""Formats of TransformerEngine's that Hopper has no GEMMs for: what is packed, gathered and made into TE's tensors."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPStyle
from gtp_dtensor.members import STATE
from gtp_dtensor.schedule import Kind
from tests.harness import ranks
from tests.reference import full, relative_error

te = pytest.importorskip("transformer_engine.pytorch", reason="needs TransformerEngine 2.19 or later")

on_two = ranks(2, device="cuda", timeout=240, group_timeout=120)
on_four = ranks(4, device="cuda", timeout=240, group_timeout=120)


def modules(columns, *num_rows):
    """Whose rows four ranks' blocks divide, or do not, or of which a rank has none; experts cut by rows and by experts."""
    common = {"bias": False, "params_dtype": torch.float32}
    for rows in num_rows:
        yield te.Linear(columns, rows, **common)
    yield te.GroupedLinear(3, columns, num_rows[-1], **common)
    yield te.GroupedLinear(4, columns, num_rows[-1], **common)


def gathered(module, mesh, wire, quantizer):
    """(the whole matrix, the tensors of a forward and of a backward made of gathered bytes) for each matrix."""
    with mock.patch("gtp_dtensor.te.wire_of", lambda module: wire):
        parallelize_module(module, mesh, GTPStyle(min_numel=0))
    weight = module.__dict__[STATE].weights["weight"]
    assert weight.wire is wire
    whole = full(module.weight).detach()
    stack = [whole] if whole.dim() == 2 else whole.unbind(0)
    tensors = []
    for use in (Kind.FORWARD, Kind.BACKWARD):
        lease = weight.runtime.acquire(weight, use)
        tensors.append(wire.tensors(lease, [quantizer] * len(stack), torch.bfloat16, use is Kind.BACKWARD))
        assert relative_error(lease.read_local(), whole) < (0.05 if wire.name == "mxfp8" else 0.2)
        for tensor in tensors[-1]:  # before the lease's memory is another's
            for part in ("row", "column"):
                for name in (f"_{part}wise_data", f"_{part}wise_scale_inv"):
                    value = getattr(tensor, name)
                    setattr(tensor, name, None if value is None else value.clone())
        weight.runtime.release(lease)
    return zip([one.contiguous() for one in stack], *tensors)


@on_four
def test_mxfp8(mesh, rank):
    """Codes and padded tiles of scales, of both views, are those of the whole weight."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from transformer_engine.pytorch import MXFP8Quantizer, MXFP8Tensor
    from transformer_engine.pytorch.constants import DType

    from gtp_dtensor.wire.te_mx import MXScaling

    class Emulated(MXFP8Quantizer):
        """In TE's rounding: a scale is the next power of two above the largest value / 448."""

        def copy(self):
            twin = super().copy()
            twin.__class__ = Emulated
            return twin

        def quantize_impl(self, tensor):
            def quantized(rows):
                scales, codes = to_mx(rows, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
                return codes.view(torch.uint8), scales.view(torch.uint8)

            def padded(scales, columnwise):
                shape = self.get_scale_shape(tensor.shape, columnwise)
                tiles = scales.new_zeros(shape)
                tiles[: scales.shape[0], : scales.shape[1]] = scales
                return tiles

            tensor = tensor.detach()
            codes, scales = quantized(tensor.contiguous())
            columns, column_scales = (part.t().contiguous() for part in quantized(tensor.t().contiguous()))
            return MXFP8Tensor(
                shape=tensor.shape,
                dtype=tensor.dtype,
                rowwise_data=codes,
                rowwise_scale_inv=padded(scales, False),
                columnwise_data=columns,
                columnwise_scale_inv=padded(column_scales, True),
                fp8_dtype=self.dtype,
                quantizer=self,
                with_gemm_swizzled_scales=False,
            )

    faults = []
    for module in modules(288, 256, 320, 288):
        quantizer = Emulated(DType.kFloat8E4M3, rowwise=True, columnwise=True)
        for whole, forward, backward in gathered(module, mesh, MXScaling(quantizer), quantizer):
            expected = quantizer(whole)
            assert expected._rowwise_scale_inv.shape == (-(-whole.shape[0] // 128) * 128, 12)
            for tensor, way, other in ((forward, "row", "column"), (backward, "column", "row")):
                assert type(tensor) is MXFP8Tensor and tensor.shape == whole.shape
                assert getattr(tensor, f"_{other}wise_data") is None
                for name in (f"_{way}wise_data", f"_{way}wise_scale_inv"):
                    if not torch.equal(getattr(tensor, name), getattr(expected, name)):
                        faults.append(f"{type(module).__name__} {tuple(module.weight.shape)}: {name}")
    assert not faults, "\n".join(faults)


@on_four
def test_nvfp4(mesh, rank):
    """Codes, scales and the largest value are those of TE's own arithmetic in Python on the whole weight, and what TE makes
    of them for a backward is that on its transpose."""
    from transformer_engine.pytorch import NVFP4Quantizer, NVFP4Tensor
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    from gtp_dtensor.wire.te_nvfp4 import NVScaling

    reference = NVFP4QuantizerRef(Fp4Formats.E2M1, rowwise=True, columnwise=True, quant_tile_shape=(16, 16))
    faults = []
    for module in modules(272, 256, 400, 32):
        quantizer = NVFP4Quantizer(with_2d_quantization=True)
        for whole, forward, backward in gathered(module, mesh, NVScaling(), quantizer):
            rows, columns = whole.shape
            data, scales, data_t, scales_t, amax, _ = reference._quantize(whole)
            for tensor in (forward, backward):
                assert type(tensor) is NVFP4Tensor and tensor.shape == whole.shape
                assert tuple(tensor._rowwise_scale_inv.shape) == quantizer.get_scale_shape(whole.shape, False)
            found = forward._rowwise_scale_inv
            same = {
                "codes": torch.equal(forward._rowwise_data, data),
                "scales": torch.equal(found[:rows, : columns // 16], scales.view(torch.uint8)),
                "padding": not (found[rows:].any() or found[:, columns // 16 :].any()),
                "amax": torch.equal(forward._amax_rowwise, amax),
                "forward only": forward._columnwise_data is None,
                "backward codes": torch.equal(backward._columnwise_data, data_t),
                "backward scales": torch.equal(
                    backward._columnwise_scale_inv[:columns, : rows // 16], scales_t.view(torch.uint8)
                ),
                "backward amax": torch.equal(backward._amax_columnwise, amax),
                "values": relative_error(forward.dequantize(dtype=torch.float32), whole) < 0.12,
            }
            wrong = [name for name, is_same in same.items() if not is_same]
            if wrong:
                faults.append(f"{type(module).__name__} {tuple(module.weight.shape)}: {', '.join(wrong)}")
    assert not faults, "\n".join(faults)


@on_two
def test_a_device_without_kernels_is_named(mesh):
    from transformer_engine.common.recipe import MXFP8BlockScaling, NVFP4BlockScaling
    from transformer_engine.pytorch import MXFP8Quantizer
    from transformer_engine.pytorch.constants import DType

    if te.is_mxfp8_available():
        pytest.skip("this device has them")
    untouched = MXFP8Quantizer(DType.kFloat8E4M3).make_empty((256, 256), dtype=torch.bfloat16, device="cuda")
    untouched._rowwise_data.fill_(7)
    untouched._quantizer.update_quantized(torch.randn(256, 256, device="cuda", dtype=torch.bfloat16), untouched)
    assert (untouched._rowwise_data == 7).all()  # nothing was done, and nothing raised
    for recipe, device in ((MXFP8BlockScaling(), "cuda"), (MXFP8BlockScaling(), "meta"), (NVFP4BlockScaling(), "meta")):
        with te.quantized_model_init(enabled=True, recipe=recipe):
            model = nn.Sequential(te.Linear(256, 256, params_dtype=torch.bfloat16, device=device))
        with pytest.raises(
            ValueError, match=r"0\.weight of shape .*kernels this device does not have \(.*10\.0 or higher"
        ):
            parallelize_module(model, mesh, GTPStyle())
