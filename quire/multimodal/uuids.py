"""Media that come again, named by a caller's uuid instead of being sent and looked at once more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from quire.errors import RequestError
from quire.multimodal.jobs import FetchedFile, ProcessedImage
from quire.multimodal.sources import as_several
from quire.types import MediaKind

_MOST_KNOWN = 16_384
_LONGEST = 256  # characters


@dataclass(frozen=True, slots=True, eq=False)
class NamedMedia:
    """One of a prompt's media, by its uuid. source: as without one; None: that which came with the uuid before."""

    uuid: str
    source: Any
    kind: MediaKind = "image"


def named(uuid: Any, source: Any, kind: MediaKind, where: str) -> Any:
    """A source by its uuid, if it has one. where: for messages. Raises RequestError."""
    if isinstance(source, NamedMedia):
        return source
    missing = source is None or getattr(source, "source", source) is None
    if uuid is None:
        if missing:
            raise RequestError(f"{where} is None: that takes a uuid, of which its contents are known")
        return source
    if not isinstance(uuid, str) or not 0 < len(uuid) <= _LONGEST:
        raise RequestError(f"{where}: its uuid must be a text of 1 to {_LONGEST} characters, not {str(uuid)[:40]!r}")
    return NamedMedia(uuid, None if missing else _own(source), kind)


def with_uuids(data: Any, uuids: Any) -> Any:
    """A prompt's `multi_modal_data` with the uuids of its `multi_modal_uuids`: {"image": [a text or None, ..]}, or a
    text for one. What is None there has a uuid. Raises RequestError."""
    if uuids is None:
        return data
    if not isinstance(uuids, Mapping) or not isinstance(data, Mapping | None):
        raise RequestError("multi_modal_uuids takes {'image': a list of texts, one for each image}, and so on by kinds")
    found = dict(data or {})
    for kind, given in uuids.items():
        names = list(given) if isinstance(given, (list, tuple)) else [given]
        media = found.get(kind)
        if media is None:
            media = [None] * len(names)
        several = list(media) if kind == "image" and isinstance(media, tuple) else as_several(kind, media)
        if len(several) != len(names):
            raise RequestError(
                f"multi_modal_uuids has {len(names)} for {str(kind)[:40]!r}, and multi_modal_data {len(several)}: give "
                "one for each, or None"
            )
        found[kind] = [
            named(name, one, kind, f"{str(kind)[:40]} {place}")
            for place, (name, one) in enumerate(zip(names, several, strict=True))
        ]
    return found


def _own(source: Any) -> Any:
    """What its caller can change no more: under its uuid it is what it was."""
    if isinstance(source, Image.Image):
        return source.copy()
    if isinstance(source, np.ndarray):
        return source.copy()
    if isinstance(source, torch.Tensor):
        return source.detach().clone()
    if isinstance(source, (list, tuple)):
        return type(source)(_own(one) for one in source)
    if isinstance(source, Mapping):
        return {name: _own(one) for name, one in source.items()}
    return source


def _size(source: Any) -> int:
    """Bytes that are kept of it, roughly."""
    if isinstance(source, Image.Image):
        return source.width * source.height * len(source.getbands())
    if isinstance(source, (np.ndarray, torch.Tensor)):
        return int(source.nbytes)
    if isinstance(source, (list, tuple)):
        return sum(_size(one) for one in source)
    if isinstance(source, Mapping):
        return sum(_size(one) for one in source.values())
    if hasattr(source, "source"):
        return _size(source.source)
    return len(source) if isinstance(source, (str, bytes, FetchedFile)) else 0


@dataclass(slots=True, eq=False)
class _Known:
    """What came with a uuid. made: what it became, by the settings and adapters that it was made with."""

    source: Any
    size: int
    made: dict[Hashable, ProcessedImage] = field(default_factory=dict)


class MediaByUuid:
    """What came with which uuid, within `capacity` bytes of files and pixels: the least recently used goes first.

    A uuid is known to requests of one salt. Features are found by what they are made of, as ever: uuids say which
    contents are meant, and nothing else. Contents that come with a known uuid take its place. All methods are the
    engine's thread's.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: OrderedDict[Hashable, _Known] = OrderedDict()  # the least recently used first
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def resolve(self, sources: Sequence[Any], salt: str | None, made_with: Hashable) -> list[Any]:
        """Sources without uuids: contents, or what these became, where that is known. Raises RequestError."""
        found = []
        for place, one in enumerate(sources):
            if not isinstance(one, NamedMedia):
                found.append(one)
                continue
            key = one.kind, one.uuid, salt
            if one.source is not None:
                self._keep(key, _Known(one.source, _size(one.source)))
                found.append(one.source)
                continue
            known = self._known.get(key)
            if known is None:
                number = sum(getattr(other, "kind", "image") == one.kind for other in sources[:place])
                raise RequestError(
                    f"{one.kind} {number}: nothing is known of the uuid {one.uuid!r}, or not any more: send it with "
                    "its contents"
                )
            self._known.move_to_end(key)
            found.append(known.made.get(made_with, known.source))
        return found

    def learn(
        self, sources: Sequence[Any], salt: str | None, made_with: Hashable, made: Sequence[ProcessedImage] | None
    ) -> None:
        """What the media of a request became; made: None where it came to nothing."""
        for place, one in enumerate(sources):
            if not isinstance(one, NamedMedia):
                continue
            key = one.kind, one.uuid, salt
            known = self._known.get(key)
            if known is None or (one.source is not None and known.source is not one.source):
                continue  # forgotten, or other contents have come
            if made is None:
                if one.source is not None:
                    self._forget(key)
                continue
            result = made[place]
            if one.source is None and result.source is not known.source:
                continue  # it was told what the uuid meant before
            entry = known if known.source is result.source else _Known(result.source, _size(result.source))
            entry.made = {**known.made, made_with: replace(result, pixels=None)}
            self._keep(key, entry)

    def _keep(self, key: Hashable, known: _Known) -> None:
        self._forget(key)
        self._known[key] = known
        self.bytes += known.size
        while self.bytes > self._capacity or len(self._known) > _MOST_KNOWN:
            self._forget(next(iter(self._known)))

    def _forget(self, key: Hashable) -> None:
        known = self._known.pop(key, None)
        if known is not None:
            self.bytes -= known.size
