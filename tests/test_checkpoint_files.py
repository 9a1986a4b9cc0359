"""Checkpoints that rotted, or were made to do harm, are refused before they do any: one process and three entries."""

from __future__ import annotations

import contextlib
import io
import pickle
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from gtp_dtensor import CheckedFileSystemReader, CheckedLoadPlanner
from gtp_dtensor.checkpoint_metadata import chunk_fault
from tests.test_checkpoint import inspect_checkpoint

ROOT = Path(__file__).parent.parent


def small_state(value: float = 0.0) -> dict:
    return {"model": {"a": torch.full((4, 3), value), "b": torch.full((2,), value)}, "step": int(value)}


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("small") / "checkpoint"
    dcp.save(small_state(7.0), checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def small(small_checkpoint, tmp_path) -> Path:
    return shutil.copytree(small_checkpoint, tmp_path / "small")


def load_small(folder: Path, planner: dict | None = None, **reader) -> dict:
    state = small_state()
    reader = CheckedFileSystemReader(folder, **reader)
    dcp.load(state, storage_reader=reader, planner=CheckedLoadPlanner(**planner or {}), no_dist=True)
    return state


def assert_refused(folder: Path, message: str, *arguments: str, what: str = "") -> None:
    """By the reader with either planner before a tensor is written, and by the table in few lines."""
    for planner in (CheckedLoadPlanner(), None):
        state = small_state()
        with pytest.raises(CheckpointException, match=message):
            reader = CheckedFileSystemReader(folder, verify="--verify" in arguments)
            dcp.load(state, storage_reader=reader, planner=planner, no_dist=True)
        assert not any(tensor.any() for tensor in state["model"].values()) and state["step"] == 0, what
    output, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        status = inspect_checkpoint().main([*arguments, str(folder)])
    assert status == 2 and re.search(message, errors.getvalue()) and not output.getvalue(), what
    assert errors.getvalue().count("\n") <= 2, what


def info_of(metadata, fqn: str):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == fqn)


def change_metadata(folder: Path, change) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def put_in_place_of(folder: Path, fqn: str, content: bytes) -> None:
    """Another slice for a tensor or entry."""
    (folder / "other").write_bytes(content)
    change_metadata(
        folder, lambda m: vars(info_of(m, fqn)).update(relative_path="other", offset=0, length=len(content))
    )


def saved(value) -> bytes:
    output = io.BytesIO()
    torch.save(value, output)
    return output.getvalue()


def test_a_flipped_bit_is_found(small):
    """torch.load does not see it."""
    (path,) = small.glob("*.distcp")
    content = bytearray(path.read_bytes())
    place = content.find(torch.full((4, 3), 7.0).numpy().tobytes())
    content[place + 4 * 7 + 2] ^= 1
    path.write_bytes(content)
    assert not torch.equal(load_small(small, checksums=False)["model"]["a"], torch.full((4, 3), 7.0))  # armed
    message = r"model\.a \(the chunk at \(0, 0\)\): not loaded, it is broken: .*CRC"
    with pytest.raises(CheckpointException, match=message):
        load_small(small)
    assert_refused(small, message, "--verify")
    assert inspect_checkpoint().main([str(small)]) == 0


def test_a_checkpoint_without_checksums_says_so(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        dcp.save(small_state(7.0), checkpoint_id=tmp_path, no_dist=True)
    finally:
        torch.serialization.set_crc32_options(True)
    with pytest.raises(CheckpointException, match="saved without checksums"):
        load_small(tmp_path)
    assert load_small(tmp_path, checksums=False)["model"]["a"].eq(7).all()


def chunks(*places, of="model.a"):
    """Other chunks for a tensor: (offsets, sizes), each with a slice of its own."""

    def change(metadata):
        entry = metadata.state_dict_metadata[of]
        entry.chunks[:] = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in places]
        for index in [index for index in metadata.storage_data if index.fqn == of]:
            del metadata.storage_data[index]
        for number, (offsets, _) in enumerate(places):
            metadata.storage_data[MetadataIndex(of, offsets, number)] = _StorageInfo("x", number * 10, 10)

    return change


def field(get, **values):
    return lambda metadata: vars(get(metadata)).update(values)


def a_info(metadata):
    return info_of(metadata, "model.a")


def a_entry(metadata):
    return metadata.state_dict_metadata["model.a"]


