"""What keywords of types, values, numbers and texts say, and what their negations say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from quire.errors import RequestError
from quire.platform.sampling.structured.json_schema.facts import (
    KINDS,
    TYPES,
    Facts,
    Scopes,
    is_number,
    key_of,
    kind_of,
)
from quire.platform.sampling.structured.json_schema.formats import ANNOTATIONS, FORMATS
from quire.platform.sampling.structured.json_schema.formulas import (
    All,
    Fact,
    Formula,
    KeywordReader,
    Want,
    kinds,
)
from quire.platform.sampling.structured.json_schema.numbers import Bound, exactly


class ValueKeywords(KeywordReader):
    """type, const, enum, and those of numbers and texts; and all that count."""

    def type(self, keyword: str) -> Iterator[Formula]:
        names = self.value[keyword]
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list) or not all(isinstance(name, str) and name in TYPES for name in names):
            raise self.refused(keyword, f"{names!r:.80} is not one of {', '.join(sorted(TYPES))}, or a list of these.")
        found = frozenset().union(*(TYPES[name] for name in names))
        yield kinds(*(found if self.holds else KINDS - found))

    def enum(self, keyword: str) -> Iterator[Formula]:
        values = [self.value["const"]] if keyword == "const" else self.value[keyword]
        if not isinstance(values, list):
            raise self.refused(keyword, "it is a list of values.")
        if self.holds:
            yield Fact(lambda facts, scopes: _one_of(facts, values))
            return
        plain = [one for one in values if one is not None and not isinstance(one, list | dict)]
        others = [(place, one) for place, one in enumerate(values) if one is None or isinstance(one, list | dict)]
        denied = [self._not_value(keyword, place, one) for place, one in others]
        yield All((Fact(lambda facts, scopes: _none_of(facts, plain)), *denied))

    def _not_value(self, keyword: str, place: int, value: Any) -> Formula:
        """Of null, an array or an object."""
        if value is None:
            return kinds(*(KINDS - {"null"}))
        if isinstance(value, dict):
            says: dict[str, Any] = {
                "type": "object",
                "required": list(value),
                "properties": {name: {"const": one} for name, one in value.items()},
                "additionalProperties": False,
            }
        else:
            says = {
                "type": "array",
                "minItems": len(value),
                "maxItems": len(value),
                "prefixItems": [{"const": one} for one in value],
            }
        return Want(self.document.made(self.schema, f"{keyword}/{place}", says), False)

    # numbers

    def bounds(self, keyword: str) -> Iterator[Formula]:
        lower = keyword in ("minimum", "exclusiveMinimum")
        bound = self.value[keyword]
        if isinstance(bound, bool) and keyword.startswith("exclusive"):
            return  # draft 4: said of the other keyword, which looks here
        if not is_number(bound):
            raise self.refused(keyword, "it is a number.")
        strict = keyword.startswith("exclusive") or self.value.get(f"exclusive{keyword.capitalize()}") is True
        if not self.holds:
            lower, strict = not lower, not strict
        new = Bound(self._exactly(keyword, bound), strict)

        def enter(facts: Facts, scopes: Scopes) -> None:
            known = facts.low if lower else facts.high
            if known is None or new.value == known.value:
                tighter = known is None or new.strict
            else:
                tighter = (new.value > known.value) == lower
            if tighter:
                setattr(facts, "low" if lower else "high", new)

        yield Fact(enter) if self.holds else All((kinds("integer", "fraction"), Fact(enter)))

    def _exactly(self, keyword: str, value: int | float) -> Any:
        try:
            return exactly(value)
        except RequestError as error:
            raise self.refused(keyword, f"{error}.") from None

    def multiple_of(self, keyword: str) -> Iterator[Formula]:
        divisor = self.value[keyword]
        if not is_number(divisor) or divisor <= 0 or self._exactly(keyword, divisor) <= 0:
            raise self.refused(keyword, "it is a number above 0.")
        divisor = int(divisor) if divisor == int(divisor) else divisor

        def enter(facts: Facts, scopes: Scopes) -> None:
            if self.holds:
                facts.divisors += (divisor,)
            else:
                facts.not_divisors += (divisor,)

        yield Fact(enter) if self.holds else All((kinds("integer", "fraction"), Fact(enter)))

    # texts

    def count(self, keyword: str) -> Iterator[Formula]:
        """minLength, maxLength, minItems, maxItems, minProperties, maxProperties."""
        bound = self._count(keyword)
        kind = {"Length": "string", "Items": "array", "Properties": "object"}[keyword[3:]]
        lower = keyword.startswith("min")
        if not self.holds:
            lower, bound = not lower, bound - 1 if lower else bound + 1
        if kind == "object" and self.holds:
            yield Fact(lambda facts, scopes: facts.__setattr__("count_at", self.schema))
        if bound < 0:
            yield kinds()
            return
        name = ("min_" if lower else "max_") + keyword[3:].lower()
        yield self._fact(kind, name, bound, least=lower)

    def pattern(self, keyword: str) -> Iterator[Formula]:
        pattern = self.value[keyword]
        self._check_pattern(keyword, pattern)
        new = (pattern, self.holds)
        fact = Fact(lambda facts, scopes: facts.__setattr__("patterns", tuple(dict.fromkeys((*facts.patterns, new)))))
        yield fact if self.holds else All((kinds("string"), fact))

    def format(self, keyword: str) -> Iterator[Formula]:
        name = self.value[keyword]
        if not isinstance(name, str):
            raise self.refused(keyword, "it is a text.")
        if name in FORMATS and not self.holds:
            raise self.refused(keyword, "what is not of a format cannot be enforced: use a pattern.")
        if name not in FORMATS and name not in ANNOTATIONS:
            raise self.refused(keyword, f"{name!r} is not known; served are {', '.join(sorted(FORMATS))}.")
        if self.holds and name in FORMATS:
            yield Fact(lambda facts, scopes: facts.__setattr__("formats", (*facts.formats, name)))


def _one_of(facts: Facts, values: list[Any]) -> None:
    if facts.values is None:
        unique = {key_of(one): one for one in values}
        facts.values = list(unique.values())
    else:
        allowed = set(map(key_of, values))
        facts.values = [one for one in facts.values if key_of(one) in allowed]
    facts.kinds &= frozenset(map(kind_of, facts.values))


def _none_of(facts: Facts, values: list[Any]) -> None:
    facts.excluded = [*facts.excluded, *values]
