"""Chat completions: texts and pictures."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from PIL import Image

from quire import LLM
from quire.demo import picture_path
from tests.server.api_answers import conversed, post, refusal
from tests.server.chat.helpers import GREEDY, LOOK, MODEL, PATH, SEEN, STORY, WHO, Messages, data_url, seen

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def turned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another picture."""
    path = tmp_path_factory.mktemp("pictures") / "turned.png"
    Image.open(picture_path()).rotate(90).save(path)
    return path


@pytest.mark.parametrize("messages", [WHO, STORY, LOOK], ids=["short", "turns", "picture"])
def test_a_conversation_is_answered(client: OpenAI, llm: LLM, messages: Messages) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=messages, **GREEDY)
    want = conversed(llm, messages, **GREEDY)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", want.outputs[0].text)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (answer.object, answer.model) == ("chat.completion", MODEL) and answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(want.prompt_token_ids)
    assert answer.usage.completion_tokens == len(want.outputs[0].token_ids)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_picture_is_seen(client: OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=LOOK, **GREEDY)
    assert answer.choices[0].message.content == SEEN


def test_texts_may_be_parts(http: Any) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "Who are you?"}]}]
    assert post(http, PATH, messages=parts, **GREEDY)["choices"] == post(http, PATH, messages=WHO, **GREEDY)["choices"]


def test_pictures_stand_where_their_parts_do(http: Any, llm: LLM, turned: Path) -> None:
    first = seen(picture_path(), "What is this?", turned, "And this?")
    second = seen(turned, "What is this?", picture_path(), "And this?")
    for messages in (first, second):
        (choice,) = post(http, PATH, messages=messages, return_token_ids=True, max_tokens=30, **GREEDY)["choices"]
        want = conversed(llm, messages, max_tokens=30, **GREEDY).outputs[0]
        assert choice["token_ids"] == list(want.token_ids)
    tops = [post(http, PATH, messages=m, logprobs=True, max_tokens=1, **GREEDY)["choices"] for m in (first, second)]
    assert tops[0][0]["logprobs"] != tops[1][0]["logprobs"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": data_url(picture_path()), "detail": "auto"}},
        {"type": "image_url", "image_url": {"url": data_url(picture_path()), "detail": "high"}},
        {"type": "image_url", "image_url": data_url(picture_path())},
        {"type": "input_image", "image_url": data_url(picture_path())},
        {"type": "image", "url": data_url(picture_path())},
    ],
)
def test_ways_to_give_a_picture(http: Any, part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What do you see?"}]}]
    assert post(http, PATH, messages=messages, **GREEDY)["choices"][0]["message"]["content"] == SEEN


@pytest.mark.parametrize("stream", [False, True])
def test_a_picture_comes_again_by_its_uuid(http: Any, stream: bool) -> None:
    question = {"type": "text", "text": "What do you see?"}
    name = f"seen-{stream}"
    unknown = [{"role": "user", "content": [{"type": "image_url", "image_url": None, "uuid": name}, question]}]
    assert f"nothing is known of the uuid '{name}'" in refusal(http, PATH, messages=unknown, stream=stream)["message"]
    for part in ({"image_url": {"url": data_url(picture_path())}}, {"image_url": None}, {}):
        messages = [{"role": "user", "content": [{"type": "image_url", "uuid": name, **part}, question]}]
        assert post(http, PATH, messages=messages, **GREEDY)["choices"][0]["message"]["content"] == SEEN


def test_a_marker_that_somebody_typed_stays_text(http: Any, llm: LLM) -> None:
    messages = [{"role": "user", "content": "<|image|> What do you see?"}]
    answer = post(http, PATH, messages=messages, max_tokens=8, return_token_ids=True, **GREEDY)
    assert answer["choices"][0]["token_ids"] == list(
        conversed(llm, messages, max_tokens=8, **GREEDY).outputs[0].token_ids
    )


@pytest.mark.parametrize("model", ["french", "shout"])
def test_an_adapter_answers_by_its_name(client: OpenAI, llm: LLM, model: str) -> None:
    for messages in (LOOK, WHO):
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=60, **GREEDY)
        assert answer.model == model
        assert (
            answer.choices[0].message.content
            == conversed(llm, messages, model, max_tokens=60, **GREEDY).outputs[0].text
        )
    assert answer.choices[0].message.content != conversed(llm, WHO, max_tokens=60, **GREEDY).outputs[0].text


def test_every_name_of_the_base_model_is_the_base_model(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="org/quire", messages=LOOK, **GREEDY)
    assert (answer.model, answer.choices[0].message.content) == ("org/quire", SEEN)


BAD_URLS = {
    "no image": "data:image/png;base64," + base64.b64encode(b"not a picture").decode(),
    "cut off": data_url(picture_path())[:400],
    "no base64": "data:image/png;base64,@@@",
    "no data": "data:image/png;base64,",
    "a file": picture_path().as_uri(),
    "a host": "http://127.0.0.1:9/picture.png",
    "no URL": "picture.png",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("url", BAD_URLS.values(), ids=BAD_URLS)
def test_a_bad_picture_is_the_callers_fault(client: OpenAI, url: str, stream: bool) -> None:
    messages: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=messages, stream=stream)
    assert caught.value.type == "invalid_request_error"
    assert "image" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ([{"type": "image_url", "image_url": {"url": data_url(picture_path()), "detail": "lowest"}}], "detail"),
        ([{"type": "image_url", "image_url": {"url": data_url(picture_path()), "max_pixels": 5}}], "max_pixels"),
        ([{"type": "image_url"}], "image_url"),
        ([{"type": "text", "text": "a", "image_url": {"url": "b"}}], "one content"),
        ([{"type": "text"}], "text"),
        ([{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}], "input_audio"),
        ([{"text": "a"}], "type"),
        (["a"], "object"),
        (5, "content"),
        (None, "content"),
    ],
)
def test_malformed_content_is_refused(http: Any, content: Any, word: str) -> None:
    for fields in ({}, {"stream": True}, {"echo": True, "continue_final_message": True}):
        role = "assistant" if "echo" in fields and content is not None else "user"
        error = refusal(http, PATH, messages=[{"role": role, "content": content}], **fields)
        assert error["param"] == "messages" and word in error["message"]


@pytest.mark.parametrize(
    "message",
    [
        {"role": "tool", "content": "5", "tool_call_id": 5},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "type": "function"}]},
        {"content": "no role"},
        {"role": 5, "content": "a"},
        {"role": "x" * 100, "content": "a"},
    ],
)
def test_malformed_messages_are_refused(http: Any, message: dict[str, Any]) -> None:
    assert refusal(http, PATH, messages=[*WHO, message])["param"] == "messages"


def test_a_role_that_the_template_refuses(http: Any) -> None:
    assert "Unknown role: judge" in refusal(http, PATH, messages=[{"role": "judge", "content": "a"}])["message"]
