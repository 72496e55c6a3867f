"""`DiskReader`: blocks that another engine writes into a folder, while it does (`kv_role="kv_consumer"`)."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from quire.errors import QuireError
from quire.platform.kv.block_files import BlockFiles, is_block, parts
from quire.platform.kv.connector import BlockLayout, ConnectorCounts

logger = logging.getLogger("quire")

_LOOK_SECONDS = 0.25  # between two looks at what is new, at least
_LOOK_SHARE = 20  # and so many times as long as the last one took the processor
_RETRY_SECONDS = 30.0  # after a read that the system refused
# A folder's time is no finer than the system's clock ticks: one that has changed is looked at for a while.
_CHANGING_SECONDS = 2.0

_Mark = tuple[int, int]  # inode, time of the last change in ns


class DiskReader:
    """Reads blocks of a folder that another engine owns (`DiskConnector`), or will own, or has owned; as `KVConnector`
    says. It writes none, removes none and locks nothing; any number of engines may read one folder.

    A thread of its own looks for new files. Raises QuireError where others may reach what is in the folder; where they
    may later on, or it cannot be used, a warning says so, and nothing is found.
    """

    def __init__(self, layout: BlockLayout) -> None:
        self._blocks = BlockFiles(layout)
        self._lock = threading.Lock()  # of all that follows
        self._known: dict[str, set[str]] = {}  # names, by part: what can be read, as far as is known
        self._changed: dict[str, tuple[int, float]] = {}  # by part: its time, and until when it is looked at anew
        self._retry: dict[str, float] = {}  # by part: when it is looked at anew, changed or not
        self._damaged: dict[str, _Mark | None] = {}  # names: not known, as long as they are the same file
        self._news: dict[bytes, bool] = {}  # keys: whether they can be read now, where that has changed
        self._refused = self._failed = 0
        self._reachable = False  # by others
        try:
            self._blocks.make_folders()
        except OSError as error:
            self._blocks.warn(f"cannot be made: {error}")
        self.look()
        self._held, _ = self.news()
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
            news, self._news = self._news, {}
        return [key for key, there in news.items() if there], [key for key, there in news.items() if not there]

    def read(self, key: bytes, into: memoryview) -> bool:
        path = self._blocks.path(self._blocks.own, key.hex())
        if self._reachable:
            with self._lock:
                self._lose(path.name, 0.0)
            return False
        mark = _mark(path)  # from before: of a file that was replaced meanwhile, not the new one's
        try:
            if self._blocks.read(path, key, into):
                with suppress(OSError):
                    os.utime(path)  # by which its owner knows, at its next start, what is used
                return True
            with self._lock:
                self._refused += 1
                self._damaged[path.name] = mark
                self._lose(path.name, 0.0)
            self._blocks.warn(f"{path.name} is damaged, or not what was written there; its owner will remove it")
        except FileNotFoundError:  # its owner needed the room, and may write it anew
            with self._lock:
                self._lose(path.name, 0.0)
        except OSError as error:
            with self._lock:
                self._failed += 1
                self._lose(path.name, _RETRY_SECONDS)
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
            self._blocks.check()
            self._reachable = False
            self._look()
        except QuireError as error:
            if not self._reachable:
                self._reachable = True
                logger.warning("%s Until then, no KV blocks are read.", error)
            for part in self._known.keys() | self._changed.keys():
                self._vanished(part)
        except OSError as error:  # the folder is gone, say
            self._blocks.warn(f"cannot be read for now: {error}")

    def _look(self) -> None:
        """Of the parts, those alone are read that have changed, or in which something was missed."""
        found = {part.name: part for part in parts(self._blocks.root / self._blocks.own)}
        for name in (self._known.keys() | self._changed.keys()) - found.keys():
            self._vanished(name)
        with self._lock:
            now = time.monotonic()
            due = {name for name, at in self._retry.items() if at <= now}
            for name in due:
                del self._retry[name]
                self._changed.pop(name, None)
        for name, part in found.items():
            try:
                self._look_into(part)
            except OSError as error:  # it is looked at again
                self._changed.pop(name, None)
                if not isinstance(error, FileNotFoundError):
                    self._blocks.warn(f"cannot be read for now: {error}")

    def _look_into(self, part: Path) -> None:
        now, changed = time.monotonic(), part.stat().st_mtime_ns
        before, until = self._changed.get(part.name, (None, now))
        if changed == before and now >= until:
            return
        names = _names(part)
        with self._lock:
            damaged = names.intersection(self._damaged)
        self._take(part.name, names, {name: _mark(part / name) for name in damaged})
        self._changed[part.name] = changed, until if changed == before else now + _CHANGING_SECONDS

    def _vanished(self, part: str) -> None:
        self._changed.pop(part, None)
        self._take(part, set(), {})

    def _take(self, part: str, names: set[str], marks: dict[str, _Mark | None]) -> None:
        """What is in a part, and of those that were damaged, what file they are now."""
        with self._lock:
            for name in [name for name in self._damaged if name[:2] == part]:
                if name not in names or marks.get(name, self._damaged[name]) != self._damaged[name]:
                    del self._damaged[name]
            names = names - self._damaged.keys()
            before = self._known.get(part, set())
            self._news.update((bytes.fromhex(name), True) for name in sorted(names - before))
            self._news.update((bytes.fromhex(name), False) for name in before - names)
            self._known[part] = names
            if not names:
                del self._known[part]

    def _lose(self, name: str, seconds: float) -> None:
        """A key cannot be read, and its part is looked at anew so much later. The lock is held."""
        part = name[:2]
        known = self._known.get(part, set())
        if name in known:
            known.remove(name)
            self._news[bytes.fromhex(name)] = False
        self._retry[part] = min(self._retry.get(part, math.inf), time.monotonic() + seconds)


def _look_again(reader: weakref.ref[DiskReader], closed: threading.Event) -> None:
    """Until it is closed, or nobody has it any more."""
    pause = _LOOK_SECONDS
    while not closed.wait(pause):
        one = reader()
        if one is None:
            return
        begun = time.thread_time()
        one.look()
        del one
        pause = max(_LOOK_SECONDS, _LOOK_SHARE * (time.thread_time() - begun))


def _mark(path: Path) -> _Mark | None:
    """By which a file is told from another of its name, and from what it was."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _names(part: Path) -> set[str]:
    with os.scandir(part) as entries:
        return {entry.name for entry in entries if is_block(entry.name, part.name) and not entry.name.endswith(".new")}
