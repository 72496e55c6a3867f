"""Beam search: which continuations of a request's beams to keep.

The beams are ordinary sequences, sampled greedily with 2 * beam_width logprobs, that fork and share blocks like
any others; this module only chooses among their candidates. With twice the width, width candidates remain even if
every beam's best is the end token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from typing import NamedTuple

from quire.lora import LoRARequest
from quire.platform.outputs.outputs import Logprob
from quire.platform.sampling.params import BeamSearchParams
from quire.platform.sampling.results import Failure, TopLogprobs
from quire.platform.scheduling.request import SequenceState


@dataclass
class BeamSearchSequence:
    """One result. tokens: prompt and output; cum_logprob: the sum over the output; text: of all tokens."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The results of one prompt, best first.

    prompt: its text, None when token ids were given. lora_request: the adapter that it ran with. failure: why the
    search ended early, if it did.
    """

    request_id: str
    sequences: list[BeamSearchSequence]
    prompt_token_ids: Sequence[int] = ()
    failure: Failure | None = None
    prompt: str | None = None
    lora_request: LoRARequest | None = None

    @property
    def error(self) -> str | None:
        return None if self.failure is None else self.failure.message


class Candidate(NamedTuple):
    """One way to continue one beam."""

    score: float
    cum_logprob: float
    parent: SequenceState
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

    def choose(self, beams: list[SequenceState]) -> list[tuple[SequenceState, Candidate]]:
        """Rank all continuations; return the parents of those to go on with. Empty: the search is over."""
        going_on: list[Candidate] = []
        for beam in beams:
            assert beam.pending is not None
            for token, logprob in zip(beam.pending.ids, beam.pending.values, strict=True):
                candidate = self._candidate(beam, token, logprob, beam.pending)
                if self._ends(token):
                    self._end(candidate, token)
                else:
                    going_on.append(candidate)
        # Ties go to the older beam and the likelier token, which stand first: nlargest is stable.
        best = nlargest(self.params.beam_width, going_on, key=lambda c: c.score)
        if len(beams[0].output_ids) + 1 < self.max_tokens:
            return [(c.parent, c) for c in best]
        for candidate in best:
            self._end(candidate, None)
        return []

    def extend(self, beam: SequenceState, candidate: Candidate) -> None:
        """Append a chosen candidate to the beam that continues it."""
        beam.token_ids.append(candidate.token_id)
        beam.output_ids.append(candidate.token_id)
        beam.logprobs.append(candidate.top)
        beam.cumulative_logprob = candidate.cum_logprob

    def _ends(self, token: int) -> bool:
        return token in self.eos_ids and not self.params.ignore_eos

    def _candidate(self, beam: SequenceState, token: int, logprob: float, top: TopLogprobs) -> Candidate:
        total = beam.cumulative_logprob + logprob
        # The length counts the prompt too, and not the end token.
        length = len(beam.token_ids) + (not self._ends(token))
        return Candidate(total / length**self.params.length_penalty, total, beam, token, top)

    def _end(self, candidate: Candidate, stop_reason: int | None) -> None:
        parent = candidate.parent
        tokens, logprobs = [*parent.token_ids, candidate.token_id], [*parent.logprobs, candidate.top]
        if stop_reason is not None and not self.params.include_stop_str_in_output:
            tokens.pop()
        self.ended.append(Hypothesis(candidate.score, candidate.cum_logprob, tokens, logprobs, stop_reason))
        self.ended = nlargest(self.params.beam_width, self.ended, key=lambda h: h.score)
