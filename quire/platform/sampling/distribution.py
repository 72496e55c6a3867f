"""A row of logits as a distribution: what temperature, min_p, top_k and top_p keep of it, and the draw from that.

Every row is worked on alone, by single-threaded numpy. Wherever tokens are ranked, equal logits are ranked by token id,
the lower first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.platform.sampling.logits_processors.base import Ids, Row
from quire.platform.sampling.params import SamplingParams
from quire.platform.sampling.results import TopLogprobs

# top_p alone looks at so many tokens first, and at _WIDEN times as many whenever their mass does not suffice.
_FIRST_LOOK = 256
_WIDEN = 8
_BLOCK = 256  # tokens whose weights are summed before the blocks are searched


@dataclass(frozen=True, slots=True)
class Weights:
    """What a row's draws have in common. best: the likeliest token; the rest is None for greedy rows.

    order: the kept tokens, best first, or None for all tokens by id.
    cumulative: running sums of the kept tokens' weights, or of blocks of _BLOCK tokens where order is None.
    """

    best: int
    order: Ids | None = None
    cumulative: NDArray[np.float64] | None = None
    weights: Row | None = None


def weigh(row: Row, best: int, params: SamplingParams) -> Weights:
    """The distribution that temperature, min_p, top_k and top_p make of a row [V], whose likeliest token is `best`."""
    if params.greedy:
        return Weights(best)
    weights = row - row[best]
    weights /= np.float32(params.temperature)
    np.exp(weights, out=weights)  # relative to the best token's, which is exactly 1
    if params.min_p > 0:
        weights[weights < np.float32(params.min_p)] = 0
    if params.top_p < 1 or 0 < params.top_k < len(row):
        return Weights(best, *_leading(row, weights, params))
    return Weights(best, None, np.cumsum(_block_sums(weights)), weights)


def locate(weights: Weights, number: float) -> int:
    """The token that a number in [0, 1) stands for: the inverse of the cumulative distribution."""
    if weights.cumulative is None:
        return weights.best
    place = _locate(weights.cumulative, number * weights.cumulative[-1])
    if weights.order is not None:
        return int(weights.order[place])
    assert weights.weights is not None
    return _within_block(weights.weights, weights.cumulative, place, number)


def _leading(row: Row, weights: Row, params: SamplingParams) -> tuple[Ids, NDArray[np.float64]]:
    """The tokens that top_k and top_p keep, best first, and the running sums of their weights.

    How far the search had to widen does not show: sums run from the best token down, over the same tokens.
    """
    top_k = params.top_k if 0 < params.top_k < len(row) else 0
    look = top_k or _FIRST_LOOK
    limit = params.top_p * float(weights.sum(dtype=np.float64))
    while True:
        order, is_all = _best(row, look)
        if top_k:
            order = order[:top_k]
        cumulative = np.cumsum(weights[order], dtype=np.float64)
        if top_k:
            limit = params.top_p * cumulative[-1]
        if top_k or is_all or cumulative[-1] >= limit:
            break
        # No further token weighs more than the last of these: as many must still come, at the least.
        last = float(weights[order[-1]])
        missing = (limit - float(cumulative[-1])) / last if last > 0 else math.inf
        look = max(look * _WIDEN, int(min(missing, len(row))))
    if params.top_p < 1:  # up to and with the first token that reaches the limit
        kept = int(np.searchsorted(cumulative, limit, side="left")) + 1
        order, cumulative = order[:kept], cumulative[:kept]
    return order, cumulative


def _best(row: Row, count: int) -> tuple[Ids, bool]:
    """At least the `count` best tokens of a row, in rank order; and whether these are all that are possible.

    The largest values of blocks of the row give a threshold that at least `count` tokens reach, and all
    that reach it are taken: no pass over the vocabulary does more than compare.
    """
    size = len(row) // (2 * count)
    threshold = -math.inf
    if size >= 2:
        whole = len(row) // size * size
        peaks = row[:whole].reshape(-1, size).max(axis=1)
        threshold = np.partition(peaks, -count)[-count]
    is_all = threshold == -math.inf
    ids = np.flatnonzero(row > threshold if is_all else row >= threshold)
    return _rank(row[ids], ids), is_all


def _rank(values: Row, ids: Ids) -> Ids:
    """The ids by descending value, equals by ascending id; several times as fast as a stable argsort.

    A float's bits, the lower 31 flipped for negative ones, order as the float does: value and id make one
    integer.
    """
    bits = (values + np.float32(0)).view(np.int32)  # + 0: -0.0 equals 0.0 but has other bits
    bits ^= (bits >> 31) & 0x7FFFFFFF
    keys = ~bits.astype(np.int64) << 32 | ids
    keys.sort()
    return keys & 0xFFFFFFFF


def _block_sums(weights: Row) -> NDArray[np.float64]:
    whole = len(weights) // _BLOCK * _BLOCK
    sums: NDArray[np.float64] = weights[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
    if whole == len(weights):
        return sums
    return np.append(sums, weights[whole:].sum(dtype=np.float64))


def _within_block(weights: Row, blocks: NDArray[np.float64], block: int, number: float) -> int:
    before = blocks[block - 1] if block else 0.0
    inside = np.cumsum(weights[block * _BLOCK : (block + 1) * _BLOCK], dtype=np.float64)
    return block * _BLOCK + _locate(inside, number * blocks[-1] - before)


def _locate(cumulative: NDArray[np.float64], target: float) -> int:
    """The first place whose running sum exceeds target: its own weight is then above 0."""
    place = int(np.searchsorted(cumulative, target, side="right"))
    if place == len(cumulative):  # rounding took the target to the end: the last place with a weight
        place = int(np.searchsorted(cumulative, cumulative[-1], side="left"))
    return place


def top_of(row: Row, token_id: int, count: int) -> TopLogprobs:
    """The log-probability and rank of a token under a row [V], and the `count` best tokens (-1: all)."""
    peak = row[row.argmax()]
    if not np.isfinite(peak):
        return TopLogprobs(token_id, math.nan, 0, (), ())
    log_total = float(np.log(np.exp(row - peak).sum(dtype=np.float64)))
    own = row[token_id]
    rank = 1 + np.count_nonzero(row > own) + np.count_nonzero(row[:token_id] == own)
    if count == -1:
        count = len(row)
    ids = _best(row, count)[0][:count] if count else np.empty(0, np.int64)
    values = (row[ids] - peak).astype(np.float64) - log_total
    return TopLogprobs(token_id, float(own - peak) - log_total, int(rank), tuple(ids.tolist()), tuple(values.tolist()))
