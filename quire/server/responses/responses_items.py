"""What an answer says -> the items of a response, and the events of a stream that tell of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from quire.platform.outputs.messages.message import (
    ArgumentsDelta,
    CallBegin,
    ContentDelta,
    Delta,
    ReasoningDelta,
)

Event = dict[str, Any]  # "type" and its fields, without sequence_number
Logprobs = Sequence[dict[str, Any]]  # of tokens, as /v1/chat/completions has them


class _Open:
    """An item in the making. head: what is known of it from the beginning; text: of its one part, or its arguments."""

    def __init__(self, place: int, head: dict[str, Any]) -> None:
        self.place = place
        self.head = head
        self.texts: list[str] = []
        self.logprobs: list[dict[str, Any]] = []

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def part(self) -> dict[str, Any]:
        if self.head["type"] == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def item(self, status: str) -> dict[str, Any]:
        if self.head["type"] == "function_call":
            return {**self.head, "arguments": self.text, "status": status}
        return {**self.head, "content": [self.part()], "status": status}

    def at(self, with_part: bool) -> dict[str, Any]:
        """Where its events belong."""
        place = {"item_id": self.head["id"], "output_index": self.place}
        return {**place, "content_index": 0} if with_part else place


class OutputItems:
    """The items of one answer, as its deltas come. Reasoning, text and each call are items, in the order in which they
    were generated. Text of spaces alone beside calls is none.
    """

    def __init__(self, name: str) -> None:
        """name: that ids are made of."""
        self._name = name
        self._done: list[dict[str, Any]] = []
        self._open: _Open | None = None
        self._held: list[str] = []  # spaces that may be text's beginning
        self._held_logprobs: list[dict[str, Any]] = []

    def items(self, status: str = "in_progress") -> list[dict[str, Any]]:
        """All so far. status: of the one that is not done."""
        return [*self._done, *([] if self._open is None else [self._open.item(status)])]

    def write(self, deltas: Iterable[Delta], logprobs: Logprobs = ()) -> list[Event]:
        """What deltas add. logprobs: of the tokens that content among them is made of."""
        events: list[Event] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                self._content(delta.text, logprobs, events)
                logprobs = ()
            elif isinstance(delta, ReasoningDelta):
                self._reasoning(delta.text, events)
            elif isinstance(delta, CallBegin):
                self._call(delta, events)
            else:
                self._arguments(delta, events)
        if logprobs:
            self._content("", logprobs, events)
        return events

    def end(self, status: str) -> list[Event]:
        """The answer has ended. status: of an item that it ended in."""
        events: list[Event] = []
        calls = any(item["type"] == "function_call" for item in self.items())
        says = any(item["type"] == "message" for item in self.items())
        if not calls and (self._held or not says):  # an answer without calls says something, and be it nothing
            self._begin_message(events)
        self._close(status, events)
        self._held = []
        return events

    # -- what is said ---------------------------------------------------------------------------------------------

    def _content(self, text: str, logprobs: Logprobs, events: list[Event]) -> None:
        if self._open is None or self._open.head["type"] != "message":
            self._held.append(text)
            self._held_logprobs += logprobs
            if text.strip():
                self._begin_message(events)
        elif text or logprobs:
            self._add_text(text, logprobs, events)

    def _begin_message(self, events: list[Event]) -> None:
        """With what was held back."""
        head = {"id": self._id("msg"), "type": "message", "role": "assistant"}
        self._begin(head, {"content": []}, events)
        text, logprobs, self._held, self._held_logprobs = "".join(self._held), self._held_logprobs, [], []
        if text or logprobs:
            self._add_text(text, logprobs, events)

    def _add_text(self, text: str, logprobs: Logprobs, events: list[Event]) -> None:
        assert self._open is not None
        self._open.texts.append(text)
        self._open.logprobs += logprobs
        told = {"delta": text, "logprobs": list(logprobs)}
        events.append({"type": "response.output_text.delta", **self._open.at(True), **told})

    def _reasoning(self, text: str, events: list[Event]) -> None:
        if self._open is None or self._open.head["type"] != "reasoning":
            self._begin({"id": self._id("rs"), "type": "reasoning", "summary": []}, {"content": []}, events)
        assert self._open is not None
        self._open.texts.append(text)
        events.append({"type": "response.reasoning_text.delta", **self._open.at(True), "delta": text})

    def _call(self, call: CallBegin, events: list[Event]) -> None:
        self._held, self._held_logprobs = [], []
        head = {"id": self._id("fc"), "type": "function_call", "call_id": call.id, "name": call.name}
        self._begin(head, {"arguments": ""}, events)

    def _arguments(self, delta: ArgumentsDelta, events: list[Event]) -> None:
        assert self._open is not None
        self._open.texts.append(delta.text)
        told = {"type": "response.function_call_arguments.delta", **self._open.at(False), "delta": delta.text}
        events.append(told)

    # -- items ----------------------------------------------------------------------------------------------------

    def _id(self, kind: str) -> str:
        place = len(self._done) + (self._open is not None)
        return f"{kind}_{self._name}_{place}"

    def _begin(self, head: dict[str, Any], empty: dict[str, Any], events: list[Event]) -> None:
        self._close("completed", events)
        self._open = opened = _Open(len(self._done), head)
        item = {**head, **empty, "status": "in_progress"}
        events.append({"type": "response.output_item.added", "output_index": opened.place, "item": item})
        if head["type"] != "function_call":
            events.append({"type": "response.content_part.added", **opened.at(True), "part": opened.part()})

    def _close(self, status: str, events: list[Event]) -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        kind, item = opened.head["type"], opened.item(status)
        if kind == "function_call":
            told = {"name": item["name"], "arguments": item["arguments"]}
            events.append({"type": "response.function_call_arguments.done", **opened.at(False), **told})
        else:
            part = item["content"][0]
            done = {"text": part["text"]} if kind == "reasoning" else {key: part[key] for key in ("text", "logprobs")}
            name = "reasoning_text" if kind == "reasoning" else "output_text"
            events.append({"type": f"response.{name}.done", **opened.at(True), **done})
            events.append({"type": "response.content_part.done", **opened.at(True), "part": part})
        events.append({"type": "response.output_item.done", "output_index": opened.place, "item": item})
        self._done.append(item)