MALFORMED = {
    "hole and overlap": (chunks(((0, 0), (2, 3)), ((1, 0), (2, 3))), r"model\.a: chunks of the checkpoint overlap"),
    "beyond": (chunks(((0, 0), (8, 3))), r"model\.a: .*outside of its shape \(4, 3\)"),
    "negative": (chunks(((-2, 0), (6, 3))), r"model\.a: .*outside of its shape"),
    "dims": (chunks(((0,), (12,))), r"model\.a: .*of its 2 dims"),
    "too few": (chunks(((0, 0), (2, 3))), r"model\.a: the checkpoint has 6 of the 12 elements"),
    "huge": (field(a_entry, size=torch.Size((2**62, 2**62))), r"model\.a: the checkpoint gives it the shape"),
    "size": (field(a_entry, size=[4, 3]), r"model\.a\.size is a list, not a Size"),
    "chunks": (field(a_entry, chunks=None), r"model\.a\.chunks is a NoneType, not a list"),
    "chunk": (field(a_entry, chunks=[1]), r"model\.a\.chunks\[0\] is a int"),
    "properties": (field(a_entry, properties=None), r"model\.a\.properties is a NoneType"),
    "dtype": (field(lambda m: a_entry(m).properties, dtype="x"), r"model\.a\.properties\.dtype is a str"),
    "entry": (lambda m: m.state_dict_metadata.update({"model.a": None}), r"model\.a is a NoneType"),
    "planner_data": (field(lambda m: m, planner_data=5), r"Metadata\.planner_data is a int"),
    "path": (lambda m: m.planner_data.update({"model.a": 5}), r"planner_data: model\.a has no path"),
    "offset": (field(a_info, offset=-5), r"storage_data: model\.a is at offset -5"),
    "length": (field(a_info, length=-5), r"storage_data: model\.a .* length -5"),
    "float": (field(a_info, offset=1.5), r"storage_data: model\.a\.offset is a float"),
    "file": (field(a_info, relative_path=3), r"storage_data: model\.a\.relative_path is a int"),
    "no file": (field(a_info, relative_path="a\0b"), r"model\.a\.relative_path 'a\\x00b' is no name of a file"),
    "absolute": (field(a_info, relative_path="/etc/passwd"), r"model\.a: /etc/passwd lies outside of the folder"),
    "extension": (field(a_info, transform_descriptors=["stream.zstd"]), r"model\.a was written with extensions"),
    "storage_data": (lambda m: vars(m).pop("storage_data"), r"Metadata\.storage_data is missing"),
    "method": (field(a_entry, numel=3), r"TensorStorageMetadata has other fields"),
    "key": (lambda m: m.state_dict_metadata.update({5: None}), r"a int has no place as a key"),
}


def test_malformed_metadata_is_refused_with_the_field(small_checkpoint, tmp_path):
    for number, (what, (change, message)) in enumerate(MALFORMED.items()):
        folder = shutil.copytree(small_checkpoint, tmp_path / str(number))
        change_metadata(folder, change)
        with pytest.raises(ValueError, match=rf"\.metadata .*{message}"):
            CheckedFileSystemReader(folder).read_metadata()
        assert_refused(folder, message, what=what)


def test_one_slice_for_two_tensors(small):
    change_metadata(small, lambda m: vars(a_info(m)).update(vars(info_of(m, "model.b"))))
    assert_refused(small, r"model\.a and model\.b share bytes of __0_0\.distcp")


def test_chunks_that_are_a_cut(small_checkpoint):
    """Grids, grids in grids, and pinwheels, which no line cuts; the same with one chunk over another."""

    def fault(size, places):
        made = [ChunkStorageMetadata(torch.Size(start), torch.Size(sizes)) for start, sizes in places]
        return chunk_fault(TensorStorageMetadata(TensorProperties(), torch.Size(size), made))

    grid = [((3 * row, 5 * column), (3, 5)) for row in range(60) for column in range(60)]
    nested = [((0, 0), (4, 6)), *(((4 + row, column * 2), (1, 2)) for row in range(2) for column in range(3))]
    pinwheel = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    for size, places in (((180, 300), grid), ((6, 6), nested), ((3, 3), pinwheel), ((), [((), ())])):
        assert fault(size, places) is None
        assert fault(size, [*places, *places[:1]]).startswith("the checkpoint has")
    assert fault((7, 0), [((0, 0), (7, 0)), ((0, 0), (7, 0))]) is None  # empty ones do not count
    assert fault((180, 300), [*grid[:7], grid[8], *grid[8:]]).startswith("chunks of the checkpoint overlap")
    assert fault((3, 3), [*pinwheel[:-1], ((0, 0), (1, 1))]).startswith("chunks of the checkpoint overlap")


