"""Items of /v1/responses as messages of /v1/chat/completions. On workers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from quire.server.responses.errors import ApiError
from quire.server.schemas.responses.items import Item

_MESSAGE = re.compile(r"\bmessages\[(\d+)\]")


class Conversation:
    """Messages, and where each comes from. An answer's reasoning, text and calls are one message of the assistant's."""

    def __init__(self, instructions: str | None) -> None:
        self.messages: list[dict[str, Any]] = []
        self._origins: list[str] = []
        self._calls: set[str] = set()  # that were made
        self._answer: dict[str, Any] | None = None  # the assistant's, to which more may belong
        if instructions is not None:
            self._add({"role": "system", "content": instructions}, "instructions")

    def add(self, items: Iterable[Item], origin: str | None) -> None:
        """More items, in full form. origin: the field that they come from; None: of the input, each its own place."""
        for place, item in enumerate(items):
            where = f"input[{place}]" if origin is None else origin
            if item["type"] == "message":
                self._say(item, where)
            elif item["type"] == "function_call":
                self._call(item, where)
            elif item["type"] == "reasoning":
                self._reason(item, where)
            else:
                self._tell(item, where)

    def about(self, error: ApiError) -> ApiError:
        """An error about messages as one about what they come from."""
        if error.param != "messages":
            return error

        def origin(found: re.Match[str]) -> str:
            place = int(found[1])
            return self._origins[place] if place < len(self._origins) else "input"

        message = _MESSAGE.sub(origin, error.message)
        message = re.sub(r"^messages\b", "input", message)
        return ApiError(error.status, message, "input", error.code, error.headers)

    def _add(self, message: dict[str, Any], where: str) -> None:
        if self._answer is not None and self._answer["content"] is None and "tool_calls" not in self._answer:
            self._answer["content"] = ""  # it was cut off in its reasoning
        self.messages.append(message)
        self._origins.append(where)
        self._answer = message if message["role"] == "assistant" else None

    def _say(self, item: Item, where: str) -> None:
        if item["role"] != "assistant":
            self._add({"role": item["role"], "content": [_part(part) for part in item["content"]]}, where)
            return
        texts = [part["text"] if part["type"] == "output_text" else part["refusal"] for part in item["content"]]
        answer = self._answer
        if answer is None or (answer["content"] is not None and "tool_calls" not in answer):
            # One text as it was generated: templates write parts in their own ways.
            content: Any = "".join(texts) if len(texts) < 2 else [{"type": "text", "text": text} for text in texts]
            self._add({"role": "assistant", "content": content}, where)
        else:  # between calls: to templates an answer has one content
            answer["content"] = (answer["content"] or "") + "".join(texts)

    def _call(self, item: Item, where: str) -> None:
        if self._answer is None:
            self._add({"role": "assistant", "content": None}, where)
        assert self._answer is not None
        function = {"name": item["name"], "arguments": item["arguments"]}
        calls = self._answer.setdefault("tool_calls", [])
        calls.append({"id": item["call_id"], "type": "function", "function": function})
        self._calls.add(item["call_id"])

    def _reason(self, item: Item, where: str) -> None:
        """A summary stands for reasoning that is not shown."""
        text = "".join(part["text"] for part in item.get("content") or ())
        text = text or "\n\n".join(part["text"] for part in item["summary"])
        if not text:
            return
        if self._answer is None or self._answer["content"] is not None or "tool_calls" in self._answer:
            self._add({"role": "assistant", "content": None, "reasoning_content": text}, where)
        else:
            self._answer["reasoning_content"] = self._answer.get("reasoning_content", "") + text

    def _tell(self, item: Item, where: str) -> None:
        if item["call_id"] not in self._calls:
            raise ApiError(400, f"{where}.call_id: there is no function_call {item['call_id']!r} before it.", "input")
        output = item["output"]
        content = output if isinstance(output, str) else [_part(part) for part in output]
        self._add({"role": "tool", "tool_call_id": item["call_id"], "content": content}, where)


def _part(part: Item) -> dict[str, Any]:
    if part["type"] == "input_text":
        return {"type": "text", "text": part["text"]}
    return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": part["detail"]}}
