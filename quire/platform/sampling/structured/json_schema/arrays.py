"""The grammar of arrays: elements by their places, counted where something is to be contained or to be unique."""

from __future__ import annotations

from itertools import product
from typing import Any

from quire.platform.sampling.structured.json_schema.document import refuse
from quire.platform.sampling.structured.json_schema.facts import Contains, Facts, Node, both, key_of
from quire.platform.sampling.structured.json_schema.rules import (
    EMPTY,
    NEVER,
    Expr,
    Ref,
    When,
    choice,
    repeated,
    sequence,
)
from quire.platform.sampling.structured.json_schema.writer import Writer

MAX_STATES = 4000  # of an array whose elements are counted
MAX_CONTAINS = 4  # within each other's scope
MAX_UNIQUE = 64  # values of which each may come once


def array_of(compiler: Writer, facts: Facts) -> Expr:
    """All arrays of which the facts hold."""
    if facts.max_items is not None and facts.max_items < facts.min_items:
        return NEVER
    if facts.unique is not None and not (facts.max_items is not None and facts.max_items < 2):
        body = _unique(compiler, facts)
    elif any(one.least or one.most is not None for one in facts.contains):
        body = _counted(compiler, facts)
    else:
        body = _placed(compiler, facts)
    return sequence(compiler.layout.open_array, body, compiler.layout.close_array)


def _prefix_length(facts: Facts) -> int:
    return max((len(part.prefix) for part in facts.arrays), default=0)


def _placed(compiler: Writer, facts: Facts) -> Expr:
    """Elements one after the other; those behind the prefix are alike."""
    comma = compiler.layout.comma
    length, least, most = _prefix_length(facts), facts.min_items, facts.max_items
    if most is not None:
        length = min(length, most)
    rest = compiler.node(facts.element(length))
    left = None if most is None else most - length
    if length == 0:
        if left == 0:
            return EMPTY
        more = repeated(sequence(comma, rest), max(least - 1, 0), None if left is None else left - 1)
        return repeated(sequence(rest, more), min(least, 1), 1)
    body = repeated(sequence(comma, rest), max(least - length, 0), left)
    for place in reversed(range(length)):
        element = compiler.node(facts.element(place))
        body = sequence(*([comma] if place else []), element, body)
        if place >= least:
            body = repeated(body, 0, 1)
        body = compiler.grammar.rule(body)
    return body


def _counted(compiler: Writer, facts: Facts) -> Expr:
    """As many elements as are to be contained: a rule for each place and count."""
    contains = [one for one in facts.contains if one.least or one.most is not None]
    where = compiler.where(facts, "contains")
    if len(contains) > MAX_CONTAINS:
        raise refuse(where, "contains", f"more than {MAX_CONTAINS} of them hold together, the limit.")
    last = max([1, _prefix_length(facts), *(one.start for one in contains), facts.min_items, facts.max_items or 0])
    start = (0, (0,) * len(contains))
    names: dict[tuple[int, tuple[int, ...]], str] = {start: compiler.grammar.new_name()}
    pending = [start]
    while pending:
        state = pending.pop()
        place, counts = state
        options: list[Expr] = []
        if place >= facts.min_items and all(have >= one.least for have, one in zip(counts, contains, strict=True)):
            options.append(EMPTY)
        if facts.max_items is None or place < facts.max_items:
            for node, after in _elements(facts, contains, place, counts):
                following = (min(place + 1, last if facts.max_items is None else place + 1), after)
                if following not in names:
                    if len(names) >= MAX_STATES:
                        raise refuse(
                            where, "contains", f"it takes more than {MAX_STATES:,} states to count, the limit."
                        )
                    names[following] = compiler.grammar.new_name()
                    pending.append(following)
                comma = [compiler.layout.comma] if place else []
                options.append(sequence(*comma, compiler.node(node), Ref(names[following])))
        compiler.grammar.rules[names[state]] = choice(options)
    return Ref(names[start])