def test_other_things_in_the_place_of_a_tensor(small_checkpoint, tmp_path):
    for number, (value, message) in enumerate(
        (
            (
                torch.full((4, 3), 7, dtype=torch.int8),
                r"\(4, 3\) of torch\.int8 there.* says \(4, 3\) of torch\.float32",
            ),
            (torch.full((8, 3), 7.0), r"the file has \(8, 3\) of torch\.float32"),
            (torch.zeros(1).expand(2**40), r"the file has \(1099511627776,\)"),
            (torch.eye(4, 3).to_sparse(), "not a dense tensor"),
            ({"a": 1}, "the file has a dict there"),
        )
    ):
        folder = shutil.copytree(small_checkpoint, tmp_path / str(number))
        put_in_place_of(folder, "model.a", saved(value))
        with pytest.raises(CheckpointException, match=r"model\.a \(the chunk at .*" + message):
            load_small(folder)
        assert_refused(folder, message, "--verify")


def packed(content: bytes, num_bytes: int) -> bytes:
    """An archive of torch.save whose storage inflates to ``num_bytes``."""
    output = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as before, zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as after:
        for name in before.namelist():
            after.writestr(name, bytes(num_bytes) if name.endswith("data/0") else before.read(name))
    return output.getvalue()


def bytearray_of(num_bytes: int) -> bytes:
    """An archive whose pickle makes them."""
    output, pickled = io.BytesIO(), b"\x80\x02cbuiltins\nbytearray\nJ" + num_bytes.to_bytes(4, "little") + b"\x85R."
    content = saved(0)
    with zipfile.ZipFile(io.BytesIO(content)) as before, zipfile.ZipFile(output, "w") as after:
        for name in before.namelist():
            after.writestr(name, pickled if name.endswith("data.pkl") else before.read(name))
    return output.getvalue()


def test_entries_that_grow_are_refused(small_checkpoint, tmp_path):
    for number, (content, message) in enumerate(
        (
            (packed(saved({"x": torch.zeros(1 << 20)}), 1 << 22), r"it inflates to \d+ bytes from \d+"),
            (bytearray_of(1 << 20), "it holds a bytearray"),
            (saved(torch.ones(2)), "the file has a tensor in the place of plain data"),
            (pickle.dumps(7), r"it is no archive of torch\.save"),
        )
    ):
        folder = shutil.copytree(small_checkpoint, tmp_path / str(number))
        put_in_place_of(folder, "step", content)
        with pytest.raises(CheckpointException, match="step: .*" + message):
            load_small(folder)
        with pytest.raises(CheckpointException, match="step: .*" + message):  # the planner alone
            dcp.load(small_state(), checkpoint_id=folder, planner=CheckedLoadPlanner(), no_dist=True)
    assert len(torch.load(io.BytesIO(bytearray_of(1 << 20)), weights_only=True)) == 1 << 20  # the trap is armed


