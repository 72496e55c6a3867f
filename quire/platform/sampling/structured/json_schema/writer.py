"""What the parts of a schema are written with: JSON's signs and the space around them, and a compiler's offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from quire.errors import RequestError
from quire.platform.sampling.structured import pattern_writing, patterns
from quire.platform.sampling.structured.json_schema.branches import Expander
from quire.platform.sampling.structured.json_schema.document import Schema
from quire.platform.sampling.structured.json_schema.facts import Facts, Node
from quire.platform.sampling.structured.json_schema.rules import Expr, Grammar, repeated, sequence
from quire.platform.sampling.structured.json_schema.texts import is_empty


@dataclass(frozen=True, slots=True)
class Spacing:
    """What may stand between JSON's tokens.

    By default one space at most, behind a comma or a colon. compact: nothing. pattern: what it matches.
    """

    compact: bool = False
    pattern: str | None = None


class Layout:
    """JSON's own signs, with the space around them."""

    def __init__(self, grammar: Grammar, spacing: Spacing) -> None:
        def sign(text: str, *, before: bool = True, after: bool = True) -> Expr:
            parts = [space] * before + [grammar.literal(text)] + [space] * after
            return sequence(*parts)

        space: Expr = sequence()
        if spacing.pattern is not None:
            space = repeated(grammar.terminal(_space_expression(spacing.pattern)), 0, 1)
        self.open_object, self.close_object = sign("{", before=False), sign("}", after=False)
        self.open_array, self.close_array = sign("[", before=False), sign("]", after=False)
        self.comma, self.colon = sign(","), sign(":")
        if spacing.pattern is None and not spacing.compact:
            self.comma, self.colon = grammar.terminal("/, ?/"), grammar.terminal("/: ?/")


def _space_expression(pattern: str) -> str:
    try:
        node = pattern_writing.widened(pattern_writing.whole_texts(patterns.parse(pattern), search=False))
    except RequestError as error:
        raise RequestError(f"whitespace_pattern: {error}") from None
    written = pattern_writing.written(node) if node != patterns.Choice(()) else "[^\\x{0}-\\x{10FFFF}]"
    if not is_empty(f"/{written}/ & ~/[ \\t\\n\\r]*/"):
        raise RequestError(f"whitespace_pattern: {pattern!r} matches more than spaces, tabs and line breaks.")
    if is_empty(f"/{written}/ & /[ \\t\\n\\r]+/"):
        return "/ / & ~/ /"
    return f"/{written}/ & /[ \\t\\n\\r]+/"


class Writer(Protocol):
    """What arrays, objects and arguments are written with: a compiler."""

    grammar: Grammar
    layout: Layout
    expander: Expander
    close_objects: bool

    def node(self, node: Node) -> Expr:
        """The rule of what fits a node."""
        ...

    def options(self, facts: Facts) -> list[Expr]:
        """What the facts hold of, kind by kind."""
        ...

    def text(self, text: str) -> Expr:
        """Exactly this string."""
        ...

    def value(self, value: Any) -> Expr:
        """Exactly this value."""
        ...

    def where(self, facts: Facts, keyword: str) -> Schema:
        """A schema to name in an error, if possible one with the keyword."""
        ...


class Members(Protocol):
    """How an object's properties are written, where that is not JSON's way."""

    begin: Expr
    end: Expr

    def member(self, compiler: Writer, name: str, node: Node) -> tuple[Expr, Expr]:
        """A property: as the first one, and behind another. Raises RequestError for a name that cannot be written."""
        ...


@dataclass(frozen=True, slots=True)
class Notation:
    """outermost: how the properties of the object itself are written.  words: of null, true and false."""

    outermost: Members | None = None
    words: tuple[str, str, str] = ("null", "true", "false")
