"""What tests of the media preprocessor share: a processor that counts, and one that they can wait for."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from quire.config import MediaConfig
from quire.multimodal import MediaPreprocessor
from quire.multimodal.plans import Plan
from quire.types import ImageLayout

SIZE = 400  # bytes of one image's pixels


class Processor:
    """Makes SIZE bytes of any picture, whose first pixel's red value is its name. It can be stopped at some."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.gates: dict[int, threading.Event] = {}

    def plan(self, height: int, width: int, settings: Any) -> Plan:
        return Plan((height, width), height * width)

    def digest(self, picture: Any, settings: Any) -> bytes:
        return picture.digest + repr(settings).encode()

    def __call__(self, picture: Any, settings: Any) -> dict[str, torch.Tensor]:
        name = picture.image.getpixel((0, 0))[0]
        self.calls.append(name)
        if name in self.gates:
            assert self.gates[name].wait(60)
        return {"pixel_values": torch.full((SIZE // 4,), float(name))}


def image(name: int) -> np.ndarray:
    return np.full((2, 2, 3), name, np.uint8)


def until(reached: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def layout_of(inputs: Any) -> ImageLayout:
    return ImageLayout(1 + int(inputs["pixel_values"][0]))


class Made(MediaPreprocessor):
    """A preprocessor with all that it needs, and room for the pixels of `images` before it stops to begin jobs."""

    def __init__(self, workers: int = 1, images: int = 100, layout: Any = layout_of, **more: Any) -> None:
        self.features: set[bytes] = set()
        config = MediaConfig(workers=workers, cache_bytes=images * SIZE * 4)
        super().__init__(config, Processor(), layout, lambda digest: digest in self.features, 32, **more)

    def collect(self, count: int = 1) -> list[Any]:
        """The next `count` results, or fewer if nothing more comes."""
        found: list[Any] = []
        deadline = time.monotonic() + 60
        while len(found) < count and time.monotonic() < deadline:
            found += self.done(1.0)
            if not self._busy and not self._finished and not self._has_begun():
                return found
        return found

    def _has_begun(self) -> bool:
        self._begin()
        return self._busy > 0


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    """What is let go of is let go of at once."""
    gc.disable()
    yield
    gc.enable()
