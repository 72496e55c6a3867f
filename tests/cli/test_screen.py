"""What is written to a terminal of a picture: enough for it to show the picture, and no more."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from quire.cli.screen import Painter

_PIECE = re.compile(r"\x1b\[(?P<numbers>[\d;]*)(?P<command>[A-Za-z])|(?P<character>[^\x1b])", re.DOTALL)


class Terminal:
    """The little of a terminal that a painter uses. Cells are (character, style's numbers)."""

    def __init__(self, columns: int = 40, lines: int = 12) -> None:
        self.columns = columns
        self.cells = [[(" ", "")] * columns for _ in range(lines)]
        self._line = self._column = 0
        self._style = ""

    def write(self, text: str) -> None:
        at = 0
        while at < len(text):
            piece = _PIECE.match(text, at)
            assert piece, f"unknown: {text[at : at + 20]!r}"
            at = piece.end()
            if piece["character"]:
                self._put(piece["character"])
            else:
                self._do(piece["command"], [int(one or 0) for one in piece["numbers"].split(";")])

    def _put(self, character: str) -> None:
        width = cell_len(character)
        if not width:
            self.cells[self._line][self._column - 1] = (self.cells[self._line][self._column - 1][0] + character, "")
            return
        for part in [character, ""][:width]:
            self.cells[self._line][self._column] = (part, self._style)
            self._column += 1

    def _do(self, command: str, numbers: list[int]) -> None:
        if command == "H":
            self._line, self._column = (max(one, 1) - 1 for one in [*numbers, 1][:2])
        elif command == "K":
            start = 0 if numbers == [2] else self._column
            self.cells[self._line][start:] = [(" ", "")] * (self.columns - start)
        elif command == "J":
            assert numbers == [2]
            self.cells = [[(" ", "")] * self.columns for _ in self.cells]
        else:
            assert command == "m", command
            self._style = "" if numbers == [0] else ";".join(map(str, numbers))

    def shown(self) -> list[str]:
        return ["".join(one for one, _ in line).rstrip() for line in self.cells]


def console(colours: str | None = "standard", **more: Any) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system=colours, highlight=False, **more)  # type: ignore[arg-type]


LINES = st.lists(
    st.lists(
        st.tuples(st.text("ab ·█日é\u0301", max_size=6), st.sampled_from(["", "bold", "red", "dim green", "not bold"])),
        max_size=5,
    ).map(lambda parts: Text.assemble(*parts, style="bold")),
    max_size=12,
)


@settings(deadline=None)
@given(st.lists(LINES, min_size=1, max_size=4))
def test_a_terminal_shows_the_last_picture(pictures: list[list[Text]]) -> None:
    painter, terminal = Painter(console()), Terminal(columns=80)
    for lines in pictures:
        terminal.write(painter.paint(lines))
    # Marks at the beginning of a line have nothing to stand on: they are the terminal's affair.
    if not any(line.plain.startswith("\u0301") for lines in pictures for line in lines):
        shown = [line.plain.rstrip() for line in pictures[-1]]
        assert terminal.shown() == shown + [""] * (12 - len(shown))
        fresh = Terminal(columns=80)
        fresh.write(Painter(console()).paint(pictures[-1]))
        assert terminal.cells == fresh.cells


def test_what_has_not_changed_is_not_written() -> None:
    painter = Painter(console())
    lines = [Text("·" * 80) for _ in range(20)]
    assert len(painter.paint(lines)) > 20 * 80
    assert painter.paint(lines) == ""
    lines[3] = Text("·" * 40).append("█", style="green").append("·" * 39)
    changed = painter.paint(lines)
    assert changed == "\x1b[4;41H\x1b[32m█\x1b[0m"


def test_after_another_size_all_is_written() -> None:
    painter, terminal = Painter(console()), Terminal()
    terminal.write(painter.paint([Text("one"), Text("two")]))
    terminal.write(painter.forget() + painter.paint([Text("one")]))
    assert terminal.shown()[:2] == ["one", ""]


@pytest.mark.parametrize(("given", "no_color"), [(None, False), ("standard", True)])
def test_without_colours_none_are_written(given: str | None, no_color: bool) -> None:
    written = Painter(console(given, no_color=no_color)).paint([Text("a", style="red"), Text("b", style="bold red")])
    assert not re.search(r"\x1b\[[\d;]*3\dm", written)
    assert ("\x1b[1m" in written) == no_color  # bold is no colour
