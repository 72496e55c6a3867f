"""Requests of /v1/messages for tests, and what its streams come down to."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import Any

from anthropic import Anthropic
from anthropic.types import Message, MessageStreamEvent, RawMessageStreamEvent
from pydantic import TypeAdapter

from quire.demo import picture_path
from tests.server.api_server import KEY

MESSAGES, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
STAR = "There is a red star. What color is the star?"
PICTURE = base64.b64encode(picture_path().read_bytes()).decode()

_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def asked(content: Any = STAR, **fields: Any) -> dict[str, Any]:
    """A body that is answered in the same way each time."""
    messages = fields.pop("messages", [user(content)])
    return {"max_tokens": 16, "temperature": 0, "messages": messages, **fields}


def sdk(url: str, **options: Any) -> Anthropic:
    return Anthropic(base_url=url, **{"api_key": KEY, "max_retries": 0, "timeout": 60, **options})


def message(http: Any, **body: Any) -> dict[str, Any]:
    """An answer in one piece, which must be what the package's type says."""
    response = http.post(MESSAGES, json=body)
    assert response.status_code == 200, response.text
    assert response.headers["request-id"] == response.headers["x-request-id"]
    Message.model_validate_json(response.text, strict=True)
    return response.json()


def events(http: Any, **body: Any) -> list[dict[str, Any]]:
    """A stream's events without the ping; each must be what the package's types say, and be named by its type."""
    response = http.post(MESSAGES, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *blocks, end = response.text.split("\n\n")
    assert end == ""
    found = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        if event["type"] != "ping":
            _EVENT.validate_json(data.removeprefix("data: "), strict=True)
            found.append(event)
    assert [event["type"] for event in found[:1]] == ["message_start"] and found[-1] == {"type": "message_stop"}
    return found


def streamed(client: Anthropic, **body: Any) -> tuple[Message, list[MessageStreamEvent]]:
    """What the package's own accumulator makes of a stream, and its events."""
    more = {name: body.pop(name) for name in list(body) if name in ("temperature", "top_k", "seed")}
    with client.messages.stream(**{"model": "quire-demo", **body}, extra_body=more) as stream:
        seen: list[Any] = list(stream)
        return stream.get_final_message(), seen


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """A message without its id, and with its prompt's tokens in one number: others may have left some in the cache."""
    usage = {name: value for name, value in answer["usage"].items() if value is not None}
    prompt = usage.pop("input_tokens") + usage.pop("cache_read_input_tokens")
    kept = {name: value for name, value in answer.items() if name != "id" and value is not None}
    return {**kept, "usage": {**usage, "prompt": prompt}}


def error_of(response: Any) -> dict[str, Any]:
    """An error that must have Anthropic's form."""
    body = response.json()
    assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"} and body["error"]["message"]
    assert body["request_id"] == response.headers["request-id"]
    return body["error"]


def refusal(http: Any, path: str = MESSAGES, status: int = 400, **body: Any) -> str:
    """The message of an answer that must be an error."""
    response = http.post(path, json=body)
    assert response.status_code == status, response.text
    return str(error_of(response)["message"])


def text_of(answer: dict[str, Any]) -> str:
    return "".join(block["text"] for block in answer["content"] if block["type"] == "text")


def deltas(found: Iterable[dict[str, Any]], kind: str, name: str) -> str:
    """The texts of a stream's deltas of one type."""
    parts = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    return "".join(part[name] for part in parts if part["type"] == kind)
