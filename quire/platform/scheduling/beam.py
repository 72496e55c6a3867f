"""Beam search: which continuations of a request's beams to keep.

The beams are ordinary sequences, sampled greedily with 2 * beam_width logprobs, that fork and share blocks like
any others; this module only chooses among their candidates. With twice the width, width candidates remain even if
every beam's best is the end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import NamedTuple, Protocol

from quire.platform.sampling.params import BeamSearchParams
from quire.platform.sampling.results import TopLogprobs


class Beam(Protocol):
    """What is asked of a sequence: its tokens (prompt and output; the output alone), and what came with them.

    candidates: the most likely tokens after its last one.
    """

    token_ids: list[int]
    output_ids: list[int]
    logprobs: list[TopLogprobs]
    cumulative_logprob: float
    candidates: TopLogprobs | None


class Candidate(NamedTuple):
    """One way to continue one beam. parent: the beam's place among those that were given."""

    score: float
    cum_logprob: float
    parent: int
    token_id: int
    top: TopLogprobs


class Hypothesis(NamedTuple):
    """A beam that has ended. stop_reason: the end token that ended it; None: it reached max_tokens."""

    score: float
    cum_logprob: float
    token_ids: list[int]
    logprobs: list[TopLogprobs]
    stop_reason: int | None


@dataclass
class BeamGroup:
    """The search of one request: its settings and the hypotheses that have ended."""

    params: BeamSearchParams
    max_tokens: int
    eos_ids: frozenset[int]
    ended: list[Hypothesis] = field(default_factory=list)  # the best `beam_width`, best first

    def choose(self, beams: Sequence[Beam]) -> list[Candidate]:
        """Rank all continuations; return those to go on with, best first. Empty: the search is over."""
        going_on: list[Candidate] = []
        for place, beam in enumerate(beams):
            assert beam.candidates is not None
            for token, logprob in beam.candidates.items():
                candidate = self._candidate(beam, place, token, logprob, beam.candidates)
                if self._ends(token):
                    self._end(beam, candidate, token)
                else:
                    going_on.append(candidate)
        # Ties go to the older beam and the likelier token, which stand first: nlargest is stable.
        best = nlargest(self.params.beam_width, going_on, key=lambda c: c.score)
        if len(beams[0].output_ids) + 1 < self.max_tokens:
            return best
        for candidate in best:
            self._end(beams[candidate.parent], candidate, None)
        return []

    def _ends(self, token: int) -> bool:
        return token in self.eos_ids and not self.params.ignore_eos

    def _candidate(self, beam: Beam, place: int, token: int, logprob: float, top: TopLogprobs) -> Candidate:
        total = beam.cumulative_logprob + logprob
        # The length counts the prompt too, and not the end token.
        length = len(beam.token_ids) + (not self._ends(token))
        return Candidate(total / length**self.params.length_penalty, total, place, token, top)

    def _end(self, parent: Beam, candidate: Candidate, stop_reason: int | None) -> None:
        tokens, logprobs = [*parent.token_ids, candidate.token_id], [*parent.logprobs, candidate.top]
        if stop_reason is not None and not self.params.include_stop_str_in_output:
            tokens.pop()
        self.ended.append(Hypothesis(candidate.score, candidate.cum_logprob, tokens, logprobs, stop_reason))
        self.ended = nlargest(self.params.beam_width, self.ended, key=lambda h: h.score)
