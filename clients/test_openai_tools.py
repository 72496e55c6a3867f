"""openai-python's chat completions with tools and schemas: create(), parse(), and what puts streams together."""

from __future__ import annotations

import json
import re

import openai
import pytest
from conftest import COUNT, DRAW, DRAW_FIELDS, FUNCTIONS, MODEL, SCENE, TOOLS, Scene, check_scene, check_star
from pydantic import BaseModel, Field

NAMED = {"type": "function", "function": {"name": "draw"}}
STRICT = {"type": "json_schema", "json_schema": {"name": "scene", "strict": True, "schema": Scene.model_json_schema()}}


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def asked(content: str, **more) -> dict:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, **more}


def put_together(chunks) -> tuple[str, list[dict], str]:
    """Of a stream, as its users do it: the text, the calls, and how it ended."""
    text, calls, end = "", [], ""
    for chunk in chunks:
        for choice in chunk.choices:
            text += choice.delta.content or ""
            end = choice.finish_reason or end
            for piece in choice.delta.tool_calls or ():
                if piece.index == len(calls):
                    assert piece.id and piece.type == "function" and piece.function.name
                    calls.append({"id": piece.id, "name": piece.function.name, "arguments": ""})
                calls[piece.index]["arguments"] += piece.function.arguments or ""
    return text, calls, end


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_tools(client, choice) -> None:
    answer = client.chat.completions.create(**asked(DRAW), tools=TOOLS, tool_choice=choice).choices[0]
    (call,) = answer.message.tool_calls
    assert call.type == "function" and call.function.name == "draw" and call.id
    check_star(call.function.arguments)
    # OpenAI says "stop" where a function was named, and "tool_calls" else.
    assert answer.finish_reason == ("stop" if choice == NAMED else "tool_calls") and not answer.message.content


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
def test_streamed_tools(client, choice) -> None:
    whole = client.chat.completions.create(**asked(DRAW), tools=TOOLS, tool_choice=choice).choices[0]
    stream = client.chat.completions.create(**asked(DRAW), tools=TOOLS, tool_choice=choice, stream=True)
    text, (call,), end = put_together(stream)
    assert text == (whole.message.content or "") and end == whole.finish_reason
    assert (call["name"], call["arguments"]) == ("draw", whole.message.tool_calls[0].function.arguments)


def test_no_tools_where_none_is_called(client) -> None:
    for choice in ("auto", "none"):
        answer = client.chat.completions.create(**asked("Hello!"), tools=TOOLS, tool_choice=choice).choices[0]
        assert answer.finish_reason == "stop" and answer.message.content and not answer.message.tool_calls


