"""Text ended by stop strings, wherever tokens begin and end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import SamplingParams
from quire.platform.outputs.detokenizer import Detokenizer
from tests.platform.outputs.test_detokenizer import byte_level, stream


def stopped(text: str, stop: Any, **kwargs: Any) -> tuple[str, str | None, str]:
    """(text, stop string, all that was streamed), the text being generated one character a token."""
    detokenizer = Detokenizer(byte_level(), [], SamplingParams(stop=stop, max_tokens=None, **kwargs))
    sent, matched = "", None
    for character in text:
        for token_id in byte_level().encode(character, add_special_tokens=False):
            matched = matched or detokenizer.append(token_id)
        safe = detokenizer.emittable(matched is not None)
        assert safe.startswith(sent)
        sent = safe
        if matched:
            return detokenizer.text, matched, sent
    detokenizer.finish()
    final = detokenizer.emittable(True)
    assert final.startswith(sent)
    return detokenizer.text, matched, final


@pytest.mark.parametrize(
    ("text", "stop", "expected", "matched"),
    [
        ("hello END more", "END", "hello ", "END"),
        ("hello ENEND", "END", "hello EN", "END"),
        ("aabaabaaab", "aabaaa", "aab", "aabaaa"),
        ("one two", ["two", "one"], "", "one"),
        ("abcd", ["abcd", "bc"], "a", "bc"),
        ("xabcd", ["bcd", "abcd"], "x", "abcd"),
        ("no stop here ST", "STOP", "no stop here ST", None),
        ("a👩‍👩‍👧b", "‍👧", "a👩‍👩", "‍👧"),
        ("line\n\nnext", "\n\n", "line", "\n\n"),
    ],
)
def test_stop_strings(text: str, stop: Any, expected: str, matched: str | None) -> None:
    assert stopped(text, stop) == (expected, matched, expected)
    kept = expected + (matched or "")
    assert stopped(text, stop, include_stop_str_in_output=True) == (kept, matched, kept)


def test_a_stop_string_inside_one_token_or_over_several() -> None:
    ids = byte_level().encode("The quick brown fox", add_special_tokens=False)
    assert len(ids) < 15  # tokens of several characters
    for start in range(19):
        for end in range(start + 1, 20):
            stop = "The quick brown fox"[start:end]
            text, _ = stream(byte_level(), ids, stop=stop)
            assert text == "The quick brown fox".split(stop)[0]


@settings(max_examples=150, deadline=None)
@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(0, 5),
)
def test_stop_strings_against_a_plain_search(text: str, stops: list[str], min_tokens: int) -> None:
    """The first end of any stop string after min_tokens; the longest of those that end there."""
    ends = [n for n in range(min_tokens + 1, len(text) + 1) if text[:n].endswith(tuple(stops))]
    expected, matched = text, None
    if ends:
        matched = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
        expected = text[: ends[0] - len(matched)]
    detokenizer = Detokenizer(byte_level(), [], SamplingParams(stop=stops, min_tokens=min_tokens))
    ids = [byte_level().convert_tokens_to_ids(character) for character in text]
    sent, found = "", None
    for place, token_id in enumerate(ids):
        found = detokenizer.append(token_id)
        safe = detokenizer.emittable(False)
        assert safe.startswith(sent) and expected.startswith(safe)
        if found:
            break
        sent = safe
        # Nothing is held back without need: what is held begins a stop string.
        held = text[len(safe) : place + 1]
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
    detokenizer.finish()
    assert (detokenizer.text, found) == (expected, matched)
    assert detokenizer.emittable(True) == expected


def test_nothing_is_added_after_a_stop() -> None:
    detokenizer = Detokenizer(byte_level(), [], SamplingParams(stop="b"))
    ids = [byte_level().convert_tokens_to_ids(character) for character in "abcb"]
    assert [detokenizer.append(token_id) for token_id in ids] == [None, "b", "b", "b"]
    detokenizer.finish()
    assert detokenizer.text == "a"
