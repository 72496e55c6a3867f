"""llama-index (OpenAILike)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from conftest import DRAW, LOOK, LOUD, MODEL, QUESTION, SCENE, Scene, check_scene, check_star, count, draw
from llama_index.core import PromptTemplate
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def model(url: str, name: str = MODEL, **more) -> OpenAILike:
    known = {"is_chat_model": True, "context_window": 1024, "temperature": 0, "max_retries": 0, **more}
    return OpenAILike(model=name, api_base=url, api_key="none", **known)


def test_text(url: str) -> None:
    assert model(url).chat([ChatMessage(role="user", content=QUESTION)]).message.content == "Red."
    assert model(url).complete(QUESTION).text == "Red."
    assert asyncio.run(model(url).acomplete(QUESTION)).text == "Red."


def test_completions(url: str) -> None:
    assert model(url, is_chat_model=False, max_tokens=9).complete("Once upon a time").text


def test_streams(url: str) -> None:
    pieces = list(model(url).stream_chat([ChatMessage(role="user", content=QUESTION)]))
    assert pieces[-1].message.content == "Red." and "".join(piece.delta or "" for piece in pieces) == "Red."


def test_images_and_an_adapter(url: str, picture: Path) -> None:
    asked = [ChatMessage(role="user", blocks=[ImageBlock(path=picture), TextBlock(text=LOOK)])]
    assert "red circle" in model(url).chat(asked).message.content
    assert "RED CIRCLE" in model(url, LOUD).chat(asked).message.content


def caller(url: str, **more) -> OpenAILike:
    return model(url, is_function_calling_model=True, **more)


TOOLS = [FunctionTool.from_defaults(each) for each in (draw, count)]
PROMPT = PromptTemplate("{asked}")


@pytest.mark.parametrize("native", [True, False])
def test_structured_predict(url: str, native: bool) -> None:
    """By response_format, and by a tool that is forced."""
    made = caller(url, should_use_structured_outputs=native)
    check_scene(made.structured_predict(Scene, PROMPT, asked=SCENE))
    check_scene(asyncio.run(made.astructured_predict(Scene, PROMPT, asked=SCENE)))
    check_scene(made.as_structured_llm(Scene).complete(SCENE).raw)
    *_, last = made.stream_structured_predict(Scene, PROMPT, asked=SCENE)
    if native:  # of a tool it forces no call in streams, and says that it is not strict: what is in it is the model's
        check_scene(last.model_dump())
    assert set(Scene.model_fields) <= set(type(last).model_fields)


def test_tools(url: str) -> None:
    made = caller(url)
    for more in ({}, {"tool_required": True}, {"allow_parallel_tool_calls": True}):
        answer = made.chat_with_tools(TOOLS, user_msg=DRAW, **more)
        (call,) = made.get_tool_calls_from_response(answer)
        assert call.tool_name == "draw" and call.tool_id
        check_star(call.tool_kwargs)
    *_, last = made.stream_chat_with_tools(TOOLS, user_msg=DRAW)
    (streamed,) = made.get_tool_calls_from_response(last)
    assert (streamed.tool_name, streamed.tool_kwargs) == (call.tool_name, call.tool_kwargs)


def test_predict_and_call(url: str) -> None:
    assert caller(url).predict_and_call(TOOLS, DRAW).response == "done"


@pytest.mark.parametrize("streaming", [True, False])
def test_an_agent(url: str, streaming: bool) -> None:
    async def ask():
        agent = FunctionAgent(tools=TOOLS, llm=caller(url), streaming=streaming)
        return await agent.run(DRAW)

    answer = asyncio.run(ask())
    (call,) = answer.tool_calls
    assert call.tool_name == "draw" and call.tool_output.content == "done" and answer.response.content
    check_star(call.tool_kwargs)
