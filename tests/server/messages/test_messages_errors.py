"""/v1/messages: what is refused, by whom, and in which form."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from quire.server.responses.errors import ApiError
from quire.server.schemas.anthropic.call import read_messages
from tests.server.api_server import LocalServer, ServerProcess
from tests.server.messages.helpers import COUNT, MESSAGES, STAR, asked, error_of, message, refusal, sdk, user

pytestmark = pytest.mark.usefixtures("one_thread")

IGNORED = "x-quire-ignored-fields"
TEXT = {"type": "text", "text": STAR}


@pytest.fixture(scope="module")
def small(plain_model: Path, chat_model: Path) -> Iterator[LocalServer]:
    """A server with keys, a short context and small limits."""
    engine = {"model": str(chat_model), "max_model_len": 64, "num_gpu_blocks_override": 64}
    limits = {"api_keys": ("key-one", "key-two"), "admin_api_key": "the-admin", "max_request_bytes": 2000}
    with LocalServer(engine, enable_admin_routes=True, **limits) as server:
        yield server


def said(*blocks: Any, **more: Any) -> dict[str, Any]:
    return {"max_tokens": 4, "messages": [user(list(blocks))], **more}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"messages": [user("a")]}, "max_tokens: Field required"),
        ({"max_tokens": 4}, "messages: Field required"),
        ({"max_tokens": "4", "messages": [user("a")]}, "max_tokens: "),
        ({"max_tokens": 0, "messages": [user("a")]}, "max_tokens"),
        ({"max_tokens": 4, "messages": []}, "messages: has 0 entries"),
        ({"max_tokens": 4, "messages": ["a"]}, "messages[0]: "),
        ({"max_tokens": 4, "messages": [{"role": "tool", "content": "a"}]}, "messages[0].role: must be user, "),
        ({"max_tokens": 4, "messages": [{"role": "user"}]}, "messages[0].content: must be a text or a list"),
        ({"max_tokens": 4, "messages": [{**user("a"), "name": "x"}]}, "messages[0].name: there is no such field"),
        (said({"type": "text"}), "messages[0].content[0].text: Field required"),
        (said({"text": "a"}), "messages[0].content[0]: must be an object with a type"),
        (said({"type": "text", "text": 5}), "messages[0].content[0].text: "),
        (said(TEXT, {**TEXT, "more": 1}), "messages[0].content[1].more: there is no such field"),
        (said({"type": "server_tool_use"}), "messages[0].content[0]: 'server_tool_use' is not served here"),
        (said({"type": "thinking", "thinking": "", "signature": ""}), "'thinking' is not served here; user messages"),
        (said({"type": "image", "source": {"type": "file", "file_id": "f"}}), "'file' is no source of images here"),
        (said({"type": "image", "source": {"type": "base64", "data": "x"}}), "source.media_type: Field required"),
        (said({"type": "document", "source": {"type": "url", "url": "u"}}), "'url': of documents only text is served"),
        (said(TEXT, system=[{"type": "image"}]), "system[0]: 'image' is not served here; system messages have text"),
        (said(TEXT, tempe=1), "tempe: there is no such field"),
        (said(TEXT, temperature=-1), "temperature"),
        (said(TEXT, stop_sequences=[""]), "stop_sequences"),
        (said(TEXT, thinking={"type": "between_tools"}), "thinking.type: must be enabled, disabled, adaptive"),
        (said(TEXT, thinking={"type": "enabled"}), "thinking.budget_tokens: Field required"),
        (said(TEXT, tool_choice={"type": "any"}), "tool_choice: there are no tools"),
        (said(TEXT, tool_choice={"type": "auto", "name": "f"}), "tool_choice.name: there is no such field"),
        (said(TEXT, tool_choice={"type": "some"}), "tool_choice.type: must be auto, any, tool, none"),
        (said(TEXT, tools=[{"type": "web_search_20250305", "name": "web_search"}]), "tools[0]: 'web_search_20250305'"),
        (said(TEXT, tools=[{"name": "f"}]), "tools[0].input_schema: Field required"),
        (said(TEXT, output_config={"format": {"type": "xml"}}), 'output_config.format: must be {"type": "json_schema"'),
        (said(TEXT, output_config={"effort": "huge"}), "output_config.effort: "),
        (said(TEXT, metadata={"user": "x"}), "metadata.user: there is no such field"),
        (said(TEXT, container="c"), "container: no code runs here"),
        (said(TEXT, mcp_servers=[{}]), "mcp_servers: tools are called by the client"),
        (said(TEXT, speed="fast"), "speed: there is one speed"),
        (said(TEXT, context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}), "context_management: "),
        (said(TEXT, logit_bias={"a": 1}), "logit_bias"),
    ],
)
def test_what_is_wrong_is_named_as_the_client_has_it(http: Any, body: dict[str, Any], told: str) -> None:
    assert told in refusal(http, **body)


def test_each_call_has_one_result(http: Any) -> None:
    def call(name: str) -> dict[str, Any]:
        return {"role": "assistant", "content": [TEXT, {"type": "tool_use", "id": name, "name": "f", "input": {}}]}

    def result(*names: str) -> dict[str, Any]:
        return user([{"type": "tool_result", "tool_use_id": name, "content": "b"} for name in names])

    first, text = user("a"), {"role": "assistant", "content": "a"}
    missing = "messages[1].content[1]: the tool_use with id 'x' needs a tool_result in the message after it."
    stray = "content[0].tool_use_id: the assistant's turn before it has no tool_use with id 'x'."
    for messages, told in (
        ([first, call("x")], missing),
        ([first, call("x"), user("b")], missing),
        ([first, call("x"), user("b"), text, result("x")], missing),
        ([first, call("x"), result("y")], "messages[2].content[0].tool_use_id: the assistant's turn before it has no "),
        ([result("x")], f"messages[0].{stray}"),
        ([first, text, result("x")], f"messages[2].{stray}"),
        ([first, call("x"), result("x"), text, result("x")], f"messages[4].{stray}"),
        ([first, call("x"), result("x", "x")], "messages[2].content[1].tool_use_id: 'x' has a tool_result already"),
        ([first, call("x"), call("x"), result("x")], "messages[2].content[1].id: the call 'x' has this id too"),
    ):
        assert refusal(http, max_tokens=4, messages=messages).startswith(told)
    assert refusal(http, path=COUNT, messages=[first, call("x")]) == missing


def test_what_changes_nothing_is_named_in_the_header(http: Any) -> None:
    plain = message(http, **asked())
    cached = {"type": "text", "text": STAR, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    body = asked(
        [cached], cache_control={"type": "ephemeral"}, service_tier="standard_only", inference_geo="eu", tools=[],
        context_management={"edits": []}, speed="standard", metadata={"user_id": "someone"},
        output_config={"effort": "low"},
    )  # fmt: skip
    response = http.post(
        MESSAGES, json=body, headers={"anthropic-version": "2023-06-01", "anthropic-beta": "context-1m-2025-08-07"}
    )
    assert response.status_code == 200, response.text
    assert response.json()["content"] == plain["content"]
    assert response.headers[IGNORED] == (
        "cache_control, inference_geo, messages[].content[].cache_control, output_config.effort"
    )


def test_errors_are_those_of_the_clients_package(demo: ServerProcess) -> None:
    with sdk(demo.url) as client:
        for model, kind in (("nobody", anthropic.NotFoundError), ("quire-demo", anthropic.BadRequestError)):
            with pytest.raises(kind) as raised:
                client.messages.create(model=model, max_tokens=4 if model == "nobody" else -1, messages=[user("a")])  # type: ignore[list-item]
            assert raised.value.request_id and raised.value.body["type"] == "error"  # type: ignore[index]


def test_no_such_route_and_no_such_method(http: Any) -> None:
    assert error_of(http.post("/v1/messages/batches", json={}))["type"] == "not_found_error"
    assert http.get(MESSAGES).status_code == 405 and error_of(http.get(MESSAGES))["type"] == "invalid_request_error"
    response = http.post(MESSAGES, content=b"{", headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and "no JSON object" in error_of(response)["message"]


# -- keys and limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {"x-api-key": "key-one"},
        {"Authorization": "Bearer key-two"},
        {"x-api-key": "key-one", "Authorization": "Bearer none"},
        {"x-api-key": "none", "Authorization": "Bearer key-two"},
        {"x-api-key": "the-admin"},
    ],
)
def test_either_header_brings_the_key(small: LocalServer, headers: dict[str, str]) -> None:
    with small.http() as http:
        assert http.post(MESSAGES, json=asked("a", max_tokens=1), headers=headers).status_code == 200
        assert http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers", [{}, {"x-api-key": "none"}, {"x-api-key": ""}, {"Authorization": "key-one"}, {"x-api-key": "key-on"}]
)
def test_without_one_there_is_no_answer(small: LocalServer, headers: dict[str, str]) -> None:
    with small.http() as http:
        for path in (MESSAGES, COUNT):
            response = http.post(path, json=asked("a"), headers=headers)
            assert response.status_code == 401 and error_of(response)["type"] == "authentication_error"


def test_the_admins_routes_take_the_admins_key_in_either_header(small: LocalServer) -> None:
    with small.http() as http:
        assert http.post("/reset_prefix_cache", headers={"x-api-key": "key-one"}).status_code == 403
        assert http.post("/reset_prefix_cache", headers={"x-api-key": "the-admin"}).status_code == 200


def test_results_belong_to_the_key_that_asked(small: LocalServer) -> None:
    with small.http() as http:
        one, two = {"x-api-key": "key-one"}, {"x-api-key": "key-two"}
        asks = {"prompt": "a", "max_tokens": 1, "wait": False}
        name = http.post("/generate", json=asks, headers=one).json()["request_id"]
        assert http.get(f"/result/{name}", headers=two).status_code == 404
        assert http.get(f"/result/{name}", headers=one).status_code in (200, 202)
        assert http.get(f"/result/{name}", headers={"Authorization": "Bearer key-one"}).status_code in (200, 202)


def test_too_much(small: LocalServer) -> None:
    with small.http(headers={"x-api-key": "key-one"}) as http:
        response = http.post(MESSAGES, json=asked("a" * 3000))
        assert response.status_code == 413 and error_of(response)["type"] == "request_too_large"
        told = refusal(http, **asked("a" * 200))
        assert told.startswith("prompt is too long: ") and "maximum context length" in told


def test_a_server_that_sleeps_is_overloaded(small: LocalServer) -> None:
    with small.http(headers={"x-api-key": "the-admin"}) as http:
        assert http.post("/sleep").status_code == 200
        try:
            response = http.post(MESSAGES, json=asked("a"))
            assert response.status_code == 529 and error_of(response)["type"] == "overloaded_error"
            assert response.headers["retry-after"]
        finally:
            assert http.post("/wake_up").status_code == 200
        assert http.post(MESSAGES, json=asked("a", max_tokens=1)).status_code == 200


def test_a_full_queue(plain_model: Path) -> None:
    """429 as everywhere, and in Anthropic's form."""
    engine = {"model": str(plain_model), "num_gpu_blocks_override": 64, "max_num_seqs": 1, "max_model_len": 128}
    with LocalServer(engine, max_queue=0, chat_template="{{ messages[0].content }}") as server, server.http() as http:
        long = {**asked("a", max_tokens=100), "stream": True}
        with server.held(), http.stream("POST", MESSAGES, json=long):
            response = http.post(MESSAGES, json=asked("a", max_tokens=1))
            assert response.status_code == 429 and error_of(response)["type"] == "rate_limit_error"
            assert response.headers["retry-after"]
        server.until_idle()


