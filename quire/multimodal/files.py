"""Files of videos and sounds as callers give them, and messages that name what they are about."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.config import MediaConfig
from quire.errors import RequestError
from quire.multimodal.fetch import check_length
from quire.multimodal.images import AbandonedError, described, read_url
from quire.multimodal.sources import MediaSource


@contextmanager
def named(media: MediaSource) -> Iterator[None]:
    """Whatever is wrong with it is said of it."""
    try:
        yield
    except AbandonedError:
        raise
    except MemoryError:
        raise RequestError(f"{media.name}: there is not enough memory to decode it") from None
    except ValueError as error:  # which RequestErrors are
        raise RequestError(f"{media.name}: {error}") from None
    except Exception as error:  # whatever extreme sizes and settings lead to
        raise RequestError(f"{media.name}: it cannot be prepared: {described(error)}") from None


def read_file_of(media: MediaSource, config: MediaConfig, gone: Callable[[], bool], forms: str) -> bytes:
    """A file's bytes, be it given as those, as its path or as a URL.

    forms: what else may be given, for messages. Raises RequestError, and AbandonedError once `gone`.
    """
    given = media.source
    if isinstance(given, str):
        given = read_url(given, config, gone, media.kind)
    elif isinstance(given, os.PathLike):
        try:
            with open(given, "rb") as file:
                given = file.read(config.most_bytes(media.kind) + 1)
        except OSError as error:
            raise RequestError(f"the file cannot be read: {error.strerror or 'bad path'}") from None
    if not isinstance(given, (bytes, bytearray, memoryview)):
        raise RequestError(f"expected {forms}, bytes, a path or a URL, got {type(given).__name__}")
    check_length(len(given), config, media.kind)
    if not len(given):
        raise RequestError("it has no bytes")
    return bytes(given)
