"""Calls that are held to their functions' schemas: those that are asked for, and the model's own from its tag on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import pytest
from openai import OpenAI, pydantic_function_tool
from pydantic import BaseModel

from quire import LLM, SamplingParams
from quire.platform.outputs.messages.message import Message
from tests.server.api_answers import events, post, refusal
from tests.server.api_server import LocalServer
from tests.server.chat.helpers import PATH, WHO
from tests.server.chat.scripted import ScriptedServer, scripted
from tests.server.chat.test_tools import put_together, without_ids

pytestmark = pytest.mark.usefixtures("one_thread")

IGNORED = "x-quire-ignored-fields"
DRAW: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "draw",
        "parameters": {
            "type": "object",
            "properties": {
                "shape": {"enum": ["star", "circle"]},
                "count": {"type": "integer", "maximum": 9, "minimum": 0},
            },
            "required": ["shape", "count"],
            "additionalProperties": False,
        },
    },
}
CLEAR: dict[str, Any] = {"type": "function", "function": {"name": "clear"}}
TOOLS = [DRAW, CLEAR]
GOOD = '<tool_call>\n{"name": "draw", "arguments": {"shape": "star", "count": 5}}\n</tool_call>'
BAD = '<tool_call>\n{"name": "draw", "arguments": {"shape": "square", "count": 5}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "draw"}}

NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}  # which a model that may not say no would go on with


@pytest.fixture(scope="module", params=["tags as text", "tags as special tokens"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    path, shown = tmp_path_factory.mktemp("strict"), {"exclude_tools_when_tool_choice_none": False}
    with scripted(path, "special" in request.param, **shown) as server:
        yield server


def checked(choice: dict[str, Any]) -> list[str]:
    """The names of a choice's calls, whose arguments are what the schemas say."""
    names = []
    for call in choice["message"]["tool_calls"]:
        arguments = json.loads(call["function"]["arguments"])
        names.append(call["function"]["name"])
        if names[-1] == "draw":
            jsonschema.validate(arguments, DRAW["function"]["parameters"])
        else:
            assert (names[-1], arguments) == ("clear", {})
    return names


def answered(server: ScriptedServer, text: str, **fields: Any) -> dict[str, Any]:
    body = server.says(text, **{"tools": TOOLS, **fields})
    (whole,) = post(server.http, PATH, **body)["choices"]
    streamed = put_together(events(server.http, PATH, **body))[0]
    assert without_ids(streamed["message"]) == without_ids(whole["message"])
    assert streamed["finish_reason"] == whole["finish_reason"]
    return whole


def test_a_call_of_the_models_own_is_held_to_the_schema(server: ScriptedServer) -> None:
    right = answered(server, f"So: {GOOD}")
    assert checked(right) == ["draw"] and json.loads(right["message"]["tool_calls"][0]["function"]["arguments"]) == {
        "shape": "star",
        "count": 5,
    }
    bent = answered(server, f"So: {BAD}", parallel_tool_calls=False)
    assert checked(bent) == ["draw"] and bent["message"]["content"].strip() == "So:"
    assert (right["finish_reason"], bent["finish_reason"]) == ("tool_calls", "tool_calls")


def test_a_function_that_is_not_strict_is_free(server: ScriptedServer) -> None:
    free = {**DRAW, "function": {**DRAW["function"], "strict": False}}
    choice = answered(server, BAD, tools=[free])
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"])["shape"] == "square"


def test_text_beside_calls_is_what_it_is_without_tools(server: ScriptedServer) -> None:
    """Where nothing is called, nothing is forbidden."""
    said = "Well: <b>no</b> tool {is} called, <unk> and <tool is none."
    body = server.says(said, temperature=1.3, seed=11, return_token_ids=True, max_tokens=90)
    prompt = post(server.http, PATH, **body, tools=TOOLS, tool_choice="none")
    shaped = post(server.http, PATH, **body, tools=TOOLS)
    assert shaped["choices"][0]["token_ids"] == prompt["choices"][0]["token_ids"]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.5, "seed": 3}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("said", ["No, I will not.", GOOD, BAD])
def test_calls_that_are_asked_for_come(server: ScriptedServer, said: str, sampling: dict[str, Any]) -> None:
    sampling = {**sampling, **NO_THOUGHT}
    required = answered(server, said, tool_choice="required", parallel_tool_calls=False, **sampling)
    assert len(checked(required)) == 1 and required["message"]["content"] is None
    assert required["finish_reason"] == "tool_calls"
    named = answered(server, said, tool_choice=NAMED, **sampling)
    assert checked(named) == ["draw"] and named["finish_reason"] == "stop"
    one = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [CLEAR]}}
    assert set(checked(answered(server, said, tool_choice=one, parallel_tool_calls=False, **sampling))) == {"clear"}


