"""Checkpoints load on any topology, whole or not at all, and run no code; saving disturbs nothing."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pickle
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from gtp_dtensor import CheckedFileSystemReader, CheckedLoadPlanner, stats
from tests.checkpoint_cases import (
    NUM_STEPS,
    TOPOLOGIES,
    Run,
    load_and_load_state_dict,
    load_and_set,
    load_in_place,
    load_on,
    load_stateful,
    num_ranks,
    save_on,
    with_stale_copies,
)
from tests.harness import ranks
from tests.reference import assert_close_to_reference

SCRIPT = Path(__file__).parent.parent / "scripts" / "inspect_checkpoint.py"
ALL = {kind: list(topologies) for kind, topologies in TOPOLOGIES.items()}

# ---- topologies


@pytest.mark.parametrize(
    "kind, source, destinations",
    [
        ("dense", "gtp2_tp2", ["dps2_gtp3", "single"]),
        pytest.param("moe", "gtp2_egtp2_ep2_of8", ["gtp3_egtp3"], marks=pytest.mark.slow),
        *(pytest.param(k, source, ALL[k], marks=pytest.mark.slow) for k in ALL for source in ALL[k]),
    ],
)
def test_saved_on_one_topology_and_loaded_on_others(rank_pool, tmp_path, kind, source, destinations):
    expected = rank_pool.run(num_ranks(kind, source), save_on, str(tmp_path), kind, source, timeout=300.0)
    for topology in destinations:
        actual = rank_pool.run(num_ranks(kind, topology), load_on, str(tmp_path), kind, topology, timeout=300.0)
        if topology == source:
            assert actual == expected
        losses, expected_losses = (torch.tensor(result[0][1]) for result in (actual, expected))
        assert len(losses) == NUM_STEPS and losses[0] != losses[1]
        assert_close_to_reference(losses, expected_losses, f"losses on {topology}", rtol=1e-5)


@ranks(8)
def test_places_of_uneven_nested_cuts(rank):
    """What DCP saves a shard under is where it lies in the logical tensor, also beside empty ones."""
    mesh = init_device_mesh("cpu", (2, 2, 2))
    num_empty = 0
    for shape in ((7, 3), (5, 2), (1, 4), (9, 5), (2050, 2)):
        whole = torch.arange(shape[0] * shape[1]).view(shape)
        for placements in (
            (Shard(0), Shard(0), Shard(0)),
            (Shard(0), Shard(1), Shard(1)),
            (Shard(1), Shard(0), Shard(0)),
            (Replicate(), Shard(0), Shard(0)),
        ):
            tensor = distribute_tensor(whole, mesh, placements)
            (item,) = tensor.__create_write_items__("x", tensor)
            chunk, local = item.tensor_data.chunk, tensor.to_local()
            assert chunk.sizes == local.shape
            place = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes))
            assert torch.equal(whole[place], local)
            everyones = [None] * 8
            dist.all_gather_object(everyones, (tuple(chunk.offsets), tuple(chunk.sizes)))
            num_empty += sum(0 in sizes for _, sizes in everyones)
            # Chunks are told apart by where they start.
            assert len(dict(set(everyones))) == len(set(everyones)), (shape, placements)
    assert num_empty > 0


# ---- nothing is disturbed


def uninterrupted_and(between, kind: str, topology: str, param_dtype=None) -> None:
    """A run with ``between(run, step)`` after every step is bit by bit the run without."""
    results = []
    for is_disturbed in (False, True):
        run = Run(kind, topology, param_dtype=param_dtype)
        losses = run.train(0, 4, partial(between, run) if is_disturbed else None)
        results.append((losses, run.full_state()))
    assert results[0][0] == results[1][0] and len(set(results[0][0])) == 4
    for name, value in results[0][1].items():
        assert torch.equal(results[1][1][name], value), name


@ranks(4, timeout=120.0)
@pytest.mark.parametrize(
    "kind, topology",
    [("dense", "dpr2_gtp2"), pytest.param("moe", "gtp1_egtp2_ep2", marks=pytest.mark.slow)],
)
def test_saving_and_validating_disturb_nothing(kind, topology, rank, tmp_path):
    def save_and_validate(run, step):
        dcp.save(run.state(), checkpoint_id=tmp_path / str(step))
        with torch.no_grad():
            run.loss(step + 30)

    uninterrupted_and(save_and_validate, kind, topology, torch.bfloat16)
    assert (tmp_path / "3" / ".metadata").exists()


@ranks(4, timeout=120.0)
def test_asynchronous_saves_hold_the_weights_of_their_moment(rank, tmp_path):
    groups = [dist.new_group() for _ in range(2)]  # of each saving thread its own: both may be at work
    saves, moments = [], []

    def save(run, step):
        if step < 2:
            moments.append(run.full_state())
            saves.append(dcp.async_save(run.state(), checkpoint_id=tmp_path / str(step), process_group=groups[step]))

    uninterrupted_and(save, "dense", "dpr2_gtp2", torch.bfloat16)
    for step, (saving, expected) in enumerate(zip(saves, moments, strict=True)):
        saving.result()
        run = Run("dense", "dpr2_gtp2", seed=5)
        run.load(tmp_path / str(step))
        for name, value in run.full_state().items():
            assert torch.equal(value, expected[name]), (step, name)
    assert not torch.equal(moments[0]["block.attention.wq.weight"], moments[1]["block.attention.wq.weight"])


@ranks(4, timeout=120.0)
@pytest.mark.parametrize(
    "kind, topology",
    [
        pytest.param("dense", "gtp2_tp2", marks=pytest.mark.slow),
        pytest.param("dense", "dpr2_gtp2", marks=pytest.mark.slow),
        pytest.param("moe", "gtp1_egtp2_ep2", marks=pytest.mark.slow),
    ],
)
def test_what_was_loaded_is_computed_with(kind, topology, rank, tmp_path):
    source = Run(kind, topology, param_dtype=torch.bfloat16)
    source.train(0, 2)
    dcp.save(source.state(), checkpoint_id=tmp_path / "checkpoint")
    expected = source.loss(2)
    for load in (load_and_set, load_and_load_state_dict, load_stateful, load_in_place):
        run = Run(kind, topology, seed=3, param_dtype=torch.bfloat16)
        with_stale_copies(run)
        before = stats(run.model).num_refreshes
        assert before > 0 and run.loss(2) != expected
        assert stats(run.model).num_refreshes == before  # the trap is armed: copies are trusted
        load(run, tmp_path / "checkpoint")
        assert torch.equal(run.loss(2), expected), load.__name__


# ---- faults


def cut_short(folder: Path, state: dict) -> None:
    path = folder / "__3_0.distcp"
    path.write_bytes(path.read_bytes()[:-1])


def remove_metadata(folder: Path, state: dict) -> None:
    (folder / ".metadata").unlink()


def cut_metadata(folder: Path, state: dict) -> None:
    content = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(content[: len(content) // 2])


def other_metadata(folder: Path, state: dict) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps({"model": 1}))


def hole(folder: Path, state: dict) -> None:
    """A chunk that no file has."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.mixer.in_proj.weight"].chunks.pop(1)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def outside(folder: Path, state: dict) -> None:
    content = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(content.replace(b"__3_0.distcp", b"/_3_0.distcp"))


