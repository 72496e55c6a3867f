"""A token proposed from a draft model's row: drawn as the real one will be, with the same number.

Where the two models' distributions are alike, so are the tokens that one number stands for in both: a sampled
request's proposals are right as often as a greedy one's. Logits processors have no part in it, as they would have to be
told of tokens that may never be.
"""

from __future__ import annotations

import math

from quire.platform.sampling.distribution import locate, weigh
from quire.platform.sampling.logits_processors.base import Row
from quire.platform.sampling.params import SamplingParams
from quire.platform.sampling.sampler import uniform


def guess(row: Row, params: SamplingParams, seed: int, position: int) -> int:
    """The token of a row [V] float32. seed, position: of the real draw, as of `TokenDraw`.

    A row that is not finite, as keys may be missing that it should have seen, proposes token 0: wrong, and no harm.
    """
    best = int(row.argmax())
    if not math.isfinite(row[best]):  # argmax takes NaN for the largest
        return 0
    weights = weigh(row, best, params)
    return locate(weights, 0.0 if weights.cumulative is None else uniform(seed, position))
