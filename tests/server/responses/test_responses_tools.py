"""Calls of tools, reasoning and shapes in responses, whole and streamed, of a model that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.server.api_answers import post, refusal
from tests.server.chat.scripted import ScriptedServer, scripted
from tests.server.chat.test_tools import CALL, CITY, CLOCK_CALL
from tests.server.chat.test_tools import TOOLS as CHAT_TOOLS
from tests.server.responses.helpers import (
    GREEDY,
    LOGPROBS,
    MODEL,
    PATH,
    TALE,
    put_together,
    respond,
    stream,
    text_of,
    without_ids,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TOOLS = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
ALL = f"<think>Hm. \u661f</think>\n\nLet me look.\n{CALL}\n{CLOCK_CALL}"


@pytest.fixture(scope="module", params=["tags as text", "tags as special tokens"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    path = tmp_path_factory.mktemp("scripted")
    with scripted(path, "special" in request.param, tool_strict=False, response_store_bytes=1 << 20) as server:
        yield server


def says(server: ScriptedServer, text: str, **fields: Any) -> dict[str, Any]:
    """A body whose answer is this text."""
    body = server.says(text)
    return {
        "input": "ab",
        "max_output_tokens": body["max_tokens"],
        "vllm_xargs": body["vllm_xargs"],
        **GREEDY,
        **fields,
    }


def answered(server: ScriptedServer, text: str, **fields: Any) -> dict[str, Any]:
    """The whole answer; the stream adds up to the same."""
    body = says(server, text, **fields)
    whole = respond(server.http, **body)
    events = stream(server.http, **body)
    final = events[-1]["response"]
    assert without_ids(put_together(events)) == without_ids(final["output"]) == without_ids(whole["output"])
    assert events[-1]["type"] == f"response.{whole['status']}" and final["status"] == whole["status"]
    assert final["usage"]["output_tokens_details"] == whole["usage"]["output_tokens_details"]
    assert len({item["id"] for item in whole["output"]}) == len(whole["output"])
    return whole


def calls_of(response: dict[str, Any]) -> list[tuple[str, Any]]:
    made = [item for item in response["output"] if item["type"] == "function_call"]
    assert len({item["call_id"] for item in made}) == len(made)
    return [(item["name"], json.loads(item["arguments"])) for item in made]


def kinds_of(response: dict[str, Any]) -> list[str]:
    return [item["type"] for item in response["output"]]


def reasoning_of(response: dict[str, Any]) -> str:
    return "".join(item["content"][0]["text"] for item in response["output"] if item["type"] == "reasoning")


def test_calls_reasoning_and_text_are_items(server: ScriptedServer) -> None:
    answer = answered(server, ALL, tools=TOOLS)
    assert kinds_of(answer) == ["reasoning", "message", "function_call", "function_call"]
    assert calls_of(answer) == [("weather", CITY), ("clock", {})]
    assert (reasoning_of(answer), text_of(answer).strip()) == ("Hm. \u661f", "Let me look.")
    assert answer["status"] == "completed" and all(item["status"] == "completed" for item in answer["output"])
    thought = len(server.tokenizer.encode("<think>Hm. \u661f</think>", add_special_tokens=False))
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": thought}
    assert answer["tools"] == [
        {"type": "function", **{key: tool.get(key) for key in ("name", "description", "parameters", "strict")}}
        for tool in TOOLS
    ]


def test_reasoning_that_is_not_to_be_shown(server: ScriptedServer) -> None:
    answer = answered(server, ALL, tools=TOOLS, include_reasoning=False)
    assert kinds_of(answer) == ["message", "function_call", "function_call"]
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


def test_calls_alone_are_the_only_items(server: ScriptedServer) -> None:
    assert kinds_of(answered(server, f"{CALL}\n{CLOCK_CALL}", tools=TOOLS)) == ["function_call"] * 2
    assert kinds_of(answered(server, "It is <b>warm</b>.", tools=TOOLS)) == ["message"]
    assert kinds_of(answered(server, "")) == ["message"]


def test_what_is_cut_off_is_incomplete(server: ScriptedServer) -> None:
    most = len(server.tokenizer.encode(f"{CLOCK_CALL}{CALL.partition('days')[0]}", add_special_tokens=False))
    answer = answered(server, f"{CLOCK_CALL}{CALL}", tools=TOOLS, max_output_tokens=most)
    assert (answer["status"], [item["status"] for item in answer["output"]]) == (
        "incomplete",
        ["completed", "incomplete"],
    )
    assert answer["output"][1]["arguments"].startswith('{"city"')
    thinking = answered(server, "<think>Hm. Well.</think>Yes.", max_output_tokens=9)
    assert kinds_of(thinking)[0] == "reasoning" and thinking["status"] == "incomplete"


def test_choices_of_tools(server: ScriptedServer) -> None:
    none = answered(server, "No.", tools=TOOLS, tool_choice="none")
    assert (text_of(none), none["tool_choice"]) == ("No.", "none")
    for choice in ("required", {"type": "function", "name": "clock"}):
        answer = answered(server, CLOCK_CALL, tools=TOOLS, tool_choice=choice)
        assert calls_of(answer) == [("clock", {})] and answer["tool_choice"] == choice
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "clock"}]}
    answer = answered(server, CLOCK_CALL, tools=TOOLS, tool_choice=allowed)
    assert calls_of(answer) == [("clock", {})] and answer["tool_choice"] == allowed
    assert [tool["name"] for tool in answer["tools"]] == ["weather", "clock"]
    alone = answered(server, CLOCK_CALL, tools=TOOLS[1:], tool_choice="required")  # that is all that the model sees
    assert answer["usage"]["input_tokens"] == alone["usage"]["input_tokens"]
    once = answered(server, f"{CALL}\n{CLOCK_CALL}", tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(once) == [("weather", CITY)] and once["parallel_tool_calls"] is False


def test_the_prompt_is_chats(server: ScriptedServer) -> None:
    """A conversation with calls goes to the template as /v1/chat/completions has it; so does a chain of responses."""
    first = respond(server.http, **says(server, ALL, tools=TOOLS))
    outputs = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": f"{place} sunny"}
        for place, item in enumerate(item for item in first["output"] if item["type"] == "function_call")
    ]
    text = next(item["content"][0]["text"] for item in first["output"] if item["type"] == "message")
    calls = [
        {"id": item["call_id"], "type": "function", "function": {key: item[key] for key in ("name", "arguments")}}
        for item in first["output"]
        if item["type"] == "function_call"
    ]
    messages = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": text, "tool_calls": calls},
        *({"role": "tool", "tool_call_id": one["call_id"], "content": one["output"]} for one in outputs),
    ]
    chat = post(server.http, "/v1/chat/completions", **server.says("So.", messages=messages, tools=CHAT_TOOLS))
    body = says(server, "So.", tools=TOOLS)
    chained = respond(server.http, **{**body, "input": outputs, "previous_response_id": first["id"]})
    given = [{"role": "user", "content": "ab"}, *first["output"], *outputs]
    whole = respond(server.http, **{**body, "input": given})
    want = chat["usage"]["prompt_tokens"]
    assert want == chained["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    cached = chat["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert whole["usage"]["input_tokens_details"]["cached_tokens"] >= max(cached, want - 16)
    assert text_of(whole) == text_of(chained) == "So."


def test_logprobs_are_of_the_texts_tokens_alone(server: ScriptedServer) -> None:
    answer = answered(server, ALL, tools=TOOLS, **LOGPROBS)
    (part,) = next(item for item in answer["output"] if item["type"] == "message")["content"]
    told = [one["token"] for one in part["logprobs"]]
    assert "".join(told).strip() == "Let me look." and part["text"].strip() == "Let me look."
    plain = answered(server, "<think>Hm.</think>Yes.", **LOGPROBS)
    (part,) = plain["output"][-1]["content"]
    assert "".join(one["token"] for one in part["logprobs"]).startswith("Yes.")


def test_the_clients_stream_of_calls(server: ScriptedServer) -> None:
    body = says(server, ALL)
    more = {"extra_body": {"vllm_xargs": body.pop("vllm_xargs")}, **body}
    tools: Any = [{**tool, "strict": False} for tool in TOOLS]
    with (
        server.server.client() as client,
        client.responses.stream(model=str(server.http.get("/v1/models").json()["data"][0]["id"]), tools=tools, **more)
        as events,
    ):  # fmt: skip
        arguments = "".join(
            event.delta for event in events if event.type == "response.function_call_arguments.delta"
        )  # of both, one after the other
        final = events.get_final_response()
    calls = [item for item in final.output if item.type == "function_call"]
    assert arguments == "".join(call.arguments for call in calls)
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", CITY), ("clock", {})]
    assert final.output_text.strip() == "Let me look."


def test_what_is_wrong_with_tools_and_shapes(server: ScriptedServer) -> None:
    twice = [TOOLS[0], TOOLS[0]]
    assert refusal(server.http, PATH, input="ab", tools=twice)["param"] == "tools"
    bad = {"type": "json_schema", "name": "a", "schema": {"type": "object", "properties": {"a": {"type": "wizard"}}}}
    error = refusal(server.http, PATH, input="ab", text={"format": bad})
    assert error["param"] == "text.format" and error["message"].startswith("text.format"), error
    format = {"type": "json_schema", "name": "a b", "schema": {}}
    assert refusal(server.http, PATH, input="ab", text={"format": format})["param"] == "text.format"
    error = refusal(server.http, PATH, input="ab", tools=[{**TOOLS[0], "parameters": {"type": "wizard"}}])
    assert error["param"] == "tools" and error["message"].startswith("tools[0].parameters.type: must be"), error
    odd = {"type": "object", "properties": {"a": {"type": "wizard"}}}
    tools = [TOOLS[0], TOOLS[1], {"type": "function", "name": "f", "parameters": odd}]
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    for choice in ("required", allowed):
        error = refusal(server.http, PATH, input="ab", tools=tools, tool_choice=choice)
        assert error["message"].startswith("tools[2].parameters: json schema: type at #/properties/a/type: "), error


def test_a_call_that_has_hardly_begun_is_nothing(server: ScriptedServer) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    for most in (1, 3):
        cut = answered(server, CALL, tools=TOOLS, tool_choice="required", max_output_tokens=most, **off)
        assert cut["status"] == "incomplete" and not text_of(cut) and not calls_of(cut)


# -- shapes, of the bundled model ----------------------------------------------------------------------------------


class Seen(BaseModel):
    """What is to be answered."""

    shape: Literal["star", "circle"]
    round: bool


def test_parse(client: OpenAI) -> None:
    drawn: Any = {"temperature": 1.0, "extra_body": {"seed": 5}}  # others may leave spaces until they are cut off
    for sampling in ({"temperature": 0}, drawn):
        answer = client.responses.parse(model=MODEL, input=TALE, text_format=Seen, max_output_tokens=60, **sampling)
        assert answer.status == "completed" and isinstance(answer.output_parsed, Seen)
    whole = client.responses.parse(model=MODEL, input=TALE, text_format=Seen, temperature=0)
    with client.responses.stream(model=MODEL, input=TALE, text_format=Seen, temperature=0) as events:
        final = events.get_final_response()
    assert final.output_parsed == whole.output_parsed and final.output_text == whole.output_text


@pytest.mark.parametrize(
    ("fields", "right"),
    [
        ({"text": {"format": {"type": "json_object"}}}, "{"),
        ({"structured_outputs": {"choice": ["green", "a red star"]}}, ("green", "a red star")),
        ({"guided_regex": "[0-9]{3}"}, tuple("0123456789")),
    ],
)
def test_other_shapes(http: Any, fields: dict[str, Any], right: Any) -> None:
    body = {"input": TALE, "max_output_tokens": 30, **GREEDY, **fields}
    whole, events = respond(http, **body), stream(http, **body)
    assert text_of(whole).lstrip().startswith(right)
    assert without_ids(put_together(events)) == without_ids(whole["output"])