def test_several_calls_that_are_asked_for(server: ScriptedServer) -> None:
    clear = '<tool_call>\n{"name": "clear", "arguments": {}}\n</tool_call>'
    choice = answered(server, f"{GOOD}\n{clear}", tool_choice="required")
    assert checked(choice) == ["draw", "clear"]


def test_calls_begin_behind_the_reasoning(server: ScriptedServer) -> None:
    for choice in ("auto", "required", NAMED):
        made = answered(server, f"<think>Hm, a <b>star</b>.</think>{GOOD}", tool_choice=choice)
        assert checked(made) == ["draw"] and made["message"]["reasoning"] == "Hm, a <b>star</b>."


def test_a_call_that_has_hardly_begun_is_nothing(server: ScriptedServer) -> None:
    head = len(server.tokenizer.encode(GOOD.partition("draw")[0], add_special_tokens=False))
    for choice in ("required", NAMED):
        for most in (1, 2, head - 1):
            cut = answered(server, GOOD, tool_choice=choice, max_tokens=most, **NO_THOUGHT)
            assert cut["finish_reason"] == "length" and not cut["message"]["content"]
            assert "tool_calls" not in cut["message"]
    own = answered(server, f"So: {GOOD}", max_tokens=head + 3)
    assert (own["finish_reason"], own["message"]["content"].strip()) == ("length", "So:")


def test_a_function_of_old(server: ScriptedServer) -> None:
    body = server.says("No.", functions=[DRAW["function"]], function_call={"name": "draw"}, **NO_THOUGHT)
    (choice,) = post(server.http, PATH, **body)["choices"]
    call = choice["message"]["function_call"]
    jsonschema.validate(json.loads(call["arguments"]), DRAW["function"]["parameters"])
    assert (call["name"], choice["finish_reason"]) == ("draw", "stop")
    streamed = put_together(events(server.http, PATH, **body))[0]
    assert streamed["message"]["function_call"] == call


def test_an_answer_is_a_call_or_has_the_shape(server: ScriptedServer) -> None:
    shape = {"response_format": {"type": "json_object", "schema": DRAW["function"]["parameters"]}}
    assert checked(answered(server, GOOD, **shape)) == ["draw"]
    told = answered(server, '{"shape": "circle", "count": 1}', **shape)
    assert json.loads(told["message"]["content"]) == {"shape": "circle", "count": 1}
    forced = answered(server, "none of both", **shape, parallel_tool_calls=False)
    if "tool_calls" in forced["message"]:
        assert checked(forced)
    else:
        jsonschema.validate(json.loads(forced["message"]["content"]), DRAW["function"]["parameters"])


def test_calls_alone_have_no_shape_of_their_own(server: ScriptedServer) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    for field, shape in (("response_format", schema), ("structured_outputs", {"regex": "a"}), ("guided_choice", ["a"])):
        for choice in ("required", NAMED):
            body = {"tools": TOOLS, "tool_choice": choice, field: shape, **NO_THOUGHT}
            if field == "response_format":  # clients send it with every request; of calls, it says nothing
                assert checked(post(server.http, PATH, **server.says(GOOD, **body))["choices"][0]) == ["draw"]
            else:
                error = refusal(server.http, PATH, **server.says("a", **body))
                assert error["param"] == field and error["message"].startswith(f"{field}: tool_choice asks for calls")
        plain = answered(server, "a", tool_choice="none", **{field: shape}, **NO_THOUGHT)
        assert (
            plain["message"]["content"] == "a" if field != "response_format" else plain["message"]["content"][0] == "{"
        )
    legacy = {"functions": [DRAW["function"]], "function_call": {"name": "draw"}, "guided_regex": "a"}
    assert refusal(server.http, PATH, **server.says("a", **legacy))["message"].startswith("guided_regex: function_call")


