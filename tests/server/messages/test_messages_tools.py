"""/v1/messages: tools, thinking and shapes, of a model that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.api_answers import post
from tests.server.chat.scripted import ScriptedServer, scripted
from tests.server.messages.helpers import (
    CHAT,
    COUNT,
    MESSAGES,
    comparable,
    deltas,
    events,
    message,
    refusal,
    sdk,
    text_of,
    user,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
WEATHER = {"name": "weather", "description": "The weather in a city.", "input_schema": SCHEMA}
CLOCK = {"name": "clock", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [WEATHER, CLOCK]
CITY = {"city": "K\u00f6ln \u661f", "days": 2}
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {json.dumps(CITY, ensure_ascii=False)}}}\n</tool_call>'
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
THINKS = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
IGNORED = "x-quire-ignored-fields"


@pytest.fixture(scope="module", params=["tags as text", "tags as special tokens"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted(tmp_path_factory.mktemp("scripted"), "special" in request.param, tool_strict=False) as server:
        yield server


def without_ids(answer: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls' ids, which must differ, are left out: they are made of the request's."""
    blocks = answer["content"]
    ids = [block["id"] for block in blocks if block["type"] == "tool_use"]
    assert len(set(ids)) == len(ids) and all(ids)
    kept = [{name: value for name, value in block.items() if name != "id" and value is not None} for block in blocks]
    return comparable({**answer, "content": kept})


def answered(server: ScriptedServer, text: str, **fields: Any) -> dict[str, Any]:
    """The whole answer to a model that says this; the stream, as the client's package adds it up, is the same."""
    body = server.says(text, **fields)
    whole = message(server.http, **body)
    found = events(server.http, **body)
    assert deltas(found, "text_delta", "text") == text_of(whole)
    known = {"messages", "max_tokens", "tools", "tool_choice", "thinking", "output_config", "system"}
    more = {name: body.pop(name) for name in body.keys() - known}
    asked = {**body, "model": whole["model"], "extra_body": more}
    with sdk(server.server.url) as client, client.messages.stream(**asked) as stream:
        final = stream.get_final_message().to_dict()
    assert without_ids(final) == without_ids(whole)
    return whole


def calls_of(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]


def kinds(answer: dict[str, Any]) -> list[str]:
    return [block["type"] for block in answer["content"]]


# -- answers -------------------------------------------------------------------------------------------------------


def test_calls_thinking_and_text_are_blocks_in_their_order(server: ScriptedServer) -> None:
    said = f"<think>Hm. \u661f</think>\n\nLet me look.\n{CALL}\n{CLOCK_CALL}"
    answer = answered(server, said, tools=TOOLS, **THINKS)
    assert kinds(answer) == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["content"][0] == {"type": "thinking", "thinking": "Hm. \u661f", "signature": ""}
    assert text_of(answer).strip() == "Let me look." and calls_of(answer) == [("weather", CITY), ("clock", {})]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    thought = len(server.tokenizer.encode("<think>Hm. \u661f</think>", add_special_tokens=False))
    assert answer["usage"]["output_tokens_details"] == {"thinking_tokens": thought}


def test_calls_alone_are_all_there_is(server: ScriptedServer) -> None:
    answer = answered(server, CALL, tools=TOOLS)
    assert kinds(answer) == ["tool_use"] and calls_of(answer) == [("weather", CITY)]
    assert kinds(answered(server, "It is <b>warm</b>.", tools=TOOLS)) == ["text"]


def test_the_events_of_a_call(server: ScriptedServer) -> None:
    found = events(server.http, **server.says(CALL, tools=TOOLS))
    (begin,) = [event for event in found if event["type"] == "content_block_start"]
    assert begin["content_block"]["name"] == "weather" and begin["content_block"]["input"] == {}
    assert json.loads(deltas(found, "input_json_delta", "partial_json")) == CITY
    assert [event["type"] for event in found[-3:]] == ["content_block_stop", "message_delta", "message_stop"]


def test_thinking_is_said_once(server: ScriptedServer) -> None:
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    assert kinds(answered(server, "<think>Hm.</think>Yes.", **on)) == ["thinking", "text"]
    told = refusal(server.http, **server.says("a", thinking={"type": "disabled"}, **on))
    assert told.startswith("thinking: is not what chat_template_kwargs says")


