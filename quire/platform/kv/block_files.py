"""Files that hold a block each: where they lie, and what makes one of them the block of a key.

    path/quire-kv/            for this user alone (0700)
      IDENTITY-RANK-SIZE/     what a worker of a model writes; another identity's are never read
        ab/abcd...            a block: the file is called what its key is, and begins with a header

A file is written beside its place and then renamed, so that it is there whole or not at all. Its header has a SHA-256
of key, identity and contents.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import stat
import struct
from contextlib import suppress
from pathlib import Path

from quire.errors import QuireError
from quire.platform.kv.connector import BlockLayout

logger = logging.getLogger("quire")

_MAGIC = b"quireKV1"
_HEADER = struct.Struct("<8sQ32s16x")  # magic, bytes of the block, SHA-256: 64 bytes
_FOLDER = "quire-kv"
# What is called otherwise is not ours: it is neither counted nor removed.
_PART = re.compile(r"[0-9a-f]{2}")
_NAME = re.compile(r"(?:[0-9a-f]{2}){32,40}")
_NO_FILE = (errno.ELOOP, errno.ENXIO)  # what a link and a socket refuse to be opened with
_PAGE = 4096  # what a file takes is a multiple of it


class BlockFiles:
    """A worker's files. root: of all that quire keeps there; own: the name of this worker's folder in it.

    file_bytes: that a block's file takes.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self.root = Path(layout.settings["path"]) / _FOLDER
        self.own = f"{layout.identity}-{layout.rank}-{layout.size}"
        self.file_bytes = taken(_HEADER.size + layout.block_bytes)
        self._bytes = layout.block_bytes
        self._salt = self.own.encode()
        self._warned = False

    def make_folders(self) -> None:
        """Raises QuireError where others may reach what is in it, and OSError."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.check()
        (self.root / self.own).mkdir(mode=0o700, exist_ok=True)

    def check(self) -> None:
        """Raises QuireError where others may reach what is in it, and OSError."""
        _check_private(self.root)

    def path(self, folder: str, name: str) -> Path:
        return self.root / folder / name[:2] / name

    def read(self, path: Path, key: bytes, into: memoryview) -> bool:
        """Whether a file is the block that this user has written under a key, which is in `into` then. Raises
        OSError."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in _NO_FILE:
                return False
            raise
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return False
            if status.st_size != _HEADER.size + self._bytes:
                return False
            header = bytearray(_HEADER.size)
            whole = _read_all(descriptor, header, into)
        finally:
            os.close(descriptor)
        return whole and header == self._header(key, into)

    def write(self, path: Path, key: bytes, block: memoryview) -> None:
        """Raises OSError, and leaves nothing behind then."""
        begun = path.with_name(f"{path.name}.new")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb", buffering=0) as file:
                for part in (memoryview(self._header(key, block)), block):
                    while part:
                        part = part[file.write(part) or 0 :]
            begun.replace(path)
        except OSError:
            with suppress(OSError):
                begun.unlink()
            raise

    def _header(self, key: bytes, block: memoryview) -> bytes:
        hashed = hashlib.sha256(_MAGIC + struct.pack("<QQ", len(self._salt), len(key)) + self._salt + key)
        hashed.update(block)
        return _HEADER.pack(_MAGIC, len(block), hashed.digest())

    def warn(self, what: str) -> None:
        """Once: a disk that fails does so again and again."""
        if not self._warned:
            self._warned = True
            logger.warning("kv_transfer_config: %s: %s", self.root, what)


def _read_all(descriptor: int, *into: bytearray | memoryview) -> bool:
    """Whether a file fills these, from its beginning on: by one call if the system allows, as each lets other threads
    run, and has to wait for them."""
    left = [memoryview(part) for part in into]
    at = 0
    while left and (count := os.preadv(descriptor, left, at)):
        at += count
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if left:
            left[0] = left[0][count:]
    return not left


def _check_private(root: Path) -> None:
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise QuireError(f"kv_connector_extra_config: {root}: is no folder.")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise QuireError(
            f"kv_connector_extra_config: {root}: others may reach it, and KV blocks tell what prompts say: make it "
            "yours alone (chown, chmod 700), or name another path."
        )


def folders(root: Path, name: re.Pattern[str]) -> list[Path]:
    """Those of a name, and no links."""
    with os.scandir(root) as entries:
        return [
            Path(entry.path) for entry in entries if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]


def parts(folder: Path) -> list[Path]:
    """The folders that blocks lie in, of a worker's."""
    return folders(folder, _PART)


def is_block(name: str, part: str) -> bool:
    """Whether a file of this name in such a folder is a block, or was to become one (`.new`)."""
    name = name.removesuffix(".new")
    return _NAME.fullmatch(name) is not None and name[:2] == part


def taken(size: int) -> int:
    """What a file of so many bytes takes."""
    return -(-size // _PAGE) * _PAGE
