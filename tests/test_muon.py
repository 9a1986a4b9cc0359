"""Muon on sharded parameters beside torch.optim.Muon on whole matrices with the same gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from gtp_dtensor import GTPConfig, GTPStyle, Muon, clip_grad_norm_, muon_param_groups
from gtp_dtensor.optim import matrices
from gtp_dtensor.optim.muon import MATCH_RMS, ORIGINAL, _cost
from tests.harness import ranks
from tests.moe import Experts
from tests.reference import full, full_parameters, replica_options

DIMS = (1, 3, 18, 40, 128)  # rows
COLUMNS = 24
LAYOUT = {"fused.weight": (12, 2, 2)}  # three times: no rank's rows begin like another's; scales differ


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


class Net(nn.Module):
    """Matrices of many heights, and what Muon is not for."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, COLUMNS)
        self.linears = nn.ModuleList(nn.Linear(COLUMNS, rows) for rows in DIMS)
        self.fused = nn.Linear(COLUMNS, 48, bias=False)
        self.norm = nn.RMSNorm(COLUMNS)
        self.experts = Experts(3, COLUMNS, 20)  # cut within each expert
        self.stack = Experts(4, COLUMNS, 6)  # dealt out whole
        self.output = nn.Linear(COLUMNS, 10, bias=False)


def built(axes, device="cpu"):
    """(sharded, the same whole, mesh): the axes are "tp", "gtp", "dps" and "dpr"; "egtp" where it is not gtp."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Net().to(device))
    model, whole = models
    axes, egtp = dict(axes), axes.get("egtp")
    axes.pop("egtp", None)
    mesh = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
    if "tp" in axes:
        plan = {f"linears.{n}": ColwiseParallel() if n % 2 else RowwiseParallel() for n in range(len(DIMS))}
        parallelize_module(model, mesh["tp"], plan)
    replicas = of_experts = replica_options(mesh)
    expert_mesh = mesh["gtp"]
    if egtp is not None:
        grid = init_device_mesh(device, (mesh.size() // egtp, egtp), mesh_dim_names=("dps", "egtp"))
        of_experts, expert_mesh = replica_options(grid), grid["egtp"]
    style = GTPStyle(
        GTPConfig(), is_expert=True, modules=["experts", "stack"], num_data_ranks=2, min_numel=30, **of_experts
    )
    parallelize_module(model, expert_mesh, style)
    parallelize_module(model, mesh["gtp"], GTPStyle(min_numel=30, **replicas))
    return model, whole, mesh


def give_gradients(model, whole, step, scale=1.0):
    """The same logical gradients to both."""
    generator = torch.Generator().manual_seed(step)
    for param, other in zip(model.parameters(), whole.parameters(), strict=True):
        other.grad = scale * torch.randn(other.shape, generator=generator).to(other.device)
        if isinstance(param, DTensor):
            param.grad = distribute_tensor(other.grad.clone(), param.device_mesh, param.placements)
        else:
            param.grad = other.grad.clone()


class Reference:
    """torch's optimizers on a whole model, each matrix a parameter of its own."""

    def __init__(self, whole, layouts=LAYOUT, **settings):
        self.whole, self.matrices, rest = whole, [], []
        for name, param in whole.named_parameters():
            if name.startswith(("embedding", "output")) or param.dim() == 1:
                rest.append(param)
            elif param.dim() == 3:
                self.matrices += [(param, (expert,)) for expert in range(len(param))]
            elif name in layouts:
                groups = torch.arange(len(param)).view(-1, sum(layouts[name]))
                self.matrices += [(param, (part.reshape(-1),)) for part in groups.split(layouts[name], 1)]
            else:
                self.matrices.append((param, (slice(None),)))
        self.parts = [nn.Parameter(param.detach()[place].clone()) for param, place in self.matrices]
        self.muon = torch.optim.Muon(self.parts, **settings)
        shared = {"lr": settings["lr"], "weight_decay": settings["weight_decay"]}
        self.adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), eps=1e-8, foreach=True, **shared)

    @torch.no_grad()
    def step(self):
        for part, (param, place) in zip(self.parts, self.matrices):
            part.grad = param.grad[place].clone()
        self.muon.step()
        self.adamw.step()
        for part, (param, place) in zip(self.parts, self.matrices):
            param[place] = part


