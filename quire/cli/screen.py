"""A whole terminal's screen: what has changed since the last picture is all that is written, and keys are read."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console
from rich.style import Style
from rich.text import Text

# Another screen than the shell's, no cursor, no new line behind the last column; and back.
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
_LEAVE = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
_CLEAR = "\x1b[0m\x1b[2J"

_KEYS = 64  # bytes that are read at once: what is pasted is not obeyed for long
_GAP = 4  # cells that are the same and cost less to be written than to be passed over

Cell = tuple[str, Style]
Row = list[Cell]


class Painter:
    """Makes of pictures what a terminal must be sent: the cells that differ from those that it shows.

    console: says what styles are, and which colours the terminal has.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._system: ColorSystem | None = COLOR_SYSTEMS.get(console.color_system or "")
        self._shown: list[Row] = []

    def forget(self) -> str:
        """The next picture is written whole. Returns what makes the screen empty."""
        self._shown = []
        return _CLEAR

    def paint(self, lines: Sequence[Text]) -> str:
        rows = [self._row(line) for line in lines]
        parts: list[str] = []
        for place in range(max(len(rows), len(self._shown))):
            new = rows[place] if place < len(rows) else []
            old = self._shown[place] if place < len(self._shown) else []
            if new != old:
                parts += self._changes(place, old, new)
        self._shown = rows
        return "".join(parts)

    def _row(self, line: Text) -> Row:
        style_of = self._console.get_style
        base = style_of(line.style, default=Style.null())
        styles = [base] * len(line.plain)
        for span in line.spans:
            style = style_of(span.style, default=Style.null())
            for at in range(span.start, min(span.end, len(styles))):
                styles[at] = styles[at] + style
        return list(zip(line.plain, styles, strict=True))

    def _changes(self, place: int, old: Row, new: Row) -> Iterator[str]:
        if any(cell_len(one) != 1 for one, _ in [*old, *new]):
            # Where a character takes no cell, or two, places in the row are none on the screen.
            yield f"\x1b[{place + 1}H\x1b[2K" + self._written(new)
            return
        for start, end in _differing(old, new):
            yield f"\x1b[{place + 1};{start + 1}H" + self._written(new[start:end])
        if len(old) > len(new):
            yield f"\x1b[{place + 1};{len(new) + 1}H\x1b[K"

    def _written(self, row: Row) -> str:
        parts, start = [], 0
        for at in range(1, len(row) + 1):
            if at == len(row) or row[at][1] != row[start][1]:
                text = "".join(one for one, _ in row[start:at])
                parts.append(self._styled(text, row[start][1]))
                start = at
        return "".join(parts)

    def _styled(self, text: str, style: Style) -> str:
        if self._system is None:
            return text
        if self._console.no_color:
            style = style.without_color
        return style.render(text, color_system=self._system)


def _differing(old: Row, new: Row) -> Iterator[tuple[int, int]]:
    """Ranges of the new row that the old one has otherwise, with what lies between them where that is short."""
    start = end = -1
    for at, cell in enumerate(new):
        if at < len(old) and old[at] == cell:
            continue
        if start >= 0 and at - end > _GAP:
            yield start, end
            start = at
        start = at if start < 0 else start
        end = at + 1
    if start >= 0:
        yield start, end


class Screen:
    """The terminal, while a program has all of it; `held` gives it back."""

    def __init__(self, console: Console) -> None:
        self._painter = Painter(console)
        self._size = os.terminal_size((0, 0))
        self._input = sys.stdin.fileno() if sys.stdin.isatty() else None
        self._output = sys.stdout.fileno()

    @property
    def size(self) -> os.terminal_size:
        """Columns and lines: one at least of each."""
        with suppress(OSError):
            size = os.get_terminal_size(self._output)
            if size.columns > 0 and size.lines > 0:
                return size
        return os.terminal_size((80, 24))

    def show(self, lines: Sequence[Text]) -> None:
        size = self.size
        text = self._painter.forget() if size != self._size else ""
        self._size = size
        self._write(text + self._painter.paint(lines[: size.lines]))

    def renew(self) -> None:
        """The next picture is written whole, as somebody else may have written to the terminal."""
        self._size = os.terminal_size((0, 0))

    def keys(self, seconds: float) -> str:
        """What was typed within this time, as soon as there is any."""
        if self._input is None:
            select.select([], [], [], seconds)
            return ""
        if not select.select([self._input], [], [], seconds)[0]:
            return ""
        typed = os.read(self._input, _KEYS)
        if not typed:  # the terminal is gone
            raise EOFError
        return typed.decode("utf-8", "replace")

    @contextmanager
    def held(self) -> Iterator[None]:
        """All of the terminal is ours; Ctrl-Z lends it to the shell, and SIGTERM ends this with SystemExit."""
        before = {
            signal.SIGTSTP: signal.signal(signal.SIGTSTP, self._suspend),
            signal.SIGTERM: signal.signal(signal.SIGTERM, _terminated),
        }
        try:
            with _keys_at_once(self._input):
                self._write(_ENTER)
                try:
                    yield
                finally:
                    with suppress(OSError):
                        self._write(_LEAVE)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _suspend(self, *_: object) -> None:
        import termios

        self._write(_LEAVE)
        ours = None if self._input is None else termios.tcgetattr(self._input)
        os.kill(os.getpid(), signal.SIGSTOP)
        if self._input is not None and ours is not None:
            termios.tcsetattr(self._input, termios.TCSANOW, ours)  # the shell has set its own meanwhile
        self._write(_ENTER)
        self.renew()

    def _write(self, text: str) -> None:
        """Not by `sys.stdout`: while that waits for a slow terminal, a signal's handler must not write to it."""
        left = text.encode(sys.stdout.encoding or "utf-8", "replace")
        while left:
            try:
                left = left[os.write(self._output, left) :]
            except BlockingIOError:  # somebody else who has this terminal made it so
                select.select([], [self._output], [])


@contextmanager
def _keys_at_once(file: int | None) -> Iterator[None]:
    """Keys are read as they are pressed, and not shown; Ctrl-C and Ctrl-Z keep their meaning."""
    if file is None:
        yield
        return
    import termios

    before = termios.tcgetattr(file)
    ours = termios.tcgetattr(file)
    ours[3] &= ~(termios.ICANON | termios.ECHO)
    termios.tcsetattr(file, termios.TCSANOW, ours)
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(file, termios.TCSADRAIN, before)


def _terminated(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
