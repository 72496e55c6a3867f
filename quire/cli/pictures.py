"""Pictures that are named by a file or a URL."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from quire.errors import QuireError

_WEB = ("http://", "https://", "data:")


def read_image(source: str) -> str | bytes:
    """A URL of the web, and a data: URL, as they are; of a file, its bytes. Raises QuireError."""
    if source.lower().startswith(_WEB):
        return source
    path = url2pathname(urlsplit(source).path) if source.lower().startswith("file:") else source
    try:
        return Path(path).expanduser().read_bytes()
    except (OSError, RuntimeError, ValueError) as error:  # "~nobody", and a name with a NUL in it
        raise QuireError(f"{source[:200]}: {getattr(error, 'strerror', None) or error}") from None


def picture_part(source: str, data: str | bytes) -> dict[str, Any]:
    """The part of a message that has this picture, in OpenAI's form: by its URL, or its bytes in a data: URL.

    Raises QuireError for bytes that are no picture.
    """
    url = data if isinstance(data, str) else f"data:{_kind(source, data)};base64,{base64.b64encode(data).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _kind(source: str, data: bytes) -> str:
    """As in Content-Type, by the file's first bytes."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.get_format_mimetype() or "image/png"
    except (UnidentifiedImageError, OSError, ValueError, Image.DecompressionBombError):
        raise QuireError(f"{source[:200]} is no picture that can be read.") from None
