"""The items of an input, checked and brought into the form in which they are kept and listed. On workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quire.server.responses.errors import ApiError

MAX_ITEMS = 10_000
_MAX_PARTS = 10_000  # of all items
_MAX_NAMED = 64  # keys that are told of
_MAX_NAME = 256  # characters of an id, and of a function's name

_ROLES = ("user", "system", "developer")
_STATUSES = ("in_progress", "completed", "incomplete")
_DETAILS = ("auto", "low", "high")

_SERVED = "messages, function_call, function_call_output, reasoning and item_reference are"

Item = dict[str, Any]
Find = Callable[[str], Item | None]  # an item that is kept, by its id


class ItemReader:
    """Reads one input. Raises ApiError, about `input`, for what is no item and for what is not served."""

    def __init__(self, make_id: Callable[[str, int], str], find: Find) -> None:
        """make_id: of an item of this kind at this place, which has none.  find: what references mean."""
        self.ignored_fields: set[str] = set()  # keys that change nothing
        self._make_id = make_id
        self._find = find
        self._parts = 0

    def items(self, given: str | Sequence[Mapping[str, Any]]) -> list[Item]:
        """All of an input, in full form: every item has its type, an id and a status, and content is a list."""
        if isinstance(given, str):
            given = [{"role": "user", "content": given}]
        if len(given) > MAX_ITEMS:
            raise ApiError(400, f"input: has {len(given)} items, and the limit is {MAX_ITEMS}.", "input")
        return [self._item(f"input[{place}]", place, item) for place, item in enumerate(given)]

    def _item(self, where: str, place: int, given: Mapping[str, Any]) -> Item:
        kind = _type_of(given)
        reader = _READERS.get(kind) if isinstance(kind, str) else None
        if reader is None:
            shown = repr(kind)[:80] if kind is not None else "without a type"
            raise ApiError(
                400, f"{where}.type: items {shown} are not served: {_SERVED}.", "input", "unsupported_parameter"
            )
        return reader(self, where, place, given)

    # -- messages -------------------------------------------------------------------------------------------------

    def _message(self, where: str, place: int, given: Mapping[str, Any]) -> Item:
        self._note(given, {"type", "role", "content", "id", "status", "phase"})
        role = given.get("role")
        if role != "assistant" and role not in _ROLES:
            raise ApiError(400, f"{where}.role: is user, assistant, system or developer.", "input")
        content = given.get("content")
        read = self._said if role == "assistant" else self._given
        written = "output_text" if role == "assistant" else "input_text"
        if isinstance(content, str):
            content = [{"type": written, "text": content}]
        if not isinstance(content, list):
            raise ApiError(400, f"{where}.content: must be a text or a list of parts.", "input")
        parts = self._counted(content)
        item = self._head(where, "message", "msg", place, given)
        item |= {"role": role, "content": [read(f"{where}.content[{n}]", part) for n, part in enumerate(parts)]}
        return item if given.get("phase") is None else {**item, "phase": given["phase"]}

    def _given(self, where: str, part: Any) -> Item:
        """A part of what the model is given."""
        kind = _kind(where, part)
        if kind == "input_text":
            self._note(part, {"type", "text"}, "content[].")
            return {"type": kind, "text": _text(where, part, "text")}
        if kind != "input_image":
            raise ApiError(
                400, f"{where}.type: {kind[:40]!r} is not served: input_text and input_image are.", "input",
                "unsupported_parameter",
            )  # fmt: skip
        self._note(part, {"type", "image_url", "file_id", "detail"}, "content[].")
        if part.get("file_id") is not None:
            raise ApiError(400, f"{where}.file_id: no files are kept here; give image_url.", "input")
        detail = part.get("detail") or "auto"
        if detail not in _DETAILS:
            raise ApiError(
                400, f"{where}.detail: is auto, high or low: images are seen as the model's processor makes them.",
                "input",
            )  # fmt: skip
        return {"type": kind, "image_url": _text(where, part, "image_url"), "detail": detail}

    def _said(self, where: str, part: Any) -> Item:
        """A part of what the model has said."""
        kind = _kind(where, part)
        if kind == "refusal":
            self._note(part, {"type", "refusal"}, "content[].")
            return {"type": kind, "refusal": _text(where, part, "refusal")}
        if kind not in ("output_text", "input_text"):
            raise ApiError(400, f"{where}.type: of an assistant's are output_text and refusal.", "input")
        self._note(part, {"type", "text", "annotations", "logprobs"}, "content[].")
        return {"type": "output_text", "text": _text(where, part, "text"), "annotations": []}

    # -- calls and reasoning --------------------------------------------------------------------------------------

    def _call(self, where: str, place: int, given: Mapping[str, Any]) -> Item:
        self._note(given, {"type", "id", "status", "call_id", "name", "arguments"})
        named = {key: _name(where, given, key) for key in ("call_id", "name")}
        item = self._head(where, "function_call", "fc", place, given)
        return {**item, **named, "arguments": _text(where, given, "arguments")}

    def _output(self, where: str, place: int, given: Mapping[str, Any]) -> Item:
        self._note(given, {"type", "id", "status", "call_id", "output"})
        output = given.get("output")
        if isinstance(output, list):
            output = [self._given(f"{where}.output[{n}]", part) for n, part in enumerate(self._counted(output))]
        elif not isinstance(output, str):
            raise ApiError(400, f"{where}.output: must be a text or a list of parts.", "input")
        item = self._head(where, "function_call_output", "fco", place, given)
        return {**item, "call_id": _name(where, given, "call_id"), "output": output}

    def _reasoning(self, where: str, place: int, given: Mapping[str, Any]) -> Item:
        self._note(given, {"type", "id", "status", "summary", "content"})
        item = self._head(where, "reasoning", "rs", place, given)
        for key, kind in (("summary", "summary_text"), ("content", "reasoning_text")):
            parts = given.get(key) or []
            if not isinstance(parts, list):
                raise ApiError(400, f"{where}.{key}: must be a list of parts.", "input")
            item[key] = [
                {"type": kind, "text": _of_kind(f"{where}.{key}[{n}]", part, kind)}
                for n, part in enumerate(self._counted(parts))
            ]
        return item

    def _reference(self, where: str, place: int, given: Mapping[str, Any]) -> Item:
        name = _name(where, given, "id")
        found = self._find(name)
        if found is None:
            raise ApiError(400, f"{where}.id: there is no item {name!r}, or it has been forgotten.", "input")
        return found

    # -- what they share ------------------------------------------------------------------------------------------

    def _head(self, where: str, kind: str, short: str, place: int, given: Mapping[str, Any]) -> Item:
        status = given.get("status") or "completed"
        if status not in _STATUSES:
            raise ApiError(400, f"{where}.status: is {', '.join(_STATUSES)}.", "input")
        name = self._make_id(short, place) if given.get("id") is None else _name(where, given, "id")
        return {"id": name, "type": kind, "status": status}

    def _counted(self, parts: list[Any]) -> list[Any]:
        self._parts += len(parts)
        if self._parts > _MAX_PARTS:
            raise ApiError(400, f"input: has more than {_MAX_PARTS} parts, which is the limit.", "input")
        return parts

    def _note(self, given: Mapping[str, Any], known: set[str], path: str = "") -> None:
        for key in given.keys() - known:
            if given[key] not in (None, [], {}) and len(self.ignored_fields) < _MAX_NAMED:
                self.ignored_fields.add(f"input[].{path}{key}")


_READERS: dict[str, Callable[[ItemReader, str, int, Mapping[str, Any]], Item]] = {
    "message": ItemReader._message,
    "function_call": ItemReader._call,
    "function_call_output": ItemReader._output,
    "reasoning": ItemReader._reasoning,
    "item_reference": ItemReader._reference,
}


def is_reference(given: Mapping[str, Any]) -> bool:
    """Whether an item stands for another, which is kept."""
    return bool(_type_of(given) == "item_reference")  # of whatever a client sent


def _type_of(given: Mapping[str, Any]) -> Any:
    """Of messages and references it may be left out."""
    kind = given.get("type")
    return kind if kind is not None else "message" if "role" in given else "item_reference" if "id" in given else None


def _kind(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise ApiError(400, f"{where}: must be an object with a type.", "input")
    return kind


def _of_kind(where: str, part: Any, kind: str) -> str:
    if _kind(where, part) != kind:
        raise ApiError(400, f"{where}.type: must be {kind}.", "input")
    return _text(where, part, "text")


def _text(where: str, given: Mapping[str, Any], key: str) -> str:
    if not isinstance(given.get(key), str):
        raise ApiError(400, f"{where}.{key}: must be a text.", "input")
    return str(given[key])


def _name(where: str, given: Mapping[str, Any], key: str) -> str:
    name = _text(where, given, key)
    if not 0 < len(name) <= _MAX_NAME:
        raise ApiError(400, f"{where}.{key}: must have 1 to {_MAX_NAME} characters.", "input")
    return name
