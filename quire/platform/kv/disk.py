"""`DiskConnector`: blocks in files, one each, found again after a restart.

    path/quire-kv/            for this user alone (0700), and one engine at a time (`lock-RANK`)
      IDENTITY-RANK-SIZE/     what a worker of a model writes; another identity's are never read
        ab/abcd...            a block: the file is called what its key is, and begins with a header

A file is written beside its place and then renamed, so that it is there whole or not at all. Its header has a SHA-256
of key, identity and contents: a file that was cut, edited, swapped with another or brought from elsewhere is removed,
and its block is computed. The files of all identities count; the least recently used go first.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import stat
import struct
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from quire.errors import QuireError
from quire.platform.kv.connector import BlockLayout, ConnectorCounts

logger = logging.getLogger("quire")

_MAGIC = b"quireKV1"
_HEADER = struct.Struct("<8sQ32s16x")  # magic, bytes of the block, SHA-256: 64 bytes
_FOLDER = "quire-kv"
# What is called otherwise is not ours: it is neither counted nor removed.
_IDENTITY = re.compile(r"[0-9a-f]{64}-(\d+)-\d+", re.ASCII)
_PART = re.compile(r"[0-9a-f]{2}")
_NAME = re.compile(r"(?:[0-9a-f]{2}){32,40}")
_NO_FILE = (errno.ELOOP, errno.ENXIO)  # what a link and a socket refuse to be opened with
_PAGE = 4096  # what a file takes is a multiple of it
_PAUSE_SECONDS = 30.0  # after a write that the system refused


class DiskConnector:
    """Keeps blocks in a folder, as `KVConnector` says.

    Raises QuireError where another engine has the folder, or others may reach what is in it. Where it cannot be
    used, a warning says so, and nothing is kept.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._root = Path(layout.settings["path"]) / _FOLDER
        self._most = int(layout.settings["max_bytes"]) // layout.size
        self._bytes = layout.block_bytes
        self._salt = f"{layout.identity}-{layout.rank}-{layout.size}".encode()
        self._own = self._salt.decode()
        self._rank, self._size = layout.rank, layout.size
        self._files: OrderedDict[tuple[str, str], int] = (
            OrderedDict()
        )  # (folder, name): bytes; least recently used first
        self._total = 0
        self._lock = threading.Lock()  # of the account, and what is counted
        self._stored = self._stored_bytes = self._loaded = self._refused = self._failed = 0
        self._warned = False
        self._pause_until = 0.0
        self._locked: BinaryIO | None = None  # closed with this object, where nobody calls `close`
        self._usable = self._open(layout.rank)

    def __str__(self) -> str:
        return str(self._root)

    # -- beginning and end ----------------------------------------------------------------------------------------

    def _open(self, rank: int) -> bool:
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(self._root)
            self._locked = _lock(self._root / f"lock-{rank}", self._root)
            (self._root / self._own).mkdir(mode=0o700, exist_ok=True)
            self._scan()
            self._make_room(0)
        except OSError as error:
            self._warn(f"cannot be used, and no KV blocks are kept: {error}")
            return False
        return True

    def _scan(self) -> None:
        """Take the files into account by when they were last used; what was begun and not finished goes."""
        found = []
        for folder in _folders(self._root, _IDENTITY):
            if self._keeps(folder.name):
                for part in _folders(folder, _PART):
                    found += [(status, (folder.name, name)) for status, name in _files(part)]
        for (_, size), place in sorted(found):
            self._files[place] = size
            self._total += size

    def _keeps(self, folder: str) -> bool:
        """Each worker counts and removes what those of its rank have written, of whatever identity, as others may be on
        other machines; the first, also that of ranks that there are none of now."""
        named = _IDENTITY.fullmatch(folder)
        assert named is not None
        rank = int(named[1])
        return rank == self._rank or (self._rank == 0 and rank >= self._size)

    def held(self) -> Iterable[bytes]:
        return [bytes.fromhex(name) for folder, name in self._files if folder == self._own]

    def close(self) -> None:
        if self._locked is not None:
            self._locked.close()
            self._locked = None
        self._usable = False

    def counts(self) -> ConnectorCounts:
        with self._lock:
            return ConnectorCounts(
                stored=self._stored,
                stored_bytes=self._stored_bytes,
                refused=self._refused,
                failed=self._failed,
                held_bytes=self._total,
            )

    # -- blocks ---------------------------------------------------------------------------------------------------

    def read(self, key: bytes, into: memoryview) -> bool:
        name = key.hex()
        if not self._usable or (self._own, name) not in self._files:
            return False
        path = self._path(self._own, name)
        try:
            good = self._read(path, key, into)
        except FileNotFoundError:
            self._forget(self._own, name)
            return False
        except OSError as error:
            self._fail(f"cannot be read: {error}")
            return False
        if not good:
            with self._lock:
                self._refused += 1
            logger.warning("%s: is damaged, or not what was written there; it is removed", path)
            self._remove(self._own, name)
            return False
        with self._lock:
            if (self._own, name) in self._files:
                self._files.move_to_end((self._own, name))
        with suppress(OSError):
            os.utime(path)
        return True

    def _read(self, path: Path, key: bytes, into: memoryview) -> bool:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            if error.errno in _NO_FILE:
                return False
            raise
        with open(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or status.st_size != _HEADER.size + self._bytes:
                return False
            header = file.read(_HEADER.size) or b""
            got = 0
            while got < len(into) and (count := file.readinto(into[got:])):
                got += count
        return got == self._bytes and header == self._header(key, into)

    def _header(self, key: bytes, block: memoryview) -> bytes:
        hashed = hashlib.sha256(_MAGIC + struct.pack("<QQ", len(self._salt), len(key)) + self._salt + key)
        hashed.update(block)
        return _HEADER.pack(_MAGIC, len(block), hashed.digest())

    def write(self, key: bytes, block: memoryview) -> tuple[bool, Sequence[bytes]]:
        name, size = key.hex(), _taken(_HEADER.size + len(block))
        if (self._own, name) in self._files:
            return True, []
        if not self._usable or size > self._most or time.monotonic() < self._pause_until:
            return False, []
        gone = self._make_room(size)
        path = self._path(self._own, name)
        begun = path.with_name(f"{name}.new")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            descriptor = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            with open(descriptor, "wb", buffering=0) as file:
                for part in (memoryview(self._header(key, block)), block):
                    while part:
                        part = part[file.write(part) or 0 :]
            begun.replace(path)
        except OSError as error:
            with suppress(OSError):
                begun.unlink()
            self._fail(f"nothing can be written for now: {error}")
            self._pause_until = time.monotonic() + _PAUSE_SECONDS
            return False, gone
        with self._lock:
            self._files[self._own, name] = size
            self._total += size
            self._stored += 1
            self._stored_bytes += len(block)
        return True, gone

    def _path(self, folder: str, name: str) -> Path:
        return self._root / folder / name[:2] / name

    def _make_room(self, size: int) -> list[bytes]:
        """Remove the files that were not used for the longest time, until so many bytes more may be taken. Returns the
        keys among them that could have been read."""
        gone: list[bytes] = []
        while True:
            with self._lock:  # a read changes the order
                if self._total + size <= self._most or not self._files:
                    return gone
                folder, name = next(iter(self._files))
            self._remove(folder, name)
            if folder == self._own:
                gone.append(bytes.fromhex(name))

    def _remove(self, folder: str, name: str) -> None:
        self._forget(folder, name)
        try:
            self._path(folder, name).unlink(missing_ok=True)
        except OSError as error:
            self._fail(f"cannot be removed: {error}")

    def _forget(self, folder: str, name: str) -> None:
        with self._lock:
            self._total -= self._files.pop((folder, name), 0)

    def _fail(self, what: str) -> None:
        with self._lock:
            self._failed += 1
        self._warn(what)

    def _warn(self, what: str) -> None:
        """Once: a disk that fails does so again and again."""
        if not self._warned:
            self._warned = True
            logger.warning("kv_transfer_config: %s: %s", self._root, what)


def _check_private(root: Path) -> None:
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise QuireError(f"kv_connector_extra_config: {root}: is no folder.")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise QuireError(
            f"kv_connector_extra_config: {root}: others may reach it, and KV blocks tell what prompts say: make it "
            "yours alone (chown, chmod 700), or name another path."
        )


def _lock(path: Path, root: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    file = open(descriptor, "rb", buffering=0)  # noqa: SIM115  # it stays open as long as the lock is to be held
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        if not isinstance(error, BlockingIOError):
            raise
        raise QuireError(
            f"kv_connector_extra_config: path={str(root.parent)!r}: another engine has it; end that one, or give "
            "each a folder of its own."
        ) from None
    return file


def _folders(root: Path, name: re.Pattern[str]) -> list[Path]:
    with os.scandir(root) as entries:
        return [
            Path(entry.path) for entry in entries if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]


def _files(folder: Path) -> list[tuple[tuple[int, int], str]]:
    """((time of the last use, bytes), name) of each; those that were begun and not finished are removed."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            name = entry.name.removesuffix(".new")
            if _NAME.fullmatch(name) is None or name[:2] != folder.name or entry.is_dir(follow_symlinks=False):
                continue
            if entry.name.endswith(".new"):
                os.unlink(entry.path)
            else:
                status = entry.stat(follow_symlinks=False)
                found.append(((status.st_mtime_ns, _taken(status.st_size)), entry.name))
    return found


def _taken(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
