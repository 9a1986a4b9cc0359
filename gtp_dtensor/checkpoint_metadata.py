"""The table of contents of a checkpoint of ``torch.distributed.checkpoint`` (DCP): unpickled without trust, and checked.

DCP pickles it. Here an unpickler makes the classes that it consists of and nothing else, changes no class, and allocates
no more than a multiple of the file's size; what it made is then looked at field by field.
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
import pickle
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from types import FunctionType, NoneType
from typing import Any, ClassVar

import torch
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
from torch.serialization import _get_layout  # how torch pickles torch.strided and the like

_MOST_DIMS = 64  # as many as torch has
_MOST_ELEMENTS = 2**63 - 1

_FIELDS: dict[type, dict[str, tuple[type, ...]]] = {  # what may stand in them; NoneType: or they are absent
    Metadata: {
        "state_dict_metadata": (dict,),
        "planner_data": (dict, NoneType),
        "storage_data": (dict,),
        "storage_meta": (StorageMeta, NoneType),
        "version": (str, NoneType),
    },
    MetadataIndex: {"fqn": (str,), "offset": (torch.Size, NoneType), "index": (int, NoneType)},
    StorageMeta: {
        "checkpoint_id": (str, tuple, NoneType),  # a tuple: the parts of a path
        "save_id": (str, NoneType),
        "load_id": (str, NoneType),
        "modules": (list, NoneType),
    },
    TensorStorageMetadata: {"properties": (TensorProperties,), "size": (torch.Size,), "chunks": (list,)},
    BytesStorageMetadata: {},
    ChunkStorageMetadata: {"offsets": (torch.Size,), "sizes": (torch.Size,)},
    TensorProperties: {
        "dtype": (torch.dtype,),
        "layout": (torch.layout,),
        "requires_grad": (bool,),
        "memory_format": (torch.memory_format,),
        "pin_memory": (bool,),
    },
    _StorageInfo: {
        "relative_path": (str,),
        "offset": (int,),
        "length": (int,),
        "transform_descriptors": (list, tuple, NoneType),
    },
}


def _size(dims: Sequence[int]) -> torch.Size:
    if type(dims) not in (tuple, list) or len(dims) > _MOST_DIMS or not {*map(type, dims)} <= {int}:
        raise pickle.UnpicklingError(f"a torch.Size is made of up to {_MOST_DIMS} ints")
    return torch.Size(dims)


def _parts(*parts: Any) -> tuple[Any, ...]:
    """A path, of whatever operating system: for people only. Joined when it is the only one (a pickle may have many)."""
    return parts


def _memory_format(code: int) -> _MEM_FORMAT_ENCODING:
    return _MEM_FORMAT_ENCODING(code)


_MAKERS = {  # what a pickle calls, instead of what it names
    ("torch", "Size"): _size,
    ("collections", "OrderedDict"): dict,
    (_MEM_FORMAT_ENCODING.__module__, _MEM_FORMAT_ENCODING.__qualname__): _memory_format,
    (_get_layout.__module__, _get_layout.__qualname__): _get_layout,
}
_CALLED = frozenset((*_MAKERS.values(), _parts))
_CLASSES = {(cls.__module__, cls.__qualname__): cls for cls in _FIELDS}
_OPCODES = (  # of what pickle.dumps writes for metadata with protocols 2 to 5
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE),
    *(pickle.BINFLOAT, pickle.SHORT_BINBYTES),  # for an error that names the field
    *(pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINUNICODE, pickle.SHORT_BINUNICODE),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE, pickle.EMPTY_LIST),
    *(pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.MEMOIZE),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)


class _Unpickler(pickle._Unpickler):
    """In Python: that in C fills an array up to any index that the file names, and lets BUILD change classes."""

    dispatch: ClassVar[dict[int, Any]] = {}

    def find_class(self, module: str, name: str) -> Any:
        """Looks up by the whole name: attributes of what is allowed are not reached."""
        if (module, name) in _MAKERS:
            return _MAKERS[module, name]
        if (module, name) in _CLASSES:
            return _CLASSES[module, name]
        if module.partition(".")[0] == "pathlib" and name in ("PosixPath", "WindowsPath"):
            return _parts
        if module == "torch" and isinstance(torch.__dict__.get(name), torch.dtype):
            return torch.__dict__[name]
        raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint's metadata and was not loaded")

    def refuse(self) -> None:
        raise pickle.UnpicklingError("an instruction has no place in a checkpoint's metadata")

    def load_reduce(self) -> None:
        args, maker = self.stack.pop(), self.stack[-1]
        if type(args) is not tuple or type(maker) not in (FunctionType, type) or maker not in _CALLED:
            raise pickle.UnpicklingError(f"a {type(maker).__name__} has no place where a function is called")
        self.stack[-1] = maker(*args)

    def load_newobj(self) -> None:
        args, cls = self.stack.pop(), self.stack[-1]
        if args != () or not isinstance(cls, type) or cls not in _FIELDS:
            raise pickle.UnpicklingError("an object is made of no class of DCP's metadata, or with arguments")
        self.stack[-1] = cls.__new__(cls)

    def load_build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        cls = type(made)
        fields = _FIELDS.get(cls)  # exactly: neither classes nor functions are in there
        if fields is None:
            raise pickle.UnpicklingError(f"a {cls.__name__} has no place where fields are set")
        if cls is TensorProperties:
            made.__setstate__(state)
            return
        if type(state) is not dict or not fields.keys() >= state.keys():
            raise pickle.UnpicklingError(f"a {cls.__name__} has other fields than {', '.join(fields)}")
        if cls is MetadataIndex and type(state.get("fqn")) is not str:
            raise pickle.UnpicklingError("MetadataIndex.fqn is not a str")
        vars(made).update(state)

    def load_setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(key, value)

    def load_setitems(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(key, value)

    def _set(self, key: Any, value: Any) -> None:
        # Other keys: the hash of a deep tuple overflows the stack.
        if type(self.stack[-1]) is not dict or type(key) not in (str, MetadataIndex):
            raise pickle.UnpicklingError(f"a {type(key).__name__} has no place as a key")
        self.stack[-1][key] = value


_Unpickler.dispatch = dict.fromkeys(range(256), _Unpickler.refuse)
_Unpickler.dispatch |= {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPCODES}
_Unpickler.dispatch |= {
    pickle.REDUCE[0]: _Unpickler.load_reduce,
    pickle.NEWOBJ[0]: _Unpickler.load_newobj,
    pickle.BUILD[0]: _Unpickler.load_build,
    pickle.SETITEM[0]: _Unpickler.load_setitem,
    pickle.SETITEMS[0]: _Unpickler.load_setitems,
}


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """The garbage collector would walk all objects again and again while millions are made, and find nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def load_metadata(path: Path) -> Metadata:
    """What a ``.metadata`` file holds; ``storage_meta.checkpoint_id`` is a string.

    Every tensor is whole in its chunks, every place is in a file below the folder.

    Raises:
        ValueError: it cannot be read, or holds something else; names the file, and the class or the field.
    """
    with _without_collector():
        try:
            metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        except Exception as error:  # a broken pickle raises almost anything
            raise ValueError(f"{path} cannot be read: {type(error).__name__}: {shown(str(error))}") from error
        if fault := _fault_of(metadata):
            raise ValueError(f"{path} is not what dcp.save writes into a folder: {fault}")
        meta = metadata.storage_meta
        if meta is not None and isinstance(meta.checkpoint_id, tuple):
            meta.checkpoint_id = str(PurePosixPath(*meta.checkpoint_id))
        return metadata


