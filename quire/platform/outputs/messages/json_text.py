"""JSON in a text that arrives in parts: where a value ends, and the call that an object says.

Values are passed on as they are written. What is counted is brackets and quotes alone, so that depth costs nothing;
whether a value is JSON throughout is known too late: its text has been sent.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from quire.platform.outputs.messages.text_reader import MAX_NAME, Malformed, Reading, TextReader

Take = Callable[[str], None]

NAMES = frozenset({"name"})
ARGUMENTS = frozenset({"arguments", "parameters"})
_KEYS = NAMES | ARGUMENTS | {"type", "id"}

_BRACKETS = re.compile(r'[{}\[\]"]')
_STRING = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)  # up to a quote, or an escape that is cut
_SCALAR = re.compile(r"[\w.+-]+")
_HALVES = re.compile(r"[\ud800-\udfff]")  # of characters, which escapes can name and no encoding can write
_MAX_KEY = 256
_MAX_SCALAR = 1024


def text_as_json(text: str) -> str:
    """A text as JSON writes it."""
    return json.dumps(text, ensure_ascii=_HALVES.search(text) is not None)


def read_value(reader: TextReader, take: Take) -> Reading[None]:
    """Pass on a value, which begins here, as it is written. Raises Malformed where none begins, or the text ends."""
    first = yield from reader.peek()
    if first in ("{", "["):
        yield from _read_nested(reader, take)
    elif first == '"':
        yield from _read_string(reader, take)
    else:
        take((yield from read_scalar(reader)))


def read_scalar(reader: TextReader) -> Reading[str]:
    """A number, true, false or null, or what stands in their place. Raises Malformed for nothing."""
    text = ""
    while (yield from reader.peek()) and (found := _SCALAR.match(reader.text, reader.at)):
        text += reader.advance(found.end())
        if len(text) > _MAX_SCALAR:
            raise Malformed
    if not text:
        raise Malformed
    return text


def _read_nested(reader: TextReader, take: Take) -> Reading[None]:
    """An object or a list."""
    depth = 0
    while True:
        found = _BRACKETS.search(reader.text, reader.at)
        if found is None:
            if reader.at < len(reader.text):
                take(reader.advance(len(reader.text)))
            if reader.ended:
                raise Malformed
            yield
            continue
        if found[0] == '"':
            if found.start() > reader.at:
                take(reader.advance(found.start()))
            yield from _read_string(reader, take)
            continue
        take(reader.advance(found.end()))
        depth += 1 if found[0] in "{[" else -1
        if depth == 0:
            return


def _read_string(reader: TextReader, take: Take) -> Reading[None]:
    """A string, quotes included."""
    take(reader.advance(reader.at + 1))
    while True:
        end = _STRING.match(reader.text, reader.at).end()  # type: ignore[union-attr]  # it matches nothing, too
        if reader.text.startswith('"', end):
            take(reader.advance(end + 1))
            return
        if end > reader.at:
            take(reader.advance(end))
        if reader.ended:
            raise Malformed
        yield


def read_string(reader: TextReader, most: int | None = None) -> Reading[str]:
    """A string's value. Raises Malformed for what is none, or has more characters."""
    parts: list[str] = []
    left = None if most is None else 6 * most + 2  # an escape is six characters

    def take(part: str) -> None:
        nonlocal left
        parts.append(part)
        if left is not None:
            left -= len(part)
            if left < 0:
                raise Malformed

    if (yield from reader.peek()) != '"':
        raise Malformed
    yield from _read_string(reader, take)
    try:
        value = str(json.loads("".join(parts), strict=False))
    except ValueError:
        raise Malformed from None
    if (most is not None and len(value) > most) or _HALVES.search(value):
        raise Malformed
    return value


def read_call(reader: TextReader, known: Collection[str] | None = None) -> Reading[None]:
    """The call that an object says, {"name": ..., "arguments": {...}}, its keys in any order; "parameters" counts too.

    It begins when its name and the beginning of its arguments are known; further keys are passed over. Arguments may be
    a string that holds them, and none or null are {}. known: the names that make a call, if not any name does.

    Raises Malformed for what is no such object: before the call has begun nothing is made of it, after that what has
    come of the arguments stays. With `known` further keys than "type" and "id" are malformed too, and so is a call
    without arguments: it may be an answer in JSON.
    """
    name: str | None = None
    before: list[str] = []  # arguments that come before the name
    given = begun = False
    take: Take = before.append

    def begin() -> Take:
        if name is None:
            raise Malformed
        return reader.begin_call(name)

    if (yield from reader.peek()) != "{":
        raise Malformed
    reader.advance(reader.at + 1)
    while (char := (yield from reader.skip_spaces())) != "}":
        if char == ",":
            reader.advance(reader.at + 1)
            continue
        key = yield from _read_key(reader, known is not None)
        if key in NAMES and name is None:
            name = yield from read_string(reader, MAX_NAME)
            if known is not None and name not in known:
                raise Malformed
        elif key in ARGUMENTS and not given:
            given = True
            if (yield from reader.peek()) == "{":
                if name is not None:
                    take, begun = begin(), True
                yield from _read_nested(reader, take)
            else:
                take((yield from _read_other_arguments(reader)))
        else:
            yield from read_value(reader, _pass_over)
    if not begun:
        if known is not None and not given:
            raise Malformed
        take = begin()
        for part in before or ["{}"]:
            take(part)
    reader.advance(reader.at + 1)


def read_list(reader: TextReader, known: Collection[str] | None = None) -> Reading[None]:
    """The calls of a list, each as `read_call` has it. What is malformed behind a call stays content."""
    if (yield from reader.peek()) != "[":
        raise Malformed
    reader.advance(reader.at + 1)
    while (char := (yield from reader.skip_spaces())) != "]":
        if char == ",":
            reader.advance(reader.at + 1)
            continue
        yield from read_call(reader, known)
        reader.hold("")
    reader.advance(reader.at + 1)
    reader.drop_held()


def read_arguments(reader: TextReader, name: str) -> Reading[None]:
    """The object that a call of this name has as arguments; the call begins. Raises Malformed for anything else."""
    if (yield from reader.skip_spaces()) != "{":
        raise Malformed
    yield from _read_nested(reader, reader.begin_call(name))


def _read_key(reader: TextReader, known: bool) -> Reading[str]:
    """A key, the colon and spaces. known: it has to be one that calls have."""
    key = yield from read_string(reader, _MAX_KEY)
    if known and key not in _KEYS:
        raise Malformed
    if (yield from reader.skip_spaces()) != ":":
        raise Malformed
    reader.advance(reader.at + 1)
    yield from reader.skip_spaces()
    return key


def _read_other_arguments(reader: TextReader) -> Reading[str]:
    """Arguments that are no object of their own: a string that holds one, or null."""
    if (yield from reader.peek()) == '"':
        text = (yield from read_string(reader)).strip() or "{}"
    else:
        text = yield from read_scalar(reader)
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise Malformed
    return text


def _pass_over(text: str) -> None:
    """Of a value that no call needs."""
