"""From what a caller calls an image to RGB pixels and their digest.

What an image costs is known before anything of it is decoded: bytes by their number, pixels by the header, passes over
them by the file's structure (formats.py); decoding has a limit of CPU time besides. Modes are treated as transformers'
`load_image` and `convert_rgb` do: EXIF orientation is applied, an animation gives its first frame, transparency is
dropped; what would lose its meaning on the way to 8 bits a channel is refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageFile, ImageOps, UnidentifiedImageError

from quire.config import MediaConfig
from quire.errors import RequestError
from quire.multimodal.fetch import check_length, read_file, read_http
from quire.multimodal.formats import FORMATS, read_encoded

# Deeper than 8 bits a channel: to make 8 of them is to choose a range, which is the caller's to choose.
_DEEP = re.compile(r"I|F|I;.*")
_CHANNELS = (1, 3, 4)
# EXIF's orientations -> what undoes them.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_JPEG_READ_BYTES = 4096  # bytes that a decoder gets of a JPEG at once: a few of them may mean a pass over all pixels
_HASHED_ROWS = 64  # that are hashed at once
# A caller's image may be in several requests, and Pillow's are decoded when they are first used, by one thread only.
_DECODING = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One image as models take it.

    image: mode RGB. digest: SHA-256 of its size and pixels, the same for the same picture in any form.
    """

    image: Image.Image
    digest: bytes


class AbandonedError(Exception):
    """Nobody waits for the image any more."""


class Watch:
    """Lets work on one image end early: after so much CPU time of its thread, or when `gone`."""

    def __init__(self, seconds: float, gone: Callable[[], bool] = lambda: False) -> None:
        self._seconds = seconds
        self._gone = gone
        self._begun = time.thread_time()

    def restart(self) -> None:
        """From here on it is over this thread's work."""
        self._begun = time.thread_time()

    def check(self) -> None:
        """Raises RequestError or AbandonedError."""
        if self._gone():
            raise AbandonedError
        if time.thread_time() - self._begun > self._seconds:
            raise RequestError(
                f"decoding it takes more than {self._seconds:g} s of CPU time: save it anew, or smaller, or raise "
                "max_image_seconds"
            )


class _Watched(io.BytesIO):
    """A file that is read only as long as it may be."""

    def __init__(self, data: bytes, watch: Watch) -> None:
        super().__init__(data)
        self._watch = watch

    def read(self, size: int | None = -1, /) -> bytes:
        self._watch.check()
        return super().read(size)


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """An image whose cost is known and within the limits, and of which nothing is decoded yet.

    work: pixels that are gone over, all passes together. own: nobody else has the image. orientation: EXIF's, 1 to 8.
    watch: over its decoding.
    """

    image: Image.Image
    work: int
    own: bool
    orientation: int
    watch: Watch

    @property
    def size(self) -> tuple[int, int]:
        """(height, width) of the picture that it will be."""
        width, height = self.image.size
        return (width, height) if self.orientation >= 5 else (height, width)


def read_source(
    source: Any, config: MediaConfig, item: int = 0, gone: Callable[[], bool] = lambda: False, kind: str = "image"
) -> Any:
    """A URL's bytes; any other source as it is. What is prepared again later must not be fetched again.

    kind: of media, as data: URLs name it.

    Raises RequestError, and AbandonedError once `gone`.
    """
    if not isinstance(source, str):
        return source
    try:
        return read_url(source, config, gone, kind)
    except RequestError as error:
        raise RequestError(f"image {item}: {error}") from None


def load_picture(source: Any, config: MediaConfig, item: int = 0) -> Picture:
    """Return the picture that `source` holds: `open_picture` and `decode` in one."""
    watch = Watch(config.max_image_seconds)
    return decode(open_picture(source, config, item, watch), item)


def open_picture(source: Any, config: MediaConfig, item: int, watch: Watch) -> Opened:
    """Look at what `source` holds, as far as its header.

    source: a PIL image, a uint8 array [height, width] or [height, width, 1, 3 or 4], the bytes of a file in one of
        FORMATS, or a URL: data:, file: (under config.allowed_local_media_path), http: or https: (of
        config.allowed_media_domains).
    item: the image's place among the prompt's, for messages.
    watch: over the work on it, from here on and in `decode`.

    Raises RequestError for whatever is wrong with it, AbandonedError when the watch says so, and nothing else.
    """
    with _named(item):
        opened = _opened(source, config, watch)
        _check_size(opened.image.size, config)
        return opened


def decode(opened: Opened, item: int) -> Picture:
    """The picture that was opened. Raises as `open_picture` does."""
    with _named(item):
        opened.watch.restart()
        if opened.own:
            return _picture(opened)
        with _DECODING:
            return _picture(opened)


@contextmanager
def _named(item: int) -> Iterator[None]:
    try:
        yield
    except AbandonedError:
        raise
    except RequestError as error:
        raise RequestError(f"image {item}: {error}") from None
    except MemoryError:
        raise RequestError(f"image {item}: there is not enough memory to decode it") from None
    # Pillow's decoders raise whatever their inner workings do, on damaged files.
    except Exception as error:
        raise RequestError(f"image {item}: it cannot be decoded: {described(error)}") from None


