"""Which numbers a schema allows, as a regular expression of their texts.

Numbers that are bounded are written without exponents, and fractions with at most 15 significant digits: those are
distinct as 64-bit floats, so that comparing texts is comparing what every reader makes of them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from math import floor

from quire.errors import RequestError

MAX_DIGITS = 15  # significant ones of a fraction
MAX_INTEGER_DIGITS = 19  # of an integer that nothing bounds: those of 64 bits
MAX_LISTED = 4096  # multiples that are listed one by one
MAX_FRACTIONS = 1000  # multiples that are no integers, to either side of zero, where bounds leave more
MAX_DIVISOR = 100_000  # a whole multipleOf
MAX_WHOLE = 10**15 - 1  # the largest multiple that is written
MAX_MAGNITUDE = 400  # decimal digits of a bound

_FRACTION = r"\.(?:[0-9]{0,14}[1-9]|0)"
ANY_NUMBER = r"-?(?:0|[1-9][0-9]{0,18})(?:\.[0-9]{1,15})?(?:[eE][+-]?[0-9]{1,2})?"
ANY_INTEGER = r"-?(?:0|[1-9][0-9]{0,18})"
ANY_FRACTION = r"-?(?:0|[1-9][0-9]{0,14})\.[0-9]{0,14}[1-9]"


@dataclass(frozen=True, slots=True)
class Bound:
    """value, and whether it is itself out of bounds."""

    value: Fraction
    strict: bool


@dataclass(frozen=True, slots=True)
class Numbers:
    """integers, fractions: which are among them (a fraction is no integer).  multiples: of all of these numbers.

    not_multiples: of none of these.  excluded: values.
    """

    integers: bool
    fractions: bool
    low: Bound | None = None
    high: Bound | None = None
    multiples: tuple[Fraction, ...] = ()
    divisors: tuple[int | float, ...] = ()  # the same, as the schema writes them
    not_multiples: tuple[int | float, ...] = ()
    excluded: frozenset[Fraction] = frozenset()

    @property
    def plain(self) -> bool:
        return not (self.low or self.high or self.multiples or self.not_multiples or self.excluded)

    def admits(self, value: int | float) -> bool:
        exact = exactly(value)
        whole = exact.denominator == 1
        if not (self.integers if whole else self.fractions) or exact in self.excluded:
            return False
        if self.low and (exact < self.low.value or (self.low.strict and exact == self.low.value)):
            return False
        if self.high and (exact > self.high.value or (self.high.strict and exact == self.high.value)):
            return False
        return all(divides(one, value) for one in self.divisors) and not any(
            divides(one, value) for one in self.not_multiples
        )


def exactly(value: int | float) -> Fraction:
    """What the number's shortest text says."""
    if isinstance(value, int):
        if value.bit_length() > 1300:
            raise RequestError(f"a number has more than {MAX_MAGNITUDE} digits, the limit")
        return Fraction(value)
    decimal = Decimal(repr(value))
    if abs(decimal.adjusted()) > MAX_MAGNITUDE:
        raise RequestError(f"the number {value!r} has more than {MAX_MAGNITUDE} digits")
    return Fraction(decimal)


def divides(divisor: int | float, value: int | float) -> bool:
    """As validators see it, which divide floats, and by arithmetic: both."""
    if exactly(value) % exactly(divisor):
        return False
    if not isinstance(divisor, float):
        return value % divisor == 0
    try:
        quotient = value / divisor
    except OverflowError:
        return True
    return quotient in (float("inf"), float("-inf")) or int(quotient) == quotient


def expressions_of(numbers: Numbers) -> list[str]:
    """Lark's expressions of the texts of these numbers, each a terminal's or one that begins with %json.

    Raises RequestError for what is not served, saying no more than what.
    """
    if numbers.low and numbers.high and numbers.low.value > numbers.high.value:
        return []
    if numbers.plain:
        if numbers.integers and numbers.fractions:
            return [f"/{ANY_NUMBER}/"]
        return [f"/{ANY_INTEGER if numbers.integers else ANY_FRACTION}/"]
    if numbers.multiples or numbers.not_multiples:
        return _multiples(numbers)
    return [_bounded(numbers)]


