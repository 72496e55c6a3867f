"""Small clips, and files of them made with PyAV."""

from __future__ import annotations

import io
from typing import Any

import numpy as np


def clip(seed: int, frames: int, height: int = 40, width: int = 56) -> np.ndarray:
    """[frames, height, width, 3] uint8: blocks of colour, each frame another, which survive compression."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (frames, -(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    return small.repeat(8, 1).repeat(8, 2)[:, :height, :width]


def encoded(
    video: np.ndarray, form: str = "matroska", codec: str = "ffv1", rate: int = 10, pixels: str = "bgr0", **options: Any
) -> bytes:
    """A file of these frames; ffv1 loses nothing."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate, options={name: str(value) for name, value in options.items()})
        stream.width, stream.height, stream.pix_fmt = video.shape[2], video.shape[1], pixels
        for frame in video:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def compressed(video: np.ndarray, **options: Any) -> bytes:
    """An MP4 of them, as people have it: with few key frames, and frames that are not stored in order."""
    return encoded(video, "mp4", "libx264", pixels="yuv420p", **{"g": 12, "bf": 2, "crf": 1, **options})
