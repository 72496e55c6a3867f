"""From logits to tokens: logits processors, temperature, min_p, top_k, top_p, and the draw.

Every row is worked on alone, by single-threaded numpy on the host, so what a row yields cannot depend on
the rows beside it; a kernel only looks for each row's largest logit. (A torch reduction may be split over
threads for one row and not for thirty; under load its thread barrier also costs more than the work.) On a
GPU, a kernel of our own draws for all rows without logits processors or logprobs (`kernels/sampling.py`),
and only the others' logits come to the host.

Randomness is stateless: one number from (seed, position), turned into a token by the inverse of the
cumulative distribution in a fixed order. A request that was preempted, recomputed or replayed draws the
same tokens again.

Order of operations, as in vLLM: structured_outputs; log-probabilities are those of the logits within them, otherwise
untouched; then allowed_token_ids,
bad_words, min_tokens, logit_bias, plug-ins, penalties (`logits_processors/`); then temperature, min_p, top_k, top_p
(`distribution.py`). Wherever tokens are ranked, equal logits are ranked by token id, the lower first.

A row that cannot be sampled (logits that are NaN or infinite, processors that leave no token) yields a
`Sampled` with an error and harms no other row.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from quire import kernels
from quire.kernels.sampling import DRAW, can_draw, draw_tokens
from quire.platform.sampling.distribution import Weights, locate, top_of, weigh
from quire.platform.sampling.logits_processors.base import Row
from quire.platform.sampling.results import Failure, Sampled, TopLogprobs
from quire.platform.sampling.sampling_input import SamplingState, prepare_together

NOT_FINITE = Failure("the model's logits are not finite (NaN or infinity), so no token can be sampled", by_caller=False)
_NO_TOKEN = "allowed_token_ids, bad_words and min_tokens together leave no token to sample: loosen one"
_NO_TOKEN_IN_SHAPE = (
    "structured_outputs leave no token to sample beside allowed_token_ids, bad_words and min_tokens (a shape that is "
    "complete before min_tokens cannot go on): loosen one"
)


class TokenDraw(NamedTuple):
    """One token to draw.

    row: of the logits; several draws may share it. state: of the sequence that gets the token. seed: of the draws of
    that sequence (the first tokens of a request's n sequences are drawn from one state with n seeds). ahead: how many
    tokens will stand before it that the sequence does not have yet (drafts).
    """

    row: int
    state: SamplingState
    seed: int
    ahead: int = 0

    @property
    def position(self) -> int:
        """Of the token, among those that the sequence generates."""
        return len(self.state.output_ids) + self.ahead


class Sampling:
    """Draws that have been asked for. drawn: None for those on the device. tokens: of these, int64 on the device.

    tokens: [draws], where all were drawn there and the next step needs no more than that; else None.
    """

    def __init__(
        self, draws: Sequence[TokenDraw], drawn: list[Sampled | None], tokens: torch.Tensor | None = None
    ) -> None:
        self._draws = draws
        self._drawn = drawn
        self.tokens: torch.Tensor | None = None
        self._waiting: tuple[torch.Tensor, torch.cuda.Event | None] | None = None
        if tokens is not None:
            there = all(one is None and not draw.state.shapes for one, draw in zip(drawn, draws, strict=True))
            self.tokens = tokens if there else None
            self._waiting = _to_host(tokens)

    def known(self) -> torch.Tensor | None:
        """All tokens where the next step finds them, int64 [draws], if it needs no more than them: on the device, or
        drawn on the host by now, for a model that is there."""
        if self.tokens is not None or self._waiting is not None or not all(_is_plain(draw) for draw in self._draws):
            return self.tokens
        return torch.tensor([one.token_id for one in self.result()], dtype=torch.int64)

    def result(self) -> list[Sampled]:
        """Wait for the tokens."""
        if self._waiting is not None:
            host, event = self._waiting
            if event is not None:
                event.synchronize()
            found = iter(host.tolist())
            self._drawn = [
                _drawn_there(next(found), draw.state) if one is None else one
                for one, draw in zip(self._drawn, self._draws, strict=True)
            ]
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


def _drawn_there(token: int, state: SamplingState) -> Sampled:
    if token < 0:
        return Sampled(-1, error=NOT_FINITE)
    return Sampled(token) if not state.shapes else _followed(token, None, state)


def _followed(token: int, logprobs: TopLogprobs | None, state: SamplingState) -> Sampled:
    """A token with what must come behind it."""
    following = state.follow(token)
    if following is None:
        return Sampled(token, logprobs)
    if isinstance(following, Failure):
        return Sampled(-1, error=following)
    return Sampled(token, logprobs, None, *following)


def begin(logits: torch.Tensor, draws: Sequence[TokenDraw], likeliest: Sequence[int] | None = None) -> Sampling:
    """Ask for one token for each draw. logits: [R, V] float32; they may be overwritten once this has returned.

    likeliest: as of `sample`.
    """
    if not can_draw(logits):
        return Sampling(draws, [*sample(logits, draws, likeliest)])
    on_device = [_is_plain(draw) for draw in draws]
    tokens = None
    if any(on_device):
        plain = [draw for draw, there in zip(draws, on_device, strict=True) if there]
        tokens = draw_tokens(logits, _as_records(plain))
    rest = [draw for draw, there in zip(draws, on_device, strict=True) if not there]
    if rest and len(rest) < len(draws):
        wanted = sorted({draw.row for draw in rest})
        place = {row: index for index, row in enumerate(wanted)}
        rest = [draw._replace(row=place[draw.row]) for draw in rest]
        logits = logits[wanted]
    drawn = iter(sample(logits, rest))
    return Sampling(draws, [None if there else next(drawn) for there in on_device], tokens)


def _is_plain(draw: TokenDraw) -> bool:
    return draw.state.input.params.logprobs is None and draw.state.is_plain


def _as_records(draws: Sequence[TokenDraw]) -> NDArray[np.void]:
    records = []
    for draw in draws:
        params = draw.state.input.params
        number, temperature = 0.0, 0.0
        if not params.greedy:
            number, temperature = uniform(draw.seed, draw.position), params.temperature
        records.append((draw.row, number, temperature, params.top_p, params.min_p, max(0, params.top_k)))
    return np.array(records, DRAW)


def likeliest_of(logits: torch.Tensor) -> list[int]:
    """The likeliest token of each row of logits [R, V], any float dtype, on any device; -1: not finite.

    For all rows at once: one by one takes numpy several times as long.
    """
    return kernels.likeliest(_on_host(logits)).tolist()


def sample(logits: torch.Tensor, draws: Sequence[TokenDraw], likeliest: Sequence[int] | None = None) -> list[Sampled]:
    """Draw one token for each draw on the host. logits: [R, V], any float dtype, on any device; it is not changed.

    likeliest: `likeliest_of(logits)`, where that is known already.
    """
    if not draws:
        return []
    logits = _on_host(logits)
    table: Row = logits.numpy()
    if likeliest is None:
        likeliest = likeliest_of(logits)
    preparing = {id(draw.state): draw.state for draw in draws if draw.state.prepares and not draw.state.is_plain}
    if preparing:
        prepare_together(list(preparing.values()))
    drawn: list[Sampled] = []
    before: TokenDraw | None = None
    weights: Weights | Failure = NOT_FINITE
    row: Row = table[0]
    for draw in draws:
        state = draw.state
        if state.takes_likeliest and (not state.input.processors or state.is_plain):
            best = likeliest[draw.row]
            drawn.append(Sampled(best) if best >= 0 else Sampled(-1, error=NOT_FINITE))
            continue
        # The n sequences of one request draw their first tokens from the same row: weigh it once.
        if before is None or draw.row != before.row or draw.state is not before.state:
            row = table[draw.row]
            weights = _weigh(row, likeliest[draw.row], draw.state)
            if draw.state.shapes and draw.state.input.params.logprobs is not None:
                row = draw.state.restricted(row)
        drawn.append(_draw(row, weights, draw))
        before = draw
    return drawn


def _weigh(row: Row, best: int, state: SamplingState) -> Weights | Failure:
    """The distribution that the sequence's parameters make of a row; or why there is none. best: of `likeliest`."""
    if best < 0:
        return NOT_FINITE
    if not state.is_plain:
        changed = state.changed(row)
        if isinstance(changed, Failure):
            return changed
        row = changed
        best = int(row.argmax())
        if not math.isfinite(row[best]):
            return _nothing_left(row[best], state)
    return weigh(row, best, state.input.params)


def _nothing_left(best: np.float32, state: SamplingState) -> Failure:
    """Why a changed row has no token. best: its largest logit."""
    plugins = state.plugins
    if not plugins:
        return Failure(_NO_TOKEN if not state.shapes else _NO_TOKEN_IN_SHAPE, by_caller=True)
    names = ", ".join(plugins)
    if best == -math.inf:
        what = f"the logits processor {names}, beside allowed_token_ids, bad_words and min_tokens if these are set"
        return Failure(f"{what}, leave no token to sample: loosen one", by_caller=True)
    return Failure(f"logits processor {names}: it has made a logit NaN or infinite", by_caller=False)


def _draw(row: Row, weights: Weights | Failure, draw: TokenDraw) -> Sampled:
    if isinstance(weights, Failure):
        return Sampled(-1, error=weights)
    number = 0.0 if weights.cumulative is None else uniform(draw.seed, draw.position)
    token_id = locate(weights, number)
    count = draw.state.input.params.logprobs
    logprobs = None if count is None else top_of(row, token_id, count)
    return Sampled(token_id, logprobs) if not draw.state.shapes else _followed(token_id, logprobs, draw.state)


def top_logprobs(logits: torch.Tensor, token_ids: Sequence[int], count: int) -> list[TopLogprobs]:
    """The log-probability of token_ids[i] under row i of logits [R, V], and the `count` best (-1: all) of the row.

    A row that is not finite yields NaN for its token, rank 0, and no others.
    """
    table: Row = _on_host(logits).numpy()
    return [top_of(row, token_id, count) for row, token_id in zip(table, token_ids, strict=True)]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) of 53 random bits, the same for the same seed and position always and everywhere."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed % 2**64, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _on_host(logits: torch.Tensor) -> torch.Tensor:
    """[R, V] float32, contiguous, in main memory."""
    if logits.dtype is not torch.float32 or not logits.is_cpu or not logits.is_contiguous():
        logits = logits.float().cpu().contiguous()  # calls that cost even where they do nothing
    return logits
