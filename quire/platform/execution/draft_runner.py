"""A small model beside the model: it proposes the tokens that a step checks.

Its layers' keys and values lie in the pool, in the same blocks as the model's for the same tokens, so that prefix hits,
copies and preemption serve both. They need not be there: a proposal may be wrong. So prompts are followed as they are
computed, single tokens a few at a time, and what is missing is made up for when a proposal is wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from quire.models.base import CausalLM
from quire.platform.execution import batch
from quire.platform.execution.decode_graphs import DecodeGraphRunner
from quire.platform.execution.kv_tensors import keys_of
from quire.platform.execution.sequences import WorkerSequence
from quire.platform.sampling.speculative.guess import guess
from quire.platform.scheduling.plan import DRAFT_TOKEN, Chunk
from quire.types import KVCache, StateCache

_LAG = 32  # tokens of a sequence that may be missing while it wants no proposals
_MOST_TOKENS = 2048  # of one pass, which bounds the memory that it takes
_NOTHING = 0  # proposed where the draft model can say nothing

Run = tuple[Chunk, WorkerSequence]  # the chunk: of the draft model, with `draws` where a proposal is wanted behind it


class DraftRunner:
    """Holds the draft model and its caches, and knows which of the pool's slots have its keys. On a CPU.

    A block's first `keys[block]` slots have them, of the tokens that the model's own keys there belong to.
    """

    def __init__(self, model: CausalLM, caches: Sequence[KVCache | StateCache], enforce_eager: bool = False) -> None:
        self.model = model
        self.caches = caches
        pool = keys_of(caches)[0]
        self._block_size = pool.shape[2]
        self._keys = np.zeros(len(pool), np.int32)
        self._decode = DecodeGraphRunner(model, caches, enforce_eager)

    def copied(self, copies: Sequence[tuple[int, int]], fetched: Sequence[tuple[int, int]]) -> None:
        """Blocks were copied in the pool, (from, to); others came from main memory, and count as without keys."""
        for _, target in fetched:
            self._keys[target] = 0
        for source, target in copies:
            self._keys[target] = self._keys[source]

    def forget(self) -> None:
        """All keys are gone, and the tensors have moved."""
        self._keys[:] = 0
        self._decode.forget()

    def propose(self, chunks: Sequence[Chunk], sequences: Sequence[WorkerSequence]) -> list[Chunk]:
        """The step's chunks, with tokens in the place of their marks. The model is to compute them next."""
        runs: list[Run] = []
        for chunk, sequence in zip(chunks, sequences, strict=True):
            self._overwrite(chunk, sequence)
            if sequence.media:  # whose placeholders are no tokens of the draft model's
                continue
            start = self._reach(sequence, chunk.known_end)
            missing = chunk.known_end - start
            wanted = DRAFT_TOKEN in chunk.drafts
            if wanted or missing >= _LAG or chunk.length > 1 + len(chunk.drafts):
                draws = chunk.draws if wanted else ()
                runs.append((Chunk(chunk.sequence_id, start, missing, 0, (), 0, (), draws), sequence))
        rows = self._compute(runs)
        proposed = self._go_on([chunk for chunk in chunks if DRAFT_TOKEN in chunk.drafts], runs, rows)
        return [
            chunk._replace(drafts=proposed.get(chunk.sequence_id, (_NOTHING,) * len(chunk.drafts)))
            if DRAFT_TOKEN in chunk.drafts
            else chunk
            for chunk in chunks
        ]

    # -- which keys are there -------------------------------------------------------------------------------------

    def _overwrite(self, chunk: Chunk, sequence: WorkerSequence) -> None:
        """The model writes keys of the chunk's tokens: the draft model's in their place are of others."""
        size = self._block_size
        first = chunk.start // size
        sequence.drafted_blocks = min(sequence.drafted_blocks, first)
        for place in range(first, -(-chunk.end // size)):
            block = sequence.block_ids[place]
            self._keys[block] = min(self._keys[block], max(0, chunk.start - place * size))

    def _reach(self, sequence: WorkerSequence, end: int) -> int:
        """The first of a sequence's tokens before `end` whose keys are missing."""
        size = self._block_size
        place = sequence.drafted_blocks
        while place * size < end:
            there = int(self._keys[sequence.block_ids[place]])
            if there < min(size, end - place * size):
                return place * size + there
            place += 1
            if place * size <= end:
                sequence.drafted_blocks = place
        return end

    def _wrote(self, chunk: Chunk, sequence: WorkerSequence) -> None:
        """The draft model's keys of these tokens are there, and of all before them."""
        size = self._block_size
        for place in range(chunk.start // size, -(-chunk.end // size)):
            self._keys[sequence.block_ids[place]] = min(size, chunk.end - place * size)

    # -- passes ---------------------------------------------------------------------------------------------------

    def _compute(self, runs: Sequence[Run]) -> list[torch.Tensor]:
        """Compute the runs; returns the row of logits behind each that draws."""
        if runs and all(chunk.draws for chunk, _ in runs) and sum(chunk.length for chunk, _ in runs) <= 2 * len(runs):
            logits = self._logits(runs)
            ends = np.cumsum([chunk.length for chunk, _ in runs]) - 1
            return [logits[int(end)] for end in ends]
        rows: list[torch.Tensor] = []
        for piece in _pieces(runs, _MOST_TOKENS):
            inputs = self._inputs(piece)
            hidden = self.model(self.model.embed(inputs.token_ids), inputs.context, self.caches)
            self._count(piece)
            ends = np.cumsum([chunk.length for chunk, _ in piece]) - 1
            drawn = [int(end) for end, (chunk, _) in zip(ends, piece, strict=True) if chunk.draws]
            if drawn:
                rows += self.model.logits(hidden[torch.tensor(drawn)])
        return rows

    def _go_on(
        self, chunks: Sequence[Chunk], runs: Sequence[Run], rows: Sequence[torch.Tensor]
    ) -> dict[int, tuple[int, ...]]:
        """Propose token after token, each from the row behind the one before it. Returns the tokens by sequence.

        The last token's keys are left to the next step: they are wanted only if all were right.
        """
        wanted = {chunk.sequence_id: chunk for chunk in chunks}
        tokens: dict[int, list[int]] = {}
        going = [(wanted[run.sequence_id], sequence) for run, sequence in runs if run.draws]
        while going:
            further: list[Run] = []
            passes: list[Run] = []
            for (chunk, sequence), row in zip(going, rows, strict=True):
                own = tokens.setdefault(chunk.sequence_id, [])
                end = chunk.known_end + len(own)
                params = sequence.sampling.input.params
                own.append(guess(row.numpy(), params, chunk.draws[0], end - sequence.prompt_len))
                if len(own) < len(chunk.drafts):
                    further.append((chunk, sequence))
                    one = Chunk(chunk.sequence_id, end, 1, 0, (), 0, (), chunk.draws, None, (own[-1],))
                    passes.append((one, sequence))
            rows = list(self._logits(passes)) if passes else []
            going = further
        return {sequence_id: tuple(own) for sequence_id, own in tokens.items()}

    def _logits(self, runs: Sequence[Run]) -> torch.Tensor:
        """Of all tokens of runs that have few; good until the next call."""
        logits = self._decode(self._inputs(runs), ()).logits
        self._count(runs)
        return logits

    def _inputs(self, runs: Sequence[Run]) -> batch.StepInputs:
        return batch.build([chunk for chunk, _ in runs], [sequence for _, sequence in runs], self._block_size)

    def _count(self, runs: Sequence[Run]) -> None:
        for chunk, sequence in runs:
            self._wrote(chunk, sequence)


def _pieces(runs: Sequence[Run], most: int) -> Iterator[list[Run]]:
    """The runs in their order, cut so that none of the pieces has more than so many tokens."""
    piece: list[Run] = []
    room = most
    for chunk, sequence in runs:
        start = chunk.start
        while start < chunk.end:
            length = min(chunk.end - start, room)
            draws = chunk.draws if start + length == chunk.end else ()
            piece.append((chunk._replace(start=start, length=length, draws=draws), sequence))
            start, room = start + length, room - length
            if not room:
                yield piece
                piece, room = [], most
    if piece:
        yield piece