def broken_entry(folder: Path, state: dict) -> None:
    info = next(
        info
        for index, info in CheckedFileSystemReader(folder).read_metadata().storage_data.items()
        if index.fqn == "optimizer.param_groups.0.lr"
    )
    with (folder / info.relative_path).open("r+b") as file:
        file.seek(info.offset)
        file.write(b"x" * info.length)


def in_model(key, value):
    def change(folder: Path, state: dict) -> None:
        if value is None:
            del state["model"][key]
        else:
            state["model"][key] = value

    return change


FAULTS = {  # what happens to the folder (rank 0) or to the state dict (every rank), and what the error says
    "truncated": (cut_short, r"__3_0\.distcp has \d+ bytes and needs \d+"),
    "missing_file": (lambda folder, state: (folder / "__2_0.distcp").unlink(), r"__2_0\.distcp is missing"),
    "no_metadata": (remove_metadata, "the save into it did not finish"),
    "no_folder": (lambda folder, state: shutil.rmtree(folder), "no such folder"),
    "cut_metadata": (cut_metadata, r"\.metadata cannot be read"),
    "other_metadata": (other_metadata, r"\.metadata is not what dcp\.save writes"),
    "hole": (hole, r"model\.mixer\.in_proj\.weight: the checkpoint has \d+ of the \d+ elements"),
    "outside": (outside, r"lies outside of the folder"),
    "broken_entry": (
        broken_entry,
        r"optimizer\.param_groups\.0\.lr: not loaded, it is more than plain data, or broken",
    ),
    "shape": (in_model("shift", torch.zeros(17)), r"model\.shift: has shape \(17,\) here and \(16,\) in the check"),
    "missing_key": (in_model("other.weight", torch.zeros(2)), r"model\.other\.weight: the checkpoint does not have it"),
    "extra_key": (in_model("num_seen", None), r"model\.num_seen: only the checkpoint has it"),
    "dtype": (in_model("shift", torch.zeros(16).double()), r"model\.shift: is torch\.float64 here and torch\.float32"),
    "no_tensor": (in_model("shift", 3.0), r"model\.shift: is float here and a tensor in the checkpoint"),
}
ON_DISK = ["truncated", "missing_file", "no_metadata", "no_folder", "cut_metadata", "other_metadata", "hole", "outside"]
ON_DISK.append("broken_entry")


