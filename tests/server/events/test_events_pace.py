"""How often the engine is looked at, and when each watcher is told, by a clock that goes where something is due."""

from __future__ import annotations

import asyncio
import json
import selectors
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from concurrent.futures import Executor
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from quire import LLM
from quire.platform.engine.llm_engine import LLMEngine
from quire.platform.engine.watching import watch
from quire.server.events import hub

_T = TypeVar("_T")


class NoTime(asyncio.SelectorEventLoop):
    """Waits for nothing: its time is that of what is due next. Work for other threads is done at once, in this one."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *given: Any) -> Any:
        done = self.create_future()
        done.set_result(func(*given))
        return done


class _Skipping(selectors.DefaultSelector):
    def __init__(self, loop: NoTime) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        assert timeout is not None, "nothing is due any more"
        self._loop.now += max(0.0, timeout)
        return super().select(0)


class _AtOnce:
    """An engine's thread that has time for whoever asks."""

    def check_runs(self) -> None:
        pass

    async def call(self, function: Callable[[], _T]) -> _T:
        return function()


@pytest.fixture(scope="module")
def engine(plain_model: Path) -> LLMEngine:
    return LLM(str(plain_model), num_gpu_blocks_override=64).llm_engine


@pytest.fixture
def cost(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What a copy of the engine's state is said to take, in seconds; coding it takes nothing."""
    said = {"copy": 0.0}
    real = watch.take_snapshot

    def taken(*given: Any) -> Any:
        made = real(*given)
        object.__setattr__(made, "cost", said["copy"])
        return made

    monkeypatch.setattr(watch, "take_snapshot", taken)
    monkeypatch.setattr(hub.time, "thread_time", lambda: 0.0)
    return said


@pytest.fixture
def looks(engine: LLMEngine, cost: dict[str, float]) -> Iterator[Looks]:
    looks = Looks(engine)
    yield looks
    looks.loop.close()


class Looks:
    """Events of an engine that does nothing, and when it was looked at."""

    def __init__(self, engine: LLMEngine) -> None:
        self.loop = NoTime()
        self.times: list[float] = []
        watched = watch.EngineWatch(engine, _AtOnce())  # type: ignore[arg-type]
        real = watched.snapshot

        async def noted() -> Any:
            self.times.append(self.loop.time())
            return await real()

        watched.snapshot = noted  # type: ignore[method-assign]
        given: Any = SimpleNamespace(llm_engine=engine, watch=watched, step_loop=_AtOnce(), list_lora_adapters=list)
        self.events = hub.EngineEvents(given, "a-model")

    def run(self, work: Awaitable[_T]) -> _T:
        return self.loop.run_until_complete(work)

    async def watching(self, rate: float, seconds: float) -> list[float]:
        """When somebody is told who watches for so long."""
        end, told = self.loop.time() + seconds, []
        with self.events.joined(rate) as watcher:
            stream: AsyncGenerator[bytes, None] = self.events.events(watcher)
            async for event in stream:
                if self.loop.time() >= end:
                    break
                assert json.loads(event.split(b"data: ")[1])["pools"][0]["total"] == 64
                told.append(self.loop.time())
            await stream.aclose()
        return told


def apart(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]


def test_one_looks_for_all(looks: Looks) -> None:
    """Ten a second at most, whoever watches, comes and goes; a slower one gets as many as it asked for."""

    async def passing() -> int:
        seen = 0
        for _ in range(32):
            await asyncio.sleep(0.13)
            seen += len(await looks.watching(10, 0.12))
        return seen

    async def all_of_them() -> tuple[list[list[float]], list[float], int]:
        quick = [asyncio.ensure_future(looks.watching(10, 10)) for _ in range(3)]
        slow = asyncio.ensure_future(looks.watching(1, 10))
        seen = await passing()
        return [await one for one in quick], await slow, seen

    quick, slow, seen = looks.run(all_of_them())
    assert min(apart(looks.times)) == pytest.approx(0.1) == max(apart(looks.times))
    assert [len(one) for one in quick] == [100] * 3
    assert all(one == pytest.approx(looks.times[:100]) for one in quick)
    assert len(slow) == 10 and apart(slow) == pytest.approx([1] * 9)
    assert seen >= 32  # who comes has an event at once, and is gone before the second


@pytest.mark.parametrize("rate", [0.2, 1, 4, 10])
def test_so_often_as_was_asked_for(looks: Looks, rate: float) -> None:
    """And the engine is looked at no more often than somebody is told."""
    told = looks.run(looks.watching(rate, 60 - 0.5 / rate))
    assert len(told) == pytest.approx(60 * rate)
    assert told == looks.times[: len(told)]


def test_a_large_pool_is_looked_at_more_rarely(looks: Looks, cost: dict[str, float]) -> None:
    """Where a copy is said to take 5 ms, a second lies between two; of the first one nobody knew, and the second may
    have been dear by chance."""
    cost["copy"] = 0.005
    told = looks.run(looks.watching(10, 9.95))
    assert apart(told) == pytest.approx([0.1] + [1] * 9)


def test_who_is_late_is_told_the_newest_and_not_twice(looks: Looks) -> None:
    """Somebody who takes an event after three seconds: the next one comes half an interval later, and then as asked."""

    async def late() -> list[float]:
        told = []
        with looks.events.joined(2) as watcher:
            stream = looks.events.events(watcher)
            for pause in (0.0, 3.2, 0.0, 0.0, 0.0):
                await anext(stream)
                told.append(looks.loop.time())
                await asyncio.sleep(pause)
            await stream.aclose()
        return told

    assert apart(looks.run(late()))[2:] == pytest.approx([0.5, 0.5], abs=0.26)


def test_nobody_looks_for_nobody(looks: Looks) -> None:
    looks.run(looks.watching(10, 0.95))
    taken = len(looks.times)
    looks.run(asyncio.sleep(100))
    assert len(looks.times) == taken
    looks.run(looks.watching(10, 0.95))
    assert len(looks.times) > taken
