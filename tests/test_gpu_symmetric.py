"""The symmetric transport on CUDA: peer memory, copy engines, signals on streams, the kernel that sums. Ranks share one
GPU, so nothing here speaks of NVLink."""

import os
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention import SDPBackend, sdpa_kernel

from gtp_dtensor import GTPConfig, GTPStyle, reset_stats, stats
from gtp_dtensor.transport.collective import CollectiveTransport
from gtp_dtensor.transport.fabric import Sum
from gtp_dtensor.transport.summing import new_kernel, sum_in_one_kernel, sum_plainly
from gtp_dtensor.transport.symmetric import SymmetricTransport
from tests.harness import count_collectives, ranks
from tests.models import MLP, TinyLlama
from tests.moe import MoEModel
from tests.reference import build_pair, full_parameters, local_slice, replica_options, train_beside_reference
from tests.test_experts import expert_members, grids
from tests.test_experts import shard as shard_with_experts
from tests.test_gpu import RTOL, poisoned_memory
from tests.test_symmetric import polite
from tests.test_wires import sharded_weight

on_gpu = ranks(4, device="cuda", timeout=120, group_timeout=60)
SYMMETRIC = GTPConfig(transport="symmetric")
SHORT, LONG = 500_000, 10_000_000  # GPU clock cycles: about 0.3 and 6 ms


@ranks(1, device="cuda")
def test_the_kernel_equals_the_sum_in_rank_order(device):
    """To the last bit, for all that it is compiled for. The second time each is launched by the kept kernel."""
    kernel, stream = new_kernel(), torch.cuda.current_stream(device).cuda_stream

    def sum_by_kernel(job):
        sum_in_one_kernel(job, kernel, stream)

    generator = torch.Generator(device).manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        for size, rank in ((2, 0), (3, 1), (4, 3), (8, 4)):
            for num_runs, run in ((1, 5), (1, 4096 * 5 + 3), (6, 1001), (4, 512)):
                num, own_start, out_start, stride = num_runs * run, 7 * run, 3, num_runs * run + 24
                own = torch.randn(num_runs * 5 * run + own_start, device=device, generator=generator).to(dtype)
                inbox = torch.randn((size - 1) * stride, device=device, generator=generator).to(dtype)
                for out_dtype in (torch.float32, torch.bfloat16):
                    before = torch.randn(num + 10, device=device, generator=generator).to(out_dtype)
                    for adds in (False, True):
                        outs = []
                        for summing in (sum_by_kernel, sum_by_kernel, sum_plainly):
                            outs.append(before.clone())
                            fixed = (own, own_start, run, 5 * run, inbox, stride, outs[-1], out_start, num)
                            summing(Sum(*fixed, size, rank, 0.3, adds))
                        case = (dtype, size, num_runs, run, out_dtype, adds)
                        assert torch.equal(outs[0], outs[2]) and torch.equal(outs[1], outs[2]), case
                        assert not torch.equal(outs[0], before)


def _fifty_steps(config, rank, world_size, device):
    """(outputs, losses, weights) of 50 steps with AdamW."""
    torch.manual_seed(0)
    model = TinyLlama(dim=64, hidden=168).to(device)
    mesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("gtp",))
    parallelize_module(model, mesh, GTPStyle(config, min_numel=30))
    kind = type(sharded_weight(model.layers[0].attention.wq).runtime.transport)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outputs, losses = [], []
    for step in range(50):
        tokens = torch.randint(0, 24, (8, 7), generator=torch.Generator().manual_seed(step)).to(device)
        y = model(local_slice(tokens, rank, world_size))
        loss = y.float().square().mean()
        loss.backward()
        outputs.append(y.detach().clone())
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return kind, torch.stack(outputs), torch.stack(losses), full_parameters(model)


@on_gpu
def test_fifty_steps_equal_the_collective_transport(rank, world_size, device):
    """Both sum gradients in float32 in rank order: outputs, losses and weights to the last bit."""
    common = {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.bfloat16,
        "reduce_scatter_with_fp32_accumulation": True,
        "look_ahead": 2,
    }
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            runs = [
                _fifty_steps(GTPConfig(transport=name, **common), rank, world_size, device)
                for name in ("collective", "symmetric")
            ]
    finally:
        torch.use_deterministic_algorithms(False)
    assert [run[0] for run in runs] == [CollectiveTransport, SymmetricTransport]
    (_, outputs, losses, weights), (_, *found, found_weights) = runs
    assert torch.isfinite(losses).all() and losses[-1] < losses[0]
    assert torch.equal(found[0], outputs) and torch.equal(found[1], losses)
    for name, weight in weights.items():
        assert torch.equal(found_weights[name], weight), name


