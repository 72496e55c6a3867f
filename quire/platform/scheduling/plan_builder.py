"""A plan in the making: chunks, images and copies are gathered here until the plan is built."""

from __future__ import annotations

from collections.abc import Sequence

from quire.config import SchedulerConfig
from quire.multimodal import Pixels
from quire.platform.kv.connector import Transfers
from quire.platform.kv.manager import KVManager
from quire.platform.scheduling.plan import Chunk, EncodeImage, ForkedSequence, NewSequence, PromptScore, StepPlan
from quire.platform.scheduling.request import Request, SequenceState

Moves = Sequence[tuple[int, int]]
Changes = tuple[tuple[int, ...], tuple[int, ...]]  # of adapters: (installed, dropped)
News = tuple[tuple[NewSequence, ...], tuple[ForkedSequence, ...], tuple[int, ...]]


class PlanBuilder:
    """What a step has been given so far, and what is left of its two limits.

    copies, poison, swap_out, swap_in, transfers: blocks, as in `StepPlan`.
    pixels: of the images to encode. used: digests of the images whose placeholders are among the chunks' tokens.
    tokens_left, sequences_left: of `max_num_batched_tokens` and `max_num_seqs`.
    admits: so many of those that wait may begin.
    preempted: some sequence lost its blocks, so that nobody is admitted. waits: some sequence waits for an image.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.tokens_left = config.max_num_batched_tokens
        self.sequences_left = config.max_num_seqs
        self.admits = config.max_num_seqs
        self.chunks: list[Chunk] = []
        self.encode: list[EncodeImage] = []
        self.pixels: dict[bytes, Pixels] = {}
        self.used: set[bytes] = set()
        self.copies: Moves = ()
        self.poison: Sequence[int] = ()
        self.swap_out: Moves = ()
        self.swap_in: Moves = ()
        self.transfers: Transfers | None = None
        self.preempted = False
        self.waits = False

    def share_out(self, running: int, waiting: int, steps: int) -> None:
        """Leave to other steps, which run at the same time, as many sequences as to this one. steps: with this one."""
        if steps == 1:
            return
        self.admits = max(0, self.sequences_left - running)
        self.sequences_left = -(-(running + min(waiting, self.admits)) // steps)

    @property
    def full(self) -> bool:
        return self.tokens_left <= 0 or self.sequences_left == 0

    def take_moves(self, kv: KVManager) -> None:
        """Have what was decided about blocks' contents since the last plan."""
        self.copies, self.poison = kv.take_copies(), kv.take_poison()
        self.swap_out, self.swap_in = kv.swap.take_moves()

    def take_transfers(self, kv: KVManager) -> None:
        """The same of blocks beside the pool, which a plan without chunks has too."""
        self.transfers = None if kv.transfers is None else kv.transfers.take()

    def room_for(self, sequence: SequenceState) -> int:
        """How many tokens of a sequence the step may compute. A prompt without images whose tokens all see one another
        is computed at once: where it is longer than a step, it has one of its own."""
        length = len(sequence.token_ids)
        if not self.chunks and not sequence.request.media and sequence.request.sees == ((0, length),):
            return max(self.tokens_left, length)
        return self.tokens_left

    def add(
        self,
        sequence: SequenceState,
        count: int,
        tokens: tuple[int, tuple[int, ...]],
        blocks: tuple[int, tuple[int, ...]],
        drafts: tuple[int, ...] = (),
    ) -> None:
        """Compute the sequence's next `count` tokens, and drafts behind them. tokens, blocks: the place of what the
        worker does not know of them, and that."""
        request = sequence.request
        start, end = sequence.num_computed, sequence.num_computed + count
        self.tokens_left -= count + len(drafts)
        self.sequences_left -= 1
        self.chunks.append(
            Chunk(
                sequence.id,
                start,
                count + len(drafts),
                *tokens,
                *blocks,
                sequence.draws() if end == len(sequence.token_ids) else (),
                _prompt_score(request, start, end) if request.params.prompt_logprobs is not None else None,
                drafts,
            )
        )
        if request.media:
            self.used.update(media.item.digest for media in request.media_in(start, end))

    def build(
        self, number: int, release: tuple[bytes, ...], adapters: Changes, news: News, tokens_beside: int
    ) -> StepPlan:
        """The plan, with the features to let go of, the adapters to put on the device and to take off it, and what the
        worker is to know of sequences. tokens_beside: as `StepPlan`'s."""
        installed, dropped = adapters
        new, forks, ended = news
        return StepPlan(
            chunks=tuple(self.chunks),
            copies=tuple(self.copies),
            poison=tuple(self.poison),
            encode=tuple(self.encode),
            release=release,
            drop=dropped,
            install=installed,
            swap_out=tuple(self.swap_out),
            swap_in=tuple(self.swap_in),
            transfers=self.transfers,
            new=new,
            forks=forks,
            ended=ended,
            number=number,
            tokens_beside=tokens_beside,
        )


def _prompt_score(request: Request, start: int, end: int) -> PromptScore | None:
    """The score that a chunk of positions start..end owes: row p foretells prompt token p + 1."""
    if not request.scores_prompt:
        return None
    first = max(start, len(request.prompt_scores) - 1)
    targets = tuple(request.prompt_ids[first + 1 : end + 1])
    count = request.params.prompt_logprobs
    return PromptScore(first - start, targets, count or 0) if targets else None
