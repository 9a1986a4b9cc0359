"""16-bit gradients summed in float32: what is added to what, in which order, in whose memory, on which axes."""

import contextlib
import logging
import time
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from gtp_dtensor import GTPConfig, GTPStyle, finalize_grads, set_requires_gradient_sync, stats
from gtp_dtensor.members import model_members
from gtp_dtensor.pending import PendingParts
from gtp_dtensor.reduce import Reducer
from tests.harness import count_collectives, ranks
from tests.moe import MoEModel
from tests.reference import mean_square, replica_options
from tests.test_experts import batch, expert_members, grids, shard

BF16 = torch.bfloat16


def settings(**options) -> GTPConfig:
    """Gradients in bf16, summed in float32 over every axis."""
    both = {
        "reduce_scatter_with_fp32_accumulation": True,
        "replicate_reduce_with_fp32_accumulation": True,
        "param_dtype": BF16,
        "reduce_dtype": BF16,
    }
    return GTPConfig(**{**both, **options})


class Given(nn.Module):
    """A weight whose gradient is what the input says: rounded to the weight's dtype, nothing else. ``is_linear``: of
    a product with the unit matrix; else of a module that the library does not know."""

    def __init__(self, *shape: int, is_linear: bool) -> None:
        super().__init__()
        self.is_linear = is_linear
        self.inner = nn.Linear(shape[1], shape[0], bias=False) if is_linear else _Weight(shape)

    def forward(self, grad):
        if self.is_linear:
            return (self.inner(torch.eye(grad.shape[1], device=grad.device)) * grad.t()).sum()
        return self.inner(grad)


class _Weight(nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))
        self.seen = None  # unsharded gradients, where somebody wants to keep them

    def forward(self, grad):
        weight = self.weight
        if self.seen is not None:
            weight.register_hook(self.seen.append)
        return (weight * grad).sum()


def contribution(rank: int, microbatch: int, shape) -> torch.Tensor:
    """What a rank adds to the gradient, in bf16."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * microbatch + rank)).to(BF16)


def spread(rank: int, microbatch: int, shape) -> torch.Tensor:
    """The same, of so many magnitudes that the order of a sum in float32 shows."""
    generator = torch.Generator().manual_seed(100 * microbatch + rank)
    exponents = torch.randint(-16, 17, shape, generator=generator)
    return contribution(rank, microbatch, shape) * torch.exp2(exponents).to(BF16)


def rank_order_sum(parts) -> torch.Tensor:
    """In float32, first to last."""
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def ring_sum(parts) -> torch.Tensor:
    """As a ring reduce-scatter in bf16 does it: rank r's rows begin at the next rank and are rounded at each hop."""
    rows = []
    for rank in range(len(parts)):
        order = [parts[(rank + hop) % len(parts)].chunk(len(parts))[rank] for hop in range(1, len(parts) + 1)]
        total = order[0]
        for part in order[1:]:
            total = total + part
        rows.append(total)
    return torch.cat(rows)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, in the root mean square."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def reduced(model, grads) -> torch.Tensor:
    """The gradient of the only weight after these microbatches, whole."""
    for grad in grads:
        model(grad).backward()
    return model.inner.weight.grad.full_tensor()