@ranks(4, timeout=200.0)
def test_every_fault_is_named_on_all_ranks_and_nothing_is_loaded(rank, tmp_path):
    source = Run("dense", "gtp2_tp2")
    source.train(0, 1)
    dcp.save(source.state(), checkpoint_id=tmp_path / "whole")
    run = Run("dense", "gtp2_tp2", seed=3)
    run.train(0, 1)
    expected = run.full_state()
    for name, (make, message) in FAULTS.items():
        folder, state = tmp_path / name, run.state()
        if rank == 0:
            shutil.copytree(tmp_path / "whole", folder)
        if name in ON_DISK and rank == 0 or name not in ON_DISK:
            make(folder, state)
        dist.barrier()
        reader = CheckedFileSystemReader(folder)
        with pytest.raises(CheckpointException, match=message):
            dcp.load(state, storage_reader=reader, planner=CheckedLoadPlanner())
        for key, value in run.full_state().items():
            assert torch.equal(value, expected[key]), (name, key)
        dist.barrier()
    run.load(tmp_path / "whole")  # and the process group is in order
    assert not torch.equal(run.full_state()["block.attention.wq.weight"], expected["block.attention.wq.weight"])


@ranks(4, timeout=120.0)
def test_a_fault_of_one_rank_is_raised_on_all(rank, tmp_path):
    """Its state dict asks for more than the others', or it does not see the folder."""
    run = Run("dense", "gtp2_tp2")
    dcp.save(run.state(), checkpoint_id=tmp_path / "whole")
    expected = run.full_state()
    for name in ("state", "folder"):
        state, folder = run.state(), tmp_path / "whole"
        if rank == 2 and name == "state":
            state["model"]["mine"] = torch.zeros(1)
        if rank == 2 and name == "folder":
            folder = tmp_path / "not here"
        with pytest.raises(CheckpointException, match={"state": r"model\.mine", "folder": "no such folder"}[name]):
            dcp.load(state, storage_reader=CheckedFileSystemReader(folder), planner=CheckedLoadPlanner())
    assert all(torch.equal(value, expected[key]) for key, value in run.full_state().items())


def test_options_of_the_planner(tmp_path):
    saved = {
        "model": {"a": torch.arange(4.0), "b": torch.ones(2)},
        "step": 7,
        "top": torch.ones(3),
        "top2": torch.ones(1),
    }
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)

    def load(state, **options):
        reader = CheckedFileSystemReader(tmp_path)
        dcp.load(state, storage_reader=reader, planner=CheckedLoadPlanner(**options), no_dist=True)
        return state

    with pytest.raises(CheckpointException, match=r"model\.b: only the checkpoint has it"):
        load({"model": {"a": torch.zeros(4)}})
    assert torch.equal(load({"model": {"a": torch.zeros(4)}}, strict=False)["model"]["a"], torch.arange(4.0))
    # Only what stands under the names that are loaded has to be there as well.
    assert load({"step": 0}) == {"step": 7}
    both = {"a": torch.zeros(4), "b": torch.zeros(2)}
    assert torch.equal(load({"model": both, "step": 1})["model"]["b"], torch.ones(2))
    with pytest.raises(CheckpointException, match="top2: only the checkpoint has it"):
        load({"top": torch.zeros(3)})
    with pytest.raises(CheckpointException, match=r"top: is torch\.float64 here"):
        load({"top": torch.zeros(3).double(), "top2": torch.zeros(1)})
    assert load({"top": torch.zeros(3).double()}, casts=True, strict=False)["top"].sum() == 3