def shown(text: str) -> str:
    """A text with no character that moves a cursor or fakes a line."""
    return text if text.isprintable() else repr(text)[1:-1]


def _field_fault(made: Any, cls: type) -> str | None:
    """Starts with the name of the field, or with " is" for the whole."""
    if type(made) is not cls:
        return f" is a {type(made).__name__}, not a {cls.__name__}"
    fields = vars(made)
    for name, types in _FIELDS[cls].items():
        value = fields.get(name)
        if type(value) not in types:
            what = "missing" if name not in fields else f"a {type(value).__name__}"
            return f".{name} is {what}, not a {' or '.join(t.__name__ for t in types if t is not NoneType)}"
    return None


def _fault_of(metadata: Any) -> str | None:
    if fault := _field_fault(metadata, Metadata):
        return f"Metadata{fault}"
    for key, saved in metadata.state_dict_metadata.items():
        if type(key) is not str:
            return f"state_dict_metadata has a {type(key).__name__} as a key, not a str"
        if type(saved) is BytesStorageMetadata:
            continue
        if fault := _tensor_fault(saved):
            return f"state_dict_metadata: {shown(key)}{fault}"
        if fault := chunk_fault(saved):
            return f"{shown(key)}: {fault}"
    for key, parts in (metadata.planner_data or {}).items():
        if type(key) is not str:
            return f"planner_data has a {type(key).__name__} as a key, not a str"
        if type(parts) is not tuple or not parts or any(type(part) not in (str, int) for part in parts):
            return f"planner_data: {shown(key)} has no path of strings and ints"
    if metadata.storage_meta is not None:
        if fault := _field_fault(metadata.storage_meta, StorageMeta):
            return f"storage_meta{fault}"
        parts = metadata.storage_meta.checkpoint_id
        if isinstance(parts, tuple) and any(type(part) is not str for part in parts):
            return "storage_meta.checkpoint_id is no path"
    return _storage_fault(metadata)


