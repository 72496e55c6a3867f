"""Completions: streams."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from openai import OpenAI
from openai.types import Completion

from quire import LLM
from quire.platform.outputs.outputs import CompletionOutput, RequestOutput
from quire.server.routes.completions import _CompletionAnswer
from quire.server.schemas.openai import CompletionRequest, untyped
from tests.server.api_answers import events, joined, offline, post, strict
from tests.server.completions.helpers import DRAWN, GREEDY, MODEL, PATH, PROMPT, PROMPTS

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    "params", [GREEDY, DRAWN, {**DRAWN, "n": 3}, {**GREEDY, "n": 3}, {**GREEDY, "max_tokens": 200}]
)
def test_a_stream_makes_the_same_texts_and_tokens(http: Any, llm: LLM, params: dict[str, Any]) -> None:
    whole = post(http, PATH, prompt=PROMPTS, return_token_ids=True, **params)["choices"]
    parts = joined(events(http, PATH, prompt=PROMPTS, return_token_ids=True, **params))
    want = [out for prompt in PROMPTS for out in offline(llm, prompt, **params).outputs]
    assert sorted(parts) == list(range(len(want))) == [choice["index"] for choice in whole]
    for index, out in enumerate(want):
        assert parts[index]["text"] == whole[index]["text"] == out.text
        assert parts[index]["tokens"] == whole[index]["token_ids"] == list(out.token_ids)
        assert parts[index]["finish_reason"] == whole[index]["finish_reason"] == out.finish_reason


def test_a_stream_through_the_client(client: OpenAI, llm: LLM) -> None:
    text = ""
    for chunk in client.completions.create(model=MODEL, prompt=PROMPT, stream=True, **GREEDY):
        assert len(chunk.choices) == 1
        text += chunk.choices[0].text
    assert text == offline(llm, PROMPT, **GREEDY).outputs[0].text


def test_a_streams_logprobs_are_the_whole_answers(http: Any) -> None:
    body = {"prompt": PROMPTS[:2], "echo": True, "logprobs": 2, **DRAWN}
    whole = post(http, PATH, **body)["choices"]
    chunks = [choice for chunk in events(http, PATH, **body) for choice in chunk["choices"]]
    for choice in whole:
        mine = [c["logprobs"] for c in chunks if c["index"] == choice["index"] and c["logprobs"]]
        assert len(mine) > 5
        for name, values in choice["logprobs"].items():
            assert [item for part in mine for item in part[name]] == values


def test_include_usage_comes_last_and_alone(http: Any) -> None:
    *chunks, last = events(http, PATH, prompt=PROMPTS, stream_options={"include_usage": True}, **GREEDY)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    usage = post(http, PATH, prompt=PROMPTS, **GREEDY)["usage"]
    assert {k: v for k, v in last["usage"].items() if k.endswith("_tokens")} == {
        k: v for k, v in usage.items() if k.endswith("_tokens")
    }


def test_continuous_usage_counts_up(http: Any) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events(http, PATH, prompt=PROMPT, stream_options=options, **GREEDY)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(set(counts)) and counts[0] == 1 and counts[-1] == 24
    assert all(
        c["usage"]["total_tokens"] == c["usage"]["prompt_tokens"] + n for c, n in zip(chunks, counts, strict=True)
    )
    assert last["usage"] == chunks[-1]["usage"]


def test_without_stream_options_there_is_no_usage(http: Any) -> None:
    assert all("usage" not in chunk for chunk in events(http, PATH, prompt=PROMPT, **GREEDY))


def test_bodies_are_what_the_openai_package_says(http: Any) -> None:
    answer = strict(Completion, post(http, PATH, prompt=PROMPTS, logprobs=2, n=2, **DRAWN))
    assert answer.created > 1_600_000_000
    for chunk in events(http, PATH, prompt=PROMPT, logprobs=2, stream_options={"include_usage": True}, **DRAWN):
        assert set(chunk) == {"id", "object", "created", "model", "system_fingerprint", "choices", "usage"}
        for choice in chunk["choices"]:  # null until the last, which the package's type does not know
            choice["finish_reason"] = choice["finish_reason"] or "stop"
        strict(Completion, chunk)


@pytest.mark.parametrize(
    "more", [{}, {"return_token_ids": True}, {"stream_options": {"include_usage": True}}, {"n": 2}]
)
def test_events_made_from_a_pattern_are_those_made_of_dicts(more: dict[str, Any]) -> None:
    """Whatever a text has in it."""
    texts = ["a", "", 'q"\\/\n\t\x00\x7f', "\u2028é🎈", "\0text", '"\0ids"', "\ud800", "<&>", "b"]
    body = untyped(CompletionRequest(stream=True, **more))
    engine = SimpleNamespace(unique_ids=lambda name, count: [f"{name}-{one}" for one in range(count)],
                             llm_engine=SimpleNamespace(tokenizer=None))  # fmt: skip
    context: Any = SimpleNamespace(engine=engine, served=SimpleNamespace(name_of=lambda model: "org/quire"))
    request: Any = SimpleNamespace(scope={"state": {"request_id": "one"}})
    made: dict[bool, list[list[bytes]]] = {}
    for repeats in (True, False):
        answer = _CompletionAnswer(context, request, body, 1, False)
        assert answer._repeats
        answer._repeats, answer._begin_event = repeats, b'data: {"id":"x",'
        made[repeats] = []
        for number, text in enumerate(texts):
            ends = "stop" if number == len(texts) - 1 else None
            choice = CompletionOutput(number % (body.n or 1), text, [number, 1000 + number], finish_reason=ends)
            made[repeats].append(answer.parts(RequestOutput(answer._ids[0], None, [1, 2], [choice], ends is not None)))
    assert made[True] == made[False] and b"\\u0000" in b"".join(one for parts in made[True] for one in parts)
