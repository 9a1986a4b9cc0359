"""Loading through ``torch.distributed.checkpoint`` (DCP): without running code from a file, and whole or not at all.

Saving needs nothing of ours: parameters and optimizer states are DTensors with plain placements, so ``dcp.save`` of a
``get_state_dict`` result writes logical shapes, and ``dcp.load`` reads them on any other topology, or without GTP::

    dcp.load(state, storage_reader=CheckedFileSystemReader(folder), planner=CheckedLoadPlanner())

DCP itself unpickles what it finds, converts dtypes silently, and writes into live tensors while it discovers that a
file is missing. These two look first, on all ranks, and a fault on one raises on all (as DCP's ``CheckpointException``,
whose text has every failing rank's message).
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
import pathlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, ReadItem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.tensor import DTensor
from torch.serialization import _get_layout  # how torch pickles torch.strided and the like

_METADATA_FILE = ".metadata"
_MOST_FAULTS = 10  # named in one message

_SAFE_GLOBALS: tuple[Any, ...] = (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    OrderedDict,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    _MEM_FORMAT_ENCODING,
    _StorageInfo,
    _get_layout,
    torch.Size,
)


class _MetadataUnpickler(pickle.Unpickler):
    """Makes the classes that DCP's metadata consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        """Look up by the whole name: attributes of what is allowed are not reached."""
        for known in _SAFE_GLOBALS:
            if (module, name) == (known.__module__, known.__qualname__):
                return known
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            # The folder that was saved to: for people only, perhaps of another operating system.
            return getattr(pathlib, f"Pure{name}")
        if module == "torch" and isinstance(torch.__dict__.get(name), torch.dtype):
            return torch.__dict__[name]
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata and was not loaded")