class NewMemory(TorchDispatchMode):
    """Bytes of storages that operators return and were not given."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage()._cdata for t in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(t)
        }
        for tensor in torch.utils._pytree.tree_leaves(result):
            if torch.is_tensor(tensor) and tensor.untyped_storage()._cdata not in given:
                self.tensors.append(tensor.untyped_storage())
        return result

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.tensors)


@contextlib.contextmanager
def counting(cls, name):
    """Yields a list of the bytes that each call of a method allocates."""
    original, found = getattr(cls, name), []

    def method(self, *args, **kwargs):
        with NewMemory() as memory:
            result = original(self, *args, **kwargs)
        found.append(memory.num_bytes)
        return result

    with mock.patch.object(cls, name, method):
        yield found


@ranks(8)
def test_error_does_not_grow_with_the_axis(rank, world_size):
    """Against a sum in float64. Two ranks: bypassed, one rounding."""
    shape = (64, 40)
    errors = {name: [] for name in ("ring", "gloo", "gtp", "shards", "copies")}
    for size in (2, 4, 8):
        mesh = init_device_mesh("cpu", (8 // size, size), mesh_dim_names=("other", "axis"))
        one = init_device_mesh("cpu", (8, 1), mesh_dim_names=("other", "one"))["one"]
        group = mesh["axis"].get_group()
        parts = [contribution(peer, 0, shape) for peer in dist.get_process_group_ranks(group)]
        exact = torch.stack(parts).double().sum(0)
        errors["ring"].append(error(ring_sum(parts), exact))
        for name, gtp, options, switches in (
            ("gloo", mesh["axis"], {}, {"reduce_scatter_with_fp32_accumulation": False}),
            ("gtp", mesh["axis"], {}, {"replicate_reduce_with_fp32_accumulation": False}),
            ("shards", one, {"optimizer_shard_mesh": mesh["axis"]}, {"reduce_scatter_with_fp32_accumulation": False}),
            ("copies", one, {"replicate_mesh": mesh["axis"]}, {"reduce_scatter_with_fp32_accumulation": False}),
        ):
            model = Given(*shape, is_linear=True)
            style = GTPStyle(settings(calculate_per_token_loss=True, **switches), min_numel=0, **options)
            parallelize_module(model, gtp, style)
            found = reduced(model, [parts[mesh["axis"].get_local_rank()]])
            errors[name].append(error(found, exact))
            if size > 2 and name != "gloo":
                expected = rank_order_sum(parts)
                assert torch.equal(found, expected.to(BF16).float() if name == "copies" else expected), (name, size)
    print("\n".join(f"{name:7}" + "".join(f" {value:.2e}" for value in row) for name, row in errors.items()))
    one_rounding = errors["ring"][0]
    assert errors["gtp"][0] == errors["shards"][0] == errors["copies"][0] == one_rounding > 1e-3
    for name in ("ring", "gloo"):  # the trap is armed
        assert errors[name][0] < errors[name][1] < errors[name][2] and errors[name][2] > 1.5 * one_rounding
    assert max(errors["gtp"][1:] + errors["shards"][1:]) < 2**-24
    assert max(errors["copies"]) < 1.05 * one_rounding


CASES = [
    ((33, 6), None, True),  # the last rank has fewer rows
    ((33, 6), 4, True),  # and every rank's are padded
    ((5, 30), None, True),  # or none
    ((32, 6), None, False),
    ((6, 10, 7), 4, False),  # a stack of experts, cut and padded on dim 1
    ((4, 3, 5), None, False),  # cut by whole experts
]


@ranks(4, device=("cpu", "cuda"))
@pytest.mark.parametrize("per_token", [False, True])
def test_sums_land_in_the_gradient(mesh, rank, device, per_token):
    """Bit for bit, over microbatches: in rank order, then the scale, then added; and no memory but the gradient's."""
    for shape, alignment, is_linear in CASES:
        model = Given(*shape, is_linear=is_linear).to(device)
        is_stack = len(shape) == 3
        config = settings(pad_for_alignment=alignment, calculate_per_token_loss=per_token)
        style = GTPStyle(
            config, min_numel=0, is_expert=is_stack, modules=["inner"], num_data_ranks=8 if is_stack else 4
        )
        parallelize_module(model, mesh, style)
        (weight,) = model_members(model)
        assert weight.cut.dim == (len(shape) == 3 and shape[0] % 4 > 0)
        grads = [spread(rank, microbatch, shape).to(device) for microbatch in range(3)]
        with counting(PendingParts, "rows") as made, counting(PendingParts, "add_to") as added:
            found = reduced(model, grads)
        scale = 1.0 if per_token else 1 / style.num_data_ranks
        expected = 0
        for microbatch in range(3):
            parts = [spread(peer, microbatch, shape) for peer in range(4)]
            expected = expected + scale * rank_order_sum(parts)
            assert not torch.equal(rank_order_sum(parts), rank_order_sum(parts[::-1]))  # the order shows
        assert torch.equal(found.cpu(), expected), (shape, alignment)
        own = weight.param.grad._local_tensor.nbytes
        # A gradient from autograd itself is not ours to write into.
        num_rooms = 0 if is_linear or weight.cut.dim == 1 else 1
        assert made == [own] and added == [num_rooms * own] * 2, (shape, alignment, made, added)


