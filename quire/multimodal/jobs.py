"""What the media preprocessor works at, and what it makes of it."""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from quire.multimodal.images import Opened
from quire.multimodal.sources import MediaSource, OpenedMedia
from quire.types import MEDIA_KINDS, MediaKind, MediaLayout

# A job that has taken more seconds than the first of these lets pass who came up to so many times as much later.
_FREE_SECONDS, _DELAY_FACTOR = 0.25, 4.0
# An image that does not fit beside those that are being decoded lets so many go before it, and no more.
MOST_PASSED = 16
_SECONDS_A_PIXEL = 2e-8  # of work on a pixel, roughly, that is still to be decoded


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

    images: those that are ready. seconds: how long workers have been at it. opened: the next one, where it waits for
    its turn to be decoded: (what it was read from, the image); pixels: what it takes then; passed: how many have gone
    before it since. gone: nobody waits for it any more.
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
    def at_media(self) -> bool:
        """Whether the next one is a video or a sound."""
        place = len(self.images)
        return place < len(self.sources) and isinstance(self.sources[place], MediaSource)

    @property
    def due(self) -> float:
        """When it is its turn: earlier ones go first."""
        coming = 0.0 if self.opened is None else _SECONDS_A_PIXEL * self.opened[1].work
        later = _DELAY_FACTOR * max(0.0, self.seconds + coming - _FREE_SECONDS)
        return -math.inf if self.urgent or self.passed >= MOST_PASSED else self.arrival + later
