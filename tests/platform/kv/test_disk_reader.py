"""`DiskReader` alone: what it tells, in order, of files that come, go, are damaged, or belong to somebody else."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from quire.platform.execution.kv_transfer import KVTransfer
from quire.platform.kv import block_files, disk_reader
from quire.platform.kv.connector import BlockLayout
from quire.platform.kv.disk import DiskConnector
from quire.platform.kv.disk_reader import DiskReader
from quire.platform.kv.transfers import TransferAccount

KEYS = [bytes([7, number]) + bytes(30) for number in range(3)]
BLOCK = memoryview(bytes(8))


def layout(path: Path) -> BlockLayout:
    return BlockLayout("a" * 64, len(BLOCK), 0, 1, {"path": path, "max_bytes": 10**6})


def place(path: Path, number: int = 0) -> Path:
    return path / "quire-kv" / ("a" * 64 + "-0-1") / "07" / KEYS[number].hex()


def read(reader: DiskReader, number: int = 0) -> bool:
    return reader.read(KEYS[number], memoryview(bytearray(8)))


def opened(path: Path) -> int:
    """Descriptors of what lies there."""
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # another thread has closed it
            found += os.readlink(one).startswith(str(path))
    return found


@pytest.fixture(autouse=True)
def nobody_else_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_reader, "_LOOK_SECONDS", 1e6)


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[DiskConnector]:
    one = DiskConnector(layout(tmp_path))
    yield one
    one.close()


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder whose time is the same is not looked at again."""
    monkeypatch.setattr(disk_reader, "_CHANGING_SECONDS", -1.0)


def test_a_folder_that_others_may_reach_later_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "kv"
    path.write_text("a file, so that nothing can be made")
    reader = DiskReader(layout(path))
    path.unlink()
    owner = DiskConnector(layout(path))
    owner.write(KEYS[0], BLOCK)
    (path / "quire-kv").chmod(0o777)
    for _ in range(2):
        reader.look()
        assert reader.news() == ([], []) and not read(reader)
    assert caplog.text.count("others may reach it") == 1
    (path / "quire-kv").chmod(0o700)
    reader.look()
    assert reader.news() == (KEYS[:1], []) and read(reader)
    (path / "quire-kv").chmod(0o770)
    reader.look()
    assert reader.news() == ([], KEYS[:1]) and not read(reader)
    owner.close()