@ranks(4)
def test_gradients_of_others_are_left_alone(mesh, rank):
    """A hook kept the unsharded gradient, which is sent as it is."""
    model = Given(8, 6, is_linear=False)
    seen = model.inner.seen = []
    parallelize_module(model, mesh, GTPStyle(settings(), min_numel=0))
    sent = [spread(rank, microbatch, (8, 6)) for microbatch in range(2)]
    reduced(model, sent)
    assert len(seen) == 2 and all(map(torch.equal, seen, sent))


REPLICAS = [  # sizes of axes, whole shape, switches
    (dict(dps=4, gtp=1), (7, 6), {}),  # unevenly cut
    (dict(dpr=4, gtp=1), (16, 6), {}),
    (dict(dps=2, gtp=4), (16, 6), {}),
    (dict(dpr=4, gtp=2), (7, 3), {}),  # rows of copies that four do not divide
    (dict(dpr=4, gtp=2), (1, 6), {}),  # a gtp rank without rows
    (dict(dpr=4, gtp=2), (16, 6), {"replicate_reduce_with_fp32_accumulation": False}),
]


def _emulated(sizes, shape, num_microbatches, keeps_back):
    """The whole gradient as the ranks should have it. On axes of two a sum is rounded to bf16."""
    size = {"gtp": 1, "dps": 1, "dpr": 1, **sizes}
    replica, is_copy = ("dps", False) if size["dps"] > 1 else ("dpr", True)
    expected, kept = 0, 0
    for microbatch in range(num_microbatches):
        grads = [spread(peer, microbatch, shape) for peer in range(size["gtp"] * size[replica])]
        over_gtp = []
        for row in range(size[replica]):
            peers = grads[row * size["gtp"] : (row + 1) * size["gtp"]]
            over_gtp.append(rank_order_sum(peers) if size["gtp"] > 2 else sum(peers[1:], peers[0]))
        if keeps_back:
            kept = [k + g.float() for k, g in zip(kept, over_gtp)] if kept else [g.float() for g in over_gtp]
            if microbatch < num_microbatches - 1:
                continue
            over_gtp = kept
        sent = [g.to(BF16) for g in over_gtp]
        if size[replica] == 2:
            total = sent[0] + sent[1]
        else:
            total = rank_order_sum(sent)
            total = total.to(BF16) if is_copy else total
        expected = expected + total.float()
    return expected


