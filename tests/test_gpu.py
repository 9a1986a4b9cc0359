"""The CUDA path: NCCL, side streams, events. Several ranks share one GPU."""

import contextlib

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, set_requires_gradient_sync, stats
from gtp_dtensor.transport.collective import CollectiveTransport, Transfer
from gtp_dtensor.weight import Lease
from tests.harness import ranks
from tests.models import MLP, MODEL_CASES, TinyLlama
from tests.moe import MoEModel
from tests.reference import (
    build_pair,
    full_parameters,
    local_slice,
    mean_square,
    replica_options,
    train_beside_reference,
)
from tests.test_experts import check_grouped_gemm, expert_members, grids
from tests.test_experts import shard as shard_with_experts
from tests.test_parity import _llama_tp_plan

on_gpu = ranks(4, device="cuda", timeout=120, group_timeout=60)
RTOL = 1e-5  # float32 with other GEMM shapes and summation orders
SLEEP = 20_000_000  # GPU clock cycles: about 10 ms


def on(device, case):
    def batch(step, num=8):
        return case.batch(num, seed=step).to(device)

    return lambda: case.build().to(device), batch


@on_gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("case", MODEL_CASES, ids=str)
def test_every_kind_of_module(mesh, rank, world_size, device, case, optimizer):
    build, batch = on(device, case)
    model, reference = build_pair(build)
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    train_beside_reference(
        model,
        reference,
        batch,
        rank=rank,
        world_size=world_size,
        optimizer=optimizer,
        num_microbatches=2,
        rtol=RTOL if optimizer == "sgd" else 1e-3,
    )  # Adam divides by the root of tiny second moments, which lifts rounding
    s = stats(model)
    assert s.num_pending == 0 and s.live_lease_bytes == 0 and s.num_prefetch_hits > 0


def meshes(replicas):
    """(gtp mesh of the 4 ranks, options of GTPStyle): all of them, or two with replicas of a kind."""
    if replicas is None:
        return init_device_mesh("cuda", (4,), mesh_dim_names=("gtp",)), {}
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=(replicas, "gtp"))
    return mesh["gtp"], replica_options(mesh)


@on_gpu
@pytest.mark.parametrize("replicas", ["dps", "dpr"])
def test_llama_with_replicas(rank, world_size, device, replicas):
    gtp_mesh, options = meshes(replicas)
    model, reference = build_pair(lambda: TinyLlama().to(device))
    parallelize_module(model, gtp_mesh, GTPStyle(min_numel=30, **options))
    train_beside_reference(
        model,
        reference,
        lambda step: torch.randint(0, 24, (8, 6), generator=torch.Generator().manual_seed(step)).to(device),
        rank=rank,
        world_size=world_size,
        num_microbatches=2,
        rtol=RTOL,
        syncs_last_only=True,
    )
    s = stats(model)
    assert s.num_replica_reductions > 0 and s.num_pending == 0 and s.live_lease_bytes == 0


@on_gpu
@pytest.mark.parametrize("order", [("gtp", "tp"), ("tp", "gtp")])
def test_llama_with_tensor_and_sequence_parallel(device, order):
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=order)
    model, reference = build_pair(lambda: TinyLlama().to(device))
    parallelize_module(model, mesh["tp"], _llama_tp_plan(2))
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30))
    train_beside_reference(
        model,
        reference,
        lambda step: torch.randint(0, 24, (4, 6), generator=torch.Generator().manual_seed(step)).to(device),
        rank=mesh["gtp"].get_local_rank(),
        world_size=2,
        num_microbatches=2,
        rtol=RTOL,
    )
    assert all(param.device_mesh.mesh_dim_names == ("tp", "gtp") for param in model.parameters())
    s = stats(model)
    assert s.num_sharded_weights > 0 and s.num_pending == 0 and s.live_lease_bytes == 0


@on_gpu
def test_bf16_gathers_equal_the_model_cast_by_hand(mesh, rank, world_size, device):
    config = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, reference = build_pair(lambda: TinyLlama(dim=64, hidden=160).to(device))
    parallelize_module(model, mesh, GTPStyle(config, min_numel=30))
    half = reference.bfloat16()
    tokens = torch.randint(0, 24, (8, 7), generator=torch.Generator().manual_seed(0)).to(device)
    y, expected = model(local_slice(tokens, rank, world_size)), half(local_slice(tokens, rank, world_size))
    assert y.dtype == torch.bfloat16 and torch.equal(y, expected)
    y.float().square().mean().backward()
    expected.float().square().mean().backward()
    for (name, param), other in zip(model.named_parameters(), half.parameters()):
        total = other.grad.float()
        torch.distributed.all_reduce(total)
        error = (param.grad.full_tensor() - total / world_size).norm() / total.norm().clamp(min=1e-20)
        # The reference rounds each weight's gradient to bfloat16, by up to 2**-9; ours stays float32.
        assert error < (2**-9 if param.dim() > 1 else 1e-5), (name, error)


