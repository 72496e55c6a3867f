"""Executes a plan: tensors in, forward pass, logits of the sampled rows, tokens out. It decides nothing."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from quire import pages
from quire.contracts import KVCache, KVSpec
from quire.kernels.adapters import LoraSegments
from quire.lora import AdapterBank, Owner
from quire.models.base import CausalLM
from quire.models.multimodal import VisionLanguageModel
from quire.platform import batch
from quire.platform.decode import DecodeStep
from quire.platform.plan import Chunk, EncodeImage, StepPlan, StepResult
from quire.platform.sampler import Sampled, SampleSpec, TopLogprobs, sample, top_logprobs

# Prompt scores need a row of logits for every token: so many rows at a time bound the memory.
_SCORE_ROWS = 64


def allocate_cache(
    spec: KVSpec, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
) -> list[KVCache]:
    """The pool's tensors, one pair a layer. Memory is committed as blocks are first used."""
    shape = (num_blocks, spec.num_kv_heads, block_size, spec.head_dim)
    size = math.prod(shape) * dtype.itemsize

    def tensor() -> torch.Tensor:
        if device.type == "cpu":
            return pages.allocate(size).view(dtype).view(shape)
        return torch.empty(shape, dtype=dtype, device=device)

    return [KVCache(tensor(), tensor()) for _ in range(spec.num_layers)]


class Runner:
    """Holds the model, its adapters, the pool's tensors and the features of images, and nothing of any request."""

    def __init__(
        self,
        model: CausalLM,
        caches: Sequence[KVCache],
        device: torch.device,
        enforce_eager: bool = False,
        bank: AdapterBank | None = None,
    ) -> None:
        self.model = model
        self.caches = caches
        self.device = device
        self.block_size = caches[0].keys.shape[2]
        self.bank = bank
        self._decode = DecodeStep(model, caches, enforce_eager, bank)
        self._mrope = isinstance(model, VisionLanguageModel) and model.mrope
        self._features: dict[bytes, torch.Tensor] = {}  # by digest, each [tokens, E]

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step, after `prepare`. It may be run again: it writes the same values to the same slots."""
        for image in plan.encode:
            if image.digest not in self._features:
                self._features[image.digest] = self._encode(image)
        token_ids, context = batch.build(plan.chunks, self.block_size, self.device, self._mrope)
        if all(len(c.token_ids) == 1 and c.draws and not c.score and not c.media for c in plan.chunks):
            decoded = self._decode(token_ids, context, [chunk.adapters for chunk in plan.chunks])
            return StepResult(self._sample(plan.chunks, decoded), [[] for _ in plan.chunks])
        with self._owned((chunk.adapters, len(chunk.token_ids)) for chunk in plan.chunks):
            hidden = self.model(self._embed(token_ids, plan.chunks), context, self.caches)
        ends = context.query_start.tolist()
        rows = [end - 1 for chunk, end in zip(plan.chunks, ends[1:], strict=True) if chunk.draws]
        logits = None
        if rows:
            with self._owned((chunk.adapters, 1) for chunk in plan.chunks if chunk.draws):
                logits = self.model.logits(hidden[rows])
        return StepResult(
            self._sample(plan.chunks, logits),
            [self._score(chunk, hidden[ends[i] : ends[i + 1]]) for i, chunk in enumerate(plan.chunks)],
        )

    def prepare(self, plan: StepPlan) -> None:
        """Copy and poison the blocks that the plan names, let go of features, change the adapters on the device.

        Once a plan: a copy's source may be overwritten by now.
        """
        if self.bank is not None:
            for uid in plan.drop:
                self.bank.drop(uid)
            for uid in plan.install:
                self.bank.install(uid)
        for digest in plan.release:
            self._features.pop(digest, None)
        if plan.copies or plan.poison:
            with torch.inference_mode():
                for cache in self.caches:
                    self._prepare(cache.keys, plan)
                    self._prepare(cache.values, plan)

    def _owned(self, owners: Iterable[tuple[Owner, int]]) -> AbstractContextManager[None]:
        """Let the layers work for these owners of rows."""
        rows = self.bank.segments(owners) if self.bank is not None else []
        if self.bank is None or not rows:
            return nullcontext()
        return self.bank.using(LoraSegments.of(rows, self.device))

    def _encode(self, image: EncodeImage) -> torch.Tensor:
        """One image's features, [length, E]. One by one: together they would take as long, and their sums would
        depend on each other's number."""
        given = image.inputs.get("image_embeds")
        assert isinstance(self.model, VisionLanguageModel)
        dtype = next(self.model.parameters()).dtype
        with nullcontext() if self.bank is None else self.bank.encoding_for(image.adapters):
            features = self.model.encode(image.inputs) if given is None else given
        features = features.to(self.device, dtype)
        if len(features) != image.length:
            raise RuntimeError(f"an image has {len(features)} features, and {image.length} placeholders")
        return features.contiguous()

    def _embed(self, token_ids: torch.Tensor, chunks: Sequence[Chunk]) -> torch.Tensor:
        """The tokens' embeddings [T, E], and features in the place of placeholders."""
        rows, parts = batch.media_rows(chunks)
        if not rows:
            return self.model.embed(token_ids)
        token_ids[rows] = 0  # a placeholder need not be in the vocabulary
        embeddings = self.model.embed(token_ids)
        embeddings[rows] = torch.cat([self._features[digest][first:end] for digest, first, end in parts])
        return embeddings

    def _prepare(self, blocks: torch.Tensor, plan: StepPlan) -> None:
        for source, target in plan.copies:  # one by one: a target may be a later copy's source
            blocks[target].copy_(blocks[source])
        blocks[list(plan.poison)] = float("nan")

    def _sample(self, chunks: Sequence[Chunk], logits: torch.Tensor | None) -> list[list[Sampled]]:
        """Draw each chunk's tokens; logits: [chunks with draws, vocabulary]."""
        specs: list[SampleSpec] = []
        row = 0
        for chunk in chunks:
            for draw in chunk.draws:
                specs.append(
                    SampleSpec(
                        row, draw.params, draw.prompt_ids, draw.output_ids, draw.seed, draw.stop_ids, draw.bad_words
                    )
                )
            row += bool(chunk.draws)
        tokens = iter(() if logits is None else sample(logits, specs))
        return [[next(tokens) for _ in chunk.draws] for chunk in chunks]

    def _score(self, chunk: Chunk, hidden: torch.Tensor) -> list[TopLogprobs]:
        score = chunk.score
        tops: list[TopLogprobs] = []
        if score is None:
            return []
        rows = hidden[score.first : score.first + len(score.targets)]
        for at in range(0, len(rows), _SCORE_ROWS):
            part = rows[at : at + _SCORE_ROWS]
            with self._owned([(chunk.adapters, len(part))]):
                logits = self.model.logits(part)
            tops += top_logprobs(logits, score.targets[at : at + _SCORE_ROWS], score.count)
        return tops