class Draw(BaseModel):
    """Draw shapes."""

    shape: Literal["star", "circle"]
    count: Literal[1, 2, 3]


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "Draw"}}])
def test_the_sdks_streams_add_up_to_the_whole_answer(server: ScriptedServer, choice: Any) -> None:
    text = f"<think>Hm.</think>{GOOD}".replace('"draw"', '"Draw"').replace("5", "2")
    body = server.says(text, tools=[pydantic_function_tool(Draw)], tool_choice=choice)
    asked: Any = {"model": post_model(server), **body, "extra_body": {"vllm_xargs": body.pop("vllm_xargs")}}
    del asked["vllm_xargs"]
    with server.server.client() as client:
        parsed = client.chat.completions.parse(**asked).choices[0]
        with client.chat.completions.stream(**asked) as stream:
            kinds = {event.type for event in stream}
            final = stream.get_final_completion().choices[0]
    (call,) = parsed.message.tool_calls or ()
    (same,) = final.message.tool_calls or ()
    assert call.function.parsed_arguments == same.function.parsed_arguments == Draw(shape="star", count=2)
    assert call.function.arguments == same.function.arguments and parsed.finish_reason == final.finish_reason
    assert {"tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert (final.message.content or None) == (parsed.message.content or None)
    assert final.message.reasoning == parsed.message.reasoning == "Hm."  # type: ignore[attr-defined]


def post_model(server: ScriptedServer) -> str:
    return str(server.http.get("/v1/models").json()["data"][0]["id"])


def test_the_budget_of_reasoning_ends_it(server: ScriptedServer) -> None:
    body = server.says("<think>" + "ab" * 60, thinking_token_budget=4, max_tokens=60)
    whole = post(server.http, PATH, **body)
    message = whole["choices"][0]["message"]
    assert message["reasoning"] == "abab" and message["content"]
    assert whole["usage"]["completion_tokens_details"]["reasoning_tokens"] < 25


def test_a_schema_that_cannot_be_enforced_is_refused_by_name(server: ScriptedServer) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "wizard"}}}
    tools = [CLEAR, DRAW, {"type": "function", "function": {"name": "f", "parameters": odd}}]
    named = {"type": "function", "function": {"name": "f"}}
    for fields, place in (
        ({"tools": tools}, "tools[2].function.parameters"),
        ({"tools": tools, "tool_choice": "required"}, "tools[2].function.parameters"),
        ({"tools": tools, "tool_choice": named}, "tools[2].function.parameters"),
        ({"tools": tools, "response_format": {"type": "json_object"}}, "tools[2].function.parameters"),
        ({"functions": [tool["function"] for tool in tools[1:]]}, "functions[1].parameters"),
    ):
        error = refusal(server.http, PATH, **server.says("a", **fields))
        assert error["param"] == place.partition("[")[0] and "wizard" in error["message"]
        assert error["message"].startswith(f"{place}: json schema: type at #/properties/a/type: ")
    fine = server.says("a", tools=tools, tool_choice={"type": "function", "function": {"name": "clear"}}, **NO_THOUGHT)
    assert checked(post(server.http, PATH, **fine)["choices"][0]) == ["clear"]


# -- models whose notation is not known ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unknown(chat_model: Path) -> Iterator[Any]:
    with LocalServer({"model": str(chat_model), "num_gpu_blocks_override": 128}) as server:
        with server.http() as http:
            yield http
        server.until_idle()


def test_any_model_makes_calls_that_are_asked_for(unknown: Any) -> None:
    for choice in ("required", NAMED):
        body = {
            "messages": WHO,
            "tools": [DRAW],
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "max_tokens": 200,
        }
        response = unknown.post(PATH, json=body)
        assert response.status_code == 200 and response.headers[IGNORED] == "tools"
        assert checked(response.json()["choices"][0]) == ["draw"]
        streamed = put_together(events(unknown, PATH, **body, temperature=0))
        whole = post(unknown, PATH, **body, temperature=0)["choices"][0]
        assert without_ids(streamed[0]["message"]) == without_ids(whole["message"])


def test_a_model_that_is_not_told_of_tools_cannot_choose(unknown: Any) -> None:
    error = refusal(unknown, PATH, messages=WHO, tools=[DRAW])
    assert error["param"] == "tools" and "no place for tools" in error["message"]
    response = unknown.post(PATH, json={"messages": WHO, "thinking_token_budget": 5, "parallel_tool_calls": True})
    assert response.headers[IGNORED] == "parallel_tool_calls, thinking_token_budget"


def test_the_program_has_the_servers_calls(chat_model: Path, unknown: Any) -> None:
    llm = LLM(str(chat_model), num_gpu_blocks_override=128)
    params = SamplingParams(temperature=0, max_tokens=200)
    (output,) = llm.chat(WHO, params, use_tqdm=False, tools=[DRAW], tool_choice=NAMED)
    message = output.outputs[0].message
    assert isinstance(message, Message)
    whole = post(unknown, PATH, messages=WHO, tools=[DRAW], tool_choice=NAMED, temperature=0, max_tokens=200)
    (call,) = whole["choices"][0]["message"]["tool_calls"]
    assert [(one.name, one.arguments) for one in message.tool_calls] == [("draw", call["function"]["arguments"])]


def test_the_bundled_model_is_told_of_tools(client: OpenAI) -> None:
    made = client.chat.completions.create(
        model="quire-demo", messages=WHO, tools=[DRAW], tool_choice="required", temperature=0, parallel_tool_calls=False
    )  # type: ignore[call-overload]
    (call,) = made.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), DRAW["function"]["parameters"])