def test_thinking_that_is_not_to_be_seen(server: ScriptedServer) -> None:
    hidden = {"thinking": {"type": "adaptive", "display": "omitted"}}
    answer = answered(server, "<think>Hm.</think>Yes.", **hidden)
    assert answer["content"] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": "Yes."},
    ]


def test_a_call_that_is_cut_off(server: ScriptedServer) -> None:
    most = len(server.tokenizer.encode(CALL.partition(', "days')[0], add_special_tokens=False))
    answer = answered(server, CALL, tools=TOOLS, max_tokens=most)
    assert answer["stop_reason"] == "max_tokens" and calls_of(answer) == [("weather", {"city": CITY["city"]})]
    nothing = answered(server, CALL, tools=TOOLS, tool_choice={"type": "any"}, max_tokens=3)
    assert (nothing["stop_reason"], nothing["content"]) == ("max_tokens", [])


# -- what the template is told -------------------------------------------------------------------------------------


def prompt(server: ScriptedServer, **fields: Any) -> str:
    """What chat's route shows the template."""
    body = server.says("a", return_token_ids=True, **fields)
    return str(server.tokenizer.decode(post(server.http, CHAT, **body)["prompt_token_ids"]))


HISTORY = [
    user("ab"),
    {
        "role": "assistant",
        "content": [
            {"type": "text", "text": "Let me look."},
            {"type": "tool_use", "id": "call-1", "name": "weather", "input": {"city": "Rome"}},
            {"type": "tool_use", "id": "call-2", "name": "clock", "input": {}},
        ],
    },
    user(
        [
            {"type": "tool_result", "tool_use_id": "call-1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "tool_result", "tool_use_id": "call-2", "content": "noon", "is_error": False},
            {"type": "text", "text": "And?"},
        ]
    ),
]
IN_CHAT = [
    user("ab"),
    {
        "role": "assistant",
        "content": "Let me look.",
        "tool_calls": [
            {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}},
            {"id": "call-2", "type": "function", "function": {"name": "clock", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "call-1", "content": "sunny"},
    {"role": "tool", "tool_call_id": "call-2", "content": "noon"},
    user("And?"),
]


def as_in_chat(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    made = []
    for tool in tools:
        function = {"name": tool["name"], "parameters": tool["input_schema"]}
        made.append({"type": "function", "function": function | {k: v for k, v in tool.items() if k == "description"}})
    return made


@pytest.mark.parametrize("thinks", [True, False])
def test_a_conversation_with_calls_is_what_chat_has_for_it(server: ScriptedServer, thinks: bool) -> None:
    more: dict[str, Any] = THINKS if thinks else {}
    kwargs = {"chat_template_kwargs": {"enable_thinking": thinks}}
    asked = {"messages": IN_CHAT, "tools": as_in_chat(TOOLS), "return_token_ids": True, **kwargs}
    want = post(server.http, CHAT, **server.says("Yes.", **asked))
    answer = message(server.http, **server.says("Yes.", messages=HISTORY, tools=TOOLS, **more))
    assert text_of(answer) == want["choices"][0]["message"]["content"] == "Yes."
    count = server.http.post(COUNT, json={"messages": HISTORY, "tools": TOOLS, **more}).json()["input_tokens"]
    usage = answer["usage"]
    assert count == len(want["prompt_token_ids"]) == usage["input_tokens"] + usage["cache_read_input_tokens"]
    told = str(server.tokenizer.decode(want["prompt_token_ids"]))
    assert "The weather in a city." in told and "sunny" in told and ("<think>\n\n</think>" in told) is not thinks


def test_results_that_are_errors_and_thoughts_that_cannot_be_read(server: ScriptedServer) -> None:
    """Named where the template has no place for them."""
    call = {"type": "tool_use", "id": "a", "name": "clock", "input": {}}
    thought = {"type": "redacted_thinking", "data": "x"}
    failed = {"type": "tool_result", "tool_use_id": "a", "is_error": True, "content": "It is broken."}
    messages = [user("ab"), {"role": "assistant", "content": [thought, call]}, user([failed])]
    response = server.http.post(MESSAGES, json=server.says("Yes.", messages=messages, tools=TOOLS))
    assert response.status_code == 200, response.text
    assert set(response.headers[IGNORED].split(", ")) == {
        "messages[].is_error",
        "messages[].content[].redacted_thinking",
    }


def test_what_the_conversation_has_wrong_is_named_by_its_place(server: ScriptedServer) -> None:
    call = {"type": "tool_use", "id": "a", "name": "", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "cd"}
    messages = [user("ab"), {"role": "assistant", "content": [call]}, user([result])]
    told = refusal(server.http, **server.says("a", system="s", messages=messages, tools=TOOLS))
    assert told.startswith("messages[1].")


# -- choices and shapes --------------------------------------------------------------------------------------------


def test_none_auto_any_and_named(server: ScriptedServer) -> None:
    none = answered(server, f"So: {CLOCK_CALL}", tools=TOOLS, tool_choice={"type": "none"}, skip_special_tokens=False)
    assert text_of(none).strip() == "So:" and kinds(none) == ["text"] and none["stop_reason"] == "end_turn"
    one = {"type": "auto", "disable_parallel_tool_use": True}
    assert calls_of(answered(server, f"{CALL}\n{CLOCK_CALL}", tools=TOOLS, tool_choice=one)) == [("weather", CITY)]
    forced = answered(server, "No!", tools=TOOLS, tool_choice={"type": "tool", "name": "clock"})
    assert [name for name, _ in calls_of(forced)] == ["clock"] and forced["stop_reason"] == "tool_use"
    some = answered(server, "No!", tools=[CLOCK], tool_choice={"type": "any", "disable_parallel_tool_use": True})
    assert calls_of(some) == [("clock", {})]
    told = refusal(server.http, **server.says("a", tools=TOOLS, tool_choice={"type": "tool", "name": "none"}))
    assert told.startswith("tool_choice")


def test_answers_of_a_schema(server: ScriptedServer) -> None:
    form = {"type": "json_schema", "schema": {**SCHEMA, "required": ["city", "days"], "additionalProperties": False}}
    said = json.dumps({"city": "Rome", "days": 3})
    for body in ({"output_config": {"format": form}}, {"output_format": form}):
        assert json.loads(text_of(answered(server, said, **body))) == {"city": "Rome", "days": 3}
        assert json.loads(text_of(answered(server, "No!" + said, **body))).keys() == {"city", "days"}
    bad = {"type": "json_schema", "schema": {"type": "nothing"}}
    told = refusal(server.http, **server.says("a", output_config={"format": bad}))
    assert told.startswith("output_config.format")
    told = refusal(server.http, **server.says("a", tools=[{**CLOCK, "input_schema": {"type": "nothing"}}]))
    assert told.startswith("tools[0].input_schema")
    odd = {"type": "object", "properties": {"a": {"type": "wizard"}}}
    tools = [WEATHER, {"name": "f", "input_schema": odd}]
    told = refusal(server.http, **server.says("a", tools=tools, tool_choice={"type": "any"}))
    assert told.startswith("tools[1].input_schema: json schema: type at #/properties/a/type: ")


def test_tools_that_cannot_be_served(server: ScriptedServer) -> None:
    for wrong, told in (
        ({**CLOCK, "defer_loading": True}, "tools[0].defer_loading"),
        ({**CLOCK, "input_examples": [{}]}, "tools[0].input_examples"),
        ({**CLOCK, "allowed_callers": ["code_execution_20250825"]}, "tools[0].allowed_callers"),
        ({**CLOCK, "name": "a b"}, "tools[0]"),
    ):
        assert refusal(server.http, **server.says("a", tools=[wrong])).startswith(told)
    kept = {
        **CLOCK,
        "cache_control": {"type": "ephemeral"},
        "type": "custom",
        "strict": True,
        "allowed_callers": ["direct"],
    }
    response = server.http.post(MESSAGES, json=server.says(CLOCK_CALL, tools=[kept]))
    assert response.status_code == 200 and response.headers[IGNORED] == "tools[].cache_control"
    assert calls_of(response.json()) == [("clock", {})]


def test_a_budget_ends_the_thinking(server: ScriptedServer) -> None:
    said = "<think>" + "Hm. " * 50 + "</think>Yes."
    answer = answered(server, said, thinking={"type": "enabled", "budget_tokens": 12})
    assert kinds(answer)[0] == "thinking" and 0 < len(answer["content"][0]["thinking"]) < 60
