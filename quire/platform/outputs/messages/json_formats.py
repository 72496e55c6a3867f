"""Formats whose calls are JSON objects, {"name": ..., "arguments": {...}}: between tags, listed, or by themselves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from quire.platform.outputs.messages.json_text import read_call, read_list
from quire.platform.outputs.messages.text_reader import Literals, Malformed, Reading, TextReader
from quire.platform.outputs.messages.tool_choice import Function, Tools
from quire.platform.outputs.messages.tool_format import (
    Structure,
    ToolFormat,
    arguments_of,
    free_text,
    listed,
    names_of,
    read_end,
    tag,
)


@dataclass(frozen=True, kw_only=True)
class JsonFormat(ToolFormat):
    """What they have in common. arguments: the key of the arguments."""

    arguments: str = "arguments"

    def object_of(self, function: Function, schema: Structure) -> Structure:
        """A call's object, its keys in the order in which models have learned them."""
        return tag(f'{{"name": {json.dumps(function.name)}, "{self.arguments}": ', schema, "}")

    def list_of(self, functions: Sequence[Function], parallel: bool, forced: bool) -> Structure:
        """What stands between the brackets of a list of calls."""
        tags = [self.object_of(function, arguments_of(function, forced)) for function in functions]
        return listed(tags, ", ", parallel)


@dataclass(frozen=True, kw_only=True)
class TaggedJson(JsonFormat):
    """One object between tags, for each call: Hermes' <tool_call>, and its like. space: between tags and object."""

    space: str = "\n"

    def read_calls(self, reader: TextReader, begun: str, tools: Tools) -> Reading[None]:
        """The object, and the closing tag if there is one."""
        yield from reader.skip_spaces()
        yield from read_call(reader)
        yield from read_end(reader, Literals(self.ends))

    def call(self, function: Function, schema: Structure) -> Structure:
        """The object between the tags."""
        inner = self.object_of(function, schema)
        return tag(self.begins[0] + self.space + inner["begin"], schema, inner["end"] + self.space + self.ends[0])


@dataclass(frozen=True, kw_only=True)
class ListedJson(JsonFormat):
    """A list of objects behind a tag, closed by another or by none: Granite's and Phi-4-mini's.

    space: between the tag and the list.
    """

    space: str = ""

    def read_calls(self, reader: TextReader, begun: str, tools: Tools) -> Reading[None]:
        """The list, and the closing tag if there is one."""
        yield from reader.skip_spaces()
        yield from read_list(reader)
        if self.ends:
            yield from read_end(reader, Literals(self.ends))

    def call(self, function: Function, schema: Structure) -> Structure:
        """A list of one call."""
        inner = self.object_of(function, schema)
        begin, end = self._around()
        return tag(begin + inner["begin"], schema, inner["end"] + end)

    def calls(self, functions: Sequence[Function], parallel: bool) -> Structure:
        """One list."""
        begin, end = self._around()
        return tag(begin, self.list_of(functions, parallel, True), end)

    def text_with_calls(self, functions: Sequence[Function], parallel: bool) -> Structure:
        """Text with lists in it."""
        begin, end = self._around()
        trigger = begin if self.begins[0].isalpha() else self.begins[0]  # a word is one of any text
        return free_text([trigger], [tag(begin, self.list_of(functions, parallel, False), end)], parallel)

    def _around(self) -> tuple[str, str]:
        return self.begins[0] + self.space + "[", "]" + (self.ends[0] if self.ends else "")


@dataclass(frozen=True, kw_only=True)
class BareJson(JsonFormat):
    """Objects by themselves, at the beginning of an answer: Llama 3's, and those of any model that is told to.

    They are calls if they call a function that there is: an answer in JSON looks the same otherwise. Behind one of
    `begins` they are calls in any case.
    listed: several are a list; else one stands behind the other, with "; " between them.
    """

    opens: str = "{["
    listed: bool = False

    def read_calls(self, reader: TextReader, begun: str, tools: Tools) -> Reading[None]:
        """A list of objects, or objects behind one another."""
        known = None if begun else names_of(tools)
        if (yield from reader.skip_spaces()) == "[":
            yield from read_list(reader, known)
            return
        while True:
            yield from read_call(reader, known)
            reader.hold("")
            if (yield from reader.skip_spaces()) in (";", ","):
                reader.advance(reader.at + 1)
                yield from reader.skip_spaces()
            if (yield from reader.peek()) != "{":
                raise Malformed  # text, which stays

    def call(self, function: Function, schema: Structure) -> Structure:
        """The object."""
        return self.object_of(function, schema)

    def calls(self, functions: Sequence[Function], parallel: bool) -> Structure:
        """One object, or several."""
        if not (parallel and self.listed):
            return super().calls(functions, parallel)
        return tag("[", self.list_of(functions, parallel, True), "]")

    def text_with_calls(self, functions: Sequence[Function], parallel: bool) -> Structure | None:
        """None: a brace is in any text, and Llama's tag may open Python."""
        return None

    @property
    def separator(self) -> str:
        """Between objects."""
        return "; "
