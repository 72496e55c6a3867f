"""The engine in its thread: the same tokens, nobody waits for another's image, and what ends leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from PIL import Image

from quire import LLM, AsyncEngine, LoRARequest, RequestOutputKind, SamplingParams
from quire.config.arguments import engine_config
from quire.demo import adapter_path, picture_path
from quire.errors import AdapterError, EngineClosedError, RequestError
from quire.platform.engine.async_engine import EngineRequest
from quire.platform.sampling.structured.compiler import ConstraintCompiler
from quire.platform.sampling.structured.params import StructuredOutputsParams

FINAL = RequestOutputKind.FINAL_ONLY
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind=FINAL)
DELTA = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
LONG = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
SEEN = "<|user|><|image|>What do you see?<|end|><|assistant|>"


@asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[AsyncEngine]:
    """An engine on the bundled model; when it is left, nothing may be held any more."""
    engine = AsyncEngine(engine_config(debug=True, **settings))
    await engine.start()
    try:
        yield engine
        await idle(engine)
    finally:
        await engine.close()


async def idle(engine: AsyncEngine) -> None:
    """Until nothing runs; then all blocks are back and all tables agree."""
    inner = engine.llm_engine
    await until(lambda: not inner.has_unfinished_requests())
    done = threading.Event()
    engine.step_loop.tell(done.set)  # what was asked before is done
    await asyncio.to_thread(done.wait, 60)
    inner.check_integrity()
    assert inner.pool.num_free == inner.pool.num_blocks


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come"
        await asyncio.sleep(0.005)


async def tokens(engine: AsyncEngine, prompt: Any, params: SamplingParams, request_id: str, *more: Any) -> list[int]:
    made: list[int] = []
    async for output in engine.generate(prompt, params, request_id, *more):
        made += output.outputs[0].token_ids
    return made


def slow_reading(engine: AsyncEngine) -> tuple[threading.Event, threading.Event]:
    """(set when something is read, set by the test to let it go on)"""
    read, begun, gate = engine.llm_engine.read_request, threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        arrival = read(*given)
        begun.set()
        gate.wait(60)
        return arrival

    engine.llm_engine.read_request = slow
    return begun, gate


def run(work: Callable[[], Awaitable[Any]]) -> Any:
    return asyncio.run(asyncio.wait_for(work(), 60))


def test_tokens_are_those_of_generate():
    prompts = [
        "Once upon a time",
        "One day",
        {"prompt": SEEN, "multi_modal_data": {"image": Image.open(picture_path())}},
    ]
    llm = LLM()
    alone = [list(llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids) for prompt in prompts]

    async def work() -> list[list[int]]:
        async with opened() as engine:
            kinds = [(prompt, params) for prompt in prompts for params in (GREEDY, DELTA)] * 4
            return await asyncio.gather(*(tokens(engine, *kind, str(n)) for n, kind in enumerate(kinds)))

    made = run(work)
    assert made == [alone[number // 2] for number in range(6)] * 4


def test_leaving_the_iteration_aborts_within_a_step():
    async def work() -> int:
        async with opened() as engine:
            steps = 0
            step = engine.llm_engine.step

            def counted() -> Any:
                nonlocal steps
                steps += 1
                return step()

            engine.llm_engine.step = counted
            async with await engine.submit([EngineRequest("a", "Once", LONG)]) as outputs:
                await anext(outputs)
            left = steps
            await until(lambda: not engine.llm_engine.has_unfinished_requests())
            return steps - left

    assert run(work) <= 3  # the one that ran, and one that may have begun before the message was read


def test_a_cancelled_reader_lets_go_of_its_adapter():
    async def work() -> None:
        async with opened(enable_lora=True) as engine:
            await engine.load_lora_adapter("french", adapter_path("french"))
            begun, gate = slow_reading(engine)
            task = asyncio.ensure_future(tokens(engine, "Once", GREEDY, "a", LoRARequest("french")))
            await asyncio.to_thread(begun.wait, 10)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            gate.set()
            assert await engine.unload_lora_adapter("french", 10) is not None

    run(work)


def test_a_text_does_not_wait_for_shapes(monkeypatch):
    async def work() -> None:
        async with opened() as engine:
            gate, begun = threading.Event(), threading.Semaphore(0)
            made = ConstraintCompiler.processors

            def slow(*given: Any) -> Any:
                begun.release()
                gate.wait(60)
                return made(*given)

            monkeypatch.setattr(ConstraintCompiler, "processors", slow)
            shaped = replace(GREEDY, ignore_eos=False, structured_outputs=StructuredOutputsParams(choice=["red"]))
            waiting = [asyncio.ensure_future(tokens(engine, "Once", shaped, f"shaped {i}")) for i in range(4)]
            await asyncio.to_thread(begun.acquire)
            assert len(await tokens(engine, "Once", GREEDY, "text")) == 12
            assert not gate.is_set() and not any(one.done() for one in waiting)
            gate.set()
            assert len({tuple(made) for made in await asyncio.gather(*waiting)}) == 1

    run(work)


def test_a_text_does_not_wait_for_an_image(monkeypatch):
    """A step with nothing to do sleeps until a message comes, not until its patience ends."""
    monkeypatch.setattr("quire.platform.engine.llm_engine._POLL_SECONDS", 120.0)

    async def work() -> None:
        async with opened() as engine:
            gate = threading.Event()
            prepare = engine.llm_engine.media.preprocessor._prepare

            def slow(*given: Any) -> Any:
                gate.wait(60)
                return prepare(*given)

            monkeypatch.setattr(engine.llm_engine.media.preprocessor, "_prepare", slow)
            picture = {"prompt": SEEN, "multi_modal_data": {"image": Image.open(picture_path())}}
            seeing = asyncio.ensure_future(tokens(engine, picture, GREEDY, "image"))
            await until(lambda: engine.stats().arriving == 1)
            begun = time.monotonic()
            assert len(await tokens(engine, "Once", GREEDY, "text")) == 12
            assert time.monotonic() - begun < 40 and not seeing.done()
            gate.set()
            assert len(await seeing) == 12

    run(work)


def test_all_of_a_group_or_none():
    async def work() -> None:
        async with opened(enable_lora=True) as engine:
            await engine.load_lora_adapter("french", adapter_path("french"))
            good = EngineRequest("good", "Once", GREEDY, LoRARequest("french"))
            for bad in (
                EngineRequest("bad", [], GREEDY),
                EngineRequest("bad", "x", GREEDY, LoRARequest("nobody")),
                EngineRequest("good", "x", GREEDY),  # the same id
            ):
                with pytest.raises(RequestError):
                    await engine.submit([good, bad])
                assert not engine.llm_engine.has_unfinished_requests() and not engine._output_queues
            assert await engine.unload_lora_adapter("french", 10) is not None, "somebody holds it still"

    run(work)


def test_an_id_that_is_in_use_is_refused_and_harms_nobody():
    async def work() -> None:
        async with opened() as engine, await engine.submit([EngineRequest("a", "Once", DELTA)]) as outputs:
            with pytest.raises(RequestError, match="in use"):
                await engine.submit([EngineRequest("a", "Once", DELTA)])
            assert sum([len(output.outputs[0].token_ids) async for output in outputs]) == 12

    run(work)


def test_unloading_waits_for_who_runs():
    async def work() -> None:
        async with opened(enable_lora=True) as engine:
            await engine.load_lora_adapter("french", adapter_path("french"))
            outputs = await engine.submit([EngineRequest("a", "Once", LONG, LoRARequest("french"))])
            await anext(outputs)
            assert await engine.unload_lora_adapter("french", 0.05) is None
            with pytest.raises(AdapterError):
                await engine.unload_lora_adapter("french", 0.05)
            await engine.load_lora_adapter("french", adapter_path("french"))
            unloading = asyncio.ensure_future(engine.unload_lora_adapter("french", 10))
            assert await unloading == 278_016  # the new version: nobody holds it
            outputs.close()
            await idle(engine)
            assert engine.stats().adapter_host_bytes == 0

    run(work)


def test_who_watches_cannot_stop_the_engine(caplog):
    def broken(*given: Any) -> None:
        raise RuntimeError("watching")

    async def work() -> None:
        engine = AsyncEngine(engine_config(), broken)
        await engine.start()
        assert len(await tokens(engine, "Once", GREEDY, "a")) == 12
        await engine.close()

    run(work)
    assert "on_step failed" in caplog.text


def test_a_text_that_cannot_be_made_ends_its_own_request(monkeypatch):
    async def work() -> None:
        async with opened() as engine:
            take = engine.llm_engine.output_processor.take

            def faulty(sequence: Any) -> str | None:
                if sequence.request.request_id == "bad" and len(sequence.output_ids) == 5:
                    raise RuntimeError("broken")
                return take(sequence)

            engine.llm_engine.output_processor.take = faulty
            alone = await tokens(engine, "Once", GREEDY, "alone")
            good, bad = await asyncio.gather(
                tokens(engine, "Once", GREEDY, "good"), last(engine, "Once", GREEDY, "bad")
            )
            assert good == alone and bad.failure.message == "RuntimeError: broken" and not bad.failure.by_caller

    run(work)


async def last(engine: AsyncEngine, *request: Any) -> Any:
    """A request's last output."""
    return [output async for output in engine.generate(*request)][-1]


