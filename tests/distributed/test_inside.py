"""A replica's server and its part in changes, without Ray: who may ask what, and what a name stands for meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from quire.demo import adapter_path
from quire.distributed import changes
from quire.distributed.changes import ReplicaAdapters
from quire.distributed.replica import Inside, ReplicaOptions, _Ticket
from quire.distributed.steps import SECRET, STEPS, TICKET, Entry
from quire.server.http.server import HttpServer
from quire.server.launch import Task, load
from quire.server.responses.errors import ApiError

ADAPTERS = Path(adapter_path("french")).parent
SETTINGS = {"allow_runtime_lora": True, "lora_root": [str(ADAPTERS)], "served_model_name": ["demo"],
            "host": "127.0.0.1", "port": 0}  # fmt: skip
FAR = 1e12  # when the ledger was heard, so that no lease ends


def adapter(name: str, path: str = "french") -> dict[str, Any]:
    return {"lora_name": name, "lora_path": str(ADAPTERS / path), "load_inplace": True}


def mixture(name: str, *parts: str) -> dict[str, Any]:
    return {"lora_name": name, "adapters": [{"name": part, "weight": 0.5} for part in parts]}


@dataclass
class Replica:
    """One that serves. client: a door, or the ledger."""

    adapters: ReplicaAdapters
    client: httpx.AsyncClient
    tickets: dict[str, _Ticket]

    async def step(self, step: str, name: str, entry: Entry, **headers: str) -> Any:
        return await self.client.post(STEPS + step, json={"name": name, **asdict(entry)}, headers=headers)

    async def ask(self, model: str) -> Any:
        return await self.client.post(
            "/v1/completions", json={"model": model, "prompt": "Hi", "max_tokens": 2, "temperature": 0}
        )

    async def make(self, name: str, version: int, body: dict[str, Any] | None) -> Any:
        for step in ("stage", "hold", "publish"):
            answer = await self.step(step, name, Entry(version, body))
        return answer


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[Replica]:
    service, tickets = load(Task({**SETTINGS, **settings}, {}), uploads=False), dict[str, _Ticket]()
    adapters = ReplicaAdapters(service.app.state.context.served)
    adapters.heard(FAR)
    service.app.add_middleware(Inside, secret="secret", tickets=tickets, adapters=adapters)
    server = HttpServer(service.app, service.config)
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=server.address, headers={SECRET: "secret"}, timeout=60) as client:
            yield Replica(adapters, client, tickets)
    finally:
        await service.engine.close(1.0)
        await server.stop(1.0)


def run(test: Callable[[Replica], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with serving() as replica:
            await test(replica)

    asyncio.run(asyncio.wait_for(whole(), 120))


def test_steps_are_the_ledgers_alone() -> None:
    """What a door passes on has a ticket, and the door's secret: it takes no step, whatever its path is."""

    async def test(replica: Replica) -> None:
        replica.tickets["t"] = ticket = _Ticket()
        answer = await replica.step("stage", "x", Entry(1, adapter("x")), **{TICKET: "t"})
        assert answer.status_code == 404 and "there is no POST" in answer.text and ticket.done.is_set()
        assert (await replica.step("stage", "x", Entry(1, adapter("x")), **{TICKET: "unknown"})).status_code == 404
        assert (await replica.step("stage", "x", Entry(1, adapter("x")), **{SECRET: "no"})).status_code == 403
        assert (await replica.step("publish", "x", Entry(1, adapter("x")))).status_code == 503
        assert (await replica.ask("x")).status_code == 404

    run(test)


