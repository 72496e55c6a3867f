"""What a schema says, keyword by keyword, and what its negation says."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from quire.platform.sampling.structured.json_schema.container_keywords import ContainerKeywords
from quire.platform.sampling.structured.json_schema.document import TRUE, Document, Schema
from quire.platform.sampling.structured.json_schema.formulas import (
    All,
    Any_,
    Formula,
    Overlap,
    Want,
)
from quire.platform.sampling.structured.json_schema.value_keywords import ValueKeywords

MAX_ONE_OF = 300  # alternatives: each is compared with all others

# They bind no value: JSON Schema's own, OpenAPI's, and what well-known libraries write.
NOT_BINDING = frozenset((
    "$anchor", "$comment", "$defs", "$dynamicAnchor", "$id", "$recursiveAnchor", "$schema", "$vocabulary",
    "contentEncoding", "contentMediaType", "contentSchema", "default", "definitions", "deprecated", "description",
    "discriminator", "enumDescriptions", "enumNames", "errorMessage", "example", "examples", "externalDocs", "id",
    "markdownDescription", "name", "propertyOrder", "propertyOrdering", "readOnly", "strict", "title", "tsType",
    "writeOnly", "xml",
))  # fmt: skip


def formula_of(document: Document, schema: Schema, holds: bool, overlap: Overlap) -> Formula:
    """All that a schema says, or that it does not hold."""
    said = list(_Keywords(document, schema, holds, overlap).all())
    return All(tuple(said)) if holds else Any_(tuple(said), schema)


class _Keywords(ValueKeywords, ContainerKeywords):
    """Those that put schemas together, and all others."""

    def all(self) -> Iterator[Formula]:
        done: set[str] = set()
        for keyword in self.value:
            if keyword in NOT_BINDING or keyword.startswith("x-") or keyword in done:
                continue
            method, group = _METHODS.get(keyword, (None, ()))
            if method is None:
                raise self.refused(keyword, "this keyword is not known. Names of annotations begin with x-.")
            done.update(group)
            yield from method(self, keyword)

    def _listed(self, keyword: str) -> list[Schema]:
        listed = self.value[keyword]
        if not isinstance(listed, list) or not listed:
            raise self.refused(keyword, "it is a list of schemas, of one at least.")
        return [self.child(keyword, place) for place in range(len(listed))]

    def all_of(self, keyword: str) -> Iterator[Formula]:
        yield from (Want(one, self.holds) for one in self._listed(keyword))

    def any_of(self, keyword: str) -> Iterator[Formula]:
        wanted = tuple(Want(one, self.holds) for one in self._listed(keyword))
        yield Any_(wanted, self.schema) if self.holds else All(wanted)

    def one_of(self, keyword: str) -> Iterator[Formula]:
        listed = self._listed(keyword)
        if len(listed) > MAX_ONE_OF:
            raise self.refused(
                keyword, f"more than {MAX_ONE_OF} alternatives, the limit: use anyOf where none overlap."
            )
        if not self.holds:
            yield All(tuple(Want(one, False) for one in listed))
            yield from (
                All((Want(one), Want(other)))
                for place, one in enumerate(listed)
                for other in listed[:place]
                if self.overlap(one, other)
            )
            return
        options = []
        for one in listed:
            others = [other for other in listed if other is not one and self.overlap(one, other)]
            if sum(other is one for other in listed) == 1:
                options.append(All((Want(one), *(Want(other, False) for other in others))))
        yield Any_(tuple(options), self.schema)

    def negation(self, keyword: str) -> Iterator[Formula]:
        yield Want(self.child(keyword), not self.holds)

    def condition(self, keyword: str) -> Iterator[Formula]:
        if "if" not in self.value:
            return
        condition = self.child("if")
        then = self.child("then") if "then" in self.value else TRUE
        otherwise = self.child("else") if "else" in self.value else TRUE
        if then is TRUE and otherwise is TRUE and self.holds:
            return
        met = All((Want(condition), Want(then, self.holds)))
        unmet = All((Want(condition, False), Want(otherwise, self.holds)))
        if self.holds:
            yield Any_((met, unmet), self.schema)
        else:
            yield from (met, unmet)

    def reference(self, keyword: str) -> Iterator[Formula]:
        yield Want(self.document.resolve(self.schema, keyword), self.holds)

    def nullable(self, keyword: str) -> Iterator[Formula]:
        if self.value[keyword] is not False:
            raise self.refused(keyword, 'it is OpenAPI 3.0\'s: use "type": [..., "null"].')
        yield from ()


_OBJECT = ("properties", "patternProperties", "additionalProperties")
_ITEMS = ("prefixItems", "items", "additionalItems")
_CONTAINS = ("contains", "minContains", "maxContains")
_CONDITION = ("if", "then", "else")
_GROUPS: dict[tuple[str, ...], Callable[[_Keywords, str], Iterator[Formula]]] = {
    _OBJECT: _Keywords.properties,
    _ITEMS: _Keywords.items,
    _CONTAINS: _Keywords.contains,
    _CONDITION: _Keywords.condition,
}
_SINGLE: dict[str, Callable[[_Keywords, str], Iterator[Formula]]] = {
    "type": _Keywords.type,
    "enum": _Keywords.enum,
    "const": _Keywords.enum,
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"), _Keywords.bounds),
    "multipleOf": _Keywords.multiple_of,
    **dict.fromkeys(
        ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _Keywords.count
    ),
    "pattern": _Keywords.pattern,
    "format": _Keywords.format,
    "uniqueItems": _Keywords.unique_items,
    "unevaluatedItems": _Keywords.unevaluated,
    "unevaluatedProperties": _Keywords.unevaluated,
    "required": _Keywords.required,
    "propertyNames": _Keywords.property_names,
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), _Keywords.dependencies),
    "allOf": _Keywords.all_of,
    "anyOf": _Keywords.any_of,
    "oneOf": _Keywords.one_of,
    "not": _Keywords.negation,
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), _Keywords.reference),
    "nullable": _Keywords.nullable,
}
_METHODS = {
    **{keyword: (method, (keyword,)) for keyword, method in _SINGLE.items()},
    **{keyword: (method, group) for group, method in _GROUPS.items() for keyword in group},
}
KEYWORDS = tuple(_METHODS)
