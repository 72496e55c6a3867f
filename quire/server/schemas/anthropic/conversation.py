"""Anthropic's messages -> messages as /v1/chat/completions has them. What these cannot say is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from quire.platform.inputs.chat_messages import MAX_MESSAGES
from quire.server.responses.errors import ApiError
from quire.server.schemas.anthropic.typed import read
from quire.server.schemas.prompts import MAX_PARTS

Part = dict[str, Any]

_SERVED = {
    "user": ("text", "image", "document", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
_TYPES = {
    "text": "TextBlockParam",
    "image": "ImageBlockParam",
    "document": "DocumentBlockParam",
    "thinking": "ThinkingBlockParam",
    "redacted_thinking": "RedactedThinkingBlockParam",
    "tool_use": "ToolUseBlockParam",
    "tool_result": "ToolResultBlockParam",
}
_BLOCK = "messages[].content[]"


class Conversation:
    """The messages of a body of /v1/messages.

    messages: as /v1/chat/completions has them.  places: where each comes from, as errors name it.
    ignored: what changes nothing.  goes_on: the answer continues the last message.

    Raises ApiError for what is malformed, and for what is not served.
    """

    def __init__(self, body: Any) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self.ignored: set[str] = set()
        self._turn = _CallTurn()
        if not 0 < len(body.messages) <= MAX_MESSAGES:
            raise ApiError(
                400, f"messages: has {len(body.messages)} entries; it must have 1 to {MAX_MESSAGES}.", "messages"
            )
        contents = [message.get("content") for message in body.messages]
        blocks = len(contents) + sum(len(content) for content in contents if isinstance(content, list))
        if blocks > MAX_PARTS:
            raise ApiError(400, f"messages: have {blocks} blocks, and the limit is {MAX_PARTS}.", "messages")
        if body.system:
            self._system("system", body.system)
        for index, message in enumerate(body.messages):
            self._message(f"messages[{index}]", message)
        self._turn.check_answered()
        for message in self.messages:
            message["content"] = _content(message)
        self.goes_on = body.messages[-1]["role"] == "assistant"

    def _message(self, where: str, message: Mapping[str, Any]) -> None:
        unknown = next((key for key in message if key not in ("role", "content")), None)
        if unknown is not None:
            raise ApiError(400, f"{where}.{unknown[:64]}: there is no such field.", "messages")
        takers: Mapping[str, Callable[[str, Any], None]] = {
            "user": self._user, "assistant": self._assistant, "system": self._system,
        }  # fmt: skip
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or role not in takers:
            raise ApiError(400, f"{where}.role: must be {', '.join(takers)}.", "messages")
        self._turn.enter(role)
        takers[role](f"{where}.content", content)

    def _add(self, where: str, role: str, parts: list[Part], **more: Any) -> None:
        """One more message; what one role says twice is one turn, as Anthropic has it. Contents are parts, for now."""
        last = self.messages[-1] if self.messages else {}
        if role in ("user", "assistant") and not more and last.keys() == {"role", "content"} and last["role"] == role:
            last["content"] += parts
            return
        self.messages.append({"role": role, "content": parts, **more})
        self.places.append(where.removesuffix(".content"))

    # -- roles ----------------------------------------------------------------------------------------------------

    def _system(self, where: str, content: Any) -> None:
        parts = [part for _, _, block in self._blocks(where, content, "system") for part in self._text(block)]
        self._add(where, "system", parts)

    def _user(self, where: str, content: Any) -> None:
        parts: list[Part] = []
        for place, kind, block in self._blocks(where, content, "user"):
            if kind == "tool_result":
                if parts:
                    self._add(where, "user", parts)
                parts = []
                self._tool_result(place, block)
            else:
                parts += self._part(place, kind, block)
        if parts:
            self._add(where, "user", parts)

    def _assistant(self, where: str, content: Any) -> None:
        parts: list[Part] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for place, kind, block in self._blocks(where, content, "assistant"):
            if kind == "text":
                parts += self._text(block)
            elif kind == "thinking":
                thoughts.append(block.thinking)
            elif kind == "redacted_thinking":
                self.ignored.add(f"{_BLOCK}.redacted_thinking")  # that nobody here can read
            else:
                calls.append(self._tool_use(place, block))
        more: dict[str, Any] = {"reasoning_content": "".join(thoughts)} if thoughts else {}
        self._add(where, "assistant", parts, **more, **({"tool_calls": calls} if calls else {}))

    # -- blocks ---------------------------------------------------------------------------------------------------

    def _blocks(self, where: str, content: Any, role: str) -> Iterator[tuple[str, str, Any]]:
        """(place, type, block) of each. A text stands for a block of it."""
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise ApiError(400, f"{where}: must be a text or a list of blocks.", where.partition("[")[0])
        for index, block in enumerate(content):
            place = f"{where}[{index}]"
            kind = block.get("type") if isinstance(block, Mapping) else None
            if not isinstance(kind, str):
                raise ApiError(400, f"{place}: must be an object with a type.", where.partition("[")[0])
            if kind not in _SERVED[role]:
                served = ", ".join(_SERVED[role])
                raise ApiError(
                    400, f"{place}: {kind[:64]!r} is not served here; {role} messages have {served}.",
                    where.partition("[")[0], "unsupported_parameter",
                )  # fmt: skip
            found = read(_TYPES[kind], block, place)
            if getattr(found, "cache_control", None) is not None:
                self.ignored.add(f"{'system[]' if where == 'system' else _BLOCK}.cache_control")
            yield place, kind, found

    def _text(self, block: Any) -> list[Part]:
        if block.citations:
            self.ignored.add(f"{_BLOCK}.citations")
        return [{"type": "text", "text": block.text}]

    def _part(self, place: str, kind: str, block: Any) -> list[Part]:
        """What a message of chat has for a block of a user's message."""
        if kind == "text":
            return self._text(block)
        return self._image(place, block) if kind == "image" else self._document(place, block)

    def _image(self, place: str, block: Any) -> list[Part]:
        if getattr(block, "transformations", None) is not None:
            raise _refusal(f"{place}.transformations", "images are seen as the model's processor makes them")
        kind = block.source.get("type")
        if kind == "base64":
            source = read("Base64ImageSourceParam", block.source, f"{place}.source")
            url = f"data:{source.media_type};base64,{source.data}"
        elif kind == "url":
            url = read("URLImageSourceParam", block.source, f"{place}.source").url
        else:
            raise _refusal(f"{place}.source", f"{str(kind)[:64]!r} is no source of images here; base64 and url are")
        return [{"type": "image_url", "image_url": {"url": url}}]

    def _document(self, place: str, block: Any) -> list[Part]:
        """A document of text: what its title and context say, and the text."""
        if block.citations is not None and block.citations.enabled:
            raise _refusal(f"{place}.citations", "none are made")
        about = "\n".join(text for text in (block.title, block.context) if text)
        head: list[Part] = [{"type": "text", "text": about}] if about else []
        kind = block.source.get("type")
        if kind == "text":
            source = read("PlainTextSourceParam", block.source, f"{place}.source")
            return [*head, {"type": "text", "text": source.data}]
        if kind != "content":
            raise _refusal(f"{place}.source", f"{str(kind)[:64]!r}: of documents only text is served")
        content = read("ContentBlockSourceParam", block.source, f"{place}.source").content
        return [*head, *self._inner(f"{place}.source.content", content, ("text", "image"))]

    def _inner(self, where: str, content: Any, kinds: tuple[str, ...]) -> list[Part]:
        """Blocks within a block."""
        parts: list[Part] = []
        for place, kind, block in self._blocks(where, content, "user"):
            if kind not in kinds:
                raise _refusal(place, f"{kind!r} is not served here; {', '.join(kinds)} are")
            parts += self._part(place, kind, block)
        return parts

    def _tool_use(self, place: str, block: Any) -> dict[str, Any]:
        if getattr(block, "toolset_name", None) is not None:
            raise _refusal(f"{place}.toolset_name", "there are no toolsets here")
        self._turn.call(place, block.id)
        arguments = json.dumps(block.input, ensure_ascii=False)
        return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}

    def _tool_result(self, place: str, block: Any) -> None:
        if getattr(block, "toolset_name", None) is not None:
            raise _refusal(f"{place}.toolset_name", "there are no toolsets here")
        self._turn.answer(place, block.tool_use_id)
        content = [] if block.content is None else block.content
        parts = self._inner(f"{place}.content", content, ("text", "image", "document"))
        failed = {"is_error": True} if block.is_error else {}  # for templates that know it
        self._add(place, "tool", parts, tool_call_id=block.tool_use_id, **failed)


