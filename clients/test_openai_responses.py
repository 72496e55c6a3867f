"""openai-python's responses."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from conftest import (
    COUNT,
    DRAW,
    FUNCTIONS,
    LOOK,
    LOUD,
    MODEL,
    QUESTION,
    SCENE,
    TOO_LONG,
    Scene,
    check_scene,
    check_star,
)
from pydantic import BaseModel

TOOLS = [{"type": "function", "strict": True, **each} for each in FUNCTIONS]
FORMAT = {"type": "json_schema", "name": "scene", "strict": True, "schema": Scene.model_json_schema()}
COMMON = {"model": MODEL, "temperature": 0}


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def test_text_and_usage(client) -> None:
    answer = client.responses.create(**COMMON, input=QUESTION)
    assert answer.output_text == "Red." and answer.status == "completed" and answer.id.startswith("resp")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens


def test_items_and_instructions(client) -> None:
    answer = client.responses.create(
        **COMMON, instructions="Be brief.", metadata={"run": "7"}, user="me",
        input=[
            {"role": "user", "content": "Hello!"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello!"}]},
            {"role": "user", "content": [{"type": "input_text", "text": QUESTION}]},
        ],
    )  # fmt: skip
    assert answer.output_text and answer.metadata == {"run": "7"} and answer.instructions == "Be brief."


def test_images_and_an_adapter(client, picture_url: str) -> None:
    parts = [{"type": "input_image", "image_url": picture_url, "detail": "auto"}, {"type": "input_text", "text": LOOK}]
    for model, said in ((MODEL, "red circle"), (LOUD, "RED CIRCLE")):
        answer = client.responses.create(model=model, temperature=0, input=[{"role": "user", "content": parts}])
        assert said in answer.output_text


def test_streams(client) -> None:
    events = list(client.responses.create(**COMMON, input=QUESTION, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Red."
    assert events[-1].response.output_text == "Red." and events[-1].response.usage.output_tokens > 0


def test_streams_put_together(client) -> None:
    with client.responses.stream(**COMMON, input=QUESTION) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == "Red."


def test_async(url: str) -> None:
    async def ask() -> str:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            return (await client.responses.create(**COMMON, input=QUESTION)).output_text

    assert asyncio.run(ask()) == "Red."


def test_the_length_is_bounded(client) -> None:
    answer = client.responses.create(**COMMON, input="Tell me a story.", max_output_tokens=16)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "draw"}])
def test_tools(client, choice) -> None:
    answer = client.responses.create(**COMMON, input=DRAW, tools=TOOLS, tool_choice=choice)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert call.name == "draw" and call.call_id and call.status == "completed"
    check_star(call.arguments)


def test_streamed_tools(client) -> None:
    with client.responses.stream(**COMMON, input=DRAW, tools=TOOLS, tool_choice="required") as stream:
        events = list(stream)
        (call,) = [item for item in stream.get_final_response().output if item.type == "function_call"]
    deltas = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert call.name == "draw" and "".join(event.delta for event in deltas) == call.arguments
    (added,) = [event for event in events if event.type == "response.output_item.added"]
    assert added.item.type == "function_call" and added.item.name == "draw"
    check_star(call.arguments)


def test_a_loop(client) -> None:
    items: list = [{"role": "user", "content": COUNT}]
    first = client.responses.create(**COMMON, input=items, tools=TOOLS)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert call.name == "count" and json.loads(call.arguments) == {"kind": "circle"}
    items += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "1"}]
    answer = client.responses.create(**COMMON, input=items, tools=TOOLS)
    assert answer.output_text and all(item.type == "message" for item in answer.output)


def test_a_schema(client) -> None:
    answer = client.responses.create(**COMMON, input=SCENE, text={"format": FORMAT})
    check_scene(answer.output_text)
    assert answer.text.format.type == "json_schema" and answer.text.format.name == "scene"
    answer = client.responses.create(
        **COMMON, input=f"{SCENE} Answer as JSON.", text={"format": {"type": "json_object"}}
    )
    assert isinstance(json.loads(answer.output_text), dict)


def test_parse(client) -> None:
    check_scene(client.responses.parse(**COMMON, input=SCENE, text_format=Scene).output_parsed)
    with client.responses.stream(**COMMON, input=SCENE, text_format=Scene) as stream:
        (done,) = [event for event in stream if event.type == "response.output_text.done"]
        assert done.parsed == stream.get_final_response().output_parsed
        check_scene(done.parsed)


class Draw(BaseModel):
    """Draw a shape."""

    shape: str
    color: str


def test_parsed_tools(client) -> None:
    tools = [openai.pydantic_function_tool(Draw, name="draw")["function"]]
    answer = client.responses.parse(
        **COMMON, input=DRAW, tools=[{"type": "function", **each} for each in tools], tool_choice="required"
    )
    (call,) = answer.output
    assert call.type == "function_call"
    check_star(call.arguments)


def test_answers_that_are_kept(client) -> None:
    """previous_response_id, retrieve and delete: the server was started with a store."""
    first = client.responses.create(**COMMON, input="There is a red star and a blue circle.", store=True)
    second = client.responses.create(**COMMON, input="What color is the star?", previous_response_id=first.id)
    assert second.output_text == "Red." and second.previous_response_id == first.id
    kept = client.responses.retrieve(second.id)
    assert kept.output_text == "Red." and kept.usage == second.usage
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.APIStatusError):
        client.responses.create(**COMMON, input="And the circle?", previous_response_id=second.id)


def test_a_context_that_is_too_long(client) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**COMMON, input=TOO_LONG)
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize("tool", ["web_search", "code_interpreter", "image_generation"])
def test_tools_that_run_elsewhere_are_refused(client, tool: str) -> None:
    with pytest.raises(openai.BadRequestError, match=tool):
        client.responses.create(**COMMON, input=DRAW, tools=[{"type": tool}])
