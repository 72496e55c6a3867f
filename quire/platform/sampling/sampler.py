"""From logits to tokens: constraints, penalties, temperature, min-p, top-k, top-p, and the draw.

Every row is worked on alone, by single-threaded numpy on the host, so what a row yields cannot depend on
the rows beside it. (A torch reduction may be split over threads for one row and not for thirty; under load
its thread barrier also costs more than the work.) On a GPU, a kernel of our own draws for all rows without
constraints, penalties or logprobs (`kernels/sampling.py`), and only the others' logits come to the host.

Randomness is stateless: one number from (seed, position), turned into a token by the inverse of the
cumulative distribution in a fixed order. A request that was preempted, recomputed or replayed draws the
same tokens again.

Order of operations, as in vLLM: log-probabilities are those of the untouched logits; then allowed_token_ids,
bad_words, min_tokens, logit_bias, penalties, temperature, min_p, top_k, top_p. Wherever tokens are ranked,
equal logits are ranked by token id, the lower first.

A row that cannot be sampled (logits that are NaN or infinite, constraints that leave no token) yields a
`Sampled` with an error and harms no other row.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from quire.kernels.sampling import DRAW, can_draw, draw_tokens
from quire.platform.sampling.constraints import Constraints, Ids, Row, Rules, is_constrained
from quire.platform.sampling.params import SamplingParams
from quire.platform.sampling.results import Failure, Sampled, TopLogprobs

# top_p alone looks at so many tokens first, and at _WIDEN times as many whenever their mass does not suffice.
_FIRST_LOOK = 256
_WIDEN = 8
_BLOCK = 256  # tokens whose weights are summed before the blocks are searched

_NOT_FINITE = Failure(
    "the model's logits are not finite (NaN or infinity), so no token can be sampled", by_caller=False
)
_NO_TOKEN = Failure(
    "allowed_token_ids, bad_words and min_tokens together leave no token to sample: loosen one", by_caller=True
)


@dataclass(frozen=True, slots=True)
class SampleSpec:
    """One token to draw. Several specs may share a row of the logits; ids may be numpy arrays too.

    rules: what the other fields say about the logits, made once for the sequence; None: made for this draw.
    """

    row: int  # row of the logits
    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]  # tokens generated so far; len() is the position of this draw
    seed: int  # of this sequence; the engine has mixed in its index
    stop_ids: frozenset[int]  # end tokens, forbidden while len(output_ids) < min_tokens
    bad_words: tuple[tuple[int, ...], ...]  # tokenized
    rules: Rules | None = None


class Sampling:
    """Draws that have been asked for. tokens: [specs] int64 on the device, where all were drawn there, or else None."""

    def __init__(self, drawn: list[Sampled | None], tokens: torch.Tensor | None) -> None:
        self._drawn = drawn
        self.tokens = tokens if all(one is None for one in drawn) else None
        self._waiting: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        if tokens is not None:
            self._waiting = _to_host(tokens)

    def result(self) -> list[Sampled]:
        """Wait for the tokens."""
        if self._waiting is not None:
            host, event = self._waiting
            if event is not None:
                event.synchronize()
            found = iter(host.tolist())
            self._drawn = [_drawn_there(next(found)) if one is None else one for one in self._drawn]
            self._waiting = None
        return [one for one in self._drawn if one is not None]


def _to_host(tokens: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """A copy on its way, and what tells that it has arrived."""
    if tokens.is_cpu:
        return tokens, None
    host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
    host.copy_(tokens, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tokens.device))
    return host, event


def _drawn_there(token: int) -> Sampled:
    return Sampled(token) if token >= 0 else Sampled(-1, error=_NOT_FINITE)


def begin(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> Sampling:
    """Ask for one token for each spec. logits: [R, V] float32; they may be overwritten once this has returned."""
    on_device = [can_draw(logits) and _is_plain(spec) for spec in specs]
    tokens = None
    if any(on_device):
        plain = [spec for spec, there in zip(specs, on_device, strict=True) if there]
        tokens = draw_tokens(logits, _draws(plain))
    rest = [spec for spec, there in zip(specs, on_device, strict=True) if not there]
    if rest and len(rest) < len(specs):
        wanted = sorted({spec.row for spec in rest})
        place = {row: index for index, row in enumerate(wanted)}
        rest = [replace(spec, row=place[spec.row]) for spec in rest]
        logits = logits[wanted]
    drawn = iter(sample(logits, rest))
    return Sampling([None if there else next(drawn) for there in on_device], tokens)


def _draws(specs: Sequence[SampleSpec]) -> NDArray[np.void]:
    rows = []
    for spec in specs:
        params = spec.params
        number, temperature = 0.0, 0.0
        if not params.greedy:
            number, temperature = uniform(spec.seed, len(spec.output_ids)), params.temperature
        rows.append((spec.row, number, temperature, params.top_p, params.min_p, max(0, params.top_k)))
    return np.array(rows, DRAW)


def sample(logits: torch.Tensor, specs: Sequence[SampleSpec]) -> list[Sampled]:
    """Draw one token for each spec on the host. logits: [R, V], any float dtype, on any device; it is not changed."""
    if not specs:
        return []
    table = _host(logits)
    drawn: list[Sampled] = []
    before: tuple[SampleSpec, _Weights | Failure] | None = None
    for spec in specs:
        # The n sequences of one request draw their first tokens from the same row: weigh it once.
        if before is None or not _same_weights(before[0], spec):
            before = spec, _weigh(table[spec.row], spec)
        drawn.append(_draw(table[spec.row], before[1], spec))
    return drawn


def top_logprobs(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[TopLogprobs]:
    """The log-probability of token_ids[i] under row i of logits [R, V], and the `count` best (-1: all) of
    the row.

    A row that is not finite yields NaN for its token, rank 0, and no others.
    """
    return [_top(row, token_id, count) for row, token_id in zip(_host(logits), token_ids, strict=True)]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of 53 random bits, the same for the same seed and position always and everywhere."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed % 2**64, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _host(logits: torch.Tensor) -> Row:
    if logits.dtype is not torch.float32 or not logits.is_cpu or not logits.is_contiguous():
        logits = logits.float().cpu().contiguous()  # calls that cost even where they do nothing
    table: Row = logits.numpy()
    return table


def _is_plain(spec: SampleSpec) -> bool:
    return spec.params.logprobs is None and not is_constrained(spec.params, spec.bad_words, len(spec.output_ids))


@dataclass(frozen=True, slots=True)
class _Weights:
    """What a row's draws have in common. best: the likeliest token; the rest is None for greedy rows.

    order: the kept tokens, best first, or None for all tokens by id.
    cumulative: running sums of the kept tokens' weights, or of blocks of _BLOCK tokens where order is None.
    """

    best: int
    order: Ids | None = None
    cumulative: NDArray[np.float64] | None = None
    weights: Row | None = None


def _same_weights(a: SampleSpec, b: SampleSpec) -> bool:
    # By identity: comparing long prompts would cost more than it saves.
    return (
        a.row == b.row
        and a.params is b.params
        and a.prompt_ids is b.prompt_ids
        and a.output_ids is b.output_ids
        and a.stop_ids is b.stop_ids
        and a.bad_words is b.bad_words
    )


def _weigh(row: Row, spec: SampleSpec) -> _Weights | Failure:
    """The distribution that the spec's parameters make of a row; or why there is none."""
    best = int(row.argmax())
    if not math.isfinite(row[best]):  # argmax takes NaN for the largest
        return _NOT_FINITE
    if is_constrained(spec.params, spec.bad_words, len(spec.output_ids)):
        row = _constrain(row, spec)
        best = int(row.argmax())
        if not math.isfinite(row[best]):
            return _NO_TOKEN
    params = spec.params
    if params.greedy:
        return _Weights(best)
    weights = row - row[best]
    weights /= np.float32(params.temperature)
    np.exp(weights, out=weights)  # relative to the best token's, which is exactly 1
    if params.min_p > 0:
        weights[weights < np.float32(params.min_p)] = 0
    if params.top_p < 1 or 0 < params.top_k < len(row):
        return _Weights(best, *_leading(row, weights, params))
    return _Weights(best, None, np.cumsum(_block_sums(weights)), weights)


def _draw(row: Row, weights: _Weights | Failure, spec: SampleSpec) -> Sampled:
    if isinstance(weights, Failure):
        return Sampled(-1, error=weights)
    if weights.cumulative is None:
        token_id = weights.best
    else:
        number = uniform(spec.seed, len(spec.output_ids))
        place = _locate(weights.cumulative, number * weights.cumulative[-1])
        if weights.order is not None:
            token_id = int(weights.order[place])
        else:
            assert weights.weights is not None
            token_id = _within_block(weights.weights, weights.cumulative, place, number)
    count = spec.params.logprobs
    return Sampled(token_id, None if count is None else _top(row, token_id, count))


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
    tokens
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
    sums = weights[:whole].reshape(-1, _BLOCK).sum(axis=1, dtype=np.float64)
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


def _constrain(row: Row, spec: SampleSpec) -> Row:
    """A changed copy of the row."""
    rules = spec.rules
    if rules is None:
        rules = Rules(Constraints(spec.params, spec.prompt_ids, spec.stop_ids, spec.bad_words, len(row)))
    return rules.apply(row, spec.output_ids)


def _top(row: Row, token_id: int, count: int) -> TopLogprobs:
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
