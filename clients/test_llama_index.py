"""llama-index (OpenAILike)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest
from conftest import LOOK, LOUD, MODEL, QUESTION
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


def test_refused_tools(url: str) -> None:
    def look(what: str) -> str:
        """Look at a thing."""
        return what

    tool = FunctionTool.from_defaults(look)
    with pytest.raises(openai.BadRequestError, match=r"tools: .*tool calls"):
        model(url, is_function_calling_model=True).chat_with_tools([tool], user_msg=QUESTION)