def _tensor_fault(saved: Any) -> str | None:
    fault = _field_fault(saved, TensorStorageMetadata)
    if fault:
        return fault
    if fault := _field_fault(saved.properties, TensorProperties):
        return f".properties{fault}"
    for number, chunk in enumerate(saved.chunks):
        if fault := _field_fault(chunk, ChunkStorageMetadata):
            return f".chunks[{number}]{fault}"
    return None


def _storage_fault(metadata: Metadata) -> str | None:
    good: set[str] = set()  # paths
    for index, info in metadata.storage_data.items():
        fault = _field_fault(index, MetadataIndex)
        if fault:
            return f"storage_data has a key that{fault}"
        fault = _field_fault(info, _StorageInfo)
        if fault:
            return f"storage_data: {shown(index.fqn)}{fault}"
        path, offset, length = info.relative_path, info.offset, info.length
        what = f"storage_data: {shown(index.fqn)}"
        if offset < 0 or length < 0:
            return f"{what} is at offset {offset} and has length {length}"
        if info.transform_descriptors:
            return f"{what} was written with extensions (such as compression), which are not undone here"
        if path in good:
            continue
        if not path.strip(".") or not path.isprintable():
            return f"{what}.relative_path {path!r} is no name of a file"
        if Path(path).is_absolute() or ".." in PurePosixPath(path).parts:
            return f"{what}: {path} lies outside of the folder"
        good.add(path)
    return None


def sharing_fault(storage_data: dict[MetadataIndex, _StorageInfo]) -> str | None:
    """Two chunks or entries that have a byte of a file in common."""
    ranges: dict[str, list[tuple[int, int, str]]] = {}
    for index, info in storage_data.items():
        ranges.setdefault(info.relative_path, []).append((info.offset, info.offset + info.length, index.fqn))
    for path, places in ranges.items():
        places.sort()
        for (_, stop, one), (start, _, other) in zip(places, places[1:]):
            if start < stop:
                return f"{shown(one)} and {shown(other)} share bytes of {path}"
    return None


def chunk_fault(saved: TensorStorageMetadata) -> str | None:
    """How the chunks fail to be a cut of the tensor: each within it, none over another, together all of it.

    Empty ones do not count. Time: n log n for n chunks that lie in a grid, or a grid of grids, as those of all DTensors.
    """
    size = tuple(saved.size)
    if any(dim < 0 for dim in size) or math.prod(size) > _MOST_ELEMENTS:
        return f"the checkpoint gives it the shape {size}"
    boxes = []
    num_elements = 0
    for chunk in saved.chunks:
        starts, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
        if len(starts) != len(size) or len(sizes) != len(size):
            return f"the checkpoint has a chunk at {starts} of {sizes} of its {len(size)} dims"
        stops = tuple(map(int.__add__, starts, sizes))
        if any(start < 0 or length < 0 for start, length in zip(starts, sizes)) or any(
            stop > dim for stop, dim in zip(stops, size)
        ):
            return f"the checkpoint has a chunk at {starts} of {sizes} outside of its shape {size}"
        num_chunk = math.prod(sizes)
        if num_chunk:
            boxes.append((starts, stops))
            num_elements += num_chunk
    if num_elements != math.prod(size):
        return f"the checkpoint has {num_elements} of the {math.prod(size)} elements"
    return _overlap(boxes, len(size))


_Box = tuple[tuple[int, ...], tuple[int, ...]]  # starts and stops


def _overlap(boxes: list[_Box], num_dims: int) -> str | None:
    """Cuts the boxes apart, dim by dim, wherever no box lies across; groups that stay together are compared in pairs."""
    work, most_work = 0, 100 * len(boxes) + 10_000
    todo = [(boxes, 0, 0)]
    while todo:
        group, dim, num_tried = todo.pop()
        if len(group) < 2:
            continue
        work += len(group) if num_tried < num_dims else len(group) ** 2
        if work > most_work:
            return f"{len(group)} of its chunks in the checkpoint interlock or overlap, as those of no DTensor"
        if num_tried == num_dims:
            for number, (starts, stops) in enumerate(group):
                for others, ends in group[:number]:
                    if all(a < d and c < b for a, b, c, d in zip(starts, stops, others, ends)):
                        return f"chunks of the checkpoint overlap, those at {starts} and {others}"
            continue
        groups: list[list[_Box]] = []
        reached = None
        for box in sorted(group, key=lambda box: box[0][dim]):
            if reached is None or box[0][dim] >= reached:
                groups.append([])
            groups[-1].append(box)
            reached = max(reached or 0, box[1][dim])
        num_tried = num_tried + 1 if len(groups) == 1 else 1
        todo += [(part, (dim + 1) % num_dims, num_tried) for part in groups]
    return None


def raise_faults(what: str, faults: list[str]) -> None:
    """Raise a ``ValueError`` if there are any; names the first ten."""
    if not faults:
        return
    more = len(faults) - 10
    lines = faults[:10] + ([f"and {more} more"] if more > 0 else [])
    raise ValueError(f"{what}:\n  " + "\n  ".join(lines))
