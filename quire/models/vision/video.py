"""What models have in common to which a video is images with texts between them, and nothing of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import ClassVar

from quire.models.vision.base import VisionLanguageModel
from quire.types import Grid, MediaKind, MediaLayout, PlaceholderRange

Encode = Callable[[str], list[int]]

_ONES = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
)  # fmt: skip
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_SCALES = ((1_000_000, "million"), (1000, "thousand"))


class FramesAsImages(VisionLanguageModel):
    """A video's features take the image's token, frame by frame, and a text of its own is its marker.

    video_marker_id: the marker's token, of which nothing reaches the model; None: no videos are taken.
    """

    token_id_fields: ClassVar = {"image": "image_token_id", "video": "image_token_id"}
    marker_words: Mapping[MediaKind, str] = {"video": "<video>"}
    video_marker_id: int | None = None

    @property
    def media_marker_ids(self) -> dict[MediaKind, int]:
        videos: dict[MediaKind, int | None] = {"image": self.image_token_id, "video": self.video_marker_id}
        return {kind: number for kind, number in videos.items() if number is not None}

    def read_video_marker(self, encode: Encode) -> None:
        """Look the marker up; a tokenizer that has no token for it leaves the model without videos."""
        ids = encode(self.marker_words["video"])
        self.video_marker_id = ids[0] if len(ids) == 1 and ids[0] != self.image_token_id else None


def between(encode: Encode, first: str, text: str, last: str) -> list[int]:
    """The ids of a text that stands between two special tokens: tokenizers may treat a text's beginning otherwise."""
    ids = encode(first + text + last)
    if [ids[:1], ids[-1:]] != [encode(first), encode(last)]:
        raise ValueError(f"the tokenizer makes no tokens of their own of {first!r} and {last!r}")
    return ids[1:-1]


def layout_of(ids: Sequence[int], placeholder: int | None, grid: Grid | None = None) -> MediaLayout:
    """These ids in a prompt, where each placeholder takes a feature."""
    return MediaLayout(len(ids), grid, tuple(ids), tuple(token == placeholder for token in ids))


def frames_apart(item: PlaceholderRange) -> list[PlaceholderRange]:
    """For positions, each frame of a video as an image of its own, and the texts between them as texts."""
    if item.mask is None:
        return [item]
    assert item.grid is not None
    parts, at = [], item.offset
    for takes, run in groupby(item.mask):
        length = len(list(run))
        if takes:
            parts.append(PlaceholderRange(item.digest, at, length, (1, *item.grid[1:])))
        at += length
    return parts


def in_words(number: int) -> str:
    """A whole number below 10**9 as English says it, with "and" before the last two digits."""
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{_ONES[hundreds]} hundred" + (f" and {in_words(rest)}" if rest else "")
    scale, name = next(one for one in _SCALES if number >= one[0])
    count, rest = divmod(number, scale)
    following = "" if not rest else f" and {in_words(rest)}" if rest < 100 else f", {in_words(rest)}"
    return f"{in_words(count)} {name}{following}"
