"""An answer as a message, whole and in parts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool. arguments: JSON text, as the model wrote it or as its notation says it in JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """What an answer says. content: None where there is none beside calls. reasoning: None where there is none."""

    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


class ContentDelta(NamedTuple):
    """More of the content."""

    text: str


class ReasoningDelta(NamedTuple):
    """More of the reasoning."""

    text: str


class CallBegin(NamedTuple):
    """A call of a tool begins. place: its place among the answer's calls."""

    place: int
    id: str
    name: str


class ArgumentsDelta(NamedTuple):
    """More of a call's arguments, as JSON text."""

    place: int
    text: str


Delta = ContentDelta | ReasoningDelta | CallBegin | ArgumentsDelta


class MessageParser(Protocol):
    """Reads one answer's text as it comes. However the text is cut, the deltas add up to the same message."""

    def feed(self, text: str) -> list[Delta]:
        """What more text says, as far as nothing that follows can change it."""

    def finish(self, cut: bool = False) -> list[Delta]:
        """What was held back: the text has ended. cut: by the limit of its length; a call that has only begun is left
        out then."""


def collect(deltas: Iterable[Delta]) -> Message:
    """The message that deltas add up to. Content of spaces alone beside calls is none."""
    content, reasoning = "", ""
    calls: dict[int, CallBegin] = {}
    arguments: dict[int, str] = {}
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content += delta.text
        elif isinstance(delta, ReasoningDelta):
            reasoning += delta.text
        elif isinstance(delta, CallBegin):
            calls[delta.place] = delta
        else:
            arguments[delta.place] = arguments.get(delta.place, "") + delta.text
    made = tuple(ToolCall(begin.id, begin.name, arguments.get(place, "")) for place, begin in sorted(calls.items()))
    shown = None if made and not content.strip() else content
    return Message(shown, reasoning or None, made)