def test_a_lenient_server_names_what_it_passes_over(chat_model: Path) -> None:
    engine = {"model": str(chat_model), "num_gpu_blocks_override": 64, "max_model_len": 128}
    with LocalServer(engine, unknown_fields="warn") as server, server.http() as http:
        plain = message(http, **asked("a"))
        response = http.post(MESSAGES, json=asked("a", frobnicate=1, container="c", speed="fast"))
        assert response.json()["content"] == plain["content"]
        assert response.headers[IGNORED] == "container, frobnicate, speed"
        assert "messages[0].content[0].more" in refusal(http, **said({**TEXT, "more": 1}))


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_long_conversations_of_one_role_are_read_in_their_length(role: str) -> None:
    """Each of 4,000 messages is joined to those before it; too many are refused before that."""
    body = read_messages({"max_tokens": 1, "messages": [{"role": role, "content": "x" * 5000}] * 4000}, False)
    content = body.chat.messages[0]["content"]
    assert len(body.chat.messages) == 1
    assert (sum(len(part["text"]) for part in content) if role == "user" else len(content)) == 20_000_000
    with pytest.raises(ApiError, match="have 20000 blocks, and the limit is 10000"):
        read_messages({"max_tokens": 1, "messages": [{"role": role, "content": ["x"]}] * 10_000}, False)


def test_a_thread_is_refused_so_that_the_packages_tool_runner_goes_on_without(demo: ServerProcess) -> None:
    """It asks the server to keep the conversation, and sends all messages where the error has these details."""

    def loud(text: str) -> str:
        return text.upper()

    tool = anthropic.beta_tool(loud)
    with sdk(demo.url) as client:
        asked_for = {"model": "quire-demo", "max_tokens": 2, "messages": [user("a")], "tool_choice": {"type": "none"}}
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.beta.messages.create(**asked_for, thread={"type": "create"})
        assert caught.value.body["error"]["details"]["error_code"] == "thread_unsupported_request"
        asked_for["extra_body"] = {"ignore_eos": True}  # or the model may end by itself
        (last,) = client.beta.messages.tool_runner(**asked_for, tools=[tool])
    assert last.stop_reason == "max_tokens" and last.usage.output_tokens == 2
