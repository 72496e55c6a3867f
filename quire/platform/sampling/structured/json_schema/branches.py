"""From schemas that hold together to branches: each a set of facts without choices; a value fits one at least.

A tableau: choices are followed one after the other, negations are moved inwards until they are facts of their own.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from quire.errors import RequestError
from quire.platform.sampling.structured.json_schema.document import Document, Schema, refuse
from quire.platform.sampling.structured.json_schema.facts import (
    ANYTHING,
    NOTHING,
    ArrayPart,
    Contains,
    Facts,
    Node,
    ObjectPart,
    Scopes,
    key_of,
    kind_of,
    node_of,
)
from quire.platform.sampling.structured.json_schema.formulas import All, Any_, Fact, Formula, Want
from quire.platform.sampling.structured.json_schema.keywords import formula_of
from quire.platform.sampling.structured.json_schema.texts import finds, fits_texts

MAX_BRANCHES = 4096  # of one node
MAX_TRIED_VALUES = 20_000  # of an enum, with a pattern or format
MAX_STEPS = 200_000  # formulas followed, of the whole schema
MAX_IN_PLACE = 400  # references and allOf within each other that lead to the same value
SATISFIABLE_DEPTH = 3  # levels that are looked through to see whether two alternatives of oneOf have a value in common
MAX_OVERLAP_STEPS = 50_000  # of that, of the whole schema: beyond, they are taken to have one


class _Chain(NamedTuple):
    """The schemas around a formula that speak of the same value, the innermost first."""

    schema: Schema
    holds: bool
    depth: int
    outer: _Chain | None


class _Pending(NamedTuple):
    """Formulas that are still to be entered, shared between branches."""

    formula: Formula
    scopes: Scopes
    chain: _Chain | None
    rest: _Pending | None


class Expander:
    """The branches of nodes, kept: nodes repeat."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self._steps = 0
        self._limit = MAX_STEPS
        self._overlap_steps = 0
        self._kept: dict[Node, list[Facts]] = {}
        self._satisfiable: dict[tuple[Node, int], bool] = {}
        self._overlaps: dict[frozenset[Schema], bool] = {}
        self.circular: Schema | None = None  # one that leads back to itself, if any was met

    def branches(self, node: Node) -> list[Facts]:
        """Facts of which one at least holds for what fits the node."""
        if node not in self._kept:
            self._kept[node] = self._expand(node)
        return self._kept[node]

    def _expand(self, node: Node) -> list[Facts]:
        wanted = sorted(node, key=lambda one: (one[0].pointer, one[1]))
        pending: _Pending | None = None
        for schema, holds in reversed(wanted):
            pending = _Pending(Want(schema, holds), (), None, pending)
        open_branches: list[tuple[Facts, _Pending | None]] = [(Facts(), pending)]
        found: list[Facts] = []
        while open_branches:
            facts, pending = open_branches.pop()
            choice = self._follow(facts, pending)
            if choice is not None:
                open_branches += [(facts.copy(), option) for option in reversed(choice)]
            elif facts.kinds and self._finish(facts):
                found.append(facts)
            if len(found) + len(open_branches) > MAX_BRANCHES:
                where = wanted[0][0] if wanted else self.document.root
                raise refuse(
                    where,
                    "",
                    f"its allOf, anyOf, oneOf, not and if combine to more than {MAX_BRANCHES:,} alternatives.",
                )
        return found

    def _follow(self, facts: Facts, pending: _Pending | None) -> list[_Pending] | None:
        """Enters facts up to the next choice, and returns its options; None at the end (with no kinds: a dead one)."""
        while pending is not None and facts.kinds:
            self._step()
            formula, scopes, chain, rest = pending
            if isinstance(formula, Fact):
                formula.enter(facts, scopes)
                pending = rest
            elif isinstance(formula, All):
                for one in reversed(formula.of):
                    rest = _Pending(one, scopes, chain, rest)
                pending = rest
            elif isinstance(formula, Any_):
                if not formula.of:
                    facts.kinds = frozenset()
                elif len(formula.of) > 1:
                    return [_Pending(one, scopes, chain, rest) for one in formula.of]
                else:
                    pending = _Pending(formula.of[0], scopes, chain, rest)
            else:
                pending = self._entered(facts, formula, scopes, chain, rest)
        return None

    def _step(self) -> None:
        self._steps += 1
        if self._steps > self._limit:
            raise _TooLarge(
                f"json schema: it takes more than {MAX_STEPS:,} steps to take it apart, the limit: "
                "make it smaller, or its anyOf and oneOf fewer."
            )

    def _entered(
        self, facts: Facts, want: Want, scopes: Scopes, chain: _Chain | None, rest: _Pending | None
    ) -> _Pending | None:
        schema, holds = want.schema, want.holds
        if isinstance(schema.value, bool):
            if schema.value != holds:
                facts.kinds = frozenset()
            return rest
        outer = chain
        while outer is not None:
            if outer.schema is schema:
                if not holds or not outer.holds:
                    raise refuse(schema, "", "it refers to its own negation.")
                self.circular = schema
                facts.kinds = frozenset()  # no value is made of this
                return rest
            outer = outer.outer
        depth = 0 if chain is None else chain.depth + 1
        if depth > MAX_IN_PLACE:
            raise refuse(schema, "", f"more than {MAX_IN_PLACE} references follow each other, the limit.")
        if not holds:
            scopes = ()
        elif "unevaluatedProperties" in schema.value or "unevaluatedItems" in schema.value:
            scopes = (*scopes, schema)
        formula = formula_of(self.document, schema, holds, self.overlap)
        return _Pending(formula, scopes, _Chain(schema, holds, depth, chain), rest)

    def _finish(self, facts: Facts) -> bool:
        """What unevaluated... says, now that it is known what has been evaluated. False: the branch is dead."""
        for keyword, schema, scopes in sorted(facts.unevaluated, key=lambda one: -len(one[2])):
            child = self.document.child(schema, keyword)
            if keyword == "unevaluatedItems":
                self._unevaluated_items(facts, schema, child, scopes)
            else:
                seen = [part for part in facts.objects if schema in part.scopes]
                if all(part.additional is None for part in seen):
                    known = {name: ANYTHING for part in seen for name in part.properties}
                    found = tuple((pattern, ANYTHING) for part in seen for pattern, _ in part.patterns)
                    facts.objects += (ObjectPart(known, found, node_of((child, True)), scopes),)
        if facts.values is not None:
            if len(facts.values) > MAX_TRIED_VALUES and (facts.patterns or facts.formats):
                raise RequestError(
                    f"json schema: an enum of more than {MAX_TRIED_VALUES:,} values together with pattern or format, "
                    "the limit: leave these away and give the values that fit."
                )
            facts.values = [value for value in facts.values if self.fits(facts, value)]
            facts.kinds &= frozenset(map(kind_of, facts.values))
        return bool(facts.kinds)

    def _unevaluated_items(self, facts: Facts, schema: Schema, child: Schema, scopes: Scopes) -> None:
        parts = [part for part in facts.arrays if schema in part.scopes]
        if any(part.seen is None for part in parts):
            return
        seen = max((part.seen or 0 for part in parts), default=0)
        contains = [one for one in facts.contains if schema in one.scopes]
        options = [child.value, *(wanted.value for one in contains for wanted, _ in one.node)]
        if any(not one.node for one in contains):
            return  # every element is one that is contained
        name = "unevaluatedItems" + "".join(f"+{id(one)}" for one in options[1:])
        made = self.document.made(schema, name, {"anyOf": options} if len(options) > 1 else child.value)
        if len(options) == 1:
            made = child
        facts.arrays += (ArrayPart((ANYTHING,) * seen, node_of((made, True)), scopes, None),)

    # Does a value fit, and is there one that does?

    def admits(self, node: Node, value: Any) -> bool:
        """Whether a value validates against the node."""
        if not node:
            return True
        return any(
            self.fits(facts, value) and (facts.values is None or key_of(value) in set(map(key_of, facts.values)))
            for facts in self.branches(node)
        )

    def fits(self, facts: Facts, value: Any) -> bool:
        """Whether all facts hold of a value, apart from `values`."""
        kind = kind_of(value)
        if kind not in facts.kinds:
            return False
        if kind in ("integer", "fraction"):
            return facts.numbers().admits(value)
        if kind == "string":
            return fits_texts(facts, value)
        if kind == "array":
            return self._fits_array(facts, value)
        if kind == "object":
            return self._fits_object(facts, value)
        return not any(one is value for one in facts.excluded)

    def _fits_array(self, facts: Facts, value: list[Any]) -> bool:
        self._step()
        if not facts.min_items <= len(value) <= (len(value) if facts.max_items is None else facts.max_items):
            return False
        if facts.unique and len(set(map(key_of, value))) < len(value):
            return False
        if not all(self.admits(facts.element(place), one) for place, one in enumerate(value)):
            return False
        return all(self._contained(one, value) for one in facts.contains)

    def _contained(self, contains: Contains, value: list[Any]) -> bool:
        count = sum(self.admits(contains.node, one) for one in value[contains.start :])
        return contains.least <= count and (contains.most is None or count <= contains.most)

    def _fits_object(self, facts: Facts, value: dict[str, Any]) -> bool:
        self._step()
        if len(value) < facts.min_properties or not all(name in value for name in facts.required):
            return False
        if facts.max_properties is not None and len(value) > facts.max_properties:
            return False
        if not all(self.admits(node, name) for node in facts.names for name in value):
            return False
        if not all(self.admits(self.property_node(facts, name), one) for name, one in value.items()):
            return False
        return all(
            any(
                name not in some.names
                and not any(finds(pattern, name, wide=True) for pattern in some.patterns)
                and (some.matching is None or finds(some.matching, name))
                and self.admits(some.key, name)
                and self.admits(some.node, one)
                for name, one in value.items()
            )
            for some in facts.some
        )

    def property_node(self, facts: Facts, name: str) -> Node:
        """What a property of this name is."""
        wanted: list[tuple[Schema, bool]] = []
        for part in facts.objects:
            named = name in part.properties
            wanted += part.properties.get(name, ())
            surely = named
            for pattern, node in part.patterns:
                if finds(pattern, name, wide=True):
                    wanted += node
                    surely = surely or finds(pattern, name)
            if part.additional is not None and not surely:
                wanted += part.additional
        return node_of(*wanted)

    def overlap(self, one: Schema, other: Schema) -> bool:
        """Whether there may be a value that validates against both."""
        pair = frozenset((one, other))
        if pair not in self._overlaps and are_apart(self._told(one), self._told(other)):
            self._overlaps[pair] = False
        if pair not in self._overlaps:
            if self._overlap_steps > MAX_OVERLAP_STEPS:
                return True
            self._overlaps[pair] = True  # while it is looked at: a schema may lead back here
            started = self._steps
            self._limit, limit = min(self._limit, started + 5000), self._limit
            try:
                self._overlaps[pair] = self.satisfiable(node_of((one, True), (other, True)), SATISFIABLE_DEPTH)
            except _TooLarge:
                pass
            finally:
                self._limit = limit
                self._overlap_steps += self._steps - started
        return self._overlaps[pair]

    def _told(self, schema: Schema) -> Any:
        """What a schema says, or the one that it refers to alone."""
        for _ in range(MAX_IN_PLACE):
            if not isinstance(schema.value, dict) or "$ref" not in schema.value:
                break
            schema = self.document.resolve(schema, "$ref")
        return schema.value

    def satisfiable(self, node: Node, depth: int) -> bool:
        """False if it is certain, looking so many levels deep, that no value fits."""
        if node == NOTHING:
            return False
        if not node or depth == 0:
            return True
        if (node, depth) not in self._satisfiable:
            self._satisfiable[node, depth] = True
            self._satisfiable[node, depth] = any(self._possible(facts, depth) for facts in self.branches(node))
        return self._satisfiable[node, depth]

    def _possible(self, facts: Facts, depth: int) -> bool:
        if facts.values is not None:
            return bool(facts.values)
        return bool(facts.kinds - {"array", "object", "integer", "fraction", "string"}) or any(
            (
                bool(facts.kinds & {"integer", "fraction"}) and not _empty_range(facts),
                "string" in facts.kinds and (facts.max_length is None or facts.max_length >= facts.min_length),
                "array" in facts.kinds
                and (facts.max_items is None or facts.max_items >= facts.min_items)
                and all(self.satisfiable(facts.element(place), depth - 1) for place in range(min(facts.min_items, 64))),
                "object" in facts.kinds
                and (facts.max_properties is None or facts.max_properties >= facts.min_properties)
                and all(self.satisfiable(self.property_node(facts, name), depth - 1) for name in facts.required),
            )
        )