def test_metadata_changes_no_class_and_allocates_little(small):
    metadata = (small / ".metadata").read_bytes()

    def attribute(module: str, name: str) -> bytes:
        """Sets one on what is named, by BUILD, before the metadata themselves."""
        return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"N}X\x04\x00\x00\x00evilK\x01s\x86b0" + metadata[2:]

    storage_info = attribute(_StorageInfo.__module__, "_StorageInfo")
    for content, message in (
        (storage_info, "a type has no place where fields are set"),
        (attribute("pathlib", "PosixPath"), "a function has no place where fields are set"),
        (b"\x80\x04Nr\x00\x00\x00\x7f.", "Metadata is a NoneType"),  # a place in the memo
        (b"\x80\x04\x95" + (1 << 62).to_bytes(8, "little") + b"N.", "Metadata is a NoneType"),
        (b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.", "has no place"),
        (b"\x80\x04\x8b" + (1 << 30).to_bytes(4, "little") + b"1.", "has no place"),
        (b"\x80\x04" + b")" + b"\x85" * 300_000 + b"}\x940h\x00\x8c\x00s.", "cannot be read"),
        (b"\x80\x04ctorch\nSize\n(" + b"K\x01" * 65 + b"t\x85R.", "up to 64 ints"),
        (b"\x80\x04\x82\x01.", "has no place"),
        (b"\x80\x04N.", "Metadata is a NoneType"),
    ):
        (small / ".metadata").write_bytes(content)
        assert_refused(small, message)
        assert not hasattr(_StorageInfo, "evil")
    try:  # the trap is armed
        pickle.loads(storage_info)
        assert _StorageInfo.evil == 1
    finally:
        del _StorageInfo.evil


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_metadata_of_every_protocol(small, protocol):
    expected = pickle.loads((small / ".metadata").read_bytes())
    expected.storage_meta.checkpoint_id = Path("/where it was") / "saved to"
    (small / ".metadata").write_bytes(pickle.dumps(expected, protocol))
    actual = CheckedFileSystemReader(small).read_metadata()
    assert actual.storage_meta.checkpoint_id == "/where it was/saved to"
    actual.storage_meta.checkpoint_id = expected.storage_meta.checkpoint_id
    assert actual == expected


def test_casts_keep_the_kind_of_numbers(tmp_path):
    numbers = {"f": torch.full((2,), 1.5), "i": torch.arange(2), "c": torch.full((2,), 1j)}
    dcp.save(numbers, checkpoint_id=tmp_path, no_dist=True)

    def load(key, dtype):
        state = {key: torch.zeros(2, dtype=dtype)}
        planner = CheckedLoadPlanner(casts=True, strict=False)
        dcp.load(state, storage_reader=CheckedFileSystemReader(tmp_path), planner=planner, no_dist=True)
        return state[key]

    for key, dtype in (("f", torch.int64), ("f", torch.bool), ("c", torch.float32), ("i", torch.bool)):
        with pytest.raises(CheckpointException, match=rf"{key}: is {dtype} here .*lose more than precision"):
            load(key, dtype)
    assert load("f", torch.bfloat16).tolist() == [1.5, 1.5]
    assert load("i", torch.float32).tolist() == [0, 1] and load("f", torch.complex64).tolist() == [1.5, 1.5]


def test_folders_of_other_kinds(small, tmp_path):
    (path,) = small.glob("*.distcp")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert_refused(small, "is a link that lies outside of the folder")
    path.unlink()
    (tmp_path / "elsewhere").rename(small / "inside")
    path.symlink_to(small / "inside")
    assert load_small(small)["step"] == 7
    writer = FileSystemWriter(tmp_path / "other format", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(small_state(7.0), storage_writer=writer, no_dist=True)
    assert_refused(tmp_path / "other format", r"is in the format of SerializationFormat\.SAFETENSORS")
    (small / ".metadata").rename(small / "__0.metadata")
    assert_refused(small, "it was saved with use_collectives=False")
    (small / "__0.metadata").unlink()
    (small / ".metadata").mkdir()
    assert_refused(small, r"it has no \.metadata")


def test_the_table_escapes_names(tmp_path, capsys):
    dcp.save({"a\x1b[2J\n3 tensors": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert inspect_checkpoint().main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and lines[1].startswith("a\\x1b[2J\\n3 tensors  (2,)")


_SAVE_FLOAT8 = """
import sys, torch, torch.distributed.checkpoint as dcp
from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
weight = WeightWithDynamicFloat8CastTensor(torch.arange(12.0).view(4, 3), None, torch.float8_e4m3fn)
dcp.save({"weight": torch.nn.Parameter(weight)}, checkpoint_id=sys.argv[1], no_dist=True)
"""
_LOAD_FLOAT8 = """
import sys, torch, torch.distributed.checkpoint as dcp
from gtp_dtensor import CheckedFileSystemReader, CheckedLoadPlanner
state = {"weight": torch.zeros(4, 3)}
assert not {"torchao", "transformer_engine"} & {*sys.modules}
dcp.load(state, storage_reader=CheckedFileSystemReader(sys.argv[1]), planner=CheckedLoadPlanner(), no_dist=True)
assert "torchao" in sys.modules and type(state["weight"]) is torch.Tensor
assert torch.equal(state["weight"], torch.arange(12.0).view(4, 3))
"""


@pytest.mark.slow
def test_float8_weights_of_fsdp2_load_without_torchao_imported(tmp_path):
    """torchtitan's FSDP2 with ``enable_fsdp_float8_all_gather`` saves subclasses of torchao's."""
    for program in (_SAVE_FLOAT8, _LOAD_FLOAT8):
        result = subprocess.run(
            [sys.executable, "-c", program, tmp_path / "folder"], capture_output=True, text=True, cwd=ROOT, timeout=120
        )
        assert result.returncode == 0, result.stderr[-3000:]
