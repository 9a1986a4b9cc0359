#!/usr/bin/env python3
"""What a checkpoint folder holds, as a table: names, logical shapes, dtypes, chunks, bytes. Runs nothing from it.

    python scripts/inspect_checkpoint.py outputs/checkpoint/step-1000
    python scripts/inspect_checkpoint.py --chunks --match '*.wq.*' outputs/checkpoint/step-1000

Reads folders of torch.distributed.checkpoint and of .safetensors files. Exit status 2: the folder is not a whole
checkpoint, with the reason.
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


@dataclass(frozen=True)
class Row:
    """One name: logical shape and dtype ("-" where it is no tensor), (offsets, sizes, file) of chunks, bytes in files."""

    fqn: str
    shape: str
    dtype: str
    chunks: list[tuple[tuple[int, ...], tuple[int, ...], str]]
    num_bytes: int


def dcp_rows(folder: Path) -> list[Row]:
    """Of a folder that ``dcp.save`` wrote.

    Raises:
        FileNotFoundError, ValueError: it is not whole.
    """
    reader = CheckedFileSystemReader(folder)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    reader.check_files()
    rows = []
    for fqn, saved in sorted(metadata.state_dict_metadata.items()):
        if isinstance(saved, TensorStorageMetadata):
            keys = [MetadataIndex(fqn, chunk.offsets) for chunk in saved.chunks]
            chunks = list(zip((tuple(c.offsets) for c in saved.chunks), (tuple(c.sizes) for c in saved.chunks)))
            # Empty parts of an uneven cut share one place.
            num_elements = sum(math.prod(sizes) for _, sizes in dict(chunks).items())
            if num_elements != saved.size.numel():
                raise ValueError(f"{folder}: chunks of {fqn} hold {num_elements} of its {saved.size.numel()} elements")
            shape, dtype = str(tuple(saved.size)), str(saved.properties.dtype).removeprefix("torch.")
        else:
            keys, chunks, shape, dtype = [MetadataIndex(fqn)], [((), ())], "-", "-"
        missing = [key.offset for key in keys if key not in metadata.storage_data]
        if missing:
            raise ValueError(f"{folder}: no file has {fqn} at {missing}")
        infos = [metadata.storage_data[key] for key in keys]
        places = [(*chunk, info.relative_path) for chunk, info in zip(chunks, infos)]
        num_bytes = sum({(info.relative_path, info.offset): info.length for info in infos}.values())
        rows.append(Row(fqn, shape, dtype, places, num_bytes))
    return rows


def safetensors_rows(folder: Path) -> list[Row]:
    """Of a folder of .safetensors files.

    Raises:
        FileNotFoundError, ValueError: a file is broken, or the index names one that is not there.
    """
    from safetensors import SafetensorError, safe_open

    names = {path.name for path in folder.glob("*.safetensors")}
    for index in folder.glob("*.safetensors.index.json"):
        missing = set(json.loads(index.read_text())["weight_map"].values()) - names
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
    cells = [(r.fqn, r.shape, r.dtype, str(len(r.chunks)), cuts(r), f"{r.num_bytes:,}") for r in rows]
    widths = [max(len(line[column]) for line in (header, *cells)) for column in range(len(header))]

    def line(texts: tuple[str, ...]) -> str:
        pairs = enumerate(zip(texts, widths))
        return "  ".join(t.rjust(w) if column in (3, 5) else t.ljust(w) for column, (t, w) in pairs).rstrip()

    lines = [line(header)]
    for row, texts in zip(rows, cells):
        lines.append(line(texts))
        if with_chunks:
            lines += [f"    at {offsets} of {sizes} in {file}" for offsets, sizes, file in row.chunks]
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
    args = parser.parse_args(arguments)
    is_safetensors = not (args.folder / ".metadata").exists() and any(args.folder.glob("*.safetensors"))
    try:
        rows = (safetensors_rows if is_safetensors else dcp_rows)(args.folder)
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    rows = [row for row in rows if fnmatchcase(row.fqn, args.match)]
    print(table(rows, args.chunks))
    return 0


if __name__ == "__main__":
    sys.exit(main())
