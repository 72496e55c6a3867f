"""litellm."""

from __future__ import annotations

import asyncio
import json

import litellm
import pytest
from conftest import (
    COUNT,
    DRAW,
    FUNCTIONS,
    LOUD,
    MODEL,
    QUESTION,
    SCENE,
    TOO_LONG,
    TOOLS,
    Scene,
    check_scene,
    check_star,
)

litellm.telemetry = False
litellm.suppress_debug_info = True
ASKED = [{"role": "user", "content": QUESTION}]


@pytest.fixture(params=["openai", "hosted_vllm"])
def settings(request: pytest.FixtureRequest, url: str) -> dict:
    """The two ways in which litellm knows such a server."""
    return {"model": f"{request.param}/{MODEL}", "api_base": url, "api_key": "none", "temperature": 0, "num_retries": 0}


def test_text_and_usage(settings) -> None:
    answer = litellm.completion(messages=ASKED, **settings)
    assert answer.choices[0].message.content == "Red." and answer.usage.completion_tokens > 0


def test_completions(url: str) -> None:
    settings = dict(model=f"text-completion-openai/{MODEL}", api_base=url, api_key="none", temperature=0, max_tokens=9)
    assert litellm.text_completion(prompt="Once upon a time", **settings).choices[0].text


def test_streams(settings) -> None:
    pieces = litellm.completion(messages=ASKED, stream=True, **settings)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "Red."


def test_async(settings) -> None:
    answer = asyncio.run(litellm.acompletion(messages=ASKED, **settings))
    assert answer.choices[0].message.content == "Red."


def test_images(settings, picture_parts) -> None:
    answer = litellm.completion(messages=[{"role": "user", "content": picture_parts}], **settings)
    assert "red circle" in answer.choices[0].message.content


def test_stop_seed_logprobs(settings) -> None:
    asked = dict(stop=["."], seed=3, logprobs=True, top_logprobs=2)
    choice = litellm.completion(messages=ASKED, **settings, **asked).choices[0]
    assert choice.message.content == "Red" and choice.logprobs.content


def test_an_adapter(settings, picture_parts) -> None:
    provider = settings["model"].partition("/")[0]
    asked = [{"role": "user", "content": picture_parts}]
    answer = litellm.completion(messages=asked, **{**settings, "model": f"{provider}/{LOUD}"})
    assert "RED CIRCLE" in answer.choices[0].message.content


def test_fields_that_change_no_answer(settings) -> None:
    answer = litellm.completion(messages=ASKED, user="me", metadata={"run": "7"}, store=True, **settings)
    assert answer.choices[0].message.content == "Red."


def test_a_context_that_is_too_long_falls_back(settings) -> None:
    asked = [{"role": "user", "content": TOO_LONG}]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(messages=asked, **settings)
    # To a model that answers whatever it is asked: the server has no longer one.
    long = {"model": "openai/long", "api_key": "none", "mock_response": "as long as you like"}
    models = [{"model_name": "short", "litellm_params": settings}, {"model_name": "long", "litellm_params": long}]
    router = litellm.Router(model_list=models, context_window_fallbacks=[{"short": ["long"]}], num_retries=0)
    assert router.completion("short", asked).choices[0].message.content == "as long as you like"


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "function": {"name": "draw"}}])
def test_tools(settings, choice) -> None:
    asked = dict(messages=[{"role": "user", "content": DRAW}], tools=TOOLS, tool_choice=choice, **settings)
    (call,) = litellm.completion(**asked).choices[0].message.tool_calls
    assert call.function.name == "draw"
    check_star(call.function.arguments)
    whole = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    (streamed,) = whole.choices[0].message.tool_calls
    assert (streamed.function.name, streamed.function.arguments) == ("draw", call.function.arguments)


def test_a_loop(settings) -> None:
    messages: list = [{"role": "user", "content": COUNT}]
    first = litellm.completion(messages=messages, tools=TOOLS, **settings).choices[0].message
    (call,) = first.tool_calls
    assert call.function.name == "count" and json.loads(call.function.arguments) == {"kind": "circle"}
    messages += [first, {"role": "tool", "tool_call_id": call.id, "name": "count", "content": "1"}]
    last = litellm.completion(messages=messages, tools=TOOLS, **settings).choices[0].message
    assert last.content and not last.tool_calls


def test_structured_output(settings) -> None:
    asked = dict(messages=[{"role": "user", "content": SCENE}], **settings)
    check_scene(litellm.completion(**asked, response_format=Scene).choices[0].message.content)
    schema = {"type": "json_schema", "json_schema": {"name": "scene", "schema": Scene.model_json_schema()}}
    pieces = litellm.completion(**asked, response_format=schema, stream=True)
    check_scene("".join(piece.choices[0].delta.content or "" for piece in pieces))
    asked["messages"] = [{"role": "user", "content": f"{SCENE} Answer as JSON."}]
    answer = litellm.completion(**asked, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


def test_responses(settings) -> None:
    """By the server's own route, to which litellm passes them."""
    known = {name: settings[name] for name in ("model", "api_base", "api_key", "temperature")}
    answer = litellm.responses(input=QUESTION, **known)
    assert answer.output[0].content[0].text == "Red."
    events = list(litellm.responses(input=QUESTION, stream=True, **known))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Red."
    tools = [{"type": "function", **each} for each in FUNCTIONS]
    (call,) = litellm.responses(input=DRAW, tools=tools, tool_choice="required", **known).output
    assert call.name == "draw"
    check_star(call.arguments)


def test_anthropics_messages(server: str) -> None:
    """litellm speaks Anthropic's API to the server."""
    settings = dict(model=f"anthropic/{MODEL}", api_base=server, api_key="none", temperature=0, max_tokens=200)
    assert litellm.completion(messages=ASKED, **settings).choices[0].message.content == "Red."
    pieces = litellm.completion(messages=ASKED, stream=True, **settings)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == "Red."
    asked = [{"role": "user", "content": DRAW}]
    answer = litellm.completion(messages=asked, tools=TOOLS, tool_choice="required", **settings)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "draw"
    check_star(call.function.arguments)


def test_anthropics_messages_passed_through(settings, server: str) -> None:
    """What speaks Anthropic's API to litellm: passed to the server's own route, and translated to chat completions."""
    known = {name: settings[name] for name in ("model", "api_base", "api_key", "temperature")}
    passed = dict(model=f"anthropic/{MODEL}", api_base=server, api_key="none", temperature=0)
    for told in (known, passed):
        answer = asyncio.run(litellm.anthropic.messages.acreate(messages=ASKED, max_tokens=50, **told))
        assert answer["content"][0]["text"] == "Red."
