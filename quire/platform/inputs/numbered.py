"""Images whose markers in a text have numbers: "<|image_1|>", "<|image_2|>", of which the tokenizer knows nothing.

The text between them becomes tokens stretch by stretch, each as a text of its own: with BOS, where the tokenizer writes
one, and with whatever else it does at a text's beginning and end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from quire.errors import RequestError
from quire.platform.inputs.tokenizer import encode_rendered

_MOST_DIGITS = 9
_MOST_SHOWN = 8


class NumberedMarkers:
    """form: of a marker, with "{}" where its number stands. marker_id: the token that is put in a marker's place."""

    def __init__(self, form: str, marker_id: int) -> None:
        self._form = form
        self._marker_id = marker_id
        before, _, after = form.partition("{}")
        self.pattern = rf"{re.escape(before)}\d+{re.escape(after)}"
        self._numbers = re.compile(rf"{re.escape(before)}(\d+){re.escape(after)}")

    def word(self, number: int) -> str:
        """The marker of the image of this number, counted from 1."""
        return self._form.format(number)

    def encode(self, tokenizer: Any, pieces: Sequence[str], typed: Sequence[str], images: int) -> list[int] | None:
        """The token ids of a text, with `marker_id` for each image; None for a text without images, which is one text.

        pieces, typed: as of `encode_rendered`. images: of the prompt. Raises RequestError for markers that are not one
        for each image, in their order.
        """
        numbers: list[str] = []
        stretches: list[tuple[list[str], list[str]]] = [([], [])]
        for place, piece in enumerate(pieces):
            if place:
                stretches[-1][1].append(typed[place - 1])
            first, *rest = self._numbers.split(piece)
            stretches[-1][0].append(first)
            numbers += rest[::2]
            stretches += [([text], []) for text in rest[1::2]]
        self._check(numbers, images)
        if not images:
            return None
        ids: list[int] = []
        for place, (own, words) in enumerate(stretches):
            ids += [self._marker_id] if place else []
            ids += encode_rendered(tokenizer, own, words, add_special_tokens=True)
        return ids

    def _check(self, numbers: Sequence[str], images: int) -> None:
        if [int(number) if len(number) <= _MOST_DIGITS else 0 for number in numbers] == list(range(1, images + 1)):
            return
        shown = [self._form.format(number[: _MOST_DIGITS + 1]) for number in numbers[:_MOST_SHOWN]]
        listed = ", ".join([*shown, *["..."] * (len(numbers) > _MOST_SHOWN)]) or "none"
        raise RequestError(
            f"the prompt's image markers are: {listed}; and it has {images} image{'s' * (images != 1)}. There must be "
            f"one marker for each image, in the images' order: {self.word(1)}, {self.word(2)} and so on."
        )
