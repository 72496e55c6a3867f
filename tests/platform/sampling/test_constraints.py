"""What is done to logits before a token is chosen: bit for bit the plain formulas, from arrays that are made once."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import RequestError, SamplingParams
from quire.platform.inputs.tokenizer import encode_bad_words
from quire.platform.sampling import params as sampling_params
from quire.platform.sampling.sampling_input import SamplingInput, SamplingState
from tests.platform.sampling.specs import Spec, processed, sample

Words = tuple[tuple[int, ...], ...]


def plainly(
    row: np.ndarray, params: SamplingParams, prompt: Sequence[int], output: list[int], stop: set[int], words: Words
) -> np.ndarray:
    """The same, step by step and straight from the lists."""
    size = len(row)

    def within(ids: Any) -> np.ndarray:
        array = np.asarray(list(ids), dtype=np.int64)
        return array[(array >= 0) & (array < size)]

    changed = np.full_like(row, -np.inf)
    allowed = within(range(size) if params.allowed_token_ids is None else params.allowed_token_ids)
    changed[allowed] = row[allowed]
    row = changed
    for word in words:
        so_far = len(output) - len(word) + 1
        if so_far >= 0 and tuple(output[so_far:]) == word[:-1] and word[-1] < size:
            row[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        row[within(sorted(stop))] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        if token < size:
            row[token] += np.float32(bias)
    if params.repetition_penalty != 1.0:
        ids, penalty = np.unique(within([*prompt, *output])), np.float32(params.repetition_penalty)
        row[ids] = np.where(row[ids] > 0, row[ids] / penalty, row[ids] * penalty)
    if params.frequency_penalty or params.presence_penalty:
        ids, counts = np.unique(within(output), return_counts=True)
        row[ids] -= np.float32(params.frequency_penalty) * counts.astype(np.float32)
        row[ids] -= np.float32(params.presence_penalty)
    return row


def bits(row: np.ndarray) -> list[int]:
    return row.view(np.int32).tolist()


SIZES = st.sampled_from([5, 40, 700])


@st.composite
def cases(draw: Any) -> tuple[int, SamplingParams, list[int], list[int], set[int], Words]:
    size = draw(SIZES)
    token = st.integers(0, size - 1) | st.integers(0, 4)
    params = SamplingParams(
        allowed_token_ids=draw(st.none() | st.lists(token, min_size=1, max_size=size)),
        logit_bias=draw(st.none() | st.dictionaries(token, st.floats(-120, 120) | st.just(0.0), max_size=size)),
        min_tokens=draw(st.integers(0, 6)),
        max_tokens=None,
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7, 1e4, 1e-4, 1.0000001])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.3, -2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 1.7])),
    )
    small = st.integers(0, 3)  # so that words do match
    words = draw(st.lists(st.lists(small, min_size=1, max_size=4).map(tuple), max_size=12))
    outside = st.lists(token | st.just(size) | st.just(10**6), max_size=30)  # as placeholders of images may be
    return size, params, draw(outside), draw(st.lists(small | token, max_size=25)), {1, 3, size - 1}, tuple(words)


@settings(max_examples=150, deadline=None)
@given(cases(), st.integers(0, 2**31))
def test_bit_for_bit_the_plain_formulas(case: Any, seed: int) -> None:
    size, params, prompt, output, stop, words = case
    rng = np.random.default_rng(seed)
    state = Spec(0, params, prompt, (), 0, sorted(stop), words).state(size)
    for length in [*range(len(output) + 1), max(0, len(output) - 3)]:  # as a sequence grows, and when it goes back
        row = (rng.standard_normal(size) * 5).astype(np.float32)
        row[rng.integers(0, size, 3)] = [0.0, -0.0, -np.inf]
        before = row.copy()
        state.output_ids = output[:length]
        ours = processed(row, state)
        assert bits(ours) == bits(plainly(row, params, prompt, output[:length], stop, words))
        assert bits(row) == bits(before)


def test_sequences_of_one_request_do_not_share_what_they_generated() -> None:
    shared = SamplingInput(SAME, Spec(0, SAME, [1], stop=[0]).chain(10))
    first, second = SamplingState(shared, []), SamplingState(shared, [3])
    row = np.ones(10, np.float32)
    for output in ([2], [2, 2]):
        first.output_ids = output
        processed(row, first)
    assert processed(row, second).tolist() == plainly(row, SAME, [1], [3], {0}, ()).tolist()
    first.output_ids = [2, 2, 4]
    assert processed(row, first).tolist() == plainly(row, SAME, [1], [2, 2, 4], {0}, ()).tolist()


SAME = SamplingParams(frequency_penalty=1.0, repetition_penalty=2.0)


class Untouchable:
    """A list that a step must not read: it is true, and that is all."""

    def __bool__(self) -> bool:
        return True

    def _touched(self, *_: Any) -> Any:
        raise AssertionError("a step has read a list of the request's")

    __iter__ = __len__ = __getitem__ = __array__ = __contains__ = _touched


LISTS: dict[str, dict[str, Any]] = {
    "allowed_token_ids": {"allowed_token_ids": [5, 6, 7] * 100_000},
    "logit_bias": {"logit_bias": {token: 1.0 + token % 3 for token in range(380)}},
    "bad_words": {"bad_words": ["word", "an other", "a b c"]},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "stop_token_ids": {"stop_token_ids": range(3, 300), "min_tokens": 5},
}


@pytest.mark.parametrize("field", LISTS)
def test_no_step_reads_a_requests_lists(tiny_llm: Any, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    params = SamplingParams(temperature=0.7, seed=3, n=3, max_tokens=6, ignore_eos=True, **LISTS[field])
    prompt = {"prompt_token_ids": [5, 9, 5, 11]}

    def answers() -> list[Any]:
        (output,) = tiny_llm.generate([prompt], params, use_tqdm=False)
        return [list(one.token_ids) for one in output.outputs]

    expected = answers()
    make = SamplingState.__init__

    def without_lists(self: SamplingState, sampling: SamplingInput, output_ids: Any) -> None:
        bare = dataclasses.replace(sampling.params)
        for name in ("allowed_token_ids", "logit_bias", "stop_token_ids", "bad_words"):
            if getattr(bare, name):
                object.__setattr__(bare, name, Untouchable())
        # The prompt, the stop ids and the tokens of bad words are not there at all.
        assert {field.name for field in dataclasses.fields(sampling)} == {"params", "processors"}
        make(self, dataclasses.replace(sampling, params=bare), output_ids)
        object.__setattr__(self, "input", sampling)  # which a fork takes

    monkeypatch.setattr(SamplingState, "__init__", without_lists)
    assert answers() == expected


def test_a_long_word_or_very_many_are_refused(tiny_llm: Any) -> None:
    tokenizer = tiny_llm.get_tokenizer()
    rng = random.Random(0)
    letters = "bcdfghjklmnpqrstvwxz"
    long = "".join(rng.choice(letters) for _ in range(1000))
    with pytest.raises(RequestError, match=r"bad_words\[1\] has \d+ tokens, and the limit is 128"):
        encode_bad_words(tokenizer, ["the", long])
    many = ["".join(rng.choice(letters) for _ in range(60)) for _ in range(sampling_params.MAX_BAD_WORDS)]
    with pytest.raises(RequestError, match="bad_words has more than 32768 tokens in all"):
        encode_bad_words(tokenizer, many)


def test_the_deepest_match_is_found() -> None:
    word = tuple(range(128))
    logits = torch.zeros(1, 200)
    logits[0, 127] = 9.0
    spec = Spec(0, SamplingParams(temperature=0), (), list(word[:-1]), 0, (), (word,))
    assert sample(logits, [spec])[0].token_id == 0
    spec = dataclasses.replace(spec, output=[0, *word[2:-1]])
    assert sample(logits, [spec])[0].token_id == 127
