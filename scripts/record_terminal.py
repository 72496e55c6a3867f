"""Draws a terminal in which commands run for real: an SVG, in which their output appears as it came.

    record_terminal.py FILE [COMMAND ...]

Without a command, those of the README's picture; `make picture` calls it so. The shell runs the commands, one after the
other, on a pseudo-terminal. Nothing is changed of what they print; only pauses longer than a second are cut to one.
Where pictures do not move (or the reader wants none that do), all of it is there at once.
"""

from __future__ import annotations

import argparse
import codecs
import io
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.text import Text

COMMANDS = [
    'quire run --image quire/demo/picture.png --lora base --lora french --lora shout "What do you see?"',
    'quire run smollm2 "What is the capital of France?"',
]
COLUMNS = 102
LONGEST_PAUSE = 1.0  # seconds
TYPING = 1.2  # seconds that a command stands there before it runs
ROOT = Path(__file__).resolve().parents[1]

# Of the characters in rich's SVG: see Console.export_svg.
_CHAR_HEIGHT = 20
_CHAR_WIDTH = _CHAR_HEIGHT * 0.61
_LINE_HEIGHT = _CHAR_HEIGHT * 1.22

_COLOUR = re.compile(r"(\x1b\[[0-9;]*m)")
_TEXT = re.compile(r'<text class="(?P<id>[\w-]+)-r\d+" x="(?P<x>[\d.]+)" y="(?P<y>[\d.]+)"')
_BLANK = re.compile(r"<text [^>]*>\n</text>")  # ends of lines
_FONT = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # would be fetched from another host

_MOTION = """
    @keyframes {id}-appear {{ from {{ visibility: hidden }} to {{ visibility: visible }} }}
    @media (prefers-reduced-motion: no-preference) {{
        .{id}-matrix text {{ animation: {id}-appear 1ms steps(1) both; }}
    }}
    </style>"""


@dataclass(frozen=True)
class Piece:
    """Text that appears at once."""

    at: float  # seconds from the beginning
    text: str
    style: Style


def run(command: str) -> Iterator[tuple[float, str]]:
    """What the command writes to the terminal, and how many seconds after its last words."""
    reader, writer = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "LINES": "40", "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, shell=True, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer
    )
    os.close(writer)
    decoder = codecs.getincrementaldecoder("utf-8")()
    before = time.monotonic()
    while True:
        try:
            read = os.read(reader, 65536)
        except OSError:  # what Linux says when nobody has the other end any more
            break
        if not read:
            break
        now = time.monotonic()
        yield now - before, decoder.decode(read)
        before = now
    os.close(reader)
    if process.wait():
        raise SystemExit(f"{command}: exit code {process.returncode}")


def styled(text: str, style: Style) -> Iterator[tuple[str, Style]]:
    """Parts of one style, and that style; the last one is what follows begins with."""
    for part in _COLOUR.split(text):
        if _COLOUR.fullmatch(part):
            codes = part[2:-1].split(";")
            style = Style() if codes in ([""], ["0"]) else style + Style.parse(_named(codes))
        elif "\x1b" in part or "\r" in part:
            raise SystemExit(f"only colours are drawn, and {part!r} moves the cursor")
        else:
            yield part, style
    yield "", style


def _named(codes: list[str]) -> str:
    names = {"1": "bold", "2": "dim", "3": "italic", "31": "red", "32": "green", "33": "yellow", "36": "cyan"}
    return " ".join(names[code] for code in codes)


def record(commands: list[str]) -> list[Piece]:
    pieces, clock = [], 0.0
    for command in commands:
        pieces += [Piece(clock, "$ ", Style(color="green", bold=True)), Piece(clock, f"{command}\n", Style(bold=True))]
        clock += TYPING
        style = Style()
        for pause, text in run(command):
            clock += min(pause, LONGEST_PAUSE)
            parts = list(styled(text.replace("\r\n", "\n"), style))
            pieces += [Piece(clock, *part) for part in parts]
            style = parts[-1][1]
    return pieces


def draw(pieces: list[Piece], title: str) -> str:
    """The SVG: rich draws all of it, and each of its texts is told when to appear."""
    text, cells, line, column = Text(no_wrap=True, overflow="ignore"), {}, 0, 0
    for number, piece in enumerate(pieces):
        # With a number of its own in its style, rich does not draw it together with the one before.
        text.append(piece.text, piece.style + Style(meta={"piece": number}))
        for character in piece.text:
            cells[line, column] = piece.at
            line, column = (line + 1, 0) if character == "\n" else (line, column + 1)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(text, soft_wrap=False)
    svg = _BLANK.sub("", _FONT.sub("", console.export_svg(title=title, font_aspect_ratio=0.61)))

    def appear(match: re.Match[str]) -> str:
        place = round((float(match["y"]) - _CHAR_HEIGHT) / _LINE_HEIGHT), round(float(match["x"]) / _CHAR_WIDTH)
        return f'{match[0]} style="animation-delay:{cells[place]:.2f}s"'

    found = _TEXT.search(svg)
    assert found is not None
    return _TEXT.sub(appear, svg).replace("</style>", _MOTION.format(id=found["id"]).lstrip("\n "), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("commands", nargs="*", metavar="COMMAND", default=COMMANDS)
    options = parser.parse_args()
    options.file.parent.mkdir(parents=True, exist_ok=True)
    svg = draw(record(options.commands), "quire")
    options.file.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n")
    print(f"{options.file}: {len(svg):,} characters", file=sys.stderr)


if __name__ == "__main__":
    main()