@on_gpu
@pytest.mark.parametrize("kind", ["whole axis", "dps", "dpr", "features of experts"])
def test_beside_the_reference(rank, world_size, device, kind):
    features = (64,)
    if kind == "features of experts":
        model, reference = build_pair(lambda: MoEModel(2, num_experts=6).to(device))
        shard_with_experts(model, *grids(world_size, 4, 4, device_type="cuda"), config=SYMMETRIC)
        assert {member.cut.dim for member in expert_members(model)} == {1}
        features = (5, 8)
    else:
        model, reference = build_pair(lambda: MLP((64, 130, 70, 64)).to(device))
        names = ("gtp",) if kind == "whole axis" else (kind, "gtp")
        mesh = init_device_mesh("cuda", (4,) if len(names) == 1 else (2, 2), mesh_dim_names=names)
        parallelize_module(model, mesh["gtp"], GTPStyle(SYMMETRIC, min_numel=30, **replica_options(mesh)))
    with poisoned_memory():
        train_beside_reference(
            model,
            reference,
            lambda step: torch.randn(8, *features, generator=torch.Generator().manual_seed(step)).to(device),
            rank=rank,
            world_size=world_size,
            num_microbatches=2,
            rtol=RTOL,
            syncs_last_only=kind in ("dps", "dpr"),
        )
    s = stats(model)
    assert s.num_fences > 0 and s.num_pending == 0 and s.live_lease_bytes == 0


