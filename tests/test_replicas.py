"""Replicas beside the gtp axis: parameters cut further over one axis, copies over another."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import (
    GTPConfig,
    GTPStyle,
    finalize_grads,
    refresh,
    reset_stats,
    set_requires_gradient_sync,
    stats,
)
from tests.harness import ranks
from tests.models import MLP, MODEL_CASES, TinyLlama, WithConv
from tests.reference import (
    assert_close_to_reference,
    build_pair,
    full_gradients,
    full_parameters,
    local_slice,
    mean_square,
    replica_options,
    train_beside_reference,
)
from tests.test_parity import _llama_tp_plan

EXACT = 1e-12  # relative, in float64


def replica_mesh(**sizes):
    """A mesh with these axes, and what of it a style is given: (gtp mesh, keyword arguments)."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return mesh, replica_options(mesh)


RUNS = [
    (dict(dps=2, gtp=2), "sgd"),
    pytest.param(dict(gtp=2, dpr=2), "adam", marks=pytest.mark.slow),
    pytest.param(dict(dpr=2, gtp=2), "sgd", marks=pytest.mark.slow),
    pytest.param(dict(gtp=2, dps=2), "adam", marks=pytest.mark.slow),
    pytest.param(dict(dps=4, gtp=1), "sgd", marks=pytest.mark.slow),
]


@ranks(4)
@pytest.mark.parametrize("layout, optimizer", RUNS, ids=str)
def test_every_kind_of_module(rank, world_size, layout, optimizer):
    """With and without keeping gradients back until the last microbatch."""
    mesh, options = replica_mesh(**layout)
    for index, case in enumerate(MODEL_CASES):
        build, batch = case.in_float64(3 * world_size)
        model, reference = build_pair(build)
        parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30, **options))
        assert stats(model).num_sharded_weights > 0
        train_beside_reference(
            model,
            reference,
            batch,
            rank=rank,
            world_size=world_size,
            optimizer=optimizer,
            num_microbatches=3,
            rtol=EXACT if optimizer == "sgd" else 1e-9,
            syncs_last_only=index % 2 == 0,
        )
        s = stats(model)
        assert s.num_pending == 0 and s.live_lease_bytes == 0 and s.num_replica_reductions > 0


@ranks(4)
@pytest.mark.parametrize("kind", ["dps", "dpr"])
def test_sums_where_the_loss_is_divided_already(rank, world_size, kind):
    mesh, options = replica_mesh(**{kind: 2, "gtp": 2})
    model, reference = build_pair(lambda: MLP().double())
    parallelize_module(model, mesh["gtp"], GTPStyle(GTPConfig(calculate_per_token_loss=True), min_numel=0, **options))
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).double()
    (model(local_slice(x, rank, world_size)).square().sum() / 1000).backward()
    (reference(x).square().sum() / 1000).backward()
    assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient", EXACT)


@ranks(8)
@pytest.mark.parametrize("order", [("gtp", "dps", "dpr"), pytest.param(("dpr", "dps", "gtp"), marks=pytest.mark.slow)])
def test_shards_and_copies_together(rank, world_size, order):
    mesh, options = replica_mesh(**dict.fromkeys(order, 2))
    case = next(c for c in MODEL_CASES if c.name == "llama")
    build, batch = case.in_float64(2 * world_size)
    model, reference = build_pair(build)
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30, **options))
    weight = next(p for p in model.parameters() if Shard(0) in p.placements)
    assert weight.device_mesh.mesh_dim_names == ("dpr", "gtp", "dps")
    assert weight.placements == (Replicate(), Shard(0), Shard(0))
    train_beside_reference(
        model, reference, batch, rank=rank, world_size=world_size, num_microbatches=2, rtol=EXACT, syncs_last_only=True
    )


@ranks(8)
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(dict(dps=2, gtp=2, tp=2), marks=pytest.mark.slow),
        pytest.param(dict(tp=2, gtp=2, dps=2), marks=pytest.mark.slow),
        pytest.param(dict(dpr=2, gtp=2, tp=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_with_tensor_parallelism(rank, sizes):
    mesh, options = replica_mesh(**sizes)
    model, reference = build_pair(lambda: TinyLlama().double())
    parallelize_module(model, mesh["tp"], _llama_tp_plan(2))
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30, **options))
    data_axes = [name for name in sizes if name != "tp"]
    data_rank = mesh[data_axes[0]].get_local_rank() * 2 + mesh[data_axes[1]].get_local_rank()
    train_beside_reference(
        model,
        reference,
        lambda step: torch.randint(0, 24, (8, 6), generator=torch.Generator().manual_seed(step)),
        rank=data_rank,
        world_size=4,
        num_microbatches=2,
        rtol=EXACT,
        syncs_last_only=True,
    )


