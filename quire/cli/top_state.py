"""What an event of GET /v1/engine/events says, as far as it can be read: of whatever a server sends, bounded and plain.

A field that is missing, or of another kind, is None (or nothing, of lists); no text can command a terminal.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.errors import QuireError

Number = int | float

_LARGEST = 10**15  # what is larger is shown as this
_LONGEST_TEXT = 80
_MOST_POOLS, _MOST_ITEMS, _MOST_STEPS = 4, 256, 64
_MOST_RUNS = 1 << 20
_MOST_MARKS = 2  # accents on one letter


@dataclass(frozen=True)
class Run:
    """Neighbouring blocks alike. owner: 0 free, 1 cached, else a request's number; shared: sequences that hold them."""

    count: int
    owner: int
    shared: int


@dataclass(frozen=True)
class Pool:
    """Blocks of one kind; runs: all of them in their order."""

    name: str
    block_size: Number | None
    total: int
    free: Number | None
    cached: Number | None
    owned: Number | None
    swapped: Number | None
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class Request:
    """A request, by a number of the engine's. adapter: None is the base model."""

    number: int | None
    state: str
    adapter: str | None
    prompt_tokens: Number | None
    cached_tokens: Number | None
    computed_tokens: Number | None
    output_tokens: Number | None
    blocks: Number | None
    seconds: Number | None


@dataclass(frozen=True)
class Step:
    """A step that was made: its time, and how many of what were in it."""

    milliseconds: Number
    prefill_tokens: Number
    decode_tokens: Number
    sequences: Number
    media: Number
    adapters: Number


@dataclass(frozen=True)
class Adapter:
    """An adapter, and in which memory it is."""

    name: str
    tier: str
    bytes: Number | None
    rank: Number | None
    requests: Number | None
    pinned: bool


@dataclass(frozen=True)
class Rates:
    """Of the server's last while: tokens and requests a second; the share of prompts' tokens that were found."""

    prompt: Number | None
    output: Number | None
    requests: Number | None
    hits: Number | None


@dataclass(frozen=True)
class State:
    """The engine at one time (seconds since it started)."""

    time: Number | None
    sleeping: bool
    model: str | None
    dtype: str | None
    device: str | None
    version: str | None
    max_num_seqs: Number | None
    pools: tuple[Pool, ...]
    requests: tuple[Request, ...]
    more_requests: Number
    steps: tuple[Step, ...]
    adapters: tuple[Adapter, ...]
    more_adapters: Number
    rates: Rates


def read_state(data: str) -> State:
    """What an event's data says. Raises QuireError where it is no JSON object."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise QuireError("the server's events are no JSON: is it quire's?") from None
    if not isinstance(value, dict):
        raise QuireError("the server's events are no JSON objects: is it quire's?")
    fields = _Fields(value)
    engine, rates = fields.fields("engine"), fields.fields("rates")
    return State(
        time=fields.number("time"),
        sleeping=fields.flag("sleeping"),
        model=engine.text("model"),
        dtype=engine.text("dtype"),
        device=engine.text("device"),
        version=engine.text("version"),
        max_num_seqs=engine.number("max_num_seqs"),
        pools=tuple(_pool(one) for one in fields.items("pools", _MOST_POOLS)),
        requests=tuple(_request(one) for one in fields.items("requests", _MOST_ITEMS)),
        more_requests=fields.number("more_requests") or 0,
        steps=tuple(_step(one) for one in fields.items("steps", _MOST_STEPS)),
        adapters=tuple(_adapter(one) for one in fields.items("adapters", _MOST_ITEMS)),
        more_adapters=fields.number("more_adapters") or 0,
        rates=Rates(
            rates.number("prompt_tokens_per_second"),
            rates.number("output_tokens_per_second"),
            rates.number("requests_per_second"),
            rates.number("cache_hit_rate"),
        ),
    )


def clean(text: str, most: int = _LONGEST_TEXT) -> str:
    """One line of at most `most` characters, of which none commands a terminal or piles up on another."""
    kept: list[str] = []
    marks = 0
    for one in unicodedata.normalize("NFC", text[: 4 * most]):
        marks = marks + 1 if unicodedata.category(one).startswith("M") else 0
        if marks <= _MOST_MARKS:
            kept.append(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}")
    return "".join(kept if len(kept) <= most else [*kept[: most - 1], "…"])


class _Fields:
    """A JSON object's fields, read as what they should be."""

    def __init__(self, value: dict[str, Any]) -> None:
        self._value = value

    def number(self, name: str) -> Number | None:
        return _number(self._value.get(name))

    def whole(self, name: str) -> int:
        return int(self.number(name) or 0)

    def text(self, name: str) -> str | None:
        value = self._value.get(name)
        return clean(value) if isinstance(value, str) else None

    def flag(self, name: str) -> bool:
        return self._value.get(name) is True

    def fields(self, name: str) -> _Fields:
        value = self._value.get(name)
        return _Fields(value if isinstance(value, dict) else {})

    def items(self, name: str, most: int) -> Iterator[_Fields]:
        return (_Fields(one) for one in self.list(name, most) if isinstance(one, dict))

    def list(self, name: str, most: int) -> list[Any]:
        value = self._value.get(name)
        return value[:most] if isinstance(value, list) else []


def _number(value: Any) -> Number | None:
    """No number of these is negative, and none has no end."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and math.isnan(value):
        return None
    return min(max(value, 0), _LARGEST)


def _pool(fields: _Fields) -> Pool:
    runs = tuple(_runs(fields.list("map", _MOST_RUNS)))
    return Pool(
        name=fields.text("name") or "blocks",
        block_size=fields.number("block_size"),
        total=max(fields.whole("total"), sum(run.count for run in runs)),
        free=fields.number("free"),
        cached=fields.number("cached"),
        owned=fields.number("owned"),
        swapped=fields.number("swapped"),
        runs=runs,
    )


def _runs(rows: list[Any]) -> Iterator[Run]:
    for row in rows:
        if not isinstance(row, list) or len(row) < 2:
            continue
        count, owner, shared = (int(_number(one) or 0) for one in [*row, 1][:3])
        if count:
            yield Run(count, owner, shared)


def _request(fields: _Fields) -> Request:
    number = fields.number("number")
    return Request(
        number=None if number is None else int(number),
        state=fields.text("state") or "?",
        adapter=fields.text("adapter"),
        prompt_tokens=fields.number("prompt_tokens"),
        cached_tokens=fields.number("cached_tokens"),
        computed_tokens=fields.number("computed_tokens"),
        output_tokens=fields.number("output_tokens"),
        blocks=fields.number("blocks"),
        seconds=fields.number("seconds"),
    )


def _step(fields: _Fields) -> Step:
    names = ("milliseconds", "prefill_tokens", "decode_tokens", "sequences", "media", "adapters")
    return Step(*(fields.number(name) or 0 for name in names))


def _adapter(fields: _Fields) -> Adapter:
    return Adapter(
        name=fields.text("name") or "?",
        tier=fields.text("tier") or "?",
        bytes=fields.number("bytes"),
        rank=fields.number("rank"),
        requests=fields.number("requests"),
        pinned=fields.flag("pinned"),
    )
