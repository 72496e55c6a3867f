"""Changes of adapters on many replicas, in one event loop: replicas and ledgers that end, and words that are lost."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from dataclasses import dataclass
from itertools import count

import pytest

from quire.distributed import participant
from quire.server.responses.errors import ApiError
from tests.distributed.world import World, body, run, until

pytestmark = pytest.mark.usefixtures("soon")


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


def test_a_ledger_begins_without_what_engines_need() -> None:
    """Which takes seconds, in which replicas come to refuse requests."""
    told = "import sys, quire.distributed.ledger; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], timeout=120, check=False).returncode == 0


def test_a_replica_that_ends_is_left_out_of_a_change() -> None:
    async def test(world: World) -> None:
        one = await world.begin("one")
        await world.begin("two")
        world.crash("two")
        assert (await world.handle.load.remote(body("a", "p1")))[0] == 200
        assert one.served.names == {"a": "p1"}
        assert set(await world.handle.members.remote()) == {"one"}

    run(test)


def test_a_name_is_forgotten_where_no_replica_runs() -> None:
    """So that who joins does not need files that are gone."""

    async def test(world: World) -> None:
        await world.begin("one")
        assert (await world.handle.load.remote(body("a", "p1")))[0] == 200
        assert not await world.handle.forget.remote("a")
        await world.replicas["one"].part.leave()
        world.crash("one")
        assert await world.handle.forget.remote("a") and not await world.handle.forget.remote("b")
        assert (await world.begin("two", frozenset({"p1"}))).served.names == {}

    run(test)


def test_a_replica_that_cannot_join_again_is_of_no_use(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        one = await world.begin("one")
        assert one.part.health_error() is None
        monkeypatch.setattr(participant, "_LOST", 0.2)
        world.handle.target = None
        await until(lambda: one.part.health_error() is not None)
        world.begin_ledger()
        await until(lambda: one.part.health_error() is None)

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


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_no_request_meets_an_older_version_after_a_newer(seed: int) -> None:
    """Of two requests, one after the other's end, the later never has the older version. In the end all have one."""
    seen: list[Seen] = []

    async def test(world: World) -> None:
        churn = Churn(world, random.Random(seed))
        await churn.run(12)
        seen.extend(churn.seen)
        while (await world.handle.load.remote(body("a", "1000", again=True)))[0] != 200:
            await asyncio.sleep(0.05)  # where this process stood still for a lease's time, none takes part for a moment
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
