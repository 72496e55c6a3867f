"""Engines that keep blocks on disk, for tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire import LLM
from quire.platform.kv.connector import BlockLayout, ConnectorCounts
from quire.platform.kv.transfers import TransferAccount


def on_disk(folder: Path | str, most: int = 10**8, **more: Any) -> dict[str, Any]:
    """The setting."""
    extra = {"path": str(folder), "max_bytes": most, "min_tokens": 1, **more}
    return {"kv_transfer_config": {"kv_connector": "DiskConnector", "kv_connector_extra_config": extra}}


@contextmanager
def engine(path: Path | str | None, folder: Path | str, most: int = 10**8, **settings: Any) -> Iterator[LLM]:
    """An engine from its start to its end, all of whose tables are checked."""
    llm = LLM(*([str(path)] if path else []), debug=True, **on_disk(folder, most), **settings)
    try:
        yield llm
        llm.llm_engine.check_integrity()
    finally:
        llm.llm_engine.close()


def account(llm: LLM) -> TransferAccount:
    """What the engine knows of its blocks on disk, as the worker tells it now."""
    transfers = llm.llm_engine.scheduler.kv.transfers
    assert transfers is not None
    transfers.reported(llm.llm_engine.executor.take_transfers(60.0))
    return transfers


def files(folder: Path) -> list[Path]:
    """The blocks."""
    return sorted(one for one in (folder / "quire-kv").rglob("*") if one.is_file() and "lock" not in one.name)


class MemoryConnector:
    """A connector as a package may bring it: in memory that outlives an engine of this process."""

    kept: dict[tuple[str, bytes], bytes] = {}  # noqa: RUF012  # that is what it is for
    layouts: list[BlockLayout] = []  # noqa: RUF012

    def __init__(self, layout: BlockLayout) -> None:
        self.identity = layout.identity
        self.layouts.append(layout)

    def held(self) -> Sequence[bytes]:
        return [key for identity, key in self.kept if identity == self.identity]

    def read(self, key: bytes, into: memoryview) -> bool:
        found = self.kept.get((self.identity, key))
        if found is not None:
            into[:] = found
        return found is not None

    def write(self, key: bytes, block: memoryview) -> tuple[bool, Sequence[bytes]]:
        self.kept[self.identity, key] = bytes(block)
        return True, []

    def counts(self) -> ConnectorCounts:
        return ConnectorCounts(stored=len(self.kept))

    def close(self) -> None:
        pass


class FaultyConnector(MemoryConnector):
    """What it does, and its constructor, may raise."""

    fails: set[str] = set()  # noqa: RUF012

    def read(self, key: bytes, into: memoryview) -> bool:
        into[:] = b"\xff" * len(into)  # of no use
        if "read" in self.fails:
            raise RuntimeError("the network is gone")
        return super().read(key, into)

    def write(self, key: bytes, block: memoryview) -> tuple[bool, Sequence[bytes]]:
        if "write" in self.fails:
            raise RuntimeError("the network is gone")
        return super().write(key, block)


class HangingConnector(MemoryConnector):
    """What it is asked to do, of the kinds that `hangs` names, does not return until `go` is set."""

    hangs: set[str] = set()  # noqa: RUF012
    begun, go, closed = threading.Event(), threading.Event(), threading.Event()

    def __str__(self) -> str:
        return "/a/folder"

    def _hang(self, kind: str) -> None:
        if kind in self.hangs:
            self.begun.set()
            self.go.wait()

    def read(self, key: bytes, into: memoryview) -> bool:
        self._hang("read")
        return super().read(key, into)

    def write(self, key: bytes, block: memoryview) -> tuple[bool, Sequence[bytes]]:
        self._hang("write")
        return super().write(key, block)

    def close(self) -> None:
        self.closed.set()


class SlowReads:
    """Around `DiskConnector.read`: waits until it may go on."""

    def __init__(self, read: Any) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        self._read = read

    def __call__(self, connector: Any, key: bytes, into: memoryview) -> bool:
        self.begun.set()
        assert self.go.wait(60)
        return bool(self._read(connector, key, into))