class Rows(nn.Module):
    """One linear of any number of rows; the mean square of its output has a gradient of every element."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(12, num_rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@ranks(4)
@pytest.mark.parametrize("num_rows", [1, 3, 5, 7, 9, 17, 40])
@pytest.mark.parametrize("alignment", [None, 4])
def test_uneven_rows(rank, world_size, num_rows, alignment):
    """gtp ranks of unequal length, cut again: empty ones, and holes in the middle."""
    mesh, options = replica_mesh(dps=2, gtp=2)
    model, reference = build_pair(lambda: Rows(num_rows).double())
    config = GTPConfig(pad_for_alignment=alignment, param_dtype=torch.float64)
    parallelize_module(model, mesh["gtp"], GTPStyle(config, min_numel=0, **options))
    assert_close_to_reference(full_parameters(model), full_parameters(reference), "weight", 0)
    train_beside_reference(
        model,
        reference,
        lambda step: torch.randn(8, 12, generator=torch.Generator().manual_seed(step)).double(),
        rank=rank,
        world_size=world_size,
        num_microbatches=2,
        rtol=EXACT,
    )


@ranks(4)
def test_bf16_compute_shards_come_from_the_float32_masters(rank, world_size):
    mesh, options = replica_mesh(dps=2, gtp=2)
    model, reference = build_pair(lambda: MLP((16, 33, 8)))
    config = GTPConfig(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    parallelize_module(model, mesh["gtp"], GTPStyle(config, min_numel=0, **options))
    half = reference.bfloat16()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
    assert torch.equal(model(x), half(x.bfloat16()))
    # A step that only the masters can hold: too small for bf16.
    before = full_parameters(model)
    mean_square(model(x).float()).backward()
    torch.optim.SGD(model.parameters(), lr=1e-5).step()
    changed = [name for name, value in full_parameters(model).items() if not torch.equal(value, before[name])]
    assert changed == list(before)


def _one_step(model, rank, num_microbatches, syncs_last_only):
    for index in range(num_microbatches):
        set_requires_gradient_sync(model, index == num_microbatches - 1 or not syncs_last_only)
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(10 * rank + index))
        mean_square(model(x)).backward()


@ranks(4)
@pytest.mark.parametrize("kind", ["dps", "dpr"])
def test_replicas_are_reached_once_a_step(rank, kind):
    mesh, options = replica_mesh(**{kind: 2, "gtp": 2})
    model = MLP()
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=0, **options))
    num_weights = stats(model).num_sharded_weights
    for syncs_last_only in (False, True):
        reset_stats(model)
        _one_step(model, rank, 4, syncs_last_only)
        s = stats(model)
        assert s.num_reductions == 4 * num_weights
        assert s.num_replica_reductions == (1 if syncs_last_only else 4) * num_weights
        assert s.num_small_reductions == (1 if syncs_last_only else 4)


@ranks(4)
def test_compute_shards_are_gathered_once_a_step(rank):
    mesh, options = replica_mesh(dps=2, gtp=2)
    model = MLP()
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=0, **options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_weights = stats(model).num_sharded_weights
    for step in range(3):
        reset_stats(model)
        _one_step(model, rank, 4, True)
        assert stats(model).num_refreshes == num_weights if step else True  # before the first step nobody has signalled
        optimizer.step()
        optimizer.zero_grad()


@ranks(4)
def test_kept_back_gradients_are_not_in_grad_until_synchronised(rank, world_size):
    mesh, options = replica_mesh(dps=2, gtp=2)
    model, reference = build_pair(lambda: MLP().double())
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=0, **options))
    set_requires_gradient_sync(model, False)
    for step in range(2):
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).double()
        mean_square(model(local_slice(x, rank, world_size))).backward()
        mean_square(reference(x)).backward()
        assert all(param.grad is None for param in model.parameters())
        assert stats(model).num_pending == len(list(model.parameters()))
    finalize_grads(model)
    assert stats(model).num_pending == 0
    assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient", EXACT)


@ranks(4)
def test_an_optimizer_step_brings_out_what_was_kept_back(rank, world_size):
    mesh, options = replica_mesh(dpr=2, gtp=2)
    model, reference = build_pair(lambda: MLP().double())
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=0, **options))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference)]
    set_requires_gradient_sync(model, False)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).double()
    mean_square(model(local_slice(x, rank, world_size))).backward()
    mean_square(reference(x)).backward()
    assert all(param.grad is None for param in model.parameters())
    # An optimizer skips parameters without a gradient, so it has to find them there.
    for optimizer in optimizers:
        optimizer.step()
    assert_close_to_reference(full_parameters(model), full_parameters(reference), "weight", EXACT)


@ranks(4)
def test_a_weight_that_the_last_microbatch_does_not_use(rank, world_size):
    """What was kept back for it is brought out all the same."""

    class Skips(MLP):
        def forward(self, x, skip=False):
            for index, layer in enumerate(self.layers):
                x = x if skip and index == 1 else torch.tanh(layer(x))
            return x

    mesh, options = replica_mesh(dps=2, gtp=2)
    model, reference = build_pair(lambda: Skips((16, 32, 32, 8)).double())
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=0, **options))
    for skip in (False, True):
        set_requires_gradient_sync(model, skip)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(int(skip))).double()
        mean_square(model(local_slice(x, rank, world_size), skip)).backward()
        mean_square(reference(x, skip)).backward()
    assert stats(model).num_pending == 0
    assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient", EXACT)


@ranks(4)
@pytest.mark.parametrize("kind", ["dps", "dpr"])
def test_hooks_and_autograd_grad_see_the_sum_over_all_replicas(rank, world_size, kind):
    mesh, options = replica_mesh(**{kind: 2, "gtp": 2})
    model, reference = build_pair(lambda: MLP().double())
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=0, **options))
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).double()
    grads = torch.autograd.grad(mean_square(model(local_slice(x, rank, world_size))), list(model.parameters()))
    expected = torch.autograd.grad(mean_square(reference(x)), list(reference.parameters()))
    for grad, other in zip(grads, expected):
        assert_close_to_reference(grad.full_tensor(), other, "gradient", EXACT)
    for one in (model, reference):
        one.layers[1].weight.register_hook(lambda grad: 2 * grad)
    mean_square(model(local_slice(x, rank, world_size))).backward()
    mean_square(reference(x)).backward()
    assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient", EXACT)


@ranks(4)
def test_a_backward_that_raised_leaves_nothing_kept_back(rank, world_size):
    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("stop here")

    mesh, options = replica_mesh(dps=2, gtp=2)
    model, reference = build_pair(lambda: MLP().double())
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=0, **options))
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).double()
    mine = local_slice(x, rank, world_size)
    set_requires_gradient_sync(model, False)
    mean_square(model(mine)).backward()
    h = Stops.apply(torch.tanh(model.layers[0](mine)))
    with pytest.raises(RuntimeError, match="stop here"):
        mean_square(model.layers[2](torch.tanh(model.layers[1](h)))).backward()
    assert stats(model).num_pending > 0
    model.zero_grad()
    set_requires_gradient_sync(model, True)
    mean_square(model(mine)).backward()
    mean_square(reference(x)).backward()
    assert_close_to_reference(full_gradients(model), full_gradients(reference), "gradient", EXACT)


@ranks(4)
def test_evaluation_loading_and_hand_written_weights(rank):
    """Every way in which stored rows change reaches the gathered weights."""
    mesh, options = replica_mesh(dps=2, gtp=2)
    model, reference = build_pair(lambda: MLP().double())
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=0, **options))
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).double()

    def same():
        with torch.no_grad():
            assert torch.equal(model(x), reference(x))

    same()
    state = {name: 2 * value for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    reference.load_state_dict({name: 2 * value for name, value in reference.state_dict().items()})
    same()
    for one in (model, reference):
        with torch.no_grad():
            for param in one.parameters():
                param.mul_(0.5)
    same()
    for one in (model, reference):
        for param in one.parameters():
            local = param.to_local() if one is model else param
            local.data.add_(1.0)
    refresh(model)
    same()
    for param, other in zip(model.parameters(), reference.parameters()):
        assert torch.equal(param.full_tensor(), other)


def _bytes(model, optimizer):
    """(parameters, gradients, optimizer state) of this rank in bytes."""
    params = list(model.parameters())
    local = [p._local_tensor for p in params], [p.grad._local_tensor for p in params]
    state = [
        value.to_local() if hasattr(value, "to_local") else value
        for per_param in optimizer.state.values()
        for name, value in per_param.items()
        if name != "step"
    ]
    return [sum(t.numel() * t.element_size() for t in tensors) for tensors in (*local, state)]


@ranks(4)
@pytest.mark.parametrize("dps", [1, 2, 4])
def test_memory_falls_with_the_number_of_shards(rank, dps):
    """Parameters, gradients and Adam's moments: 16 bytes an element over (gtp x dps), and bf16 compute shards over
    gtp."""
    sizes = dict(dps=dps, gtp=4 // dps)
    mesh, options = replica_mesh(**sizes)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    numel = sum(p.numel() for p in model.parameters())
    parallelize_module(model, mesh["gtp"], GTPStyle(GTPConfig(param_dtype=torch.bfloat16), **options))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(2):
        model(torch.randn(2, 64)).float().square().mean().backward()
        optimizer.step()
    part = numel // 4
    assert _bytes(model, optimizer) == [4 * part, 4 * part, 8 * part]
    copies = [m._gtp.weights["weight"]._copy for m in model]
    assert sum(c.numel() * c.element_size() for c in copies) == 2 * numel // sizes["gtp"]


@ranks(4)
def test_bad_meshes_are_refused(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dps", "gtp"))
    model = MLP()
    with pytest.raises(ValueError, match=r"optimizer_shard_mesh.*shares ranks \[\d\] with the gtp axis"):
        parallelize_module(model, mesh["gtp"], GTPStyle(optimizer_shard_mesh=mesh["gtp"]))
    with pytest.raises(ValueError, match=r"replicate_mesh.*has 2 axes and must have one: pass mesh\[.*\]._flatten"):
        parallelize_module(model, mesh["gtp"], GTPStyle(replicate_mesh=mesh))
    with pytest.raises(ValueError, match=r"replicate_mesh.*shares ranks"):
        parallelize_module(model, mesh["gtp"], GTPStyle(replicate_mesh=mesh["dps"], optimizer_shard_mesh=mesh["dps"]))
    assert not any(hasattr(p, "placements") for p in model.parameters())
    dist.barrier()


@ranks(4)
def test_initialisation_and_checked_states(rank, world_size):
    """Whatever asks where in the weight this rank's stored rows lie: the padding row, and the check of compute
    shards."""
    mesh, options = replica_mesh(dps=2, gtp=2)

    def build():
        return nn.Sequential(nn.Embedding(10, 8, padding_idx=7), nn.Linear(8, 9))

    for padding_idx in (0, 3, 7, 9):
        model, reference = build_pair(build)
        config = GTPConfig(check_param_states=True, param_dtype=torch.bfloat16)
        parallelize_module(model, mesh["gtp"], GTPStyle(config, min_numel=0, **options))
        for one in (model, reference):
            one[0].padding_idx = padding_idx
            torch.manual_seed(3)
            for module in one:
                module.reset_parameters()
        assert_close_to_reference(full_parameters(model), full_parameters(reference), "weight", 0)
        assert not model[0].weight.full_tensor()[padding_idx].any()
        model(torch.arange(10)).float().square().sum().backward()
    with torch.no_grad():
        model[1].weight._local_tensor.data.add_(1.0)  # leaves no trace
    with pytest.raises(RuntimeError, match="illegal transition of the compute shard from 'stale' to 'gathered'"):
        model[1]._gtp.weights["weight"].check_copy()


@ranks(4)
@pytest.mark.parametrize("kind", ["dps", "dpr"])
def test_replicas_are_reached_under_the_backward(rank, monkeypatch, kind):
    """The sums over replicas start while later layers' gradients are still to come, not after the backward."""
    mesh, options = replica_mesh(**{kind: 2, "gtp": 2})
    model = MLP((16, 32, 32, 32, 32, 8), bias=False)
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=0, **options))
    domain = model.layers[0]._gtp.weights["weight"].runtime.domain
    events = []

    def logged(name, call):
        return lambda *args, **kwargs: (events.append(name), call(*args, **kwargs))[1]

    monkeypatch.setattr(domain.transport, "reduce_scatter", logged("gtp", domain.transport.reduce_scatter))
    if kind == "dps":
        over = domain.shard_transport
        monkeypatch.setattr(over, "reduce_scatter", logged("replicas", over.reduce_scatter))
    else:
        over = domain.replicate_transport
        monkeypatch.setattr(over, "start_all_reduce", logged("replicas", over.start_all_reduce))
    model(torch.randn(2, 16)).square().mean().backward()
    assert events.count("gtp") == events.count("replicas") == 5
    assert events[:2] == ["gtp", "gtp"] and events[2:8] == ["replicas", "gtp"] * 3


