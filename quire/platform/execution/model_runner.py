"""Executes a plan: tensors in, forward pass, logits of the sampled rows, tokens out. It decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import accumulate
from typing import Any

import torch

from quire import kernels
from quire.kernels.adapters import LoraSegments
from quire.kernels.pipe import StageError
from quire.kernels.transfer import send
from quire.layers.stages import Stage
from quire.lora import AdapterMix, AdapterSlots
from quire.models.base import CausalLM
from quire.models.pooling.base import PoolingModel
from quire.models.vision.base import MediaModel
from quire.platform.execution import batch, kv_tensors
from quire.platform.execution.ahead import PagesAhead
from quire.platform.execution.decode_graphs import DecodeGraphRunner
from quire.platform.execution.draft_runner import DraftRunner
from quire.platform.execution.encoder_runner import EncoderRunner
from quire.platform.execution.forward import Forward
from quire.platform.execution.host_cache import HostCache
from quire.platform.execution.kv_tensors import keys_of
from quire.platform.execution.kv_transfer import KVTransfer
from quire.platform.execution.pool_blocks import PoolBlocks
from quire.platform.execution.pooling_runner import PoolingRunner
from quire.platform.execution.running_step import HandedOn, PreviousTokens, RunningStep
from quire.platform.execution.sequences import Sequences, WorkerSequence
from quire.platform.execution.staging import Staging
from quire.platform.sampling.results import TopLogprobs
from quire.platform.sampling.sampler import Sampling, TokenDraw, begin, top_logprobs
from quire.platform.sampling.sampling_input import begin_together
from quire.platform.sampling.speculative.check import CheckedSampling, DraftedDraws, Draws
from quire.platform.scheduling.plan import Chunk, StepPlan
from quire.types import KVCache, StateCache

# Prompt scores need a row of logits for every token: so many rows at a time bound the memory.
_SCORE_ROWS = 64


class ModelRunner:
    """Holds the model, its adapters, the tensors of the pool and the swap space and the features of images; and of each
    sequence what the plans have said of it, with the tokens of the last step, which the next may need before they are
    known elsewhere.

    windows: of each group of layers, as the caches number them; 0: it keeps every token.
    ahead: has pages of the pool committed between steps; None: they come as they are written.
    draft: proposes tokens where a plan asks for them; its caches are further ones of the same pool.
    stage: the process's place in a pipeline, whose layers the model goes through alone; None: there is none.
    """

    def __init__(
        self,
        model: CausalLM,
        caches: Sequence[KVCache | StateCache],
        device: torch.device,
        enforce_eager: bool = False,
        adapter_slots: AdapterSlots | None = None,
        exact_products: bool = True,
        windows: Sequence[int] = (0,),
        ahead: PagesAhead | None = None,
        draft: DraftRunner | None = None,
        stage: Stage | None = None,
    ) -> None:
        self.model = model
        self.caches = caches
        self.device = device
        self.block_size = keys_of(caches)[0].shape[2]
        self.adapter_slots = adapter_slots
        self._stage = stage
        self._begins, self._ends = stage is None or stage.is_first, stage is None or stage.is_last
        self._decode = DecodeGraphRunner(model, caches, enforce_eager, adapter_slots, self._ends)
        # Whether a step may be planned and started while the one before it runs.
        self.looks_ahead = device.type != "cpu"
        self._staging = Staging(device) if device.type != "cpu" else None
        self._draft = draft
        self._pool = [*caches, *(() if draft is None else draft.caches)]
        self.blocks = PoolBlocks(self._pool)
        self.transfers: KVTransfer | None = None  # of blocks beside the pool, where the settings ask for that
        self._host, self._before = HostCache(self.blocks), PreviousTokens()
        self._exact = exact_products
        self._mrope = isinstance(model, MediaModel) and model.mrope
        self._windows = windows
        self._ahead = ahead
        self._sequences = Sequences()
        # Of the residual stream.
        self._row_bytes = 0 if stage is None else model.embed(torch.zeros(1, dtype=torch.int64, device=device)).nbytes
        self.encoder = EncoderRunner(model, device, adapter_slots)
        self.pools = isinstance(model, PoolingModel)  # and generates nothing
        self._pooling = (
            PoolingRunner(model, self._with_adapters, self.encoder.features)
            if isinstance(model, PoolingModel)
            else None
        )
        self._forward = Forward(model, caches, device, self.encoder.features, stage, enforce_eager)

    @property
    def drafts(self) -> bool:
        """Whether a draft model's blocks are beside the model's."""
        return self._draft is not None

    def execute(self, plan: StepPlan) -> RunningStep | HandedOn:
        """Start one step, after `prepare`. It may be run again: it writes the same values to the same slots."""
        try:
            return self.compute(plan, self.sequences(plan))
        except BaseException:
            self._before = PreviousTokens()
            raise

    def sequences(self, plan: StepPlan) -> list[WorkerSequence]:
        """Of a plan's chunks."""
        return [self._sequences[chunk.sequence_id] for chunk in plan.chunks]

    def compute(self, plan: StepPlan, sequences: Sequence[WorkerSequence]) -> RunningStep | HandedOn:
        """`execute`; of a model that pools, several threads may compute plans that have no block, adapter or image in
        common."""
        with self._in_step(plan):
            ahead = self._ahead or nullcontext()
            if self._ahead is not None:
                self._ahead.take(chunk.block_ids for chunk in plan.chunks)
            with torch.inference_mode(), self._on_device(), ahead:
                return self._execute(plan, sequences)

    def skip(self, plan: StepPlan) -> None:
        """In the place of `execute`, where that cannot begin: other stages make the step."""
        self._before = PreviousTokens()
        with suppress(StageError), self._in_step(plan):
            raise StageError

    @contextmanager
    def _in_step(self, plan: StepPlan) -> Iterator[None]:
        """Stages go through the same steps, whatever becomes of one in some of them."""
        if self._stage is None:
            yield
            return
        pipe = self._stage.pipe
        pipe.begin()
        try:
            yield
        except Exception:
            pipe.fail(2 * self._row_bytes * sum(chunk.length for chunk in plan.chunks))
            raise

    def _on_device(self) -> AbstractContextManager[object]:
        """Let this thread's current GPU be the model's, and products be what this engine wants."""
        if self.device.type != "cuda":
            return nullcontext()
        kernels.cuda_backend().set_exact_products(self._exact)
        return torch.cuda.device(self.device)

    def _execute(self, plan: StepPlan, sequences: Sequence[WorkerSequence]) -> RunningStep | HandedOn:
        chunks = plan.chunks
        if self._draft is not None:
            chunks = tuple(self._draft.propose(chunks, sequences))
        both = list(zip(chunks, sequences, strict=True))
        shaped = [s.sampling for c, s in both if s.sampling.shapes and c.draws]
        if shaped and self._ends:
            begin_together(shaped)
        if self._begins:
            self.encoder.run(plan.encode)
        if self._are_single(both) and (self.device.type == "cpu" or not any(c.drafts for c in plan.chunks)):
            room = (0, 0) if self._staging is None else self._decode.room(sequences)
            inputs = self._inputs(chunks, sequences, *room)
            mixes = [s.adapters for c, s in both for _ in range(c.length)] if self.adapter_slots is not None else ()
            logits, likeliest = self._decode(inputs, mixes)
            if not self._ends:
                return HandedOn(plan)
            best = None if likeliest is None else likeliest.tolist()
            return self._running(plan, self._sample(chunks, sequences, logits, best), ((),) * len(chunks))
        inputs = self._inputs(chunks, sequences)
        ends = list(accumulate((chunk.length for chunk in chunks), initial=0))
        drawn = [
            row
            for c, end in zip(chunks, ends[1:], strict=True)
            if c.draws
            for row in range(end - 1 - len(c.drafts), end)
        ]
        scored = any(chunk.score is not None for chunk in chunks)
        wanted = drawn if self._ends and not scored else None
        if self._pooling is not None:
            wanted = self._pooling.wanted(chunks, sequences)
        with self._with_adapters((sequence.adapters, chunk.length) for chunk, sequence in both):
            hidden = self._forward(inputs, chunks, sequences, wanted)
        if not self._ends:
            return HandedOn(plan)
        none = ((),) * len(chunks)
        if self._pooling is not None:
            return RunningStep(plan, None, none, pooled=self._pooling.run(chunks, sequences, hidden, wanted))
        last = None
        if drawn:
            with self._with_adapters((s.adapters, 1 + len(c.drafts)) for c, s in both if c.draws):
                last = self.model.logits(hidden if wanted is not None else hidden[self._index(drawn)])
        sampling = self._sample(chunks, sequences, last)  # before the scores, which may take the logits' memory
        if not scored:
            return self._running(plan, sampling, none)
        scores = tuple(self._score(c, s, hidden[ends[i] : ends[i + 1]]) for i, (c, s) in enumerate(both))
        return self._running(plan, sampling, scores)

    @staticmethod
    def _are_single(both: Sequence[tuple[Chunk, WorkerSequence]]) -> bool:
        """Whether each sequence has one token that is known, behind which one is drawn, and drafts at most."""
        for c, s in both:
            if c.length != 1 + len(c.drafts) or not c.draws or c.score:
                return False
            if s.media and s.has_media_in(c.start, c.end):
                return False
        return True

    def _running(
        self, plan: StepPlan, sampling: Sampling | CheckedSampling | None, scores: tuple[tuple[TopLogprobs, ...], ...]
    ) -> RunningStep:
        if not self.looks_ahead:
            return RunningStep(plan, sampling, scores)
        tokens = None if sampling is None else sampling.known()
        alone = all(len(chunk.draws) <= 1 and chunk.score is None for chunk in plan.chunks)
        known = alone and (sampling is None or tokens is not None)
        self._before = PreviousTokens.of(plan, tokens) if known else PreviousTokens()
        return RunningStep(plan, sampling, scores, known)

    def _inputs(
        self, chunks: Sequence[Chunk], sequences: Sequence[WorkerSequence], rows: int = 0, width: int = 0
    ) -> batch.StepInputs:
        if self._staging is not None:
            given = rows, width, self._windows
            inputs = batch.send(chunks, sequences, self.block_size, self._staging, self._mrope, *given)
        elif len(self._windows) > 1:
            inputs = batch.build_groups(chunks, sequences, self.block_size, self._windows, self._mrope)
        else:
            inputs = batch.build(chunks, sequences, self.block_size, self._mrope)
        if self.looks_ahead:
            self._fill_in(inputs.token_ids, chunks)
        return inputs

    def _fill_in(self, token_ids: torch.Tensor, chunks: Sequence[Chunk]) -> None:
        """Put the tokens that the step before has drawn in the place of those that the plan did not know."""
        rows, ids, end = [], [], 0
        for chunk in chunks:
            end += chunk.length
            if self._sequences.pending(chunk):
                rows.append(end - 1 - len(chunk.drafts))
                ids.append(chunk.sequence_id)
        if rows:
            targets, sources = self._index([rows, self._before.places_of(ids)])
            assert self._before.tokens is not None
            # A token that could not be drawn is -1; its sequence ends before anybody sees what becomes of it.
            token_ids[targets] = self._before.tokens[sources].clamp(min=0)

    def _index(self, numbers: Sequence[Any]) -> torch.Tensor:
        """Rows to take, on the device."""
        return send(torch.tensor(numbers, dtype=torch.int64), self.device)

    def prepare(self, plan: StepPlan) -> None:
        """Take in what is new of sequences, move, copy and poison the blocks that the plan names, let go of features,
        change the adapters on the device.

        Once a plan: a copy's source may be overwritten by now.
        """
        self._sequences.take(plan)
        self.encoder.release(plan.release)
        if not plan.moves and not plan.poison and plan.transfers is None:
            return
        with self._on_device():
            if self.adapter_slots is not None:
                for uid in plan.drop:
                    self.adapter_slots.drop(uid)
                for uid in plan.install:
                    self.adapter_slots.install(uid)
            with torch.inference_mode():
                self._move_blocks(plan)

    def _move_blocks(self, plan: StepPlan) -> None:
        if plan.transfers is not None and self.transfers is not None:
            self.transfers.store(plan.transfers)
        self._host.save(plan.swap_out)
        self._host.fetch(plan.swap_in)
        if plan.transfers is not None and self.transfers is not None:
            self.transfers.load(plan.transfers)
        self.blocks.copy(plan.copies)
        if self._draft is not None:
            self._draft.copied(plan.copies, plan.swap_in)
        if plan.poison:
            kv_tensors.poison(self._pool, plan.poison)

    def take_pixels(self, digest: bytes, inputs: Mapping[str, torch.Tensor]) -> None:
        """Have what an image of the next step is encoded from, until that step was started."""
        self.encoder.take_pixels(digest, inputs)

    def release_cache(self) -> Callable[[], None]:
        """Give the pool's memory back, and all that a step has left behind; the function that is returned takes it
        again. Only while nothing runs."""
        self._before = PreviousTokens()
        if self._draft is not None:
            self._draft.forget()
        if self._ahead is None:
            return kv_tensors.release(self._pool)
        self._ahead.pause()
        take = kv_tensors.release(self._pool)

        def take_again() -> None:
            take()
            ahead.resume()

        ahead = self._ahead
        return take_again

    def forget_recordings(self) -> None:
        """Weights or pool have other addresses from now on."""
        self._decode.forget()
        self._forward.forget()
        if self._draft is not None:
            self._draft.forget()

    def _with_adapters(self, mixes: Iterable[tuple[AdapterMix, int]]) -> AbstractContextManager[None]:
        """Let the layers work with these adapters; mixes: of so many rows each."""
        if self.adapter_slots is None:
            return nullcontext()
        counted = list(mixes)
        rows = self.adapter_slots.segments(counted)
        if not rows:
            return nullcontext()
        return self.adapter_slots.using(LoraSegments.of(rows, sum(count for _, count in counted), self.device))

    def _sample(
        self,
        chunks: Sequence[Chunk],
        sequences: Sequence[WorkerSequence],
        logits: torch.Tensor | None,
        likeliest: Sequence[int] | None = None,
    ) -> Sampling | CheckedSampling | None:
        """Draw each chunk's tokens; logits: [chunks with draws, and their drafts, vocabulary]; likeliest: of each row,
        where that is known already."""
        if logits is None:
            return None
        drawing = [(c, s) for c, s in zip(chunks, sequences, strict=True) if c.draws]
        if not any(c.drafts for c, _ in drawing):
            draws = [TokenDraw(row, s.sampling, x) for row, (c, s) in enumerate(drawing) for x in c.draws]
            return begin(logits, draws, likeliest)
        groups: list[Draws] = []
        row = 0
        for chunk, sequence in drawing:
            if chunk.drafts:
                groups.append(DraftedDraws(row, sequence.sampling, chunk.draws[0], chunk.drafts, sequence.accept))
            else:
                groups.append([TokenDraw(row, sequence.sampling, seed) for seed in chunk.draws])
            row += 1 + len(chunk.drafts)
        return CheckedSampling(logits, groups, likeliest)

    def _score(self, chunk: Chunk, sequence: WorkerSequence, hidden: torch.Tensor) -> tuple[TopLogprobs, ...]:
        score = chunk.score
        tops: list[TopLogprobs] = []
        if score is None:
            return ()
        rows = hidden[score.first : score.first + len(score.targets)]
        for at in range(0, len(rows), _SCORE_ROWS):
            part = rows[at : at + _SCORE_ROWS]
            with self._with_adapters([(sequence.adapters, len(part))]):
                logits = self.model.logits(part)
            tops += top_logprobs(logits, score.targets[at : at + _SCORE_ROWS], score.alternatives)
        return tuple(tops)
