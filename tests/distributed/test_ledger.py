"""Changes of adapters on many replicas, in one event loop: replicas and ledgers that end, and words that are lost."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest

from quire.distributed import changes, ledger, participant
from quire.distributed.changes import Entry, ReplicaAdapters
from quire.distributed.ledger import AdapterLedger
from quire.distributed.participant import Participant
from quire.distributed.steps import Answer
from quire.server.responses.errors import ApiError


class Served:
    """What a replica serves: of each name the path that it was loaded from. bad: paths that it cannot read."""

    def __init__(self, bad: frozenset[str] = frozenset()) -> None:
        self.names: dict[str, str] = {}
        self.gate: Callable[[frozenset[str]], Awaitable[None]] | None = None
        self._bad = bad

    def has(self, name: str) -> bool:
        return name in self.names

    async def stage(self, body: Any) -> Any:
        await asyncio.sleep(random.random() * 0.01)
        if body.lora_path in self._bad:
            raise ApiError(422, f"{body.lora_path}: cannot be read.")
        if body.lora_name in self.names and not body.load_inplace:
            raise ApiError(400, f"{body.lora_name} is loaded already.")
        return body

    def publish(self, staged: Any) -> dict[str, Any]:
        self.names[staged.lora_name] = staged.lora_path
        return {"name": staged.lora_name}

    async def unload(self, body: Any) -> dict[str, Any]:
        if body.lora_name not in self.names:
            raise ApiError(404, "there is none.")
        del self.names[body.lora_name]
        return {"name": body.lora_name}


class Handle:
    """What Ray makes of an actor: its methods, which fail while it is away."""

    def __init__(self) -> None:
        self.target: Any = None

    def __getattr__(self, name: str) -> Any:
        handle = self

        class Method:
            async def remote(self, *args: Any) -> Any:
                await asyncio.sleep(random.random() * 0.002)
                if handle.target is None:
                    raise ConnectionError("the actor is dead")
                answer = await getattr(handle.target, name)(*json.loads(json.dumps(args)))
                await asyncio.sleep(random.random() * 0.002)
                return answer

        return Method()


@dataclass
class Replica:
    """One that runs. lost: the share of steps that do not reach it, and of answers that do not come back."""

    served: Served
    adapters: ReplicaAdapters
    part: Participant
    lost: float = 0.0


class World:
    """Replicas, a ledger, and what passes between them."""

    def __init__(self) -> None:
        self.handle = Handle()
        self.replicas: dict[str, Replica] = {}
        self.begin_ledger()

    def begin_ledger(self) -> None:
        self.handle.target = AdapterLedger(self.send)

    async def begin(self, name: str, bad: frozenset[str] = frozenset()) -> Replica:
        served = Served(bad)
        adapters = ReplicaAdapters(served)  # type: ignore[arg-type]
        part = Participant(name, f"at {name}", adapters, self.handle)
        await part.start()
        self.replicas[name] = Replica(served, adapters, part)
        return self.replicas[name]

    def crash(self, name: str) -> None:
        """It ends without a word."""
        part = self.replicas.pop(name).part
        assert part._life is not None  # nobody else ends it without its leaving
        part._life.cancel()

    async def send(self, replica: str, address: str, step: str, told: dict[str, Any]) -> Answer:
        await asyncio.sleep(random.random() * 0.005)
        here = self.replicas.get(replica)
        lost = Answer(503, {"error": "no answer"}, came=False)
        if here is None or random.random() < here.lost:
            return lost
        name, entry = told["name"], Entry(told["version"], told["body"])
        try:
            if step == "publish":
                answer = Answer(200, await here.adapters.publish(name, entry))
            else:
                done = getattr(here.adapters, step)(*([name] if step == "hold" else [name, entry]))
                if step == "stage":
                    await done
                answer = Answer(200, {})
        except ApiError as error:
            answer = Answer(error.status, error.body)
        return lost if random.random() < here.lost else answer

    async def ask(self, name: str, replica: Replica) -> str | None:
        """A request that names an adapter: what it stands for. Raises ApiError."""
        assert replica.served.gate is not None
        await replica.served.gate(frozenset({name}))
        return replica.served.names.get(name)


def body(name: str, path: str, again: bool = False) -> dict[str, Any]:
    return {"lora_name": name, "lora_path": path, "load_inplace": again}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times for a test."""
    for module in (changes, ledger):
        monkeypatch.setattr(module, "LEASE", 0.3)
    for module in (ledger, participant):
        monkeypatch.setattr(module, "BEAT", 0.02)
    monkeypatch.setattr(ledger, "_SILENT", 0.1)
    monkeypatch.setattr(ledger, "_POLL", 0.005)


def run(test: Callable[[World], Awaitable[None]]) -> None:
    async def whole() -> None:
        world = World()
        try:
            await test(world)
        finally:
            for name in list(world.replicas):
                world.crash(name)

    asyncio.run(asyncio.wait_for(whole(), 120))


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.01)


def test_all_replicas_or_none() -> None:
    async def test(world: World) -> None:
        one, two = await world.begin("one"), await world.begin("two", frozenset({"bad"}))
        assert await world.handle.load.remote(body("a", "p1")) == (200, {"status": "loaded", "name": "a"})
        assert one.served.names == two.served.names == {"a": "p1"}
        status, told = await world.handle.load.remote(body("a", "bad", again=True))
        assert status == 422 and "cannot be read" in told["error"]["message"]
        status, told = await world.handle.load.remote(body("a", "p2"))
        assert status == 400 and "loaded already" in told["error"]["message"]
        assert one.served.names == two.served.names == {"a": "p1"}
        assert (await world.handle.load.remote(body("a", "p2", again=True)))[0] == 200
        assert one.served.names == two.served.names == {"a": "p2"}
        assert (await world.handle.unload.remote("a"))[0] == 200
        assert one.served.names == two.served.names == {}
        assert (await world.handle.unload.remote("a"))[0] == 404
        assert [await world.ask("a", one), await world.ask("a", two)] == [None, None]

    run(test)


