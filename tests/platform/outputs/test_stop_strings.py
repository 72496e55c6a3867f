"""Stop strings against a plain search that looks at the whole text again after every character."""

from __future__ import annotations

import codecs
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from quire import LLM, SamplingParams
from quire.platform.outputs.detokenizer import Detokenizer, _byte_characters
from quire.platform.outputs.stop_strings import StopMatcher, StopStrings


@dataclass
class Plain:
    """What `StopMatcher` is to do, as one would say it."""

    stops: list[str]
    text: str = ""

    def feed(self, piece: str, armed: bool) -> tuple[str, int] | None:
        for place, character in enumerate(piece):
            self.text += character
            ended = [stop for stop in self.stops if self.text.endswith(stop)]
            if ended and armed:
                return max(ended, key=len), len(piece) - place - 1
        return None

    @property
    def held(self) -> int:
        """The longest end that a stop string begins with, and is not done with."""
        begun = {stop[:size] for stop in self.stops for size in range(len(stop))}
        return max(len(start) for start in begun if self.text.endswith(start))


def assert_alike(stops: list[str], pieces: list[str], unarmed: int, fork: int) -> None:
    """Fed with the same, the first `unarmed` pieces not counting, and forked on the way."""
    matcher, plain = StopMatcher(StopStrings(stops)), Plain(stops)
    for number, piece in enumerate(pieces):
        if number == fork:
            child, left = matcher.copy(), Plain(stops, plain.text)
            child.feed("".join(stops)[::-1], False)  # which is nothing to the one that goes on
            left.feed("".join(stops)[::-1], False)
            assert child.held == left.held
        found = matcher.feed(piece, number >= unarmed)
        assert found == plain.feed(piece, number >= unarmed)
        if found:
            return
        assert matcher.held == plain.held


def cut(text: str, sizes: list[int]) -> list[str]:
    """In pieces of these sizes, over and over; a size of 0 is an empty piece."""
    pieces, place, number = [], 0, 0
    while place < len(text):
        size = sizes[number % len(sizes)] if number < 4 * len(text) else 1
        pieces.append(text[place : place + size])
        place, number = place + size, number + 1
    return pieces


# Few characters, so that they match; of one, two, three and four bytes, and halves of a pair.
ALPHABETS = ["ab", "aab\n", "aéü", "你好a", "👩\u200d👧a", "\ud83d\udc69\udc67a"]


@st.composite
def cases(draw: Callable[[st.SearchStrategy[Any]], Any]) -> tuple[list[str], str]:
    letters = st.sampled_from(draw(st.sampled_from(ALPHABETS)))
    stop = st.text(letters, min_size=1, max_size=9)
    stops = draw(st.lists(stop, min_size=1, max_size=6))
    parts = draw(st.lists(st.one_of(st.text(letters, max_size=8), st.sampled_from(stops)), max_size=6))
    return stops, "".join(parts)


@settings(max_examples=250, deadline=None)
@given(cases(), st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 9), st.integers(0, 9))
@example((["aab", "ab", "b", "aab"], "aaab"), [1], 2, 1)
@example((["abcd", "bc"], "abcd"), [4], 0, 9)
@example((["a", "aa", "aaa"], "aaaaaaa"), [2], 3, 1)
@example((["abcabx", "bcabc", "cab"], "abcabcabx"), [3], 9, 0)
def test_random_texts(case: tuple[list[str], str], sizes: list[int], unarmed: int, fork: int) -> None:
    stops, text = case
    assert_alike(stops, cut(text, sizes), unarmed, fork)


@pytest.mark.parametrize("seed", range(6))
def test_many_long_ones_that_begin_alike(seed: int) -> None:
    draw = random.Random(seed)
    base = "".join(draw.choices("ab" if seed % 2 else "a", k=60)) + "👧" * (seed % 3)
    stops = [base[: draw.randrange(20, len(base))] + draw.choice("abcé") for _ in range(40)]
    text = "".join(draw.choice(stops)[draw.randrange(20) : -draw.randrange(1, 20)] for _ in range(30))
    assert_alike(stops, cut(text, [1, 16, 3]), draw.choice([0, 20, 99]), 5)


# ---------------------------------------------------------------------- as a sequence's text


SHOWN = {byte: character for character, byte in _byte_characters().items()}


