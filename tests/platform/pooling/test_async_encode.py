"""`AsyncLLMEngine.encode`: the vectors that `LLM.encode` makes; aborts, and what is refused."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quire import LLM, AsyncEngineArgs, AsyncLLMEngine, LoRARequest, PoolingParams, RequestError, SamplingParams
from quire.demo import adapter_path

pytestmark = pytest.mark.usefixtures("one_thread")

TEXTS = ["There is a red circle.", "a", "One day, a blue square", "The star ran."]


@pytest.fixture(scope="module")
def engine() -> Iterator[tuple[AsyncLLMEngine, asyncio.AbstractEventLoop]]:
    arguments = AsyncEngineArgs(runner="pooling", convert="embed", enable_lora=True, num_gpu_blocks_override=256)
    made, loop = AsyncLLMEngine.from_engine_args(arguments), asyncio.new_event_loop()
    yield made, loop
    made.shutdown()
    loop.close()


async def encoded(engine: AsyncLLMEngine, prompt: Any, request_id: str, **more: Any) -> Any:
    (output,) = [one async for one in engine.encode(prompt, PoolingParams(), request_id, **more)]
    return output


def test_many_at_once_have_the_vectors_that_they_have_offline(engine: Any) -> None:
    made, loop = engine
    expected = LLM(runner="pooling", convert="embed", num_gpu_blocks_override=256).encode(TEXTS, use_tqdm=False)

    async def run() -> list[Any]:
        return await asyncio.gather(*(encoded(made, text, f"a{place}") for place, text in enumerate(TEXTS * 5)))

    found = loop.run_until_complete(asyncio.wait_for(run(), 60))
    for place, output in enumerate(found):
        assert output.finished and output.failure is None
        assert torch.equal(output.outputs.data, expected[place % len(TEXTS)].outputs.data)
        assert output.prompt_token_ids == expected[place % len(TEXTS)].prompt_token_ids
    french = LoRARequest("french", 1, str(adapter_path("french")))
    other = loop.run_until_complete(encoded(made, TEXTS[0], "b", lora_request=french))
    assert other.lora_request == french and not torch.equal(other.outputs.data, found[0].outputs.data)


def test_who_waits_for_an_aborted_request_is_told(engine: Any) -> None:
    made, loop = engine

    async def run() -> Any:
        waiting = asyncio.ensure_future(encoded(made, "a star " * 600, "long"))
        await asyncio.sleep(0)
        await made.abort("long")
        return await waiting

    output = loop.run_until_complete(asyncio.wait_for(run(), 60))
    assert output.finished and output.failure.by_caller and "aborted" in output.failure.message
    end = time.monotonic() + 60
    while made.engine.llm_engine.has_unfinished_requests():  # until the end of its step
        assert time.monotonic() < end
        time.sleep(0.005)
    assert loop.run_until_complete(encoded(made, "a", "long")).failure is None  # the id may be used again


def test_what_is_refused(engine: Any) -> None:
    made, loop = engine
    with pytest.raises(RequestError, match="priority"):
        loop.run_until_complete(encoded(made, "a", "c", priority=1))
    with pytest.raises(RequestError, match="truncate_prompt_tokens"):
        loop.run_until_complete(encoded(made, "a", "c", tokenization_kwargs={"truncation": True}))
    with pytest.raises(RequestError, match="maximum context length"):
        loop.run_until_complete(encoded(made, [5] * 5000, "c"))

    async def generate() -> None:
        async for _ in made.generate("a", SamplingParams(), "c"):
            pass

    with pytest.raises(RequestError, match="generates nothing"):
        loop.run_until_complete(generate())
