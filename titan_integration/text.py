"""Where the text of the data sets comes from: files on this machine, in a fixed order."""

from __future__ import annotations

import os
import sysconfig

from torchtitan.tools.logging import logger

# Names of our data sets (`training.dataset`); all others are torchtitan's.
DATASETS = ("python_stdlib", "text_files")

# Tests repeat themselves, encodings and pydoc_data are tables, the rest is not part of every installation.
_SKIPPED_FOLDERS = frozenset(
    "site-packages dist-packages test tests idlelib lib2to3 turtledemo tkinter ensurepip encodings pydoc_data "
    "__pycache__".split()
)
# The whole standard library is tokenized in about three seconds; the limits keep it so for later ones.
MAX_STDLIB_BYTES = 8 << 20
MAX_FILE_BYTES = 256 << 10


def stdlib_documents(max_bytes: int = MAX_STDLIB_BYTES) -> list[str]:
    """The Python sources of the running interpreter's standard library, sorted by path, at most `max_bytes` in all."""
    root = sysconfig.get_paths()["stdlib"]
    documents: list[str] = []
    num_bytes = 0
    for path in _files(root, skipped=_SKIPPED_FOLDERS):
        size = os.path.getsize(path)
        if not path.endswith(".py") or size > MAX_FILE_BYTES:
            continue
        if num_bytes + size > max_bytes:
            break
        with open(path, encoding="utf-8", errors="replace") as file:
            documents.append(file.read())
        num_bytes += size
    if not documents:
        raise FileNotFoundError(
            f"no Python sources below {root}; set training.dataset_path to a folder of text files instead"
        )
    logger.info(f"Text: {len(documents)} files of the Python standard library, {num_bytes / 2**20:.1f} MiB")
    return documents


def folder_documents(folder: str) -> list[str]:
    """The UTF-8 text files below `folder`, sorted by path; hidden and binary files are left out and counted in the log.

    Raises:
        FileNotFoundError: no such folder, or no text file in it.
    """
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"training.dataset_path = {folder!r} is not a folder")
    documents: list[str] = []
    num_left_out = 0
    for path in _files(folder, skipped=frozenset()):
        with open(path, "rb") as file:
            content = file.read()
        try:
            if b"\0" in content:
                raise ValueError("binary")
            documents.append(content.decode("utf-8"))
        except ValueError:
            num_left_out += 1
    if not documents:
        raise FileNotFoundError(f"training.dataset_path = {folder!r}: no UTF-8 text file below it")
    logger.info(f"Text: {len(documents)} files below {folder}, {num_left_out} binary files left out")
    return documents


def load_documents(dataset: str, dataset_path: str | None) -> list[str]:
    """The documents of one of our data sets.

    Args:
        dataset: "python_stdlib" or "text_files".
        dataset_path: a folder of text files; needed by "text_files", and read in place of the standard library
            by "python_stdlib".
    """
    if dataset not in DATASETS:
        raise ValueError(f"training.dataset = {dataset!r}: ours are {', '.join(DATASETS)}")
    if dataset_path:
        return folder_documents(dataset_path)
    if dataset == "text_files":
        raise ValueError("training.dataset = 'text_files' needs training.dataset_path, a folder of text files")
    return stdlib_documents()


def _files(root: str, skipped: frozenset[str]):
    """Paths below `root`, sorted; without hidden files and folders, and without the folders named in `skipped`."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield os.path.join(folder, name)
