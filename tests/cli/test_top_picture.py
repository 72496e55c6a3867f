"""The picture of `quire top`: right for a state that is, within its bounds for any, at any size."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.cli.top_map import Glyphs, cells, glyphs, layout
from quire.cli.top_picture import View, amount, bars, duration, picture, size
from quire.cli.top_state import Pool, State, clean, read_state
from quire.errors import QuireError
from tests.cli.events_server import state

LETTERS = glyphs(colours=False, unicode=True)
COLOURS = glyphs(colours=True, unicode=True)


def read(value: Any) -> State:
    return read_state(json.dumps(value))


def drawn(value: Any, width: int = 80, height: int | None = None, shapes: Glyphs = LETTERS) -> list[str]:
    one = read(value)
    return [line.plain for line in picture(one, one.steps, View(shapes), width, height)]


def pool(total: int, *runs: list[int]) -> Pool:
    return read({"pools": [{"total": total, "map": list(runs)}]}).pools[0]


# -- what it shows ------------------------------------------------------------------------------------------------


def test_the_picture_says_what_the_state_says() -> None:
    lines = drawn(state(), width=90)
    assert lines[0] == "quire 0.9.1  quire-demo  bfloat16  cpu  up 1m01"
    assert lines[1] == "tokens/s in 120  out 33.2  requests/s 1.5  from cache 25%"
    assert lines[2] == "blocks 24 owned, 8 cached, 32 free of 64 of 8 tokens"
    assert lines[3] == "CCCC" + "c" * 8 + "░" * 8 + "d" * 12 + "·" * 32
    assert "steps last: 5.0 ms, 64 tokens of prompts, 2 of answers, 2 sequences" in lines
    assert "prompts   █" in lines and "images    1" in lines
    assert "requests 2 running, 1 waiting, 32 sequences at once" in lines
    assert "d 3  running  french       96      32       100       5      12  1.5 s" in lines
    assert "adapters 1 on device (1.2 MB), 1 on disk" in lines
    assert "french  device     8  1.2 MB         1  yes" in lines


def test_with_colours_owners_differ_by_them_and_shared_blocks_by_their_shape() -> None:
    assert drawn(state(), shapes=COLOURS)[3] == "▓▓▓▓" + "█" * 8 + "░" * 8 + "█" * 12 + "·" * 32
    one = read(state())
    styles: dict[bool, list[str]] = {}
    for by_adapter in (False, True):
        line = picture(one, (), View(COLOURS, by_adapter=by_adapter), 80, None)[3]
        styles[by_adapter] = [str(span.style) for span in line.spans]
    assert len(set(styles[False])) == 3 and len(set(styles[True])) == 3  # two owners, and dim
    assert styles[False] != styles[True]


def test_an_adapter_keeps_its_colour_when_others_go() -> None:
    view = View(COLOURS)
    picture(read(state()), (), view, 80, None)
    before = view.adapter_style("shout")
    picture(read(state(adapters=[])), (), view, 80, None)
    assert view.adapter_style("shout") == before != view.adapter_style("french")


def test_what_is_not_known_is_shown_as_that() -> None:
    lines = drawn({})
    assert lines[0] == "quire  -  -  -  up -"
    assert lines[1] == "tokens/s in -  out -  requests/s -  from cache -"
    assert lines[-2:] == ["requests none", "adapters none"]


def test_sleeping_swapped_and_what_is_left_out_are_said() -> None:
    given = state(sleeping=True, more_requests=7, more_adapters=5)
    given["pools"][0]["swapped"] = 3
    lines = drawn(given, width=120)
    assert "asleep" in lines[0] and "3 swapped" in lines[2]
    assert any("7 more" in line for line in lines) and any("5 more" in line for line in lines)


def test_several_pools_have_a_map_each() -> None:
    kv = state()["pools"][0]
    lines = drawn(state(pools=[kv, {**kv, "name": "states"}]), height=24)
    assert [line.split()[1] for line in lines if line.startswith("blocks")] == ["24", "states:"]


def test_a_narrow_terminal_has_the_columns_that_matter_most() -> None:
    title = next(line for line in drawn(state(), width=40) if line.startswith("#"))
    assert title.split() == ["#", "state", "adapter", "prompt", "answer"]


def test_a_low_terminal_says_how_many_it_leaves_out() -> None:
    many = [{"number": i + 2, "state": "running"} for i in range(100)]
    lines = drawn(state(requests=many), height=30)
    shown = sum(" running " in line for line in lines)
    assert f"... {100 - shown} more" in lines and shown > 3


def test_a_wide_terminal_has_requests_and_adapters_side_by_side() -> None:
    assert any(line.startswith("requests") and " adapters " in line for line in drawn(state(), width=120, height=30))


# -- the map ------------------------------------------------------------------------------------------------------


@given(
    runs=st.lists(st.tuples(st.integers(1, 30), st.integers(0, 5), st.integers(0, 3)), max_size=20),
    more=st.integers(0, 20),
    per=st.integers(1, 40),
)
def test_a_cell_is_whose_most_of_its_blocks_are(runs: list[tuple[int, int, int]], more: int, per: int) -> None:
    blocks = [owner for count, owner, _ in runs for _ in range(count)] + [0] * more
    found = cells(pool(len(blocks), *map(list, runs)), per)
    parts = [blocks[at : at + per] for at in range(0, len(blocks), per)]
    assert len(found) == len(parts)
    for cell, part in zip(found, parts, strict=True):
        owned = [one for one in part if one > 1]
        assert cell.owner == max(owned or part, key=lambda one: (part.count(one), one))
        assert cell.partly == (len(owned) < len(part) / 2)


def test_a_short_request_is_seen_in_a_large_pool() -> None:
    given = {"total": 16000, "map": [[7000, 0, 0], [1, 3, 1], [8999, 0, 0]]}
    assert sum(line.count("▄") for line in drawn(state(pools=[given], steps=[]), 80, 24, COLOURS)) == 1
    assert sum(line.count("d") == 1 and "·" in line for line in drawn(state(pools=[given]), 80, 24)) == 1


@given(total=st.integers(0, 10**15), width=st.integers(1, 300), most=st.integers(1, 50))
def test_all_of_a_pool_is_shown_in_its_room(total: int, width: int, most: int) -> None:
    rows, per = layout(pool(total), width, most)
    assert 1 <= rows <= most and rows * width * per >= total


def test_a_pool_of_any_size_takes_no_longer() -> None:
    one = pool(10**15, [10**14, 2, 1], [10**14, 1, 0])
    _, per = layout(one, 80, 10)
    assert len(cells(one, per)) == 800


# -- whatever a server sends --------------------------------------------------------------------------------------

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=100)
    | st.sampled_from(["running", "kv"]),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=5), inner, max_size=6),
    max_leaves=20,
)


@st.composite
def odd_states(draw: st.DrawFn) -> Any:
    """A state in which some fields are anything, are missing, or are there beside."""

    def odd(value: Any) -> Any:
        if draw(st.integers(0, 9)) == 0:
            return draw(ANYTHING)
        if isinstance(value, dict):
            kept = {name: odd(one) for name, one in value.items() if draw(st.integers(0, 19))}
            return {**kept, **({"beside": draw(ANYTHING)} if draw(st.booleans()) else {})}
        return [odd(one) for one in value] if isinstance(value, list) else value

    return odd(state())


@settings(deadline=None, max_examples=300)
@given(
    value=ANYTHING | odd_states(),
    width=st.integers(1, 200),
    height=st.none() | st.integers(1, 60),
    shapes=st.sampled_from([LETTERS, COLOURS, glyphs(colours=True, unicode=False)]),
)
def test_any_json_is_a_picture_of_that_size_or_an_error(
    value: Any, width: int, height: int | None, shapes: Glyphs
) -> None:
    try:
        one = read(value)
    except QuireError:
        assert not isinstance(value, dict)
        return
    lines = picture(one, one.steps, View(shapes), width, height)
    assert height is None or len(lines) <= height
    for line in lines:
        assert line.cell_len <= width
        assert line.plain.isprintable()


@pytest.mark.parametrize("data", ["", "{", "[1]", "null", "NaN", '"x"', "[" * 100_000, "1" * 10_000])
def test_what_is_no_object_is_refused(data: str) -> None:
    with pytest.raises(QuireError, match="is it quire's"):
        read_state(data)


def test_long_lists_are_cut() -> None:
    rows = [{"name": "x", "number": 2, "total": 1}] * 1000
    one = read({"requests": rows, "adapters": rows, "pools": rows, "steps": rows})
    assert list(map(len, (one.requests, one.adapters, one.pools, one.steps))) == [256, 256, 4, 64]


def test_texts_are_one_line_that_commands_nothing() -> None:
    assert clean("\x1b]0;owned\x07\x1b[2Ja\nb\u202ec\x9b2J") == "�]0;owned��[2Ja�b�c�2J"
    assert clean("e\u0301" + "\u0301" * 50 + "x") == "\xe9\u0301\u0301x"
    assert len(clean("a" * 10_000)) == 80 and clean("a" * 10_000).endswith("…")
    assert clean("\ud800") == "�" and clean("日本 é") == "日本 é"


# -- numbers as words ---------------------------------------------------------------------------------------------


@given(st.none() | st.integers(0, 10**15) | st.floats(0, 10**15))
def test_numbers_take_little_room(value: float | None) -> None:
    assert len(amount(value)) <= 7 and len(duration(value)) <= 6 and len(size(value)) <= 10


def test_numbers_are_read_easily() -> None:
    assert [amount(one) for one in (None, 0, 7, 3.25, 99_999, 100_000, 2 * 10**6)] == [
        "-", "0", "7", "3.2", "99999", "100k", "2000k",
    ]  # fmt: skip
    assert [size(one) for one in (None, 0, 999, 1200, 5 * 10**6, 3 * 10**9)] == [
        "-", "0 B", "999 B", "1.2 kB", "5.0 MB", "3.0 GB",
    ]  # fmt: skip
    assert [duration(one) for one in (None, 0.25, 61, 3600, 10**6)] == ["-", "0.2 s", "1m01", "1h00", "11d"]


def test_bars_are_high_where_numbers_are() -> None:
    assert bars([0, 1, 4, 8], "12345678") == " 148"
    assert bars([5e-324, 10**15], "12345678") == "18"
    assert bars([0, 0], "12345678") == "  " and bars([], "12") == ""
