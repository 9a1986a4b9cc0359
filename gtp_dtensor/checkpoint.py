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
import importlib
import io
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from .checkpoint_files import Slice, archive_fault, is_safetensors
from .checkpoint_metadata import chunk_fault, load_metadata, raise_faults, sharing_fault, shown

_METADATA_FILE = ".metadata"


class CheckedFileSystemReader(FileSystemReader):
    """Reads a folder that ``dcp.save`` wrote. Before any tensor is read, all that this rank needs is there.

    Metadata goes through an unpickler that knows DCP's metadata classes only, and entries that are not tensors through
    ``torch.load(weights_only=True)`` (``torch.serialization.add_safe_globals`` extends what that accepts). Metadata of
    single ranks, which ``dcp.save`` writes without collectives only, is not read.

    Before anything is written: metadata is sound, files are there and as long as they should be, entries that are not
    tensors can be loaded. While a tensor's chunk is read, before it is written: its checksums, which ``torch.load`` passes
    over, and its shape and dtype. What rotted inside of a file is then not loaded, but where ``verify`` is False it
    shows by an error on all ranks when other tensors may have been written already: go on from another checkpoint then.

    Args:
        path: the folder.
        checksums: compare them. Costs a pass over the bytes in the page cache, about a second for each GB of a rank.
            False: for checkpoints that were saved under ``torch.serialization.set_crc32_options(False)``.
        verify: read all that this rank needs once before anything is written: nothing is half loaded. Costs a second
            read of it all.
    """

    def __init__(self, path: str | os.PathLike[str], *, checksums: bool = True, verify: bool = False) -> None:
        super().__init__(path)
        self.checksums, self.verify = checksums, verify
        self._saved: Metadata | None = None

    def read_metadata(self) -> Metadata:
        """The checkpoint's table of contents.

        Raises:
            FileNotFoundError: there is none: no checkpoint, its save did not finish, or used no collectives.
            ValueError: it cannot be read, or holds something else; names the class or the field.
        """
        folder = Path(self.path)
        path = folder / _METADATA_FILE
        if not path.is_file():
            what = "the save into it did not finish: load another one" if folder.is_dir() else "no such folder"
            if any(folder.glob(f"__*{_METADATA_FILE}")):
                what = (
                    "it was saved with use_collectives=False, each rank's part by itself: load it by DCP's own reader, "
                    "on as many ranks, and save it with collectives"
                )
            raise FileNotFoundError(f"{folder} is not a whole checkpoint, it has no {_METADATA_FILE} ({what})")
        if not path.resolve().is_relative_to(folder.resolve()):
            raise ValueError(f"{path} is a link that leaves the folder")
        return load_metadata(path)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Keep what ``read_metadata`` returned."""
        super().set_up_storage_reader(metadata, is_coordinator, *args, **kwargs)
        self._saved = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Check what ``plan`` will read.

        Raises:
            ValueError: names the files that are missing or short, the entry that is not to be unpickled, or with
                ``verify`` the tensor that is broken.
        """
        plan = super().prepare_local_plan(plan)
        self.check_files(item.storage_index for item in plan.items)
        entries = [item for item in plan.items if item.type == LoadItemType.BYTE_IO]
        self.read_data(LoadPlan(entries), _BytesCheck())
        if self.verify:
            self.check_contents(item.storage_index for item in plan.items)
        return plan

    def check_files(self, indices: Iterable[MetadataIndex] | None = None) -> None:
        """Whether the files have all bytes of these chunks and entries, or of everything.

        Args:
            indices: keys of the metadata's ``storage_data``, which ``set_up_storage_reader`` was given.

        Raises:
            ValueError: names the files that are missing or short, in another format or elsewhere, chunks that no file
                has, and (of everything) chunks that share bytes.
        """
        ends: dict[str, int] = {}
        starts: dict[str, int] = {}  # of a tensor
        faults = []
        for index in self.storage_data if indices is None else indices:
            info = self.storage_data.get(index)
            if info is None:
                faults.append(f"{shown(index.fqn)}: no file has the chunk at {index.offset}")
                continue
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
            if index.offset is not None:
                starts.setdefault(info.relative_path, info.offset)
        folder = Path(self.path).resolve()
        for name, end in sorted(ends.items()):
            path = folder / name
            if not path.is_file():
                faults.append(f"{name} is missing")
            elif not path.resolve().is_relative_to(folder):
                faults.append(f"{name} is a link that lies outside of the folder: put the file itself there")
            elif path.stat().st_size < end:
                faults.append(f"{name} has {path.stat().st_size} bytes and needs {end}: it is truncated")
            elif name in starts and is_safetensors(path, starts[name]):
                faults.append(f"{name} is in the format of SerializationFormat.SAFETENSORS: save with TORCH_SAVE")
        if not faults and (fault := sharing_fault(self.storage_data)):
            faults.append(fault)
        raise_faults(f"{os.fspath(self.path)} is not a whole checkpoint, nothing was loaded", faults)

    def check_contents(self, indices: Iterable[MetadataIndex] | None = None) -> None:
        """Whether these chunks and entries can be loaded, or everything: reads all of them.

        Raises:
            ValueError: names those that are broken.
        """
        faults = []
        for name, places in self._by_file(self.storage_data if indices is None else indices).items():
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
                for index in places:
                    try:
                        part = self._checked_slice(stream, index)
                        if index.offset is not None:
                            self._load_chunk(part, index)
                    except ValueError as error:
                        faults.append(str(error))
        raise_faults(f"{os.fspath(self.path)} is broken, nothing was loaded", faults)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what ``plan`` names, each chunk once, and check it before it is written.

        Raises:
            ValueError: names the key of what is broken.
        """
        items: dict[MetadataIndex, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(item.storage_index, []).append(item)
        for name, places in self._by_file(items).items():
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as stream:
                for index in places:
                    part, tensor = self._checked_slice(stream, index), None
                    for item in items[index]:
                        if item.type == LoadItemType.BYTE_IO:
                            part.seek(0)
                            planner.load_bytes(item, io.BytesIO(part.read()))
                            continue
                        tensor = self._load_chunk(part, index) if tensor is None else tensor
                        _write(planner, item, tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _by_file(self, indices: Iterable[MetadataIndex]) -> dict[str, list[MetadataIndex]]:
        """Without repetitions, in the order of the files' bytes."""
        infos = {index: self.storage_data[index] for index in indices}
        names: dict[str, list[MetadataIndex]] = {}
        for index in sorted(infos, key=lambda index: infos[index].offset):
            names.setdefault(infos[index].relative_path, []).append(index)
        return names

    def _checked_slice(self, stream: IO[bytes], index: MetadataIndex) -> Slice:
        """What an open file has of a chunk or entry: a zip archive of ``torch.save`` that inflates to no more than it."""
        info = self.storage_data[index]
        part = Slice(stream, info.offset, info.length)
        if fault := archive_fault(part, info.length, self.checksums):
            where = "" if index.offset is None else f" (the chunk at {tuple(index.offset)})"
            what = "is more than plain data, or broken" if index.offset is None else "is broken"
            raise ValueError(f"{shown(index.fqn)}{where}: not loaded, it {what}: {fault}")
        part.seek(0)
        return part

    def _load_chunk(self, part: Slice, index: MetadataIndex) -> torch.Tensor:
        """The tensor of a file, which has the shape and dtype that metadata give to the chunk."""
        key = f"{shown(index.fqn)} (the chunk at {tuple(index.offset or ())})"
        saved = self._saved.state_dict_metadata.get(index.fqn) if self._saved else None
        if not isinstance(saved, TensorStorageMetadata):
            raise ValueError(f"{key}: not loaded, no metadata of a tensor")
        hint = index.index if index.index is not None and 0 <= index.index < len(saved.chunks) else 0
        places = (saved.chunks[hint], *saved.chunks)
        shape = next((tuple(chunk.sizes) for chunk in places if chunk.offsets == index.offset), None)
        try:
            tensor = _load_tensor(part)
        except Exception as error:
            raise ValueError(f"{key}: not loaded, it is more than a tensor, or broken: {error}") from error
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
            raise ValueError(f"{key}: the file has a {type(tensor).__name__} there, not a dense tensor")
        if tuple(tensor.shape) != shape or tensor.dtype != saved.properties.dtype:
            raise ValueError(
                f"{key}: the file has {tuple(tensor.shape)} of {tensor.dtype} there, and the metadata says {shape} of "
                f"{saved.properties.dtype}"
            )
        return tensor.detach()


