"""Programs written for vLLM: the asynchronous engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import quire
from quire import (
    AsyncEngineArgs,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    LoRARequest,
    RequestOutputKind,
    SamplingParams,
)
from quire.errors import EngineClosedError
from quire.platform.engine import output_stream
from tests.server.vllm.helpers import GREEDY

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def async_engine(plain_model: Path) -> Iterator[tuple[AsyncLLMEngine, asyncio.AbstractEventLoop]]:
    arguments = AsyncEngineArgs(
        model=str(plain_model), num_gpu_blocks_override=64, disable_log_requests=True, enable_log_requests=False
    )
    engine, loop = AsyncLLMEngine.from_engine_args(arguments), asyncio.new_event_loop()
    yield engine, loop
    engine.shutdown()
    loop.close()


async def texts(engine: AsyncLLMEngine, prompt: Any, params: Any, request_id: str) -> list[str]:
    return [output.outputs[0].text async for output in engine.generate(prompt, params, request_id)]


def test_the_async_engine_answers(async_engine: Any) -> None:
    engine, loop = async_engine

    async def run() -> None:
        alone = await texts(engine, "abc", GREEDY, "1")
        assert len(alone) == 8 and all(longer.startswith(one) for one, longer in pairwise(alone))
        delta = dataclasses.replace(GREEDY, output_kind=RequestOutputKind.DELTA)
        among = await asyncio.gather(*(texts(engine, "abc", delta, f"2-{place}") for place in range(3)))
        assert {"".join(parts) for parts in among} == {alone[-1]}
        beams = [output async for output in engine.generate("abc", BeamSearchParams(beam_width=2, max_tokens=3), "3")]
        assert len(beams) == 1 and len(beams[0].outputs) == 2 and beams[0].finished
        await engine.check_health()
        assert engine.is_running and not engine.errored and await engine.get_tokenizer() is not None

    loop.run_until_complete(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_who_waits_for_an_aborted_request_is_told(async_engine: Any, kind: RequestOutputKind) -> None:
    engine, loop = async_engine
    endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, output_kind=kind)

    async def run() -> None:
        outputs = []
        async for output in engine.generate("ab", endless, "long"):
            outputs.append(output)
            if len(outputs) == 2:
                await engine.abort("long")
                await engine.abort(["long", "never"])
        last = outputs[-1]
        assert last.finished and last.outputs[0].finish_reason == "abort"
        assert sum(one.finished for one in outputs) == 1
        if kind is RequestOutputKind.DELTA:
            assert last.outputs[0].text == ""
        while engine.engine.llm_engine.has_unfinished_requests():  # until the end of its step
            await asyncio.sleep(0.01)
        # Before it was read.
        begun = asyncio.ensure_future(texts(engine, "ab", endless, "soon"))
        await asyncio.sleep(0)
        await engine.abort("soon")
        assert len(await begun) == 1

    loop.run_until_complete(asyncio.wait_for(run(), 60))


def test_the_last_output_of_an_aborted_request_is_not_behind(
    async_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs that wait to be handed out when it is aborted are not shown: its last one does not have their tokens."""
    engine, loop = async_engine
    monkeypatch.setattr(output_stream, "PACE", 60.0)  # all but its first output waits
    endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)

    async def run() -> list[int]:
        lengths = []
        async for output in engine.generate("ab", endless, "held"):
            lengths.append(len(output.outputs[0].token_ids))
            if len(lengths) == 1:
                while len(engine.engine._output_queues._held) < 3:
                    await asyncio.sleep(0.01)
                await engine.abort("held")
        return lengths

    assert loop.run_until_complete(asyncio.wait_for(run(), 60)) == [1, 1]


def test_what_the_async_engine_refuses(async_engine: Any) -> None:
    engine, loop = async_engine

    async def run() -> None:
        with pytest.raises(quire.RequestError, match="priority"):
            async for _ in engine.generate("ab", GREEDY, "4", priority=3):
                pass
        with pytest.raises(quire.RequestError, match="the prompt is empty"):
            await texts(engine, [], GREEDY, "5")
        with pytest.raises(quire.AdapterError, match="enable_lora"):
            await engine.add_lora(LoRARequest("a", 1, "x"))

    loop.run_until_complete(asyncio.wait_for(run(), 60))
    with pytest.raises(quire.QuireError, match="enable_log_requests=True"):
        AsyncLLMEngine.from_engine_args(AsyncEngineArgs(enable_log_requests=True))
    with pytest.raises(TypeError, match="stat_loggers"):
        AsyncLLMEngine.from_engine_args(AsyncEngineArgs(), stat_loggers=[print])


def test_a_shutdown_ends_who_waits(plain_model: Path) -> None:
    async def run() -> None:
        engine = AsyncLLMEngine.from_engine_args(EngineArgs(model=str(plain_model), num_gpu_blocks_override=64))
        endless = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
        with pytest.raises(EngineClosedError):
            async for _ in engine.generate("ab", endless, "1"):
                engine.shutdown()
        assert engine.is_stopped and not engine.errored
        with pytest.raises(EngineClosedError):
            await engine.check_health()

    asyncio.run(asyncio.wait_for(run(), 60))