def test_a_file_of_another_user(tmp_path: Path, owner: DiskConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    owner.write(KEYS[0], BLOCK)
    reader = DiskReader(layout(tmp_path))
    assert read(reader)
    other = os.geteuid() + 1
    monkeypatch.setattr(block_files.os, "geteuid", lambda: other)
    assert not read(reader) and reader.counts().refused == 1


def test_what_is_refused_is_closed(tmp_path: Path, owner: DiskConnector) -> None:
    owner.write(KEYS[0], BLOCK)
    place(tmp_path, 1).mkdir()
    place(tmp_path, 2).write_bytes(b"too short")
    reader = DiskReader(layout(tmp_path))
    before = opened(tmp_path)
    for _ in range(3):
        assert [read(reader, number) for number in range(3)] == [True, False, False]
    assert opened(tmp_path) == before


@pytest.mark.usefixtures("settled")
def test_a_damaged_file_is_told_again_when_it_is_another(tmp_path: Path, owner: DiskConnector) -> None:
    owner.write(KEYS[0], BLOCK)
    reader = DiskReader(layout(tmp_path))
    assert list(reader.held()) == KEYS[:1] and reader.news() == ([], [])
    good = place(tmp_path).read_bytes()
    place(tmp_path).write_bytes(bytes(len(good)))
    assert not read(reader) and reader.news() == ([], KEYS[:1])
    for _ in range(3):
        reader.look()
        assert reader.news() == ([], []), "it is the same"
    status = place(tmp_path).stat()
    place(tmp_path).with_suffix(".new").write_bytes(good)
    os.utime(place(tmp_path).with_suffix(".new"), ns=(0, status.st_mtime_ns + 1))
    place(tmp_path).with_suffix(".new").replace(place(tmp_path))  # between two looks
    os.utime(place(tmp_path).parent, ns=(10**18, 10**18))
    reader.look()
    assert reader.news() == (KEYS[:1], []) and read(reader)


@pytest.mark.usefixtures("settled")
def test_a_read_that_fails_for_now(tmp_path: Path, owner: DiskConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    owner.write(KEYS[0], BLOCK)
    reader = DiskReader(layout(tmp_path))
    reader.news()

    def fails(*_: Any) -> bool:
        raise OSError(errno.EMFILE, "too many open files")

    monkeypatch.setattr(disk_reader, "_RETRY_SECONDS", 1e6)
    with monkeypatch.context() as patched:
        patched.setattr(reader._blocks, "read", fails)
        assert not read(reader)
    reader.look()
    assert reader.news() == ([], KEYS[:1]) and reader.counts().failed == 1
    monkeypatch.setattr(disk_reader, "_RETRY_SECONDS", 0.0)
    with monkeypatch.context() as patched:
        patched.setattr(reader._blocks, "read", fails)
        assert not read(reader)
    reader.look()
    assert reader.news() == (KEYS[:1], []) and read(reader)


@pytest.mark.usefixtures("settled")
def test_a_folder_that_goes_and_comes_back(tmp_path: Path, owner: DiskConnector) -> None:
    owner.write(KEYS[0], BLOCK)
    reader = DiskReader(layout(tmp_path))
    reader.news()
    part = place(tmp_path).parent
    part.rename(tmp_path / "away")
    reader.look()
    assert reader.news() == ([], KEYS[:1])
    (tmp_path / "away").rename(part)
    reader.look()
    assert reader.news() == (KEYS[:1], []) and read(reader), "its time is the same"


def test_a_part_that_goes_during_a_look(tmp_path: Path, owner: DiskConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = DiskReader(layout(tmp_path))
    owner.write(KEYS[0], BLOCK)
    listed = disk_reader.parts
    monkeypatch.setattr(disk_reader, "parts", lambda folder: [folder / "00", *listed(folder), folder / "ff"])
    reader.look()
    assert reader.news() == (KEYS[:1], [])


def test_what_comes_again_while_a_job_goes_on(tmp_path: Path, owner: DiskConnector) -> None:
    """Its first key has gone when it is read, and is there when the job ends."""
    missed, go = threading.Event(), threading.Event()

    class Reader(DiskReader):
        def read(self, key: bytes, into: memoryview) -> bool:
            if key == KEYS[2]:
                assert go.wait(60)
            done = super().read(key, into)
            if key == KEYS[0]:
                missed.set()
            return done

    class Blocks:
        bytes_a_block = nbytes = len(BLOCK)

    for key in KEYS:
        owner.write(key, BLOCK)
    reader = Reader(layout(tmp_path))
    moves, account = KVTransfer(reader, Blocks(), 0), TransferAccount(1, 100, stores=False)  # type: ignore[arg-type]
    account.reported(moves.report())
    assert account.held == set(KEYS)
    owner._remove(owner._own, KEYS[0].hex())
    assert account.waits(1, lambda: KEYS)
    plan = account.take()
    assert plan is not None
    moves.store(plan)
    assert missed.wait(60)
    account.reported(moves.report())
    assert account.held == set(KEYS[1:])
    owner.write(KEYS[0], BLOCK)
    reader.look()
    account.reported(moves.report())
    assert account.held == set(KEYS)
    go.set()
    while account.waits(1, list):
        account.reported(moves.report())
    assert set(account.there(1)) == set(KEYS[1:]) and account.held == set(KEYS)  # type: ignore[call-overload]
    moves.close()


def test_looks_take_a_small_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, takes, clock = [], [0.001, 0.5, 0.0], [0.0]

    class Closed:
        def wait(self, seconds: float) -> bool:
            pauses.append(seconds)
            return not takes

    class Reader:
        def look(self) -> None:
            clock[0] += takes.pop(0)

    monkeypatch.setattr(disk_reader, "_LOOK_SECONDS", 0.25)
    monkeypatch.setattr(disk_reader.time, "thread_time", lambda: clock[0])
    one = Reader()
    disk_reader._look_again(lambda: one, Closed())  # type: ignore[arg-type]
    assert pauses == [0.25, 0.25, pytest.approx(10.0), 0.25]
