"""Experts whose grouped GEMMs read float8 and MXFP8: torchao's numbers unsharded, the same bits when gathered."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from gtp_dtensor import GTPConfig, GTPStyle, grouped_linear, reset_stats, stats
from gtp_dtensor.members import STATE
from tests.harness import ranks
from tests.moe import Experts, MoE, grouped_experts
from tests.reference import build_pair, mean_square, replica_options
from tests.test_float8_linear import slow, train

FORMATS = ("float8", "mxfp8")


def gemms_of(name):
    from gtp_dtensor.wire.grouped_linear import Float8GroupedGEMMs, MXFloat8GroupedGEMMs

    return {"float8": Float8GroupedGEMMs, "mxfp8": MXFloat8GroupedGEMMs}[name]()


def float8_reference(x, w, offsets):
    """torchao's rowwise function, which needs triton, with its GEMMs in bfloat16: (y, a function to grad_x)."""
    from torchao.float8.config import ScalingGranularity
    from torchao.float8.float8_utils import tensor_to_scale, to_fp8_saturated

    def rounded(tensor, dim):
        scale = tensor_to_scale(
            tensor,
            torch.float8_e4m3fn,
            scaling_granularity=ScalingGranularity.AXISWISE,
            axiswise_dim=dim,
            round_scales_to_power_of_2=True,
        )
        return (to_fp8_saturated(tensor.float() * scale, torch.float8_e4m3fn).float() / scale).bfloat16()

    y = torch._grouped_mm(rounded(x, -1), rounded(w.transpose(-2, -1), -2), offs=offsets)
    return y, lambda grad: torch._grouped_mm(rounded(grad, -1), rounded(w, -2), offs=offsets)


def torchao_reference(name, x, w, offsets, grad):
    """(y, grad_x, grad_w)."""
    if name == "float8":
        y, backward = float8_reference(x, w, offsets)
        return y, backward(grad), torch._grouped_mm(grad.t(), x, offs=offsets)
    from torchao.prototype.moe_training.mxfp8_grouped_mm import _to_mxfp8_then_scaled_grouped_mm
    from torchao.quantization.quantize_.common import KernelPreference

    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = _to_mxfp8_then_scaled_grouped_mm(
        x, w.transpose(-2, -1), offs=offsets, kernel_preference=KernelPreference.EMULATED, wgrad_with_hp=True
    )
    return y, *torch.autograd.grad(y, (x, w), grad)


@pytest.mark.parametrize("name", FORMATS)
def test_unsharded_it_is_torchaos_arithmetic(name):
    """Experts ten times apart, one of them without tokens, and rows of zeros; weights in bfloat16, as torchao's
    function for MXFP8 takes them."""
    from gtp_dtensor.wire.grouped_linear import use_grouped_gemms

    torch.manual_seed(0)
    amplitudes = 10.0 ** torch.arange(-2, 2).view(-1, 1, 1)
    module = nn.Module()
    module.w = nn.Parameter((torch.randn(4, 96, 64) * torch.rand(4, 96, 64) ** 4 * amplitudes).bfloat16())
    use_grouped_gemms(module, gemms_of(name))
    x, grad = (torch.randn(128, size).bfloat16() for size in (64, 96))
    x[3], grad[40] = 0, 0
    offsets = torch.tensor([32, 32, 96, 128], dtype=torch.int32)
    expected = torchao_reference(name, x, module.w.detach(), offsets, grad)
    x.requires_grad_()
    y = grouped_linear(module, "w", x, offsets=offsets)
    for found, other in zip((y, *torch.autograd.grad(y, (x, module.w), grad)), expected, strict=True):
        assert torch.equal(found, other) and found.any()
    plain = torch._grouped_mm(x, module.w.transpose(-2, -1), offs=offsets)
    assert 1e-3 < (y - plain).norm() / plain.norm() < 0.1  # quantized it is
    # The same by a loop, in float32: but for the last roundings.
    looped = grouped_linear(module, "w", x.float(), splits=[32, 0, 64, 32])
    assert looped.dtype == torch.float32 and (looped - y).norm() < 5e-3 * y.norm()


class GroupedExperts(Experts):
    forward = grouped_experts


class Net(nn.Module):
    """Mixtures of experts with quantized GEMMs, and a head."""

    def __init__(self, name, num_experts=4, checkpoints=False):
        from gtp_dtensor.wire.grouped_linear import use_grouped_gemms

        super().__init__()
        self.layers = nn.ModuleList(MoE(64, 96, num_experts, kind=GroupedExperts) for _ in range(2))
        for layer in self.layers:
            use_grouped_gemms(layer.experts, gemms_of(name))
        self.head = nn.Linear(64, 16)
        self.checkpoints = checkpoints

    def forward(self, x):
        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x))
        return self.head(x)


def shard(model, mesh, **config):
    experts = {"forwards": {GroupedExperts: grouped_experts}, "modules": ["layers.*.experts"], "is_expert": True}
    for axis, options in (("egtp", experts), ("gtp", {})):
        style = GTPStyle(
            GTPConfig(**config), min_numel=30, num_data_ranks=mesh.size(), **options, **replica_options(mesh)
        )
        parallelize_module(model, mesh["egtp"], style)
    return [weight for layer in model.layers for weight in layer.experts.__dict__[STATE].weights.values()]


