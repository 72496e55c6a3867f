"""Outputs on their way to readers: none is lost or late, and tokens of fast steps go together."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from quire.platform.engine import output_stream
from quire.platform.engine.output_stream import OutputQueues


def _output(name: str, number: int, finished: bool = False) -> Any:
    return SimpleNamespace(request_id=name, number=number, finished=finished)


def _open(queues: OutputQueues, *names: str) -> tuple[Any, list[set[str]]]:
    aborted: list[set[str]] = []
    return queues.open(set(names), aborted.append), aborted


def test_first_and_last_are_handed_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_stream, "PACE", 1000.0)

    async def run() -> None:
        queues = OutputQueues()
        outputs, _ = _open(queues, "a")
        queues.deliver([_output("a", 0)])
        assert outputs.ready and (await anext(outputs)).number == 0
        queues.deliver([_output("a", 1)])
        queues.deliver([_output("a", 2)])
        assert not outputs.ready  # they wait for their time
        other, _ = _open(queues, "b")
        queues.deliver([_output("b", 0)])  # and come with a first one
        assert other.ready and [(await anext(outputs)).number for _ in range(2)] == [1, 2]
        queues.deliver([_output("a", 3)])
        queues.deliver([_output("a", 4, finished=True)])
        assert [one.number async for one in outputs] == [3, 4]
        assert "a" not in queues and "b" in queues

    asyncio.run(run())


def test_what_waits_comes_in_time_without_another_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_stream, "PACE", 0.02)

    async def run() -> None:
        queues = OutputQueues()
        outputs, _ = _open(queues, "a")
        for number in range(3):
            queues.deliver([_output("a", number)])
        assert [(await asyncio.wait_for(anext(outputs), 20)).number for _ in range(3)] == [0, 1, 2]
        assert not outputs.ready

    asyncio.run(run())


def test_readers_that_take_long_are_woken_up_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """So often that they take their share of the loop's time, and at least every MOST_PACE."""
    for name, value in {"PACE": 0.001, "MOST_PACE": 0.001, "SHARE": 1e-3}.items():
        monkeypatch.setattr(output_stream, name, value)

    async def run() -> None:
        queues = OutputQueues()
        outputs, _ = _open(queues, "a")

        async def read() -> int:
            number: int = (await anext(outputs)).number
            begun = time.thread_time()
            while time.thread_time() - begun < 0.02:  # what it does with it
                pass
            return number

        for number in range(2):
            reader = asyncio.ensure_future(read())
            await asyncio.sleep(0.01)
            queues.deliver([_output("a", number)])
            assert await asyncio.wait_for(reader, 60) == number
        await asyncio.sleep(0)
        monkeypatch.setattr(output_stream, "MOST_PACE", 1000.0)
        queues.deliver([_output("a", 2)])
        await asyncio.sleep(0.2)
        assert not outputs.ready, "it is not due for twenty seconds"
        queues.deliver([_output("a", 3, finished=True)])
        assert [(await anext(outputs)).number for _ in range(2)] == [2, 3]

    asyncio.run(run())


def test_errors_come_after_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_stream, "PACE", 1000.0)

    async def run() -> None:
        queues = OutputQueues()
        outputs, aborted = _open(queues, "a")
        one, _ = _open(queues, "b")
        for number in range(2):
            queues.deliver([_output("a", number), _output("b", number)])
        queues.fail("b", ValueError("b"))
        assert [(await anext(one)).number for _ in range(2)] == [0, 1]
        with pytest.raises(ValueError, match="b"):
            await anext(one)
        queues.deliver([_output("a", 2)])
        queues.fail_all(ValueError("all"))
        assert [(await anext(outputs)).number for _ in range(3)] == [0, 1, 2]
        with pytest.raises(ValueError, match="all"):
            await anext(outputs)
        assert outputs.close() == 1 and aborted == [{"a"}]

    asyncio.run(run())


def test_a_reader_that_was_cancelled_can_wait_again() -> None:
    async def run() -> None:
        queues = OutputQueues()
        outputs, _ = _open(queues, "a")
        for _ in range(2):
            waiting = asyncio.ensure_future(anext(outputs))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        queues.deliver([_output("a", 0, finished=True)])
        assert [one.number async for one in outputs] == [0]

    asyncio.run(run())
