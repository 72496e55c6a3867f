"""What the scheduler hands the workers and gets back: plain data that never changes and pickles, so that a worker may
live in another process.

A worker keeps a copy of each sequence (`execution/sequences.py`), and a plan says what is new: a sequence's tokens
travel once, and so do its blocks' numbers. Pixels of images travel beside it, by their digests.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire.lora import AdapterMix
from quire.platform.kv.connector import Transfers
from quire.platform.sampling.results import Sampled, TopLogprobs
from quire.platform.sampling.sampling_input import SamplingInput
from quire.pooling_types import PoolingInput
from quire.types import MediaKind, PlaceholderRange, Span

# Among a sequence's tokens: the one that the step before draws for it. The worker has it.
PENDING_TOKEN = -1
# Among a chunk's drafts: one that the worker is to propose, with its draft model.
DRAFT_TOKEN = -2


@dataclass(frozen=True, slots=True)
class NewSequence:
    """A sequence that the worker does not know yet; or no longer, after a plan that did not reach it.

    token_ids: all that it has; the first `prompt_len` of them are the prompt. adapters: (uid, weight) of each that its
    tokens run with; empty: the base model. media: the prompt's images, videos and sounds. rotary: in models with
    `mrope`, the bytes of what the prompt's tokens turn by, [3, prompt_len] int64; None: their positions. rotary_end:
    what the first token behind them turns by. sees: as of `Request`. pooling: what is made of its hidden states; None:
    it generates.
    """

    sequence_id: int
    token_ids: tuple[int, ...]
    prompt_len: int
    sampling: SamplingInput
    adapters: AdapterMix = ()
    media: tuple[PlaceholderRange, ...] = ()
    rotary: bytes | None = None
    rotary_end: int = 0
    sees: tuple[Span, ...] = ()
    pooling: PoolingInput | None = None


class ForkedSequence(NamedTuple):
    """A sequence that begins with the first `length` tokens of another, and shares all but its seed with it."""

    sequence_id: int
    parent_id: int
    length: int


class Chunk(NamedTuple):
    """A run of one sequence's tokens to compute in this step, and what is new of the sequence.

    A tuple with names, as every step makes one for each of its sequences.
    """

    sequence_id: int
    start: int  # position of the first token to compute
    length: int  # tokens to compute
    token_place: int  # position of the first new token; what the worker has from there on does not hold any more
    token_ids: tuple[int, ...]  # the new tokens
    block_place: int  # place of the first new block in the block table; likewise
    # The new blocks; with them there are enough for all tokens up to the chunk's end. Where layers form several groups,
    # a table has a block of each for the same tokens side by side: group 0's, group 1's, .. and then those of the next
    # tokens. -1: none, as no token will read it.
    block_ids: tuple[int, ...]
    # The seed of each token to sample behind the last one: none while there are more tokens to compute, several where
    # the sequence will fork.
    draws: tuple[int, ...] = ()
    score: PromptScore | None = None  # what to report about the prompt's own tokens
    # Draft tokens, the last ones of `length`: what may follow the tokens that are known, computed with them. A token is
    # drawn behind each, until one is another than the draft; `draws` has the one seed of all. All or none of them are
    # DRAFT_TOKEN.
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """The position behind the last token to compute."""
        return self.start + self.length

    @property
    def known_end(self) -> int:
        """The position behind the last token that is known."""
        return self.start + self.length - len(self.drafts)


class PromptScore(NamedTuple):
    """Prompt logprobs: rows `first`.. of the chunk foretell `targets`; report so many alternatives of each."""

    first: int
    targets: tuple[int, ...]
    alternatives: int


class EncodeImage(NamedTuple):
    """An image, a video or a sound whose features some chunk of this step, or a later one, needs."""

    digest: bytes
    length: int  # so many features it must have
    adapters: AdapterMix = ()  # that change what works on images
    kind: MediaKind = "image"


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. A worker first takes it in (`prepare`: all but chunks and images), then computes it (`execute`).

    number: of the step; a later plan has a larger one. tokens_beside: of sequences that the next step may begin
    while this one runs, as far as was looked.
    """

    chunks: tuple[Chunk, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()  # (from, to) blocks to copy before the chunks
    poison: tuple[int, ...] = ()  # debug runs: freed blocks to overwrite with NaN, then
    encode: tuple[EncodeImage, ...] = ()  # before the chunks
    release: tuple[bytes, ...] = ()  # digests whose features to let go of, before the encoding
    drop: tuple[int, ...] = ()  # uids of adapters to take off the device, before anything else
    install: tuple[int, ...] = ()  # and those to put there, then
    # (block of the pool, block in main memory) to copy before any other block is touched: what the former hold, their
    # sequences lose. Then (block in main memory, block of the pool), which may be the same ones.
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    transfers: Transfers | None = None  # from and to beside the pool: stored before swap_out, loaded after swap_in
    # In this order: sequences that appear, forks of sequences that were there, and those that have ended.
    new: tuple[NewSequence, ...] = ()
    forks: tuple[ForkedSequence, ...] = ()
    ended: tuple[int, ...] = ()
    number: int = 0
    tokens_beside: int = 0

    @property
    def moves(self) -> bool:
        """Whether it changes what later plans build on, beside sequences, of which they can tell again."""
        loads = self.transfers is not None and self.transfers.load
        return bool(self.copies or self.release or self.drop or self.install or self.swap_out or self.swap_in or loads)

    def alone(self, chunk: Chunk, token_ids: Sequence[int], shown: Collection[bytes]) -> StepPlan:
        """A plan of one of its chunks. token_ids: of its sequence, as they are known by now; shown: the images that the
        chunk needs."""
        if PENDING_TOKEN in chunk.token_ids:
            place = chunk.token_place
            chunk = chunk._replace(token_ids=tuple(token_ids[place : place + len(chunk.token_ids)]))
        return StepPlan((chunk,), encode=tuple(image for image in self.encode if image.digest in shown))


@dataclass(frozen=True, slots=True)
class StepResult:
    """All stand beside the plan's chunks: a token for each draw, the scores asked for, and the rows that were pooled.

    Of a chunk with drafts: tokens one behind the other, of which all but the last, with what is forced behind them, are
    its first drafts.
    """

    sampled: tuple[tuple[Sampled, ...], ...]
    scores: tuple[tuple[TopLogprobs, ...], ...]
    # [rows, numbers] float32 of each chunk whose sequence is pooled: no rows where there is nothing to tell yet. None:
    # it generates; and an empty tuple stands for no chunk that is pooled.
    pooled: tuple[np.ndarray | None, ...] = ()
