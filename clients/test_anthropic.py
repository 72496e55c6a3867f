"""anthropic-python, and what it makes of /v1/messages."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path

import anthropic
import pytest
from anthropic import beta_async_tool, beta_tool
from conftest import (
    COUNT,
    COUNT_FIELDS,
    DRAW,
    DRAW_FIELDS,
    LOOK,
    LOUD,
    MODEL,
    QUESTION,
    SCENE,
    TOO_LONG,
    Scene,
    check_scene,
    check_star,
    draw,
)  # fmt: skip

TOOLS = [
    {"name": "draw", "description": "Draw a shape.", "input_schema": DRAW_FIELDS},
    {"name": "count", "description": "Count the shapes of a kind.", "input_schema": COUNT_FIELDS},
]
# Later packages have no argument for a temperature.
COMMON = {"model": MODEL, "max_tokens": 300, "extra_body": {"temperature": 0}}


@pytest.fixture(scope="module")
def client(server: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server, api_key="none", max_retries=0)


def asked(content) -> list[dict]:
    return [{"role": "user", "content": content}]


def test_text_and_usage(client) -> None:
    answer = client.messages.create(**COMMON, messages=asked(QUESTION))
    assert answer.type == "message" and answer.role == "assistant" and answer.stop_reason == "end_turn"
    assert [(block.type, block.text) for block in answer.content] == [("text", "Red.")]
    assert answer.usage.input_tokens > 0 and answer.usage.output_tokens > 0


def test_system_and_histories(client) -> None:
    history = [
        *asked("Hello!"),
        {"role": "assistant", "content": [{"type": "text", "text": "Hello!"}]},
        *asked(QUESTION),
    ]
    for system in ("Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]):
        assert (
            client.messages.create(**COMMON, system=system, messages=history, metadata={"user_id": "me"})
            .content[0]
            .text
        )


def test_streams(client) -> None:
    events = list(client.messages.create(**COMMON, messages=asked(QUESTION), stream=True))
    kinds = [event.type for event in events if event.type != "ping"]
    assert (kinds[0], kinds[1], kinds[-3:]) == (
        "message_start", "content_block_start", ["content_block_stop", "message_delta", "message_stop"],
    )  # fmt: skip
    with client.messages.stream(**COMMON, messages=asked(QUESTION)) as stream:
        assert "".join(stream.text_stream) == "Red."
        final = stream.get_final_message()
    assert final.stop_reason == "end_turn" and final.content[0].text == "Red." and final.usage.output_tokens > 0


def test_async(server: str) -> None:
    async def ask() -> str:
        client = anthropic.AsyncAnthropic(base_url=server, api_key="none")
        async with client, client.messages.stream(**COMMON, messages=asked(QUESTION)) as stream:
            return await stream.get_final_text()

    assert asyncio.run(ask()) == "Red."


def test_images_and_an_adapter(client, picture: Path) -> None:
    data = base64.b64encode(picture.read_bytes()).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    for model, said in ((MODEL, "red circle"), (LOUD, "RED CIRCLE")):
        answer = client.messages.create(
            **{**COMMON, "model": model}, messages=asked([image, {"type": "text", "text": LOOK}])
        )
        assert said in answer.content[0].text


def test_stop_sequences_and_lengths(client) -> None:
    answer = client.messages.create(**COMMON, messages=asked(QUESTION), stop_sequences=["."])
    assert (answer.stop_reason, answer.stop_sequence, answer.content[0].text) == ("stop_sequence", ".", "Red")
    answer = client.messages.create(**{**COMMON, "max_tokens": 4}, messages=asked("Tell me a story."))
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 4


def test_counting_tokens(client) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=asked(QUESTION)).input_tokens
    used = client.messages.create(**COMMON, messages=asked(QUESTION)).usage
    assert counted == used.input_tokens + used.cache_read_input_tokens  # which are told apart
    more = client.messages.count_tokens(model=MODEL, messages=asked(QUESTION), system="Be brief.", tools=TOOLS)
    assert more.input_tokens > counted


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "draw"}])
def test_tools(client, choice: dict) -> None:
    answer = client.messages.create(**COMMON, messages=asked(DRAW), tools=TOOLS, tool_choice=choice)
    (call,) = [block for block in answer.content if block.type == "tool_use"]
    assert answer.stop_reason == "tool_use" and call.name == "draw" and call.id
    check_star(call.input)
    with client.messages.stream(**COMMON, messages=asked(DRAW), tools=TOOLS, tool_choice=choice) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use" and json.loads("".join(pieces)) == call.input
    assert [(block.name, block.input) for block in final.content if block.type == "tool_use"] == [("draw", call.input)]


def test_no_tools(client) -> None:
    answer = client.messages.create(**COMMON, messages=asked(QUESTION), tools=TOOLS, tool_choice={"type": "none"})
    assert [block.type for block in answer.content] == ["text"]


@pytest.mark.parametrize("result", ["1", [{"type": "text", "text": "1"}]])
def test_a_loop(client, result) -> None:
    first = client.messages.create(**COMMON, messages=asked(COUNT), tools=TOOLS)
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.name == "count" and call.input == {"kind": "circle"}
    back = {"type": "tool_result", "tool_use_id": call.id, "content": result}
    history = [*asked(COUNT), {"role": "assistant", "content": first.content}, *asked([back])]
    last = client.messages.create(**COMMON, messages=history, tools=TOOLS)
    assert last.stop_reason == "end_turn" and last.content[0].text


@pytest.mark.parametrize("streams", [False, True])
def test_tool_runner(client, streams: bool) -> None:
    runner = client.beta.messages.tool_runner(**COMMON, messages=asked(DRAW), tools=[beta_tool(draw)], stream=streams)
    messages = [stream.get_final_message() for stream in runner] if streams else list(runner)
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn"]
    check_star(next(block.input for block in messages[0].content if block.type == "tool_use"))


def test_tool_runner_async(server: str) -> None:
    async def drawn(shape: str, color: str) -> str:
        """Draw a shape."""
        return "done"

    async def ask() -> str:
        async with anthropic.AsyncAnthropic(base_url=server, api_key="none") as client:
            tools = [beta_async_tool(drawn, name="draw")]
            runner = client.beta.messages.tool_runner(**COMMON, messages=asked(DRAW), tools=tools)
            return (await runner.until_done()).stop_reason

    assert asyncio.run(ask()) == "end_turn"


def test_parse(client) -> None:
    check_scene(client.messages.parse(**COMMON, messages=asked(SCENE), output_format=Scene).parsed_output)
    with client.messages.stream(**COMMON, messages=asked(SCENE), output_format=Scene) as stream:
        check_scene(stream.get_final_message().parsed_output)
    schema = {"format": {"type": "json_schema", "schema": Scene.model_json_schema()}}
    check_scene(client.messages.create(**COMMON, messages=asked(SCENE), output_config=schema).content[0].text)
    check_scene(client.beta.messages.parse(**COMMON, messages=asked(SCENE), output_format=Scene).parsed_output)


def test_models(client) -> None:
    names = [one.id for one in client.models.list()]
    assert MODEL in names and LOUD in names


def test_errors(client) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.messages.create(**COMMON, messages=asked(TOO_LONG))
    assert caught.value.body["type"] == "error" and caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**{**COMMON, "model": "absent"}, messages=asked(QUESTION))
    with pytest.raises(anthropic.BadRequestError, match="web_search"):
        search = {"type": "web_search_20250305", "name": "web_search"}
        client.messages.create(**COMMON, messages=asked(QUESTION), tools=[search])
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(**COMMON, messages=[])