class CheckedFileSystemReader(FileSystemReader):
    """Reads a folder that ``dcp.save`` wrote. Before any tensor is read, all that this rank needs is there.

    Metadata goes through an unpickler that knows DCP's metadata classes only, and entries that are not tensors through
    ``torch.load(weights_only=True)`` (``torch.serialization.add_safe_globals`` extends what that accepts). Metadata of
    single ranks, which ``dcp.save`` writes without collectives only, is not looked for.

    Files are there and as long as they should be; what rotted inside of one shows while it is read, by an error on all
    ranks, when other tensors may have been written already: go on from another checkpoint then.

    Args:
        path: the folder.
    """

    def read_metadata(self) -> Metadata:
        """The checkpoint's table of contents.

        Raises:
            FileNotFoundError: there is none: no checkpoint, or its save did not finish.
            ValueError: it cannot be read, or holds something else; names the class that was refused.
        """
        folder = Path(self.path)
        path = folder / _METADATA_FILE
        if not path.is_file():
            what = "the save into it did not finish: load another one" if folder.is_dir() else "no such folder"
            raise FileNotFoundError(f"{folder} is not a whole checkpoint, it has no {_METADATA_FILE} ({what})")
        try:
            metadata = _MetadataUnpickler(io.BytesIO(path.read_bytes())).load()
        except Exception as error:  # a broken pickle raises almost anything
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {error}") from error
        _check_metadata(path, metadata)
        return metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check what ``plan`` will read.

        Raises:
            ValueError: names the files that are missing or short, or the entry that is not to be unpickled.
        """
        plan = super().prepare_local_plan(plan)
        self.check_files(item.storage_index for item in plan.items)
        entries = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        self.read_data(LoadPlan(entries), _BytesCheck())
        return plan

    def check_files(self, indices: Iterable[MetadataIndex] | None = None) -> None:
        """Whether the files have all bytes of these chunks and entries, or of everything.

        Args:
            indices: keys of the metadata's ``storage_data``, which ``set_up_storage_reader`` was given.

        Raises:
            ValueError: names the files that are missing or short, and chunks that no file has.
        """
        ends: dict[str, int] = {}
        faults = []
        for index in self.storage_data if indices is None else indices:
            info = self.storage_data.get(index)
            if info is None:
                faults.append(f"{index.fqn}: no file has the chunk at {index.offset}")
                continue
            if Path(info.relative_path).is_absolute() or ".." in PurePosixPath(info.relative_path).parts:
                faults.append(f"{index.fqn}: {info.relative_path} lies outside of the folder")
                continue
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in sorted(ends.items()):
            path = Path(self.path) / name
            if not path.is_file():
                faults.append(f"{name} is missing")
            elif path.stat().st_size < end:
                faults.append(f"{name} has {path.stat().st_size} bytes and needs {end}: it is truncated")
        _raise_faults(f"{os.fspath(self.path)} is not a whole checkpoint, nothing was loaded", faults)


class CheckedLoadPlanner(DefaultLoadPlanner):
    """Compares a state dict with the checkpoint, key by key, before anything is loaded.

    Keys that the checkpoint lacks, other shapes and other dtypes are errors.

    Args:
        strict: so are keys that only the checkpoint has, under the top-level names that any rank loads ("model", say; of
            tensors that stand at the top level themselves: all others there).
        casts: other dtypes are converted, as DCP does.
    """

    def __init__(self, *, strict: bool = True, casts: bool = False) -> None:
        super().__init__()
        self.strict, self.casts = strict, casts

    def create_local_plan(self) -> LoadPlan:
        """DCP's plan, after the checks.

        Raises:
            ValueError: names the keys, with what each has and what the state dict has.
        """
        faults = [fault for key, value in self.state_dict.items() if (fault := self._fault_of(key, value))]
        _raise_faults("the checkpoint does not fit, nothing was loaded", faults)
        plan = super().create_local_plan()
        _raise_faults("the checkpoint has holes, nothing was loaded", self._holes(plan))
        read = {item.dest_index.fqn for item in plan.items}
        return dataclasses.replace(plan, planner_data=[key for key in self.state_dict if key not in read])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are, after a look for keys that no rank loads: ranks may hold different parts of a model.

        Raises:
            ValueError: names those keys.
        """
        if self.strict:
            loaded = {key for plan in global_plan for key in plan.planner_data}  # of which a rank holds no element
            loaded |= {item.dest_index.fqn for plan in global_plan for item in plan.items}
            parts = {self._part_of(key) for key in loaded} - {None}
            unused = [
                key for key in self.metadata.state_dict_metadata if self._part_of(key) in parts and key not in loaded
            ]
            faults = [f"{key}: only the checkpoint has it" for key in unused]
            _raise_faults("the checkpoint has more (strict=False passes over it), nothing was loaded", faults)
        return super().create_global_plan(global_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put what is not a tensor into the state dict."""
        loaded = _load_safely(read_item, value)
        # DCP loads anything: it gets bytes that were written here.
        value = io.BytesIO()
        torch.save(loaded, value)
        value.seek(0)
        super().load_bytes(read_item, value)

    def _part_of(self, key: str) -> str | None:
        """The top-level name above ``key``; "" for a tensor that stands there itself; None for other things there."""
        path = (self.metadata.planner_data or {}).get(key, (key,))
        if len(path) > 1:
            return path[0]
        return "" if isinstance(self.metadata.state_dict_metadata[key], TensorStorageMetadata) else None

    def _fault_of(self, key: str, value: Any) -> str | None:
        saved = self.metadata.state_dict_metadata.get(key)
        if saved is None:
            return f"{key}: the checkpoint does not have it"
        is_tensor = isinstance(value, torch.Tensor)
        if is_tensor != isinstance(saved, TensorStorageMetadata):
            what = ("a tensor", type(value).__name__)
            return f"{key}: is {what[not is_tensor]} here and {'no' if is_tensor else 'a'} tensor in the checkpoint"
        if not is_tensor:
            return None
        if saved.size != value.shape:
            return f"{key}: has shape {tuple(value.shape)} here and {tuple(saved.size)} in the checkpoint"
        if saved.properties.dtype != value.dtype and not self.casts:
            return (
                f"{key}: is {value.dtype} here and {saved.properties.dtype} in the checkpoint (casts=True converts it)"
            )
        return None

    def _holes(self, plan: LoadPlan) -> list[str]:
        """Keys of which this rank would get fewer elements than it holds, or some twice."""
        num_read: dict[str, int] = dict.fromkeys(self.state_dict, 0)
        for item in plan.items:
            if item.type == LoadItemType.TENSOR:
                num_read[item.dest_index.fqn] += math.prod(item.lengths)
        faults = []
        for key, value in self.state_dict.items():
            if not isinstance(value, torch.Tensor):
                continue
            if isinstance(value, DTensor):
                expected = 0 if value.device_mesh.get_coordinate() is None else value.to_local().numel()
            else:
                expected = value.numel()
            if num_read[key] != expected:
                faults.append(f"{key}: the checkpoint has {num_read[key]} of the {expected} elements of this rank")
        return faults


class _BytesCheck(DefaultLoadPlanner):
    """Keeps nothing of what it is given to load."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        _load_safely(read_item, value)


def _load_safely(read_item: ReadItem, value: io.BytesIO) -> Any:
    key = read_item.dest_index.fqn
    try:
        return torch.load(value, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{key}: not loaded, it is more than plain data, or broken: {error}") from error


def _check_metadata(path: Path, metadata: Any) -> None:
    """Types, as deep as the checks themselves read them."""
    good: list[tuple[str, Callable[[], bool]]] = [
        ("Metadata", lambda: isinstance(metadata, Metadata)),
        ("state_dict_metadata", lambda: isinstance(metadata.state_dict_metadata, dict)),
        ("storage_data", lambda: isinstance(metadata.storage_data, dict)),
        (
            "storage_data's files",
            lambda: all(
                isinstance(index, MetadataIndex) and isinstance(info, _StorageInfo)
                for index, info in metadata.storage_data.items()
            ),
        ),
    ]
    for what, is_good in good:
        if not is_good():
            raise ValueError(f"{path} is not what dcp.save writes into a folder: its {what} is something else")


def _raise_faults(what: str, faults: list[str]) -> None:
    if not faults:
        return
    more = len(faults) - _MOST_FAULTS
    lines = faults[:_MOST_FAULTS] + ([f"and {more} more"] if more > 0 else [])
    raise ValueError(f"{what}:\n  " + "\n  ".join(lines))
