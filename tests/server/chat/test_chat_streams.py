"""Chat completions: streams; many at once."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from quire import LLM
from quire.server.responses.builder import EventResponseBuilder
from quire.server.routes.chat import _ChatAnswer
from tests.server.api_answers import conversed, events, joined, post, strict
from tests.server.api_server import LocalServer, ServerProcess
from tests.server.chat.helpers import DRAWN, GREEDY, LOOK, MODEL, PATH, SEEN, STORY, TOLD, WHO, Messages

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("messages", "params"),
    [
        (STORY, GREEDY),
        (LOOK, GREEDY),
        (TOLD, {**DRAWN, "n": 3}),
        (TOLD, {**GREEDY, "n": 2}),
        (TOLD, {**DRAWN, "stop": ["the"]}),
    ],
    ids=["turns", "picture", "three", "equal", "stop"],
)
def test_a_stream_makes_the_same_texts_and_tokens(
    http: Any, llm: LLM, messages: Messages, params: dict[str, Any]
) -> None:
    whole = post(http, PATH, messages=messages, return_token_ids=True, **params)
    chunks = events(http, PATH, messages=messages, return_token_ids=True, **params)
    parts, want = joined(chunks), conversed(llm, messages, **params).outputs
    assert sorted(parts) == list(range(len(want)))
    for index, out in enumerate(want):
        choice = whole["choices"][index]
        assert parts[index]["text"] == choice["message"]["content"] == out.text
        assert parts[index]["tokens"] == choice["token_ids"] == list(out.token_ids)
        assert parts[index]["finish_reason"] == choice["finish_reason"] == out.finish_reason
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert all("prompt_token_ids" not in chunk for chunk in chunks[1:])


def test_only_a_choices_first_chunk_has_the_role(http: Any) -> None:
    for index in range(3):
        chunks = events(http, PATH, messages=TOLD, n=3, **DRAWN)
        deltas = [c["delta"] for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        assert deltas[0]["role"] == "assistant"
        assert len(deltas) > 3 and all("role" not in delta for delta in deltas[1:])


def test_a_streams_logprobs_are_the_whole_answers(http: Any) -> None:
    body = {"messages": TOLD, "logprobs": True, "top_logprobs": 2, **DRAWN}
    (whole,) = post(http, PATH, **body)["choices"]
    chunks = events(http, PATH, **body)
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [entry for part in parts for entry in part["content"]] == whole["logprobs"]["content"]


def test_usage_at_the_end_and_in_every_chunk(http: Any) -> None:
    usage = post(http, PATH, messages=TOLD, **DRAWN)["usage"]
    *chunks, last = events(http, PATH, messages=TOLD, stream_options={"include_usage": True}, **DRAWN)
    assert last["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, also = events(http, PATH, messages=TOLD, stream_options=options, **DRAWN)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(set(counts)) and counts[0] >= 1
    for one in (last, also):
        assert one["usage"]["completion_tokens"] == counts[-1] == usage["completion_tokens"]
        assert one["usage"]["prompt_tokens"] == usage["prompt_tokens"]


def test_a_stream_through_the_client(client: OpenAI) -> None:
    text, finish = "", None
    with client.chat.completions.create(model=MODEL, messages=LOOK, stream=True, **GREEDY) as stream:
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            finish = chunk.choices[0].finish_reason
    assert (text, finish) == (SEEN, "stop")


@pytest.mark.parametrize("messages", [TOLD, LOOK], ids=["text", "picture"])
def test_bodies_are_what_the_openai_package_says(http: Any, messages: Messages) -> None:
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2, "n": 2, **DRAWN}
    answer = post(http, PATH, **body)
    assert strict(ChatCompletion, answer).created > 1_600_000_000
    assert set(answer) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
    for choice in answer["choices"]:
        assert set(choice) == {"index", "message", "logprobs", "finish_reason", "stop_reason"}
        assert set(choice["message"]) == {"role", "content", "refusal"}
    chunks = events(http, PATH, stream_options={"include_usage": True}, **body)
    assert len({strict(ChatCompletionChunk, chunk).id for chunk in chunks}) == 1
    assert len(chunks) > 10


def test_sixteen_at_once_get_what_each_gets_alone(demo: ServerProcess, llm: LLM) -> None:
    """Pictures and none, adapters and none, streamed and whole, in one batch."""
    models = (MODEL, "french", "shout", "org/quire")

    def asked(number: int) -> dict[str, Any]:
        messages = (LOOK, WHO, TOLD, STORY)[number // 4]
        return {"model": models[number % 4], "messages": messages, **DRAWN, "seed": number}

    async def ask(client: Any, number: int) -> str:
        if number % 3:
            answer = await client.chat.completions.create(**asked(number))
            return answer.choices[0].message.content
        stream = await client.chat.completions.create(stream=True, **asked(number))
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def ask_all() -> list[str]:
        async with demo.async_client() as client:
            return list(await asyncio.gather(*(ask(client, number) for number in range(16))))

    got = asyncio.run(ask_all())
    for number, text in enumerate(got):
        body = asked(number)
        adapter = body.pop("model")
        alone = conversed(llm, body.pop("messages"), adapter if adapter in ("french", "shout") else None, **body)
        assert text == alone.outputs[0].text, number


def test_events_made_from_a_pattern_are_those_made_of_dicts(monkeypatch: pytest.MonkeyPatch) -> None:
    more: list[dict[str, Any]] = [{}, {"return_token_ids": True, "n": 2}, {"stream_options": {"include_usage": True}}]
    with LocalServer() as server, server.http(headers={"X-Request-Id": "one"}) as http:

        def streams() -> list[bytes]:
            bodies = [{"messages": TOLD, "stream": True, **DRAWN, "seed": 3, **one} for one in more]
            return [re.sub(rb'"created":\d+', b"", http.post(PATH, json=body).content) for body in bodies]

        made = streams()
        monkeypatch.setattr(_ChatAnswer, "parts", EventResponseBuilder.parts)
        assert streams() == made and all(one.count(b"data: ") > 10 for one in made)
