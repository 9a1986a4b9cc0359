"""The extra state of TransformerEngine's modules, scales and histories of delayed scaling, without its pickle."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, load, save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from gtp_dtensor import CheckedLoadPlanner, GTPStyle
from gtp_dtensor.te import amax_group, plain_extra_state
from tests import te_stand_in as te
from tests.harness import ranks
from tests.reference import mean_square, replica_options

DIM, EXPERTS, HISTORY = 64, 2, 3
PARTS = ("scale", "amax_history")
TE_ALLOWS_PICKLES = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


def build(recipe):
    """With parameters in FP8 of ``recipe``; without where it is None."""
    with te.quantized_model_init(recipe):
        return nn.Sequential(te.Linear(DIM, DIM), te.GroupedLinear(EXPERTS, DIM, DIM))


def delayed(length=HISTORY):
    return te.Recipe("delayed", amax_history_len=length)


def call(model, x):
    return model[1](model[0](x), [4, 5])


def scalings(layer):
    return [getattr(layer.fp8_meta[way], part) for way in ("scaling_fwd", "scaling_bwd") for part in PARTS]


def batch_of(rank, step):
    return torch.randn(9, DIM, generator=torch.Generator().manual_seed(100 * step + rank))


def trained(mesh, rank, recipe, **options):
    model = parallelize_module(build(recipe), mesh, GTPStyle(**options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    group = amax_group(model)
    for step in range(3):
        with te.autocast(recipe, group):
            y = call(model, batch_of(rank, step))
        mean_square(y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@ranks(4)
def test_training_goes_on_from_a_checkpoint(rank, tmp_path):
    """Saved at gtp 2; loaded at gtp 4, in modules that know the length of their histories or do not, and unsharded."""
    with te.installed(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv(TE_ALLOWS_PICKLES, raising=False)
        recipe = delayed()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dps", "gtp"))
        model = trained(mesh["gtp"], rank, recipe, **replica_options(mesh))
        for layer in model:
            assert all((part != start).any() for part, start in zip(scalings(layer), (1, 0, 1, 0)))
        save(model.state_dict(), checkpoint_id=tmp_path)
        saved = FileSystemReader(tmp_path).read_metadata().state_dict_metadata["1._extra_state"]
        assert [tuple(chunk.sizes) for chunk in saved.chunks] == [(48 + 4 * 5 * EXPERTS * (1 + HISTORY),)]
        whole_axis = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
        native, other = (parallelize_module(build(one), whole_axis, GTPStyle()) for one in (recipe, None))
        plain = plain_extra_state(build(None))
        lengths = []
        for one in (native, other, plain):
            state = dict(one.state_dict())
            lengths.append(state["1._extra_state"].numel())
            if one is plain:
                for index in range(EXPERTS):
                    del state[f"1.weight{index}"]
                state["1.weight"] = torch.empty(EXPERTS, DIM, DIM)
            load(state, checkpoint_id=tmp_path, planner=CheckedLoadPlanner())
            one.load_state_dict(state)
            for mine, layer in zip(one, model):
                assert all(map(torch.equal, scalings(mine), scalings(layer)))
        assert lengths == [saved.size[0], 0, 0]
        outs = []
        for one in (model, native, other, plain):
            with te.autocast(recipe), torch.no_grad():
                outs.append(call(one, batch_of(rank, 9)))
        assert all(torch.equal(outs[0], out) for out in outs[1:])
        again = dict(plain.state_dict())
        assert torch.equal(again["1._extra_state"], model.state_dict()["1._extra_state"])


@ranks(2)
def test_what_is_no_state_of_this_module(mesh, rank):
    with te.installed(), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delenv(TE_ALLOWS_PICKLES, raising=False)
        model = trained(mesh, rank, delayed())
        saved = model[0].get_extra_state()
        for broken in (
            saved[:-4],
            torch.cat([saved, saved[:4]]),
            torch.where(torch.arange(len(saved)) == 16, 0, saved),
        ):
            with pytest.raises(ValueError, match=r"the extra state of 0 GTPLinear has \d+ bytes.*broken"):
                model[0].set_extra_state(broken)
        with pytest.raises(ValueError, match=r"the extra state of 1 GTPGroupedLinear has scales of 3 and 2 .* 6 and 4"):
            model[1].set_extra_state(saved)
        with te.quantized_model_init(te.Recipe("current")):
            current = plain_extra_state(te.Linear(DIM, DIM))
        current.set_extra_state(saved)  # whose recipe needs none of it
        assert "scaling_fwd" not in current.fp8_meta and current.get_extra_state().numel() == 0
        for length in (2, 5):
            with te.quantized_model_init(delayed(length)):
                layer = plain_extra_state(te.Linear(DIM, DIM))
            layer.set_extra_state(saved)
            mine, history = (one.fp8_meta["scaling_fwd"].amax_history for one in (layer, model[0]))
            assert torch.equal(mine[:HISTORY], history[:length]) and not mine[HISTORY:].any() and len(mine) == length
        stateless = type("Stateless", (te.Linear,), {"get_extra_state": nn.Module.get_extra_state})
        assert not parallelize_module(nn.Sequential(stateless(DIM, DIM)), mesh, GTPStyle())[0].state_dict().keys() - {
            "weight",
            "bias",
        }
        assert plain_extra_state(layer) is layer and type(layer).__mro__[1] is te.Linear
        # TE's own.
        recipe = delayed(te.HISTORY)
        plain = build(None)
        with te.autocast(recipe):
            mean_square(call(plain, batch_of(rank, 0))).backward()
        sharded = parallelize_module(build(recipe), mesh, GTPStyle())
        with pytest.raises(RuntimeError, match="pickled Transformer Engine"):
            sharded[0].set_extra_state(plain[0].get_extra_state())
        monkeypatch.setenv(TE_ALLOWS_PICKLES, "1")
        for mine, theirs in zip(sharded, plain):
            mine.set_extra_state(theirs.get_extra_state())
            assert all(map(torch.equal, scalings(mine), scalings(theirs)))


@ranks(2)
def test_scales_that_are_loaded_alone_count(mesh, rank):
    """A weight that was quantized before is quantized anew."""
    with te.installed():
        recipe = delayed()
        model = trained(mesh, rank, recipe)
        saved = [layer.get_extra_state() for layer in model]
        outs = []
        for _ in range(2):
            with te.autocast(recipe), torch.no_grad():
                outs.append(call(model, batch_of(rank, 9)))
            for layer, state in zip(model, saved):
                values = state.clone()
                values[48:].view(torch.float32).mul_(0.25)
                layer.set_extra_state(values)
        assert not torch.equal(*outs)
        for layer, state in zip(model, saved):
            layer.set_extra_state(state)
        with te.autocast(recipe), torch.no_grad():
            assert torch.equal(outs[0], call(model, batch_of(rank, 9)))
