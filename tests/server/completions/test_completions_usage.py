"""Completions: usage, ids and caches."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire import LLM
from quire.platform.outputs.outputs import CompletionOutput, Logprob
from quire.server.responses.logprobs import CompletionLogprobs, chat_logprobs
from tests.server.api_answers import events, offline, post
from tests.server.api_server import ServerProcess
from tests.server.completions.helpers import DRAWN, GREEDY, LONG, MODEL, PATH, PROMPT, PROMPTS, ids_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_usage_counts_prompts_once_and_every_answer(http: Any, llm: LLM) -> None:
    usage = post(http, PATH, prompt=PROMPTS, n=2, ignore_eos=True, **DRAWN)["usage"]
    prompt = sum(len(ids_of(llm, one)) for one in PROMPTS)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, 6 * 24)
    assert usage["total_tokens"] == prompt + 6 * 24


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_whole_blocks_of_one_salt(http: Any, llm: LLM, stream: bool) -> None:
    """A block is 8 tokens; the last token of a prompt is always computed."""

    def cached(salt: str) -> int:
        body = {"prompt": LONG, "cache_salt": f"{salt}-{stream}", "max_tokens": 1}
        if stream:
            usage = events(http, PATH, stream_options={"include_usage": True}, **body)[-1]["usage"]
        else:
            usage = post(http, PATH, **body)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached("one"), cached("one"), cached("two"), cached("two")] == [
        0,
        (len(ids_of(llm, LONG)) - 1) // 8 * 8,
    ] * 2


def test_a_request_id_ends_the_answers_id(http: Any) -> None:
    assert post(http, PATH, prompt=PROMPT, request_id="mine", **GREEDY)["id"] == "cmpl-mine"
    assert {chunk["id"] for chunk in events(http, PATH, prompt=PROMPT, request_id="mine", **GREEDY)} == {"cmpl-mine"}
    response = http.post(PATH, json={"prompt": PROMPT, **GREEDY}, headers={"X-Request-Id": "from-a-proxy"})
    assert response.json()["id"] == "cmpl-from-a-proxy"
    assert len({post(http, PATH, prompt=PROMPT, max_tokens=1)["id"] for _ in range(3)}) == 3


def test_one_id_may_be_used_by_several_at_once(demo: ServerProcess, llm: LLM) -> None:
    async def ask() -> list[str]:
        async with demo.async_client() as client:
            body = {"model": MODEL, "extra_body": {"request_id": "same"}, **GREEDY}
            answers = await asyncio.gather(*(client.completions.create(prompt=p, **body) for p in PROMPTS * 2))
            return [answer.choices[0].text for answer in answers]

    assert asyncio.run(ask()) == [offline(llm, prompt, **GREEDY).outputs[0].text for prompt in PROMPTS] * 2


def test_many_at_once_get_what_each_gets_alone(demo: ServerProcess, llm: LLM) -> None:
    async def ask(client: Any, seed: int) -> str:
        body = {**DRAWN, "seed": seed}
        prompt = PROMPTS[seed % 3]
        if seed % 2:
            stream = await client.completions.create(model=MODEL, prompt=prompt, stream=True, **body)
            return "".join([chunk.choices[0].text async for chunk in stream])
        return (await client.completions.create(model=MODEL, prompt=prompt, **body)).choices[0].text

    async def ask_all() -> list[str]:
        async with demo.async_client() as client:
            return list(await asyncio.gather(*(ask(client, seed) for seed in range(16))))

    want = [offline(llm, PROMPTS[seed % 3], **{**DRAWN, "seed": seed}).outputs[0].text for seed in range(16)]
    assert asyncio.run(ask_all()) == want


def test_of_tokens_that_look_alike_the_likeliest_is_told() -> None:
    """Parts of characters all look like one sign."""
    entries = {7: Logprob(-0.1, 1, "\ufffd"), 8: Logprob(-1.0, 2, "a"), 9: Logprob(-4.0, 3, "\ufffd")}
    told = CompletionLogprobs(3, as_ids=False).of([7], [entries])
    assert told["top_logprobs"] == [{"\ufffd": -0.1, "a": -1.0}]


def test_bytes_are_the_token_s_own() -> None:
    """Of neighbours they make a letter, which its parts' texts do not."""
    parts = [bytes([byte]) for byte in "\u6c34".encode()]
    logprobs = [{number: Logprob(-1.0, 1, "\ufffd", part)} for number, part in enumerate(parts)]
    told = chat_logprobs(CompletionOutput(0, "\u6c34", [0, 1, 2], logprobs=logprobs), 1, as_ids=False)
    assert told is not None
    assert b"".join(bytes(one["bytes"]) for one in told["content"]).decode() == "\u6c34"
    assert [one["top_logprobs"][0]["bytes"] for one in told["content"]] == [list(part) for part in parts]
