"""What a step makes of the hidden states of sequences that generate nothing: vectors, classes, scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise

import numpy as np
import torch

from quire import kernels
from quire.lora import AdapterMix
from quire.models.pooling.base import PoolingModel
from quire.platform.execution.sequences import WorkerSequence
from quire.platform.scheduling.plan import Chunk
from quire.pooling_types import PoolingInput

_ROWS = 256  # that a head is asked for at a time: bounds the memory of the rows of long prompts

WithAdapters = Callable[[Iterable[tuple[AdapterMix, int]]], AbstractContextManager[None]]
Part = tuple[Chunk, WorkerSequence, int]  # a chunk, whose it is, and its first row of the step


class PoolingRunner:
    """Pools the rows of a step.

    Nothing here depends on what else is in a step, or on how a prompt was cut: rows are taken as they are, sums are
    made token by token (`kernels.sum_rows`), heads treat rows one by one, and what follows is done for each row alone.

    with_adapters: lets the head's layers work with adapters, of so many rows each. features: of images, by their
    digests: where an image is a prompt of its own (`TowerPrompts`), its features are what is told of it.
    """

    def __init__(
        self, model: PoolingModel, with_adapters: WithAdapters, features: Mapping[bytes, torch.Tensor]
    ) -> None:
        self._model = model
        self._spec = model.pooling
        self._with_adapters = with_adapters
        self._features = features
        self.tells_features = self._spec.towers is not None and self._spec.towers.image is not None

    def run(
        self, chunks: Sequence[Chunk], sequences: Sequence[WorkerSequence], hidden: torch.Tensor
    ) -> tuple[np.ndarray | None, ...]:
        """hidden: [T, C], the chunks' rows end to end. Returns as `StepResult.pooled` has it."""
        parts: list[Part] = []
        row = 0
        for chunk, sequence in zip(chunks, sequences, strict=True):
            parts.append((chunk, sequence, row))
            row += chunk.length
        self._add_up(parts, hidden)
        rows = [hidden[:0] if self._is_reduced(part) else self._rows(part, hidden) for part in parts]
        counts = [len(one) for one in rows]
        found = self._through_head(torch.cat(rows), parts, counts) if any(counts) else None
        ends = np.cumsum([0, *counts])
        told = [
            self._reduced(part, hidden) if self._is_reduced(part) else None if found is None else found[first:end]
            for (first, end), part in zip(pairwise(ends.tolist()), parts, strict=True)
        ]
        return tuple(
            self._nothing(_input(sequence)) if own is None or not len(own) else self._finished(own, _input(sequence))
            for own, (_, sequence, _) in zip(told, parts, strict=True)
        )

    def _is_reduced(self, part: Part) -> bool:
        """Whether what is told of a prompt is no head's row of one of its hidden states, or of a mean of them."""
        return self._spec.kind == "splade" or (self.tells_features and bool(part[1].media))

    def _reduced(self, part: Part, hidden: torch.Tensor) -> np.ndarray:
        """[1, numbers] float32: of an image that is a prompt its features; else log(1 + relu(x)) of the largest that
        the head makes of any of the prompt's rows, which are all there (arXiv:2109.10086)."""
        chunk, sequence, row = part
        if self._spec.kind != "splade":
            (item,) = sequence.media
            features: np.ndarray = self._features[item.digest].float().cpu().numpy()
            return features
        assert chunk.start == 0 and chunk.end == sequence.prompt_len
        largest: torch.Tensor | None = None
        for first in range(row, row + chunk.length, _ROWS):
            some = hidden[first : min(first + _ROWS, row + chunk.length)]
            with self._with_adapters([(sequence.adapters, len(some))]):
                found = self._model.pool(some).amax(0, keepdim=True)
            largest = found if largest is None else torch.maximum(largest, found)
        assert largest is not None
        said: np.ndarray = np.log1p(np.maximum(largest.cpu().numpy(), 0).astype(np.float64))
        return said.astype(np.float32)

    def _add_up(self, parts: Sequence[Part], hidden: torch.Tensor) -> None:
        """Add the rows of chunks to the sums of their sequences. A chunk that is run again begins where it began."""
        meant = [part for part in parts if _input(part[1]).kind == "mean"]
        if not meant:
            return
        whole = len(meant) == len(parts)
        x = hidden if whole else torch.cat([hidden[row : row + chunk.length] for chunk, _, row in meant])
        starts = np.cumsum([0, *(chunk.length for chunk, _, _ in meant)]).astype(np.int32)
        sums = np.zeros((len(meant), hidden.shape[1]), np.float64)
        for own, (chunk, sequence, _) in zip(sums, meant, strict=True):
            if chunk.start:
                own += sequence.sums_at[chunk.start]
        kernels.sum_rows(x.cpu(), torch.from_numpy(starts), torch.from_numpy(sums))
        for own, (chunk, sequence, _) in zip(sums, meant, strict=True):
            before = {chunk.start: sequence.sums_at[chunk.start]} if chunk.start else {}
            sequence.sums_at = {**before, chunk.end: own}

    def _rows(self, part: Part, hidden: torch.Tensor) -> torch.Tensor:
        """The hidden states of a chunk that are told of, [rows, C]."""
        chunk, sequence, row = part
        kind = _input(sequence).kind
        if kind == "all":
            return hidden[row : row + chunk.length]
        if kind == "step":
            ids = sequence.token_ids[chunk.start : chunk.end]
            places = [row + place for place, token in enumerate(ids) if token == self._spec.step_token]
            return hidden[torch.tensor(places, dtype=torch.int64, device=hidden.device)]
        if kind == "cls":
            return hidden[row : row + (chunk.start == 0)]
        if chunk.end < sequence.prompt_len:
            return hidden[:0]
        if kind == "last":
            return hidden[row + chunk.length - 1 : row + chunk.length]
        mean = sequence.sums_at[chunk.end] / sequence.prompt_len
        return torch.from_numpy(mean.astype(np.float32)).to(hidden.device, hidden.dtype)[None]

    def _through_head(self, rows: torch.Tensor, parts: Sequence[Part], counts: Sequence[int]) -> np.ndarray:
        """[R, C] -> [R, numbers] float32."""
        made: list[torch.Tensor] = []
        for first in range(0, len(rows), _ROWS):
            some = rows[first : first + _ROWS]
            with self._with_adapters(_mixes(parts, counts, first, first + len(some))):
                made.append(self._model.pool(some))
        return torch.cat(made).cpu().numpy()

    def _nothing(self, wanted: PoolingInput) -> np.ndarray:
        """No rows, as wide as the request's are."""
        return np.zeros((0, wanted.dimensions or self._spec.width), np.float32)

    def _finished(self, rows: np.ndarray, wanted: PoolingInput) -> np.ndarray:
        """[rows, numbers] -> the same, cut and made what the request wants, in memory of its own."""
        if self._spec.labels_returned:
            rows = rows[:, list(self._spec.labels_returned)]
        if wanted.dimensions:
            rows = rows[:, : wanted.dimensions]
        return np.stack([_activated(row, wanted.activation) for row in rows])


def _input(sequence: WorkerSequence) -> PoolingInput:
    assert sequence.pooling is not None
    return sequence.pooling


def _mixes(parts: Sequence[Part], counts: Sequence[int], first: int, end: int) -> list[tuple[AdapterMix, int]]:
    """Whose adapters the rows first .. end run with."""
    found: list[tuple[AdapterMix, int]] = []
    row = 0
    for (_, sequence, _), count in zip(parts, counts, strict=True):
        inside = min(end, row + count) - max(first, row)
        if inside > 0:
            found.append((sequence.adapters, inside))
        row += count
    return found


def _activated(row: np.ndarray, activation: str) -> np.ndarray:
    """One row [N] float32, worked on in float64."""
    wide = row.astype(np.float64)
    if activation == "normalize":
        wide = wide / max(float(np.sqrt(np.add.reduce(wide * wide))), 1e-12)
    elif activation == "softmax":
        shares = np.exp(wide - wide.max())
        wide = shares / np.add.reduce(shares)
    elif activation == "sigmoid":
        wide = 1.0 / (1.0 + np.exp(-wide))
    return wide.astype(np.float32)
