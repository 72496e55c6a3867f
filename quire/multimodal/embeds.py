"""Features of images, and embeddings of whole prompts, that callers have computed themselves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quire.multimodal.saved_tensor import read_tensor
from quire.types import MediaLayout, PlaceholderRange

# Rows of a prompt that have one digest: prompts share blocks as far as such parts are equal.
RANGE_ROWS = 128


def is_embeds(source: Any) -> bool:
    """Whether an image is given as features: {"image_embeds": tensor, "image_grid_thw": ...}."""
    return isinstance(source, Mapping) and "image_embeds" in source


def checked_features(tensor: Any, width: int, room: int | None) -> torch.Tensor:
    """A copy of one image's features [tokens, width], tokens <= room. Raises ValueError for what is no such thing."""
    rows = _check_rows("image_embeds", tensor, width, room)
    return _finite("image_embeds", rows.detach().to("cpu", copy=True).contiguous())


def layout_of_features(
    count: int,
    grid: Any,
    given_layout: Callable[[int], MediaLayout],
    layout_of: Callable[[Mapping[str, torch.Tensor]], MediaLayout],
) -> MediaLayout:
    """What so many features of an image take in a prompt, whose grid may be told: image_grid_thw. Raises ValueError.

    given_layout, layout_of: the model's.
    """
    layout = given_layout(count) if grid is None else _layout_of_grid(grid, layout_of)
    if layout.features != count:
        asked = "an image of this model" if grid is None else f"image_grid_thw={grid}"
        raise ValueError(f"{asked} asks for {layout.features} rows of image_embeds, not {count}")
    return layout


def _layout_of_grid(grid: Any, layout_of: Callable[[Mapping[str, torch.Tensor]], MediaLayout]) -> MediaLayout:
    table = torch.as_tensor(grid)
    if table.numel() != 3 or table.is_floating_point():
        raise ValueError(f"image_grid_thw={grid}: must be three whole numbers")
    try:
        return layout_of({"image_grid_thw": table.reshape(1, 3)})
    except KeyError:
        raise ValueError("this model's image_embeds take no image_grid_thw") from None


def _check_rows(name: str, tensor: Any, width: int, room: int | None) -> torch.Tensor:
    wanted = f"{name} must be a dense float tensor [tokens, {width}]"
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided or not tensor.is_floating_point():
        kind = f"{tensor.dtype}, {tensor.layout}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"{wanted}, not {kind}")
    if tensor.dim() != 2 or tensor.shape[0] < 1 or tensor.shape[1] != width:
        raise ValueError(f"{wanted}, not {list(tensor.shape)}")
    if room is not None and len(tensor) > room:
        raise ValueError(f"{name} has {len(tensor)} rows, and max_model_len leaves room for {room}")
    return tensor


def _finite(name: str, rows: torch.Tensor) -> torch.Tensor:
    if not bool(rows.isfinite().all()):
        raise ValueError(
            f"{name} has values that are infinite or no numbers in {str(rows.dtype).removeprefix('torch.')}"
        )
    return rows


@dataclass(frozen=True, slots=True)
class RowsSpec:
    """What embeddings of prompts must be. width: numbers of a row. dtype: the model's. most_rows: of a prompt."""

    width: int
    dtype: torch.dtype
    most_rows: int


@dataclass(frozen=True, slots=True)
class EmbeddedRows:
    """Rows of a prompt, in the model's dtype, in memory of their own. ranges: where which of them stand."""

    rows: torch.Tensor
    ranges: tuple[PlaceholderRange, ...]

    def of(self, item: PlaceholderRange) -> torch.Tensor:
        """A range's rows."""
        return self.rows[item.offset : item.end]


def open_rows(source: Any, spec: RowsSpec) -> torch.Tensor:
    """A prompt's `prompt_embeds`, whose shape is right and whose numbers were not looked at yet.

    source: a tensor [tokens, width] or [1, tokens, width], or, as HTTP has it, base64 of what torch.save writes of one.
    Raises ValueError.
    """
    if isinstance(source, str):
        try:
            source = read_tensor(source, spec.most_rows * spec.width)
        except ValueError as error:
            raise ValueError(f"prompt_embeds {error}") from None
    if isinstance(source, torch.Tensor) and source.layout is torch.strided and source.dim() == 3 and len(source) == 1:
        source = source[0]
    return _check_rows("prompt_embeds", source, spec.width, None)


def read_rows(opened: torch.Tensor, dtype: torch.dtype) -> EmbeddedRows:
    """The rows in the model's dtype, with digests. Raises ValueError for numbers that are none there."""
    rows = opened.detach().to("cpu", dtype, copy=True).contiguous()
    return EmbeddedRows(_finite("prompt_embeds", rows), tuple(_ranges(rows)))


def _ranges(rows: torch.Tensor) -> Sequence[PlaceholderRange]:
    """Digests are of the rows as the model takes them: equal ones, whatever they were given as, are one."""
    head = repr(("prompt_embeds", str(rows.dtype), rows.shape[1])).encode()
    found = []
    for first in range(0, len(rows), RANGE_ROWS):
        part = rows[first : first + RANGE_ROWS]
        digest = hashlib.sha256(head + part.view(torch.uint8).numpy().tobytes()).digest()
        found.append(PlaceholderRange(digest, first, len(part)))
    return found
