"""What the media preprocessor works at, and what it makes of it."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from quire.multimodal.fetch import host_of
from quire.multimodal.images import AbandonedError, Opened
from quire.multimodal.sources import MediaSource, OpenedMedia
from quire.types import MEDIA_KINDS, MediaKind, MediaLayout

# A job that has taken more seconds than the first of these lets pass who came up to so many times as much later.
_FREE_SECONDS, _DELAY_FACTOR = 0.25, 4.0
# An image that does not fit beside those that are being decoded lets so many go before it, and no more.
MOST_PASSED = 16
_SECONDS_A_PIXEL = 2e-8  # of work on a pixel, roughly, that is still to be decoded
# How long a worker is at a video before others that are due may go first; and how many times as long when it is begun
# anew, so that no more than a third of all work is done in vain.
_SLICE_SECONDS, _SLICE_GROWTH = 0.5, 4.0

Stage = Literal["fetch", "image", "media"]


class PausedError(AbandonedError):
    """Others go first; it is begun anew when it is its turn again."""


class FetchedFile:
    """A file's bytes that came from a URL; counted for as long as anybody has it."""

    __slots__ = ("__weakref__", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)


class Pixels:
    """What a model's tower takes of one image; counted for as long as anybody has it."""

    __slots__ = ("__weakref__", "inputs", "nbytes")

    def __init__(self, inputs: Mapping[str, torch.Tensor]) -> None:
        self.inputs = inputs
        self.nbytes = sum(tensor.nbytes for tensor in inputs.values())


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """One image, video or sound, ready. digest: of its features: equal ones, equal features. pixels: None where these
    are there already. source: from which it can be prepared again.
    """

    digest: bytes
    layout: MediaLayout
    pixels: Pixels | None
    source: Any
    kind: MediaKind = "image"


@dataclass(slots=True, eq=False)
class Job:
    """The images of a request.

    images: those that are ready. seconds: how long workers have been at it. fetched: the next one, read from its URL.
    opened: the next one, where it waits for its turn to be decoded: (what it was read from, the image); pixels: what it
    takes then; passed: how many have gone before it since; is_decoded: that turn has come. at: what its worker is at,
    since `began`; looked: when it was last asked
    whether others are due; pauses: how often others went first. gone: nobody waits for it any more.
    """

    key: Hashable
    sources: Sequence[Any]
    settings: Mapping[str, Any]
    first: int
    room: int | None
    variant: bytes
    urgent: bool
    arrival: float = field(default_factory=time.monotonic)
    images: list[ProcessedImage] = field(default_factory=list)
    seconds: float = 0.0
    opened: tuple[Any, Opened | OpenedMedia] | None = None
    pixels: int = 0
    passed: int = 0
    is_decoded: bool = False
    fetched: Any = None
    at: Stage = "image"
    began: float = 0.0
    looked: float = 0.0
    pauses: int = 0
    gone: bool = False

    def name(self, place: int) -> str:
        """What messages call one of them."""
        source = self.sources[place] if place < len(self.sources) else None
        return source.name if isinstance(source, MediaSource) else f"image {self.first + place}"

    @property
    def image_settings(self) -> Mapping[str, Any]:
        """Those of the image processor; settings of other kinds stand under the names of these."""
        return {name: value for name, value in self.settings.items() if name not in MEDIA_KINDS}

    @property
    def next_source(self) -> Any:
        """Of the one that is to be prepared next; None: there is none."""
        place = len(self.images)
        return self.sources[place] if place < len(self.sources) else None

    @property
    def kind(self) -> MediaKind:
        """Of the one that is to be prepared next."""
        source = self.next_source
        return source.kind if isinstance(source, MediaSource) else "image"

    @property
    def stage(self) -> Stage:
        """What is to be done next."""
        if self.url is not None:
            return "fetch"
        return "media" if isinstance(self.next_source, MediaSource) else "image"

    @property
    def url(self) -> str | None:
        """From where the next one is to be fetched; None: it is here."""
        if self.opened is not None or self.fetched is not None:
            return None
        source = self.next_source
        given = source.source if isinstance(source, MediaSource) else source
        far = isinstance(given, str) and given[:6].lower().startswith(("http:", "https:", "file:"))
        return given if far else None

    @property
    def host(self) -> str | None:
        """Whom it is to be fetched from; None: from nobody."""
        url = self.url
        return None if url is None else host_of(url)

    @property
    def due(self) -> float:
        """When it is its turn: earlier ones go first."""
        return self.due_after(0.0)

    def due_after(self, seconds: float) -> float:
        """The same once a worker has been at it for so many more."""
        coming = 0.0 if self.opened is None else _SECONDS_A_PIXEL * self.opened[1].work
        later = _DELAY_FACTOR * max(0.0, self.seconds + seconds + coming - _FREE_SECONDS)
        return -math.inf if self.urgent or self.passed >= MOST_PASSED else self.arrival + later

    @property
    def slice(self) -> float:
        """Seconds until others may go first."""
        return _SLICE_SECONDS * float(_SLICE_GROWTH**self.pauses)

    def let_go(self) -> None:
        """Keep nothing of what was begun; what was opened knows the job."""
        self.opened, self.fetched = None, None