def _opened(source: Any, config: MediaConfig, watch: Watch) -> Opened:
    if isinstance(source, Image.Image):
        with _DECODING:
            said = source.getexif().get(ExifTags.Base.Orientation, 1)
        return Opened(source, source.width * source.height, False, said if said in _TURNS else 1, watch)
    if isinstance(source, np.ndarray):
        image = _from_array(source, config)
        return Opened(image, image.width * image.height, True, 1, watch)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _open(bytes(source), config, watch)
    if isinstance(source, str):
        return _open(read_url(source, config, lambda: False), config, watch)
    raise RequestError(
        f"expected a PIL image, a numpy array, bytes or a URL, got {type(source).__name__} (a file is opened by "
        "PIL.Image.open, or given as its bytes)"
    )


def _from_array(array: np.ndarray, config: MediaConfig) -> Image.Image:
    shape = array.shape
    if array.dtype != np.uint8 or array.ndim not in (2, 3) or (array.ndim == 3 and shape[2] not in _CHANNELS):
        raise RequestError(
            f"an array must be uint8 of shape [height, width] or [height, width, 1, 3 or 4], got {array.dtype} "
            f"{list(shape)}"
        )
    _check_size((shape[1], shape[0]), config)
    return Image.fromarray(np.ascontiguousarray(array.squeeze(2) if shape[2:] == (1,) else array))


def read_url(url: str, config: MediaConfig, gone: Callable[[], bool], kind: str = "image") -> bytes:
    """The bytes behind a URL of an image, a video or a sound. Raises RequestError, and AbandonedError once `gone`."""
    scheme = url[:10].split(":", 1)[0].lower()
    if scheme == "data":
        return _read_data(url, config, kind)
    if scheme == "file":
        return read_file(url, config, kind)
    if scheme in ("http", "https"):
        return read_http(url, config, partial(_stop_if, gone), kind)
    raise RequestError("a text must be a URL that begins with data:, file:, http: or https:")


def _stop_if(gone: Callable[[], bool]) -> None:
    if gone():
        raise AbandonedError


def _read_data(url: str, config: MediaConfig, kind: str = "image") -> bytes:
    """The bytes in a data: URL (RFC 2397), which must be base64."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().startswith(f"data:{kind}/") or not head.lower().endswith(";base64"):
        example = {"image": "png", "video": "mp4", "audio": "wav"}[kind]
        raise RequestError(f"a data: URL must look like data:{kind}/{example};base64,...")
    check_length(len(body) * 3 // 4 - 2, config, kind)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("the data: URL does not hold valid base64") from None


def _open(data: bytes, config: MediaConfig, watch: Watch) -> Opened:
    """Reads the header only; pixels are decoded after their number has been checked."""
    check_length(len(data), config)
    if not data:
        raise RequestError("it has no bytes")
    encoded = read_encoded(data, config.max_image_pixels)
    try:
        image = Image.open(_Watched(encoded.data, watch), formats=(encoded.kind,))
    except UnidentifiedImageError:
        raise RequestError(f"it is not an image in one of the formats {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise RequestError(f"it declares more than {config.max_image_pixels:,} pixels; scale it down") from None
    if encoded.kind == "JPEG":
        image.decodermaxblock = len(encoded.data) if encoded.whole else _JPEG_READ_BYTES
    return Opened(image, image.width * image.height * encoded.passes, True, encoded.orientation, watch)


def _check_size(size: tuple[int, int], config: MediaConfig) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise RequestError(f"it has no pixels ({width} x {height})")
    if width * height > config.max_image_pixels:
        raise RequestError(
            f"it has {width} x {height} pixels, and {config.max_image_pixels:,} in all are allowed: scale it down, or "
            "raise max_image_pixels"
        )


def _picture(opened: Opened) -> Picture:
    image = opened.image
    if _DEEP.fullmatch(image.mode):
        raise RequestError(f"its mode is {image.mode!r}, more than 8 bits a channel: convert it to 'L' or 'RGB' first")
    image.load()
    if not opened.own:
        image = ImageOps.exif_transpose(image)  # a copy, whatever it says
    elif opened.orientation in _TURNS:
        image = image.transpose(_TURNS[opened.orientation])
    rgb = image if image.mode == "RGB" and not isinstance(image, ImageFile.ImageFile) else image.convert("RGB")
    digest = hashlib.sha256(struct.pack("<3sII", b"RGB", *rgb.size))
    for top in range(0, rgb.height, _HASHED_ROWS):  # all at once would be one more copy of them
        digest.update(rgb.crop((0, top, rgb.width, min(top + _HASHED_ROWS, rgb.height))).tobytes())
    return Picture(rgb, digest.digest())


def described(error: Exception) -> str:
    """The error's own words, without what Python says of objects: addresses are nobody's business."""
    words = re.sub(r"<[^>]*>?|0x[0-9a-fA-F]+", "it", " ".join(str(error).split()))[:200]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
