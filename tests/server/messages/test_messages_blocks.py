"""From what a model says to content blocks: however it is cut, a stream's events make the blocks of the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.lib.streaming._messages import accumulate_event  # as its stream puts events together
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from quire.platform.outputs.messages.message import ArgumentsDelta, CallBegin, ContentDelta, Delta, ReasoningDelta
from quire.server.responses.anthropic_answer import ContentBlocks, content_of

_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def blocks(*deltas: Delta, shows_thinking: bool = True) -> list[dict[str, Any]]:
    made = ContentBlocks(shows_thinking)
    return content_of([*made.feed(deltas), *made.finish()])


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def test_each_kind_has_its_block() -> None:
    assert blocks(
        ReasoningDelta("hm"), ReasoningDelta("m"), ContentDelta("\n"), ContentDelta("Well"), ContentDelta(" then"),
        CallBegin(0, "a", "f"), ArgumentsDelta(0, '{"x"'), ArgumentsDelta(0, ": 1}"), ContentDelta("\n"),
        CallBegin(1, "b", "g"), ContentDelta(" "), ContentDelta("Done."),
    ) == [
        {"type": "thinking", "thinking": "hmm", "signature": ""},
        text("\nWell then"),
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
        {"type": "tool_use", "id": "b", "name": "g", "input": {}},
        text(" Done."),
    ]  # fmt: skip


def test_spaces_alone_are_no_block_beside_calls() -> None:
    assert blocks(ContentDelta(" \n")) == [text(" \n")]
    assert blocks() == []
    called = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    assert blocks(ContentDelta("\n"), CallBegin(0, "a", "f"), ArgumentsDelta(0, "{}"), ContentDelta("\n")) == [called]


def test_thinking_that_is_not_to_be_shown() -> None:
    shown = blocks(ReasoningDelta("hm"), ContentDelta("a"), shows_thinking=False)
    assert shown == [{"type": "thinking", "thinking": "", "signature": ""}, text("a")]


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ("", {}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ('{"a": 1', {"a": 1}),
        ("{a}", {"INVALID_JSON": "{a}"}),
        ("[1]", {"INVALID_JSON": "[1]"}),
    ],
)
def test_arguments_that_are_no_whole_object(arguments: str, found: dict[str, Any]) -> None:
    (call,) = blocks(CallBegin(0, "a", "f"), ArgumentsDelta(0, arguments))
    assert call["input"] == found


_TEXTS = st.text(st.sampled_from(" \nab\u00e9\U0001f426"), min_size=1, max_size=5)
_OBJECTS = st.dictionaries(st.sampled_from("xyz"), st.integers() | _TEXTS | st.booleans(), max_size=3)
_SAID = st.lists(
    st.one_of(
        st.tuples(st.just("content"), _TEXTS),
        st.tuples(st.just("reasoning"), _TEXTS),
        st.tuples(st.just("call"), _OBJECTS),
    ),
    max_size=6,
)


def _cut(said: list[tuple[str, Any]], draw: Any) -> list[Delta]:
    """What is said, in deltas of any sizes."""
    deltas: list[Delta] = []
    calls = 0
    for kind, value in said:
        whole = json.dumps(value, ensure_ascii=False) if kind == "call" else value
        if kind == "call":
            deltas.append(CallBegin(calls, f"id{calls}", "f"))
        while whole:
            size = draw(st.integers(1, len(whole)))
            part, whole = whole[:size], whole[size:]
            if kind == "call":
                deltas.append(ArgumentsDelta(calls, part))
            else:
                deltas.append(ContentDelta(part) if kind == "content" else ReasoningDelta(part))
        calls += kind == "call"
    return deltas


@settings(max_examples=150, deadline=None)
@given(_SAID, st.data())
def test_any_cut_makes_the_same_blocks_and_so_does_the_clients_package(said: list[Any], data: Any) -> None:
    want = blocks(*_cut(said, lambda sizes: 10**6))
    made = ContentBlocks(True)
    events = [event for delta in _cut(said, data.draw) for event in made.feed([delta])] + made.finish()
    assert content_of(events) == want
    head = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": []}
    usage = {"input_tokens": 1, "output_tokens": 1}
    start = {"type": "message_start", "message": {**head, "usage": usage}}
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in [start, *events]:
        typed = _EVENT.validate_json(json.dumps(event), strict=True)
        snapshot = accumulate_event(event=typed, current_snapshot=snapshot, json_bufs=buffers)
    found = [{k: v for k, v in block.to_dict().items() if v is not None} for block in snapshot.content]
    assert found == want
    Message.model_validate_json(json.dumps({**head, "content": want, "usage": usage}), strict=True)
