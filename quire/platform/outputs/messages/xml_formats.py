"""Formats that write each argument between tags of its own: Qwen3-Coder's and GLM's. What comes of them is JSON.

Tags around a value are all that says where it ends, and a text stands there as it is. Whether it is a text or JSON is
what the function's schema says.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.platform.outputs.messages.json_text import Take, text_as_json
from quire.platform.outputs.messages.text_reader import Literals, Malformed, Reading, TextReader
from quire.platform.outputs.messages.tool_choice import Function, Tools
from quire.platform.outputs.messages.tool_format import Structure, ToolFormat, read_end, tag

_NAME = re.compile(r"[\w.:/\-]+")
_MAX_HOPS = 16  # of references in a schema
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}


@dataclass(frozen=True, kw_only=True)
class XmlFormat(ToolFormat):
    """function: what stands around a function's name, and what closes the function; empty where nothing does.

    key, value: what stands around each.  lines: a value has lines of its own, and so have the tags.
    between: a function's name and its first argument, and two arguments.
    """

    function: tuple[str, str, str] = ("", "", "")
    key: tuple[str, str]
    value: tuple[str, str]
    lines: bool = False
    between: str = "\n"

    def read_calls(self, reader: TextReader, begun: str, tools: Tools) -> Reading[None]:
        """A function, its arguments, and the closing tags."""
        name, found = yield from self._read_name(reader)
        schema = next((one.schema for one in tools.functions if one.name == name), {})
        keys = Literals((self.key[0],))
        closes = Literals((self.function[2], self.ends[0]))
        either = Literals((*keys.texts, *closes.texts))
        if not found:
            yield from reader.skip_spaces()
            found = yield from reader.expect(either)
        take = reader.begin_call(name)
        take("{")
        first = True
        try:
            while found in keys.texts:
                key, _ = yield from reader.name_until(Literals((self.key[1],)))
                take(("" if first else ", ") + text_as_json(key) + ": ")
                first = False
                yield from self._read_value(reader, _kinds(schema, key), take)
                reader.hold("")
                yield from reader.skip_spaces()
                found = yield from reader.expect(either)
                reader.drop_held()
        except Malformed:
            if not reader.ended:
                take("}")
            raise
        take("}")
        if found != self.ends[0]:
            yield from read_end(reader, Literals(self.ends))

    def _read_name(self, reader: TextReader) -> Reading[tuple[str, str]]:
        """A function's name, and the tag behind it where that has been read too."""
        yield from reader.skip_spaces()
        if self.function[0]:
            yield from reader.expect(Literals((self.function[0],)))
            name, _ = yield from reader.name_until(Literals((self.function[1],)))
            found = ""
        else:
            name, found = yield from reader.name_until(Literals(("\n", self.key[0], self.ends[0])))
        if not _NAME.fullmatch(name):
            raise Malformed
        return name, found.strip()

    def _read_value(self, reader: TextReader, kinds: frozenset[str] | None, take: Take) -> Reading[None]:
        """A value as JSON: a text as it comes, anything else when it is complete."""
        if self.value[0]:
            yield from reader.skip_spaces()
            yield from reader.expect(Literals((self.value[0],)))
        ends = Literals((self.value[1], *(("\n" + self.value[1],) if self.lines else ())))
        if self.lines and (yield from reader.peek()) == "\n":
            reader.advance(reader.at + 1)
        if kinds == frozenset(("string",)):
            take('"')
            if not (yield from reader.until(ends, lambda text: take(text_as_json(text)[1:-1]))):
                raise Malformed
            take('"')
            return
        parts: list[str] = []
        if not (yield from reader.until(ends, parts.append)):
            raise Malformed
        take(_as_json("".join(parts), kinds))

    def call(self, function: Function, schema: Structure) -> Structure:
        """A function and its arguments between tags."""
        parameters = {
            **schema,
            "type": "xml_parameters",
            "key": [self.between + self.key[0], self.key[1]],
            "value": ["\n", "\n" + self.value[1]] if self.lines else [self.between + self.value[0], self.value[1]],
            "separator": "",
        }
        opens, behind, closes = self.function
        line = "\n" if self.lines else ""
        head = self.begins[0] + line + opens + function.name + behind
        return tag(head, parameters, self.between + closes + line + self.ends[0])


def _kinds(schema: Mapping[str, Any], key: str) -> frozenset[str] | None:
    """The types of JSON that an argument may be of; None where its schema does not say."""
    properties = schema.get("properties")
    return _types(properties.get(key) if isinstance(properties, Mapping) else None, schema, _MAX_HOPS)


def _types(given: Any, root: Mapping[str, Any], hops: int) -> frozenset[str] | None:
    if not isinstance(given, Mapping) or hops == 0:
        return None
    kind = given.get("type")
    if isinstance(kind, str):
        return frozenset((kind,))
    if isinstance(kind, (list, tuple)):
        return frozenset(str(one) for one in kind)
    if isinstance(given.get("$ref"), str):
        return _types(_referred(given["$ref"], root), root, hops - 1)
    if "const" in given or isinstance(given.get("enum"), (list, tuple)):
        return frozenset(_type_of(one) for one in (given.get("enum") or [given.get("const")]))
    found: list[frozenset[str] | None] = []
    for word in ("anyOf", "oneOf"):
        if isinstance(given.get(word), (list, tuple)):
            found += [_types(one, root, hops - 1) for one in given[word]]
    if isinstance(given.get("allOf"), (list, tuple)):
        found += [one for each in given["allOf"] if (one := _types(each, root, hops - 1)) is not None]
    if not found or None in found:
        return None
    return frozenset().union(*(one for one in found if one is not None))


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference within a schema leads to; None where it leads nowhere."""
    place: Any = root
    for part in reference.removeprefix("#/").split("/") if reference.startswith("#/") else ("",):
        place = place.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(place, Mapping) else None
    return place


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {str: "string", int: "integer", float: "number", type(None): "null", list: "array", dict: "object"}
    return names.get(type(value), "object")


def _as_json(text: str, kinds: frozenset[str] | None) -> str:
    """A value that need not be a text, as JSON: what it is by its schema, and a text where it is nothing else."""
    given = text.strip()
    given = _WORDS.get(given.lower(), given)
    try:
        kind = _type_of(json.loads(given, parse_constant=_no_constant))
    except (ValueError, RecursionError):
        kind = "string"
    if kind == "string" and kinds is not None and "string" not in kinds and given.startswith('"'):
        return given  # the model has quoted it
    fits = kinds is None or kind in kinds or (kind == "integer" and "number" in kinds) or "string" not in kinds
    return given if kind != "string" and fits else text_as_json(text)


def _no_constant(text: str) -> float:
    """NaN and its like are Python's, and no JSON."""
    raise ValueError(text)
