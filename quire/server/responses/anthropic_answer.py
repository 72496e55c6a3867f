"""Answers as Anthropic's API has them: a message of content blocks, whole or in events."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json
from starlette.requests import Request

from quire.platform.outputs.messages.message import CallBegin, ContentDelta, Delta, ReasoningDelta
from quire.platform.outputs.outputs import Output, RequestOutput
from quire.server.context import ServerContext, note
from quire.server.responses.errors import ApiError, anthropic_body
from quire.server.responses.message_builder import ChoiceUpdate, MessageResponseBuilder

if TYPE_CHECKING:
    from quire.server.schemas.anthropic.call import MessagesBody, MessagesCall

Event = dict[str, Any]

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}
_INVALID = "INVALID_JSON"  # Anthropic's name for arguments that are no object


class ContentBlocks:
    """The events that make an answer's blocks, one after the other. However deltas are cut, these add up to the same.

    Spaces before a text's first other character are held back: beside calls they are no block.
    """

    def __init__(self, shows_thinking: bool) -> None:
        self._shows_thinking = shows_thinking
        self._index = -1
        self._open: str | None = None  # the type of the block that is open
        self._held = ""
        self._calls = False

    def feed(self, deltas: Iterable[Delta]) -> list[Event]:
        """What deltas make."""
        return [event for delta in deltas for event in self._take(delta)]

    def finish(self) -> list[Event]:
        """What there is when the answer has ended."""
        text = self._text(self._held) if self._held and not self._calls else []
        return [*text, *self._close()]

    def _take(self, delta: Delta) -> list[Event]:
        if isinstance(delta, ContentDelta):
            if self._open != "text" and not (self._held + delta.text).strip():
                self._held += delta.text
                return []
            return self._text(self._held + delta.text)
        if isinstance(delta, ReasoningDelta):
            begin = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            if not self._shows_thinking or not delta.text:
                return begin
            return [*begin, self._delta({"type": "thinking_delta", "thinking": delta.text})]
        if isinstance(delta, CallBegin):
            self._calls, self._open = True, self._open and "another"
            return self._begin("tool_use", {"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
        return [self._delta({"type": "input_json_delta", "partial_json": delta.text})] if delta.text else []

    def _text(self, text: str) -> list[Event]:
        self._held = ""
        begin = self._begin("text", {"type": "text", "text": ""})
        return [*begin, self._delta({"type": "text_delta", "text": text})] if text else begin

    def _begin(self, kind: str, block: dict[str, Any]) -> list[Event]:
        """Open a block of this type, if the open one is of another."""
        if self._open == kind:
            return []
        closed = self._close()
        self._open, self._held = kind, ""
        self._index += 1
        return [*closed, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        self._open = None
        return [{"type": "content_block_stop", "index": self._index}]


def content_of(events: Iterable[Event]) -> list[dict[str, Any]]:
    """The blocks that events make."""
    blocks: list[dict[str, Any]] = []
    parts: list[list[str]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            parts.append([])
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            parts[-1].append(delta.get("text") or delta.get("thinking") or delta.get("partial_json") or "")
    for block, texts in zip(blocks, parts, strict=True):
        whole = "".join(texts)
        if block["type"] == "tool_use":
            block["input"] = _arguments(whole)
        else:
            block[block["type"]] = whole
    return blocks


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments. Those that were cut off are as far as they go: so its package reads them in streams."""
    try:
        found = from_json(text, allow_partial=True) if text else {}
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {_INVALID: text}


class MessagesAnswer(MessageResponseBuilder):
    """The answer to one body of /v1/messages."""

    kind = "msg"
    media_type = "text/event-stream"

    def __init__(self, context: ServerContext, request: Request, body: MessagesBody, call: MessagesCall) -> None:
        super().__init__(context, request, body.chat, call)
        self._model = context.served.name_of(body.chat.model)
        self._blocks = ContentBlocks(body.shows_thinking)
        self._begun = False

    def whole(self, outputs: dict[str, Output]) -> dict[str, Any]:
        (output,) = outputs.values()
        assert isinstance(output, RequestOutput)
        (update,) = self.updates(output)
        events = [*self._blocks.feed(update.deltas), *self._blocks.finish()]
        note(self._request, **self._usage.for_log())
        return {**self._message(), "content": content_of(events), **_end(update)}

    def _message(self) -> dict[str, Any]:
        """A message of which nothing has been said."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._tokens(), "service_tier": "standard"},
        }

    def _tokens(self) -> dict[str, Any]:
        """Usage. The prompt's tokens that the prefix cache had are no input_tokens, as in Anthropic's API."""
        usage = self._usage
        told: dict[str, Any] = {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        }
        if usage.reasoning is not None:
            told["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
        return told

    # -- streamed -------------------------------------------------------------------------------------------------

    def parts(self, output: RequestOutput) -> list[bytes]:
        events: list[Event] = []
        for update in self.updates(output):
            if not self._begun:
                self._begun = True
                events += [{"type": "message_start", "message": self._message()}, {"type": "ping"}]
            events += self._blocks.feed(update.deltas)
            if update.finish_reason is not None:
                events += self._blocks.finish()
                events.append({"type": "message_delta", "delta": _end(update), "usage": self._tokens()})
        return list(map(_event, events))

    def last_parts(self) -> list[bytes]:
        note(self._request, **self._usage.for_log())
        return [_event({"type": "message_stop"})]

    def failed(self, error: ApiError) -> list[bytes]:
        return [_event(anthropic_body(error, self._request.scope.get("state", {}).get("request_id")))]


def _end(update: ChoiceUpdate) -> dict[str, Any]:
    """Why an answer has ended."""
    reason = _STOP_REASONS.get(update.completion.finish_reason or "stop", "end_turn")
    text = update.completion.stop_reason
    if reason == "end_turn" and update.calls:
        reason = "tool_use"  # a call that was asked for by name is one too, unlike in OpenAI's API
    elif reason == "end_turn" and isinstance(text, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": text}
    return {"stop_reason": reason, "stop_sequence": None}


def _event(data: Event) -> bytes:
    """One server-sent event, with its name."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
    return b"event: %b\ndata: %b\n\n" % (str(data["type"]).encode(), text)