@on_gpu
@pytest.mark.parametrize("wire", ["fp8_rowwise", "mxfp8"])
def test_quantized_weights_equal_the_collective_transport(rank, world_size, device, wire):
    weights = []
    for transport in ("collective", "symmetric"):
        torch.manual_seed(0)
        model = MLP((64, 128, 128, 64), bias=False).to(device)
        config = GTPConfig(
            wire_format=wire,
            transport=transport,
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.bfloat16,
            reduce_scatter_with_fp32_accumulation=True,
        )
        mesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("gtp",))
        parallelize_module(model, mesh, GTPStyle(config))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            x = torch.randn(16, 64, generator=torch.Generator().manual_seed(step)).to(device)
            model(local_slice(x, rank, world_size)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights.append(full_parameters(model))
    assert stats(model).num_quantizations > 0 and stats(model).num_fences > 0
    for name, weight in weights[0].items():
        assert torch.equal(weights[1][name], weight), name


@on_gpu
def test_counts_of_a_step(mesh, rank, world_size, device):
    """After warm-up: no collective for sharded weights, two fences, no event made, no synchronisation, no growth."""
    model = MLP((64, 128, 128, 64), bias=False).to(device)
    config = GTPConfig(transport="symmetric", param_dtype=torch.bfloat16, graph_wgrad_ring_size=3)
    parallelize_module(model, mesh["gtp"], GTPStyle(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(4, 64, device=device)

    def step():
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    transport = sharded_weight(model.layers[0]).runtime.transport
    reset_stats(model)
    made = transport.num_events_created, transport.num_bytes, torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with count_collectives() as log:
            for _ in range(3):
                step()
        with pytest.raises(RuntimeError, match="synchroniz"):  # the trap is armed
            x.sum().item()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    s = stats(model)
    assert not log.calls
    assert s.num_fences == 6 and s.num_reductions == 9 and s.num_mispredictions == 0
    assert made == (transport.num_events_created, transport.num_bytes, torch.cuda.memory_allocated())


# ---- races


class _Rows(nn.Module):
    """Layers of one input; (layers, tokens, features)."""

    def __init__(self, num_layers=4, num_features=256):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(num_features, num_features, bias=False) for _ in range(num_layers))

    def forward(self, x):
        return torch.stack([layer(x) for layer in self.layers])


def _wrong_values(rank, world_size, device, num_steps):
    """Every weight begins as 0 and becomes one less at each step, if all gradients and all reads are right: in every
    step the ranks' gradients differ by rank, layer and step and average 4. Returns how many outputs were anything else.

    One rank after the other comes late: with its computation, its gathers, its pushes or its sums. After each backward
    comes a forward without one, whose gathers nothing else orders before what follows. Optimizers run on a stream of
    their own.
    """
    model = _Rows().to(device)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    mesh = init_device_mesh("cuda", (world_size,), mesh_dim_names=("gtp",))
    config = GTPConfig(transport="symmetric", calculate_per_token_loss=True, graph_wgrad_ring_size=2)
    parallelize_module(model, mesh, GTPStyle(config))
    fabric = sharded_weight(model.layers[0]).runtime.transport.fabric
    late = [torch.cuda.ExternalStream(s) for s in (fabric.copying, fabric.pushing, fabric.summing)]
    late.append(torch.cuda.current_stream())
    optimizer = torch.optim.SGD(model.parameters(), lr=1 / (4 * world_size))
    stepping = torch.cuda.Stream()
    x = torch.zeros(1, 256, device=device)
    x[:] = 1 / 256
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def stall(step, cycles):
        if step % world_size == rank:
            with torch.cuda.stream(late[step // world_size % len(late)]):
                torch.cuda._sleep(cycles)

    for step in range(num_steps):
        stall(step, SHORT)
        y = model(x)
        wrong += (y.detach() != -step).sum()
        change = [(step * (layer + 1)) % 4 for layer in range(4)]
        sign = 1 if rank % 2 else -1
        factor = (
            torch.tensor([4.0 + sign * one for one in change], device="cpu").pin_memory().to(device, non_blocking=True)
        )
        y.backward(256 * factor.view(4, 1, 1).expand_as(y))
        stall(step, LONG)
        with torch.no_grad():
            wrong += (model(x) != -step).sum()
        stepping.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stepping):
            optimizer.step()
        torch.cuda.current_stream().wait_stream(stepping)
        optimizer.zero_grad()
    torch.distributed.all_reduce(wrong)
    return wrong.item()


@ranks(2, 4, device="cuda", timeout=200, group_timeout=60)
def test_a_thousand_steps_without_a_wrong_value(rank, world_size, device):
    with poisoned_memory():
        assert _wrong_values(rank, world_size, device, 1000) == 0


@on_gpu
@pytest.mark.parametrize("missing", ["before", "parts"])
def test_the_race_test_finds_a_missing_signal(rank, world_size, device, missing):
    """Arms the test above."""
    new_slot = SymmetricTransport._new_slot

    def careless(self, shared, number, *args):
        slot = new_slot(self, shared, number, *args)
        slot.take_room = slot.take_parts = lambda lane, detail: None
        slot.tell = slot.give_room = lambda lane: None
        return slot

    def no_fence(self):
        self._say_written = polite(self, 1)

    name, replacement = ("_new_slot", careless) if missing == "parts" else ("_before_rewrite", no_fence)
    with poisoned_memory(), mock.patch.object(SymmetricTransport, name, replacement):
        assert _wrong_values(rank, world_size, device, 48) > 0


# ---- set-up


@ranks(2, device="cuda", group_timeout=60)
def test_ranks_with_different_pasts_meet(rank, world_size, device, mesh):
    """torch counts meetings by process (see ``CudaFabric._align_rendezvous``)."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    from gtp_dtensor.transport.cuda import _group_of_one, _num_rendezvous, _rendezvous

    if rank == 0:
        tensor = symmetric_memory._SymmetricMemory.empty_strided_p2p((1,), (1,), torch.uint8, device)
        _rendezvous(tensor, _group_of_one())
    mine, counts = torch.tensor([_num_rendezvous()], device=device), torch.empty(2, dtype=torch.int64, device=device)
    torch.distributed.all_gather_into_tensor(counts, mine)
    assert counts[0] == counts[1] + 1
    model = nn.Linear(64, 64, bias=False, device=device)
    parallelize_module(model, mesh["gtp"], GTPStyle(SYMMETRIC))
    with torch.no_grad():
        model.weight.fill_(1.0)
    assert (model(torch.ones(1, 64, device=device)) == 64).all()


@ranks(2, device="cuda")
def test_over_nvlink(mesh, rank, device):
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        pytest.skip("needs two GPUs that reach each other")
    model = nn.Linear(64, 64, bias=False, device=device)
    parallelize_module(model, mesh["gtp"], GTPStyle(SYMMETRIC))
    assert type(sharded_weight(model).runtime.transport) is SymmetricTransport
    with torch.no_grad():
        model.weight.fill_(1.0)
    assert (model(torch.ones(1, 64, device=device)) == 64).all()


@on_gpu
def test_auto_is_collective_and_ranks_share_a_gpu_only_on_request(mesh, device):
    model = nn.Linear(64, 64, device=device)
    parallelize_module(model, mesh["gtp"], GTPStyle(GTPConfig()))
    assert type(sharded_weight(model).runtime.transport) is CollectiveTransport
    with mock.patch.dict(os.environ, TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="0"):
        with pytest.raises(ValueError, match="'symmetric' on mesh axis 'gtp' of size 4: ranks 0 and 1 share one GPU"):
            parallelize_module(nn.Linear(64, 64, device=device), mesh["gtp"], GTPStyle(SYMMETRIC))
