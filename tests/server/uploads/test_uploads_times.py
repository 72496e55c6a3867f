"""How long a body may take, by a clock that only goes on while nobody has anything to do."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

import pytest
from starlette.exceptions import HTTPException

from quire.server.middleware import BodyLimits

MIB = 1 << 20


class _Waiting(selectors.DefaultSelector):
    """Its waits take no time, and are counted."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout is not None:
            self.now += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._waiting = _Waiting()
        super().__init__(self._waiting)

    def time(self) -> float:
        return self._waiting.now


def read(path: str, sizes: list[int], pause: float, busy: float = 0.0, **limits: int) -> int:
    """How many bytes an application gets of a body whose parts come after pauses; after each it is busy itself.

    Raises HTTPException, as the limits do.
    """
    got = 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal got
        more = True
        while more:
            message = await receive()
            got, more = got + len(message["body"]), message["more_body"]
            await asyncio.sleep(busy)

    parts = iter(enumerate(sizes, 1))

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause)
        number, size = next(parts)
        return {"type": "http.request", "body": bytes(size), "more_body": number < len(sizes)}

    async def send(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [(b"transfer-encoding", b"chunked")]}
    limited = BodyLimits(app, **{"most": MIB, "upload": 20 * MIB, **limits}, seconds=60.0)
    loop = _Loop()
    try:
        loop.run_until_complete(limited(scope, receive, send))
    finally:
        loop.close()
    return got


def test_an_upload_has_its_time_for_each_mib() -> None:
    assert read("/v1/adapters", [MIB] * 10, pause=50) == 10 * MIB
    assert read("/v1/adapters", [MIB // 4] * 40, pause=14) == 10 * MIB
    with pytest.raises(HTTPException) as error:
        read("/v1/adapters", [MIB // 4] * 40, pause=16)
    assert error.value.status_code == 408
    with pytest.raises(HTTPException):
        read("/v1/adapters", [100], pause=61)


def test_what_the_server_takes_is_not_the_clients_fault() -> None:
    assert read("/v1/adapters", [MIB] * 3, pause=50, busy=1000) == 3 * MIB
    assert read("/v1/completions", [100] * 5, pause=10, busy=1000) == 500


def test_other_bodies_have_one_time_and_their_own_limit() -> None:
    assert read("/v1/completions", [MIB // 8] * 5, pause=11) == 5 * MIB // 8
    for path in ("/v1/completions", "/v1/adapters/x", "/v1/adaptersx"):
        with pytest.raises(HTTPException) as error:
            read(path, [100] * 7, pause=11)
        assert error.value.status_code == 408
        with pytest.raises(HTTPException) as error:
            read(path, [MIB, 1], pause=1)
        assert error.value.status_code == 413 and "--max-request-bytes" in error.value.detail


def test_an_upload_is_bounded_and_does_not_count_among_the_bodies_in_memory() -> None:
    assert read("/v1/adapters", [MIB] * 20, pause=1, most=100) == 20 * MIB
    with pytest.raises(HTTPException) as error:
        read("/v1/adapters", [MIB] * 22, pause=1)
    assert error.value.status_code == 413 and "--max-adapter-upload-bytes" in error.value.detail
