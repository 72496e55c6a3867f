"""Which draft tokens a step computes beside those that are known, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import takewhile

from quire.platform.sampling.results import Sampled
from quire.platform.sampling.speculative.lengths import (
    Acceptance,
    Candidate,
    OwnAcceptance,
    StepCost,
    choose_lengths,
)
from quire.platform.sampling.speculative.lookup import NOTHING, Proposal, Proposer
from quire.platform.scheduling.plan import DRAFT_TOKEN, Chunk, StepPlan
from quire.platform.scheduling.request import SequenceState

Drafts = dict[int, tuple[int, ...]]  # by the sequence's id
_MARK = 4  # believed of a draft model's tokens what is believed of a match of so many
_PROBE = 64  # steps without any of them, after which one is tried: they may be right more often by now


class DraftMarks:
    """A `Proposer` of marks: the worker has a draft model, and knows the tokens when the step runs."""

    def propose(self, sequence_id: int, token_ids: Sequence[int], root: bytes, most: int) -> Proposal:
        """As many as there may be."""
        return Proposal((DRAFT_TOKEN,) * most, _MARK)

    def end(self, sequence_id: int, output_ids: Sequence[int], root: bytes) -> None:
        """Nothing is known of sequences."""


class _Watched:
    """A sequence for which tokens are proposed.

    proposal: the last one, made when the sequence had `length` tokens that were known.
    """

    __slots__ = ("acceptance", "length", "proposal")

    def __init__(self, of_all: Acceptance) -> None:
        self.acceptance = OwnAcceptance(of_all)
        self.proposal: Proposal = NOTHING
        self.length = 0


class Drafting:
    """Proposes tokens and chooses how many of them are computed: by what a step's tokens cost, and by how often
    proposals were right.

    proposer: where they come from; most: of one sequence in a step; vocab_size: the number of logits. cost: what is
    known of that of a step. by_model: a draft model proposes them in the worker. Its passes are a part of what a step's
    tokens cost, and what it would have proposed is known of the drafts alone.
    num_drafts, num_draft_tokens, num_accepted_tokens: how often a sequence had drafts, how many these were, and how
    many of them were the tokens that were drawn.
    """

    def __init__(
        self, proposer: Proposer, most: int, vocab_size: int, cost: StepCost | None = None, *, by_model: bool = False
    ) -> None:
        self._proposer = proposer
        self._vocab_size = vocab_size
        self._by_model = by_model
        self._without = 0  # steps in a row that could have had drafts of the model's, and had none
        self._most = most
        self._cost = StepCost() if cost is None else cost
        self._acceptance = Acceptance()
        self._watched: dict[int, _Watched] = {}
        self._committed = 0.0  # when the last step was
        self._planned: dict[int, float] = {}  # when a plan was made, by its number
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0

    # -- plan -----------------------------------------------------------------------------------------------------

    def choose(self, running: Sequence[SequenceState], tokens_left: int) -> Drafts:
        """The drafts of the next step. tokens_left: how many tokens it may have, the known ones among them.

        None while a prompt is computed: such a step is bound by arithmetic.
        """
        # A beam that waits for its siblings has nothing to compute.
        drawing = [sequence for sequence in running if sequence.num_uncomputed and not sequence.last_pending]
        if any(sequence.num_uncomputed > 1 for sequence in drawing):
            return {}
        found: list[tuple[SequenceState, tuple[int, ...]]] = []
        candidates: list[Candidate] = []
        for sequence in drawing:
            proposal, rate = self._propose(sequence)
            tokens = proposal.tokens[sequence.pending :]
            if tokens:
                found.append((sequence, tokens))
                candidates.append(Candidate(rate, len(tokens), int(sequence.pending)))
        if not found:
            return {}
        drafts: Drafts = {}
        left = tokens_left - len(drawing)
        lengths = choose_lengths(self._cost, len(drawing), len(drawing), candidates, left)
        if self._by_model:
            self._without = 0 if any(lengths) else self._without + 1
            if self._without == _PROBE:
                self._without, lengths[0] = 0, 1
        for (sequence, tokens), length in zip(found, lengths, strict=True):
            length = min(length, left)
            if length > 0:
                drafts[sequence.id] = tokens[:length]
                left -= length
        return drafts

    def _propose(self, sequence: SequenceState) -> tuple[Proposal, float]:
        """Tokens that may follow those of a sequence that are known, and how likely they are right."""
        request = sequence.request
        # The step draws one token at any rate; drafts are for those behind it.
        most = min(self._most, request.max_tokens - len(sequence.output_ids) - 1)
        if request.beam is not None or most < 1 or len(sequence.draws()) != 1:
            return NOTHING, 0.0
        if self._by_model and request.media:  # whose placeholders are no tokens of the draft model's
            return NOTHING, 0.0
        watched = self._watched.get(sequence.id)
        if watched is None:
            watched = self._watched[sequence.id] = _Watched(self._acceptance)
        token_ids: Sequence[int] = sequence.token_ids
        if sequence.pending:
            token_ids = token_ids[:-1]
        if not self._by_model:
            self._compare(watched, token_ids)
        proposal = self._proposer.propose(sequence.id, token_ids, request.prefix_root, most + sequence.pending)
        proposal = proposal._replace(tokens=tuple(takewhile(self._may_be_drawn(request.stop_ids), proposal.tokens)))
        watched.proposal, watched.length = proposal, len(token_ids)
        return proposal, watched.acceptance.rate(proposal.match)

    def _may_be_drawn(self, stop_ids: Collection[int]) -> Callable[[int], bool]:
        """Nothing comes behind a token that ends the sequence, and an image's placeholder may have no logit."""
        return lambda token: token < self._vocab_size and token not in stop_ids

    @staticmethod
    def _compare(watched: _Watched, token_ids: Sequence[int]) -> None:
        """What was proposed, beside the tokens that came: these tell, whether they were drafts or not."""
        proposed = watched.proposal.tokens
        came = token_ids[watched.length : watched.length + len(proposed)]
        if not came or not proposed:
            return
        right = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(came, proposed, strict=False)))
        watched.acceptance.saw(watched.proposal.match, right, min(right + 1, len(came)))
        watched.proposal = NOTHING

    def planned(self, plan: StepPlan, now: float) -> None:
        """A plan was made."""
        if plan.chunks:
            self._planned[plan.number] = now

    # -- commit ---------------------------------------------------------------------------------------------------

    def committed(self, plan: StepPlan, now: float) -> None:
        """A step was done: what its tokens have cost is learned of steps without prompts."""
        begun = max(self._committed, self._planned.pop(plan.number, now))
        self._committed = now
        self._planned = {number: when for number, when in self._planned.items() if number > plan.number}
        if begun < now and plan.chunks and all(c.draws and c.length == 1 + len(c.drafts) for c in plan.chunks):
            self._cost.took(sum(chunk.length for chunk in plan.chunks), now - begun)

    def checked(self, sequence: SequenceState, chunk: Chunk, sampled: Iterable[Sampled]) -> int:
        """A sequence's drafts were computed; it takes what was drawn, as far as it goes. Returns how many of them it
        has got, and computed with that."""
        length = len(sequence.token_ids)
        computed = 0
        for one in sampled:
            if sequence.finish_reason is not None:
                break
            computed = len(sequence.token_ids) - length  # all before this one
            sequence.append(one)
        watched = self._watched.get(sequence.id)
        if self._by_model and watched is not None:
            right = min(computed, len(chunk.drafts))
            watched.acceptance.saw(_MARK, right, min(right + 1, len(chunk.drafts)))
        self.num_drafts += 1
        self.num_draft_tokens += len(chunk.drafts)
        self.num_accepted_tokens += computed
        metrics = sequence.request.metrics
        metrics.num_draft_tokens += len(chunk.drafts)
        metrics.num_accepted_tokens += computed
        return computed

    def end(self, sequence: SequenceState) -> None:
        """A sequence has ended."""
        self._watched.pop(sequence.id, None)
        if sequence.request.beam is None:
            self._proposer.end(sequence.id, sequence.output_ids, sequence.request.prefix_root)
