#!/usr/bin/env python3
"""What a checkpoint folder holds, as a table: names, logical shapes, dtypes, chunks, bytes. Runs nothing from it.

    python scripts/inspect_checkpoint.py outputs/checkpoint/step-1000
    python scripts/inspect_checkpoint.py --chunks --match '*.wq.*' outputs/checkpoint/step-1000
    python scripts/inspect_checkpoint.py --verify outputs/checkpoint/step-1000

Reads folders of torch.distributed.checkpoint and of .safetensors files. Exit status 2: the folder is not a whole
checkpoint, with the reason. Characters that would move a cursor are escaped.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from gtp_dtensor import CheckedFileSystemReader
from gtp_dtensor.checkpoint_metadata import shown


@dataclass(frozen=True)
class Row:
    """One name: logical shape and dtype ("-" where it is no tensor), (offsets, sizes, file) of chunks, bytes in files."""

    fqn: str
    shape: str
    dtype: str
    chunks: list[tuple[tuple[int, ...], tuple[int, ...], str]]
    num_bytes: int


def dcp_rows(folder: Path, verify: bool) -> list[Row]:
    """Of a folder that ``dcp.save`` wrote; ``verify`` reads all of it, and compares checksums.

    Raises:
        OSError, ValueError: it is not whole.
    """
    reader = CheckedFileSystemReader(folder)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    reader.check_files()
    if verify:
        reader.check_contents()
    rows = []
    for fqn, saved in sorted(metadata.state_dict_metadata.items()):
        if isinstance(saved, TensorStorageMetadata):
            keys = [MetadataIndex(fqn, chunk.offsets) for chunk in saved.chunks]
            chunks = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in saved.chunks]
            shape, dtype = str(tuple(saved.size)), str(saved.properties.dtype).removeprefix("torch.")
        else:
            keys, chunks, shape, dtype = [MetadataIndex(fqn)], [((), ())], "-", "-"
        missing = [key.offset and tuple(key.offset) for key in keys if key not in metadata.storage_data]
        if missing:
            raise ValueError(f"{folder}: no file has {shown(fqn)} at {missing[0]}")
        infos = [metadata.storage_data[key] for key in keys]
        places = [(*chunk, info.relative_path) for chunk, info in zip(chunks, infos)]
        num_bytes = sum({(info.relative_path, info.offset): info.length for info in infos}.values())
        rows.append(Row(fqn, shape, dtype, places, num_bytes))
    return rows


def safetensors_rows(folder: Path) -> list[Row]:
    """Of a folder of .safetensors files.

    Raises:
        OSError, ValueError: a file is broken, or the index names one that is not there.
    """
    from safetensors import SafetensorError, safe_open

    names = {path.name for path in folder.glob("*.safetensors") if path.is_file()}
    for index in folder.glob("*.safetensors.index.json"):
        missing = files_of(index) - names
        if missing:
            raise FileNotFoundError(
                f"{folder}: {index.name} names {', '.join(sorted(missing))}, which it does not have"
            )
    rows = []
    for name in sorted(names):
        try:
            with safe_open(folder / name, framework="pt") as file:
                for fqn in sorted(file.keys()):
                    part = file.get_slice(fqn)
                    shape, dtype = tuple(part.get_shape()), part.get_dtype()
                    bits = int("".join(filter(str.isdigit, dtype.split("_")[0])) or 8)  # "F8_E4M3", "BF16", "BOOL"
                    rows.append(
                        Row(fqn, str(shape), dtype, [((0,) * len(shape), shape, name)], math.prod(shape) * bits // 8)
                    )
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is broken: {error}") from error
    return rows


def files_of(index: Path) -> set[str]:
    """The files that the index of a model in several .safetensors files names.

    Raises:
        OSError, ValueError: it cannot be read, or is no index.
    """
    try:
        content = json.loads(index.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index} is broken: {error}") from error
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{index} has no weight_map from names of weights to names of files")
    return set(weight_map.values())


def cuts(row: Row) -> str:
    """The chunks in short: how many parts each dim is cut into, and their sizes along it."""
    texts = []
    for dim in range(len(row.chunks[0][0])):
        parts = dict(sorted((offsets[dim], sizes[dim]) for offsets, sizes, _ in row.chunks if math.prod(sizes)))
        if len(parts) > 1:
            sizes = sorted(set(parts.values()))
            texts.append(f"dim {dim}: {len(parts)} x {sizes[0] if len(sizes) == 1 else f'{sizes[0]}..{sizes[-1]}'}")
    return ", ".join(texts) or ("whole" if row.shape != "-" else "-")


def table(rows: list[Row], with_chunks: bool) -> str:
    """The rows as text, with a line of sums."""
    header = ("name", "shape", "dtype", "chunks", "cut", "bytes")
    cells = [(shown(r.fqn), r.shape, r.dtype, str(len(r.chunks)), cuts(r), f"{r.num_bytes:,}") for r in rows]
    widths = [max(len(line[column]) for line in (header, *cells)) for column in range(len(header))]

    def line(texts: tuple[str, ...]) -> str:
        pairs = enumerate(zip(texts, widths))
        return "  ".join(t.rjust(w) if column in (3, 5) else t.ljust(w) for column, (t, w) in pairs).rstrip()

    lines = [line(header)]
    for row, texts in zip(rows, cells):
        lines.append(line(texts))
        if with_chunks:
            lines += [f"    at {offsets} of {sizes} in {shown(file)}" for offsets, sizes, file in row.chunks]
    num_files = len({file for row in rows for *_, file in row.chunks})
    num_tensors = sum(row.shape != "-" for row in rows)
    total = sum(row.num_bytes for row in rows)
    lines.append(
        f"{num_tensors} tensors, {len(rows) - num_tensors} other entries, {total:,} bytes in {num_files} files"
    )
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--match", default="*", metavar="PATTERN", help="names to list, as in a shell (default: all)")
    parser.add_argument("--chunks", action="store_true", help="a line for each chunk: offsets, sizes, file")
    parser.add_argument("--verify", action="store_true", help="read everything, and compare checksums (DCP only)")
    args = parser.parse_args(arguments)
    try:
        has_files = any(path.is_file() for path in args.folder.glob("*.safetensors"))
        if has_files and not (args.folder / ".metadata").exists():
            if args.verify:
                raise ValueError(f"{args.folder}: .safetensors files have no checksums, there is nothing to --verify")
            rows = safetensors_rows(args.folder)
        else:
            rows = dcp_rows(args.folder, args.verify)
    except (OSError, ValueError) as error:
        print("\n".join(shown(line) for line in str(error).split("\n")), file=sys.stderr)
        return 2
    rows = [row for row in rows if fnmatchcase(row.fqn, args.match)]
    print(table(rows, args.chunks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
