"""Regular expressions read into a tree: what Python, Rust and ECMA-262 write alike; the rest is refused by name.

The three disagree about which characters are meant by \\d, \\w, \\s and the dot. A pattern is read in one of two ways:
narrow is what all of them mean (what is generated under it matches for every judge), wide what any of them means (what
does not match it matches for no judge).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from quire.errors import RequestError

MAX_PATTERN_LENGTH = 65_536  # characters
MAX_PATTERN_DEPTH = 100  # groups within groups
MAX_REPEAT = 100_000  # the numbers in {n}, of repetitions within each other multiplied
LAST = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]  # code points, both ends included, in order, apart from each other


def ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Sorted, joined, without surrogates, which no text has."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    apart: list[tuple[int, int]] = []
    for low, high in found:
        apart += [(a, b) for a, b in ((low, min(high, 0xD7FF)), (max(low, 0xE000), high)) if a <= b]
    return tuple(apart)


def without(taken: Ranges) -> Ranges:
    """All other characters."""
    left, start = [], 0
    for low, high in taken:
        left.append((start, low - 1))
        start = high + 1
    return ranges((low, high) for low, high in [*left, (start, LAST)] if low <= high)


def _chars(text: str) -> list[tuple[int, int]]:
    return [(ord(char), ord(char)) for char in text]


_BEYOND_ASCII = [(0x80, LAST)]
_DIGIT = [(0x30, 0x39)]
_WORD = [*_DIGIT, (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACE = [(9, 13), *_chars(" \xa0\u1680\u2028\u2029\u202f\u205f\u3000"), (0x2000, 0x200A)]
_CLASSES = {  # what all mean, and what any means
    "d": (ranges(_DIGIT), ranges([*_DIGIT, *_BEYOND_ASCII])),
    "w": (ranges(_WORD), ranges([*_WORD, *_BEYOND_ASCII])),
    "s": (ranges(_SPACE), ranges([*_SPACE, *_chars("\x85\ufeff\u180e"), (0x1C, 0x1F)])),
}
_NO_LINE_END = (without(ranges(_chars("\n\r\x85\u2028\u2029"))), without(ranges(_chars("\n"))))
ANY = ranges([(0, LAST)])


@dataclass(frozen=True, slots=True)
class Set:
    """One character."""

    chars: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """One after the other; none is the empty text."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of them; none matches nothing at all."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """most: None for any number."""

    of: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Anchor:
    """start: of the text, or its end."""

    start: bool


Node = Set | Sequence | Choice | Repeat | Anchor
EMPTY = Sequence(())
ANYTHING = Repeat(Set(ANY), 0, None)


def literal(text: str) -> Node:
    """The text itself."""
    return Sequence(tuple(Set(((ord(char), ord(char)),)) for char in text))


