"""The picture of an engine's state: lines of text for a terminal of any size. What is drawn, and nothing of how."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.text import Text

from quire.cli.top_map import CACHED, FREE, PALETTE, UNKNOWN, Cell, Glyphs, cells, layout, rows, stretches
from quire.cli.top_state import Adapter, Number, Pool, Rates, Request, State, Step
from quire.cli.top_table import Column, beside, table

_SIDE_BY_SIDE = 110  # columns from which requests and adapters stand side by side
_MOST_MAP_ROWS = 16  # where there is no end to the room
_STATES = {"running": "green", "waiting": "yellow", "swapped": "magenta", "images": "cyan", "adapter": "blue"}
_TIERS = {"device": "green", "host": "yellow", "disk": "dim"}
_LEGEND_FROM = 5  # lines for blocks
_KNOWN_ADAPTERS = 1024  # whose colours are remembered


@dataclass
class View:
    """How the picture is drawn, beside what is in it. by_adapter: blocks have their adapters' colours.

    server: its address, as it is shown.
    """

    glyphs: Glyphs
    server: str = ""
    by_adapter: bool = False
    _places: dict[str, int] = field(default_factory=dict)

    def adapter_style(self, name: str | None) -> str:
        """The same for a name as long as the program runs. None is the base model."""
        if name is None:
            return UNKNOWN
        if name not in self._places and len(self._places) >= _KNOWN_ADAPTERS:
            return UNKNOWN
        return PALETTE[self._places.setdefault(name, len(self._places)) % len(PALETTE)]

    def request_style(self, request: Request) -> str:
        if self.by_adapter:
            return self.adapter_style(request.adapter)
        return UNKNOWN if request.number is None else PALETTE[request.number % len(PALETTE)]


def picture(state: State, steps: Sequence[Step], view: View, width: int, height: int | None) -> list[Text]:
    """Lines of at most `width` columns, at most `height` of them (None: all that there is to say)."""
    for one in state.adapters:
        view.adapter_style(one.name)  # in the server's order, and not that of who comes first
    lines = [_title(state, view.server), _rates(state.rates)]
    room = None if height is None else height - len(lines)
    times = _timeline(steps, view.glyphs, width)
    if room is not None:
        times = times[: max(room // 3, 2)]
        room -= len(times)
    blocks = _pools(state, view, width, None if room is None else room // 2)
    if room is not None:
        blocks = blocks[: max(room, 0)]
        room -= len(blocks)
    lines += [*blocks, *times, *_lists(state, view, width, room)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines if height is None else lines[:height]


def _title(state: State, server: str) -> Text:
    line = Text("quire", style="bold")
    line.append(f" {state.version or ''}".rstrip(), style="bold")
    for part in (state.model, state.dtype, state.device):
        line.append(f"  {part or '-'}", style="not bold")
    line.append(f"  up {duration(state.time)}", style="not bold")
    if state.sleeping:
        line.append("  asleep", style="not bold yellow")
    return line.append(f"  {server}".rstrip(), style="not bold dim")


def _rates(rates: Rates) -> Text:
    hits = "-" if rates.hits is None else f"{min(rates.hits, 1):.0%}"
    line = Text()
    parts = [
        ("tokens/s in", amount(rates.prompt)),
        ("out", amount(rates.output)),
        ("requests/s", amount(rates.requests)),
    ]
    for label, value in [*parts, ("from cache", hits)]:
        line.append(f"{label} ", style="dim").append(f"{value}  ", style="bold")
    line.rstrip()
    return line


# -- blocks -------------------------------------------------------------------------------------------------------


def _pools(state: State, view: View, width: int, room: int | None) -> list[Text]:
    """Each pool's line and its map; the legend stands behind the last, where there is room."""
    lines: list[Text] = []
    owners = {one.number: view.request_style(one) for one in state.requests if one.number is not None}
    share = None if room is None else max((room - (room > _LEGEND_FROM)) // max(len(state.pools), 1) - 1, 1)
    for pool in state.pools:
        most = min(share or _MOST_MAP_ROWS, _MOST_MAP_ROWS)
        _, per = layout(pool, width, most)
        lines.append(_pool_line(pool, per))
        for row in rows(cells(pool, per), width):
            line = Text(no_wrap=True)
            for text, style in stretches(row, lambda owner: _style(owner, owners), view.glyphs):
                line.append(text, style=style)
            lines.append(line)
    return [*lines, _legend(view)] if room is None or room > _LEGEND_FROM else lines


def _style(owner: int, owners: dict[int, str]) -> str:
    return "dim" if owner in (FREE, CACHED) else owners.get(owner, UNKNOWN)


def _pool_line(pool: Pool, per: int) -> Text:
    line = Text("blocks", style="bold")
    line.append(f" {pool.name}: " if pool.name != "kv" else " ", style="not bold")
    line.append(f"{amount(pool.owned)} owned, {amount(pool.cached)} cached, {amount(pool.free)} free", "not bold")
    if pool.swapped:
        line.append(f", {amount(pool.swapped)} swapped", style="not bold magenta")
    of = f" of {amount(pool.total)}"
    of += f" of {amount(pool.block_size)} tokens" if pool.block_size else ""
    of += f"; {amount(per)} a character" if per > 1 else ""
    return line.append(of, style="not bold dim")


def _legend(view: View) -> Text:
    """What the map's characters and colours mean."""
    shapes, line = view.glyphs, Text(style="dim")
    owned = "a" if shapes.letters else shapes.owned
    shared = "A" if shapes.letters else shapes.shared
    line.append(f"{owned} owned {shared} shared {shapes.cached} cached {shapes.free} free")
    if not shapes.letters:
        line.append(f", colours by {'adapter' if view.by_adapter else 'request'}")
    return line


# -- steps --------------------------------------------------------------------------------------------------------


def _timeline(steps: Sequence[Step], shapes: Glyphs, width: int) -> list[Text]:
    """A line for each thing that steps have, a column a step, the newest at the right."""
    label = 9
    shown = list(steps)[-max(width - label, 1) :]
    head = Text("steps", style="bold")
    if not shown:
        return [head.append(" none yet", style="not bold dim")]
    last = shown[-1]
    words = f" last: {last.milliseconds:.1f} ms, {amount(last.prefill_tokens)} tokens of prompts, "
    words += f"{amount(last.decode_tokens)} of answers, {amount(last.sequences)} sequences"
    lines = [head.append(words, style="not bold")]
    kinds = [
        ("ms", [one.milliseconds for one in shown], "white"),
        ("prompts", [one.prefill_tokens for one in shown], "blue"),
        ("answers", [one.decode_tokens for one in shown], "green"),
    ]
    for name, values, style in kinds:
        lines.append(Text(f"{name:<{label}}", style="dim").append(bars(values, shapes.bars), style=f"not dim {style}"))
    for name, values, style in (
        ("images", [one.media for one in shown], "magenta"),
        ("adapters", [one.adapters for one in shown], "cyan"),
    ):
        if any(values):
            digits = "".join(" " if not one else str(int(one)) if one < 10 else "+" for one in values)
            lines.append(Text(f"{name:<{label}}", style="dim").append(digits, style=f"not dim {style}"))
    return lines


def bars(values: Sequence[Number], shapes: str) -> str:
    """A bar for each number, the largest the highest; none for 0."""
    top = max(values, default=0)
    highest = len(shapes)
    return "".join(" " if one <= 0 else shapes[max(math.ceil(one / top * highest), 1) - 1] for one in values)


# -- requests and adapters ----------------------------------------------------------------------------------------


def _lists(state: State, view: View, width: int, room: int | None) -> list[Text]:
    if room is not None and room < 2:
        return []
    if width >= _SIDE_BY_SIDE:
        left = (width - 2) * 3 // 5
        right = width - 2 - left
        return beside(_requests(state, view, left, room), _adapters(state, view, right, room), left)
    if room is None:
        return [*_requests(state, view, width, None), *_adapters(state, view, width, None)]
    # The adapters take what they need, a third at most while requests need the rest.
    needed = len(_requests(state, view, width, None))
    adapters = _adapters(state, view, width, max(room // 3, room - needed))
    return [*_requests(state, view, width, room - len(adapters)), *adapters]


def _requests(state: State, view: View, width: int, room: int | None) -> list[Text]:
    counts: dict[str, int] = {}
    for one in state.requests:
        counts[one.state] = counts.get(one.state, 0) + 1
    said = ", ".join(f"{count} {name}" for name, count in counts.items())
    said += f", {amount(state.more_requests)} more" if state.more_requests else ""
    head = Text("requests", style="bold").append(f" {said or 'none'}", style="not bold")
    if state.max_num_seqs:
        head.append(f", {amount(state.max_num_seqs)} sequences at once", style="not bold dim")
    order = {name: place for place, name in enumerate(_STATES)}
    shown = sorted(state.requests, key=lambda one: order.get(one.state, len(order)))
    own = [f"{view.glyphs.of(Cell(one.number or 2, 1))} {'-' if one.number is None else one.number}" for one in shown]
    columns = [
        Column("#", own, [view.request_style(one) for one in shown], keep=9),
        Column("state", [one.state for one in shown], [_STATES.get(one.state, "") for one in shown], keep=8),
        Column("adapter", [one.adapter or "-" for one in shown], keep=7, elastic=True),
        Column("prompt", [amount(one.prompt_tokens) for one in shown], right=True, keep=5),
        Column("cached", [amount(one.cached_tokens) for one in shown], right=True, keep=2),
        Column("computed", [amount(one.computed_tokens) for one in shown], right=True, keep=1),
        Column("answer", [amount(one.output_tokens) for one in shown], right=True, keep=6),
        Column("blocks", [amount(one.blocks) for one in shown], right=True, keep=4),
        Column("age", [duration(one.seconds) for one in shown], right=True, keep=3),
    ]
    return [head, *_with_end(table(columns, width), room)]


def _adapters(state: State, view: View, width: int, room: int | None) -> list[Text]:
    shown = state.adapters
    said = ", ".join(_tier(name, [one for one in shown if one.tier == name]) for name in _tiers(shown))
    said += f", {amount(state.more_adapters)} more" if state.more_adapters else ""
    head = Text("adapters", style="bold").append(f" {said or 'none'}", style="not bold")
    columns = [
        Column("name", [one.name for one in shown], [view.adapter_style(one.name) for one in shown], 9, elastic=True),
        Column("tier", [one.tier for one in shown], [_TIERS.get(one.tier, "") for one in shown], keep=8),
        Column("rank", [amount(one.rank) for one in shown], right=True, keep=5),
        Column("bytes", [size(one.bytes) for one in shown], right=True, keep=6),
        Column("requests", [amount(one.requests) for one in shown], right=True, keep=7),
        Column("pinned", ["yes" if one.pinned else "" for one in shown], keep=4),
    ]
    return [head, *_with_end(table(columns, width), room)]


def _tiers(shown: Sequence[Adapter]) -> Iterator[str]:
    yield from dict.fromkeys([*(name for name in _TIERS if any(one.tier == name for one in shown))])
    yield from dict.fromkeys(one.tier for one in shown if one.tier not in _TIERS)


def _tier(name: str, held: Sequence[Adapter]) -> str:
    taken = sum(one.bytes or 0 for one in held)
    return f"{len(held)} on {name}" + (f" ({size(taken)})" if taken else "")


def _with_end(lines: list[Text], room: int | None) -> list[Text]:
    """A table below a heading, in so many lines together; the last says how many rows are left out."""
    if room is None or len(lines) < room:
        return lines
    if room < 4:
        return []  # titles and no row would say nothing
    kept = lines[: room - 2]
    return [*kept, Text(f"... {len(lines) - len(kept)} more", style="dim")]


# -- words for numbers --------------------------------------------------------------------------------------------


def amount(value: Number | None) -> str:
    """A number in at most seven characters."""
    if value is None:
        return "-"
    if isinstance(value, float) and value < 100:
        return f"{value:.1f}"
    for unit, scale in (("", 1), ("k", 10**3), ("M", 10**6), ("G", 10**9)):
        if value < 10**5 * scale:
            return f"{value / scale:.0f}{unit}"
    return f"{min(value / 10**12, 9999):.0f}T"


def size(value: Number | None) -> str:
    if value is None:
        return "-"
    for unit, scale in (("B", 1), ("kB", 10**3), ("MB", 10**6)):
        if value < 10**3 * scale:
            return f"{value / scale:.{0 if scale == 1 else 1}f} {unit}"
    return f"{min(value / 10**9, 99999):.1f} GB"


def duration(seconds: Number | None) -> str:
    """In at most six characters."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes}m{int(seconds) % 60:02}"
    hours = minutes // 60
    return f"{hours}h{minutes % 60:02}" if hours < 100 else f"{min(hours // 24, 99999)}d"