def test_who_joins_later_has_what_the_others_have() -> None:
    async def test(world: World) -> None:
        await world.begin("one")
        for name, path in (("a", "p1"), ("b", "p2"), ("a", "p3")):
            await world.handle.load.remote(body(name, path, again=True))
        await world.handle.unload.remote("b")
        two = await world.begin("two")
        assert two.served.names == {"a": "p3"}
        assert set(await world.handle.members.remote()) == {"one", "two"}

    run(test)


def test_a_replica_without_the_ledger_refuses_adapters_and_recovers() -> None:
    async def test(world: World) -> None:
        one = await world.begin("one")
        await world.handle.load.remote(body("a", "p1"))
        target, world.handle.target = world.handle.target, None
        await asyncio.sleep(0.4)
        with pytest.raises(ApiError, match="lost touch") as caught:
            await world.ask("a", one)
        assert caught.value.status == 503
        world.handle.target = target
        await until(lambda: one.adapters._heard > asyncio.get_running_loop().time() - 0.2)
        assert await world.ask("a", one) == "p1"

    run(test)


def test_a_new_ledger_learns_what_there_is() -> None:
    async def test(world: World) -> None:
        await world.begin("one"), await world.begin("two")
        await world.handle.load.remote(body("a", "p1"))
        world.begin_ledger()
        assert (await world.handle.load.remote(body("a", "p2", again=True)))[0] == 200
        assert {one.served.names["a"] for one in world.replicas.values()} == {"p2"}
        assert (await world.begin("three")).served.names == {"a": "p2"}

    run(test)


def test_a_replica_that_ends_is_left_out_of_a_change() -> None:
    async def test(world: World) -> None:
        one = await world.begin("one")
        await world.begin("two")
        world.crash("two")
        assert (await world.handle.load.remote(body("a", "p1")))[0] == 200
        assert one.served.names == {"a": "p1"}
        assert set(await world.handle.members.remote()) == {"one"}

    run(test)


def test_no_replica_is_said() -> None:
    async def test(world: World) -> None:
        status, told = await world.handle.load.remote(body("a", "p1"))
        assert status == 503 and "no replica runs" in told["error"]["message"]

    run(test)


@dataclass
class Seen:
    """What requests have met: when they began and ended, and the version."""

    began: float
    ended: float
    version: int


class Churn:
    """Requests and changes without a pause, while words are lost, replicas come and go, and the ledger is another.

    draw: what is drawn at random.
    """

    def __init__(self, world: World, draw: random.Random) -> None:
        self._world = world
        self._draw = draw
        self._over = False
        self._names = (f"r{number}" for number in count())
        self.seen: list[Seen] = []

    async def run(self, faults: int) -> None:
        for _ in range(3):
            await self._world.begin(next(self._names))
        await self._world.handle.load.remote(body("a", "0"))
        asking = [asyncio.ensure_future(self._ask()) for _ in range(8)]
        changing = asyncio.ensure_future(self._change())
        for _ in range(faults):
            await asyncio.sleep(self._draw.random() * 0.25)
            await self._fault()
        for replica in self._world.replicas.values():
            replica.lost = 0.0
        self._over = True
        await asyncio.gather(*asking, changing)

    async def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._over:
            await asyncio.sleep(self._draw.random() * 0.004)
            began, replica = loop.time(), self._draw.choice(list(self._world.replicas.values()))
            try:
                version = await self._world.ask("a", replica)
            except ApiError as error:
                assert error.status == 503
                continue
            assert version is not None
            self.seen.append(Seen(began, loop.time(), int(version)))

    async def _change(self) -> None:
        for version in range(1, 60):
            if self._over:
                return
            try:
                await self._world.handle.load.remote(body("a", str(version), again=True))
            except ConnectionError:
                await asyncio.sleep(0.02)

    async def _fault(self) -> None:
        world, draw = self._world, self._draw
        for replica in world.replicas.values():
            replica.lost = draw.choice([0.0, 0.0, 0.1])
        fault = draw.choice(["crash", "begin", "begin", "ledger", "nothing"])
        if fault == "crash" and len(world.replicas) > 2:
            world.crash(draw.choice(list(world.replicas)))
        elif fault == "begin" and len(world.replicas) < 5:
            await world.begin(next(self._names))
        elif fault == "ledger":
            world.handle.target = None
            await asyncio.sleep(0.05)
            world.begin_ledger()


@pytest.mark.parametrize("seed", range(4))
def test_no_request_meets_an_older_version_after_a_newer(seed: int) -> None:
    """Of two requests, one after the other's end, the later never has the older version. In the end all have one."""
    seen: list[Seen] = []

    async def test(world: World) -> None:
        churn = Churn(world, random.Random(seed))
        await churn.run(12)
        seen.extend(churn.seen)
        status, _ = await world.handle.load.remote(body("a", "1000", again=True))
        assert status == 200
        await until(lambda: all(one.served.names == {"a": "1000"} for one in world.replicas.values()))
        assert [await world.ask("a", one) for one in world.replicas.values()] == ["1000"] * len(world.replicas)

    run(test)
    assert len({one.version for one in seen}) > 2 and len(seen) > 100
    newest, place = 0, 0
    ended = sorted(seen, key=lambda one: one.ended)
    for one in sorted(seen, key=lambda one: one.began):
        while ended[place].ended < one.began:
            newest = max(newest, ended[place].version)
            place += 1
        assert one.version >= newest