class _CallTurn:
    """The calls of the assistant's last turn. Each has one result, in the user's turn behind it, and no other results
    are there: as in Anthropic's API. Messages of one role that follow each other are one turn.
    """

    def __init__(self) -> None:
        self._role = ""
        self._places: dict[str, str] = {}  # the id of a call -> where it stands
        self._answered: set[str] = set()

    def enter(self, role: str) -> None:
        """A message of this role begins."""
        if role == "assistant" and self._role == "user":
            self.check_answered()
            self._places, self._answered = {}, set()
        if role != "system":
            self._role = role

    def call(self, place: str, call_id: str) -> None:
        """A call is made."""
        if call_id in self._places:
            raise ApiError(
                400, f"{place}.id: the call {call_id[:128]!r} has this id too; ids must be unique.", "messages"
            )
        self._places[call_id] = place

    def answer(self, place: str, call_id: str) -> None:
        """A call's result is told."""
        where, shown = f"{place}.tool_use_id", repr(call_id[:128])
        if call_id not in self._places:
            raise ApiError(400, f"{where}: the assistant's turn before it has no tool_use with id {shown}.", "messages")
        if call_id in self._answered:
            raise ApiError(400, f"{where}: {shown} has a tool_result already; each tool_use has one.", "messages")
        self._answered.add(call_id)

    def check_answered(self) -> None:
        """The turns behind the calls are complete."""
        for call_id, place in self._places.items():
            if call_id not in self._answered:
                told = f"the tool_use with id {call_id[:128]!r} needs a tool_result in the message after it."
                raise ApiError(400, f"{place}: {told}", "messages")


def _content(message: Mapping[str, Any]) -> str | list[Part] | None:
    """A message's parts as chat has them. An assistant's texts are one: the model wrote them one after the other."""
    parts: list[Part] = message["content"]
    if message["role"] == "assistant":
        said = "".join(part["text"] for part in parts)
        return said if said or "tool_calls" not in message else None
    if not parts:
        return ""
    return str(parts[0]["text"]) if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _refusal(where: str, why: str) -> ApiError:
    return ApiError(400, f"{where}: {why}.", "messages", "unsupported_parameter")
