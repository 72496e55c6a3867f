"""`DiskReader`: blocks that another engine writes into a folder, while it does (`kv_role="kv_consumer"`)."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from quire.platform.kv.block_files import BlockFiles, is_block, parts
from quire.platform.kv.connector import BlockLayout, ConnectorCounts

_LOOK_SECONDS = 0.25  # between two looks at what is new
# A folder's time is no finer than the system's clock ticks: one that has changed is looked at for a while.
_CHANGING_SECONDS = 2.0


class DiskReader:
    """Reads blocks of a folder that another engine owns (`DiskConnector`), or will own, or has owned; as `KVConnector`
    says. It writes none, removes none and locks nothing; any number of engines may read one folder.

    A thread of its own looks for new files. Raises QuireError where others may reach what is in the folder. Where it
    cannot be used, a warning says so, and nothing is found.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._blocks = BlockFiles(layout)
        self._lock = threading.Lock()  # of all that follows
        self._known: dict[str, set[str]] = {}  # names, by part
        self._changed: dict[str, tuple[int, float]] = {}  # by part: its time, and until when it is looked at anew
        self._missed: set[str] = set()  # that were not there when they were wanted: not known any more
        self._new: list[bytes] = []
        self._gone: list[bytes] = []
        self._refused = self._failed = 0
        try:
            self._blocks.make_folders()
        except OSError as error:
            self._blocks.warn(f"cannot be made: {error}")
        self.look()
        self._held, self._new = self._new, []
        self._closed = threading.Event()
        look = (weakref.ref(self), self._closed)
        threading.Thread(target=_look_again, args=look, name="quire-kv-look", daemon=True).start()

    def __str__(self) -> str:
        return str(self._blocks.root)

    def held(self) -> Iterable[bytes]:
        return self._held

    def news(self) -> tuple[Sequence[bytes], Sequence[bytes]]:
        """Keys that can be read, and that can no longer, since this was asked last."""
        with self._lock:
            news = self._new, self._gone
            self._new, self._gone = [], []
        return news

    def read(self, key: bytes, into: memoryview) -> bool:
        path = self._blocks.path(self._blocks.own, key.hex())
        try:
            if self._blocks.read(path, key, into):
                with suppress(OSError):
                    os.utime(path)  # by which its owner knows, at its next start, what is used
                return True
            with self._lock:
                self._refused += 1
            self._blocks.warn(f"{path.name} is damaged, or not what was written there; its owner will remove it")
        except FileNotFoundError:  # its owner needed the room, and may write it anew
            with self._lock:
                self._missed.add(path.name)
        except OSError as error:
            with self._lock:
                self._failed += 1
            self._blocks.warn(f"cannot be read: {error}")
        return False

    def write(self, key: bytes, block: memoryview) -> tuple[bool, Sequence[bytes]]:
        return False, ()

    def counts(self) -> ConnectorCounts:
        with self._lock:
            files = sum(map(len, self._known.values()))
            return ConnectorCounts(
                refused=self._refused, failed=self._failed, held_bytes=files * self._blocks.file_bytes
            )

    def close(self) -> None:
        self._closed.set()

    # -- what is new ----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Take the difference to the last look. From one thread at a time."""
        try:
            self._look()
        except OSError as error:  # the folder is gone, say
            self._blocks.warn(f"cannot be read for now: {error}")

    def _look(self) -> None:
        """Of the parts, those alone are read that have changed."""
        found = {part.name: part for part in parts(self._blocks.root / self._blocks.own)}
        for name in self._known.keys() - found.keys():
            self._take(name, set())
        for name, part in found.items():
            now, changed = time.monotonic(), part.stat().st_mtime_ns
            before, until = self._changed.get(name, (None, now))
            if changed == before and now >= until:
                continue
            with suppress(FileNotFoundError):
                self._take(name, _names(part))
            self._changed[name] = changed, until if changed == before else now + _CHANGING_SECONDS

    def _take(self, part: str, names: set[str]) -> None:
        with self._lock:
            before = self._known.get(part, set()) - self._missed
            self._missed = {name for name in self._missed if name[:2] != part}
            self._new += [bytes.fromhex(name) for name in sorted(names - before)]
            self._gone += [bytes.fromhex(name) for name in before - names]
            self._known[part] = names


def _look_again(reader: weakref.ref[DiskReader], closed: threading.Event) -> None:
    """Until it is closed, or nobody has it any more."""
    while not closed.wait(_LOOK_SECONDS):
        one = reader()
        if one is None:
            return
        one.look()
        del one


def _names(part: Path) -> set[str]:
    with os.scandir(part) as entries:
        return {entry.name for entry in entries if is_block(entry.name, part.name) and not entry.name.endswith(".new")}
