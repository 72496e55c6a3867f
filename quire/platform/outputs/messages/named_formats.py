"""Formats that write a call's name before its arguments, which are a JSON object of their own: DeepSeek's, Kimi's and
Mistral's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from quire.platform.outputs.messages.json_formats import ListedJson
from quire.platform.outputs.messages.json_text import read_arguments, read_list
from quire.platform.outputs.messages.text_reader import Literals, Reading, TextReader
from quire.platform.outputs.messages.tool_choice import Function, Tools
from quire.platform.outputs.messages.tool_format import (
    Structure,
    ToolFormat,
    arguments_of,
    free_text,
    listed,
    read_end,
    tag,
)

_CALL_ID = r"[a-zA-Z0-9]{9}"


@dataclass(frozen=True, kw_only=True)
class NamedJson(ToolFormat):
    """Calls of which each is a name and an object, all of them between two tags: `begins[0]` and `ends[0]`.

    opens_call, closes_call: around a call.  before: what stands before each name.  behind: a regex of what stands
    behind it.  separates: between name and arguments.  fence: what opens and closes a block of code around the
    arguments; empty for none.  between: two calls.
    """

    opens_call: str
    closes_call: str
    separates: str
    before: str = ""
    behind: str = ""
    fence: tuple[str, str] = ("", "")
    between: str = ""

    def read_calls(self, reader: TextReader, begun: str, tools: Tools) -> Reading[None]:
        """Calls up to the closing tag."""
        openers = Literals((self.opens_call, self.ends[0]))
        if begun != self.opens_call:
            yield from reader.skip_spaces()
            begun = yield from reader.expect(openers)
        while begun == self.opens_call:
            yield from self._read_call(reader)
            reader.hold("")
            yield from reader.skip_spaces()
            begun = yield from reader.literal(openers)
        reader.settle(begun, openers)

    def _read_call(self, reader: TextReader) -> Reading[None]:
        separators = Literals((self.separates, "\n") if self.fence[0] else (self.separates,))
        if self.before:
            yield from reader.literal(Literals((self.before,)))
        name, _ = yield from reader.name_until(separators)
        if self.behind:
            name = re.sub(self.behind + r"\Z", "", name)
        if self.fence[0]:
            yield from reader.skip_spaces()
            yield from reader.literal(Literals((self.fence[0].strip(),)))
        yield from read_arguments(reader, name)
        if self.fence[1]:
            yield from read_end(reader, Literals((self.fence[1].strip(),)))
        yield from read_end(reader, Literals((self.closes_call,)))

    def call(self, function: Function, schema: Structure) -> Structure:
        """A call without the tags around all of them."""
        end = self.fence[1] + self.closes_call
        head = self.opens_call + self.before + function.name
        if not self.behind:
            return tag(head + self.separates + self.fence[0], schema, end)
        elements = [{"type": "regex", "pattern": self.behind}, tag(self.separates + self.fence[0], schema, "")]
        return tag(head, {"type": "sequence", "elements": elements}, end)

    def calls(self, functions: Sequence[Function], parallel: bool) -> Structure:
        """All calls, between their tags."""
        return tag(self.begins[0], self._listed(functions, parallel, True), self.ends[0])

    def text_with_calls(self, functions: Sequence[Function], parallel: bool) -> Structure:
        """Text with calls at its end."""
        tags = [tag(self.begins[0], self._listed(functions, parallel, False), self.ends[0])]
        return free_text([self.begins[0]], tags, parallel)

    def _listed(self, functions: Sequence[Function], parallel: bool, forced: bool) -> Structure:
        tags = [self.call(function, arguments_of(function, forced)) for function in functions]
        return listed(tags, self.between, parallel)


@dataclass(frozen=True, kw_only=True)
class MistralList(ListedJson):
    """Mistral's first notation, [TOOL_CALLS] [{"name": ..., "arguments": {...}}]. Its second is read too."""

    def read_calls(self, reader: TextReader, begun: str, tools: Tools) -> Reading[None]:
        """A list, or a name and an object."""
        yield from read_mistral(reader)


@dataclass(frozen=True, kw_only=True)
class MistralNamed(ToolFormat):
    """Its second, [TOOL_CALLS]name[ARGS]{...} for each call. identified: [CALL_ID] and an id stand behind the name."""

    identified: bool = False

    def read_calls(self, reader: TextReader, begun: str, tools: Tools) -> Reading[None]:
        """A name and an object, or a list."""
        yield from read_mistral(reader)

    def call(self, function: Function, schema: Structure) -> Structure:
        """A name and an object."""
        head = self.begins[0] + function.name
        if not self.identified:
            return tag(head + "[ARGS]", schema, "")
        elements = [{"type": "regex", "pattern": _CALL_ID}, tag("[ARGS]", schema, "")]
        return tag(head + "[CALL_ID]", {"type": "sequence", "elements": elements}, "")

    @property
    def separator(self) -> str:
        """Between calls is nothing."""
        return ""


def read_mistral(reader: TextReader) -> Reading[None]:
    """What stands behind [TOOL_CALLS], in either notation."""
    if (yield from reader.skip_spaces()) == "[":
        yield from read_list(reader)
        return
    name, mark = yield from reader.name_until(_MISTRAL_MARKS)
    if mark == "[CALL_ID]":
        yield from reader.name_until(_MISTRAL_ARGUMENTS)
    yield from read_arguments(reader, name)


_MISTRAL_MARKS = Literals(("[ARGS]", "[CALL_ID]"))
_MISTRAL_ARGUMENTS = Literals(("[ARGS]",))
