"""Draft tokens by looking up."""

from __future__ import annotations

import random

import pytest

from quire.platform.sampling.speculative.lookup import NOTHING, AnswerLookup, PromptLookup, Proposal, TokenIndex

ROOT, OTHER_ROOT = b"root", b"other"


def longest_by_hand(tokens: list[int], least: int) -> int:
    """The longest match of the end of a text with any place before it, up to 32 tokens."""
    best = 0
    for end in range(least, len(tokens)):
        length = 0
        while length < min(end, 32) and tokens[end - 1 - length] == tokens[-1 - length]:
            length += 1
        best = max(best, length)
    return best if best >= least else 0


@pytest.mark.parametrize("least", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_longest_match_is_found_as_the_text_grows(least: int, seed: int) -> None:
    rng = random.Random(seed)
    tokens: list[int] = []
    index = TokenIndex(least)
    for _ in range(60):
        tokens += [rng.randrange(7) for _ in range(rng.randint(1, 3))]
        index.extend(tokens)
        place, length = index.find(tokens, tokens[-32:])
        by_hand = longest_by_hand(tokens, least)
        # Of a run that stands in many places, the last ones are looked at.
        assert length == by_hand or (least == 1 and least <= length < by_hand)
        if length:
            assert tokens[place - length : place] == tokens[-length:] and place < len(tokens)


def test_a_repetition_goes_on() -> None:
    lookup = PromptLookup(2, 8)
    assert lookup.propose(0, [1, 2, 3, 4, 9, 1, 2, 3], ROOT, 3) == Proposal((4, 9, 1), 3)
    assert lookup.propose(1, [7, 8, 9, 7, 8], ROOT, 7) == Proposal((9, 7, 8, 9, 7, 8, 9), 2), "a period is continued"
    assert lookup.propose(2, [5, 5, 5], ROOT, 4) == Proposal((5, 5, 5, 5), 2)
    assert lookup.propose(3, [1, 2, 3, 4], ROOT, 4) == NOTHING
    assert lookup.propose(4, [1], ROOT, 4) == NOTHING
    assert lookup.propose(5, [], ROOT, 4) == NOTHING


def test_a_match_counts_as_long_as_it_may_at_most() -> None:
    run = list(range(20))
    assert PromptLookup(2, 5).propose(0, [*run, 99, *run], ROOT, 1) == Proposal((99,), 5)


def test_earlier_answers_are_found_by_those_of_their_root_alone() -> None:
    lookup = AnswerLookup(2, 8)
    lookup.propose(0, [1, 2], ROOT, 4)
    lookup.end(0, [10, 11, 12, 13, 14, 15], ROOT)
    assert lookup.propose(1, [3, 10, 11, 12], ROOT, 3) == Proposal((13, 14, 15), 3)
    assert lookup.propose(1, [3, 10, 11, 12], ROOT, 9) == Proposal((13, 14, 15), 3)
    assert lookup.propose(2, [3, 10, 11, 12], OTHER_ROOT, 3) == NOTHING
    longer = [20, 11, 12, 99, 98, 10, 11, 12]
    assert lookup.propose(3, longer, ROOT, 2) == Proposal((13, 14), 3), "the longer match of the two"
    own = [7, 10, 11, 12, 99, 7, 10, 11, 12]
    assert lookup.propose(4, own, ROOT, 1) == Proposal((99,), 4)


@pytest.mark.parametrize("seed", range(3))
def test_what_is_kept_is_bounded_and_what_is_forgotten_is_not_found(seed: int) -> None:
    rng = random.Random(seed)
    lookup = AnswerLookup(2, 8, most_tokens=200)
    roots = [bytes([i]) for i in range(5)]
    for number in range(200):
        answer = [rng.randrange(50) for _ in range(rng.randint(0, 40))]
        lookup.end(number, answer, rng.choice(roots))
        assert lookup.tokens <= 200
        assert lookup.tokens == sum(answers.tokens for answers in lookup._answers.values())  # its account
    lookup.end(1000, [1] * 201, roots[0])
    assert lookup.tokens <= 200, "an answer that is longer than all is not kept"
    for root in roots:
        for first in range(50):
            found = lookup.propose(2000 + first, [first, (first + 1) % 50], root, 4)
            assert len(found.tokens) <= 4
    for number in range(20):
        lookup.end(3000 + number, [60, 61, 62, 63, 64, 65, 66, 67, 68, 69], b"last")
    assert lookup.propose(4000, [0, 60, 61], b"last", 2) == Proposal((62, 63), 2)
