"""langchain-openai."""

from __future__ import annotations

import openai
import pytest
from conftest import LOUD, MODEL, QUESTION, TOO_LONG
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.runnables import RunnableLambda
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


def test_refused_tools(url: str) -> None:
    def look(what: str) -> str:
        """Look at a thing."""
        return what

    with pytest.raises(openai.BadRequestError, match=r"tools: .*tool calls"):
        chat(url).bind_tools([look]).invoke(QUESTION)


def test_refused_structured_output(url: str) -> None:
    schema = {"title": "Color", "type": "object", "properties": {"color": {"type": "string"}}, "required": ["color"]}
    with pytest.raises(openai.BadRequestError, match=r"response_format: .*structured output"):
        chat(url).with_structured_output(schema, method="json_schema").invoke(QUESTION)