class CheckedLoadPlanner(DefaultLoadPlanner):
    """Compares a state dict with the checkpoint, key by key, before anything is loaded.

    Keys that the checkpoint lacks, other shapes and other dtypes are errors.

    Args:
        strict: so are keys that only the checkpoint has, under the top-level names that any rank loads ("model", say; of
            tensors that stand at the top level themselves: all others there).
        casts: other dtypes are converted, as DCP does, where kinds of numbers stay: no floats to ints, no complex to real.
    """

    def __init__(self, *, strict: bool = True, casts: bool = False) -> None:
        super().__init__()
        self.strict, self.casts = strict, casts

    def create_local_plan(self) -> LoadPlan:
        """DCP's plan, after the checks.

        Raises:
            ValueError: names the keys, with what each has and what the state dict has.
        """
        self._fit_extra_state()
        faults = [fault for key, value in self.state_dict.items() if (fault := self._fault_of(key, value))]
        raise_faults("the checkpoint does not fit, nothing was loaded", faults)
        plan = super().create_local_plan()
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
            raise_faults("the checkpoint has more (strict=False passes over it), nothing was loaded", faults)
        return super().create_global_plan(global_plan)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put what is not a tensor into the state dict."""
        loaded = _load_safely(read_item, value)
        # DCP loads anything: it gets bytes that were written here.
        value = io.BytesIO()
        torch.save(loaded, value)
        value.seek(0)
        super().load_bytes(read_item, value)

    def _fit_extra_state(self) -> None:
        """Give the bytes of modules' extra states the length that the checkpoint has: before its first step a module of
        TransformerEngine's has none, and what it stores later grows with its recipe."""
        for key, value in self.state_dict.items():
            saved = self.metadata.state_dict_metadata.get(key)
            is_bytes = type(value) is torch.Tensor and value.dtype is torch.uint8 and value.dim() == 1
            if key.endswith("_extra_state") and is_bytes and isinstance(saved, TensorStorageMetadata):
                if saved.properties.dtype is torch.uint8 and len(saved.size) == 1 and saved.size != value.shape:
                    value.set_(torch.empty(saved.size, dtype=torch.uint8, device=value.device))

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
        dtype = saved.properties.dtype
        if dtype != value.dtype:
            can_cast = torch.can_cast(dtype, value.dtype)
            if not can_cast or not self.casts:
                remedy = "casts=True converts it" if can_cast else "which would lose more than precision"
                return f"{key}: is {value.dtype} here and {dtype} in the checkpoint ({remedy})"
        fault = chunk_fault(saved)  # the reader may be another one, that does not look
        return f"{key}: {fault}" if fault else None


