"""How an engine in its thread ends: what runs, what is read, what sticks."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from quire import AsyncEngine, LoRARequest
from quire.config.arguments import engine_config
from quire.demo import adapter_path
from quire.errors import EngineClosedError
from tests.platform.engine.test_async_engine import DELTA, GREEDY, LONG, run, slow_reading, tokens, until


def test_closing_lets_what_runs_finish():
    async def work() -> None:
        engine = AsyncEngine(engine_config())
        await engine.start()
        running = asyncio.ensure_future(tokens(engine, "Once", DELTA, "a"))
        await until(lambda: bool(engine._output_queues))
        await engine.close(20)
        assert len(await running) == 12
        with pytest.raises(EngineClosedError):
            await tokens(engine, "Once", DELTA, "b")
        assert engine.step_loop.health_error(1) is not None and not engine.step_loop._thread.is_alive()

    run(work)


def test_what_is_asked_of_a_thread_that_has_just_ended_is_told_so(monkeypatch):
    """The engine may stop between the look at it and the message."""

    async def work() -> None:
        engine = AsyncEngine(engine_config())
        await engine.start()
        await engine.close(0)
        monkeypatch.setattr(engine.step_loop, "check_runs", lambda: None)
        with pytest.raises(EngineClosedError):
            await asyncio.wait_for(engine.reset_prefix_cache(), 10)

    run(work)


def test_closing_ends_what_does_not_finish():
    async def work() -> None:
        engine = AsyncEngine(engine_config())
        await engine.start()
        running = asyncio.ensure_future(tokens(engine, "Once", LONG, "a"))
        await until(lambda: bool(engine._output_queues))
        await engine.close(0.05)
        with pytest.raises(EngineClosedError):
            await running

    run(work)


def test_closing_waits_for_what_is_being_read():
    async def work() -> None:
        engine = AsyncEngine(engine_config())
        await engine.start()
        begun, gate = slow_reading(engine)
        running = asyncio.ensure_future(tokens(engine, "Once", DELTA, "a"))
        await asyncio.to_thread(begun.wait, 60)
        closing = asyncio.ensure_future(engine.close(20))
        await asyncio.sleep(0.05)
        gate.set()
        assert len(await running) == 12
        await closing

    run(work)


def test_what_is_read_when_the_time_is_over_is_told_so():
    """Whether a reader has begun with it or not."""

    async def work() -> None:
        engine = AsyncEngine(engine_config())
        await engine.start()
        begun, gate = slow_reading(engine)
        running = [asyncio.ensure_future(tokens(engine, "Once", DELTA, str(n))) for n in range(6)]
        await asyncio.to_thread(begun.wait, 60)
        await engine.close(0.05)
        gate.set()
        for task in running:
            with pytest.raises(EngineClosedError):
                await task
        with pytest.raises(EngineClosedError):
            await engine.on_reader(len, "abc")

    run(work)


def test_a_step_that_sticks_does_not_hold_the_end(monkeypatch):
    monkeypatch.setattr("quire.platform.engine.async_engine._LAST_STEP", 0.1)

    async def work() -> None:
        engine = AsyncEngine(engine_config())
        await engine.start()
        gate = threading.Event()
        execute = engine.llm_engine.executor.runner.execute

        def stuck(plan: Any) -> Any:
            gate.wait(60)
            return execute(plan)

        engine.llm_engine.executor.runner.execute = stuck
        running = asyncio.ensure_future(tokens(engine, "Once", GREEDY, "a"))
        await until(lambda: engine.step_loop.health_error(0.01) is not None)
        begun = time.monotonic()
        await engine.close(0.05)
        assert time.monotonic() - begun < 30 and engine.step_loop.stuck
        with pytest.raises(EngineClosedError):
            await running
        gate.set()
        await until(lambda: not engine.step_loop.stuck)

    run(work)


def test_an_unloading_that_outlives_the_engine_is_told_so():
    async def work() -> None:
        engine = AsyncEngine(engine_config(enable_lora=True))
        await engine.start()
        await engine.load_lora_adapter("french", adapter_path("french"))
        running = asyncio.ensure_future(tokens(engine, "Once", LONG, "a", LoRARequest("french")))
        await until(lambda: engine.stats().running == 1)
        unloading = asyncio.ensure_future(engine.unload_lora_adapter("french", 30))
        await asyncio.sleep(0)

        def faulty() -> Any:
            raise RuntimeError("broken")

        engine.llm_engine.scheduler.plan = faulty
        for task in (running, unloading):
            with pytest.raises(EngineClosedError):
                await task
        await engine.close()

    run(work)
