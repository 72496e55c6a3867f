"""`quire top`, once a server is named: one picture, or pictures as long as somebody looks."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from rich.text import Text

from quire.cli.address import api_url
from quire.cli.screen import Screen
from quire.cli.terminal import console, note
from quire.cli.top_events import Seen, Watch
from quire.cli.top_map import glyphs
from quire.cli.top_picture import View, duration, picture
from quire.cli.top_state import clean
from quire.errors import QuireError

_FIRST = 15.0  # seconds for the first event
_SECOND = 1.0  # how late the second event may be, which knows rates and the last steps
_LOOK = 0.1  # seconds between two looks at keys and the terminal's size
_QUIET = 15.0  # seconds without a byte from which that is said


def can_be_drawn_on() -> bool:
    """Whether standard output is a terminal whose cursor can be moved."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


class Top:
    """A server's engine, watched. Every method raises QuireError where nothing comes of it.

    place: as `api_url` takes it; rate: events a second.
    """

    def __init__(self, place: str, key: str | None, rate: float) -> None:
        note(f"connecting to {place} ...")
        self._console = console()
        colours = self._console.color_system is not None and not self._console.no_color
        shapes = glyphs(colours, "utf" in self._console.encoding.lower())
        self._watch = Watch(api_url(place), key, rate)
        self._view = View(shapes, clean(self._watch.url))
        self._rate = rate
        self._paused: Seen | None = None

    def print(self) -> None:
        """One picture, of all that there is to say."""
        self._first()
        seen = self._watch.wait(1 / self._rate + _SECOND, count=2)
        self._watch.stop()
        assert seen.state is not None
        lines = picture(seen.state, seen.steps, self._view, self._console.width, None)
        self._console.print(Text("\n").join(lines))

    def hold(self) -> None:
        """Pictures until q or Ctrl-C."""
        self._first()
        screen = Screen(self._console)
        with suppress(EOFError, KeyboardInterrupt), screen.held():
            while True:
                size = screen.size
                screen.show(self._lines(size.columns, size.lines))
                keys = screen.keys(_LOOK)
                if not all(map(self._obey, keys)):
                    break
                if "\x0c" in keys:  # Ctrl-L
                    screen.renew()
        self._watch.stop()

    def _first(self) -> Seen:
        seen = self._watch.wait(_FIRST)
        if seen.state is not None:
            return seen
        self._watch.stop()
        raise seen.problem or QuireError(f"{self._watch.url} sent no event in {_FIRST:.0f} seconds.")

    def _obey(self, key: str) -> bool:
        """Do what a key means; False: leave."""
        if key == "c":
            self._view.by_adapter = not self._view.by_adapter
        elif key in ("p", " "):
            self._paused = None if self._paused else self._watch.seen()
        return key not in ("q", "Q")

    def _lines(self, width: int, height: int) -> list[Text]:
        now = self._watch.seen()
        seen = self._paused or now
        assert seen.state is not None
        lines = picture(seen.state, seen.steps, self._view, width, height - 1) if height > 1 else []
        lines += [Text()] * (height - 1 - len(lines))
        foot = self._foot(now)
        foot.truncate(width, overflow="ellipsis")
        return [*lines, foot]

    def _foot(self, now: Seen) -> Text:
        """What is wrong, or which keys there are."""
        silence = self._watch.silence()
        if now.problem is not None:
            words = f"q leave  gone for {duration(int(silence))}, asking again: {clean(str(now.problem), 400)}"
            return Text(words, style="red")
        if silence > _QUIET:
            return Text(f"q leave  nothing heard for {duration(int(silence))}", style="yellow")
        keys = "q leave  "
        if not self._view.glyphs.letters:
            keys += f"c colours by {'request' if self._view.by_adapter else 'adapter'}  "
        if self._paused is not None:
            return Text(keys + "p go on  ", style="dim").append("paused", style="not dim bold")
        return Text(keys + "p pause", style="dim")
