"""/v1/responses: what is answered, whole and in streams; the same tokens as everywhere else."""

from __future__ import annotations

from typing import Any

import pytest
from openai import OpenAI

from quire import LLM
from quire.demo import picture_path
from tests.server.api_answers import conversed, post
from tests.server.chat.helpers import LOOK, STORY, data_url
from tests.server.responses.helpers import (
    DRAWN,
    GREEDY,
    LOGPROBS,
    MODEL,
    TALE,
    WHO,
    put_together,
    respond,
    stream,
    text_of,
    without_ids,
)

pytestmark = pytest.mark.usefixtures("one_thread")

CHAT = "/v1/chat/completions"
PICTURE = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": data_url(picture_path()), "detail": "auto"},
            {"type": "input_text", "text": "What do you see?"},
        ],
    }
]


@pytest.mark.parametrize(
    ("given", "messages", "params"),
    [
        (WHO, [{"role": "user", "content": WHO}], GREEDY),
        (STORY, STORY, GREEDY),
        (PICTURE, LOOK, GREEDY),
        (TALE, [{"role": "user", "content": TALE}], DRAWN),
        (TALE, [{"role": "user", "content": TALE}], {**DRAWN, "stop": ["the"], "top_k": 5, "min_p": 0.1}),
    ],
    ids=["text", "turns", "picture", "drawn", "stop"],
)
def test_tokens_are_those_of_llm_chat(http: Any, llm: LLM, given: Any, messages: Any, params: dict[str, Any]) -> None:
    renamed = {"max_tokens" if name == "max_output_tokens" else name: value for name, value in params.items()}
    want = conversed(llm, messages, **renamed).outputs[0]
    whole = respond(http, input=given, **params)
    events = stream(http, input=given, **params)
    status = "completed" if want.finish_reason == "stop" else "incomplete"
    assert [part["text"] for part in whole["output"][0]["content"]] == [want.text]
    assert whole["usage"]["output_tokens"] == len(want.token_ids)
    assert whole["status"] == whole["output"][0]["status"] == status
    assert without_ids(put_together(events)) == without_ids(whole["output"])
    assert events[-1]["type"] == f"response.{status}"
    final = events[-1]["response"]
    assert {**without_ids(final), "usage": None} == {**without_ids(whole), "usage": None}
    assert final["usage"]["output_tokens"] == whole["usage"]["output_tokens"]


def test_adapters_answer_in_their_own_way(http: Any, llm: LLM) -> None:
    for adapter in ("french", "shout"):
        want = conversed(llm, [{"role": "user", "content": WHO}], adapter, **GREEDY).outputs[0].text
        answer = respond(http, model=adapter, input=WHO, **GREEDY)
        assert (text_of(answer), answer["model"]) == (want, adapter)


def test_instructions_are_a_systems_message(http: Any) -> None:
    told = {"role": "system", "content": "You shout."}
    asked = {"role": "user", "content": WHO}
    texts = {
        text_of(respond(http, instructions="You shout.", input=WHO, **GREEDY)),
        text_of(respond(http, input=[told, asked], **GREEDY)),
        text_of(respond(http, input=[{**told, "role": "developer"}, asked], **GREEDY)),
        post(http, CHAT, messages=[told, asked], **GREEDY)["choices"][0]["message"]["content"],
    }
    assert len(texts) == 1
    assert respond(http, instructions="You shout.", input=WHO, **GREEDY)["instructions"] == "You shout."


def test_a_streams_events_in_their_order(http: Any) -> None:
    events = stream(http, input=WHO, **GREEDY)
    kinds = [event["type"].removeprefix("response.") for event in events]
    deltas = kinds.count("output_text.delta")
    assert deltas > 5
    assert kinds == [
        "created", "in_progress", "output_item.added", "content_part.added", *["output_text.delta"] * deltas,
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    begun = events[0]["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    assert len({event["response"]["id"] for event in (events[0], events[1], events[-1])}) == 1


def test_what_ran_out_of_tokens_is_incomplete(http: Any) -> None:
    answer = respond(http, input=TALE, max_output_tokens=3, **GREEDY)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["completed_at"] is None and answer["usage"]["output_tokens"] == 3
    full = respond(http, input=WHO, **GREEDY)
    assert (full["incomplete_details"], full["error"]) == (None, None) and full["completed_at"] >= full["created_at"]


@pytest.mark.parametrize("more", [{}, {"stop": ["the"]}, {"return_tokens_as_token_ids": True}, {"ignore_eos": True}])
def test_logprobs_are_those_of_chat(http: Any, more: dict[str, Any]) -> None:
    asked = [{"role": "user", "content": TALE}]
    params = {**GREEDY, **more}
    (chat,) = post(http, CHAT, messages=asked, logprobs=True, top_logprobs=2, max_tokens=40, **params)["choices"]
    body = {"input": TALE, "max_output_tokens": 40, **LOGPROBS, **params}
    whole = respond(http, **body)
    (part,) = whole["output"][0]["content"]
    assert (part["text"], part["logprobs"]) == (chat["message"]["content"], chat["logprobs"]["content"])
    assert whole["top_logprobs"] == 2
    events = stream(http, **body)
    assert without_ids(put_together(events)) == without_ids(whole["output"])
    told = [event for event in events if event["type"] == "response.output_text.delta"]
    most = 6 if "ignore_eos" in more else 2  # an end token has no text, and comes with the next that has
    assert len(told) > 10 and all(len(event["logprobs"]) <= most for event in told)


def test_what_is_told_of_a_request(http: Any) -> None:
    asked: dict[str, Any] = {
        "metadata": {"a": "b"}, "user": "ann", "safety_identifier": "x", "top_p": 0.5, "max_output_tokens": 5,
        "parallel_tool_calls": False, "instructions": "Be brief.", "truncation": "disabled", "tool_choice": "none",
        "background": False,
    }  # fmt: skip
    more = {"reasoning": {"effort": "low"}, "text": {"verbosity": "medium"}}
    answer = respond(http, input=WHO, temperature=0, store=False, **asked, **more)
    assert {name: answer[name] for name in asked} == asked
    assert (answer["temperature"], answer["reasoning"]) == (0, {"effort": "low", "summary": None})
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    plain = respond(http, input=WHO, max_output_tokens=1)
    assert (plain["store"], plain["metadata"], plain["tools"], plain["tool_choice"]) == (False, {}, [], "auto")
    assert (plain["temperature"], plain["top_p"], plain["model"]) == (1.0, 1.0, MODEL)


def test_the_clients_stream_adds_up(client: OpenAI) -> None:
    with client.responses.stream(model=MODEL, input=WHO, temperature=0) as events:
        parts = [event.delta for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    whole = client.responses.create(model=MODEL, input=WHO, temperature=0)
    assert "".join(parts) == final.output_text == whole.output_text != ""
    assert final.usage is not None and whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_an_answer_can_be_sent_back_as_it_is(client: OpenAI) -> None:
    first = client.responses.create(model=MODEL, input=TALE, temperature=0, max_output_tokens=20)
    items: list[Any] = [{"role": "user", "content": TALE}, *first.output, {"role": "user", "content": WHO}]
    text = client.responses.create(model=MODEL, input=items, temperature=0).output_text
    messages: list[Any] = [
        {"role": "user", "content": TALE},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": WHO},
    ]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert text == chat.choices[0].message.content
