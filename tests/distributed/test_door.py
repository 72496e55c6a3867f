"""A door before one replica, without a cluster; it needs what Ray brings (aiohttp)."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx2 as httpx
import pytest

from quire.config import ServerConfig
from quire.config.settings import make
from quire.distributed.replica import _Ticket
from quire.server.http.server import HttpServer
from tests.distributed.test_inside import SETTINGS, serving

pytestmark = pytest.mark.ray

KEY = {"authorization": "Bearer key"}
HTML = {"accept": "text/html", "authorization": ""}
KEYLESS: list[tuple[str, str, dict[str, str], int]] = [
    ("GET", "/", HTML, 200),
    ("HEAD", "/", HTML, 200),
    ("GET", "/", {**HTML, "authorization": "Bearer wrong"}, 200),
    ("GET", "", HTML, 307),
    ("GET", "/page/page.js", {}, 200),
    ("GET", "/page/none.js", {}, 401),
    ("GET", "/", {}, 401),
    ("POST", "/", HTML, 401),
    ("GET", "/v1/models", HTML, 401),
    ("GET", "/v1/models", {"authorization": "Bearer wrong"}, 401),
    ("GET", "/v1/adapters", {}, 401),
    ("POST", "/v1/completions", {}, 401),
    ("POST", "/v1/load_lora_adapter", {}, 401),
    ("DELETE", "/v1/adapters/x", {}, 401),
    ("OPTIONS", "/v1/completions", {}, 401),
    ("GET", "/metrics", {}, 401),
    ("GET", "/health", {}, 200),
    ("DELETE", "/health", {}, 405),
    ("GET", "/nowhere", {}, 401),
]


class Admission:
    """What Ray gives for a call. cancelled: nobody wants it."""

    def __init__(self, told: dict[str, str] | None) -> None:
        self._told = self._all(told)
        self.cancelled = False

    async def _all(self, told: dict[str, str] | None) -> AsyncIterator[dict[str, str]]:
        if told is None:
            await asyncio.sleep(60)
        else:
            yield told

    def __aiter__(self) -> Admission:
        return self

    async def __anext__(self) -> dict[str, str]:
        return await anext(self._told)

    def cancel(self) -> None:
        self.cancelled = True


class Handle:
    """Of one replica, as doors have it, and of the ledger. full: nobody is let in."""

    def __init__(self, address: str, tickets: dict[str, _Ticket]) -> None:
        self.address = address
        self.tickets = tickets
        self.full = False
        self.admissions: list[Admission] = []

    def options(self, **given: Any) -> Any:
        return self

    def remote(self, hints: Any) -> Admission:
        self.tickets["t"] = _Ticket()
        told = {"address": self.address, "ticket": "t", "replica": "one"}
        self.admissions.append(Admission(None if self.full else told))
        return self.admissions[-1]

    @property
    def members(self) -> Any:
        handle = self

        class Method:
            async def remote(self) -> dict[str, str]:
                return {"one": handle.address}

        return Method()


def test_a_door_hands_requests_on_and_asks_for_its_clients() -> None:
    from quire.distributed.door import door_app
    from quire.distributed.forward import Forward

    async def test() -> None:
        async with serving(api_key=["key"], enable_admin_routes=True) as replica:
            handle = Handle(str(replica.client.base_url).rstrip("/"), replica.tickets)
            config = make(ServerConfig, {**SETTINGS, "api_key": ["key"], "enable_admin_routes": True})
            door = HttpServer(door_app(config, Forward(handle, "secret", ["demo"]), handle, False), config)
            await door.start()
            async with httpx.AsyncClient(base_url=door.address, headers=KEY, timeout=60) as client:
                body = {"model": "demo", "prompt": "Hi", "max_tokens": 2}
                answer = await client.post("/v1/completions", json=body)
                assert answer.json()["id"] == "cmpl-" + answer.headers["x-request-id"]
                assert replica.tickets["t"].done.is_set() and not handle.admissions[-1].cancelled
                forged = {"x-quire-ticket": "other", "x-quire-secret": "0"}
                assert (await client.post("/.quire/stage", json={}, headers=forged)).status_code == 404
                assert 'replica="one"' in (await client.get("/metrics")).text
                answer = await client.post("/reset_prefix_cache", headers={"expect": "100-continue"})
                assert answer.status_code == 200 and "reset" in answer.text
                listed = (await client.get("/v1/adapters")).json()
                assert listed["runtime_changes"] and set(listed["uploads"].values()) == {0}
                assert (await client.post("/v1/adapters", content=b"x")).status_code == 501
                for path in ("/", "/page/page.js"):
                    shown, want = [await one.get(path, headers=HTML) for one in (client, replica.client)]
                    assert shown.content == want.content and sorted(shown.headers) == sorted(want.headers)
                    tag = {**HTML, "if-none-match": shown.headers["etag"]}
                    assert (await client.get(path, headers=tag)).status_code == 304
                handle.full, admitted = True, len(handle.admissions)
                waiting = asyncio.create_task(client.post("/v1/completions", json=body))
                while len(handle.admissions) == admitted:
                    await asyncio.sleep(0.01)
                waiting.cancel()  # the client closes its connection
                while not handle.admissions[-1].cancelled:
                    await asyncio.sleep(0.01)
                assert (await client.get("/health", headers={"authorization": ""})).status_code == 200
                assert (await client.get("/metrics", headers={"authorization": ""})).status_code == 401
            await door.stop(1.0)

    asyncio.run(asyncio.wait_for(test(), 120))


def test_nobody_starts_a_replica_without_a_key() -> None:
    """Nor does who asks for the page, which needs none: the door has it."""
    from quire.distributed.door import door_app
    from quire.distributed.forward import Forward

    async def test() -> None:
        handle = Handle("", {})
        config = make(ServerConfig, {**SETTINGS, "api_key": ["key"], "root_path": "/quire"})
        door = HttpServer(door_app(config, Forward(handle, "secret", ["demo"]), handle, True), config)
        await door.start()
        async with httpx.AsyncClient(base_url=door.address, timeout=60) as client:
            for method, path, headers, status in KEYLESS:
                answer = await client.request(method, f"/quire{path}", headers=headers, content=b"{}")
                assert answer.status_code == status, (method, path, answer.text)
            assert not handle.admissions
            handle.full = True
            asking = asyncio.create_task(client.get("/quire/v1/models", headers=KEY))
            while not handle.admissions:
                await asyncio.sleep(0.01)
            asking.cancel()
            assert len(handle.admissions) == 1
        await door.stop(1.0)

    asyncio.run(asyncio.wait_for(test(), 120))


def test_a_request_is_said_to_have_ended_replicas_only_where_one_had_it() -> None:
    """Who sends it again counts how often it did."""
    from quire.distributed.door import door_app
    from quire.distributed.forward import Forward

    async def takes_and_closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    async def code(address: str) -> object:
        handle = Handle(address, {})
        config = make(ServerConfig, SETTINGS)
        door = HttpServer(door_app(config, Forward(handle, "secret", ["demo"]), handle, False), config)
        await door.start()
        async with httpx.AsyncClient(base_url=door.address, timeout=60) as client:
            answer = await client.post("/v1/completions", json={"model": "demo", "prompt": "Hi"})
        await door.stop(1.0)
        assert answer.status_code == 503 and len(handle.admissions) == 4
        return answer.json()["error"]["code"]

    async def test() -> None:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))  # and does not listen
            assert await code(f"http://127.0.0.1:{nobody.getsockname()[1]}") is None
        async with await asyncio.start_server(takes_and_closes, "127.0.0.1", 0) as server:
            assert await code(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") == "replica_ended"

    asyncio.run(asyncio.wait_for(test(), 120))
