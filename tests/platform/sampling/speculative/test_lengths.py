"""How many drafts a step takes."""

from __future__ import annotations

import random

import pytest

from quire.platform.sampling.speculative.lengths import (
    Acceptance,
    Candidate,
    OwnAcceptance,
    StepCost,
    choose_lengths,
)

ROOM = 1000


def learned(fixed: float, each: float, sizes: list[int], noise: float = 0.0) -> StepCost:
    rng = random.Random(1)
    cost = StepCost()
    for size in sizes:
        cost.took(size, (fixed + each * size) * (1 + noise * rng.uniform(-1, 1)))
    return cost


@pytest.mark.parametrize(("fixed", "each"), [(0.016, 0.001), (0.001, 0.0001), (0.0, 0.002), (0.05, 0.0)])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_line_through_the_steps(fixed: float, each: float, noise: float) -> None:
    sizes = [random.Random(2).choice([1, 1, 5, 9, 17]) for _ in range(3)] + [1, 4, 9, 17, 12, 1, 16, 3] * 20
    found_fixed, found_each = learned(fixed, each, sizes, noise).line()
    total = fixed + each * 8
    assert abs(found_fixed - fixed) < (0.05 + noise) * total
    assert abs(found_each - each) * 8 < (0.05 + noise) * total


def test_steps_of_one_size_tell_nothing_of_the_next_token() -> None:
    fixed, each = learned(0.02, 0.0, [1] * 100).line()
    assert each == pytest.approx(0.02 / 25) and fixed + each == pytest.approx(0.02)


def test_a_step_that_took_far_too_long_counts_little() -> None:
    cost = learned(0.016, 0.001, [1, 5, 9] * 30)
    before = cost.line()
    cost.took(1, 10.0)
    assert sum(cost.line()) < 1.3 * sum(before)


def test_a_batch_that_is_bound_by_arithmetic_takes_none() -> None:
    free, dear = learned(0.02, 0.0005, [1, 9, 17] * 30), learned(0.0, 0.002, [1, 9, 17] * 30)
    likely = [Candidate(0.9, 16)]
    assert choose_lengths(free, 1, 1, likely, ROOM)[0] >= 12
    assert choose_lengths(dear, 1, 1, likely, ROOM) == [0]
    assert choose_lengths(dear, 32, 32, likely * 32, ROOM) == [0] * 32
    # The same weights: one stream has room for drafts, a crowd has not.
    assert sum(choose_lengths(free, 400, 400, likely * 400, ROOM)) == 0


def test_the_likelier_ones_come_first() -> None:
    cost = learned(0.02, 0.002, [1, 9, 17] * 30)
    sure, doubtful, none, few = choose_lengths(
        cost, 4, 4, [Candidate(0.95, 16), Candidate(0.3, 16), Candidate(0.0, 16), Candidate(0.95, 2)], ROOM
    )
    assert sure > doubtful and none == 0 and few == 2
    assert sum(choose_lengths(cost, 4, 4, [Candidate(0.95, 16), Candidate(0.3, 16)], 5)) == 5
    assert choose_lengths(cost, 2, 2, [Candidate(0.9, 0), Candidate(0.9, 1, 3)], ROOM)[0] == 0


def test_drafts_behind_tokens_that_must_be_right_too_are_worth_less() -> None:
    cost = learned(0.02, 0.002, [1, 9, 17] * 30)
    first, later = (choose_lengths(cost, 1, 1, [Candidate(0.7, 16, skipped)], ROOM)[0] for skipped in (0, 2))
    assert later < first


def test_what_is_seen_of_a_sequence_counts_and_is_believed_of_the_next() -> None:
    everybody = Acceptance()
    wrong, right = OwnAcceptance(everybody), OwnAcceptance(everybody)
    before = wrong.rate(3)
    for _ in range(10):
        wrong.saw(3, 0, 1)
    assert wrong.rate(3) < 0.1 < before
    assert wrong.rate(3) < right.rate(3) < before
    for _ in range(10):
        right.saw(3, 8, 8)
    assert right.rate(3) > 0.8
    for match in range(40):
        assert 0 <= everybody.rate(match) <= 1