def test_requests_wait_while_their_name_is_held_and_are_refused_without_the_ledger() -> None:
    async def test(replica: Replica) -> None:
        assert (await replica.make("x", 1, adapter("x"))).status_code == 200
        want, new = (await replica.ask("x")).json()["choices"], Entry(2, adapter("x", "shout"))
        assert (await replica.step("stage", "x", new)).status_code == 200
        assert (await replica.step("hold", "x", new)).status_code == 200
        waiting = asyncio.ensure_future(replica.ask("x"))
        assert (await replica.ask("demo")).status_code == 200
        assert not waiting.done()
        assert (await replica.step("publish", "x", new)).status_code == 200
        assert (await waiting).json()["choices"] == (await replica.ask("x")).json()["choices"] != want
        replica.adapters.heard(-FAR)
        refused = await replica.ask("x")
        assert refused.status_code == 503 and "lost touch" in refused.text
        assert (await replica.ask("demo")).status_code == 200

    run(test)


def test_an_adapter_that_a_mixture_needs_is_not_unloaded() -> None:
    """It is refused before anything is changed, with what one server says."""

    async def test(replica: Replica) -> None:
        await replica.make("x", 1, adapter("x"))
        assert (await replica.make("m", 2, mixture("m", "x", "french"))).status_code == 200
        refused = await replica.step("stage", "x", Entry(3, None))
        assert refused.status_code == 400 and "the mixture 'm' needs it" in refused.text
        told = {"name": "m", "version": 4, "body": None, "number": None}
        assert (await replica.client.post(f"{STEPS}stage", json=told)).status_code == 200
        told = {"name": "french", "version": 5, "body": None, "number": 7}
        refused = await replica.client.post(f"{STEPS}stage", json=told)
        assert refused.status_code == 400 and "lora_int_id" in refused.text

    run(test)


def test_who_joins_takes_adapters_before_mixtures_of_them() -> None:
    async def test(replica: Replica) -> None:
        entries = {"m": Entry(2, mixture("m", "x", "french")), "x": Entry(3, adapter("x", "shout"))}
        await replica.adapters.catch_up(entries)
        assert (await replica.ask("m")).status_code == 200 and replica.adapters.entries == entries
        gone = {"x": Entry(4, None), "m": Entry(5, mixture("m", "french", "shout"))}
        await replica.adapters.catch_up(gone)
        assert (await replica.ask("x")).status_code == 404 and (await replica.ask("m")).status_code == 200
        await replica.adapters.catch_up({"m": Entry(6, adapter("m"))})
        assert (await replica.ask("m")).json()["choices"] == (await replica.ask("french")).json()["choices"]

    run(test)


class Slow:
    """What a replica serves, read when it is told to. published: what was."""

    def __init__(self) -> None:
        self.gate: Any = None
        self.read = asyncio.Event()
        self.published: list[str] = []

    async def stage(self, body: Any) -> Any:
        if body.lora_path == "slow":
            await self.read.wait()
        return body

    def publish(self, staged: Any) -> dict[str, Any]:
        self.published.append(staged.lora_path)
        return {}


def test_what_is_left_of_a_change_that_ended_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter that was still being read, and steps that come late."""
    monkeypatch.setattr(changes, "_LONGEST_HOLD", 0.05)

    def entry(version: int, path: str) -> Entry:
        return Entry(version, {"lora_name": "x", "lora_path": path})

    async def test() -> None:
        served = Slow()
        adapters = ReplicaAdapters(served)  # type: ignore[arg-type]
        adapters.heard(FAR)
        reading = asyncio.ensure_future(adapters.stage("x", entry(1, "slow")))
        await asyncio.sleep(0)
        adapters.reset()
        await adapters.stage("x", entry(2, "new"))
        served.read.set()
        with pytest.raises(ApiError, match="change 1 has ended"):
            await reading
        adapters.hold("x", entry(2, "new"))
        await adapters.publish("x", entry(2, "new"))
        for late in (adapters.hold, adapters.publish):
            with pytest.raises(ApiError, match="change 1 has ended"):
                found = late("x", entry(1, "slow"))
                assert found is not None and await found
        await adapters.wait(frozenset({"x"}))
        assert served.published == ["new"] and adapters.entries["x"].version == 2 and not adapters._staged

    asyncio.run(test())


def test_options_show_no_secrets() -> None:
    assert "hidden" not in repr(ReplicaOptions({"api_key": ["hidden"]}, {}, "hidden"))
