"""What a format of tool calls says of itself: how calls are read, and what tokens may form them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.platform.outputs.messages.text_reader import Literals, Reading, TextReader
from quire.platform.outputs.messages.tool_choice import Function, Tools

# One of the formats that a structural tag is made of, as a dict: see docs/tool-calling.md.
Structure = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ToolFormat(ABC):
    """How a family of models writes calls of tools.

    name: which the operator gives; aliases: further ones.  families: of models, for people.
    begins: texts by which calls begin, anywhere in an answer.  opens: characters by which they begin at its beginning.
    ends: texts that close them. Behind a call they are notation; elsewhere they are content.
    marks: further texts of the notation. Any of these three may be special tokens of a tokenizer.
    signs: texts that a chat template has if its model writes this format, all those of one group; unlike: that it then
        does not have. Line breaks and quotes count as such where the template escapes them. Without signs it is never
        found by a template.
    together: the name of the format of reasoning that it is one with.
    short_ids: ids of calls have nine letters and digits, which Mistral's templates ask for.
    """

    name: str
    aliases: tuple[str, ...] = ()
    families: str = ""
    begins: tuple[str, ...] = ()
    opens: str = ""
    ends: tuple[str, ...] = ()
    marks: tuple[str, ...] = ()
    signs: tuple[tuple[str, ...], ...] = ()
    unlike: tuple[str, ...] = ()
    together: str = ""
    short_ids: bool = False

    @abstractmethod
    def read_calls(self, reader: TextReader, begun: str, tools: Tools) -> Reading[None]:
        """Read on behind `begun`, one of `begins`, up to the end of the calls that it opens; "": before one of `opens`.

        Raises Malformed where they are none: what has been read since `begun` is content, unless a call has begun.
        """

    @abstractmethod
    def call(self, function: Function, schema: Structure) -> Structure:
        """One call, from its beginning to its end. schema: a structure of its arguments as JSON."""

    def calls(self, functions: Sequence[Function], parallel: bool) -> Structure:
        """Calls alone, at least one; parallel: or several."""
        return listed([self.call(function, arguments_of(function)) for function in functions], self.separator, parallel)

    def text_with_calls(self, functions: Sequence[Function], parallel: bool) -> Structure | None:
        """Free text with calls in it, each of them shaped from its beginning; None where that cannot be said.

        Without `begins` it cannot: what opens calls may open an answer, too.
        """
        if not self.begins:
            return None
        tags = [self.call(function, arguments_of(function, False)) for function in functions]
        return free_text(list(self.begins), tags, parallel)

    @property
    def separator(self) -> str:
        """Between calls that stand behind one another."""
        return "\n"

    @property
    def notation(self) -> tuple[str, ...]:
        """All of its texts that may be special tokens."""
        return (*self.begins, *self.ends, *self.marks)


def arguments_of(function: Function, forced: bool = True) -> Structure:
    """The structure of a function's arguments. forced: in a call that the request asks for."""
    free = function.strict is False and not forced
    schema = {"type": "json_schema", "json_schema": {"type": "object"} if free else dict(function.schema)}
    return {**schema, "place": function.place} if function.place else schema


def tag(begin: str, content: Structure, end: str) -> Structure:
    """A text, what it opens, and the text that closes it."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def listed(tags: list[Structure], separator: str, parallel: bool) -> Structure:
    """One of these, or several with a separator between them."""
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def free_text(triggers: list[str], tags: list[Structure], parallel: bool) -> Structure:
    """Text in which a trigger begins one of these."""
    return {
        "type": "triggered_tags",
        "triggers": triggers,
        "tags": tags,
        "at_least_one": False,
        "stop_after_first": not parallel,
    }


def read_end(reader: TextReader, ends: Literals) -> Reading[bool]:
    """Pass over spaces and a closing text behind them -> whether one stands there. If not, the spaces stay content."""
    reader.hold("")
    yield from reader.skip_spaces()
    found = yield from reader.literal(ends)
    reader.settle(found, ends)
    return bool(found)


def names_of(tools: Tools) -> frozenset[str]:
    """Of the functions that may be called."""
    return frozenset(function.name for function in tools.callable)