def test_one_call_at_a_time(client) -> None:
    more = dict(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    answer = client.chat.completions.create(**asked("Draw a red star and a blue circle."), **more)
    assert len(answer.choices[0].message.tool_calls) == 1


def test_a_loop(client) -> None:
    """The call, its result in the history, and an answer in words."""
    messages: list = [{"role": "user", "content": COUNT}]
    common = dict(model=MODEL, temperature=0, tools=TOOLS)
    first = client.chat.completions.create(messages=messages, **common).choices[0].message
    (call,) = first.tool_calls
    assert call.function.name == "count" and json.loads(call.function.arguments) == {"kind": "circle"}
    # As the package gives it, and as users write it by hand.
    for message in (first, first.model_dump(exclude_none=True)):
        history = [*messages, message, {"role": "tool", "tool_call_id": call.id, "content": "1"}]
        answer = client.chat.completions.create(messages=history, **common).choices[0]
        assert answer.finish_reason == "stop" and answer.message.content and not answer.message.tool_calls


def test_legacy_functions(client) -> None:
    message = client.chat.completions.create(**asked(DRAW), functions=FUNCTIONS).choices[0]
    assert message.finish_reason == "function_call" and message.message.function_call.name == "draw"
    check_star(message.message.function_call.arguments)
    named = dict(functions=FUNCTIONS, function_call={"name": "draw"})
    check_star(client.chat.completions.create(**asked(DRAW), **named).choices[0].message.function_call.arguments)
    name = arguments = ""
    for chunk in client.chat.completions.create(**asked(DRAW), **named, stream=True):
        if chunk.choices and (piece := chunk.choices[0].delta.function_call):
            name, arguments = name + (piece.name or ""), arguments + (piece.arguments or "")
    assert name == "draw"
    check_star(arguments)
    history = [
        {"role": "user", "content": DRAW},
        {"role": "assistant", "content": None, "function_call": {"name": name, "arguments": arguments}},
        {"role": "function", "name": "draw", "content": "Done."},
    ]
    assert client.chat.completions.create(model=MODEL, messages=history, functions=FUNCTIONS).choices[0].message.content


@pytest.mark.parametrize("strict", [True, False, None])
def test_json_schema(client, strict: bool | None) -> None:
    wanted = {"type": "json_schema", "json_schema": {**STRICT["json_schema"], "strict": strict}}
    answer = client.chat.completions.create(**asked(SCENE), response_format=wanted).choices[0]
    assert answer.finish_reason == "stop"
    check_scene(answer.message.content)
    text, _, _ = put_together(client.chat.completions.create(**asked(SCENE), response_format=wanted, stream=True))
    assert text == answer.message.content


def test_json_object(client) -> None:
    more = dict(response_format={"type": "json_object"})
    answer = client.chat.completions.create(**asked(f"{SCENE} Answer as JSON."), **more).choices[0]
    assert answer.finish_reason == "stop" and isinstance(json.loads(answer.message.content), dict)


def test_response_format_text(client) -> None:
    answer = client.chat.completions.create(**asked("Hello!"), response_format={"type": "text"})
    assert (
        answer.choices[0].message.content
        == client.chat.completions.create(**asked("Hello!")).choices[0].message.content
    )


@pytest.mark.parametrize(
    ("name", "value", "fits"),
    [
        ("choice", ["Red.", "Blue."], lambda text: text in ("Red.", "Blue.")),
        ("regex", r"(red|blue) (star|circle)", lambda text: re.fullmatch(r"(red|blue) (star|circle)", text)),
        ("json", Scene.model_json_schema(), lambda text: Scene.model_validate_json(text)),
        ("grammar", 'start: "a " ("red" | "blue") " star"', lambda text: text in ("a red star", "a blue star")),
    ],
)
def test_vllms_fields(client, name: str, value, fits) -> None:
    """structured_outputs, and guided_* as they were called before, by extra_body."""
    for body in ({"structured_outputs": {name: value}}, {f"guided_{name}": value}):
        answer = client.chat.completions.create(**asked(SCENE), extra_body=body).choices[0]
        assert answer.finish_reason == "stop" and fits(answer.message.content)
    done = client.completions.create(model=MODEL, prompt=SCENE, max_tokens=400, temperature=0, extra_body=body)
    assert done.choices[0].finish_reason == "stop" and fits(done.choices[0].text)


def test_parse(client) -> None:
    message = client.chat.completions.parse(**asked(SCENE), response_format=Scene).choices[0].message
    check_scene(message.parsed)
    assert Scene.model_validate_json(message.content) == message.parsed and message.refusal is None


class Draw(BaseModel):
    """Draw a shape."""

    shape: str = Field(pattern="^(circle|square|triangle|star)$")
    color: str


def test_parsed_tools(client) -> None:
    tool = openai.pydantic_function_tool(Draw, name="draw")
    message = client.chat.completions.parse(**asked(DRAW), tools=[tool], tool_choice="required").choices[0].message
    parsed = message.tool_calls[0].function.parsed_arguments
    assert isinstance(parsed, Draw)
    check_star(parsed.model_dump())


def test_parse_gives_up_where_the_answer_is_cut(client) -> None:
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**asked(SCENE), response_format=Scene, max_tokens=5)


def test_streamed_parse(client) -> None:
    with client.chat.completions.stream(**asked(SCENE), response_format=Scene) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0].message
    check_scene(final.parsed)
    assert "".join(event.delta for event in events if event.type == "content.delta") == final.content
    (done,) = [event for event in events if event.type == "content.done"]
    assert done.parsed == final.parsed


def test_streamed_parsed_tools(client) -> None:
    tools = [openai.pydantic_function_tool(Draw, name="draw")]
    with client.chat.completions.stream(**asked(DRAW), tools=tools, tool_choice="required") as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    (call,) = final.message.tool_calls
    deltas = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert "".join(event.arguments_delta for event in deltas) == call.function.arguments
    (done,) = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert done.name == "draw" and done.parsed_arguments == call.function.parsed_arguments
    check_star(call.function.parsed_arguments.model_dump())


def test_choices_of_their_own(client) -> None:
    more = dict(n=3, seed=1, response_format=STRICT)
    answers = client.chat.completions.create(**{**asked(SCENE), "temperature": 1.2}, **more).choices
    assert len(answers) == 3 and all(Scene.model_validate_json(each.message.content) for each in answers)


def test_logprobs_of_what_is_said(client) -> None:
    more = dict(response_format=STRICT, logprobs=True, top_logprobs=2)
    answer = client.chat.completions.create(**asked(SCENE), **more).choices[0]
    said = "".join(one.token for one in answer.logprobs.content)
    assert answer.message.content in said and all(one.logprob <= 0 for one in answer.logprobs.content)


@pytest.mark.parametrize(
    "schema", [{"type": "text"}, {"$ref": "https://example.com/schema.json"}, {"type": "string", "pattern": "("}]
)
def test_schemas_that_are_refused(client, schema: dict) -> None:
    with pytest.raises(openai.BadRequestError):
        wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
        client.chat.completions.create(**asked(SCENE), response_format=wanted)


def test_calls_that_are_refused(client) -> None:
    """A function that is not there; a tool's answer to no call; parameters that are no schema."""
    absent = {"type": "function", "function": {"name": "absent"}}
    with pytest.raises(openai.BadRequestError, match="absent"):
        client.chat.completions.create(**asked(DRAW), tools=TOOLS, tool_choice=absent)
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**asked(DRAW), tool_choice="required")
    wrong = {"type": "function", "function": {"name": "draw", "parameters": {**DRAW_FIELDS, "type": "thing"}}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(**asked(DRAW), tools=[wrong], tool_choice="required")