@cache
def byte_tokens() -> Any:
    """A token for each byte and for each two of some, so that tokens begin and end within characters."""
    some = [SHOWN[byte] for byte in range(0x80, 0x100, 7)]
    pairs = [(one, other) for one in [*some, *"ab"] for other in [*some, *"ab"]]
    vocabulary = {token: n for n, token in enumerate([*SHOWN.values(), *(one + other for one, other in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_ids(data: bytes) -> list[int]:
    """Tokens of one or two bytes."""
    vocabulary, ids, place = byte_tokens().get_vocab(), [], 0
    while place < len(data):
        token = "".join(SHOWN[byte] for byte in data[place : place + 2])
        token = token if token in vocabulary else token[0]
        ids.append(vocabulary[token])
        place += len(token)
    return ids


@settings(max_examples=150, deadline=None)
@given(
    cases(), st.lists(st.integers(0, 30), max_size=4), st.binary(max_size=2), st.booleans(), st.integers(0, 12),
    st.integers(0, 20),
)  # fmt: skip
def test_the_text_of_a_sequence(
    case: tuple[list[str], str], broken_at: list[int], junk: bytes, include: bool, min_tokens: int, fork: int
) -> None:
    """Text, deltas and stop string are those of the bytes decoded so far, searched anew after every token."""
    data = case[1].encode(errors="replace")
    for place in broken_at:
        data = data[:place] + junk + data[place:]
    stops, ids = case[0], byte_ids(data)
    params = SamplingParams(stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens, max_tokens=None, n=2)
    detokenizer = Detokenizer(byte_tokens(), [], params, StopStrings(params.stop))
    plain, decoder = Plain(stops), codecs.getincrementaldecoder("utf-8")("replace")
    lengths = {token: len(byte_tokens().backend_tokenizer.id_to_token(token)) for token in ids}
    for number, token in enumerate(ids):
        if number == fork:
            other, detokenizer = detokenizer, detokenizer.fork()
            for strange in reversed(ids):
                other.append(strange)
        piece, data = decoder.decode(data[: lengths[token]]), data[lengths[token] :]
        match = plain.feed(piece, number + 1 > min_tokens)
        found = detokenizer.append(token)
        assert found == (match[0] if match else None)
        if match:
            expected = plain.text if include else plain.text[: -len(match[0])]
            break
        assert detokenizer.text == plain.text
        held = 0 if include else plain.held
        assert detokenizer.emittable(False) == plain.text[: len(plain.text) - held]
    else:
        expected = plain.text + decoder.decode(b"", True)
    detokenizer.finish()
    assert detokenizer.text == detokenizer.emittable(True) == expected


# ---------------------------------------------------------------------- what they cost


def lines_executed(work: Callable[[], None]) -> int:
    """Lines of Python: what a clock would say, were the machine idle."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


LETTERS = "etaoinshrdlucmfwypvbgkqjxzETAOINSHRDLUCMFWYPVBGKQJXZ0123456789 ."
HOSTILE = {
    "all letters": [letter + "e" * 1022 + "\0" for letter in LETTERS],
    "that match": ["e" * size + "\0" for size in range(960, 1024)],
    "that begin alike": [("ea" * 512)[:960] + letter + "\0" for letter in LETTERS],
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_token_costs_no_more_with_many_stop_strings(kind: str) -> None:
    texts = {"all letters": "the cat sat on a mat. ", "that match": "e" * 22, "that begin alike": "ea" * 11}
    ids = byte_ids(texts[kind].encode()) * 100

    def lines(stops: list[str]) -> int:
        detokenizer = Detokenizer(byte_tokens(), [], SamplingParams(stop=stops, max_tokens=None))
        return lines_executed(lambda: [detokenizer.append(token) for token in ids] and None)

    assert lines(HOSTILE[kind]) < 1.5 * lines(["the end", "eat", "that"])


def test_they_are_prepared_once_before_any_step(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[str]] = []
    make = StopStrings.__init__

    def counted(self: StopStrings, stops: list[str]) -> None:
        made.append(list(stops))
        make(self, stops)

    engine = tiny_llm.llm_engine
    monkeypatch.setattr(StopStrings, "__init__", counted)
    params = SamplingParams(n=5, stop=["ab", "never"], seed=3, temperature=1, max_tokens=4)
    arrival = engine.read_request("stops", "Once upon", params)  # any thread may do this
    assert made == [["ab", "never"]]
    engine.submit(arrival)
    while engine.has_unfinished_requests():
        engine.step()
    assert len(made) == 1