@ranks(2)
@pytest.mark.parametrize("param_dtype", [None, torch.float32])
def test_what_a_graph_saved_on_an_axis_of_size_one_stays(rank, world_size, param_dtype):
    """Nothing is gathered there, and the compute shard is rewritten in place while a graph still needs its values."""
    mesh, options = replica_mesh(dps=2, gtp=1)
    model, reference = build_pair(lambda: WithConv().double())
    parallelize_module(model, mesh["gtp"], GTPStyle(GTPConfig(param_dtype=param_dtype), min_numel=0, **options))
    assert stats(model).num_sharded_weights == 2
    x, theirs = (torch.randn(4, 6, 16, generator=torch.Generator().manual_seed(rank)).double() for _ in range(2))
    x.requires_grad_()
    theirs.requires_grad_()
    loss = model(x).double().square().mean()
    with torch.no_grad():
        model.conv.weight.mul_(3)
        changed = model(x)
    assert not torch.allclose(changed.double(), reference(theirs), rtol=0.1)  # the shard was rewritten
    loss.backward()
    reference(theirs).square().mean().backward()
    assert_close_to_reference(x.grad, theirs.grad, "gradient of the input", EXACT if param_dtype is None else 1e-5)
    assert stats(model).gather_bytes == 0 and stats(model).live_lease_bytes == 0
