"""A plan in the making: chunks, images and copies are gathered here until the plan is built."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config import SchedulerConfig
from quire.platform.scheduling.plan import Chunk, EncodeImage, PromptScore, StepPlan
from quire.platform.scheduling.request import Request, SequenceState

Moves = Sequence[tuple[int, int]]


class PlanBuilder:
    """What a step has been given so far, and what is left of its two limits.

    copies, poison, swap_out, swap_in: blocks, as in `StepPlan`.
    tokens_left, sequences_left: of `max_num_batched_tokens` and `max_num_seqs`.
    preempted: some sequence lost its blocks, so that nobody is admitted. waits: some sequence waits for an image.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.tokens_left = config.max_num_batched_tokens
        self.sequences_left = config.max_num_seqs
        self.chunks: list[Chunk] = []
        self.encode: list[EncodeImage] = []
        self.copies: Moves = ()
        self.poison: Sequence[int] = ()
        self.swap_out: Moves = ()
        self.swap_in: Moves = ()
        self.preempted = False
        self.waits = False

    @property
    def full(self) -> bool:
        return self.tokens_left == 0 or self.sequences_left == 0

    def add(self, sequence: SequenceState, count: int, block_ids: Sequence[int]) -> None:
        """Compute the sequence's next `count` tokens; block_ids: its blocks, enough for them."""
        request = sequence.request
        start, end = sequence.num_computed, sequence.num_computed + count
        self.tokens_left -= count
        self.sequences_left -= 1
        self.chunks.append(
            Chunk(
                sequence_id=sequence.id,
                token_ids=sequence.token_ids[start:end],
                start=start,
                block_ids=block_ids,
                prompt_len=len(request.prompt_ids),
                draws=sequence.draws() if end == len(sequence.token_ids) else (),
                score=_prompt_score(request, start, end),
                media=[media.item for media in request.media_in(start, end)],
                rotary=request.rotary_of(start, end),
                adapters=request.owner,
            )
        )

    def build(self, release: Sequence[bytes], drop: Sequence[int], install: Sequence[int]) -> StepPlan:
        """The plan, with the features to let go of and the adapters to take off the device and to put there."""
        return StepPlan(
            chunks=self.chunks,
            copies=self.copies,
            poison=self.poison,
            encode=self.encode,
            release=release,
            drop=drop,
            install=install,
            swap_out=self.swap_out,
            swap_in=self.swap_in,
        )


def _prompt_score(request: Request, start: int, end: int) -> PromptScore | None:
    """The score that a chunk of positions start..end owes: row p foretells prompt token p + 1."""
    if not request.scores_prompt:
        return None
    first = max(start, len(request.prompt_scores) - 1)
    targets = request.prompt_ids[first + 1 : end + 1]
    count = request.params.prompt_logprobs
    return PromptScore(first - start, targets, count or 0) if targets else None
