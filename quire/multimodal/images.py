"""From what a caller calls an image to RGB pixels and their digest.

What an image costs is known before anything of it is decoded: bytes by their number, pixels by the header. Modes are
treated as transformers' `load_image` and `convert_rgb` do: EXIF orientation is applied, an animation gives its first
frame, transparency is dropped; what would lose its meaning on the way to 8 bits a channel is refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import re
import struct
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from quire.config import MediaConfig
from quire.errors import RequestError
from quire.multimodal.fetch import read_file, read_http

# Pillow's decoders that are tried; it has dozens, some of them old and little used.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
# Deeper than 8 bits a channel: to make 8 of them is to choose a range, which is the caller's to choose.
_DEEP = re.compile(r"I|F|I;.*")
_CHANNELS = (1, 3, 4)
# A caller's image may be in several requests, and Pillow's are decoded when they are first used, by one thread only.
_DECODING = threading.Lock()


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """One image as models take it.

    image: mode RGB. digest: SHA-256 of its size and pixels, the same for the same picture in any form.
    """

    image: Image.Image
    digest: bytes


def read_source(source: Any, config: MediaConfig, item: int = 0) -> Any:
    """A URL's bytes; any other source as it is. What is prepared again later must not be fetched again."""
    if not isinstance(source, str):
        return source
    try:
        return _read_url(source, config)
    except RequestError as error:
        raise RequestError(f"image {item}: {error}") from None


def load_picture(source: Any, config: MediaConfig, item: int = 0) -> Picture:
    """Return the picture that `source` holds.

    source: a PIL image, a uint8 array [height, width] or [height, width, 1, 3 or 4], the bytes of a file in one of
        FORMATS, or a URL: data:, file: (under config.allowed_local_media_path), http: or https: (of
        config.allowed_media_domains).
    item: the image's place among the prompt's, for messages.

    Raises RequestError, and nothing else, for whatever is wrong with it.
    """
    try:
        image = _image(source, config)
        _check_size(image.size, config)
        if image is not source:
            return _picture(image)
        with _DECODING:
            return _picture(image)
    except RequestError as error:
        raise RequestError(f"image {item}: {error}") from None
    except MemoryError:
        raise RequestError(f"image {item}: there is not enough memory to decode it") from None
    # Pillow's decoders raise whatever their inner workings do, on damaged files.
    except Exception as error:
        raise RequestError(f"image {item}: it cannot be decoded: {described(error)}") from None


def _image(source: Any, config: MediaConfig) -> Image.Image:
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray):
        return _from_array(source, config)
    if isinstance(source, (bytes, bytearray, memoryview)):
        return _open(bytes(source), config)
    if isinstance(source, str):
        return _open(_read_url(source, config), config)
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


def _read_url(url: str, config: MediaConfig) -> bytes:
    scheme = url[:10].split(":", 1)[0].lower()
    if scheme == "data":
        return _read_data(url, config)
    if scheme == "file":
        return read_file(url, config)
    if scheme in ("http", "https"):
        return read_http(url, config)
    raise RequestError("a text must be a URL that begins with data:, file:, http: or https:")


def _read_data(url: str, config: MediaConfig) -> bytes:
    """The bytes in a data: URL (RFC 2397), which must be base64."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().startswith("data:image/") or not head.lower().endswith(";base64"):
        raise RequestError("a data: URL must look like data:image/png;base64,...")
    _check_bytes(len(body) * 3 // 4 - 2, config)
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise RequestError("the data: URL does not hold valid base64") from None


def _open(data: bytes, config: MediaConfig) -> Image.Image:
    """Reads the header only; pixels are decoded after their number has been checked."""
    _check_bytes(len(data), config)
    if not data:
        raise RequestError("it has no bytes")
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise RequestError(f"it is not an image in one of the formats {', '.join(FORMATS)}") from None
    except Image.DecompressionBombError:
        raise RequestError(f"it declares more than {config.max_image_pixels:,} pixels; scale it down") from None


def _check_bytes(count: int, config: MediaConfig) -> None:
    if count > config.max_image_bytes:
        raise RequestError(
            f"it has {count:,} bytes, and {config.max_image_bytes:,} are allowed: scale it down, or raise "
            "max_image_bytes"
        )


def _check_size(size: tuple[int, int], config: MediaConfig) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise RequestError(f"it has no pixels ({width} x {height})")
    if width * height > config.max_image_pixels:
        raise RequestError(
            f"it has {width} x {height} pixels, and {config.max_image_pixels:,} in all are allowed: scale it down, or "
            "raise max_image_pixels"
        )


def _picture(image: Image.Image) -> Picture:
    if _DEEP.fullmatch(image.mode):
        raise RequestError(f"its mode is {image.mode!r}, more than 8 bits a channel: convert it to 'L' or 'RGB' first")
    image.load()
    rgb = ImageOps.exif_transpose(image).convert("RGB")
    digest = hashlib.sha256(struct.pack("<3sII", b"RGB", *rgb.size))
    digest.update(rgb.tobytes())
    return Picture(rgb, digest.digest())


def described(error: Exception) -> str:
    """The error's own words, without what Python says of objects: addresses are nobody's business."""
    words = re.sub(r"<[^>]*>?|0x[0-9a-fA-F]+", "it", " ".join(str(error).split()))[:200]
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
