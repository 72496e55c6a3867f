"""What one branch of a schema says of a value, by the value's type: facts that hold together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.platform.sampling.structured.json_schema.document import FALSE, Schema
from quire.platform.sampling.structured.json_schema.numbers import Bound, Numbers, exactly

# A number that is no integer is a kind of its own, so that no two kinds have a value in common.
KINDS = frozenset(("null", "boolean", "integer", "fraction", "string", "array", "object"))
TYPES = {
    **{kind: frozenset((kind,)) for kind in KINDS - {"fraction"}},
    "number": frozenset(("integer", "fraction")),
}

Node = frozenset[tuple[Schema, bool]]  # schemas that a value validates against (True), or must not (False)
Scopes = tuple[Schema, ...]  # the schemas with unevaluated... that a fact counts for, the outermost first

ANYTHING: Node = frozenset()
NOTHING: Node = frozenset(((FALSE, True),))


def node_of(*wanted: tuple[Schema, bool]) -> Node:
    """The node of these, without what says nothing."""
    found = set()
    for schema, holds in wanted:
        if isinstance(schema.value, bool) or schema.value == {}:
            says = schema.value is not False
            if says != holds:
                return NOTHING
        else:
            found.add((schema, holds))
    if any((schema, not holds) in found for schema, holds in found):
        return NOTHING
    return frozenset(found)


def both(*nodes: Node) -> Node:
    """What validates against all of them."""
    return node_of(*(wanted for node in nodes for wanted in node))


@dataclass(frozen=True, slots=True)
class ArrayPart:
    """prefix: of the first elements; rest: of those behind.  seen: how many of the first it is about (None: all)."""

    prefix: tuple[Node, ...]
    rest: Node
    scopes: Scopes = ()
    seen: int | None = 0


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """properties, patterns: what those of these names are; additional: what all others are (None: nothing is said)."""

    properties: dict[str, Node]
    patterns: tuple[tuple[str, Node], ...] = ()
    additional: Node | None = None
    scopes: Scopes = ()


@dataclass(frozen=True, slots=True)
class Contains:
    """At least `least`, at most `most` of the elements from number `start` on are `node`."""

    node: Node
    least: int
    most: int | None
    start: int = 0
    scopes: Scopes = ()


@dataclass(frozen=True, slots=True)
class SomeProperty:
    """There is a property with a value `node`.

    names, patterns: its name is none of these, and finds none of these.  matching: a pattern that it finds, if given.
    key: what it validates against.
    """

    node: Node
    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()
    matching: str | None = None
    key: Node = ANYTHING


@dataclass(slots=True)
class Facts:
    """All of one branch. Those of a type say nothing of values of other types."""

    kinds: frozenset[str] = KINDS
    values: list[Any] | None = None  # one of these
    excluded: list[Any] = field(default_factory=list)  # none of these: no arrays or objects
    low: Bound | None = None
    high: Bound | None = None
    divisors: tuple[int | float, ...] = ()
    not_divisors: tuple[int | float, ...] = ()
    min_length: int = 0
    max_length: int | None = None
    patterns: tuple[tuple[str, bool], ...] = ()  # with whether it is to be found
    formats: tuple[str, ...] = ()
    arrays: tuple[ArrayPart, ...] = ()
    contains: tuple[Contains, ...] = ()
    min_items: int = 0
    max_items: int | None = None
    unique: Schema | None = None  # that says so
    objects: tuple[ObjectPart, ...] = ()
    names: tuple[Node, ...] = ()
    required: tuple[str, ...] = ()
    min_properties: int = 0
    max_properties: int | None = None
    count_at: Schema | None = None  # that bounds the number of properties
    some: tuple[SomeProperty, ...] = ()
    unevaluated: tuple[tuple[str, Schema, Scopes], ...] = ()  # keyword, schema that has it

    def copy(self) -> Facts:
        return Facts(**{name: getattr(self, name) for name in self.__slots__})

    def numbers(self) -> Numbers:
        """What is said of numbers."""
        return Numbers(
            "integer" in self.kinds,
            "fraction" in self.kinds,
            self.low,
            self.high,
            tuple(exactly(one) for one in self.divisors),
            self.divisors,
            self.not_divisors,
            frozenset(exactly(one) for one in self.excluded if is_number(one)),
        )

    def element(self, place: int) -> Node:
        """What the element of this number is."""
        return both(*(part.prefix[place] if place < len(part.prefix) else part.rest for part in self.arrays))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def kind_of(value: Any) -> str:
    """The kind of a JSON value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if value == int(value) else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def key_of(value: Any) -> Any:
    """The same for equal values, and only for them: 1 is 1.0, and neither is true."""
    if isinstance(value, list):
        return ("array", *map(key_of, value))
    if isinstance(value, dict):
        return ("object", frozenset((name, key_of(one)) for name, one in value.items()))
    return (kind_of(value), value)
