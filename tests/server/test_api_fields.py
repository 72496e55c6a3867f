"""What clients send beside what they ask for: fields that change nothing, roles, parts of messages; long contexts."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from quire.demo import picture_path
from tests.server.api_answers import events, joined, post, refusal
from tests.server.api_server import LocalServer, ServerProcess

pytestmark = pytest.mark.usefixtures("one_thread")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
WHO: list[dict[str, Any]] = [{"role": "user", "content": "Who are you?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
IGNORED = "x-quire-ignored-fields"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
PICTURE = "data:image/png;base64," + base64.b64encode(picture_path().read_bytes()).decode()
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}:{{ message['content'] }} {{ message.mood }}</s>{% endfor %}"
    "{{ reasoning_effort }}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def asked(http: Any, messages: Any = WHO, **fields: Any) -> tuple[str, str | None]:
    """(the answer, the fields that the header names)"""
    response = http.post(CHAT, json={"messages": messages, **GREEDY, **fields})
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"], response.headers.get(IGNORED)


# -- named in the header and the log -------------------------------------------------------------------------------


def test_what_changes_nothing_is_named_in_the_log_too(demo: ServerProcess, http: Any) -> None:
    plain, none = asked(http)
    body = {"messages": WHO, **GREEDY, "metadata": {"a": "secret"}, "store": True, "service_tier": "flex"}
    response = http.post(CHAT, json=body, headers={"X-Request-Id": "named-fields"})
    assert response.headers[IGNORED] == "metadata, service_tier, store"
    assert (response.json()["choices"][0]["message"]["content"], none) == (plain, None)
    line = demo.line_of("named-fields")
    assert "ignored='metadata, service_tier, store'" in line and "secret" not in line


def test_streams_name_them_before_they_begin(http: Any) -> None:
    response = http.post(CHAT, json={"messages": WHO, **GREEDY, "store": True, "stream": True})
    assert (response.status_code, response.headers[IGNORED]) == (200, "store")


def test_further_keys_of_messages_and_parts(http: Any) -> None:
    plain, _ = asked(http)
    part = {"type": "text", "text": "Who are you?", "cache_control": {"type": "ephemeral"}, "more": 1, "none": None}
    message = {"role": "user", "content": [part], "nickname": "ann", "annotations": [], "refusal": None}
    text, ignored = asked(http, [message])
    assert text == plain
    assert ignored == "messages[].content[].cache_control, messages[].content[].more, messages[].nickname"


def test_detail_changes_nothing(http: Any) -> None:
    def look(**fields: Any) -> tuple[str, str | None]:
        image = {"type": "image_url", "image_url": {"url": PICTURE, **fields}}
        return asked(http, [{"role": "user", "content": [image, {"type": "text", "text": "What color is it?"}]}])

    plain, none = look()
    assert none is None and look(detail="high") == look(detail="auto") == (plain, None)
    assert look(detail="low") == (plain, "messages[].content[].image_url.detail")
    assert look(format="image/png") == (plain, "messages[].content[].image_url.format")


def test_tools_that_are_not_to_be_used_are_not_used(http: Any) -> None:
    """The template is not told of them, and nothing is called."""
    for fields in ({"tools": TOOLS, "tool_choice": "none"}, {"functions": [{"name": "f"}], "function_call": "none"}):
        text, ignored = asked(http, **fields)
        assert text and ignored is None


def test_a_header_bounds_what_a_client_writes(http: Any) -> None:
    part = {"type": "text", "text": "Who are you?", "x\r\nSet-Cookie: a=b": 1, "\u2028é" * 200: 1}
    many = {f"key{number:03d}": 1 for number in range(500)}
    response = http.post(CHAT, json={"messages": [{"role": "user", "content": [{**part, **many}]}], **GREEDY})
    assert response.status_code == 200 and "set-cookie" not in response.headers
    shown = response.headers[IGNORED]
    assert len(shown) < 1500 and shown.endswith("+48") and shown.isascii() and shown.isprintable()


# -- roles and reasoning -------------------------------------------------------------------------------------------


def test_a_developers_message_is_the_systems_where_the_template_does_not_know_it(http: Any) -> None:
    told = [{"role": "system", "content": "You shout."}, *WHO]
    developer = [{**told[0], "role": "developer"}, *WHO]
    assert asked(http, developer) == asked(http, told)
    assert post(http, "/tokenize", messages=developer) == post(http, "/tokenize", messages=told)
    assert refusal(http, CHAT, messages=[{"role": "wizard", "content": "a"}, *WHO])["param"] is None


@pytest.fixture(scope="module")
def lenient(chat_model: Path) -> Iterator[Any]:
    """A server that passes over what it does not serve, and whose template knows reasoning_effort and `mood`."""
    engine = {"model": str(chat_model), "max_model_len": 256, "num_gpu_blocks_override": 64}
    with LocalServer(engine, unknown_fields="warn", chat_template=TEMPLATE) as server:
        with server.http() as http:
            yield http
        server.until_idle()


def test_reasoning_effort_goes_to_a_template_that_takes_it(http: Any, lenient: Any) -> None:
    def prompt(**fields: Any) -> str:
        ids = post(lenient, CHAT, messages=WHO, return_token_ids=True, max_tokens=1, **fields)["prompt_token_ids"]
        return post(lenient, "/detokenize", tokens=ids)["prompt"]

    assert "high<s>assistant:" in prompt(reasoning_effort="high")
    assert prompt(reasoning_effort="high") == prompt(chat_template_kwargs={"reasoning_effort": "high"})
    both = {"reasoning_effort": "high", "chat_template_kwargs": {"reasoning_effort": "low"}}
    assert refusal(lenient, CHAT, messages=WHO, **both)["param"] == "reasoning_effort"
    assert asked(lenient, reasoning_effort="low")[1] is None
    plain, _ = asked(http)  # the bundled template has no such variable, and nothing to reason about
    assert asked(http, reasoning_effort="low") == (plain, "reasoning_effort")


def test_keys_of_messages_that_the_template_reads_are_not_passed_over(lenient: Any) -> None:
    text, ignored = asked(lenient, [{**WHO[0], "mood": "happy", "name": "ann"}])
    assert ignored == "messages[].name"
    assert text != asked(lenient)[0]


# -- --unknown-fields warn -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_lenient_server_names_what_it_passes_over(lenient: Any, path: str) -> None:
    body = {"messages": WHO} if path == CHAT else {"prompt": "abc"}
    want = post(lenient, path, **body, **GREEDY)["choices"]
    more = {"frobnicate": 5, "typical_p": 0.5, "a b\n": 1}
    response = lenient.post(path, json={**body, **GREEDY, **more})
    assert response.status_code == 200, response.text
    assert response.json()["choices"] == want
    assert response.headers[IGNORED] == "a?b?, frobnicate, typical_p"


def test_a_lenient_server_still_refuses_what_is_wrong(lenient: Any) -> None:
    for field, value in (("temperature", -1), ("temperature", "warm"), ("n", 0), ("messages", "hello")):
        assert refusal(lenient, CHAT, **{"messages": WHO, field: value, "frobnicate": 1})["param"] == field
    response = lenient.post(CHAT, json={"messages": WHO, "temperature": -1, "frobnicate": 1})
    assert response.headers[IGNORED] == "frobnicate"


def test_unknown_fields_of_one_request_are_not_anothers(lenient: Any) -> None:
    large = lenient.post(COMPLETIONS, json={"prompt": "abc", **GREEDY, "big": "x" * 200_000})  # read by a worker
    assert (large.status_code, large.headers[IGNORED]) == (200, "big")
    many = {f"field{number}": number for number in range(1000)}
    response = lenient.post(COMPLETIONS, json={"prompt": "abc", **GREEDY, **many})
    assert response.status_code == 200 and response.headers[IGNORED].count(",") <= 16
    assert IGNORED not in lenient.post(COMPLETIONS, json={"prompt": "abc", **GREEDY}).headers


# -- contexts that are too long ------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("words", [3000, 400_000], ids=["in tokens", "in characters"])
def test_a_context_that_is_too_long_is_told_in_openais_words(client: OpenAI, stream: bool, words: int) -> None:
    text = "red " * words
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(
            model="quire-demo", messages=[{"role": "user", "content": text}], max_tokens=5, stream=stream
        )
    error = caught.value
    assert (error.code, error.param, error.type) == ("context_length_exceeded", "messages", "invalid_request_error")
    assert error.body["message"].startswith(  # type: ignore[index]
        "This model's maximum context length is 2048 tokens. However, your messages resulted in "
    )
    assert "red red" not in str(error) and "Please reduce the length of the messages." in str(error)
    with pytest.raises(BadRequestError) as caught:
        client.completions.create(model="quire-demo", prompt=["a", text], max_tokens=5, stream=stream)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
    assert "maximum context length is 2048 tokens. However, your prompt resulted in" in str(caught.value)


def test_a_context_that_images_make_too_long(http: Any) -> None:
    image = {"type": "image_url", "image_url": {"url": PICTURE}}
    messages = [{"role": "user", "content": [image] * 40}]
    error = refusal(http, CHAT, messages=messages, max_tokens=5)
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 2048 tokens" in error["message"] and "image" in error["message"]


def test_one_token_too_many(http: Any) -> None:
    assert refusal(http, COMPLETIONS, prompt=[5] * 2048)["code"] == "context_length_exceeded"
    answer = post(http, COMPLETIONS, prompt=[5] * 2047, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 1


# -- equal choices -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("path", "body"), [(COMPLETIONS, {"prompt": "Once upon a time"}), (CHAT, {"messages": WHO})])
def test_several_choices_without_chance_are_equal(http: Any, path: str, body: dict[str, Any]) -> None:
    one = post(http, path, **body, **GREEDY, logprobs=1 if path == COMPLETIONS else True)
    three = post(http, path, **body, **GREEDY, n=3, logprobs=1 if path == COMPLETIONS else True)
    assert [{**choice, "index": 0} for choice in three["choices"]] == one["choices"] * 3
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert three["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]
    best = post(http, path, **body, **GREEDY, best_of=3, logprobs=1 if path == COMPLETIONS else True)
    assert best["choices"] == one["choices"]
    assert sorted(joined(events(http, path, **body, **GREEDY, n=3))) == [0, 1, 2]
