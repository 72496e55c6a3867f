"""A door before one replica, without a cluster; it needs what Ray brings (aiohttp)."""

from __future__ import annotations

import asyncio
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
                handle.full = True
                with pytest.raises(httpx.ReadTimeout):
                    await client.post("/v1/completions", json=body, timeout=0.5)
                while not handle.admissions[-1].cancelled:
                    await asyncio.sleep(0.01)
                assert (await client.get("/health", headers={"authorization": ""})).status_code == 200
                assert (await client.get("/metrics", headers={"authorization": ""})).status_code == 401
            await door.stop(1.0)

    asyncio.run(asyncio.wait_for(test(), 120))
