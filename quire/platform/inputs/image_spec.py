"""What must be known of a model to take images, and media of other kinds, in prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from quire.errors import RequestError
from quire.platform.inputs.numbered import NumberedMarkers
from quire.types import MarkerWords, MediaKind, PlaceholderRange, Span


@dataclass(frozen=True)
class ImageInputSpec:
    """What must be known to take images.

    marker_id, marker: the token that stands where an image does, and its text; None where images are not taken. limits:
    how many of each kind a prompt may have.
    max_tokens: of one image, that the features' budget can hold. settings: checks what a caller asks of the image
    processor. rotary_positions: for models with `mrope`. markers: of each kind that the model takes. max_seen: tokens
    that may see one another. prompt_sees: whether all tokens of a prompt with media do. placeholders: of all kinds,
    where they are not their markers. lay_out: a text's pieces as the model's processor writes them
    (`TakesMedia.lay_out`); lays_out_special: with the special tokens. bos: the text of BOS. words: the texts of
    `markers`, but for images'. numbered: what images are called in texts, where they have numbers. completed: of token
    ids, the same with what is missing around videos' markers.
    """

    marker_id: int | None
    marker: str | None
    limits: Mapping[str, int]
    max_tokens: int
    settings: Callable[[Mapping[str, Any] | None], Mapping[str, Any]]
    rotary_positions: Callable[[int, Sequence[PlaceholderRange]], np.ndarray] | None
    markers: Mapping[MediaKind, int]
    max_seen: int
    prompt_sees: bool = False
    placeholders: frozenset[int] = frozenset()
    lay_out: Callable[[Sequence[str], int, MarkerWords], list[str]] | None = None
    lays_out_special: bool = False
    bos: str = ""
    words: Mapping[MediaKind, str] = field(default_factory=dict)
    numbered: NumberedMarkers | None = None
    completed: Callable[[list[int]], list[int]] = list

    def written(self, pieces: Sequence[str], images: int) -> list[str]:
        """A text as the model's processor writes it, in as many pieces. images: of the prompt. Raises RequestError."""
        if self.lay_out is None or self.marker is None:
            return list(pieces)
        return self.lay_out(pieces, images, MarkerWords(self.marker, self.bos, self.words.get("video", "")))

    def ranges(self, request_id: str, length: int, items: Sequence[PlaceholderRange]) -> tuple[Span, ...]:
        """The ranges of a prompt whose tokens see one another. Raises RequestError for one that no step can compute."""
        spans = [span for item in items for span in item.spans if span[1] - span[0] > 1]
        if self.prompt_sees and items:
            spans = [(0, length)]
            features = sum(item.features for item in items)
            if features > self.max_tokens:
                raise RequestError(
                    f"request {request_id}: its images take {features} tokens, which this model must see at once, and "
                    f"the features of {self.max_tokens} fit the budget: use fewer, or raise media_cache_bytes"
                )
        longest = max((end - start for start, end in spans), default=0)
        if longest > self.max_seen:
            raise RequestError(
                f"request {request_id}: {longest} of its tokens see one another and are computed in one step, which "
                f"takes {self.max_seen} here: raise max_num_batched_tokens, or the pool (kv_cache_memory_bytes)"
            )
        return tuple(spans)
