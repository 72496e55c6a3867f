"""The map of a pool's blocks, as a terminal can show it: a character for a block, or for several neighbours."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from quire.cli.top_state import Pool, Run

FREE, CACHED = 0, 1  # owners that are no requests

# The terminal's own colours: they suit its background, and take few bytes.
_COLOURS = ("green", "yellow", "blue", "magenta", "cyan", "red")
PALETTE = (*_COLOURS, *(f"bright_{one}" for one in _COLOURS))
UNKNOWN = "white"


@dataclass(frozen=True)
class Glyphs:
    """Which characters a picture is made of. letters: owners are told apart by letters, as there are no colours."""

    free: str
    cached: str
    partly: str
    owned: str
    shared: str
    bars: str
    letters: bool

    def of(self, cell: Cell) -> str:
        if cell.owner in (FREE, CACHED):
            return self.cached if cell.owner == CACHED else self.free
        if self.letters:
            letter = chr(ord("a") + cell.owner % 26)
            return letter.upper() if cell.shared > 1 else letter
        if cell.shared > 1:
            return self.shared
        return self.partly if cell.partly else self.owned


def glyphs(colours: bool, unicode: bool) -> Glyphs:
    """What a terminal can show."""
    bars = "▁▂▃▄▅▆▇█" if unicode else ".:-=+*%#"
    if not unicode:
        return Glyphs(".", "-", "o", "O", "#", bars, not colours)
    return Glyphs("·", "░", "▄", "█", "▓", bars, not colours)


@dataclass(frozen=True)
class Cell:
    """A character's place, whose blocks stand for one: the owner, by how many sequences its blocks here are held at
    most, and whether requests own less than half."""

    owner: int
    shared: int
    partly: bool = False


def layout(pool: Pool, width: int, most_rows: int) -> tuple[int, int]:
    """(rows, blocks to a character) that show all of a pool in so many columns and no more rows."""
    most = max(width * most_rows, 1)
    per = max(-(-pool.total // most), 1)
    return max(-(-pool.total // (per * max(width, 1))), 1), per


def cells(pool: Pool, per: int) -> list[Cell]:
    """A pool's blocks, `per` to a cell; what the map does not reach is free. Takes time by runs and cells alone."""
    found: list[Cell] = []
    weights: dict[int, int] = {}
    shared: dict[int, int] = {}
    room = per
    for count, run in _pieces(pool, per):
        weights[run.owner] = weights.get(run.owner, 0) + count
        shared[run.owner] = max(shared.get(run.owner, 0), run.shared)
        room -= count
        if not room:
            found.append(_most(weights, shared))
            weights, shared, room = {}, {}, per
    if weights:
        found.append(_most(weights, shared))
    return found


def _pieces(pool: Pool, per: int) -> Iterator[tuple[int, Run]]:
    """(blocks, run): the runs in their order, cut where a cell ends."""
    reached = 0
    rest = pool.total - sum(run.count for run in pool.runs)
    for run in [*pool.runs, Run(rest, FREE, 0)]:
        left = run.count
        while left > 0:
            count = min(left, per - reached % per)
            yield count, run
            reached += count
            left -= count


def _most(weights: dict[int, int], shared: dict[int, int]) -> Cell:
    """Whose most of a cell's blocks are, where requests own any: a short one must be seen in a large pool. Else what
    most are; of equals, what is cached rather than what is free."""
    owned = {owner: count for owner, count in weights.items() if owner not in (FREE, CACHED)}
    owner = max(owned or weights, key=lambda one: (weights[one], one))
    return Cell(owner, shared[owner], 2 * sum(owned.values()) < sum(weights.values()))


def rows(found: Sequence[Cell], width: int) -> Iterator[Sequence[Cell]]:
    return (found[at : at + width] for at in range(0, len(found), max(width, 1)))


def stretches(row: Sequence[Cell], style_of: Callable[[int], str], shapes: Glyphs) -> Iterator[tuple[str, str]]:
    """(characters, style) of a row, neighbours of one style together."""
    text, style = "", ""
    for cell in row:
        of_cell = style_of(cell.owner)
        if of_cell != style and text:
            yield text, style
            text = ""
        text, style = text + shapes.of(cell), of_cell
    if text:
        yield text, style