def are_apart(one: Any, other: Any) -> bool:
    """Whether it is seen at once that no value fits both: by their values, or those of a property that both need."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    if not _are_common(_values_of(one), _values_of(other)):
        return True
    if one.get("type") != "object" or other.get("type") != "object":
        return False
    mine, theirs = one.get("properties"), other.get("properties")
    needed, also = one.get("required"), other.get("required")
    if not isinstance(mine, dict) or not isinstance(theirs, dict):
        return False
    if not isinstance(needed, list) or not isinstance(also, list):
        return False
    return any(
        not _are_common(_values_of(mine.get(name)), _values_of(theirs.get(name)))
        for name in needed
        if isinstance(name, str) and name in also
    )


def _values_of(schema: Any) -> frozenset[Any] | None:
    """const and enum, where they are of texts; None where nothing is known."""
    if not isinstance(schema, dict):
        return None
    found = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(found, list) or not all(isinstance(one, str | int) for one in found):
        return None
    return frozenset(map(key_of, found))


def _are_common(one: frozenset[Any] | None, other: frozenset[Any] | None) -> bool:
    return one is None or other is None or not one.isdisjoint(other)


class _TooLarge(RequestError):
    """The limit of steps is reached."""


def _empty_range(facts: Facts) -> bool:
    low, high = facts.low, facts.high
    if low is None or high is None:
        return False
    return low.value > high.value or (low.value == high.value and (low.strict or high.strict))