def parse(pattern: str, *, wide: bool = False) -> Node:
    """The tree of a pattern. Raises RequestError naming the place of what is not served; say of what, around it."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise RequestError(f"the pattern has {len(pattern):,} characters; the limit is {MAX_PATTERN_LENGTH:,}.")
    reader = _Reader(pattern, wide)
    node = reader.choice(0)
    if reader.place < len(pattern):
        raise reader.refused("a ')' without its '('")
    return node


class _Reader:
    """Recursive descent, as deep as groups are."""

    def __init__(self, pattern: str, wide: bool) -> None:
        self.pattern, self.wide, self.place = pattern, int(wide), 0
        self.folded = self.dot_all = False

    def refused(self, what: str, place: int | None = None) -> RequestError:
        at = self.place if place is None else place
        shown = self.pattern if len(self.pattern) <= 80 else self.pattern[max(0, at - 30) : at + 30] + "..."
        return RequestError(f"pattern {shown!r}: character {at + 1}: {what}.")

    def _next(self) -> str:
        return self.pattern[self.place : self.place + 1]

    def _take(self, text: str) -> bool:
        found = self.pattern.startswith(text, self.place)
        self.place += len(text) * found
        return found

    def choice(self, depth: int) -> Node:
        if depth > MAX_PATTERN_DEPTH:
            raise self.refused(f"more than {MAX_PATTERN_DEPTH} groups within each other")
        options = [self._sequence(depth)]
        while self._take("|"):
            options.append(self._sequence(depth))
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while self._next() not in ("", "|", ")"):
            parts.append(self._repeated(depth))
        return parts[0] if len(parts) == 1 else Sequence(tuple(parts))

    def _repeated(self, depth: int) -> Node:
        start = self.place
        node = self._atom(depth)
        if (bounds := self._bounds()) is None:
            return node
        if isinstance(node, Anchor):
            raise self.refused("an anchor cannot be repeated", start)
        self._take("?")  # a lazy one: the same texts
        if self._next() == "+" or self._bounds() is not None:
            raise self.refused("a repetition of a repetition: put the inner one in a group")
        found = Repeat(node, *bounds)
        if copies(found) > MAX_REPEAT:
            raise self.refused(f"repetitions within each other make more than {MAX_REPEAT:,}, the limit", start)
        return found

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return bounds
        if self._next() != "{":
            return None
        end = self.pattern.find("}", self.place)
        low, comma, high = self.pattern[self.place + 1 : max(end, 0)].partition(",")
        if end < 0 or not _is_number(low or "0") or not _is_number(high or "0") or not (low or high):
            return None  # a brace that means itself
        least = int(low or "0")
        most = (int(high) if high else None) if comma else least
        if max(least, most or 0) > MAX_REPEAT:
            raise self.refused(f"the limit of repetitions is {MAX_REPEAT:,}")
        if most is not None and most < least:
            raise self.refused("the bounds of a repetition are the wrong way round")
        self.place = end + 1
        return least, most

    def _atom(self, depth: int) -> Node:
        char = self._next()
        if char in "*+?":
            raise self.refused(f"{char!r} repeats nothing")
        self.place += 1
        if char == "(":
            return self._group(depth)
        if char == "[":
            return Set(self._class())
        if char == ".":
            return Set(ANY if self.dot_all else _NO_LINE_END[self.wide])
        if char in "^$":
            return self._anchor(start=char == "^")
        if char == "\\":
            return self._escaped()
        return Set(self._fold(ranges(_chars(char))))

    def _anchor(self, *, start: bool) -> Node:
        if start or not self.wide:
            return Anchor(start)
        # Python's $ is also before a line end that ends the text.
        return Sequence((Repeat(Set(((10, 10),)), 0, 1), Anchor(start=False)))

    def _group(self, depth: int) -> Node:
        start = self.place - 1
        flags = self.folded, self.dot_all
        if self._take("?"):
            if self._flags():
                return EMPTY
            self._group_kind(start)
        node = self.choice(depth + 1)
        if not self._take(")"):
            raise self.refused("this '(' is not closed", start)
        self.folded, self.dot_all = flags
        return node

    def _group_kind(self, start: int) -> None:
        for sign, what in (
            ("=", "lookahead"), ("!", "lookahead"), ("<=", "lookbehind"), ("<!", "lookbehind"),
            (">", "an atomic group"), ("(", "a conditional group"), ("P=", "a back reference"), ("#", "a comment"),
        ):  # fmt: skip
            if self.pattern.startswith(sign, self.place):
                raise self.refused(f"{what} is not served: a grammar looks neither ahead nor back", start)
        if self._take(":") or self.pattern[self.place - 1] == ":":
            return
        named = self._take("P<") or self._take("<")
        end = self.pattern.find(">", self.place)
        if not named or end < 0 or not self.pattern[self.place : end].isidentifier():
            raise self.refused("a kind of group that is not known", start)
        self.place = end + 1

    def _flags(self) -> bool:
        """(?i), (?s) for the rest of the group: True; (?i: and the like: False, and the place is behind the colon."""
        end = self.place
        while self.pattern[end : end + 1].isalpha():
            end += 1
        flags, sign = self.pattern[self.place : end], self.pattern[end : end + 1]
        if not flags or sign not in (")", ":"):
            return False
        if set(flags) - set("isu"):
            raise self.refused(f"the flags {flags!r} are not served: only i and s are")
        self.folded |= "i" in flags
        self.dot_all |= "s" in flags
        self.place = end + 1
        return sign == ")"

    def _fold(self, chars: Ranges) -> Ranges:
        if not self.folded:
            return chars
        if sum(high - low for low, high in chars) > 4096:
            chars = ranges(chars)
            more = [(ord(other),) * 2 for code in range(128) if has_char(chars, code) for other in _cases(chr(code))]
            return ranges([*chars, *((low, high) for low, high in more)])
        each = (chr(code) for low, high in chars for code in range(low, high + 1))
        return ranges([*chars, *((ord(other), ord(other)) for char in each for other in _cases(char))])

    def _escaped(self) -> Node:
        start = self.place - 1
        char = self._next()
        if char in ("b", "B"):
            raise self.refused("word boundaries are not served: spell out what stands before and behind", start)
        if char and char in "AZz":
            self.place += 1
            return Anchor(start=char == "A")
        if (char.isdigit() and char != "0") or char == "k":
            raise self.refused("back references are not served: a grammar remembers nothing", start)
        return Set(self._fold(self._escape(start)))

    def _escape(self, start: int) -> Ranges:
        """Behind the backslash, in or outside of brackets."""
        char = self._next()
        self.place += 1
        if char == "":
            raise self.refused("a backslash at the end", start)
        if char.lower() in _CLASSES:
            return _CLASSES[char][self.wide] if char.islower() else without(_CLASSES[char.lower()][1 - self.wide])
        simple = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0, "a": 7, "e": 27}
        if char in simple:
            if char == "0" and self._next().isdigit():
                raise self.refused("octal escapes are not served: write \\xHH", start)
            return ((simple[char], simple[char]),)
        if char == "c" and self._next().isascii() and self._next().isalpha():
            self.place += 1
            code = ord(self.pattern[self.place - 1]) % 32
            return ((code, code),)
        if char in "xuU":
            return self._code(start, char)
        if char.isalnum():
            raise self.refused(f"the escape \\{char} is not served", start)
        return ranges(_chars(char))

    def _code(self, start: int, char: str) -> Ranges:
        if self._take("{"):
            end = self.pattern.find("}", self.place)
            digits = self.pattern[self.place : max(end, self.place)]
            self.place = end + 1
        else:
            size = {"x": 2, "u": 4, "U": 8}[char]
            digits = self.pattern[self.place : self.place + size]
            self.place += size
            if len(digits) < size:
                digits = ""
        code = int(digits, 16) if digits and all(one in "0123456789abcdefABCDEF" for one in digits) else LAST + 1
        if 0xD800 <= code < 0xDC00 and self._take("\\u"):  # a surrogate pair, as JSON and ECMA-262 write it
            low = self._code(start, "u")
            code = 0x10000 + ((code - 0xD800) << 10) + (low[0][0] - 0xDC00) if low else LAST + 1
        if code > LAST:
            raise self.refused(f"\\{char} is not followed by the number of a character", start)
        return ((code, code),)

    def _class(self) -> Ranges:
        start = self.place - 1
        negated = self._take("^")
        found: list[tuple[int, int]] = []
        inverse, self.wide = self.wide, (1 - self.wide if negated else self.wide)
        first = True
        while (first and not negated and self._next() == "]" and "]" in self.pattern[self.place + 1 :]) or (
            self._next() != "]"
        ):
            first = False
            if self.place >= len(self.pattern):
                raise self.refused("this '[' is not closed", start)
            low = self._class_item()
            if self._next() == "-" and self.pattern[self.place + 1 : self.place + 2] not in ("]", ""):
                self.place += 1
                high = self._class_item()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] or low[0][0] > high[0][0]:
                    raise self.refused("a range between characters that has no order", start)
                low = ((low[0][0], high[0][1]),)
            found += low
        self.place += 1
        self.wide = inverse
        chars = self._fold(ranges(found))
        return without(chars) if negated else chars

    def _class_item(self) -> Ranges:
        start = self.place
        self.place += 1
        char = self.pattern[start : start + 1]
        if char == "\\":
            if self._next() == "b":
                self.place += 1
                return ((8, 8),)
            if self._next().isdigit() and self._next() != "0":
                raise self.refused("octal escapes are not served: write \\xHH", start)
            return self._escape(start)
        pair = self.pattern[start : start + 2]
        if pair in ("[:", "&&", "--", "~~", "||") or (char == "[" and pair != "[" and pair == "[["):
            raise self.refused(f"{pair!r} within brackets is not served: dialects differ", start)
        return ((ord(char), ord(char)),) if char else ()


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10


def copies(node: Node) -> int:
    """How often a part of it is repeated, as far as numbers say."""
    inner: int = 1
    match node:
        case Sequence(parts) | Choice(parts):
            inner = max(map(copies, parts), default=1)
        case Repeat(of, least, most):
            inner = copies(of) * max(least, most or 1, 1)
    return inner


def has_char(chars: Ranges, code: int) -> bool:
    return any(low <= code <= high for low, high in chars)


def _cases(char: str) -> list[str]:
    return [other for other in (char.lower(), char.upper()) if len(other) == 1]
