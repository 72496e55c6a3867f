"""Calls of tools and reasoning in answers, whole and streamed, of a model that says what it is told to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.server.api_answers import events, post, refusal, strict
from tests.server.chat.helpers import PATH
from tests.server.chat.scripted import ScriptedServer, scripted

pytestmark = pytest.mark.usefixtures("one_thread")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
TOOLS = [WEATHER, CLOCK]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "K\u00f6ln \u661f", "days": 2}}\n</tool_call>'
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
CITY = {"city": "K\u00f6ln \u661f", "days": 2}


@pytest.fixture(scope="module", params=["tags as text", "tags as special tokens"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    with scripted(tmp_path_factory.mktemp("scripted"), "special" in request.param, tool_strict=False) as server:
        yield server


def put_together(chunks: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """A stream's choices, as a client adds them up; each chunk as the `openai` package's type."""
    made: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        strict(ChatCompletionChunk, chunk)
        for part in chunk["choices"]:
            choice = made.setdefault(part["index"], {"message": {}, "finish_reason": None, "tokens": []})
            assert choice["finish_reason"] is None, "a chunk after the last"
            choice["finish_reason"] = part["finish_reason"]
            choice["tokens"] += part.get("token_ids", [])
            add(choice["message"], part["delta"])
    assert all(choice["finish_reason"] for choice in made.values())
    return made


def add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    assert ("role" in delta) == (not message), "the role comes first, and once"
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault("tool_calls", [])
            for call in value:
                begins = call["index"] == len(calls)
                assert begins == ("id" in call) == ("name" in call["function"]) == ("type" in call)
                if begins:
                    assert call["function"]["arguments"] == "", "the name comes before the arguments"
                    calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        elif name == "function_call":
            made = message.setdefault("function_call", {"name": "", "arguments": ""})
            made["name"] += value.get("name", "")
            made["arguments"] += value["arguments"]
        elif value is None or message.get(name) is None:
            message[name] = value
        else:
            message[name] += value


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": None} for call in message.get("tool_calls", [])]
    said = {name: value for name, value in message.items() if name != "refusal"}
    return {**said, "tool_calls": calls} if calls else said


def answered(server: ScriptedServer, text: str, **fields: Any) -> dict[str, Any]:
    """The only choice of the whole answer; the stream adds up to the same."""
    body = server.says(text, **fields)
    whole = post(server.http, PATH, **body)
    strict(ChatCompletion, whole)
    streamed = put_together(events(server.http, PATH, **body))
    assert len(whole["choices"]) == len(streamed)
    for choice in whole["choices"]:
        same = streamed[choice["index"]]
        assert without_ids(same["message"]) == without_ids(choice["message"])
        assert same["finish_reason"] == choice["finish_reason"]
    return whole["choices"][0]


def calls_of(choice: dict[str, Any]) -> list[tuple[str, Any]]:
    made = choice["message"].get("tool_calls", [])
    assert len({call["id"] for call in made}) == len(made) and all(call["type"] == "function" for call in made)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in made]


def test_calls_reasoning_and_content_are_told_apart(server: ScriptedServer) -> None:
    choice = answered(server, f"<think>Hm. \u661f</think>\n\nLet me look.\n{CALL}\n{CLOCK_CALL}", tools=TOOLS)
    message = choice["message"]
    assert calls_of(choice) == [("weather", CITY), ("clock", {})]
    assert message["reasoning_content"] == message["reasoning"] == "Hm. \u661f"
    assert message["content"].strip() == "Let me look." and choice["finish_reason"] == "tool_calls"


def test_calls_alone_have_no_content(server: ScriptedServer) -> None:
    choice = answered(server, CALL, tools=TOOLS)
    assert choice["message"]["content"] is None and calls_of(choice) == [("weather", CITY)]
    assert not {"reasoning", "reasoning_content"} & choice["message"].keys()


def test_an_answer_without_calls_is_content(server: ScriptedServer) -> None:
    for tools in (TOOLS, None):
        choice = answered(server, "It is <b>warm</b>.", tools=tools)
        assert (choice["message"]["content"], choice["finish_reason"]) == ("It is <b>warm</b>.", "stop")
        assert "tool_calls" not in choice["message"]
    assert answered(server, "", tools=TOOLS)["message"]["content"] == ""


def test_what_is_no_call_stays_content(server: ScriptedServer) -> None:
    choice = answered(server, "<tool_call>\nnothing of the kind\n</tool_call>", tools=TOOLS)
    assert "nothing of the kind" in choice["message"]["content"] and choice["finish_reason"] == "stop"


def test_the_template_is_told_of_tools_and_of_calls(server: ScriptedServer) -> None:
    call = {"id": "call-1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    history = [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": [{"type": "text", "text": "sunny"}]},
    ]

    def prompt(**fields: Any) -> str:
        ids = post(server.http, PATH, **server.says("a", return_token_ids=True, **fields))["prompt_token_ids"]
        return str(server.tokenizer.decode(ids))

    told = prompt(messages=history, tools=TOOLS)
    assert "The weather in a city." in told and "sunny" in told and '"city": "Rome"' in told and "call-1" in told
    assert "weather" not in prompt(tools=TOOLS, tool_choice="none")
    assert "weather" not in prompt()


def test_with_none_nothing_is_called_and_no_tag_is_shown(server: ScriptedServer) -> None:
    for more in ({}, {"skip_special_tokens": False}):
        choice = answered(server, f"So: {CLOCK_CALL}\nYes.", tools=TOOLS, tool_choice="none", **more)
        assert choice["message"]["content"].split() == ["So:", "Yes."] and choice["finish_reason"] == "stop"
        assert "tool_calls" not in choice["message"]
    alone = answered(server, CALL, tools=TOOLS, tool_choice="none")
    assert (alone["message"]["content"], alone["finish_reason"]) == ("", "stop")
    plain = answered(server, "a <b> {1}", tools=TOOLS, tool_choice="none")
    assert plain["message"]["content"] == "a <b> {1}"


def test_one_call_at_most(server: ScriptedServer) -> None:
    choice = answered(server, f"{CALL}\n{CLOCK_CALL}", tools=TOOLS, parallel_tool_calls=False)
    assert calls_of(choice) == [("weather", CITY)]


def test_functions_as_they_were(server: ScriptedServer) -> None:
    functions = [tool["function"] for tool in TOOLS]
    choice = answered(server, CALL, functions=functions)
    call = choice["message"]["function_call"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", CITY)
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    plain = answered(server, "No.", functions=functions, function_call="none")
    assert plain["message"]["content"] == "No." and "function_call" not in plain["message"]


def test_several_choices_have_calls_of_their_own(server: ScriptedServer) -> None:
    for sampling in ({"temperature": 0}, {"temperature": 1.0, "seed": 5}):
        body = server.says(CALL, tools=TOOLS, n=3, **sampling)
        whole = post(server.http, PATH, **body)["choices"]
        assert [calls_of(choice) for choice in whole] == [[("weather", CITY)]] * 3
        assert len({choice["message"]["tool_calls"][0]["id"] for choice in whole}) == 3
        streamed = put_together(events(server.http, PATH, **body))
        assert [calls_of(streamed[index]) for index in range(3)] == [[("weather", CITY)]] * 3


def test_tokens_logprobs_and_usage_beside_calls(server: ScriptedServer) -> None:
    body = server.says(f"<think>Hm.</think>{CALL}", tools=TOOLS, logprobs=True, top_logprobs=1, return_token_ids=True)
    whole = post(server.http, PATH, **body)
    (choice,) = whole["choices"]
    script = body["vllm_xargs"]["script"]
    assert choice["token_ids"] == script and len(choice["logprobs"]["content"]) == len(script)
    chunks = events(server.http, PATH, **body, stream_options={"include_usage": True})
    assert put_together(chunks)[0]["tokens"] == script
    told = [one for chunk in chunks for part in chunk["choices"] for one in (part["logprobs"] or {}).get("content", [])]
    assert told == choice["logprobs"]["content"]
    thought = len(server.tokenizer.encode("<think>Hm.</think>", add_special_tokens=False))
    for usage in (whole["usage"], chunks[-1]["usage"]):
        assert usage["completion_tokens"] == len(script)
        assert usage["completion_tokens_details"] == {"reasoning_tokens": thought}


def test_what_is_cut_off(server: ScriptedServer) -> None:
    most = len(server.tokenizer.encode(CALL.partition("days")[0], add_special_tokens=False))
    choice = answered(server, CALL, tools=TOOLS, max_tokens=most)
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "length" and call["function"]["name"] == "weather"
    assert json.dumps(CITY, ensure_ascii=False).startswith(call["function"]["arguments"])
    choice = answered(server, CALL, tools=TOOLS, stop=["days"])
    assert (choice["stop_reason"], choice["finish_reason"]) == ("days", "tool_calls")
    thinking = answered(server, "<think>Hm, well</think>a", max_tokens=9)
    assert thinking["finish_reason"] == "length" and not thinking["message"]["content"]


def test_reasoning_without_tools(server: ScriptedServer) -> None:
    text = "<think>\nHm.\n</think>\n\nYes."
    choice = answered(server, text)
    assert (choice["message"]["reasoning"].strip(), choice["message"]["content"].strip()) == ("Hm.", "Yes.")
    hidden = answered(server, text, include_reasoning=False)
    assert hidden["message"]["content"] == choice["message"]["content"] and "reasoning" not in hidden["message"]
    off = answered(server, "Yes.", chat_template_kwargs={"enable_thinking": False})
    assert off["message"]["content"] == "Yes." and "reasoning" not in off["message"]
    assert answered(server, "Yes.", reasoning_effort="none")["message"] == off["message"]


def test_reasoning_that_the_caller_began(server: ScriptedServer) -> None:
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "<think>Well,"}]
    begun = {"messages": messages, "continue_final_message": True}
    choice = answered(server, " no.</think>No.", **begun)
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("no.", "No.")


def test_special_tokens_that_are_no_tags_are_shown_when_asked_for(server: ScriptedServer) -> None:
    assert answered(server, "a<unk>b")["message"]["content"] == "ab"
    assert answered(server, "a<unk>b", skip_special_tokens=False)["message"]["content"] == "a<unk>b"


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no function": ({"tools": [{"type": "function"}]}, "tools", "tools[0].function: must be an object"),
    "another kind": ({"tools": [{"type": "web_search"}]}, "tools", "'web_search' is not served"),
    "a name that is none": ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "name"),
    "twice the same": ({"tools": [CLOCK, CLOCK]}, "tools", "called 'clock' too"),
    "too many": (
        {"tools": [{"type": "function", "function": {"name": f"f{i}"}} for i in range(200)]}, "tools", "limit is 128",
    ),
    "nothing to choose from": ({"tool_choice": "required"}, "tool_choice", "no tools to choose from"),
    "a word that is none": ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "is none of"),
    "a function that there is not": (
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice",
        "no tool is called 'g'",
    ),
    "both": ({"tools": TOOLS, "functions": [{"name": "f"}]}, "functions", "tools are given too"),
    "a call of nothing": ({"function_call": {"name": "f"}}, "function_call", "no functions to choose from"),
    "an unknown function": (
        {"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call", "no tool is called 'g'",
    ),
    "calls that are none": (
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": "f"}]}, "messages",
        "messages[1].tool_calls",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_wrong_is_refused_by_its_field(server: ScriptedServer, name: str) -> None:
    fields, param, said = REFUSED[name]
    for stream in (False, True):
        error = refusal(server.http, PATH, **server.says("a", **fields), stream=stream)
        assert error["param"] == param and said in error["message"], error
