"""The grammar of objects: the properties that are named, in the schema's order, then others."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from quire.platform.sampling.structured.json_schema.document import refuse
from quire.platform.sampling.structured.json_schema.facts import NOTHING, Facts, Node, ObjectPart, SomeProperty, both
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
from quire.platform.sampling.structured.json_schema.texts import expression_of, finds, is_empty
from quire.platform.sampling.structured.json_schema.writer import Members, Writer

MAX_PATTERNS = 6  # patternProperties that hold together: a name finds any of them, or not
MAX_COUNTED = 20_000  # rules of an object whose properties are counted
# Other names that are needed, more than one of them, begin differently: so they are different names.
_BEGINNINGS = [*(f"[{letter}{letter.upper()}]" for letter in "abcdefghijklmnopqrstuvwxyz"), *"0123456789"]
MAX_DISTINCT = len(_BEGINNINGS)


class _Named(NamedTuple):
    """A property that is listed: as the first one, and behind another."""

    first: Expr
    later: Expr
    required: bool


class _Class(NamedTuple):
    """Names that are not listed, and what they stand for."""

    names: list[Facts]  # strings: one of these
    node: Node


def object_of(compiler: Writer, facts: Facts, written: Members | None = None) -> Expr:
    """All objects of which the facts hold. written: how; only those whose properties are all named then."""
    if facts.max_properties is not None and facts.max_properties < facts.min_properties:
        return NEVER
    return choice(_object(compiler, *variant, written) for variant in _variants(compiler, facts))


def _variants(compiler: Writer, facts: Facts) -> list[tuple[Facts, SomeProperty | None]]:
    """What has to be there: a property that is named, or another one, which is given beside."""
    done: list[tuple[Facts, SomeProperty | None]] = [(facts, None)]
    for some in facts.some:
        following: list[tuple[Facts, SomeProperty | None]] = []
        for one, other in done:
            for name in _names(one):
                if (
                    name not in some.names
                    and not any(finds(pattern, name, wide=True) for pattern in some.patterns)
                    and (some.matching is None or finds(some.matching, name))
                    and compiler.expander.admits(some.key, name)
                ):
                    new = one.copy()
                    new.required = (*one.required, *(() if name in one.required else (name,)))
                    new.objects = (*one.objects, ObjectPart({name: some.node}))
                    following.append((new, other))
            following.append((one, _together(some, other)))
        done = [one for one in following if one is not None]
    return done


def _together(some: SomeProperty, other: SomeProperty | None) -> SomeProperty:
    """One property that is both."""
    if other is None:
        return some
    return SomeProperty(
        both(some.node, other.node),
        some.names | other.names,
        (*some.patterns, *other.patterns),
        some.matching if other.matching in (None, some.matching) else other.matching,
        both(some.key, other.key) if other.matching in (None, some.matching) or some.matching is None else NOTHING,
    )


def _names(facts: Facts) -> list[str]:
    named: dict[str, None] = {}
    for part in facts.objects:
        named.update(dict.fromkeys(part.properties))
    named.update(dict.fromkeys(facts.required))
    return list(named)


def _object(compiler: Writer, facts: Facts, some: SomeProperty | None, written: Members | None) -> Expr:
    layout = compiler.layout
    allowed = _allowed_names(compiler, facts)
    listed = _names(facts)
    if allowed is not None and all(one.values is not None for one in allowed):
        names = [name for one in allowed for name in one.values or () if isinstance(name, str)]
        listed += [name for name in names if name not in listed]
        allowed = []
    members: list[_Named] = []
    for name in dict.fromkeys(listed):
        node = compiler.expander.property_node(facts, name)
        fits = node != NOTHING and all(compiler.expander.admits(one, name) for one in facts.names)
        if not fits and name in facts.required:
            return NEVER
        if fits:
            if written is None:
                first = sequence(compiler.text(name), layout.colon, compiler.node(node))
                later = sequence(layout.comma, first)
            else:
                first, later = written.member(compiler, name, node)
            members.append(_Named(first, later, name in facts.required))
    if written is not None:
        tail = _Tail(compiler, facts, [], None if some is None else NEVER)
        return sequence(written.begin, _chain(compiler, facts, members, tail), written.end)
    classes = _classes(compiler, facts, listed, allowed)
    chosen = None
    if some is not None:
        chosen = choice(_member(compiler, one) for one in _restricted(compiler, classes, some))
    tail = _Tail(compiler, facts, classes, chosen)
    return sequence(layout.open_object, _chain(compiler, facts, members, tail), layout.close_object)


def _allowed_names(compiler: Writer, facts: Facts) -> list[Facts] | None:
    """The branches of propertyNames; None: all names are allowed."""
    if not facts.names:
        return None
    return [one for one in compiler.expander.branches(both(*facts.names)) if "string" in one.kinds]


def _classes(compiler: Writer, facts: Facts, listed: list[str], allowed: list[Facts] | None) -> list[_Class]:
    """Other names, by which patterns they find."""
    patterns = list(dict.fromkeys(pattern for part in facts.objects for pattern, _ in part.patterns))
    if len(patterns) > MAX_PATTERNS:
        where = compiler.where(facts, "patternProperties")
        raise refuse(where, "patternProperties", f"more than {MAX_PATTERNS} patterns hold together, the limit.")
    closed = compiler.close_objects and facts.objects and all(part.additional is None for part in facts.objects)
    if allowed == [] or _nothing_else(facts, patterns):
        return []
    found = []
    for size in range(len(patterns) + 1):
        for taken in combinations(patterns, size):
            node = both(*(_other_node(part, taken) for part in facts.objects))
            if node == NOTHING or (closed and not taken):
                continue
            said = tuple((pattern, pattern in taken) for pattern in patterns)
            names = [_narrowed(one, said, listed) for one in ([Facts()] if allowed is None else allowed)]
            found.append(_Class(names, node))
    return found


def _nothing_else(facts: Facts, patterns: list[str]) -> bool:
    """The usual case: additionalProperties is false."""
    return not patterns and any(part.additional == NOTHING for part in facts.objects)


def _other_node(part: ObjectPart, taken: tuple[str, ...]) -> Node:
    found = [node for pattern, node in part.patterns if pattern in taken]
    return both(*found) if found else (part.additional or frozenset())


def _narrowed(names: Facts, said: tuple[tuple[str, bool], ...], listed: list[str]) -> Facts:
    new = names.copy()
    new.kinds = frozenset(("string",))
    new.patterns = (*names.patterns, *said)
    new.excluded = [*names.excluded, *listed]
    if names.values is not None:
        new.values = [name for name in names.values if name not in listed]
    return new


def _restricted(compiler: Writer, classes: list[_Class], some: SomeProperty) -> list[_Class]:
    """The same names, as far as `some` speaks of them."""
    said = tuple((pattern, False) for pattern in some.patterns)
    if some.matching is not None:
        said += ((some.matching, True),)
    keys: list[Facts] = [Facts()]
    if some.key:
        keys = [one for one in compiler.expander.branches(some.key) if "string" in one.kinds]
    return [
        _Class(
            [_merged(name, key, said, sorted(some.names)) for name in one.names for key in keys],
            both(one.node, some.node),
        )
        for one in classes
    ]


def _merged(names: Facts, key: Facts, said: tuple[tuple[str, bool], ...], excluded: list[str]) -> Facts:
    new = _narrowed(names, (*key.patterns, *said), [*excluded, *(one for one in key.excluded if isinstance(one, str))])
    new.formats = (*names.formats, *key.formats)
    new.min_length = max(names.min_length, key.min_length)
    lengths = [one for one in (names.max_length, key.max_length) if one is not None]
    new.max_length = min(lengths) if lengths else None
    if key.values is not None:
        new.values = [one for one in key.values if names.values is None or one in names.values]
    return new


def _key(compiler: Writer, names: Facts, beginning: str = "") -> Expr:
    """A terminal of these names; beginning: of those that begin so."""
    if names.values is not None:
        texts = [one for one in names.values if isinstance(one, str) and one not in names.excluded]
        return choice(compiler.text(one) for one in texts)
    expression = expression_of(names)
    if expression is None:
        return NEVER
    if beginning:
        expression = f'{expression} & /"{beginning}.*/'
    if ("&" in expression or "~" in expression) and is_empty(expression):
        return NEVER
    return compiler.grammar.terminal(expression)


def _member(compiler: Writer, one: _Class, beginning: str = "") -> Expr:
    key = choice(_key(compiler, names, beginning) for names in one.names)
    return sequence(key, compiler.layout.colon, compiler.node(one.node))


class _Tail(NamedTuple):
    """Other properties, behind those that are named. chosen: one that has to be there, the last one."""

    compiler: Writer
    facts: Facts
    classes: list[_Class]
    chosen: Expr | None

    def after(self, count: int, *, counted: bool) -> Expr:
        """What follows so many that are named (or, not counted, none or some)."""
        least = max(self.facts.min_properties - count, 0) if counted else 0
        most = None
        if counted and self.facts.max_properties is not None:
            most = self.facts.max_properties - count
            if most < 0:
                return NEVER
        return self._members(count > 0, least, most)

    def _members(self, follows: bool, least: int, most: int | None) -> Expr:
        compiler, comma = self.compiler, self.compiler.layout.comma
        other = compiler.grammar.rule(choice(_member(compiler, one) for one in self.classes))
        before = [comma] if follows else []
        if self.chosen is not None:
            if least > 1:
                raise self._refused("it is not served together with a negation that asks for another property.")
            if most == 0:
                return NEVER
            some = repeated(sequence(other, comma), 0, None if most is None else most - 1)
            return sequence(*before, some, self.chosen)
        if other == NEVER or most == 0:
            return NEVER if least else EMPTY
        if least > 1:
            return sequence(*before, self._distinct(least), repeated(sequence(comma, other), 0, _less(most, least)))
        if follows:
            return repeated(sequence(comma, other), least, most)
        more = repeated(sequence(comma, other), 0, _less(most, 1))
        return repeated(sequence(other, more), least, 1)

    def _distinct(self, count: int) -> Expr:
        """So many properties that begin differently: a bit for each beginning, in the parameter of a rule."""
        if count > MAX_DISTINCT:
            raise self._refused(f"at most {MAX_DISTINCT} properties more than those that are named can be asked for.")
        compiler = self.compiler
        name = compiler.grammar.new_name()
        compiler.grammar.with_parameter.add(name)
        options: list[Expr] = []
        for bit, beginning in enumerate(_BEGINNINGS):
            member = choice(_member(compiler, one, beginning) for one in self.classes)
            if member != NEVER:
                more = sequence(member, compiler.layout.comma, Ref(name, f"set_bit({bit})"))
                options.append(When(more, f"and(bit_clear({bit}), bit_count_lt(_, {count - 1}))"))
                options.append(When(member, f"and(bit_clear({bit}), bit_count_eq(_, {count - 1}))"))
        if len(options) < 2 * count:
            raise self._refused("there are not enough names, or they begin alike.")
        compiler.grammar.rules[name] = choice(options)
        compiler.grammar.different[name] = count
        return Ref(name, "0x0")

    def _refused(self, why: str) -> Exception:
        where = self.compiler.where(self.facts, "minProperties")
        return refuse(where, "minProperties", why)


def _less(most: int | None, count: int) -> int | None:
    return None if most is None else most - count


def _chain(compiler: Writer, facts: Facts, members: list[_Named], tail: _Tail) -> Expr:
    """A rule for each place and count: the property is there, or it is not."""
    needed = sum(member.required for member in members)
    most = facts.max_properties
    more = bool(tail.classes) or tail.chosen is not None
    counted = facts.min_properties > needed or (most is not None and (more or most < len(members)))
    reached = [{0}]
    for member in members:
        after = {count + 1 if counted else 1 for count in reached[-1]}
        reached.append(after if member.required else after | reached[-1])
    if sum(map(len, reached)) > MAX_COUNTED:
        where = compiler.where(facts, "minProperties")
        raise refuse(
            where, "minProperties", f"counting the properties takes more than {MAX_COUNTED:,} rules, the limit."
        )
    following = {count: compiler.grammar.rule(tail.after(count, counted=counted)) for count in reached[-1]}
    for place in reversed(range(len(members))):
        member = members[place]
        current: dict[int, Expr] = {}
        for count in reached[place]:
            written = member.later if count else member.first
            options = [sequence(written, following[count + 1 if counted else 1])]
            if not member.required:
                options.append(following[count])
            current[count] = compiler.grammar.rule(choice(options))
        following = current
    return following[0]