def _elements(
    facts: Facts, contains: list[Contains], place: int, counts: tuple[int, ...]
) -> list[tuple[Node, tuple[int, ...]]]:
    """What the next element may be, and what has been counted behind it."""
    found = []
    choices: list[list[tuple[Node, int]]] = []
    for have, one in zip(counts, contains, strict=True):
        negated = frozenset((schema, not holds) for schema, holds in one.node)
        if place < one.start or (one.most is None and have >= one.least):
            choices.append([(frozenset(), have)])
        elif one.most is None:
            choices.append([(frozenset(), have), (one.node, have + 1)])
        else:
            options = [] if not one.node else [(negated, have)]
            choices.append(options + ([(one.node, have + 1)] if have < one.most else []))
    for combination in product(*choices):
        nodes = [node for node, _ in combination]
        found.append((both(facts.element(place), *nodes), tuple(have for _, have in combination)))
    return found


def _unique(compiler: Writer, facts: Facts) -> Expr:
    """Each value once: a bit for each, in the parameter of a rule."""
    assert facts.unique is not None
    length, least, most = max(_prefix_length(facts), 1), facts.min_items, facts.max_items
    if any(one.least or one.most is not None for one in facts.contains):
        raise refuse(facts.unique, "uniqueItems", "it is not served together with contains.")
    places = [_values(compiler, facts.element(place)) for place in range(length + 1)]
    if any(values is None for values in places):
        raise refuse(
            facts.unique,
            "uniqueItems",
            f"it is served where the elements are of at most {MAX_UNIQUE} values (enum, const, boolean, or a small "
            "range of integers), or maxItems is 1: a grammar does not remember which texts have been. Leave it away "
            "and check the answer, or give an enum.",
        )
    bits: dict[Any, int] = {}
    for values in places:
        for value in values or ():
            bits.setdefault(key_of(value), len(bits))
    if len(bits) > MAX_UNIQUE:
        raise refuse(facts.unique, "uniqueItems", f"more than {MAX_UNIQUE} different values, the limit.")
    if not bits:
        return EMPTY if least == 0 else NEVER
    for place in range(min(least, MAX_UNIQUE + 1)):
        if len(places[min(place, length)] or ()) <= place:
            if _prefix_length(facts) == 0:
                return NEVER
            raise refuse(facts.unique, "uniqueItems", "prefixItems, items and minItems leave too few different values.")
    names = [compiler.grammar.new_name() for _ in range(length + 1)]
    compiler.grammar.with_parameter.update(names)
    most = len(bits) if most is None else min(most, len(bits))
    for place, values in enumerate(places):
        options: list[Expr] = [When(EMPTY, f"bit_count_ge(_, {least})")]
        following = names[min(place + 1, length)]
        comma = [compiler.layout.comma] if place else []
        for value in values or ():
            bit = bits[key_of(value)]
            more = sequence(*comma, compiler.value(value), Ref(following, f"set_bit({bit})"))
            options.append(When(more, f"and(bit_clear({bit}), bit_count_lt(_, {most}))"))
        compiler.grammar.rules[names[place]] = choice(options)
    return Ref(names[0], "0x0")


def _values(compiler: Writer, node: Node) -> list[Any] | None:
    """All values of a node, if they are few."""
    found: dict[Any, Any] = {}
    for facts in compiler.expander.branches(node):
        values = facts.values
        if values is None:
            values = _few(facts)
        if values is None:
            return None
        found.update((key_of(value), value) for value in values)
    return list(found.values())


def _few(facts: Facts) -> list[Any] | None:
    if facts.kinds - {"null", "boolean", "integer"}:
        return None
    values: list[Any] = [None] if "null" in facts.kinds else []
    if "boolean" in facts.kinds:
        values += [one for one in (True, False) if not any(one is other for other in facts.excluded)]
    if "integer" in facts.kinds:
        if facts.low is None or facts.high is None or facts.high.value - facts.low.value > MAX_UNIQUE:
            return None
        numbers = facts.numbers()
        first = int(facts.low.value) - 1
        values += [one for one in range(first, first + MAX_UNIQUE + 3) if numbers.admits(one)]
    return values
