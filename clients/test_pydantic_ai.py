"""pydantic-ai."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from conftest import LOOK, LOUD, MODEL, QUESTION
from pydantic import BaseModel
from pydantic_ai import Agent, BinaryContent
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def agent(url: str, name: str = MODEL, **more) -> Agent:
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=url, api_key="none"))
    return Agent(model, model_settings={"temperature": 0}, retries=0, **more)


def test_text_and_usage(url: str) -> None:
    result = agent(url).run_sync(QUESTION)
    assert result.output == "Red." and result.usage.output_tokens > 0


def test_instructions(url: str) -> None:
    assert agent(url, instructions="Be brief.").run_sync(QUESTION).output


def test_streams(url: str) -> None:
    async def ask() -> str:
        async with agent(url).run_stream(QUESTION) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert asyncio.run(ask()) == "Red."


def test_images_and_an_adapter(url: str, picture: Path) -> None:
    asked = [BinaryContent(picture.read_bytes(), media_type="image/png"), LOOK]
    assert "red circle" in agent(url).run_sync(asked).output
    assert "RED CIRCLE" in agent(url, LOUD).run_sync(asked).output


def test_a_conversation(url: str) -> None:
    made = agent(url)
    first = made.run_sync(QUESTION)
    assert made.run_sync(QUESTION, message_history=first.all_messages()).output


def test_refused_tools(url: str) -> None:
    made = agent(url)

    @made.tool_plain
    def look(what: str) -> str:
        """Look at a thing."""
        return what

    with pytest.raises(ModelHTTPError, match=r"tools: .*tool calls"):
        made.run_sync(QUESTION)


def test_refused_output_types(url: str) -> None:
    class Color(BaseModel):
        color: str

    with pytest.raises(ModelHTTPError, match=r"tool_choice: .*tool calls"):
        agent(url, output_type=Color).run_sync(QUESTION)
