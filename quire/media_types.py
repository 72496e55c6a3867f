"""What images, videos and sounds take in a prompt, as rooms tell each other; `quire.types` has all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

MediaKind = Literal["image", "video", "audio"]
MEDIA_KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")

# The patches of an image or a video in time, height and width, after merging.
Grid = tuple[int, int, int]
# From the first token to the one behind the last.
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class MarkerWords:
    """The texts of tokens that a family's processor writes into a prompt's text: an image's marker, BOS ("": the
    tokenizer has none), and a video's marker ("": the model takes none)."""

    image: str
    bos: str = ""
    video: str = ""


@dataclass(frozen=True, slots=True)
class MediaLayout:
    """What an image, a video or a sound takes in a prompt; the model says it of its processed form.

    tokens: placeholders. grid: for models with `mrope` alone. ids: the placeholders' token ids, of which the model's
    token id for the kind (`image_token_id`, say) is one at least; None: that one throughout. mask: which placeholders
    take a feature, in order; the others keep their own embeddings (the ends of rows, say). None: all take one. sees:
    ranges of placeholders that see one another, the later ones too (bidirectional attention): ascending, apart from
    each other, counted from the first placeholder. seconds: of a video, between two times of its grid, for models with
    `mrope` that turn by seconds.
    """

    tokens: int
    grid: Grid | None = None
    ids: tuple[int, ...] | None = None
    mask: tuple[bool, ...] | None = None
    sees: tuple[Span, ...] = ()
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, given in (("ids", self.ids), ("mask", self.mask)):
            if given is not None and len(given) != self.tokens:
                raise ValueError(f"an image's layout has {len(given)} {name} for {self.tokens} placeholders")
        edges = [edge for span in self.sees for edge in span]
        if any(start >= end for start, end in self.sees) or edges != sorted(edges) or (edges and edges[0] < 0):
            raise ValueError(f"sees={self.sees}: must be ranges with a first and an end, one behind the other")
        if edges and edges[-1] > self.tokens:
            raise ValueError(f"sees={self.sees}: must lie within {self.tokens} placeholders")

    @property
    def features(self) -> int:
        """How many features it has."""
        return self.tokens if self.mask is None else sum(self.mask)


ImageLayout = MediaLayout  # its name before there were other kinds, for plug-ins


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """An image, a video or a sound in a prompt: the tokens `offset` .. `offset + length` are its placeholders.

    digest: SHA-256 over what it shows (an image's pixels, size and mode) and the processor's settings: equal digests,
    equal features and layouts. mask, sees, seconds: as of `MediaLayout`.
    """

    digest: bytes
    offset: int
    length: int
    grid: Grid | None = None
    mask: tuple[bool, ...] | None = None
    kind: MediaKind = "image"
    sees: tuple[Span, ...] = ()
    seconds: float = 0.0

    @classmethod
    def of(cls, layout: MediaLayout, digest: bytes, offset: int, kind: MediaKind = "image") -> PlaceholderRange:
        """What lies at this place of a prompt."""
        return cls(digest, offset, layout.tokens, layout.grid, layout.mask, kind, layout.sees, layout.seconds)

    @property
    def end(self) -> int:
        return self.offset + self.length

    @property
    def features(self) -> int:
        """How many features it has."""
        return self.length if self.mask is None else sum(self.mask)

    @property
    def spans(self) -> tuple[Span, ...]:
        """The ranges of the prompt whose tokens see one another."""
        return tuple((self.offset + start, self.offset + end) for start, end in self.sees)

    def features_between(self, begin: int, end: int) -> tuple[Sequence[int], int, int]:
        """(positions from `begin` to `end` of the prompt that take features, the first and the end of those features).

        begin, end: within the range.
        """
        if self.mask is None:
            return range(begin, end), begin - self.offset, end - self.offset
        places = [place for place in range(begin, end) if self.mask[place - self.offset]]
        first = sum(self.mask[: begin - self.offset])
        return places, first, first + len(places)
