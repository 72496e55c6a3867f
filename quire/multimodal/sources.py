"""Videos and sounds of a prompt: what callers give, and what is known of it before it is decoded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

from quire.types import MediaKind, MediaLayout


@dataclass(frozen=True, slots=True, eq=False)
class MediaSource:
    """One video or sound of a prompt, as it was given. number: its place among those of its kind."""

    kind: MediaKind
    source: Any
    number: int = 0

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"{self.kind} {self.number}"

    def of(self, source: Any) -> MediaSource:
        """The same, given otherwise: a file's bytes instead of its URL."""
        return replace(self, source=source)


@dataclass(frozen=True, slots=True)
class DecodedMedia:
    """digest: of what the model will see; equal ones, equal inputs. inputs: makes what its tower takes."""

    digest: bytes
    inputs: Callable[[], dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class OpenedMedia:
    """One whose cost is known and within the limits, and of which nothing is decoded yet.

    source: from which it can be prepared again. work: pixels that are gone over. pixels: what decoding and processing
    it takes, in decoded pixels' memory. decode: raises RequestError, and AbandonedError for what nobody waits for.
    """

    source: MediaSource
    work: int
    pixels: int
    decode: Callable[[], DecodedMedia]


class MediaHandler(Protocol):
    """How those of one kind are prepared. Any number of threads may call it at once."""

    def open(self, media: MediaSource, settings: Mapping[str, Any], gone: Callable[[], bool]) -> OpenedMedia:
        """Look at one, as far as to know what it costs. Raises RequestError, and AbandonedError once `gone`."""

    def layout(self, inputs: Mapping[str, torch.Tensor]) -> MediaLayout:
        """What it takes in a prompt. Raises ValueError when it does not fit the model."""


def as_several(kind: MediaKind, given: Any) -> list[Any]:
    """One or several -> several. A list of frames is one video, and a list of numbers one sound."""
    if not isinstance(given, list):
        return [given]
    parts = (Image.Image, np.ndarray, torch.Tensor)
    if kind == "video" and given and all(isinstance(one, parts) and _is_frame(one) for one in given):
        return [given]
    if kind == "audio" and given and all(isinstance(one, (int, float, np.number)) for one in given):
        return [given]
    return given


def _is_frame(one: Any) -> bool:
    return isinstance(one, Image.Image) or one.ndim in (2, 3)
