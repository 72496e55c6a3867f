"""Where uploads lie: made when it is needed, private, and gone with its server, however that ended."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
from pathlib import Path

import pytest

from quire.config import ServerConfig
from quire.errors import QuireError
from quire.server.responses.errors import ApiError
from quire.server.uploads import store as stores
from quire.server.uploads.store import AdapterStore, adapter_store
from tests.server.api_server import ONE_THREAD, ServerProcess, adapters
from tests.server.uploads.helpers import ADAPTERS, BOUNDARY, files_of, form, names_of, said, upload

KIND = f"multipart/form-data; boundary={BOUNDARY}"


@pytest.mark.slow
def test_a_server_takes_its_files_along_and_what_a_killed_one_left(tmp_path: Path) -> None:
    place, root = tmp_path / "place", tmp_path / "root"
    place.mkdir()
    root.mkdir()
    arguments = [*adapters(root), "--adapter-store-dir", str(place)]
    with ServerProcess(*arguments, **ONE_THREAD) as first, first.http() as http:
        assert list(place.iterdir()) == []  # nothing was uploaded
        upload(http, "mine", files_of("french"))
        text = said(http, "mine")
        (left,) = place.iterdir()
        with ServerProcess(*arguments, **ONE_THREAD) as second, second.http() as other:
            upload(other, "mine", files_of("shout"))
            assert len(list(place.iterdir())) == 2  # one that lives is left alone
            assert second.stop() == 0
        assert list(place.iterdir()) == [left]
        assert said(http, "mine") == text
        first.process.send_signal(signal.SIGKILL)
        first.process.wait(20)
    assert len(list(left.rglob("*"))) == 3
    beside = [place / "another", place / "quire-adapters-a-file"]
    beside[0].mkdir()
    beside[1].touch()
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    (place / "quire-adapters-link").symlink_to(outside)
    with ServerProcess(*arguments, **ONE_THREAD) as third, third.http() as http:
        assert not left.exists()
        assert names_of(http) == ["french", "shout"]
        upload(http, "mine", files_of("french"))
        assert said(http, "mine") == text
        assert third.stop() == 0
    assert sorted(place.iterdir()) == sorted([*beside, place / "quire-adapters-link"])
    assert (outside / "kept").exists()


def test_clients_may_not_name_the_folder(tmp_path: Path) -> None:
    """It is the server's: --lora-root says what paths may be named."""
    arguments = ["--enable-lora", "--allow-runtime-lora", "--adapter-store-dir", str(tmp_path)]
    with ServerProcess(*arguments, **ONE_THREAD) as server, server.http() as http:
        upload(http, "mine", files_of("french"))
        (folder,) = tmp_path.iterdir()
        for path in (folder / "1", folder):
            answer = http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(path)})
            assert answer.status_code == 403, answer.text
        assert str(folder) not in http.get("/v1/models").text + http.get(ADAPTERS).text + http.get("/metrics").text
        assert str(folder) not in server.log


@pytest.mark.parametrize("place", ["nowhere", "file"])
def test_a_place_that_is_none_is_refused_at_the_start(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(QuireError, match="adapter_store_dir"):
        adapter_store(ServerConfig(allow_runtime_lora=True, adapter_store_dir=str(tmp_path / place)))


def test_a_folder_that_is_taken_away_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = AdapterStore(str(tmp_path), 1 << 20, 1 << 20)
    lock, times = fcntl.flock, []

    def late(file: int, how: int) -> None:
        if not times:
            store.folder.rmdir()  # as another server's sweep does it
        times.append(file)
        lock(file, how)

    monkeypatch.setattr(stores.fcntl, "flock", late)

    async def upload_one() -> None:
        async with store.upload(KIND) as begun:
            assert begun.folder.is_dir() and len(times) == 2
        assert list(store.folder.iterdir()) == []
        await store.close()

    asyncio.run(upload_one())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_somebody_takes_away_is_made_again(tmp_path: Path) -> None:
    store = AdapterStore(str(tmp_path), 1 << 20, 1 << 20)

    async def upload_two() -> None:
        async with store.upload(KIND):
            pass
        store.folder.rmdir()
        async with store.upload(KIND) as begun:
            assert begun.folder.is_dir()
        await store.close()

    asyncio.run(upload_two())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_said_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = AdapterStore(str(tmp_path), 1 << 20, 1 << 20)

    def full(path: str | os.PathLike[str], mode: int = 0o777) -> None:
        raise OSError(28, os.strerror(28))

    async def upload_one() -> None:
        async with store.upload(KIND) as begun:
            await begun.feed(form("mine", files_of("french")))

    with monkeypatch.context() as patch, pytest.raises(ApiError, match="--adapter-store-dir") as error:
        patch.setattr(stores.os, "mkdir", full)
        asyncio.run(upload_one())
    assert error.value.status == 503 and list(tmp_path.iterdir()) == []


def test_an_upload_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    store = AdapterStore(str(tmp_path), 1 << 20, 1 << 20)
    body = form("mine", files_of("french"))

    async def upload_one(fed: asyncio.Event) -> None:
        async with store.upload(KIND) as begun:
            for start in range(0, len(body), 1000):
                await begun.feed(body[start : start + 1000])
                fed.set()

    async def cancel() -> None:
        fed = asyncio.Event()
        task = asyncio.ensure_future(upload_one(fed))
        await fed.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await store.idle()
        assert list(store.folder.iterdir()) == [] and store.bytes == 0
        await store.close()

    asyncio.run(cancel())
    assert list(tmp_path.iterdir()) == []
