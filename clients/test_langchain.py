"""langchain and langchain-openai."""

from __future__ import annotations

import json
from typing import TypedDict

import pytest
from conftest import COUNT, DRAW, LOUD, MODEL, QUESTION, SCENE, TOO_LONG, Scene, check_scene, check_star, count, draw
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI


def chat(url: str, **more) -> ChatOpenAI:
    settings = {"model": MODEL, "base_url": url, "api_key": "none", "temperature": 0, "max_retries": 0}
    return ChatOpenAI(**{**settings, **more})


def test_text_and_usage(url: str) -> None:
    answer = chat(url).invoke([SystemMessage("Be brief."), HumanMessage(QUESTION)])
    assert answer.text and answer.usage_metadata["output_tokens"] > 0
    assert chat(url).invoke(QUESTION).text == "Red."


def test_completions(url: str) -> None:
    model = OpenAI(model=MODEL, base_url=url, api_key="none", temperature=0, max_tokens=12, stop=["."])
    assert "." not in model.invoke("Once upon a time")


def test_streams(url: str) -> None:
    pieces = list(chat(url, stream_usage=True).stream(QUESTION))
    assert "".join(piece.text for piece in pieces) == "Red."
    assert any(piece.usage_metadata for piece in pieces)


def test_a_batch(url: str) -> None:
    assert [answer.text for answer in chat(url).batch([QUESTION] * 3)] == ["Red."] * 3


def test_images(url: str, picture_url: str) -> None:
    parts = [{"type": "text", "text": "What do you see?"}, {"type": "image_url", "image_url": {"url": picture_url}}]
    assert "red circle" in chat(url).invoke([HumanMessage(parts)]).text
    block = {"type": "image", "base64": picture_url.partition(",")[2], "mime_type": "image/png"}
    assert "red circle" in chat(url).invoke([HumanMessage([block, parts[0]])]).text


def test_logprobs(url: str) -> None:
    answer = chat(url).bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert answer.response_metadata["logprobs"]["content"]


def test_an_adapter(url: str, picture_parts) -> None:
    assert "RED CIRCLE" in chat(url, model=LOUD).invoke([HumanMessage(picture_parts)]).text


def test_fields_that_change_no_answer(url: str) -> None:
    assert chat(url, metadata={"run": "7"}, model_kwargs={"user": "me", "store": True}).invoke(QUESTION).text == "Red."


def test_a_context_that_is_too_long_falls_back(url: str) -> None:
    with pytest.raises(ContextOverflowError):
        chat(url).invoke(TOO_LONG)
    short = RunnableLambda(lambda _: chat(url).invoke(QUESTION))
    first = chat(url).with_fallbacks([short], exceptions_to_handle=(ContextOverflowError,))
    assert first.invoke(TOO_LONG).text == "Red."


def look(what: str) -> str:
    """Look at a thing."""
    return what


TOOLS = [draw, count, look]


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
@pytest.mark.parametrize("responses", [False, True])
def test_with_structured_output(url: str, method: str, responses: bool) -> None:
    made = chat(url, use_responses_api=responses).with_structured_output(Scene, method=method, include_raw=True)
    question = f"{SCENE} Answer as JSON." if method == "json_mode" else SCENE
    found = made.invoke(question)
    if method == "json_mode":  # any JSON: what its keys are is the model's
        assert isinstance(json.loads(found["raw"].text), dict)
    else:
        check_scene(found["parsed"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_streamed_structured_output(url: str, method: str) -> None:
    *_, last = chat(url).with_structured_output(Scene, method=method).stream(SCENE)
    check_scene(last)
    *_, last = chat(url).with_structured_output(Scene.model_json_schema(), method=method).stream(SCENE)
    check_scene(last)


def test_structured_output_of_a_typed_dict(url: str) -> None:
    class Star(TypedDict):
        """Draw a star."""

        color: str

    assert set(chat(url).with_structured_output(Star, strict=True).invoke(DRAW)) == {"color"}


@pytest.mark.parametrize("choice", ["auto", "required", "draw"])
@pytest.mark.parametrize("responses", [False, True])
def test_bind_tools(url: str, choice: str, responses: bool) -> None:
    made = chat(url, use_responses_api=responses).bind_tools(TOOLS, tool_choice=choice)
    (call,) = made.invoke(DRAW).tool_calls
    assert call["name"] == "draw" and call["id"]
    check_star(call["args"])
    pieces = list(made.stream(DRAW))
    whole = sum(pieces[1:], pieces[0])
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == [(call["name"], call["args"])]


@pytest.mark.parametrize("strict", [True, False])
def test_strict_tools(url: str, strict: bool) -> None:
    made = chat(url).bind_tools(TOOLS, strict=strict, parallel_tool_calls=False, tool_choice="required")
    (call,) = made.invoke(DRAW).tool_calls
    check_star(call["args"])


@pytest.mark.parametrize("responses", [False, True])
def test_a_loop(url: str, responses: bool) -> None:
    """As langchain's documents write it: the call is run, and its message appended."""
    by_name = {each.__name__: tool(each) for each in TOOLS}
    made = chat(url, use_responses_api=responses).bind_tools(list(by_name.values()))
    messages: list = [HumanMessage(COUNT)]
    messages.append(made.invoke(messages))
    for call in messages[-1].tool_calls:
        messages.append(by_name[call["name"]].invoke(call))
    assert messages[-1].name == "count" and messages[-1].content == "2"
    last = made.invoke(messages)
    assert last.text and not last.tool_calls


def test_an_agent(url: str) -> None:
    found = create_agent(chat(url), [draw, count]).invoke({"messages": [HumanMessage(DRAW)]})["messages"]
    assert [message.type for message in found] == ["human", "ai", "tool", "ai"]
    check_star(found[1].tool_calls[0]["args"])
    assert found[2].content == "done" and found[3].text


def test_a_streamed_agent(url: str) -> None:
    made = create_agent(chat(url), [draw, count])
    names = [
        name for update in made.stream({"messages": [HumanMessage(DRAW)]}, stream_mode="updates") for name in update
    ]
    assert names == ["model", "tools", "model"]


@pytest.mark.parametrize("strategy", [ProviderStrategy, ToolStrategy])
def test_an_agent_with_an_answer_of_a_shape(url: str, strategy) -> None:
    made = create_agent(chat(url), [], response_format=strategy(Scene))
    check_scene(made.invoke({"messages": [HumanMessage(SCENE)]})["structured_response"])