def test_a_fault_of_the_engine_reaches_all_and_is_told():
    async def work() -> None:
        engine = AsyncEngine(engine_config())
        await engine.start()
        running = [asyncio.ensure_future(tokens(engine, "Once", LONG, str(n))) for n in range(3)]
        await until(lambda: engine.stats().running == 3)
        assert engine.step_loop.health_error(10) is None

        def faulty() -> Any:
            raise RuntimeError("broken")

        engine.llm_engine.scheduler.plan = faulty
        for task in running:
            with pytest.raises(EngineClosedError, match="RuntimeError"):
                await task
        assert "RuntimeError" in engine.step_loop.health_error(10) and engine.step_loop.failed and engine.closing
        with pytest.raises(EngineClosedError):
            await tokens(engine, "Once", LONG, "late")
        await engine.close()

    run(work)


def test_a_step_that_sticks_is_told():
    async def work() -> None:
        async with opened() as engine:
            gate = threading.Event()
            execute = engine.llm_engine.executor.runner.execute

            def stuck(plan: Any) -> Any:
                gate.wait(60)
                return execute(plan)

            engine.llm_engine.executor.runner.execute = stuck
            running = asyncio.ensure_future(tokens(engine, "Once", GREEDY, "a"))
            await until(lambda: engine.step_loop.health_error(0.05) is not None)
            assert engine.step_loop.health_error(60) is None
            gate.set()
            await running
            await until(lambda: engine.step_loop.health_error(0.05) is None)

    run(work)


def test_an_idle_engine_sleeps():
    async def work() -> None:
        async with opened() as engine:
            await tokens(engine, "Once", GREEDY, "a")
            await idle(engine)
            steps = 0
            step = engine.llm_engine.step

            def counted() -> Any:
                nonlocal steps
                steps += 1
                return step()

            engine.llm_engine.step = counted
            await asyncio.sleep(0.3)
            assert steps == 0 and engine.step_loop._inbox.empty()

    run(work)


def test_gaps_between_tokens_are_counted_for_each_sequence():
    gaps: list[float] = []

    async def work() -> None:
        engine = AsyncEngine(engine_config(), lambda times, outputs: gaps.extend(times.gaps))
        await engine.start()
        params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=10, ignore_eos=True)
        async for _ in engine.generate("Once", params, "a"):
            pass
        stats = engine.stats()
        assert stats.generated_tokens == 30 and stats.prompt_tokens == len(engine.llm_engine.tokenizer.encode("Once"))
        await engine.close()

    run(work)
    assert len(gaps) == 27 and min(gaps) > 0
