"""Whether a replay has a team of threads is learned from its times, here simulated."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

native = pytest.importorskip("quire.kernels.native")
from quire.kernels import _C  # noqa: E402  # there is none where the kernels were not compiled


def simulate(
    team: Callable[[], float], alone: Callable[[], float], seconds: float, size: _C.TeamSize, core: float = 1
) -> tuple[float, float, float]:
    """Runs for so many seconds. Returns the share of runs that were made alone, among the last half of the time; the
    mean time of a run; and the time of the first run alone, from the beginning."""
    now, runs, late, late_alone, first = 0.0, 0, 0, 0, float("inf")
    while now < seconds:
        chosen = size.alone()
        took = alone() if chosen else team()
        size.took(took, took * core)
        if chosen:
            first = min(first, now)
        now, runs = now + took, runs + 1
        if now > seconds / 2:
            late, late_alone = late + 1, late_alone + chosen
    return late_alone / late, now / runs, first


def test_short_runs_that_a_team_makes_slower_are_made_alone() -> None:
    rng = random.Random(1)
    team, alone = (lambda: rng.uniform(1e-3, 4e-3)), (lambda: rng.uniform(2.4e-4, 2.6e-4))
    share, mean, _ = simulate(team, alone, 10, _C.TeamSize(), core=0.5)
    assert share > 0.98 and mean < 2.9e-4


def test_short_runs_that_a_team_makes_faster_have_one() -> None:
    share, mean, first = simulate(lambda: 2e-4, lambda: 3.6e-4, 10, _C.TeamSize())
    assert share < 0.02 and mean < 2.02e-4  # trials cost a hundredth
    assert first > 0.1  # and none is at the start


def test_long_runs_have_a_team_and_no_trial_while_there_are_free_cores() -> None:
    share, mean, first = simulate(lambda: 8e-3, lambda: 14e-3, 30, _C.TeamSize())
    assert share == 0 and mean == pytest.approx(8e-3) and first == float("inf")


def test_long_runs_without_a_core_of_their_own_try_it_alone() -> None:
    size = _C.TeamSize()
    assert not size.asks_for_core_time()
    share, _, _ = simulate(lambda: 30e-3, lambda: 18e-3, 30, size, core=0.5)
    assert share > 0.9
    assert size.asks_for_core_time()


def test_a_machine_that_becomes_busy_and_free_again_is_followed() -> None:
    size = _C.TeamSize()
    assert simulate(lambda: 2e-4, lambda: 3.6e-4, 3, size)[0] < 0.05
    share, _, first = simulate(lambda: 3e-3, lambda: 4e-4, 3, size)
    assert share > 0.95 and first < 0.1  # within a tenth of a second, not at the next regular trial
    assert simulate(lambda: 2e-4, lambda: 3.6e-4, 20, size)[0] < 0.05


def test_times_of_zero_harm_nothing() -> None:
    size = _C.TeamSize()
    for _ in range(100):
        size.took(0.0, 0.0)
    assert simulate(lambda: 2e-4, lambda: 3.6e-4, 3, size)[0] < 0.05
