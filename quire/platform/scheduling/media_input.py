"""An image, a video or a sound of a request, as scheduling knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.multimodal import Pixels
from quire.types import PlaceholderRange


@dataclass(eq=False, slots=True)
class MediaInput:
    """An image of a request.

    pixels: what to encode; None once its features have been seen, and while it is prepared again (`reprocessing`).
    source, settings: from which it can be prepared again, should its features have been evicted; kept: it cannot, and
    the pixels stay until the request ends (rows of a prompt that the caller has embedded).
    """

    item: PlaceholderRange
    pixels: Pixels | None
    source: Any
    settings: Mapping[str, Any]
    reprocessing: bool = False
    kept: bool = False

    def drop_pixels(self) -> None:
        """Its features are there, or nobody wants them any more."""
        self.pixels = self.pixels if self.kept else None

    def ask_again(self) -> bool:
        """Its features and its pixels are gone: it is being prepared again from here on. False: it was already."""
        asked, self.reprocessing = self.reprocessing, True
        return not asked

    def restore(self, pixels: Pixels | None) -> None:
        """It has been prepared again. pixels: None where that came to nothing."""
        self.reprocessing, self.pixels = False, pixels
