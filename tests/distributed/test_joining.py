"""Replicas that join while a change is made, that cannot join, and that bring what the ledger does not know."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from quire.distributed.steps import Entry
from quire.server.responses.errors import ApiError
from tests.distributed.world import World, body, run, until

pytestmark = pytest.mark.usefixtures("soon")


def test_who_comes_while_a_change_is_made_without_it_refuses_adapters_until_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its lease ended, the change went on without it: it must not take requests on the ledger's word to wait."""

    async def test(world: World) -> None:
        one, two = await world.begin("one"), await world.begin("two")
        await world.handle.load.remote(body("a", "p1"))
        assert two.part._life is not None
        two.part._life.cancel()
        await until(lambda: two.adapters._heard < time.monotonic() - 0.4)
        release = asyncio.Event()
        stage = one.served.stage

        async def slowly(asked: Any) -> Any:
            await release.wait()
            return await stage(asked)

        monkeypatch.setattr(one.served, "stage", slowly)
        changing = asyncio.ensure_future(world.handle.load.remote(body("a", "p2", again=True)))
        await until(lambda: world.handle.target._changing is not None)
        assert set(world.handle.target._changing) == {"one"}
        two.part._life = asyncio.ensure_future(two.part._take_part())
        await asyncio.sleep(0.1)
        with pytest.raises(ApiError, match="lost touch"):
            await world.ask("a", two)
        release.set()
        assert (await changing)[0] == 200
        await until(lambda: two.served.names == {"a": "p2"})
        await until(lambda: two.adapters._heard > time.monotonic() - 0.2)
        assert await world.ask("a", two) == "p2"

    run(test)


def test_a_replica_that_cannot_join_holds_nobody_up() -> None:
    """It lacks an adapter's files: the others change what they have, and when that adapter goes, it joins."""

    async def test(world: World) -> None:
        one = await world.begin("one")
        await world.handle.load.remote(body("a", "p1"))
        joining = asyncio.ensure_future(world.begin("two", frozenset({"p1"})))
        await until(lambda: "two" in world.handle.target._members)
        assert (await world.handle.load.remote(body("b", "p2")))[0] == 200
        assert one.served.names == {"a": "p1", "b": "p2"} and not joining.done()
        assert (await world.handle.unload.remote("a"))[0] == 200
        assert (await joining).served.names == {"b": "p2"}

    run(test)


def test_what_a_late_replica_brings_from_before_the_ledger_all_have() -> None:
    async def test(world: World) -> None:
        one = await world.begin("one")
        await world.handle.load.remote(body("a", "p1"))
        late = Entry(one.adapters.version + 1, body("b", "p2"))
        told = {"b": {"version": late.version, "body": late.body}}
        await world.handle.load.remote(body("c", "p3"))  # the newest, by its number
        await world.handle.join.remote("late", "at late", told, False)
        await until(lambda: one.served.names == {"a": "p1", "b": "p2", "c": "p3"})

    run(test)
