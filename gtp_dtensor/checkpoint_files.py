"""Archives of ``torch.save`` inside the files of a checkpoint: whether they are what was written."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

_BLOCK = 1 << 20  # bytes that are summed at a time


class Slice(io.RawIOBase):
    """``length`` bytes of a file from ``offset`` on, as a file. That of torch cannot seek from its end, as zipfile does.

    One at a time: reading moves the file's own place.
    """

    def __init__(self, file: IO[bytes], offset: int, length: int) -> None:
        super().__init__()
        self.file, self.offset, self.length = file, offset, length
        self.place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        place = {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.length}[whence] + offset
        if place < 0:
            raise OSError(f"a place {place} bytes before the start")
        self.place = place
        return place

    def tell(self) -> int:
        return self.place

    def readinto(self, buffer: Any, /) -> int:
        self.file.seek(self.offset + self.place)
        num_bytes = min(len(buffer), max(self.length - self.place, 0))
        num_read: int = self.file.readinto(memoryview(buffer)[:num_bytes])  # type: ignore[attr-defined]
        self.place += num_read
        return num_read


def is_safetensors(path: Path, offset: int) -> bool:
    """Whether a JSON header with its length before it starts there."""
    with path.open("rb") as file:
        file.seek(offset)
        start = file.read(9)
    return start[8:] == b"{" and not start.startswith(b"PK")


def archive_fault(part: IO[bytes], length: int, checksums: bool) -> str | None:
    """How ``length`` bytes fail to be an archive of torch.save whose records are as they were written."""
    part.seek(0)
    if part.read(4) != b"PK\3\4":
        return "it is no archive of torch.save"
    try:
        with zipfile.ZipFile(part) as archive:
            records = archive.infolist()
            num_bytes = sum(record.file_size for record in records)
            is_packed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
            if is_packed or num_bytes > length:
                return f"it inflates to {num_bytes} bytes from {length}, and torch.save compresses nothing"
            if checksums and num_bytes and not any(record.CRC for record in records):
                return "it was saved without checksums (checksums=False loads it as it is)"
            for record in records:
                if record.filename.endswith("/data.pkl") and b"\nbytearray\n" in _content(part, record):
                    return "it holds a bytearray, which is as long as a pickle says: save bytes"
                if checksums:
                    with archive.open(record) as file:
                        while file.read(_BLOCK):  # compares the sum at the end
                            pass
    except Exception as error:  # a broken archive raises almost anything
        return f"{type(error).__name__}: {error}"
    return None


def _content(part: IO[bytes], record: zipfile.ZipInfo) -> bytes:
    """Of a record that is not compressed, with no look at its checksum."""
    part.seek(record.header_offset)
    header = part.read(30)
    part.seek(
        record.header_offset + 30 + sum(struct.unpack("<HH", header[26:]))
    )  # of the name, of what stands after it
    return part.read(record.file_size)
