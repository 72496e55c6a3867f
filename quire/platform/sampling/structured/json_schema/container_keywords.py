"""What keywords of arrays and objects say, and what their negations say."""

from __future__ import annotations

from collections.abc import Iterator

from quire.platform.sampling.structured.json_schema.facts import (
    ANYTHING,
    ArrayPart,
    Contains,
    ObjectPart,
    SomeProperty,
    node_of,
)
from quire.platform.sampling.structured.json_schema.formulas import (
    All,
    Any_,
    Fact,
    Formula,
    KeywordReader,
    Want,
    array_part,
    contains_fact,
    forbidden,
    kinds,
    object_part,
    required,
    some_property,
)


class ContainerKeywords(KeywordReader):
    """Those of arrays, then those of objects."""

    def items(self, keyword: str) -> Iterator[Formula]:
        first = "prefixItems" if "prefixItems" in self.value else "items"
        listed = self.value.get(first)
        if first == "prefixItems" and not isinstance(listed, list):
            raise self.refused(first, "it is a list of schemas.")
        prefix = [self.child(first, place) for place in range(len(listed))] if isinstance(listed, list) else []
        behind = "additionalItems" if first == "items" and isinstance(listed, list) else "items"
        rest = self.child(behind) if behind in self.value and (prefix or behind == "items") else None
        if self.holds:
            nodes = tuple(map(self._node, prefix))
            seen = len(prefix) if rest is None else None
            last = ANYTHING if rest is None else self._node(rest)
            yield Fact(
                lambda facts, scopes: facts.__setattr__("arrays", (*facts.arrays, ArrayPart(nodes, last, scopes, seen)))
            )
            return
        for place, one in enumerate(prefix):
            part = ArrayPart((*(ANYTHING,) * place, self._node(one)), ANYTHING)
            yield All((self._fact("array", "min_items", place + 1, least=True), array_part(part)))
        if rest is not None:
            yield contains_fact(Contains(self._node(rest), 1, None, len(prefix)))

    def contains(self, keyword: str) -> Iterator[Formula]:
        if "contains" not in self.value:
            return
        least = self._count("minContains") if "minContains" in self.value else 1
        most = self._count("maxContains") if "maxContains" in self.value else None
        child = self.child("contains")
        node = node_of((child, True))
        if self.holds:
            yield Fact(
                lambda facts, scopes: facts.__setattr__(
                    "contains", (*facts.contains, Contains(node, least, most, scopes=scopes))
                )
            )
            return
        if least > 0:
            yield contains_fact(Contains(node, 0, least - 1))
        if most is not None:
            yield contains_fact(Contains(node, most + 1, None))

    def unique_items(self, keyword: str) -> Iterator[Formula]:
        unique = self.value[keyword]
        if not isinstance(unique, bool):
            raise self.refused(keyword, "it is true or false.")
        if not unique:
            return
        if not self.holds:
            raise self.refused(keyword, "that elements are not all different cannot be enforced.")
        yield Fact(lambda facts, scopes: facts.__setattr__("unique", self.schema))

    def unevaluated(self, keyword: str) -> Iterator[Formula]:
        if not self.holds:
            raise self.refused(keyword, "its negation cannot be enforced: use additionalProperties or items.")
        self.child(keyword)
        yield Fact(
            lambda facts, scopes: facts.__setattr__(
                "unevaluated", (*facts.unevaluated, (keyword, self.schema, scopes[:-1]))
            )
        )

    # objects

    def properties(self, keyword: str) -> Iterator[Formula]:
        for name in ("properties", "patternProperties"):
            if not isinstance(self.value.get(name, {}), dict):
                raise self.refused(name, "it is an object of schemas.")
        named = {name: self.child("properties", name) for name in self.value.get("properties", {})}
        matched = {one: self.child("patternProperties", one) for one in self.value.get("patternProperties", {})}
        for pattern in matched:
            self._check_pattern("patternProperties", pattern)
        rest = self.child("additionalProperties") if "additionalProperties" in self.value else None
        if self.holds:
            nodes = {name: self._node(one) for name, one in named.items()}
            found = tuple((pattern, self._node(one)) for pattern, one in matched.items())
            others = None if rest is None else self._node(rest)
            yield object_part(lambda scopes: ObjectPart(nodes, found, others, scopes))
            return
        for name, one in named.items():
            part = ObjectPart({name: self._node(one)})
            yield All((kinds("object"), required(name), object_part(lambda scopes, part=part: part)))  # type: ignore[misc]
        for pattern, one in matched.items():
            yield some_property(SomeProperty(self._node(one), matching=pattern))
        if rest is not None:
            yield some_property(SomeProperty(self._node(rest), frozenset(named), tuple(matched)))

    def required(self, keyword: str) -> Iterator[Formula]:
        names = self.value[keyword]
        if isinstance(names, bool):
            return  # draft 3, and what people write by mistake at a property: it binds nothing
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise self.refused(keyword, "it is a list of names.")
        if self.holds:
            yield required(*names)
        else:
            yield from (All((kinds("object"), forbidden(name))) for name in names)

    def property_names(self, keyword: str) -> Iterator[Formula]:
        node = self._node(self.child(keyword))
        if self.holds:
            yield Fact(lambda facts, scopes: facts.__setattr__("names", (*facts.names, node)))
        else:
            yield some_property(SomeProperty(ANYTHING, key=node))

    def dependencies(self, keyword: str) -> Iterator[Formula]:
        """dependentRequired, dependentSchemas, and the older dependencies, which are both."""
        named = self.value[keyword]
        if not isinstance(named, dict):
            raise self.refused(keyword, "it is an object.")
        for name, needs in named.items():
            if isinstance(needs, list) and keyword != "dependentSchemas":
                if not all(isinstance(one, str) for one in needs):
                    raise self.refused(keyword, "each is a list of names.")
                wanted: tuple[Formula, ...] = (required(name, *needs),)
                missing: list[Formula] = [All((required(name), forbidden(one))) for one in needs]
            else:
                if keyword == "dependentRequired":
                    raise self.refused(keyword, "each is a list of names.")
                wanted = (required(name), Want(self.child(keyword, name)))
                missing = [All((required(name), Want(self.child(keyword, name), False)))]
            if self.holds:
                yield Any_((forbidden(name), All((kinds("object"), *wanted))), self.schema)
            else:
                yield from (All((kinds("object"), one)) for one in missing)