@ranks(2)
@pytest.mark.parametrize(
    "name, num_experts, checkpoints",
    [
        ("float8", 4, False),
        ("mxfp8", 3, False),
        *(slow(n, e, c) for n in FORMATS for e in (3, 4) for c in (True, False)),
    ],
)
def test_sharded_it_is_the_same_bits(rank, world_size, name, num_experts, checkpoints):
    """Forwards equal those of unsharded experts; weights are gathered as the GEMMs read them."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("egtp",))
    model, reference = build_pair(lambda: Net(name, num_experts, checkpoints))
    weights = shard(model, mesh)
    wire = {"float8": "fp8_rowwise", "mxfp8": "mxfp8"}[name]
    assert [weight.wire_name for weight in weights] == [wire] * 6
    assert {weight.cut.dim for weight in weights} == {num_experts % world_size}
    train(model, reference, world_size, rank)
    reset_stats(model)
    for _ in range(2):  # as many as in a step: another one is not expected, and its first weight not gathered before
        mean_square(model(torch.randn(32, 64, requires_grad=True))).backward()
    assert {weight.counters.num_quantizations for weight in weights} == {1}  # after the last step
    reset_stats(model)
    mean_square(model(torch.randn(32, 64, requires_grad=True))).backward()
    for weight in weights:
        num_experts, num_out, num_in = weight.tp_local_shape
        if weight.cut.dim and name == "mxfp8":
            num_out = -(-num_out // 64) * 64  # ranks send whole blocks of rows
        numel = num_experts * num_out * num_in
        rows, columns = (numel * 33 // 32,) * 2 if name == "mxfp8" else (numel + 4 * num_experts * num_out, numel)
        counters = weight.counters
        assert counters.num_quantizations == 0
        assert counters.num_recompute_gathers == checkpoints and counters.num_backward_gathers == 1
        assert counters.gather_bytes == rows * (1 + checkpoints) + columns, weight.fqn
    assert stats(model).num_pending == 0


@pytest.mark.slow
@ranks(4)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("sizes", [{"dps": 2, "egtp": 2}, {"dps": 1, "egtp": 4}], ids=str)
def test_sharded_on_grids(rank, world_size, name, sizes):
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    model, reference = build_pair(lambda: Net(name, 6))
    assert all(weight.wire is not None for weight in shard(model, mesh))
    train(model, reference, world_size, rank)


@ranks(2)
def test_gathered_in_high_precision_they_are_quantized_at_each_gemm(rank, world_size):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("egtp",))
    for name in FORMATS:
        model, reference = build_pair(lambda: Net(name))
        assert all(weight.wire is None for weight in shard(model, mesh, wire_format="bf16"))
        train(model, reference, 2, rank)


@ranks(2)
def test_what_is_refused(mesh, rank, world_size):
    from gtp_dtensor.wire.grouped_linear import Float8GroupedGEMMs, use_grouped_gemms

    with pytest.raises(ValueError, match=r"moe\.experts\.w1 of shape \(4, 40, 64\).*multiples of 32"):
        use_grouped_gemms(Experts(4, 64, 40), gemms_of("mxfp8"), "moe.experts")
    with pytest.raises(ValueError, match=r"moe\.experts\.w1 .*multiples of 16"):
        use_grouped_gemms(Experts(4, 64, 40), gemms_of("float8"), "moe.experts")
    with pytest.raises(ValueError, match="Linear has no stacks of experts"):
        use_grouped_gemms(nn.Linear(64, 64), gemms_of("float8"))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="capability 9.0; use emulate=True"):
            Float8GroupedGEMMs(emulate=False)
    experts = {"modules": ["layers.*.experts"], "is_expert": True, "min_numel": 30}
    with pytest.raises(ValueError, match=r"layers\.0\.experts\.w1 of shape .*forwards=\{GroupedExperts: \.\.\.\}"):
        parallelize_module(Net("float8"), mesh["gtp"], GTPStyle(**experts))
    experts["forwards"] = {GroupedExperts: grouped_experts}
    with pytest.raises(ValueError, match=r"experts\.w1: wire format 'nvfp4' for GroupedExperts.*'mxfp8'.*'auto'"):
        parallelize_module(Net("mxfp8"), mesh["gtp"], GTPStyle(GTPConfig(wire_format="nvfp4"), **experts))


@pytest.mark.gpu
def test_on_a_gpu_they_are_what_the_emulation_says():
    from gtp_dtensor.wire.grouped_linear import Float8GroupedGEMMs, has_scaled_grouped_mm, use_grouped_gemms

    if not has_scaled_grouped_mm():
        pytest.skip("needs a GPU of compute capability 9.0")
    torch.manual_seed(0)
    offsets = torch.tensor([64, 64, 320, 512], dtype=torch.int32, device="cuda")
    weight, x, grad = (torch.randn(shape, device="cuda") for shape in ((4, 384, 256), (512, 256), (512, 384)))
    results, calls = [], []
    real = torch._scaled_grouped_mm

    def counted(*args, **kwargs):
        calls.append(args[0].dtype)
        return real(*args, **kwargs)

    for emulate in (True, False):
        module = nn.Module()
        module.w = nn.Parameter(weight.clone())
        use_grouped_gemms(module, Float8GroupedGEMMs(emulate))
        rows = x.bfloat16().requires_grad_()
        with mock.patch.object(torch, "_scaled_grouped_mm", counted):
            y = grouped_linear(module, "w", rows, offsets=offsets)
            results.append((y, *torch.autograd.grad(y, (rows, module.w), grad.bfloat16())))
        assert calls == ([] if emulate else [torch.float8_e4m3fn] * 2)
    for one, other in zip(*results, strict=True):
        assert one.isfinite().all() and (one.float() - other.float()).norm() < 5e-3 * one.float().norm()
