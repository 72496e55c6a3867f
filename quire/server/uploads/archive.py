"""A .zip that a stranger has sent: its two files of an adapter, and nothing else, with every bound counted."""

from __future__ import annotations

import stat
import struct
import zipfile
import zlib
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import IO, cast

from quire.server.responses.errors import ApiError
from quire.server.uploads.names import MOST_FILES, FileNames, check_path

_PIECE = 256 << 10  # bytes that are unpacked at once
_MOST_AT_ONCE = 512 << 10  # bytes that zipfile may read at once: its table of contents is one read
_ENCRYPTED = 0x1 | 0x40 | 0x2000  # bits of a member's flags
_DAMAGED = (
    zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OverflowError, struct.error
)  # fmt: skip
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # the others' windows may take gigabytes


class _Bounded:
    """A file of which nobody reads much at once. zipfile believes the archive about where and how long its table is."""

    def __init__(self, file: BufferedReader) -> None:
        self._file = file
        self.tell, self.seekable = file.tell, file.seekable

    def seek(self, offset: int, whence: int = 0) -> int:
        """Python 3.11's and 3.12's zipfile goes to where the archive says, though it be before the file's start."""
        try:
            return self._file.seek(offset, whence)
        except OSError as error:
            raise zipfile.BadZipFile(f"it points to byte {offset}") from error

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(_MOST_AT_ONCE + 1 if size < 0 else min(size, _MOST_AT_ONCE + 1))
        if len(data) > _MOST_AT_ONCE:
            raise zipfile.BadZipFile("its table of contents is too long")
        return data


def unpack(path: Path, names: FileNames, write: Callable[[str, bytes], None]) -> None:
    """Read the archive, and hand what it has of an adapter's files to `write`, piece by piece. Raises ApiError, and
    what `write` raises.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(cast(IO[bytes], _Bounded(file))) as archive:
            members = archive.infolist()
            if len(members) > 2 * MOST_FILES:  # folders among them
                raise ApiError(400, f"files: the archive has more than {MOST_FILES} files.", "files")
            for name, member in _chosen(members, names):
                with archive.open(member) as source:
                    while piece := source.read(_PIECE):
                        write(name, piece)
    except _DAMAGED as error:
        raise ApiError(400, f"files: the archive is damaged, or no .zip: {str(error)[:200]}.", "files") from None


def _chosen(members: list[zipfile.ZipInfo], names: FileNames) -> list[tuple[str, zipfile.ZipInfo]]:
    """What is to be unpacked, once every member has been looked at. Raises ApiError."""
    chosen = []
    for member in members:
        path = member.orig_filename
        kind = stat.S_IFMT(member.external_attr >> 16)
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ApiError(400, f"files: {path[:200]!r} is a link or a device, and no file.", "files")
        if kind == stat.S_IFDIR or path.endswith("/"):
            check_path(path.removesuffix("/"), 1)
            continue
        name = names.take(path)
        if name is None:
            continue
        if member.flag_bits & _ENCRYPTED or member.compress_type not in _METHODS:
            raise ApiError(400, f"files: {path[:200]!r} is encrypted, or not deflated: use a plain .zip.", "files")
        chosen.append((name, member))
    return chosen
