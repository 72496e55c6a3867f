"""A worker's own copy of the sequences, kept up to date by what each plan says is new."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from quire.lora import AdapterMix
from quire.platform.sampling.sampling_input import SamplingInput, SamplingState
from quire.platform.scheduling.plan import PENDING_TOKEN, Chunk, ForkedSequence, NewSequence, StepPlan
from quire.pooling_types import PoolingInput
from quire.types import PlaceholderRange, Span


class WorkerSequence:
    """What a worker knows of one sequence.

    output_ids: the tokens behind the prompt, the same numbers once more; sampling reads them. block_ids: int32, as the
    block table of a step takes them in. drafted_blocks: so many of its first blocks are known to be full of the draft
    model's keys. pooling: what is made of its hidden states; None: it generates. sums_at: sums of
    the hidden states before a position, by that position.
    """

    __slots__ = (
        "adapters",
        "block_ids",
        "drafted_blocks",
        "media",
        "output_ids",
        "pooling",
        "prompt_len",
        "rotary",
        "sampling",
        "sees",
        "sums_at",
        "token_ids",
    )

    def __init__(
        self,
        token_ids: Iterable[int],
        prompt_len: int,
        sampling: SamplingInput,
        adapters: AdapterMix,
        media: tuple[PlaceholderRange, ...],
        rotary: RotaryPositions | None,
        sees: tuple[Span, ...] = (),
        parent: SamplingState | None = None,
        pooling: PoolingInput | None = None,
    ) -> None:
        self.token_ids = list(token_ids)
        self.prompt_len = prompt_len
        self.output_ids = self.token_ids[prompt_len:]
        self.block_ids: array[int] = array("i")
        self.drafted_blocks = 0
        known = self.output_ids
        self.sampling = SamplingState(sampling, known) if parent is None else parent.fork(known)
        self.adapters = adapters
        self.media = media
        self.rotary = rotary
        self.sees = sees
        self.pooling = pooling
        self.sums_at: dict[int, np.ndarray] = {}

    @classmethod
    def of(cls, new: NewSequence) -> WorkerSequence:
        rotary = None
        if new.rotary is not None:
            rotary = RotaryPositions(np.frombuffer(new.rotary, np.int64).reshape(3, new.prompt_len), new.rotary_end)
        given = new.token_ids, new.prompt_len, new.sampling, new.adapters, new.media, rotary, new.sees
        return cls(*given, pooling=new.pooling)

    def fork(self, length: int) -> WorkerSequence:
        """One with the same first `length` tokens, and no blocks yet."""
        return WorkerSequence(
            self.token_ids[:length],
            self.prompt_len,
            self.sampling.input,
            self.adapters,
            self.media,
            self.rotary,
            self.sees,
            self.sampling,
        )

    def update(self, chunk: Chunk) -> None:
        """Take the tokens and blocks that are new in a plan; taking them twice changes nothing."""
        tokens, outputs, place = self.token_ids, self.output_ids, chunk.token_place
        if place < len(tokens):  # drafts too that a step has taken which was not committed, and is planned anew
            del tokens[place:], outputs[max(0, place - self.prompt_len) :]
        if chunk.token_ids:
            tokens += chunk.token_ids
            outputs += chunk.token_ids
        if chunk.block_ids:
            self.block_ids[chunk.block_place :] = array("i", chunk.block_ids)
            self.drafted_blocks = min(self.drafted_blocks, chunk.block_place)

    def accept(self, tokens: Iterable[int]) -> None:
        """Drafts are its next tokens. The next plan says so again."""
        tokens = tuple(tokens)
        self.token_ids += tokens
        self.output_ids += tokens

    def has_media_in(self, start: int, end: int) -> bool:
        """Whether there are any of the following."""
        return bool(self.media) and bool(self.media_in(start, end))

    def media_in(self, start: int, end: int) -> list[PlaceholderRange]:
        """The images whose placeholders are among the tokens start .. end, whole or in part."""
        return [item for item in self.media if item.offset < end and start < item.end]


@dataclass(frozen=True, slots=True)
class RotaryPositions:
    """What a sequence's tokens turn by, where that is not their position.

    prompt: [3, prompt] int64, in time, height and width. end: of the first token behind the prompt; each one further
    turns by one more.
    """

    prompt: np.ndarray
    end: int

    def between(self, start: int, end: int) -> np.ndarray:
        """Of the tokens start .. end, [3, tokens]."""
        length = self.prompt.shape[1]
        beyond = np.arange(max(start, length), max(end, length)) - length + self.end
        return np.concatenate((self.prompt[:, start:end], np.broadcast_to(beyond, (3, len(beyond)))), axis=1)


class Sequences:
    """All sequences that a worker knows, by id."""

    def __init__(self) -> None:
        self._known: dict[int, WorkerSequence] = {}

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, sequence_id: int) -> WorkerSequence:
        return self._known[sequence_id]

    def take(self, plan: StepPlan) -> None:
        """Take in what a plan says is new. Taking in a plan once more changes nothing."""
        known = self._known
        for new in plan.new:
            known[new.sequence_id] = WorkerSequence.of(new)
        for fork in plan.forks:
            self._fork(fork)
        for chunk in plan.chunks:
            known[chunk.sequence_id].update(chunk)
        for sequence_id in plan.ended:
            known.pop(sequence_id, None)

    def _fork(self, fork: ForkedSequence) -> None:
        if fork.sequence_id not in self._known:
            self._known[fork.sequence_id] = self._known[fork.parent_id].fork(fork.length)

    def pending(self, chunk: Chunk) -> bool:
        """Whether a chunk's last known token is one that the step before has drawn, and nobody has looked at yet."""
        return self._known[chunk.sequence_id].token_ids[chunk.known_end - 1] == PENDING_TOKEN