@on_gpu
def test_weight_gradients_are_not_rounded_to_bf16(mesh, rank, world_size, device):
    config = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, calculate_per_token_loss=True)
    model = torch.nn.Linear(64, 64, bias=False, device=device)
    parallelize_module(model, mesh, GTPStyle(config))
    generator = torch.Generator(device).manual_seed(rank)
    x, grad_y = (torch.randn(256, 64, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(2))
    model(x).backward(grad_y)
    expected = grad_y.double().t() @ x.double()
    torch.distributed.all_reduce(expected)
    error = (model.weight.grad.full_tensor() - expected).norm() / expected.norm()
    assert error < 1e-5  # bfloat16 would give 1e-3


@on_gpu
@pytest.mark.parametrize("ep, egtp, gtp, num_experts", [(2, 2, 4, 4), (1, 4, 2, 6), (4, 1, 2, 4)])
def test_experts(rank, world_size, device, ep, egtp, gtp, num_experts):
    """Whole experts over egtp; features of each (6 experts on 4 ranks); all of them over ep."""
    model, reference = build_pair(lambda: MoEModel(3, num_experts=num_experts).to(device))
    shard_with_experts(model, *grids(world_size, gtp, egtp, ep, device_type="cuda"))
    assert {member.cut.dim for member in expert_members(model)} == {int(num_experts == 6)}
    train_beside_reference(
        model,
        reference,
        lambda step: torch.randn(8, 5, 8, generator=torch.Generator().manual_seed(step)).to(device),
        rank=rank,
        world_size=world_size,
        num_microbatches=2,
        rtol=RTOL,
        syncs_last_only=True,
    )
    s = stats(model)
    assert s.num_pending == 0 and s.live_lease_bytes == 0
    assert all(member.counters.num_reductions > 0 for member in expert_members(model))


@on_gpu
def test_grouped_gemm(mesh, rank, device):
    check_grouped_gemm(mesh, rank, device)


# ---- missing waits


@contextlib.contextmanager
def poisoned_memory():
    """Every gathered weight is overwritten with NaN, on the computing stream, as soon as its lease ends."""
    end = Lease.end

    def poisoned(self):
        buffer = self.buffer
        end(self)
        if not isinstance(buffer, tuple):
            buffer.fill_(float("nan"))
            return
        for part in buffer:
            part.fill_(255)  # NaN of e4m3 and of e8m0

    Lease.end = poisoned
    try:
        yield
    finally:
        Lease.end = end


@contextlib.contextmanager
def slow(what: str, rank: int):
    """Make one kind of work late. A communicator's stream cannot be delayed by itself, but one rank can come late to
    each collective: then it is in flight on all the others for as long."""
    transport = CollectiveTransport
    gather, reduce, all_reduce = transport.all_gather, transport.reduce_scatter, transport.start_all_reduce
    gather_parts, wait = transport.all_gather_parts, Transfer.wait

    def late(collective):
        def call(self, *args, **kwargs):
            if rank == 1:
                torch.cuda._sleep(SLEEP)
            return collective(self, *args, **kwargs)

        return call

    def slow_wait(self):
        wait(self)
        torch.cuda._sleep(SLEEP)

    if what == "gather":
        transport.all_gather, transport.all_gather_parts = late(gather), late(gather_parts)
    elif what == "reduce":
        transport.reduce_scatter, transport.start_all_reduce = late(reduce), late(all_reduce)
    elif what == "compute":
        Transfer.wait = slow_wait
    try:
        yield
    finally:
        transport.all_gather, transport.reduce_scatter, transport.start_all_reduce = gather, reduce, all_reduce
        transport.all_gather_parts = gather_parts
        Transfer.wait = wait


def _weights_after_steps(rank, world_size, device, config, replicas=None, num_steps=3):
    torch.manual_seed(0)
    model = MLP((64, 128, 128, 128, 64)).to(device)
    gtp_mesh, options = meshes(replicas)
    parallelize_module(model, gtp_mesh, GTPStyle(config, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(num_steps):
        for microbatch in range(2):
            set_requires_gradient_sync(model, microbatch == 1)
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(10 * step + microbatch)).to(device)
            mean_square(model(local_slice(x, rank, world_size))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


@on_gpu
@pytest.mark.parametrize("replicas", [None, "dps", "dpr"])
@pytest.mark.parametrize("what", ["nothing", "gather", "reduce", "compute"])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_no_wait_is_missing(rank, world_size, device, what, param_dtype, replicas):
    """Equal neighbours, released memory poisoned, one stream made late: not a bit changes."""
    config = GTPConfig(param_dtype=param_dtype, look_ahead=2)
    expected = _weights_after_steps(rank, world_size, device, config, replicas)
    with poisoned_memory(), slow(what, rank):
        weights = _weights_after_steps(rank, world_size, device, config, replicas)
    for name, value in weights.items():
        assert torch.isfinite(value).all() and torch.equal(value, expected[name]), name


@on_gpu
@pytest.mark.parametrize("replicas", [None, "dps"])
@pytest.mark.parametrize("what", ["gather", "compute"])
@pytest.mark.parametrize("wire", ["fp8_rowwise", "mxfp8", "nvfp4"])
def test_no_wait_is_missing_for_quantized_weights(rank, world_size, device, what, wire, replicas):
    config = GTPConfig(param_dtype=torch.bfloat16, look_ahead=2, wire_format=wire)
    expected = _weights_after_steps(rank, world_size, device, config, replicas)
    with poisoned_memory(), slow(what, rank):
        weights = _weights_after_steps(rank, world_size, device, config, replicas)
    for name, value in weights.items():
        assert torch.isfinite(value).all() and torch.equal(value, expected[name]), name


def _expert_weights_after_steps(rank, world_size, device, num_experts, ep, egtp):
    torch.manual_seed(0)
    model = MoEModel(3, num_experts=num_experts).to(device)
    shard_with_experts(model, *grids(world_size, 4, egtp, ep, device_type="cuda"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)  # 0.1 diverges
    for step in range(3):
        x = torch.randn(16, 5, 8, generator=torch.Generator().manual_seed(step)).to(device)
        mean_square(model(local_slice(x, rank, world_size))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


@on_gpu
@pytest.mark.parametrize("num_experts, ep, egtp", [(4, 2, 2), (6, 1, 4)])
@pytest.mark.parametrize("what", ["gather", "reduce", "compute"])
def test_no_wait_is_missing_for_experts(rank, world_size, device, what, num_experts, ep, egtp):
    """Gathers issued a block ahead; the second case gathers features, as one coalesced collective."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # sums of routed rows
    try:
        expected = _expert_weights_after_steps(rank, world_size, device, num_experts, ep, egtp)
        assert all(torch.isfinite(value).all() for value in expected.values())
        with poisoned_memory(), slow(what, rank):
            weights = _expert_weights_after_steps(rank, world_size, device, num_experts, ep, egtp)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, value in weights.items():
        assert torch.isfinite(value).all() and torch.equal(value, expected[name]), name


@on_gpu
@pytest.mark.parametrize("replicas", [None, "dps"])
@pytest.mark.parametrize("missing", ["gather", "reduce"])
def test_the_poison_tests_find_a_missing_wait(rank, world_size, device, missing, replicas):
    """Arms the trap of the test above: without the wait it fails."""
    expected = _weights_after_steps(rank, world_size, device, GTPConfig(), replicas)
    wait = Transfer.wait

    held = []

    class NoWork:
        def wait(self):
            pass

    def no_wait(self):
        is_gather = self.tensors[0].numel() > self.tensors[1].numel()
        if is_gather == (missing == "gather"):
            held.append(self._work)
            self._work = NoWork()
        wait(self)

    with poisoned_memory(), slow(missing, rank):
        Transfer.wait = no_wait
        try:
            weights = _weights_after_steps(rank, world_size, device, GTPConfig(), replicas)
        finally:
            Transfer.wait = wait
    torch.cuda.synchronize()
    differs = torch.tensor([not torch.equal(value, expected[name]) for name, value in weights.items()], device=device)
    torch.distributed.all_reduce(differs, op=torch.distributed.ReduceOp.MAX)
    assert differs.any()


@ranks(4, device="cuda", timeout=300, group_timeout=60)  # collectives of ranks that share a GPU go through sockets
@pytest.mark.parametrize("replicas", [None, "dps"])
def test_allocated_memory_is_flat_over_200_steps(device, replicas):
    model = MLP((64, 128, 128, 64)).to(device)
    gtp_mesh, options = meshes(replicas)
    parallelize_module(model, gtp_mesh, GTPStyle(GTPConfig(param_dtype=torch.bfloat16), **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, 64, device=device)
    allocated = []
    for step in range(200):
        with torch.no_grad():
            if step % 10 == 0:
                model(x)
        for _ in range(1 + step % 2):
            model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 10:
            allocated.append(torch.cuda.memory_allocated())
    assert max(allocated) == min(allocated)
    reset_stats(model)
    assert stats(model).live_lease_bytes == 0


@on_gpu
@pytest.mark.parametrize(
    "replicas, wire",
    [(None, "bf16"), ("dps", "bf16"), ("dpr", "bf16"), (None, "fp8"), ("dps", "mxfp8"), (None, "nvfp4")],
)
def test_no_host_synchronisation_inside_a_step(device, replicas, wire):
    model = MLP((64, 128, 128, 64)).to(device)
    gtp_mesh, options = meshes(replicas)
    parallelize_module(model, gtp_mesh, GTPStyle(GTPConfig(param_dtype=torch.bfloat16, wire_format=wire), **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, 64, device=device)

    def step():
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step()
        with pytest.raises(RuntimeError, match="synchroniz"):  # the trap is armed
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