class _BytesCheck(DefaultLoadPlanner):
    """Keeps nothing of what it is given to load."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        _load_safely(read_item, value)


def _load_tensor(part: Slice) -> torch.Tensor:
    """What a chunk's file holds. A weight that torchao's float8 training made a subclass of, for FSDP2 to gather in
    float8, is given as it was before that."""
    part.seek(0)
    try:
        tensor = torch.load(part, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        part.seek(0)
        names = torch.serialization.get_unsafe_globals_in_checkpoint(part)
        if not any(name.startswith("torchao.float8.") for name in names):
            raise
        importlib.import_module("torchao.float8")  # declares its classes safe to load
        part.seek(0)
        tensor = torch.load(part, map_location="cpu", weights_only=True)
    return tensor._tensor if type(tensor).__name__ == "WeightWithDynamicFloat8CastTensor" else tensor


def _load_safely(read_item: ReadItem, value: io.BytesIO) -> Any:
    key = shown(read_item.dest_index.fqn)
    fault = archive_fault(value, value.getbuffer().nbytes, checksums=False)
    if fault:
        raise ValueError(f"{key}: not loaded, it is more than plain data, or broken: {fault}")
    value.seek(0)
    try:
        loaded = torch.load(value, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(f"{key}: not loaded, it is more than plain data, or broken: {error}") from error
    if isinstance(loaded, torch.Tensor):
        raise ValueError(f"{key}: the file has a tensor in the place of plain data")
    return loaded


def _write(planner: LoadPlanner, item: ReadItem, tensor: torch.Tensor) -> None:
    for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths)):
        tensor = tensor.narrow(dim, start, length)
    target = planner.resolve_tensor(item).detach()
    if target.shape != tensor.shape:
        key = shown(item.dest_index.fqn)
        raise ValueError(f"{key}: a part of {tuple(tensor.shape)} does not fit into {tuple(target.shape)}")
    target.copy_(tensor)
    planner.commit_tensor(item, target)
