"""Columns of short texts, in as many as a terminal's width has room for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

_GAP = 2
_LEAST = 8  # columns of an elastic one


@dataclass(frozen=True)
class Column:
    """styles: none, or one a text. keep: of columns that find no room, those with the smallest go first.

    elastic: its texts are cut before a column goes.
    """

    title: str
    texts: Sequence[str]
    styles: Sequence[str] = ()
    keep: int = 0
    right: bool = False
    elastic: bool = False


def table(columns: Sequence[Column], width: int) -> list[Text]:
    """A line of titles and one for each row; nothing, where there are no rows."""
    if not columns or not columns[0].texts:
        return []
    kept = list(columns)
    while len(kept) > 1 and _needed(kept) > width:
        kept.remove(min(kept, key=lambda one: one.keep))
    widths = {one.title: _natural(one) for one in kept}
    spare = width - sum(widths.values()) - _GAP * (len(kept) - 1)
    for one in kept:
        if one.elastic and spare < 0:
            widths[one.title] = max(widths[one.title] + spare, 1)
    lines = [_line([(one, one.title, "dim") for one in kept], widths)]
    for row in range(len(columns[0].texts)):
        lines.append(_line([(one, one.texts[row], one.styles[row] if one.styles else "") for one in kept], widths))
    return lines


def beside(left: Sequence[Text], right: Sequence[Text], width: int) -> list[Text]:
    """Two lists of lines as one; `width`: of the left one."""
    lines = []
    for row in range(max(len(left), len(right))):
        line = Text()
        line.append_text(_fitted(left[row] if row < len(left) else Text(), width, False))
        lines.append(line.append(" " * _GAP).append_text(right[row] if row < len(right) else Text()))
    return lines


def _natural(column: Column) -> int:
    return max(map(cell_len, [column.title, *column.texts]))


def _needed(columns: Sequence[Column]) -> int:
    least = (min(_natural(one), _LEAST) if one.elastic else _natural(one) for one in columns)
    return sum(least) + _GAP * (len(columns) - 1)


def _line(fields: Sequence[tuple[Column, str, str]], widths: dict[str, int]) -> Text:
    line = Text()
    for place, (column, text, style) in enumerate(fields):
        line.append(" " * _GAP if place else "")
        line.append_text(_fitted(Text(text, style=style), widths[column.title], column.right))
    line.rstrip()
    return line


def _fitted(text: Text, width: int, right: bool) -> Text:
    text = text.copy()
    text.truncate(width, overflow="ellipsis")
    room = " " * max(width - text.cell_len, 0)
    return Text(room).append_text(text) if right else text.append(room)
