"""`DiskConnector` alone: a block comes back as it was written, or not at all; and the folder keeps its bound."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quire.errors import QuireError
from quire.platform.kv import disk
from quire.platform.kv.connector import BlockLayout
from quire.platform.kv.disk import DiskConnector

BYTES = 100
IDENTITY, OTHER = "ab" * 32, "cd" * 32


def connector(path: Path, most: int = 10**6, identity: str = IDENTITY, rank: int = 0, size: int = 1) -> DiskConnector:
    return DiskConnector(BlockLayout(identity, BYTES, rank, size, {"path": str(path), "max_bytes": most}))


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def block(number: int) -> memoryview:
    return memoryview(bytes([number]) * BYTES)


def read(kept: DiskConnector, number: int) -> bytes | None:
    into = bytearray(BYTES)
    return bytes(into) if kept.read(key(number), memoryview(into)) else None


def files(path: Path) -> list[Path]:
    return sorted(one for one in (path / "quire-kv").rglob("*") if one.is_file() and "lock" not in one.name)


def test_blocks_come_back_in_another_life_and_nobody_else_may_look(tmp_path: Path) -> None:
    kept = connector(tmp_path)
    assert list(kept.held()) == []
    for number in (1, 2):
        assert kept.write(key(number), block(number)) == (True, [])
        assert kept.write(key(number), block(number)) == (True, []), "which is there"
    assert kept.counts().stored == 2 and kept.counts().stored_bytes == 2 * BYTES
    kept.close()
    again = connector(tmp_path)
    assert sorted(again.held()) == [key(1), key(2)]
    assert [read(again, number) for number in (1, 2, 3)] == [bytes(block(1)), bytes(block(2)), None]
    modes = {stat.S_IMODE(one.stat().st_mode) for one in (tmp_path / "quire-kv").rglob("*") if one.is_file()}
    folders = {stat.S_IMODE(one.stat().st_mode) for one in tmp_path.rglob("*") if one.is_dir()}
    assert modes == {0o600} and folders == {0o700}


def swap_contents(one: Path, other: Path) -> None:
    ours, theirs = one.read_bytes(), other.read_bytes()
    one.write_bytes(theirs)
    other.write_bytes(ours)


def flip(place: int) -> Callable[[Path, Path], None]:
    def change(one: Path, _: Path) -> None:
        data = bytearray(one.read_bytes())
        data[place] ^= 1
        one.write_bytes(data)

    return change


FAULTS: dict[str, Callable[[Path, Path], Any]] = {
    "cut": lambda one, _: os.truncate(one, 80),
    "empty": lambda one, _: os.truncate(one, 0),
    "longer": lambda one, _: one.write_bytes(one.read_bytes() + b"x"),
    "magic": flip(0),
    "length": flip(9),
    "checksum": flip(20),
    "padding": flip(60),
    "contents": flip(70),
    "last byte": flip(-1),
    "swapped": swap_contents,
    "another's": lambda one, other: one.write_bytes(other.read_bytes()),
    "a link": lambda one, other: (one.unlink(), one.symlink_to(other)),
    "a pipe": lambda one, _: (one.unlink(), os.mkfifo(one)),
    "a socket": lambda one, _: (one.unlink(), os.mknod(one, stat.S_IFSOCK | 0o600)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_was_changed_is_refused_and_removed(tmp_path: Path, fault: str) -> None:
    kept = connector(tmp_path)
    for number in (1, 2):
        kept.write(key(number), block(number))
    one, other = files(tmp_path)
    FAULTS[fault](one, other)
    assert read(kept, 1) is None
    assert (kept.counts().refused, kept.counts().failed) == (1, 0)
    assert not os.path.lexists(one) and read(kept, 1) is None and kept.counts().refused == 1
    assert kept.write(key(1), block(1))[0] and read(kept, 1) == bytes(block(1)), "it is written anew"
    assert read(kept, 2) == bytes(block(2)) or fault == "swapped"


def test_a_file_of_another_identity_or_rank_is_no_ones(tmp_path: Path) -> None:
    kept = connector(tmp_path)
    kept.write(key(1), block(1))
    source = files(tmp_path)[0]
    kept.close()
    for other in (connector(tmp_path, identity=OTHER), connector(tmp_path, rank=1, size=2)):
        assert list(other.held()) == [] and read(other, 1) is None
        other.write(key(1), block(7))
        target = next(one for one in files(tmp_path) if one != source and other._own in str(one))  # its own place
        target.write_bytes(source.read_bytes())
        assert read(other, 1) is None and other.counts().refused == 1
        other.close()


def test_the_bound_is_kept_and_the_least_recently_used_go(tmp_path: Path) -> None:
    most = 4 * 4096
    kept = connector(tmp_path, most)
    for number in range(4):
        kept.write(key(number), block(number))
    for place, one in enumerate(files(tmp_path)):
        os.utime(one, ns=(place, place))  # as if that had been long ago
    assert read(kept, 0) is not None
    assert kept.write(key(4), block(4)) == (True, [key(1)])
    assert kept.counts().held_bytes == most and len(files(tmp_path)) == 4
    kept.close()
    # The order outlives the engine; a smaller bound, and blocks of another model, count as well.
    again = connector(tmp_path, 2 * 4096, identity=OTHER)
    assert [one.name for one in files(tmp_path)] == [key(0).hex(), key(4).hex()]
    again.write(key(9), block(9))
    assert [one.name for one in files(tmp_path)] == [key(4).hex(), key(9).hex()]
    assert again.counts().held_bytes == 2 * 4096
    again.close()
    nothing = connector(tmp_path / "small", 4095)
    assert nothing.write(key(1), block(1)) == (False, []) and files(tmp_path / "small") == []


def test_workers_on_machines_of_their_own_keep_the_bound_over_all_identities(tmp_path: Path) -> None:
    """The second of two workers finds what its like have left, though the first is not there; and one that is alone
    later, what both have."""
    most = 2 * 4096
    for identity in (IDENTITY, OTHER, "ef" * 32):
        kept = connector(tmp_path, 2 * most, identity, rank=1, size=2)
        for number in range(3):
            kept.write(key(number), block(number))
        assert len(files(tmp_path)) == 2 and kept.counts().held_bytes == most
        kept.close()
    first = connector(tmp_path, 2 * most, rank=0, size=2)
    assert first.counts().held_bytes == 0, "these are the second's"
    first.close()
    assert connector(tmp_path, most).counts().held_bytes == most


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "quire-kv"
    root.mkdir(mode=0o700)
    (root / "notes").mkdir()
    theirs = [root / "notes" / "ab", root / "text", tmp_path / "text"]
    for one in theirs:
        one.write_text("mine")
    part = root / f"{IDENTITY}-0-1" / "ab"
    part.mkdir(parents=True)
    named = [part / "readme", part / f"{'ab' * 32}a", part / f"{'cd' * 32}"]  # the last in a place that is not its own
    for one in named:
        one.write_text("mine")
    (part / f"{'ab' * 32}.new").write_text("begun")
    kept = connector(tmp_path, 4096)
    for number in range(3):
        kept.write(key(number), block(number))
    assert all(one.exists() for one in (*theirs, *named))
    assert not (part / f"{'ab' * 32}.new").exists(), "what was begun and not finished"
    assert list(kept.held()) == [key(2)]


def test_one_engine_at_a_time(tmp_path: Path) -> None:
    first = connector(tmp_path)
    with pytest.raises(QuireError, match="another engine has it"):
        connector(tmp_path)
    first.close()
    second = connector(tmp_path)
    del second  # without a word
    connector(tmp_path).close()


def test_a_folder_that_others_may_reach_is_refused(tmp_path: Path) -> None:
    (tmp_path / "quire-kv").mkdir(mode=0o755)
    with pytest.raises(QuireError, match="others may reach it"):
        connector(tmp_path)
    (tmp_path / "other").mkdir()
    (tmp_path / "quire-kv").chmod(0o700)
    (tmp_path / "other" / "quire-kv").symlink_to(tmp_path / "quire-kv")
    with pytest.raises(QuireError, match="is no folder"):
        connector(tmp_path / "other")


def test_a_place_that_cannot_be_used_keeps_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    kept = connector(tmp_path / "file" / "folder")
    assert "cannot be used, and no KV blocks are kept" in caplog.text
    assert kept.write(key(1), block(1)) == (False, []) and read(kept, 1) is None and list(kept.held()) == []


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = connector(tmp_path)
    kept.write(key(1), block(1))
    monkeypatch.setattr(disk, "_PAUSE_SECONDS", 0.0)

    def full(path: Any, target: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        for number in (2, 3):
            assert kept.write(key(number), block(number)) == (False, [])
    assert kept.counts().failed == 2 and caplog.text.count("No space left") == 1, "it is said once"
    assert len(files(tmp_path)) == 1 and read(kept, 1) is not None
    assert kept.write(key(2), block(2))[0], "there is room again"


def test_files_that_have_gone_are_not_there(tmp_path: Path) -> None:
    kept = connector(tmp_path)
    kept.write(key(1), block(1))
    files(tmp_path)[0].unlink()
    assert read(kept, 1) is None and kept.counts().refused == 0 and kept.counts().held_bytes == 0


def test_one_reads_while_another_writes(tmp_path: Path) -> None:
    kept, rng = connector(tmp_path, 6 * 4096), random.Random(2)
    chosen = [rng.randrange(12) for _ in range(600)]

    def write() -> None:
        for number in chosen:
            kept.write(key(number), block(number))

    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(write)
        while not writing.done():
            number = rng.randrange(12)
            assert read(kept, number) in (None, bytes(block(number)))
        writing.result()
    assert kept.counts().refused == kept.counts().failed == 0
    assert kept.counts().held_bytes == 4096 * len(files(tmp_path)) <= 6 * 4096
