"""Calls as Python writes them, [f(a=1, b="x"), g()]: Llama 4's, and others'. What comes of them is JSON.

An argument is given on when it is complete.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from quire.platform.outputs.messages.json_text import Take, text_as_json
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

_WORD = re.compile(r"[\w.+\-]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_STRING = {
    quote: re.compile(rf"(?:[^{quote}\\]++|\\.)*+", re.DOTALL) for quote in "'\""
}  # up to a quote, or an escape that is cut
_ESCAPE = re.compile(r"\\(?:(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL)
_LETTERS = {
    "n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v",
    "\n": "", "\\": "\\", "'": "'", '"': '"', "/": "/",
}  # fmt: skip
_CLOSED_BY = {"[": "]", "{": "}", "(": ")"}
_MAX_WORD = 512


@dataclass(frozen=True, kw_only=True)
class PythonicFormat(ToolFormat):
    """A list of calls at the beginning of an answer, or behind one of `begins`.

    At the beginning it is one if it calls a function that there is.
    """

    opens: str = "["

    def read_calls(self, reader: TextReader, begun: str, tools: Tools) -> Reading[None]:
        """The list, and the closing tag if there is one."""
        known = None if begun else names_of(tools)
        if (yield from reader.skip_spaces()) != "[":
            raise Malformed
        reader.advance(reader.at + 1)
        first = True
        while (char := (yield from reader.skip_spaces())) != "]":
            if char == "," and not first:
                reader.advance(reader.at + 1)
                yield from reader.skip_spaces()
            elif not first:
                raise Malformed
            yield from _read_call(reader, known)
            reader.hold("")
            first = False
        reader.advance(reader.at + 1)
        if first:
            raise Malformed  # an empty list is no call
        reader.drop_held()
        if self.ends:
            yield from read_end(reader, Literals(self.ends))

    def call(self, function: Function, schema: Structure) -> Structure:
        """One call, without the brackets."""
        return tag(function.name + "(", {**schema, "type": "pythonic_arguments"}, ")")

    def calls(self, functions: Sequence[Function], parallel: bool) -> Structure:
        """A list."""
        return tag("[", self._listed(functions, parallel, True), "]")

    def text_with_calls(self, functions: Sequence[Function], parallel: bool) -> Structure | None:
        """Text, and a list behind the tag. A list without it is not shaped: a bracket is in any text."""
        if not self.begins:
            return None
        tags = [tag(self.begins[0] + "[", self._listed(functions, parallel, False), "]" + self.ends[0])]
        return free_text([self.begins[0]], tags, parallel)

    def _listed(self, functions: Sequence[Function], parallel: bool, forced: bool) -> Structure:
        tags = [self.call(function, arguments_of(function, forced)) for function in functions]
        return listed(tags, ", ", parallel)


def _read_call(reader: TextReader, known: frozenset[str] | None) -> Reading[None]:
    """A name and arguments, each with a name of its own."""
    name = yield from _read_word(reader)
    if (known is not None and name not in known) or (yield from reader.skip_spaces()) != "(":
        raise Malformed
    reader.advance(reader.at + 1)
    take: Take | None = None
    begins = "{"
    while (char := (yield from reader.skip_spaces())) != ")":
        if char == "," and take is not None:
            reader.advance(reader.at + 1)
            if (yield from reader.skip_spaces()) == ")":
                break
        elif take is not None:
            raise Malformed
        key = yield from _read_word(reader)
        if (yield from reader.skip_spaces()) != "=":
            raise Malformed
        reader.advance(reader.at + 1)
        if take is None:
            take = reader.begin_call(name)
        parts = [begins, text_as_json(key), ": "]
        yield from _read_value(reader, parts.append)
        take("".join(parts))
        begins = ", "
    reader.advance(reader.at + 1)
    if take is None:
        reader.begin_call(name)("{}")
    else:
        take("}")


def _read_word(reader: TextReader) -> Reading[str]:
    """A name of Python's, or a number or a constant. Raises Malformed for nothing."""
    text = ""
    while (yield from reader.peek()) and (found := _WORD.match(reader.text, reader.at)):
        text += reader.advance(found.end())
        if len(text) > _MAX_WORD:
            raise Malformed
    if not text:
        raise Malformed
    return text


def _read_value(reader: TextReader, take: Take) -> Reading[None]:
    """A value of Python's, as JSON. Depth is that of a list: a hostile one costs no stack."""
    opened: list[str] = []  # what closes the brackets
    key = False  # whether a dict's key comes next
    while True:
        char = yield from reader.skip_spaces()
        if char in ("'", '"'):
            take(text_as_json((yield from _read_string(reader, char))))
        elif key:
            raise Malformed
        elif char in _CLOSED_BY:
            reader.advance(reader.at + 1)
            opened.append(_CLOSED_BY[char])
            key = char == "{"
            take("{" if key else "[")
            if (yield from reader.skip_spaces()) != opened[-1]:
                continue
            key = False
        else:
            take(_constant((yield from _read_word(reader))))
        passed = yield from _pass_end(reader, opened, key, take)
        if not passed:
            return
        key = passed == "," and opened[-1] == "}"


def _pass_end(reader: TextReader, opened: list[str], key: bool, take: Take) -> Reading[str]:
    """Pass over what stands behind a value or, `key`, a dict's key -> what another follows; "" if none does."""
    while opened:
        char = yield from reader.skip_spaces()
        if char == opened[-1] and not key:
            reader.advance(reader.at + 1)
            take("}" if opened.pop() == "}" else "]")
        elif char == (":" if key else ","):
            reader.advance(reader.at + 1)
            if char == "," and (yield from reader.skip_spaces()) == opened[-1]:
                continue  # a comma before the end
            take(": " if key else ", ")
            return char
        else:
            raise Malformed
    return ""


def _constant(text: str) -> str:
    """A constant or a number as JSON. Raises Malformed for what is neither."""
    if text in _WORDS:
        return _WORDS[text]
    if _NUMBER.fullmatch(text):
        return text
    try:
        return json.dumps(float(text) if "." in text or "e" in text.lower() else int(text, 0), allow_nan=False)
    except ValueError:
        raise Malformed from None


def _read_string(reader: TextReader, quote: str) -> Reading[str]:
    """The text that a string holds."""
    reader.advance(reader.at + 1)
    parts: list[str] = []
    while True:
        end = _STRING[quote].match(reader.text, reader.at).end()  # type: ignore[union-attr]  # it matches nothing, too
        if reader.text.startswith(quote, end):
            parts.append(reader.advance(end))
            reader.advance(end + 1)
            break
        if end > reader.at:
            parts.append(reader.advance(end))
        if reader.ended:
            raise Malformed
        yield
    text = _ESCAPE.sub(_unescaped, "".join(parts))
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # JSON's halves of characters


def _unescaped(found: re.Match[str]) -> str:
    """What an escape stands for; one that is none stays as it is."""
    code, octal, letter = found.groups()
    if code:
        number = int(code[1:], 16)
        return chr(number) if number <= sys.maxunicode else found[0]
    return chr(int(octal, 8)) if octal else _LETTERS.get(letter, found[0])
