"""A prompt's images as callers give them, and its token ids with placeholders in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quire.errors import RequestError
from quire.multimodal.embeds import is_embeds
from quire.multimodal.preprocessor import ProcessedImage
from quire.types import ImageLayout, PlaceholderRange

_KEYS = {"image", "image_embeds"}


def read_images(data: Any, most: int) -> list[Any]:
    """The sources in a prompt's `multi_modal_data`, in their order; what is in them is not looked at yet.

    data: {"image": one image or a list of them}, or {"image_embeds": features [tokens, width], several of those as a
    list or as [images, tokens, width], or vLLM's {"image_embeds": ..., "image_grid_thw": [images, 3]}}. Among other
    images, one may be {"image_embeds": ...}. Raises RequestError.
    """
    if data is None:
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


def expand(
    ids: Sequence[int], images: Sequence[ProcessedImage], marker: int
) -> tuple[list[int], list[PlaceholderRange]]:
    """Put each image's placeholders in the place of its marker.

    ids: with one token `marker` for each image, or, as Hugging Face's processors leave them, with all placeholders in
    their places already. Returns the prompt's ids and where each image lies in it. Raises RequestError for any other
    number.
    """
    places = [place for place, token in enumerate(ids) if token == marker]
    placeholders = [_placeholders(image.layout, marker) for image in images]
    if len(places) == len(images):
        expanded: list[int] = []
        items, last = [], 0
        for place, image, own in zip(places, images, placeholders, strict=True):
            expanded += ids[last:place]
            items.append(_item(image, len(expanded)))
            expanded += own
            last = place + 1
        return expanded + list(ids[last:]), items
    starts = _starts(ids, places, placeholders, marker)
    if starts is not None:
        return list(ids), [_item(image, start) for image, start in zip(images, starts, strict=True)]
    raise _mismatch(len(places), len(images))


def _placeholders(layout: ImageLayout, marker: int) -> list[int]:
    return [marker] * layout.tokens if layout.ids is None else list(layout.ids)


def _starts(
    ids: Sequence[int], places: Sequence[int], placeholders: Sequence[list[int]], marker: int
) -> list[int] | None:
    """Where each image's placeholders begin in ids that have them already, and no other markers; None: they do not."""
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


def check_count(markers: int, images: int) -> None:
    """Raise RequestError unless there is a marker for each image."""
    if markers != images:
        raise _mismatch(markers, images)


def _mismatch(markers: int, images: int) -> RequestError:
    return RequestError(
        f"the prompt has {markers} image {'marker' if markers == 1 else 'markers'} and {images} "
        f"{'image' if images == 1 else 'images'}: there must be one marker for each image"
    )


def _item(image: ProcessedImage, offset: int) -> PlaceholderRange:
    layout = image.layout
    return PlaceholderRange(image.digest, offset, layout.tokens, layout.grid, layout.mask)
