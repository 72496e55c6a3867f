"""Drafts beside what is drawn: a token is drawn behind each, from the very row that it would have been drawn from.

The row behind a draft is right as long as the drafts up to it are the sequence's tokens; the first token that is not
the draft ends it, and is kept. What proposed the drafts has no say in any token: a draw is a hash of seed and position,
and processors are told of the tokens that were drawn alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from quire.kernels.sampling import can_draw
from quire.platform.sampling.results import Sampled
from quire.platform.sampling.sampler import TokenDraw, begin, likeliest_of, sample
from quire.platform.sampling.sampling_input import SamplingState


class DraftedDraws(NamedTuple):
    """The draws of one sequence that has drafts.

    row: of the logits, that of the token before the first draft; the drafts' stand behind it. state, seed: as of
    `TokenDraw`. accept: tells the sequence of tokens that it goes on with; they are the next of state.output_ids then.
    """

    row: int
    state: SamplingState
    seed: int
    drafts: tuple[int, ...]
    accept: Callable[[Sequence[int]], None]

    @property
    def is_drawn_there(self) -> bool:
        """On a device that draws, where nothing that is said of one token changes the row behind it."""
        return self.state.stays_plain and not self.state.shapes and self.state.input.params.logprobs is None

    def draw(self, place: int) -> TokenDraw:
        """Of the token behind so many drafts that are not the sequence's yet."""
        return TokenDraw(self.row + place, self.state, self.seed, place)


Draws = Sequence[TokenDraw] | DraftedDraws


class CheckedSampling:
    """Draws of a step in which some sequences have drafts. groups: of each sequence that draws.

    The logits [R, V] float32 may be overwritten once this was made. likeliest: as of `sampler.sample`.
    """

    def __init__(self, logits: torch.Tensor, groups: Sequence[Draws], likeliest: Sequence[int] | None = None) -> None:
        self._groups = groups
        there = can_draw(logits)
        if likeliest is None and not there:
            likeliest = likeliest_of(logits)  # once, and not with each token that is drawn
        self._at_once = [there and isinstance(group, DraftedDraws) and group.is_drawn_there for group in groups]
        draws: list[TokenDraw] = []
        for group, at_once in zip(groups, self._at_once, strict=True):
            if not isinstance(group, DraftedDraws):
                draws += group
            elif at_once:
                draws += (group.draw(place) for place in range(len(group.drafts) + 1))
        self._sampling = begin(logits, draws, likeliest)
        one_by_one = [
            group
            for group, at_once in zip(groups, self._at_once, strict=True)
            if isinstance(group, DraftedDraws) and not at_once
        ]
        self._checked = iter(_draw_one_by_one(logits, one_by_one, likeliest))

    def known(self) -> None:
        """How many tokens there are is not known before they are checked."""

    def result(self) -> list[tuple[Sampled, ...]]:
        """Wait for the tokens of each group."""
        drawn = iter(self._sampling.result())
        results: list[tuple[Sampled, ...]] = []
        for group, at_once in zip(self._groups, self._at_once, strict=True):
            if not isinstance(group, DraftedDraws):
                results.append(tuple(next(drawn) for _ in group))
            elif at_once:
                results.append(_up_to_first_other(group, [next(drawn) for _ in range(len(group.drafts) + 1)]))
            else:
                results.append(next(self._checked))
        return results


def _up_to_first_other(group: DraftedDraws, drawn: Sequence[Sampled]) -> tuple[Sampled, ...]:
    """Of the tokens that were drawn behind all drafts, those that hold."""
    right = 0
    while right < len(group.drafts) and drawn[right].token_id == group.drafts[right]:
        right += 1
    group.accept(group.drafts[:right])
    return _without_late_error(drawn[: right + 1])


def _draw_one_by_one(
    logits: torch.Tensor, groups: Sequence[DraftedDraws], likeliest: Sequence[int] | None
) -> list[tuple[Sampled, ...]]:
    """Each sequence's next token, of all of them; then that behind it, of those whose draft it was; and so on."""
    results: list[list[Sampled]] = [[] for _ in groups]
    going = [(group, own, 0) for group, own in zip(groups, results, strict=True)]
    while going:
        draws = [TokenDraw(group.row + place, group.state, group.seed) for group, _, place in going]
        drawn = sample(logits, draws, likeliest)
        further = []
        for (group, own, place), one in zip(going, drawn, strict=True):
            own.append(one)
            tokens = (one.token_id, *one.forced)
            end = place + len(tokens)
            if one.error is None and not one.ends and group.drafts[place:end] == tokens:
                group.accept(tokens)
                further.append((group, own, end))
        going = further
    return [_without_late_error(own) for own in results]


def _without_late_error(drawn: Sequence[Sampled]) -> tuple[Sampled, ...]:
    """A token that cannot be drawn ends a request with an error, but only once those before it were seen, which may end
    it in another way: the next step finds that out again."""
    return tuple(drawn[:-1] if len(drawn) > 1 and drawn[-1].error is not None else drawn)
