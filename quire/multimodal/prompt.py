"""A prompt's images as callers give them, and its token ids with placeholders in them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.errors import RequestError
from quire.multimodal.embeds import is_embeds
from quire.multimodal.preprocessor import ProcessedImage
from quire.multimodal.sources import MediaSource, as_several
from quire.multimodal.uuids import NamedMedia
from quire.types import MEDIA_KINDS, MediaKind, MediaLayout, PlaceholderRange

_OTHERS: tuple[MediaKind, ...] = ("video", "audio")
_KEYS = {"image", "image_embeds"}
_NOTHING = -1  # no token's id
# What a text must begin with to be a URL.
_URL = re.compile(r"(?:data|file|https?):", re.IGNORECASE)


def read_media(data: Any, limits: Mapping[str, int], kinds: Collection[MediaKind]) -> list[Any]:
    """The sources in a prompt's `multi_modal_data`, as `MediaPreprocessor.submit` takes them: images first.

    data: `read_images`', and {"video": one or a list of them, "audio": the same}. limits: how many of each kind.
    kinds: that the model takes. Raises RequestError.
    """
    if not isinstance(data, Mapping):
        return read_images(data, limits["image"])
    sources = read_images({name: given for name, given in data.items() if name not in _OTHERS}, limits["image"])
    if sources:
        _check_taken("image", kinds)
    for kind in _OTHERS:
        given = data.get(kind)
        own = [] if given is None else as_several(kind, given)
        if own:
            _check_taken(kind, kinds)
        if len(own) > limits.get(kind, 0):
            raise RequestError(
                f"the prompt has {len(own)} of {kind}, and {limits.get(kind, 0)} are allowed: use fewer, or raise "
                "limit_mm_per_prompt"
            )
        sources += [_source(kind, one, place) for place, one in enumerate(own)]
    return sources


def _check_taken(kind: MediaKind, kinds: Collection[MediaKind]) -> None:
    if kind not in kinds:
        raise RequestError(f"multi_modal_data has {kind!r}, and this model takes {', '.join(sorted(kinds))}")


def _source(kind: MediaKind, given: Any, place: int) -> Any:
    """One video or sound, under its uuid where it has one."""
    if not isinstance(given, NamedMedia):
        return MediaSource(kind, _located(given), place)
    return given if given.source is None else replace(given, source=MediaSource(kind, _located(given.source), place))


def _located(source: Any) -> Any:
    """A text that is no URL is a path: only programs can give one, as messages are checked for URLs."""
    return Path(source) if isinstance(source, str) and not _URL.match(source) else source


def read_images(data: Any, most: int) -> list[Any]:
    """The sources in a prompt's `multi_modal_data`, in their order; what is in them is not looked at yet.

    data: {"image": one image or a list of them}, or {"image_embeds": features [tokens, width], several of those as a
    list or as [images, tokens, width], or vLLM's {"image_embeds": ..., "image_grid_thw": [images, 3]}}. Among other
    images, one may be {"image_embeds": ...}. Raises RequestError.
    """
    if data is None or data == {}:
        return []
    if not isinstance(data, Mapping) or set(data) - _KEYS or len(data) > 1:
        raise RequestError(
            "multi_modal_data takes {'image': one image or a list} or {'image_embeds': features}, not "
            + (f"the keys {sorted(map(str, data))}" if isinstance(data, Mapping) else type(data).__name__)
        )
    sources = _as_list(data["image"]) if "image" in data else _as_features(data.get("image_embeds"))
    if len(sources) > most:
        raise RequestError(
            f"the prompt has {len(sources)} images, and {most} are allowed: use fewer, or raise limit_mm_per_prompt"
        )
    return sources


def _as_list(images: Any) -> list[Any]:
    if images is None:
        return []
    if is_embeds(images):
        return _as_features(images)
    sources = list(images) if isinstance(images, (list, tuple)) else [images]
    # As in vLLM, a float tensor among images is one's features, or with three dimensions those of several.
    found: list[Any] = []
    for one in sources:
        features = list(one) if isinstance(one, torch.Tensor) and one.dim() == 3 else [one]
        found += [{"image_embeds": each} if isinstance(each, torch.Tensor) else each for each in features]
    return found


def _as_features(given: Any) -> list[Any]:
    if given is None:
        return []
    if isinstance(given, Mapping):
        return _split_by_grid(given)
    if isinstance(given, torch.Tensor) and given.dim() == 3:
        given = list(given)
    return [one if is_embeds(one) else {"image_embeds": one} for one in (given if isinstance(given, list) else [given])]


def _split_by_grid(given: Mapping[str, Any]) -> list[Any]:
    """One image with its grid, or several whose features lie end to end, as many as their grids ask for."""
    embeds, grids = given.get("image_embeds"), given.get("image_grid_thw")
    if set(given) - {"image_embeds", "image_grid_thw"}:
        raise RequestError(f"image_embeds takes 'image_embeds' and 'image_grid_thw', not {sorted(map(str, given))}")
    if grids is None:
        return _as_features(embeds)
    try:
        table = torch.as_tensor(grids).reshape(-1, 3)
        if table.is_floating_point():
            raise ValueError("its numbers must be whole")
        areas = [int(row.prod()) for row in table]
        if not isinstance(embeds, torch.Tensor) or embeds.dim() != 2 or len(table) == 1:
            parts = list(embeds) if isinstance(embeds, (list, tuple)) else [embeds]
        else:
            merged = sum(areas) // len(embeds)
            parts = list(embeds.split([area // merged for area in areas]))
        pairs = list(zip(parts, table.tolist(), strict=True))
    except (TypeError, ValueError, RuntimeError, ZeroDivisionError) as error:
        raise RequestError(
            f"image_embeds: image_grid_thw must be [images, 3], one row for each image: {error}"
        ) from None
    return [{"image_embeds": part, "image_grid_thw": grid} for part, grid in pairs]


def kind_of(source: Any) -> MediaKind:
    """Of what kind one of a prompt's sources is: an image, but for what says otherwise."""
    kind: MediaKind = getattr(source, "kind", "image")
    return kind if kind in MEDIA_KINDS else "image"


def expand(
    ids: Sequence[int], media: Sequence[ProcessedImage], markers: Mapping[MediaKind, int]
) -> tuple[list[int], list[tuple[ProcessedImage, PlaceholderRange]]]:
    """Put the placeholders of images, videos and sounds in the places of their markers.

    ids: with one token `markers[kind]` for each, or, as Hugging Face's processors leave them, with all placeholders of
    a kind in their places already. media: those of one kind in their order. Returns the prompt's ids, and what lies
    where in it, in the prompt's order. Raises RequestError for any other number.
    """
    expanded: list[int] = []
    placed: list[tuple[ProcessedImage, PlaceholderRange]] = []
    last = 0
    left, found = _taken_out(ids, media, markers)
    known = {one.kind for _, _, one in found}
    found += _places(left, [one for one in media if one.kind not in known], markers)
    for start, end, one in sorted(found, key=lambda place: place[0]):
        if start < last:
            raise RequestError("the prompt's placeholders lie in each other: there must be one marker for each image")
        expanded += ids[last:start]
        placed.append((one, PlaceholderRange.of(one.layout, one.digest, len(expanded), one.kind)))
        expanded += _placeholders(one.layout, markers[one.kind])
        last = end
    return expanded + list(ids[last:]), placed


def _taken_out(
    ids: Sequence[int], media: Sequence[ProcessedImage], markers: Mapping[MediaKind, int]
) -> tuple[Sequence[int], list[tuple[int, int, ProcessedImage]]]:
    """Those of kinds whose placeholders are there, and have nothing of their own marker in them: what is replaced by
    each, as of `_places`; and the ids with nothing in these places."""
    found: list[tuple[int, int, ProcessedImage]] = []
    left = list(ids)
    for kind, marker in markers.items():
        own = [one for one in media if one.kind == kind]
        if not own or marker in left or any(marker in _placeholders(one.layout, marker) for one in own):
            continue
        at = 0
        for one in own:
            tokens = _placeholders(one.layout, marker)
            start = _find(left, tokens, at)
            if start is None:
                raise _mismatch(0, len(own), kind)
            at = start + len(tokens)
            left[start:at] = [_NOTHING] * len(tokens)
            found.append((start, at, one))
            if any(_placeholders(other.layout, markers[other.kind]) == tokens for other in media if other.kind != kind):
                raise RequestError(f"a {kind} reads as one of another kind here: give a marker for each in its place")
    for kind, marker in markers.items():  # what would be left of a placeholder for nothing
        if found and marker in left and not any(one.kind == kind for one in media):
            raise _mismatch(left.count(marker), 0, kind)
    return left, found


def _find(ids: list[int], wanted: list[int], begin: int) -> int | None:
    """Where `wanted` stands in ids first, from `begin` on."""
    size, sought = np.dtype(np.int32).itemsize, np.array(wanted, np.int32).tobytes()
    data = np.array(ids, np.int32).tobytes()
    at = data.find(sought, begin * size)
    while at >= 0 and at % size:
        at = data.find(sought, at + 1)
    return None if at < 0 else at // size


def _places(
    ids: Sequence[int], media: Sequence[ProcessedImage], markers: Mapping[MediaKind, int]
) -> Iterator[tuple[int, int, ProcessedImage]]:
    """What is replaced by each one's placeholders: from its first token to the one behind its last."""
    for kind, marker in markers.items():
        own = [one for one in media if one.kind == kind]
        if not own:
            continue
        places = [place for place, token in enumerate(ids) if token == marker]
        placeholders = [_placeholders(one.layout, marker) for one in own]
        starts = _starts(ids, places, placeholders, marker)
        if starts is not None:
            ends = [start + len(tokens) for start, tokens in zip(starts, placeholders, strict=True)]
        elif len(places) == len(own):
            starts, ends = places, [place + 1 for place in places]
        else:
            raise _mismatch(len(places), len(own), kind)
        yield from zip(starts, ends, own, strict=True)


def _placeholders(layout: MediaLayout, marker: int) -> list[int]:
    return [marker] * layout.tokens if layout.ids is None else list(layout.ids)


def _starts(
    ids: Sequence[int], places: Sequence[int], placeholders: Sequence[list[int]], marker: int
) -> list[int] | None:
    """Where the placeholders of each begin in ids that have them already, and no other markers; None: they do not."""
    starts, used = [], 0
    for own in placeholders:
        if used >= len(places) or marker not in own:
            return None
        start = places[used] - own.index(marker)
        if start < 0 or list(ids[start : start + len(own)]) != own:
            return None
        starts.append(start)
        used += own.count(marker)
    return starts if used == len(places) else None


def check_count(markers: int, media: int, kind: MediaKind = "image") -> None:
    """Raise RequestError unless there is a marker for each image, or for each of another kind."""
    if markers != media:
        raise _mismatch(markers, media, kind)


def _mismatch(markers: int, media: int, kind: MediaKind) -> RequestError:
    return RequestError(
        f"the prompt has {markers} {kind} {'marker' if markers == 1 else 'markers'} and {media} "
        f"{kind if media == 1 else kind + 's'}: there must be one marker for each {kind}"
    )
