"""What the sampler gives back: plain data, that passes from the executor through the scheduler to the outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request ended with finish_reason "error".

    by_caller: what it asked for cannot be had; else the fault is the engine's. code: OpenAI's for it, where it has one.
    """

    message: str
    by_caller: bool
    code: str | None = None

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """A token's natural-log probability and rank (1 is best), and the most likely tokens, best first.

    ids[i] has rank i + 1; tokens that the model rules out (a logit of -inf) are left out, so there may be
    fewer than were asked for.
    """

    token_id: int
    chosen: float
    rank: int
    ids: tuple[int, ...]
    values: tuple[float, ...]

    @classmethod
    def certain(cls, token_id: int, count: int) -> TopLogprobs:
        """Of a token that was the only one. count: how many of the most likely ones are reported."""
        best = count != 0
        return cls(token_id, 0.0, 1, (token_id,) if best else (), (0.0,) if best else ())

    def items(self) -> Iterator[tuple[int, float]]:
        """(token id, logprob) of the best tokens, best first."""
        return zip(self.ids, self.values, strict=True)

    def ranked(self) -> Iterator[tuple[int, float, int]]:
        """(token id, logprob, rank) of the chosen token, then of the best ones without repeating it."""
        yield self.token_id, self.chosen, self.rank
        for place, (token_id, value) in enumerate(self.items()):
            if token_id != self.token_id:
                yield token_id, value, place + 1


class Sampled(NamedTuple):
    """The token drawn; with `error` set there is none (token_id is -1), and the engine ends that request.

    forced: what must come behind it, by the answer's shape, and was not drawn. ends: the answer is complete with that.

    A tuple with names, as every step makes one for each of its sequences.
    """

    token_id: int
    logprobs: TopLogprobs | None = None
    error: Failure | None = None
    forced: tuple[int, ...] = ()
    ends: bool = False
