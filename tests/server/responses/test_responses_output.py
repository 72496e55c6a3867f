"""From what an answer says to items and events: reasoning, text between calls, spaces."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter

from quire.platform.outputs.messages.message import (
    ArgumentsDelta,
    CallBegin,
    ContentDelta,
    Delta,
    ReasoningDelta,
    collect,
)
from quire.server.responses.responses_items import OutputItems
from tests.server.responses.helpers import check_event, put_together, without_ids

_ITEM: TypeAdapter[object] = TypeAdapter(ResponseOutputItem)

words = st.text(st.sampled_from("ab \n{}é"), max_size=6)
# An answer: what it says, piece by piece; a call is a name and its arguments.
answers = st.lists(
    st.one_of(
        st.tuples(st.just("content"), words),
        st.tuples(st.just("reasoning"), words.filter(bool)),
        st.tuples(st.just("call"), words),
    ),
    max_size=6,
)


def deltas_of(answer: list[tuple[str, str]], cut: bool) -> list[Delta]:
    """As a parser gives them; cut: letter by letter."""
    deltas: list[Delta] = []
    calls = 0
    for kind, text in answer:
        parts = list(text) if cut else [text] if text else []
        if kind == "content":
            deltas += [ContentDelta(part) for part in parts]
        elif kind == "reasoning":
            deltas += [ReasoningDelta(part) for part in parts]
        else:
            deltas.append(CallBegin(calls, f"call-{calls}", "draw"))
            deltas += [ArgumentsDelta(calls, part) for part in parts]
            calls += 1
    return deltas


def told(deltas: list[Delta], status: str = "completed") -> tuple[list[dict], list[dict]]:  # type: ignore[type-arg]
    """(items, events)"""
    items, events = OutputItems("name"), []
    for delta in deltas:
        events += items.write([delta])
    events += items.end(status)
    return items.items(), events


@given(answers)
@settings(max_examples=300, deadline=None)
def test_events_add_up_to_the_items_however_the_answer_is_cut(answer: list[tuple[str, str]]) -> None:
    whole, _ = told(deltas_of(answer, False))
    items, events = told(deltas_of(answer, True))
    assert items == whole
    for number, event in enumerate(events):
        check_event(json.loads(json.dumps({**event, "sequence_number": number})))
    assert put_together(json.loads(json.dumps(events))) == items
    for item in items:
        _ITEM.validate_json(json.dumps(item), strict=True)
    assert len({item["id"] for item in items}) == len(items)


@given(answers)
@settings(max_examples=300, deadline=None)
def test_items_say_what_the_message_says(answer: list[tuple[str, str]]) -> None:
    """All but spaces of it: those that stand alone are no item."""
    deltas = deltas_of(answer, False)
    message, (items, _) = collect(deltas), told(deltas)

    def text(kind: str) -> str:
        return "".join(part["text"] for item in items if item["type"] == kind for part in item["content"])

    calls = [(item["call_id"], item["name"], item["arguments"]) for item in items if item["type"] == "function_call"]
    assert calls == [(call.id, call.name, call.arguments) for call in message.tool_calls]
    assert "".join(text("message").split()) == "".join((message.content or "").split())
    assert text("reasoning") == (message.reasoning or "")
    if not calls:
        assert text("message") == (message.content or "")


def test_an_answer_of_everything() -> None:
    answer = [("reasoning", "Hm."), ("content", "\n"), ("content", "I draw. "), ("call", "{}"), ("content", "\n")]
    answer += [("call", '{"a": 1}'), ("content", " done"), ("content", " ")]
    items, events = told(deltas_of(answer, False), "incomplete")
    assert [(item["type"], item["status"]) for item in items] == [
        ("reasoning", "completed"),
        ("message", "completed"),
        ("function_call", "completed"),
        ("function_call", "completed"),
        ("message", "incomplete"),
    ]
    assert [item["content"][0]["text"] for item in items if item["type"] == "message"] == ["\nI draw. ", " done "]
    kinds = [event["type"].removeprefix("response.") for event in events if event["output_index"] == 3]
    assert kinds == [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip


def test_an_answer_of_nothing_is_an_empty_text() -> None:
    for answer in ([], [("reasoning", "Hm.")], [("content", " ")]):
        items, _ = told(deltas_of(answer, False))
        assert items[-1]["type"] == "message"
        assert items[-1]["content"][0]["text"] == "".join(text for kind, text in answer if kind == "content")
    assert [without_ids(item)["type"] for item in told(deltas_of([("call", "{}")], False))[0]] == ["function_call"]


def test_logprobs_go_with_the_text() -> None:
    items = OutputItems("name")
    one, two, three = ({"token": text, "logprob": -1.0, "bytes": [], "top_logprobs": []} for text in "abc")
    items.write([ContentDelta(" ")], [one])
    items.write([ContentDelta("b")], [two])
    items.write([], [three])
    items.end("completed")
    (part,) = items.items()[0]["content"]
    assert (part["text"], part["logprobs"]) == (" b", [one, two, three])