# ---- nothing from a file is run


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def evil_entry(folder: Path, evil: Evil) -> None:
    dcp.save({"model": {"a": torch.ones(2)}, "note": evil}, checkpoint_id=folder, no_dist=True)


def evil_metadata(folder: Path, evil: Evil) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(evil))


def evil_in_metadata(folder: Path, evil: Evil) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data["model.a"] = evil
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def evil_dotted_name(folder: Path, evil: Evil) -> None:
    """By way of what a class that is allowed refers to."""
    output = io.BytesIO()
    output.write(b"\x80\x04")
    for text in ("torch.distributed.checkpoint.metadata", "os.mkdir"):
        output.write(b"\x8c" + bytes([len(text)]) + text.encode())
    path = str(evil.path).encode()
    output.write(b"\x93X" + len(path).to_bytes(4, "little") + path + b"\x85R.")
    (folder / ".metadata").write_bytes(output.getvalue())


@pytest.mark.parametrize("make", [evil_entry, evil_metadata, evil_in_metadata, evil_dotted_name])
def test_code_in_a_checkpoint_is_not_run(tmp_path, make):
    folder, trace = tmp_path / "checkpoint", tmp_path / "it was run"
    dcp.save({"model": {"a": torch.ones(2)}, "note": 1}, checkpoint_id=folder, no_dist=True)
    if make is evil_entry:
        shutil.rmtree(folder)
    make(folder, Evil(trace))
    for planner in (CheckedLoadPlanner(), None):  # the reader alone is enough
        state = {"model": {"a": torch.zeros(2)}, "note": 0}
        with pytest.raises(CheckpointException, match="mkdir"):
            dcp.load(state, storage_reader=CheckedFileSystemReader(folder), planner=planner, no_dist=True)
        assert not trace.exists() and not state["model"]["a"].any()
    assert inspect_checkpoint().main([str(folder)]) == (0 if make is evil_entry else 2)
    assert not trace.exists()
    with contextlib.suppress(CheckpointException):
        dcp.load({"note": 0}, checkpoint_id=folder, no_dist=True)
    assert trace.exists()  # the trap is armed: DCP's own reader runs it


def test_the_planner_alone_unpickles_no_code(tmp_path):
    evil_entry(tmp_path / "checkpoint", Evil(tmp_path / "it was run"))
    with pytest.raises(CheckpointException, match=r"note: not loaded, it is more than plain data"):
        dcp.load({"note": 0}, checkpoint_id=tmp_path / "checkpoint", planner=CheckedLoadPlanner(), no_dist=True)
    assert not (tmp_path / "it was run").exists()


def test_entries_of_ordinary_optimizers_and_schedules_are_plain_data(tmp_path):
    params = [torch.nn.Parameter(torch.ones(3))]
    states = {}
    for build in (torch.optim.SGD, torch.optim.AdamW, torch.optim.Adafactor, torch.optim.RMSprop):
        optimizer = build(params, lr=0.1)
        schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        ]
        params[0].grad = torch.ones(3)
        optimizer.step()
        states[build.__name__] = {"optimizer": optimizer.state_dict(), "lr": [s.state_dict() for s in schedules]}
    states["job"] = {
        "step": 3,
        "name": "x",
        "data": pickle.dumps([1]),
        "set": {1, 2},
        "size": torch.Size([2]),
        "no": None,
    }
    states["job"] |= {
        "rng": torch.get_rng_state(),
        "dtype": torch.bfloat16,
        "pair": (1, 2.0),
        "deep": {"a": [1, {"b": 2}]},
    }
    dcp.save(states, checkpoint_id=tmp_path, no_dist=True)
    loaded = {"job": dict.fromkeys(states["job"], 0) | {"rng": torch.zeros_like(states["job"]["rng"])}}
    loaded["job"]["deep"] = {"a": [0, {"b": 0}]}
    loaded["AdamW"] = pickle.loads(
        pickle.dumps({"optimizer": states["AdamW"]["optimizer"], "lr": states["AdamW"]["lr"]})
    )
    loaded["AdamW"]["optimizer"]["param_groups"][0]["lr"] = 0
    dcp.load(loaded, storage_reader=CheckedFileSystemReader(tmp_path), planner=CheckedLoadPlanner(), no_dist=True)
    assert loaded["job"].pop("rng").equal(states["job"].pop("rng")) and loaded["job"] == states["job"]
    assert loaded["AdamW"]["optimizer"]["param_groups"] == states["AdamW"]["optimizer"]["param_groups"]