def settings_of(scale):
    return {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": scale}


def worst(model, whole):
    """The largest error of a parameter, of its norm, by name."""
    found = full_parameters(model)
    errors = {n: ((found[n] - p).norm() / p.norm()).item() for n, p in whole.named_parameters()}
    name = max(errors, key=errors.__getitem__)
    return errors[name], name


GRIDS = [
    {"gtp": 2},
    {"gtp": 4},
    {"gtp": 2, "tp": 2},
    {"dps": 2, "gtp": 2},
    {"dpr": 2, "gtp": 2},
    {"dpr": 2, "gtp": 1, "tp": 2},
    {"gtp": 4, "egtp": 2},
]


def check(axes, algorithm, scale, num_steps=3, device="cpu"):
    model, whole, _ = built(axes, device)
    groups = muon_param_groups(model, row_layouts=LAYOUT)
    optimizer = Muon(groups, algorithm=algorithm, **settings_of(scale))
    reference = Reference(whole, **settings_of(scale))
    for step in range(num_steps):
        give_gradients(model, whole, step)
        optimizer.step()
        reference.step()
    error, name = worst(model, whole)
    assert error < 1e-6, (error, name)
    return optimizer, model


@ranks(2)
@pytest.mark.parametrize("algorithm", ["home_rank", "duplicated"])
@pytest.mark.parametrize("scale", [ORIGINAL, slow(MATCH_RMS)])
def test_two_ranks_as_one_process(algorithm, scale):
    check({"gtp": 2}, algorithm, scale)


@ranks(4)
@pytest.mark.parametrize("axes", [*map(slow, GRIDS[1:3]), GRIDS[3], *map(slow, GRIDS[4:])], ids=str)
@pytest.mark.parametrize("algorithm", ["home_rank", slow("duplicated")])
def test_four_ranks_as_one_process(axes, algorithm):
    check(axes, algorithm, MATCH_RMS)


@ranks(4, device="cuda", timeout=240, group_timeout=120)
@pytest.mark.parametrize("algorithm", ["home_rank", "duplicated"])
def test_four_ranks_on_a_gpu(algorithm):
    check({"gtp": 4, "egtp": 2}, algorithm, MATCH_RMS, device="cuda")


@ranks(8)
@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"dps": 2, "gtp": 2, "tp": 2}, {"dpr": 2, "gtp": 4}, {"gtp": 4, "tp": 2}], ids=str)
def test_eight_ranks_as_one_process(axes):
    check(axes, "home_rank", ORIGINAL)


@ranks(4)
@pytest.mark.parametrize("axes", [{"gtp": 2, "tp": 2}, slow({"dpr": 2, "gtp": 2})], ids=str)
def test_both_algorithms_and_small_rounds_have_the_same_bits(monkeypatch, axes):
    found = []
    for algorithm, most in (("home_rank", 1 << 20), ("duplicated", 1 << 20), ("home_rank", 500)):
        monkeypatch.setattr("gtp_dtensor.optim.muon._MOST_ELEMENTS", most)
        optimizer, model = check(axes, algorithm, ORIGINAL, 2)
        plans = [len(rounds) for rounds in optimizer._plans.values()]
        assert max(plans) > 1 if most == 500 else max(plans) == 1
        found.append(full_parameters(model))
    for others in found[1:]:
        assert all(torch.equal(others[name], value) for name, value in found[0].items())


@ranks(2)
def test_the_next_round_travels_while_one_is_computed(monkeypatch):
    monkeypatch.setattr("gtp_dtensor.optim.muon._MOST_ELEMENTS", 500)
    model, whole, _ = built({"gtp": 2})
    give_gradients(model, whole, 0)
    optimizer, happened = Muon(muon_param_groups(model), **settings_of(ORIGINAL)), []
    for name in ("send", "compute", "give_back", "take"):

        def noted(self, *args, name=name, original=getattr(matrices.Round, name)):
            happened.append((name, self))
            return original(self, *args)

        monkeypatch.setattr(matrices.Round, name, noted)
    optimizer.step()
    (rounds,) = optimizer._plans.values()
    place = {event: number for number, event in enumerate(happened)}
    assert len(rounds) > 2 and len(place) == len(happened) == 4 * len(rounds)
    for one, following in zip(rounds, rounds[1:]):
        assert place["send", following] < place["compute", one] < place["give_back", one] < place["compute", following]
        assert place["compute", following] < place["take", one]  # results travel, too, while the next are computed


