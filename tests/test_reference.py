"""The reference and its comparisons, proved on FSDP2: right runs agree, and every kind of wrong run is caught."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.harness import ranks
from tests.models import MLP, MODEL_CASES, TinyLlama
from tests.reference import (
    assert_close_to_reference,
    assert_equal_to_reference,
    build_pair,
    fill_with_integers,
    full_gradients,
    full_parameters,
    local_slice,
    train_beside_reference,
)


@ranks(2)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("case", MODEL_CASES, ids=str)
def test_fsdp2_agrees_with_the_reference(mesh, rank, world_size, case, optimizer):
    model, reference = build_pair(case.build)
    fully_shard(model, mesh=mesh)
    losses = train_beside_reference(
        model,
        reference,
        lambda step: case.batch(8, seed=step % 2),
        rank=rank,
        world_size=world_size,
        optimizer=optimizer,
        num_steps=3,
        num_microbatches=2,
    )
    assert losses[2] < losses[0]  # the same batch again: it learns


@ranks(4)
def test_fsdp2_agrees_on_uneven_rows_and_four_ranks(mesh, rank, world_size):
    case = next(case for case in MODEL_CASES if case.name == "uneven_mlp")
    model, reference = build_pair(case.build)
    fully_shard(model, mesh=mesh)
    train_beside_reference(model, reference, lambda step: case.batch(8, step), rank=rank, world_size=world_size)


@ranks(2)
def test_wrong_gradient_scale_is_caught(mesh, rank, world_size):
    model, reference = build_pair(MLP)
    fully_shard(model, mesh=mesh)
    model.layers[1].register_full_backward_hook(lambda module, grad_in, grad_out: (grad_in[0] * (1 + 1e-5),))
    message = r"gradient of step 0 of layers\.0\.(weight|bias): relative error 1\.\d+e-05"
    with pytest.raises(AssertionError, match=message):
        train_beside_reference(
            model,
            reference,
            lambda step: torch.randn(4, 16, generator=torch.Generator().manual_seed(step)),
            rank=rank,
            world_size=world_size,
        )


@ranks(2)
def test_integers_are_exact_through_fsdp2(mesh, rank, world_size):
    model, reference = build_pair(_linears, fill_with_integers)
    fully_shard(model, mesh=mesh)
    batch = torch.randint(-2, 3, (4, 8), generator=torch.Generator().manual_seed(0)).float()
    mine, expected = model(local_slice(batch, rank, world_size)), reference(batch)
    assert_equal_to_reference(mine, local_slice(expected, rank, world_size), "output")
    mine.sum().backward()
    (expected.sum() / world_size).backward()
    assert_equal_to_reference(full_gradients(model), full_gradients(reference), "gradient")


def _linears() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8, bias=False))


def test_integers_tell_neighbours_apart():
    model, reference = build_pair(_linears, fill_with_integers)
    weights = [model[index].weight for index in range(3)]
    assert all((weight == weight.round()).all() and weight.abs().max() <= 2 for weight in weights)
    assert len({tuple(weight.flatten().tolist()) for weight in weights}) == 3
    model[0].weight.data, model[1].weight.data = model[1].weight.data, model[0].weight.data
    with pytest.raises(AssertionError, match=r"weight of 0\.weight: .* elements differ"):
        assert_equal_to_reference(full_parameters(model), full_parameters(reference), "weight")
    x = torch.ones(1, 8)
    assert not torch.equal(model(x), reference(x))  # the swap of two reads shows in the output


def test_integers_refuse_what_cannot_be_told_apart():
    with pytest.raises(ValueError, match="too small to differ"):
        fill_with_integers(nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in range(8)))


def test_comparison_names_the_weight_and_the_worst_error_first():
    expected = {"a": torch.ones(4), "b": torch.ones(4), "c": None}
    actual = {"a": torch.tensor([1.0, 1.0, 1.0, 1.1]), "b": torch.tensor([1.0, 1.0, 1.0, 2.0]), "c": torch.ones(1)}
    with pytest.raises(AssertionError) as caught:
        assert_close_to_reference(actual, expected, "gradient")
    lines = str(caught.value).splitlines()
    assert "gradient of c: is a tensor" in lines[1]
    assert "gradient of b: relative error 5.000e-01" in lines[2]
    assert "gradient of a: relative error 5.000e-02" in lines[3]


@pytest.mark.parametrize(
    "actual",
    [
        {"a": torch.full((4,), float("nan"))},
        {"a": torch.full((4,), float("inf"))},
        {"a": torch.ones(4, dtype=torch.float64)},
        {"a": torch.ones(2, 2)},
        {"a": None},
        {},
        {"a": torch.ones(4), "b": torch.ones(4)},
    ],
    ids=["nan", "inf", "dtype", "shape", "none", "missing", "extra"],
)
@pytest.mark.parametrize("compare", [assert_close_to_reference, assert_equal_to_reference])
def test_comparison_catches(actual, compare):
    compare({"a": torch.ones(4)}, {"a": torch.ones(4)})
    with pytest.raises(AssertionError):
        compare(actual, {"a": torch.ones(4)})


def test_difference_from_an_expected_zero_is_caught():
    with pytest.raises(AssertionError, match="inf"):
        assert_close_to_reference(torch.full((4,), 1e-30), torch.zeros(4))


def test_slices_are_even_or_refused():
    batch = torch.arange(8)
    assert torch.cat([local_slice(batch, rank, 4) for rank in range(4)]).equal(batch)
    with pytest.raises(ValueError, match="6 samples cannot be dealt evenly to 4 ranks"):
        local_slice(torch.arange(6), 0, 4)


def test_tied_head_is_one_parameter():
    tied, untied = TinyLlama(tied=True), TinyLlama()
    assert tied.output.weight is tied.tok_embeddings.weight
    assert len(list(untied.parameters())) == len(list(tied.parameters())) + 1


def test_builder_that_does_not_repeat_is_caught():
    generator = torch.Generator().manual_seed(0)

    def build():
        model = nn.Linear(3, 3)
        nn.init.normal_(model.weight, generator=generator)
        return model

    with pytest.raises(AssertionError, match="does not draw the same weights"):
        build_pair(build)
