"""What keywords come to: facts, subschemas, and choices between them; and what reading any keyword takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.errors import RequestError
from quire.platform.sampling.structured.json_schema.document import Document, Schema, refuse
from quire.platform.sampling.structured.json_schema.facts import (
    NOTHING,
    ArrayPart,
    Contains,
    Facts,
    Node,
    ObjectPart,
    Scopes,
    SomeProperty,
    is_number,
    node_of,
)
from quire.platform.sampling.structured.pattern_writing import whole_texts
from quire.platform.sampling.structured.patterns import parse

MAX_COUNT = 1_000_000  # of a length, a number of elements or of properties


@dataclass(frozen=True, slots=True)
class Want:
    """The value validates against the schema, or does not."""

    schema: Schema
    holds: bool = True


@dataclass(frozen=True, slots=True)
class Fact:
    """Enters what is known into a branch's facts."""

    enter: Callable[[Facts, Scopes], None]


@dataclass(frozen=True, slots=True)
class All:
    """All of these hold."""

    of: tuple[Formula, ...]


@dataclass(frozen=True, slots=True)
class Any_:
    """One of these holds, at least."""

    of: tuple[Formula, ...]
    said_by: Schema


Formula = Want | Fact | All | Any_
Overlap = Callable[[Schema, Schema], bool]


def kinds(*names: str) -> Fact:
    """The value is of one of these kinds."""
    allowed = frozenset(names)

    def enter(facts: Facts, scopes: Scopes) -> None:
        facts.kinds &= allowed

    return Fact(enter)


def object_part(part: Callable[[Scopes], ObjectPart]) -> Fact:
    def enter(facts: Facts, scopes: Scopes) -> None:
        facts.objects += (part(scopes),)

    return Fact(enter)


def forbidden(name: str) -> Fact:
    """There is no property of this name."""
    return object_part(lambda scopes: ObjectPart({name: NOTHING}))


def required(*names: str) -> Fact:
    """There are properties of these names."""

    def enter(facts: Facts, scopes: Scopes) -> None:
        facts.required += tuple(name for name in names if name not in facts.required)

    return Fact(enter)


def some_property(one: SomeProperty) -> Formula:
    def enter(facts: Facts, scopes: Scopes) -> None:
        facts.some += (one,)

    return All((kinds("object"), Fact(enter)))


def array_part(part: ArrayPart) -> Fact:
    return Fact(lambda facts, scopes: facts.__setattr__("arrays", (*facts.arrays, part)))


def contains_fact(one: Contains) -> Formula:
    return All((kinds("array"), Fact(lambda facts, scopes: facts.__setattr__("contains", (*facts.contains, one)))))


class KeywordReader:
    """One schema, and whether it is to hold. What derives from it has a method a keyword, or a group of them."""

    def __init__(self, document: Document, schema: Schema, holds: bool, overlap: Overlap) -> None:
        assert isinstance(schema.value, dict)
        self.document, self.schema, self.holds, self.overlap = document, schema, holds, overlap
        self.value = schema.value

    def refused(self, keyword: str, why: str) -> RequestError:
        return refuse(self.schema, keyword, why)

    def child(self, *path: str | int) -> Schema:
        return self.document.child(self.schema, *path)

    def _node(self, schema: Schema) -> Node:
        return node_of((schema, self.holds))

    def _fact(self, kind: str, name: str, value: Any, *, least: bool | None = None) -> Formula:
        """Sets a fact; least: where one is set already the larger (True) or smaller one counts."""

        def enter(facts: Facts, scopes: Scopes) -> None:
            known = getattr(facts, name)
            if least is not None and known is not None:
                setattr(facts, name, max(known, value) if least else min(known, value))
            else:
                setattr(facts, name, value)

        return All((kinds(kind), Fact(enter))) if not self.holds else Fact(enter)

    def _count(self, keyword: str) -> int:
        bound = self.value[keyword]
        if not is_number(bound) or bound < 0 or bound != int(bound):
            raise self.refused(keyword, "it is a whole number from 0 up.")
        if bound > MAX_COUNT and keyword.startswith("min"):
            raise self.refused(keyword, f"the limit is {MAX_COUNT:,}.")
        return min(int(bound), MAX_COUNT)

    def _check_pattern(self, keyword: str, pattern: Any) -> None:
        if not isinstance(pattern, str):
            raise self.refused(keyword, "it is a text.")
        try:
            whole_texts(parse(pattern), search=True)
        except RequestError as error:
            raise self.refused(keyword, str(error)) from None