@ranks(2)
def test_a_reference_that_sees_only_shards_is_far_off(rank):
    """Arms the tests above: orthogonalizing each rank's rows is another optimizer."""
    model, whole, mesh = built({"gtp": 2})
    give_gradients(model, whole, 0)
    weight = model.linears[4].weight
    alone = nn.Parameter(weight._local_tensor.clone())
    alone.grad = weight.grad._local_tensor.clone()
    torch.optim.Muon([alone], **settings_of(ORIGINAL)).step()
    Muon(muon_param_groups(model), **settings_of(ORIGINAL)).step()
    assert (alone - weight._local_tensor).norm() / weight._local_tensor.norm() > 1e-3


@ranks(4)
def test_work_is_dealt_out_over_all_ranks(rank):
    """Replicas too; of equal pieces one is sent."""
    model, whole, _ = built({"dpr": 2, "gtp": 2})
    give_gradients(model, whole, 0)
    optimizer = Muon(muon_param_groups(model), **settings_of(ORIGINAL))
    optimizer.step()
    (rounds,) = optimizer._plans.values()
    found = [matrix for one in rounds for matrix in one.matrices]
    assert {matrix.home for matrix in found} == {0, 1, 2, 3}
    for matrix in found:
        senders = matrix.senders(matrix.home)
        regions = [matrix.regions[sender] for sender in senders]
        assert len(set(regions)) == len(regions)
        assert {sender // 2 for sender in senders} == {matrix.home // 2}  # the home's own replica
        assert sum(region.numel for region in regions) == matrix.shape[0] * matrix.shape[1]
    assert any(len(matrix.senders(matrix.home)) == 2 for matrix in found)


def test_cost_of_llama_8b_is_balanced():
    shapes = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
    found = [
        matrices.Matrix(torch.empty(0), None, shape, _cost(*shape, (), 5), []) for _ in range(32) for shape in shapes
    ]
    loads = matrices.deal_out(found, 8)
    assert max(loads) / (sum(loads) / 8) < 1.02
    for one in matrices.rounds_of(found, 8, 64 << 20):
        by_home = [sum(m.cost for m in one if m.home == rank) for rank in range(8)]
        assert max(by_home) / (sum(by_home) / 8) < 1.3


@ranks(4)
def test_state_is_loaded_at_another_topology(rank, tmp_path):
    model, whole, _ = built({"gtp": 2, "tp": 2})
    optimizer = Muon(muon_param_groups(model), **settings_of(ORIGINAL))
    reference = Reference(whole, {}, **settings_of(ORIGINAL))
    for step in range(2):
        give_gradients(model, whole, step)
        optimizer.step()
        reference.step()
    save({"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=tmp_path)
    other, _, _ = built({"gtp": 4})
    resumed = Muon(muon_param_groups(other), **settings_of(ORIGINAL))
    state = {"model": other.state_dict(), "optimizer": get_optimizer_state_dict(other, resumed)}
    load(state, checkpoint_id=tmp_path)
    other.load_state_dict(state["model"])
    set_optimizer_state_dict(other, resumed, state["optimizer"])
    for step in range(2, 4):
        give_gradients(other, whole, step)
        resumed.step()
        reference.step()
    error, name = worst(other, whole)
    assert error < 1e-6, (error, name)


@ranks(4)
def test_clipping_before_a_step(rank):
    """gtp is not egtp: gradients of experts and others are clipped by one norm."""
    model, whole, _ = built({"gtp": 4, "egtp": 2})
    optimizer = Muon(muon_param_groups(model, row_layouts=LAYOUT), **settings_of(ORIGINAL))
    reference = Reference(whole, **settings_of(ORIGINAL))
    for step in range(2):
        give_gradients(model, whole, step, scale=5.0)
        norm = clip_grad_norm_(model.parameters(), 1.0)
        expected = nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        assert abs(full(norm) / expected - 1) < 1e-6 and expected > 1.0
        optimizer.step()
        reference.step()
    error, name = worst(model, whole)
    assert error < 1e-5, (error, name)  # factors differ by the norm's last bits, and bfloat16 rounds what they scale


def test_groups_and_refusals():
    net = Net()
    groups = muon_param_groups(net, adamw=["linears.0.*"], row_layouts=LAYOUT)
    stacks = [f"{name}.w{number}" for name in ("experts", "stack") for number in (1, 3, 2)]
    names = {(group["uses_muon"], group.get("row_layout")): [n for n, _ in group["params"]] for group in groups}
    assert names[True, (12, 2, 2)] == ["fused.weight"]
    assert names[True, ()] == [*(f"linears.{n}.weight" for n in range(1, 5)), *stacks]
    assert {"embedding.weight", "output.weight", "norm.weight", "linears.0.weight"} < set(names[False, None])
    assert sum(map(len, names.values())) == len(list(net.parameters()))
    with pytest.raises(ValueError, match=r"no parameter matches 'nothing\.\*'"):
        muon_param_groups(net, adamw=["nothing.*"])
    with pytest.raises(ValueError, match=r"\(7,\) of pattern 'fused\*' does not divide the 48 rows of fused\.weight"):
        muon_param_groups(net, row_layouts={"fused*": (7,)})
    with pytest.raises(ValueError, match=r"linears\.0\.bias of shape \(1,\) is no matrix"):
        Muon(net.named_parameters())
    with pytest.raises(ValueError, match=r"adjust_lr_fn='rms'.*original"):
        Muon(net.linears[1].parameters(), adjust_lr_fn="rms")
    with pytest.raises(ValueError, match=r"algorithm='both'.*home_rank, duplicated"):
        Muon([net.fused.weight], algorithm="both")
    with pytest.raises(ValueError, match=r"row layout \(3, 4\) does not divide 48 rows"):
        Muon([("fused.weight", net.fused.weight)], row_layout=(3, 4))
    optimizer = Muon([net.fused.weight])
    with pytest.raises(ValueError, match=r"parameter 0 of shape \(24,\) is no matrix"):
        optimizer.add_param_group({"params": [net.norm.weight]})
    with pytest.raises(ValueError, match=r"Muon\(lr=-1\): must not be negative"):
        optimizer.add_param_group({"params": [net.output.weight], "lr": -1})
    assert len(optimizer.param_groups) == 1


class Tower(nn.Module):
    """Under tensor parallelism alone; gradients then come as torch leaves them: partial sums, and whole where parameters
    are cut."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(20, 8), nn.RMSNorm(8)
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 20)

    def forward(self, tokens):
        return self.down(self.up(self.norm(self.embedding(tokens))))


@ranks(2)
def test_gradients_that_lie_elsewhere_than_their_parameters(rank, mesh):
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Tower())
    plan = {"up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(), "norm": SequenceParallel()}
    plan["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(models[0], mesh, plan)
    tokens = torch.arange(20).view(2, 10)
    optimizers = [Muon(muon_param_groups(model), **settings_of(ORIGINAL)) for model in models]
    for _ in range(2):
        for model in models:
            model(tokens).square().mean().backward()
        of_norm, of_embedding = models[0].norm.weight, models[0].embedding.weight
        assert of_norm.grad.placements[0].is_partial() and of_embedding.grad.placements != of_embedding.placements
        others = [(p, p.grad.redistribute(placements=p.placements).full_tensor()) for p in models[0].parameters()]
        for (_, grad), other in zip(others, models[1].parameters(), strict=True):
            assert grad.allclose(other.grad, rtol=1e-4, atol=1e-6)
            other.grad = grad  # the same bits: Newton-Schulz in bfloat16 makes much of the last one
        for model, optimizer in zip(models, optimizers):
            optimizer.step()
            optimizer.zero_grad()
    error, name = worst(*models)
    assert error < 1e-6, (error, name)


@ranks(4)
def test_ranks_that_belong_to_other_groups_too(rank):
    """The ranks of a mesh make Muon's group among themselves, however many groups each of them has."""
    dist.new_group([0])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "gtp"))["gtp"]
    model, whole = (nn.Sequential(nn.Linear(8, 8, bias=False)) for _ in range(2))
    whole.load_state_dict(model.state_dict())
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    optimizer, reference = (Muon(one.parameters(), **settings_of(ORIGINAL)) for one in (model, whole))
    give_gradients(model, whole, 0)
    optimizer.step()
    made = dict(optimizer._groups)
    optimizer.load_state_dict(optimizer.state_dict())
    give_gradients(model, whole, 1)
    optimizer.step()
    (group,) = made.values()
    assert group.size() == 2 and optimizer._groups == made  # kept, no other communicator
    for step in range(2):
        give_gradients(model, whole, step)
        reference.step()
    assert worst(model, whole)[0] < 1e-6


@ranks(2)
def test_gradients_that_not_all_ranks_have(rank, mesh):
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2)))
    parallelize_module(model, mesh, GTPStyle(min_numel=30))
    for param in list(model.parameters())[rank:]:
        param.grad = torch.zeros_like(param)
    with pytest.raises(ValueError, match=r"Muon: rank 0 has gradients of 2 parameters, rank 1 of 1"):
        Muon(model.parameters()).step()


