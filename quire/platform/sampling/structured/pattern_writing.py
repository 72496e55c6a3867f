"""A pattern's tree as whole texts, and as llguidance reads it: as it is, or between the quotes of a JSON string."""

from __future__ import annotations

from dataclasses import replace

from quire.errors import RequestError
from quire.platform.sampling.structured.patterns import (
    ANYTHING,
    EMPTY,
    Anchor,
    Choice,
    Node,
    Ranges,
    Repeat,
    Sequence,
    Set,
    has_char,
    ranges,
    without,
)


def nullable(node: Node) -> bool:
    """Whether it matches the empty text (anchors aside)."""
    match node:
        case Set():
            return False
        case Sequence(parts):
            return all(map(nullable, parts))
        case Choice(options):
            return any(map(nullable, options))
        case Repeat(of, least, _):
            return least == 0 or nullable(of)
    return True


def has_anchor(node: Node) -> bool:
    match node:
        case Sequence(parts) | Choice(parts):
            return any(map(has_anchor, parts))
        case Repeat(of, _, _):
            return has_anchor(of)
    return isinstance(node, Anchor)


MAX_ANCHORED = 64  # alternatives that a pattern with anchors within groups is spread to


def spread(node: Node) -> list[tuple[Node, ...]]:
    """Sequences of which the node is the choice, in which anchors stand between parts and nowhere deeper."""
    if isinstance(node, Sequence):
        found: list[tuple[Node, ...]] = [()]
        for part in node.parts:
            found = [left + right for left in found for right in spread(part)]
            _check_spread(found)
        return found
    if isinstance(node, Choice) and has_anchor(node):
        found = [one for option in node.options for one in spread(option)]
        _check_spread(found)
        return found
    if isinstance(node, Repeat) and has_anchor(node):
        if node.most != 1:
            raise RequestError("anchors within a repetition are not served.")
        return [*([()] if node.least == 0 else []), *spread(node.of)]
    return [(node,)]


def _check_spread(found: list[tuple[Node, ...]]) -> None:
    if len(found) > MAX_ANCHORED:
        raise RequestError(f"anchors within groups make more than {MAX_ANCHORED} alternatives, the limit.")


def whole_texts(node: Node, *, search: bool) -> Node:
    """A tree without anchors, of the whole texts in which the pattern is found (search) or that it matches."""
    if not has_anchor(node):
        return Sequence((ANYTHING, node, ANYTHING)) if search else node
    options = []
    for parts in spread(node):
        starts = [place for place, part in enumerate(parts) if part == Anchor(start=True)]
        ends = [place for place, part in enumerate(parts) if part == Anchor(start=False)]
        first, last = (starts[-1] if starts else -1), (ends[0] if ends else len(parts))
        outside = [part for part in (*parts[: first + 1], *parts[last:]) if not isinstance(part, Anchor)]
        if not all(map(nullable, outside)):
            continue  # something before the start, or behind the end
        inner = tuple(part for part in parts[first + 1 : last] if not isinstance(part, Anchor))
        if last < first:
            inner = ()
        left = () if starts or not search else (ANYTHING,)
        right = () if ends or not search else (ANYTHING,)
        options.append(Sequence((*left, *inner, *right)))
    return Choice(tuple(options))


def widened(node: Node) -> Node:
    """The same with no empty choice inside: those match nothing, and take what they stand in with them."""
    match node:
        case Choice(options):
            left = [one for one in map(widened, options) if one != Choice(())]
            return Choice(tuple(left))
        case Sequence(parts):
            kept = tuple(map(widened, parts))
            return Choice(()) if Choice(()) in kept else Sequence(kept)
        case Repeat(of, least, _):
            inner = widened(of)
            if inner == Choice(()):
                return EMPTY if least == 0 else inner
            return replace(node, of=inner)
        case Set(()):
            return Choice(())
    return node


def written(node: Node, *, in_json: bool = False) -> str:
    """As llguidance reads it. in_json: of the text between a JSON string's quotes, spelt in one way.

    The node has no anchor and no empty choice or set (`widened`).
    """
    match node:
        case Set(chars):
            if len(chars) == 1 and chars[0][0] == chars[0][1] and _is_plain(chars[0][0]):
                return chr(chars[0][0])
            return _json_set(chars) if in_json else f"[{_ranges(chars)}]"
        case Sequence(parts):
            return "".join(_grouped(part, in_json) for part in parts) or "(?:)"
        case Choice(options):
            return "|".join(written(option, in_json=in_json) for option in options)
        case Repeat(of, least, most):
            inner = f"(?:{written(of, in_json=in_json)})"
            return inner + f"{{{least},{'' if most is None else most}}}"
    raise TypeError(node)


def _grouped(node: Node, in_json: bool) -> str:
    text = written(node, in_json=in_json)
    return f"(?:{text})" if isinstance(node, Choice) else text


def _is_plain(code: int) -> bool:
    return code < 0x80 and chr(code).isalnum()


def _code(code: int) -> str:
    return chr(code) if _is_plain(code) else f"\\x{{{code:x}}}"


def _ranges(chars: Ranges) -> str:
    return "".join(f"{_code(low)}-{_code(high)}" if low < high else _code(low) for low, high in chars)


_SHORT_ESCAPES = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}
_RAW = without(ranges([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)]))


def _common(one: Ranges, other: Ranges) -> Ranges:
    return without(ranges([*without(one), *without(other)]))


def _json_set(chars: Ranges) -> str:
    raw = _common(chars, _RAW)
    options = [f"[{_ranges(raw)}]"] if raw else []
    short = "".join(letter for code, letter in _SHORT_ESCAPES.items() if has_char(chars, code))
    short += "\\x22" * has_char(chars, 0x22) + "\\\\" * has_char(chars, 0x5C)
    if short:
        options.append(f"\\\\[{short}]")
    for high in (0, 1):
        low = [f"{code % 16:x}" for code in range(16 * high, 16 * high + 16) if has_char(chars, code)]
        low = [digit for digit in low if 16 * high + int(digit, 16) not in _SHORT_ESCAPES]
        if low:
            options.append(f"\\\\u00{high}[{''.join(low)}]")
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"
