"""openai-python."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import openai
import pytest
from conftest import LOOK, LOUD, MODEL, QUESTION, TOO_LONG, TOOLS

ASKED = [{"role": "user", "content": QUESTION}]
TOOL = TOOLS[0]  # it fits no QUESTION: with tool_choice "none" a call would be text


@pytest.fixture(scope="module")
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def chat(client: openai.OpenAI, **more):
    return client.chat.completions.create(**{"model": MODEL, "messages": ASKED, "temperature": 0, **more})


def test_text(client) -> None:
    answer = chat(client)
    assert answer.choices[0].message.content == "Red." and answer.choices[0].finish_reason == "stop"
    done = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=5, temperature=0)
    assert done.choices[0].text.startswith(" there was") or done.choices[0].text
    assert done.usage.completion_tokens == 5


def test_streams_and_usage(client) -> None:
    *pieces, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert "".join(one.choices[0].delta.content or "" for one in pieces) == "Red."
    assert last.usage.total_tokens == last.usage.prompt_tokens + last.usage.completion_tokens
    whole = chat(client).usage
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (whole.prompt_tokens, whole.completion_tokens)


def test_async(url: str) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
            answers = await asyncio.gather(
                *(client.chat.completions.create(model=MODEL, messages=ASKED, temperature=0) for _ in range(4))
            )
        return [answer.choices[0].message.content for answer in answers]

    assert asyncio.run(ask()) == ["Red."] * 4


def test_images(client, picture_parts) -> None:
    answer = chat(client, messages=[{"role": "user", "content": picture_parts}])
    assert "red circle" in answer.choices[0].message.content


def test_logprobs(client) -> None:
    tokens = chat(client, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert tokens and all(len(one.top_logprobs) == 3 and one.logprob == one.top_logprobs[0].logprob for one in tokens)
    done = client.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=3, temperature=0, logprobs=2)
    assert len(done.choices[0].logprobs.token_logprobs) == 3


def test_stop(client) -> None:
    done = client.completions.create(model=MODEL, prompt="Once upon a time", temperature=0, max_tokens=60, stop=["."])
    assert done.choices[0].finish_reason == "stop" and "." not in done.choices[0].text


def test_seed(client) -> None:
    def draw(seed: int) -> str:
        drawn = dict(prompt="Once upon a time", temperature=1.5, max_tokens=30, seed=seed)
        return client.completions.create(model=MODEL, **drawn).choices[0].text

    assert draw(1) == draw(1) != draw(2)


def test_several_choices(client) -> None:
    assert [one.message.content for one in chat(client, n=2).choices] == ["Red.", "Red."]
    drawn = client.completions.create(model=MODEL, prompt="Once", n=3, temperature=1.5, seed=3, max_tokens=20)
    assert [one.index for one in drawn.choices] == [0, 1, 2] and len({one.text for one in drawn.choices}) > 1


def test_models_and_adapters_by_name(client, picture_parts) -> None:
    listed = {one.id for one in client.models.list()}
    assert {MODEL, "french", LOUD} <= listed and client.models.retrieve(LOUD).id == LOUD
    answer = chat(client, model=LOUD, messages=[{"role": "user", "content": picture_parts}])
    assert "RED CIRCLE" in answer.choices[0].message.content
    with pytest.raises(openai.NotFoundError):
        chat(client, model="absent")


def test_hot_loading(client, url: str, adapter: Path, picture_parts) -> None:
    loaded = httpx.post(f"{url}/load_lora_adapter", json={"lora_name": "loud", "lora_path": str(adapter)})
    assert loaded.status_code == 200, loaded.text
    answer = chat(client, model="loud", messages=[{"role": "user", "content": picture_parts}])
    assert "RED CIRCLE" in answer.choices[0].message.content
    assert httpx.post(f"{url}/unload_lora_adapter", json={"lora_name": "loud"}).status_code == 200
    with pytest.raises(openai.NotFoundError):
        chat(client, model="loud")


def test_fields_that_change_no_answer(client) -> None:
    fields = dict(metadata={"run": "7"}, store=True, user="me", service_tier="flex", safety_identifier="s")
    assert chat(client, **fields, prompt_cache_key="k").choices[0].message.content == "Red."
    assert chat(client, tools=[TOOL], tool_choice="none").choices[0].message.content == "Red."


def test_a_context_that_is_too_long(client) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, messages=[{"role": "user", "content": TOO_LONG}])
    assert caught.value.code == "context_length_exceeded" and "maximum context length" in caught.value.message


def test_fields_that_are_refused(client) -> None:
    """What would change the answer, and is not served."""
    for field, value in (
        ("modalities", ["text", "audio"]),
        ("web_search_options", {}),
        ("response_format", {"type": "xml"}),
        ("tools", [{"type": "code_interpreter"}]),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, extra_body={field: value})
        assert field in caught.value.message


def test_other_routes_are_404(client) -> None:
    for call in (
        lambda: client.moderations.create(model=MODEL, input=LOOK),
        lambda: client.audio.speech.create(model=MODEL, input=LOOK, voice="alloy"),
        lambda: client.images.generate(model=MODEL, prompt=LOOK),
        lambda: client.files.list(),
        lambda: client.batches.list(),
    ):
        with pytest.raises(openai.NotFoundError):
            call()


def test_a_model_that_generates_says_how_vectors_are_had(client) -> None:
    with pytest.raises(openai.BadRequestError, match="--runner pooling --convert embed"):
        client.embeddings.create(model=MODEL, input=LOOK)
