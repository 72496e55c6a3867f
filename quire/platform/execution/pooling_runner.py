"""What a step makes of the hidden states of sequences that generate nothing: vectors, classes, scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise

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

    def wanted(self, chunks: Sequence[Chunk], sequences: Sequence[WorkerSequence]) -> list[int] | None:
        """The rows of a step whose hidden states `run` asks for; None: all."""
        places = [self._place(part) for part in _parts(chunks, sequences)]
        return None if None in places else [row for row in places if row is not None and row >= 0]

    def _place(self, part: Part) -> int | None:
        """The row that all is told of; -1: there is none in this chunk; None: more than one counts."""
        chunk, sequence, row = part
        kind = _input(sequence).kind
        if kind not in ("cls", "last") or self._is_reduced(part):
            return None
        if kind == "cls":
            return row if chunk.start == 0 else -1
        return row + chunk.length - 1 if chunk.end >= sequence.prompt_len else -1

    def run(
        self,
        chunks: Sequence[Chunk],
        sequences: Sequence[WorkerSequence],
        hidden: torch.Tensor,
        wanted: Sequence[int] | None,
    ) -> tuple[np.ndarray | None, ...]:
        """hidden: [T, C], the chunks' rows end to end; or those that are wanted. Returns `StepResult.pooled`."""
        parts = _parts(chunks, sequences)
        if wanted is None:
            self._add_up(parts, hidden)
            means = self._means(parts, hidden)
            some = [hidden[:0] if self._is_reduced(part) else self._rows(part, hidden, means) for part in parts]
            counts, rows = [len(one) for one in some], torch.cat(some)
        else:
            counts, rows = [int(self._place(part) != -1) for part in parts], hidden
        found = self._through_head(rows, parts, counts) if any(counts) else None
        told = [
            self._reduced(part, hidden) if self._is_reduced(part) else None if found is None else found[first:end]
            for (first, end), part in zip(pairwise(accumulate(counts, initial=0)), parts, strict=True)
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
        starts = np.array([*accumulate((chunk.length for chunk, _, _ in meant), initial=0)], np.int32)
        sums = np.zeros((len(meant), hidden.shape[1]), np.float64)
        for own, (chunk, sequence, _) in zip(sums, meant, strict=True):
            if chunk.start:
                own += sequence.sums_at[chunk.start]
        kernels.sum_rows(x.cpu(), torch.from_numpy(starts), torch.from_numpy(sums))
        for own, (chunk, sequence, _) in zip(sums, meant, strict=True):
            before = {chunk.start: sequence.sums_at[chunk.start]} if chunk.start else {}
            sequence.sums_at = {**before, chunk.end: own}

    @staticmethod
    def _means(parts: Sequence[Part], hidden: torch.Tensor) -> Mapping[int, torch.Tensor]:
        """[1, C], of hidden's dtype, of each prompt that ends here and whose mean is wanted, by its first row."""
        ending = [part for part in parts if _input(part[1]).kind == "mean" and part[0].end >= part[1].prompt_len]
        if not ending:
            return {}
        sums = np.array([sequence.sums_at[chunk.end] for chunk, sequence, _ in ending])
        means = sums / np.array([[sequence.prompt_len] for _, sequence, _ in ending])
        rows = torch.from_numpy(means.astype(np.float32)).to(hidden.device, hidden.dtype)
        return dict(zip((row for _, _, row in ending), rows.split(1), strict=True))

    def _rows(self, part: Part, hidden: torch.Tensor, means: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The hidden states of a chunk that are told of, [rows, C]. means: as `_means` returns them."""
        chunk, sequence, row = part
        kind = _input(sequence).kind
        if kind == "all":
            return hidden[row : row + chunk.length]
        if kind == "step":
            ids = sequence.token_ids[chunk.start : chunk.end]
            places = [row + place for place, token in enumerate(ids) if token == self._spec.step_token]
            return hidden[torch.tensor(places, dtype=torch.int64, device=hidden.device)]
        place = self._place(part)
        if place is not None:
            return hidden[:0] if place < 0 else hidden[place : place + 1]
        if chunk.end < sequence.prompt_len:
            return hidden[:0]
        return means[row]

    def _through_head(self, rows: torch.Tensor, parts: Sequence[Part], counts: Sequence[int]) -> np.ndarray:
        """[R, C] -> [R, numbers] float32."""
        made: list[torch.Tensor] = []
        for first in range(0, len(rows), _ROWS):
            some = rows[first : first + _ROWS]
            with self._with_adapters(_mixes(parts, counts, first, first + len(some))):
                made.append(self._model.pool(some))
        return (made[0] if len(made) == 1 else torch.cat(made)).cpu().numpy()

    def _nothing(self, wanted: PoolingInput) -> np.ndarray:
        """No rows, as wide as the request's are."""
        return np.zeros((0, wanted.dimensions or self._spec.width), np.float32)

    def _finished(self, rows: np.ndarray, wanted: PoolingInput) -> np.ndarray:
        """[rows, numbers] -> the same, cut and made what the request wants, in memory of its own."""
        if self._spec.labels_returned:
            rows = rows[:, list(self._spec.labels_returned)]
        if wanted.dimensions:
            rows = rows[:, : wanted.dimensions]
        return np.array([_activated(row, wanted.activation) for row in rows])


def _parts(chunks: Sequence[Chunk], sequences: Sequence[WorkerSequence]) -> list[Part]:
    starts = accumulate((chunk.length for chunk in chunks), initial=0)
    return [*zip(chunks, sequences, starts)]  # noqa: B905 (the starts end with the step)


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
