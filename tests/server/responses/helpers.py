"""What the tests of this folder share."""

from __future__ import annotations

import json
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.api_answers import strict

PATH = "/v1/responses"
MODEL = "quire-demo"
WHO = "Who are you?"
TALE = "There is a red star and a blue circle. Tell me a story."
GREEDY: dict[str, Any] = {"temperature": 0}
DRAWN: dict[str, Any] = {"temperature": 1.2, "seed": 5, "max_output_tokens": 24}
LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}

_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_IDS = ("id", "item_id", "call_id", "created_at", "completed_at")


def respond(http: Any, **body: Any) -> dict[str, Any]:
    """A response, which must be what the `openai` package says."""
    answer = http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    data: dict[str, Any] = answer.json()
    strict(Response, data)
    return data


def check_event(event: dict[str, Any]) -> None:
    """It must be what the `openai` package says."""
    made = _EVENT.validate_json(json.dumps(event), strict=True)
    assert made.type == event["type"]


def events_of(text: str, first: int = 0) -> list[dict[str, Any]]:
    """A stream's events in their order. first: the first one's number."""
    *parts, end = text.split("\n\n")
    assert end == ""
    events = []
    for number, part in enumerate(parts, first):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        check_event(event)
        events.append(event)
    return events


def stream(http: Any, **body: Any) -> list[dict[str, Any]]:
    answer = http.post(PATH, json={**body, "stream": True})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text)


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The items that a stream's events tell of: by their deltas, checked against what each one's end says."""
    items: list[dict[str, Any]] = []
    done: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items) == len(done)
            assert event["item"]["status"] == "in_progress"
            items.append(json.loads(json.dumps(event["item"])))
        elif kind == "output_item.done":
            assert event["output_index"] == len(items) - 1
            assert event["item"] == {**items[-1], "status": event["item"]["status"]}
            done.append(event["item"])
        elif "item_id" in event:
            assert (event["item_id"], event["output_index"]) == (items[-1]["id"], len(items) - 1)
            _add(items[-1], kind, event)
    assert len(done) == len(items)
    return done


def _add(item: dict[str, Any], kind: str, event: dict[str, Any]) -> None:
    if kind == "content_part.added":
        assert event["content_index"] == len(item["content"])
        item["content"].append(json.loads(json.dumps(event["part"])))
    elif kind == "function_call_arguments.delta":
        item["arguments"] += event["delta"]
    elif kind == "function_call_arguments.done":
        assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
    else:
        part = item["content"][event["content_index"]]
        if kind.endswith(".delta"):
            part["text"] += event["delta"]
            if "logprobs" in part:
                part["logprobs"] += event["logprobs"]
        elif kind == "content_part.done":
            assert event["part"] == part
        else:
            assert kind in ("output_text.done", "reasoning_text.done")
            assert event["text"] == part["text"] and event.get("logprobs", []) == part.get("logprobs", [])


def without_ids(data: Any) -> Any:
    """The same for every request that says the same: without names and times."""
    if isinstance(data, dict):
        return {key: without_ids(value) for key, value in data.items() if key not in _IDS}
    return [without_ids(value) for value in data] if isinstance(data, list) else data


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] if item["type"] == "message" for part in item["content"])