# ---- the table


def inspect_checkpoint() -> ModuleType:
    spec = importlib.util.spec_from_file_location("inspect_checkpoint", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def save_for_the_table(folder: str) -> None:
    dcp.save(Run("dense", "gtp3").state(), checkpoint_id=folder)


def test_the_table_of_a_checkpoint(rank_pool, tmp_path, capsys):
    folder, inspect = tmp_path / "checkpoint", inspect_checkpoint().main
    rank_pool.run(3, save_for_the_table, str(folder), timeout=120.0)
    capsys.readouterr()
    assert inspect(["--match", "model.*", "--chunks", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    place = next(n for n, line in enumerate(lines) if line.startswith("model.mixer.in_proj.weight"))
    assert re.fullmatch(r"\S+ +\(47, 16\) +float32 +3 +dim 0: 3 x 15..16 +[\d,]+", lines[place])
    assert lines[place + 1 : place + 4] == [
        f"    at ({16 * rank}, 0) of ({(16, 16, 15)[rank]}, 16) in __{rank}_0.distcp" for rank in range(3)
    ]
    assert any(line.startswith("model.scale ") and " whole " in line for line in lines)
    assert not any("optimizer" in line for line in lines) and " tensors, 0 other entries" in lines[-1]
    for name, message in (
        ("__1_0.distcp", "__1_0.distcp is missing"),
        (".metadata", "the save into it did not finish"),
    ):
        (folder / name).unlink()
        assert inspect([str(folder)]) == 2
        output = capsys.readouterr()
        assert message in output.err and not output.out


def test_the_table_of_safetensors(tmp_path, capsys):
    inspect = inspect_checkpoint().main
    save_file({"b": torch.ones(2, 3).bfloat16(), "a": torch.ones(5)}, tmp_path / "model-1-of-2.safetensors")
    save_file({"c": torch.ones(()).to(torch.float8_e4m3fn)}, tmp_path / "model-2-of-2.safetensors")
    assert inspect([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "3 tensors, 0 other entries, 33 bytes in 2 files"
    assert any(line.split() == ["b", "(2,", "3)", "BF16", "1", "whole", "12"] for line in lines)
    index = '{"weight_map": {"a": "model-1-of-2.safetensors", "d": "model-3-of-3.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    assert inspect([str(tmp_path)]) == 2 and "model-3-of-3.safetensors" in capsys.readouterr().err
    for content, message in ((b"{}", "has no weight_map"), (b'{"weight_map": [1]}', "no weight_map"), (b"{", "broken")):
        (tmp_path / "model.safetensors.index.json").write_bytes(content)
        assert inspect([str(tmp_path)]) == 2 and message in capsys.readouterr().err
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "folder.safetensors").mkdir()
    assert inspect([str(tmp_path)]) == 0 and not capsys.readouterr().err
    assert inspect(["--verify", str(tmp_path)]) == 2 and "no checksums" in capsys.readouterr().err
    (tmp_path / "model-2-of-2.safetensors").write_bytes(b"short")
    assert inspect([str(tmp_path)]) == 2 and "model-2-of-2.safetensors is broken" in capsys.readouterr().err


def test_trained_weights_leave_as_logical_tensors(rank_pool, tmp_path):
    """Whoever reads the folder without a model, or with no process group, sees whole weights."""
    save = rank_pool.run(3, save_on, str(tmp_path), "dense", "gtp3", timeout=120.0)
    assert len(save) == 3
    state = {"model": {"output.weight": torch.zeros(2050, 16)}}
    reader = CheckedFileSystemReader(tmp_path / "checkpoint")
    dcp.load(state, storage_reader=reader, planner=CheckedLoadPlanner(strict=False), no_dist=True)
    assert torch.equal(state["model"]["output.weight"], torch.load(tmp_path / "full.pt")["output.weight"])