def test_learning_rates_that_are_tensors():
    nets = [nn.Linear(4, 4), nn.Linear(4, 4)]
    nets[1].load_state_dict(nets[0].state_dict())
    for net, lr in zip(nets, (0.02, torch.tensor(0.02, dtype=torch.float64))):
        optimizer = Muon(muon_param_groups(net), lr=lr)
        net(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
    assert all(map(torch.equal, nets[0].parameters(), nets[1].parameters()))


def test_convolutions_are_for_adamw():
    """Mamba's has three dims, and is no stack of matrices."""
    net = nn.Sequential(nn.Conv1d(8, 8, 4, groups=8), nn.Linear(8, 8, bias=False), nn.EmbeddingBag(4, 8))
    for_muon, rest = muon_param_groups(net)
    assert [name for name, _ in for_muon["params"]] == ["1.weight"]
    assert {name for name, _ in rest["params"]} == {"0.weight", "0.bias", "2.weight"}


@pytest.mark.parametrize(
    "setting, message",
    [
        ({"momentum": 1.0}, r"momentum=1\.0\): must be from 0 to below 1"),
        ({"betas": (0.9, 1.5)}, r"betas=1\.5\): must be from 0 to below 1"),
        ({"eps": -1.0}, r"eps=-1\.0\): must not be negative"),
        ({"ns_steps": 100}, r"ns_steps=100\): must be from 1 to 99"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients=\(1\.0, 2\.0\)\): three numbers"),
        ({"row_layout": (0, 4)}, r"parameter 0 .* row layout \(0, 4\) does not divide 4 rows"),
        ({"row_layout": (-4, 8)}, r"parameter 0 .* row layout \(-4, 8\) does not divide 4 rows"),
    ],
)
def test_settings_that_make_no_sense(setting, message):
    with pytest.raises(ValueError, match=message):
        Muon([nn.Parameter(torch.ones(4, 4))], **setting)


@ranks(2)
def test_a_training_step(mesh, rank):
    """Through the model: compute shards follow what the optimizer wrote."""
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8, bias=False)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    parallelize_module(models[0], mesh, GTPStyle(min_numel=20))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for model, batch in zip(models, (x.chunk(2)[rank], x)):
        optimizer = Muon(muon_param_groups(model), **settings_of(ORIGINAL))
        found = []
        for _ in range(5):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if model is models[0]:
                dist.all_reduce(loss, dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
                loss /= 2
            found.append(loss.item())
        losses.append(torch.tensor(found))
    assert losses[0].allclose(losses[1], rtol=1e-5) and losses[1][-1] < 0.9 * losses[1][0]