@ranks(8)
@pytest.mark.parametrize("way", ["each", "kept_back", "finalized", "returned"])
def test_replicas(rank, world_size, way):
    """Each axis by its own switch and size; what goes from axis to axis is rounded to bf16 once."""
    num_microbatches = 3
    for sizes, shape, switches in REPLICAS:
        names = tuple(sizes)
        num_used = 4 if 1 in sizes.values() else 8
        mesh = init_device_mesh("cpu", (8 // num_used, *sizes.values()), mesh_dim_names=("same", *names))
        style = GTPStyle(settings(calculate_per_token_loss=True, **switches), min_numel=0, **replica_options(mesh))
        model = Given(*shape, is_linear=True)
        parallelize_module(model, mesh["gtp"], style)
        if way == "returned":
            model.inner.weight.register_hook(lambda grad: grad)
        mine = [spread(rank % num_used, microbatch, shape) for microbatch in range(num_microbatches)]
        with count_collectives() as log:
            for microbatch, grad in enumerate(mine):
                is_last = microbatch == num_microbatches - 1
                if way in ("kept_back", "finalized"):
                    set_requires_gradient_sync(model, is_last and way == "kept_back")
                model(grad).backward()
                if way == "finalized" and not is_last:
                    assert model.inner.weight.grad is None
            finalize_grads(model)
        assert stats(model).num_pending == 0
        found = model.inner.weight.grad.full_tensor()
        reductions = [call for op in ("all_to_all", "reduce_scatter", "all_reduce") for call in log.select(op)]
        assert {call.dtype for call in reductions} == {BF16}
        num_over_gtp = num_microbatches if sizes["gtp"] > 2 else 0
        num_synced = num_microbatches if way in ("each", "returned") else 1
        num_over_replicas = num_synced if max(sizes.get("dps", 1), sizes.get("dpr", 1)) > 2 and not switches else 0
        assert log.count("all_to_all") == num_over_gtp + num_over_replicas
        if not switches:  # else Gloo sums four in an order of its own
            expected = _emulated(sizes, shape, num_microbatches, way in ("kept_back", "finalized"))
            assert torch.equal(found, expected), (sizes, shape)


@ranks(8)
def test_each_axis_decides_by_its_own_size(rank, world_size):
    """One all-to-all for a dense weight or a stack of experts, where its axis has more than two ranks."""
    for gtp, egtp, replicas in ((8, 2, False), (8, 2, True), (2, 4, False)):
        model = MoEModel(1)
        config = settings(replicate_reduce_with_fp32_accumulation=replicas, param_dtype=None)
        shard(model, *grids(world_size, gtp, egtp), config=config)
        experts = expert_members(model)
        dense = [m for m in model_members(model) if m not in experts and hasattr(m, "cut")]
        assert (len(experts), len(dense)) == (3, 4)
        with count_collectives() as log:
            mean_square(model(batch(1, seed=rank).float())).backward()
        found = {}
        for name, domain in (("dense", dense[0].runtime.domain), ("experts", experts[0].runtime.domain)):
            for axis, transport in (("gtp", domain.transport), ("shards", domain.shard_transport)):
                found[name, axis] = 0 if transport is None else log.count("all_to_all", transport.reduce_group)
        assert found == {
            ("dense", "gtp"): len(dense) if gtp > 2 else 0,
            ("dense", "shards"): 0,  # there are none beside gtp 8, and beside gtp 2 the switch is off
            ("experts", "gtp"): 3 if egtp > 2 else 0,
            ("experts", "shards"): 3 if replicas else 0,
        }, (gtp, egtp, replicas)
        assert log.count("all_to_all") == sum(found.values())


def num_alive(refs, most):
    """How many there are; Gloo's thread lets go of a tensor a moment after it has told that it is done with it."""
    for _ in range(200):
        if sum(ref() is not None for ref in refs) <= most:
            break
        time.sleep(0.01)
    return sum(ref() is not None for ref in refs)


@ranks(4)
@pytest.mark.parametrize("num_slots", [1, 3])
def test_scratch_is_one_unsharded_gradient_a_reduction(mesh, rank, num_slots):
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(6)))
    parallelize_module(model, mesh, GTPStyle(settings(graph_wgrad_ring_size=num_slots)))
    unsharded = 32 * 32 * BF16.itemsize
    live, peaks, started = [], [], []
    start = Reducer._start

    def counted(self, *args):
        with NewMemory() as memory:
            reduction = start(self, *args)
        started.append(memory.num_bytes)
        live.append(weakref.ref(reduction._parts))
        peaks.append(num_alive(live, num_slots))
        return reduction

    with mock.patch.object(Reducer, "_start", counted):
        for _ in range(2):
            model(torch.randn(3, 32)).square().mean().backward()
    assert started == [unsharded] * 12  # received into; what is sent is the gradient itself
    assert max(peaks) == num_slots and num_alive(live, 0) == 0


@contextlib.contextmanager
def log_lines():
    """What the set-up says about switches, on this rank."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("gtp_dtensor.style")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)


@ranks(4)
def test_a_switch_without_effect_is_told_once(rank, mesh):
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dps", "gtp"))
    scatter, replicate = ("reduce_scatter_with_fp32_accumulation", "replicate_reduce_with_fp32_accumulation")
    on, off = {scatter: True, replicate: False}, {scatter: False, replicate: True}
    both_pairs = replica_options(pairs)
    cases = [
        (mesh, {}, on, None),
        (
            mesh,
            {},
            {**on, "reduce_dtype": torch.float32},
            f"{scatter} changes nothing here: gradients are reduced in float32",
        ),
        (
            pairs["gtp"],
            both_pairs,
            on,
            f"{scatter} changes nothing here: gtp has 2; it takes an axis of more than 2 ranks",
        ),
        (pairs["gtp"], both_pairs, off, f"{replicate} changes nothing here: dps has 2; it takes"),
        (mesh, {}, off, f"{replicate} changes nothing here: there are no replicas"),
    ]
    for gtp, options, switches, expected in cases:
        with log_lines() as lines:
            model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
            parallelize_module(model, gtp, GTPStyle(settings(**switches), min_numel=0, **options))
            for _ in range(2):
                model(torch.randn(2, 8)).float().square().mean().backward()
        found = [line for line in lines if "changes nothing" in line]
        assert len(found) == (rank == 0 and expected is not None), (expected, lines)
        assert not found or expected in found[0]
