"""How many draft tokens a step takes: as many as are likely to be worth their time.

A step of t tokens takes about `fixed + each * t` seconds, where `fixed` is what reading the weights takes: a draft
token costs `each`, and gives a token as often as it and those before it are right. So the most likely ones are taken,
as long as they raise the tokens a second of the whole step. Where a batch is bound by arithmetic, `fixed` is nothing
beside the rest, and no draft is worth it. Both are learned while the engine runs; no token depends on it, only time
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heapreplace
from typing import NamedTuple

_MEMORY = 0.98  # of what was seen, a step later
_OUTLIER = 3.0  # times the expected time: something else had the machine
_FREE_TOKENS = 24.0  # how many tokens `fixed` is believed to be worth, before steps of several sizes were seen
_BELIEF = 2.0  # how many steps that belief counts as
_WORTH = 1.03  # drafts must raise the rate so much, as planning them takes time too

_RATES = (0.3, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9)  # believed of a match of so many tokens
_RATE_BELIEF = 4.0  # how many tokens that counts as
_RATE_MEMORY = 0.99  # of what was seen of all sequences, a check later
_OWN_MEMORY = 0.85  # and of one sequence
_OWN_BELIEF = 3.0  # how many tokens what is known of all counts as, for one


class StepCost:
    """Seconds of a step by its tokens: a line through the steps of late, by least squares."""

    def __init__(self) -> None:
        self._weight = self._tokens = self._squares = self._seconds = self._products = 0.0

    def took(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if self._weight > 1:
            fixed, each = self.line()
            seconds = min(seconds, _OUTLIER * (fixed + each * tokens))
        self._weight = self._weight * _MEMORY + 1
        self._tokens = self._tokens * _MEMORY + tokens
        self._squares = self._squares * _MEMORY + tokens * tokens
        self._seconds = self._seconds * _MEMORY + seconds
        self._products = self._products * _MEMORY + tokens * seconds

    def line(self) -> tuple[float, float]:
        """(fixed, each), in seconds; before any step was seen, in units of its own."""
        if not self._weight:
            return _FREE_TOKENS, 1.0
        tokens, seconds = self._tokens / self._weight, self._seconds / self._weight
        spread = self._squares / self._weight - tokens * tokens
        slope = self._products / self._weight - tokens * seconds
        believed = seconds / (tokens + _FREE_TOKENS)
        # The belief is as good as _BELIEF steps whose sizes differ by a tenth of what `fixed` is believed to be worth.
        pull = _BELIEF * (0.1 * _FREE_TOKENS) ** 2 / self._weight
        each = min(max((slope + pull * believed) / (spread + pull), 0.0), seconds / tokens)
        return seconds - each * tokens, each


class Acceptance:
    """How often proposed tokens are the ones that are drawn, by the length of their match: of all sequences."""

    def __init__(self) -> None:
        self._right = [rate * _RATE_BELIEF for rate in _RATES]
        self._tried = [_RATE_BELIEF] * len(_RATES)

    def rate(self, match: int) -> float:
        """Of a match of so many tokens."""
        place = min(match, len(_RATES) - 1)
        return self._right[place] / self._tried[place]

    def saw(self, match: int, right: int, tried: int) -> None:
        """So many of those that were tried were right."""
        place = min(match, len(_RATES) - 1)
        self._right[place] = (self._right[place] - _RATES[place] * _RATE_BELIEF) * _RATE_MEMORY + right
        self._tried[place] = (self._tried[place] - _RATE_BELIEF) * _RATE_MEMORY + tried
        self._right[place] += _RATES[place] * _RATE_BELIEF
        self._tried[place] += _RATE_BELIEF


class OwnAcceptance:
    """The same of one sequence, which begins with what is known of all."""

    __slots__ = ("_all", "_right", "_tried")

    def __init__(self, of_all: Acceptance) -> None:
        self._all = of_all
        self._right = self._tried = 0.0

    def rate(self, match: int) -> float:
        """How likely a proposed token is right, if those before it are."""
        return (self._right + self._all.rate(match) * _OWN_BELIEF) / (self._tried + _OWN_BELIEF)

    def saw(self, match: int, right: int, tried: int) -> None:
        """So many of those that were tried were right."""
        self._right = self._right * _OWN_MEMORY + right
        self._tried = self._tried * _OWN_MEMORY + tried
        self._all.saw(match, right, tried)


class Candidate(NamedTuple):
    """A sequence that has proposed tokens.

    rate: as of `OwnAcceptance`. most: how many drafts it can have. skipped: how many proposed tokens stand before them,
    which are no drafts and must be right too.
    """

    rate: float
    most: int
    skipped: int = 0


def choose_lengths(cost: StepCost, tokens: int, drawing: int, candidates: Sequence[Candidate], room: int) -> list[int]:
    """How many drafts each candidate gets, in a step that has so many tokens and draws so many without any. room: for
    how many there is, of all."""
    fixed, each = cost.line()
    gain, seconds = float(drawing), fixed + each * tokens
    least = _WORTH * gain / seconds if seconds > 0 else 0.0
    lengths = [0] * len(candidates)
    # The next draft of each candidate, the likeliest first.
    queue = [(-(one.rate ** (1 + one.skipped)), place) for place, one in enumerate(candidates) if one.most > 0]
    heapify(queue)
    while queue and room > 0:
        minus, place = queue[0]
        if -minus * seconds <= each * gain or -minus < 1e-3:
            break
        gain, seconds = gain - minus, seconds + each
        lengths[place] += 1
        room -= 1
        further = minus * candidates[place].rate if lengths[place] < candidates[place].most else 0.0
        heapreplace(queue, (further, place))
    return lengths if seconds > 0 and gain / seconds > least else [0] * len(candidates)
