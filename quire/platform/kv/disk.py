"""`DiskConnector`: blocks in files, one each, found again after a restart.

A file that was cut, edited, swapped with another or brought from elsewhere is removed, and its block is computed. The
files of all identities count; the least recently used go first. One engine at a time has a folder (`lock-RANK`), and
others may read it (`disk_reader.py`).
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from quire.errors import QuireError
from quire.platform.kv.block_files import BlockFiles, folders, is_block, parts, taken
from quire.platform.kv.connector import BlockLayout, ConnectorCounts

logger = logging.getLogger("quire")

_IDENTITY = re.compile(r"[0-9a-f]{64}-(\d+)-\d+", re.ASCII)
_PAUSE_SECONDS = 30.0  # after a write that the system refused


class DiskConnector:
    """Keeps blocks in a folder, as `KVConnector` says.

    Raises QuireError where another engine has the folder, or others may reach what is in it. Where it cannot be
    used, a warning says so, and nothing is kept.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._blocks = BlockFiles(layout)
        self._root, self._own = self._blocks.root, self._blocks.own
        self._most = int(layout.settings["max_bytes"]) // layout.size
        self._rank, self._size = layout.rank, layout.size
        self._files: OrderedDict[tuple[str, str], int] = (
            OrderedDict()
        )  # (folder, name): bytes; least recently used first
        self._total = 0
        self._lock = threading.Lock()  # of the account, and what is counted
        self._stored = self._stored_bytes = self._loaded = self._refused = self._failed = 0
        self._pause_until = 0.0
        self._locked: BinaryIO | None = None  # closed with this object, where nobody calls `close`
        self._usable = self._open(layout.rank)

    def __str__(self) -> str:
        return str(self._root)

    # -- beginning and end ----------------------------------------------------------------------------------------

    def _open(self, rank: int) -> bool:
        try:
            self._blocks.make_folders()
            self._locked = _lock(self._root / f"lock-{rank}", self._root)
            self._scan()
            self._make_room(0)
        except OSError as error:
            self._blocks.warn(f"cannot be used, and no KV blocks are kept: {error}")
            return False
        return True

    def _scan(self) -> None:
        """Take the files into account by when they were last used; what was begun and not finished goes."""
        found = []
        for folder in folders(self._root, _IDENTITY):
            if self._keeps(folder.name):
                for part in parts(folder):
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
        path = self._blocks.path(self._own, name)
        try:
            good = self._blocks.read(path, key, into)
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

    def write(self, key: bytes, block: memoryview) -> tuple[bool, Sequence[bytes]]:
        name, size = key.hex(), self._blocks.file_bytes
        if (self._own, name) in self._files:
            return True, []
        if not self._usable or size > self._most or time.monotonic() < self._pause_until:
            return False, []
        gone = self._make_room(size)
        path = self._blocks.path(self._own, name)
        try:
            self._blocks.write(path, key, block)
        except OSError as error:
            self._fail(f"nothing can be written for now: {error}")
            self._pause_until = time.monotonic() + _PAUSE_SECONDS
            return False, gone
        with self._lock:
            self._files[self._own, name] = size
            self._total += size
            self._stored += 1
            self._stored_bytes += len(block)
        return True, gone

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
            self._blocks.path(folder, name).unlink(missing_ok=True)
        except OSError as error:
            self._fail(f"cannot be removed: {error}")

    def _forget(self, folder: str, name: str) -> None:
        with self._lock:
            self._total -= self._files.pop((folder, name), 0)

    def _fail(self, what: str) -> None:
        with self._lock:
            self._failed += 1
        self._blocks.warn(what)


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


def _files(folder: Path) -> list[tuple[tuple[int, int], str]]:
    """((time of the last use, bytes), name) of each; those that were begun and not finished are removed."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not is_block(entry.name, folder.name) or entry.is_dir(follow_symlinks=False):
                continue
            if entry.name.endswith(".new"):
                os.unlink(entry.path)
            else:
                status = entry.stat(follow_symlinks=False)
                found.append(((status.st_mtime_ns, taken(status.st_size)), entry.name))
    return found
