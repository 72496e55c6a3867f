"""litellm."""

from __future__ import annotations

import asyncio

import litellm
import pytest
from conftest import LOUD, MODEL, QUESTION, TOO_LONG

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


def test_refused_tools(settings) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(litellm.BadRequestError, match=r"tools: .*tool calls"):
        litellm.completion(messages=ASKED, tools=[tool], **settings)


def test_refused_structured_output(settings) -> None:
    with pytest.raises(litellm.BadRequestError, match=r"response_format: .*structured output"):
        litellm.completion(messages=ASKED, response_format={"type": "json_object"}, **settings)