def _bounded(numbers: Numbers) -> str:
    """By bounds and excluded values alone."""
    low, high = numbers.low, numbers.high
    digits = max([MAX_INTEGER_DIGITS, *(len(str(abs(floor(one.value)))) for one in (low, high) if one)])
    kinds = []
    if numbers.integers:
        kinds.append(f"/-?(?:0|[1-9][0-9]{{0,{digits - 1}}})" + (r"(?:\.0)?/" if numbers.fractions else "/"))
    if numbers.fractions:
        # At most 15 digits, the zeros before them aside; the last one is not zero.
        kinds.append(
            f"(/-?(?:0|[1-9][0-9]{{0,14}}){_FRACTION}/ & /-?(?:0\\.0*)?(?:[0-9]\\.?){{1,{MAX_DIGITS}}}/"
            + (")" if numbers.integers else r" & ~/.*\.0/)")
        )
    parts = ["(" + " | ".join(kinds) + ")", *_sides(low, high)]
    for value in sorted(numbers.excluded):
        if text := plain_text(value):
            text = text if value else "-?0"
            parts.append(f"~/{text}(?:\\.0+)?/" if value.denominator == 1 else f"~/{text}0*/")
    return " & ".join(parts)


def plain_text(value: Fraction) -> str | None:
    """Without an exponent, as a regular expression; None: it has no end."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    if rest > 1:
        return None
    places = 0
    while (value * 10**places).denominator > 1:
        places += 1
    digits = str(abs(value.numerator * 10**places // value.denominator)).zfill(places + 1)
    sign = "-" if value < 0 else ""
    return sign + digits if not places else f"{sign}{digits[:-places]}\\.{digits[-places:]}"


def _sides(low: Bound | None, high: Bound | None) -> list[str]:
    """Bounds as intersections: of the numbers from zero up, and of those below it."""
    if low is None and high is None:
        return []
    zero = Bound(Fraction(0), strict=False)
    options = []
    if high is None or high.value > 0 or (high.value == 0 and not high.strict):
        least = low if low is not None and low.value >= 0 else zero
        options.append(_between("", least, high))
    if low is None or low.value < 0:
        above = Bound(-high.value, high.strict) if high and high.value < 0 else Bound(Fraction(0), strict=True)
        below = Bound(-low.value, low.strict) if low else None
        options.append(_between("-", above, below))
    return ["(" + " | ".join(options) + ")"] if options else ["/[^-0-9]/"]


def _between(sign: str, low: Bound, high: Bound | None) -> str:
    """Of magnitudes; both bounds from zero up."""
    parts = [f"/{sign}(?:{_at_least(low)})/"]
    if high is not None:
        parts.append(f"/{sign}(?:{_at_most(high)})/")
    return "(" + " & ".join(parts) + ")"


def _split(value: Fraction) -> tuple[str, str]:
    """Digits before and behind the point, the latter without zeros at the end."""
    text = plain_text(value)
    if text is None:
        raise RequestError(f"the bound {value} has no end as a decimal")
    whole, _, fraction = text.replace("\\", "").partition(".")
    return whole, fraction


_REST = r"(?:\.[0-9]+)?"


def _at_least(bound: Bound) -> str:
    whole, fraction = _split(bound.value)
    options = [f"(?:{_greater(whole)}){_REST}"]
    if not fraction and not bound.strict:
        options.append(whole + _REST)
    elif not fraction:
        options.append(whole + r"\.[0-9]*[1-9]")
    else:
        for place, digit in enumerate(fraction):
            if digit < "9":
                options.append(f"{whole}\\.{fraction[:place]}[{chr(ord(digit) + 1)}-9][0-9]*")
        options.append(f"{whole}\\.{fraction}[0-9]*" + ("[1-9]" if bound.strict else ""))
    return "|".join(options)


def _at_most(bound: Bound) -> str:
    whole, fraction = _split(bound.value)
    options = []
    if whole != "0":
        options.append(f"(?:{_less(whole)}){_REST}")
    if fraction:
        options.append(whole + r"(?:\.0)?")
        for place, digit in enumerate(fraction):
            if digit > "0":
                options.append(f"{whole}\\.{fraction[:place]}[0-{chr(ord(digit) - 1)}][0-9]*")
                if place:
                    options.append(f"{whole}\\.{fraction[:place]}")
        if not bound.strict:
            options.append(f"{whole}\\.{fraction}")
    elif not bound.strict:
        options.append(whole + r"(?:\.0)?")
    return "|".join(options) or r"[^0-9\-]"


def _greater(digits: str) -> str:
    """Whole numbers above this one."""
    options = [f"[1-9][0-9]{{{len(digits)},}}"]
    options += [
        f"{digits[:place]}[{chr(ord(digit) + 1)}-9][0-9]{{{len(digits) - place - 1}}}"
        for place, digit in enumerate(digits)
        if digit < "9"
    ]
    return "|".join(options).replace("[0-9]{0}", "")


def _less(digits: str) -> str:
    """Whole numbers below this one, which is not 0."""
    options = ["0"]
    if len(digits) > 1:
        options.append(f"[1-9][0-9]{{0,{len(digits) - 2}}}")
    for place, digit in enumerate(digits):
        least = "1" if place == 0 else "0"
        if digit > least:
            rest = len(digits) - place - 1
            options.append(f"{digits[:place]}[{least}-{chr(ord(digit) - 1)}]" + (f"[0-9]{{{rest}}}" if rest else ""))
    return "|".join(options)


def _multiples(numbers: Numbers) -> list[str]:
    """Multiples: listed where they are few, else by a pattern of their remainders."""
    step = _common_multiple(numbers.multiples) if numbers.multiples else Fraction(1)
    if not numbers.fractions and numbers.integers:
        step = _common_multiple((step, Fraction(1)))
    listed = _listed(numbers, step) if numbers.multiples or not numbers.fractions else None
    if listed is not None:
        return [f"/{'|'.join(listed)}/"] if listed else []
    if numbers.not_multiples:
        raise RequestError("not multipleOf is served where minimum and maximum leave few numbers")
    return _endless_multiples(numbers, step)


def _common_multiple(steps: tuple[Fraction, ...]) -> Fraction:
    found = steps[0]
    for one in steps[1:]:
        product = found * one
        first, second = found.numerator * one.denominator, one.numerator * found.denominator
        while second:
            first, second = second, first % second
        found = product / Fraction(first, found.denominator * one.denominator)
    return found


def _listed(numbers: Numbers, step: Fraction) -> list[str] | None:
    """Every one, if both bounds are given and they are few."""
    if numbers.low is None or numbers.high is None:
        return None
    first, last = -floor(-numbers.low.value / step), floor(numbers.high.value / step)
    if last - first >= MAX_LISTED:
        return None
    return [text for place in range(first, last + 1) if (text := _tried(numbers, step * place))]


def _tried(numbers: Numbers, value: Fraction) -> str | None:
    """Its text, if the judge will have it."""
    number = int(value) if value.denominator == 1 else float(value)
    if isinstance(number, float) and exactly(number) != value:
        return None
    return plain_text(value) if numbers.admits(number) else None


def _endless_multiples(numbers: Numbers, step: Fraction) -> list[str]:
    """Whole multiples by their remainders; fractions up to where every one has been tried."""
    parts = []
    if numbers.integers:
        for divisor in numbers.divisors:
            if isinstance(divisor, float) and not _divides_surely(divisor):
                raise RequestError(f"multipleOf {divisor!r} is served between a minimum and a maximum")
        parts.append(_whole_multiples(numbers, _common_multiple((step, Fraction(1))).numerator))
    if numbers.fractions and step.denominator > 1:
        tried = (_tried(numbers, step * place) for place in range(-MAX_FRACTIONS, MAX_FRACTIONS + 1))
        fractions = [text for text in tried if text and "." in text]
        if fractions:
            parts.append(f"/{'|'.join(fractions)}/")
    return parts


def _divides_surely(divisor: float) -> bool:
    """Whether the float division of every whole multiple comes out whole: its own error is below half a unit."""
    exact = exactly(divisor)
    return abs(Fraction(divisor) - exact) * 2**54 < exact


def _whole_multiples(numbers: Numbers, divisor: int) -> str:
    """Whole numbers that it divides, within the bounds, as Lark: a JSON schema that llguidance knows by itself."""
    excluded = [value for value in numbers.excluded if value % divisor == 0]
    if excluded or divisor > MAX_DIVISOR:
        what = f"not const {excluded[0]}" if excluded else f"above {MAX_DIVISOR:,}"
        raise RequestError(f"multipleOf with {what} is served between a minimum and a maximum that leave few numbers")
    low, high = numbers.low or Bound(Fraction(-MAX_WHOLE), False), numbers.high or Bound(Fraction(MAX_WHOLE), False)
    least = floor(low.value) + 1 if low.strict else -floor(-low.value)
    most = -floor(-high.value) - 1 if high.strict else floor(high.value)
    schema = {
        "type": "integer",
        "minimum": max(least, -MAX_WHOLE),
        "maximum": min(most, MAX_WHOLE),
        "multipleOf": divisor,
        "x-guidance": {"whitespace_flexible": False},
    }
    return "%json " + json.dumps(schema)
