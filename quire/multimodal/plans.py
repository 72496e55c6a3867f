"""What an image processor will make of an image, told of the image's size before any work is done on it.

`KINDS` has what is known of processors by their classes; what other processors do is told by their settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.errors import RequestError
from quire.multimodal.processor_settings import check_counts_pixels

_FLOATS = 4  # times the memory of a pixel that processing takes where it keeps the whole image, as floats
_FAR = 1 << 60
_LARGEST_EDGE = 4096  # of what Idefics3's processor makes of an image before it cuts tiles


@dataclass(frozen=True, slots=True)
class Plan:
    """What an image will be made into.

    final: (height, width) of it, of each of its tiles, or of all its tiles together where that tells how many there
    are. pixels: what that takes, in decoded pixels' memory. floats: how many times the allowed pixels that may be.
    """

    final: tuple[int, int]
    pixels: int
    floats: int = 1


@dataclass(frozen=True, slots=True)
class ProcessorKind:
    """A class of image processors.

    plan: of an image's height and width and the settings. takes: of the settings that a caller may set, those that it
    heeds; None: all that it has. sizes: the forms that its `size` may have, beside {height, width}. counts_pixels:
    whether the edges in `size` are numbers of pixels and not lengths. always: arguments of every call. lists: what it
    returns as lists that the model needs, as tensors.
    """

    plan: Callable[[int, int, Mapping[str, Any]], Plan]
    takes: frozenset[str] | None = None
    sizes: tuple[frozenset[str], ...] = (frozenset({"shortest_edge"}),)
    counts_pixels: bool = False
    always: Mapping[str, Any] = field(default_factory=dict)
    lists: tuple[str, ...] = ()


def kind_of(processor: Any, known: Mapping[str, Any]) -> ProcessorKind:
    """known: the processor's own settings. A plug-in's class may say it itself, as its `kind`."""
    own = getattr(type(processor), "kind", None)
    if isinstance(own, ProcessorKind):
        return own
    name = type(processor).__name__.removesuffix("Pil").removesuffix("Fast")
    if name in KINDS:
        return KINDS[name]
    if hasattr(processor, "merge_size"):
        return _PATCHES
    if known.get("image_grid_pinpoints"):
        return _TILES
    return _SQUARED if hasattr(processor, "pad_to_square") else _SCALED


def plan_scaled(height: int, width: int, values: Mapping[str, Any]) -> Plan:
    scaled = _scaled(height, width, values)
    return Plan(_cropped(scaled, values), scaled[0] * scaled[1])


def plan_squared(height: int, width: int, values: Mapping[str, Any]) -> Plan:
    """LLaVA's: padded to a square before all else, where it is asked to."""
    if not values.get("do_pad"):
        return plan_scaled(height, width, values)
    side = max(height, width)
    plan = plan_scaled(side, side, values)
    return Plan(plan.final, max(plan.pixels, side * side))


def plan_tiles(height: int, width: int, values: Mapping[str, Any]) -> Plan:
    """LLaVA-NeXT's: each tile, and the image as a whole, is scaled and cropped once more."""
    from transformers.image_processing_utils import select_best_resolution

    crop, size = values.get("crop_size") or {}, _size(values, "size")
    side = dict(_size(values, "crop_size") if crop else size)
    tile = side.get("height") or side["shortest_edge"]
    rows, columns = (
        -(-edge // tile) for edge in select_best_resolution((height, width), list(values["image_grid_pinpoints"]))
    )
    scaled = _scaled(tile, tile, values)
    final = _cropped(scaled, values)
    if final != (tile, tile):
        raise RequestError(f"the image processor's size and crop_size make {final} of tiles of {(tile, tile)}")
    return Plan(final, (1 + rows * columns) * max(tile * tile, scaled[0] * scaled[1]))


def plan_patches(height: int, width: int, values: Mapping[str, Any]) -> Plan:
    """Qwen2-VL's: both sides become multiples of a group of patches, near its own or within numbers of pixels."""
    if values.get("do_resize", True):
        size = dict(_size(values, "size"))
        least = values.get("min_pixels") or size.get("shortest_edge")
        most = values.get("max_pixels") or size.get("longest_edge")
        if least is None or most is None:
            check_counts_pixels("size", size)
            raise RequestError(
                f"size={size} says not the fewest and the most pixels: give min_pixels and max_pixels too"
            )
        group = values["patch_size"] * values["merge_size"]
        sides = tuple(round(side / group) * group for side in (height, width))
        if sides[0] * sides[1] > most:
            factor = math.sqrt(height * width / most)
            sides = tuple(max(group, math.floor(side / factor / group) * group) for side in (height, width))
        elif sides[0] * sides[1] < least:
            factor = math.sqrt(least / (height * width))
            sides = tuple(math.ceil(side * factor / group) * group for side in (height, width))
        height, width = sides
    return Plan((height, width), _FLOATS * height * width, _FLOATS)


def plan_frames(height: int, width: int, values: Mapping[str, Any]) -> Plan:
    """GLM-4V's: likewise, where `size` counts the pixels of all frames that a patch has, and small sides grow first."""
    if values.get("do_resize", True):
        size, frames = dict(_size(values, "size")), values["temporal_patch_size"]
        group = values["patch_size"] * values["merge_size"]
        if min(height, width) < group:
            scale = max(group / height, group / width)
            height, width = int(height * scale), int(width * scale)
        sides = tuple(round(side / group) * group for side in (height, width))
        if frames * sides[0] * sides[1] > size["longest_edge"]:
            factor = math.sqrt(frames * height * width / size["longest_edge"])
            sides = tuple(max(group, math.floor(side / factor / group) * group) for side in (height, width))
        elif frames * sides[0] * sides[1] < size["shortest_edge"]:
            factor = math.sqrt(size["shortest_edge"] / (frames * height * width))
            sides = tuple(math.ceil(side * factor / group) * group for side in (height, width))
        height, width = sides
    return Plan((height, width), _FLOATS * height * width, _FLOATS)


def plan_rows_of_tiles(height: int, width: int, values: Mapping[str, Any]) -> Plan:
    """Idefics3's: scaled to a longest edge, then to multiples of a tile's side, of which it is cut, and whole as one
    tile more. An image that fits one tile is that alone."""
    tile, before = values["max_image_size"]["longest_edge"], 0
    if values.get("do_resize", True):
        height, width = _longest_edge(height, width, dict(_size(values, "size")))
        before = height * width
    if values.get("do_image_splitting", True):
        ratio = width / height
        if width >= height:
            width = math.ceil(width / tile) * tile
            height = math.ceil(int(width / ratio) / tile) * tile
        else:
            height = math.ceil(height / tile) * tile
            width = math.ceil(int(height * ratio) / tile) * tile
    else:
        height = width = tile
    whole = 0 if height == width == tile else tile * tile
    return Plan((height, width), _FLOATS * max(before, height * width + whole), _FLOATS)


def plan_rows_of_patches(height: int, width: int, values: Mapping[str, Any]) -> Plan:
    """Pixtral's: scaled down to a longest edge, and then to multiples of a patch."""
    before = 0
    if values.get("do_resize", True):
        size, patch = dict(_size(values, "size")), values["patch_size"]
        sides = [patch["height"], patch["width"]] if isinstance(patch, Mapping) else [patch, patch]
        most = [size["longest_edge"]] * 2 if size.get("longest_edge") else [size["height"], size["width"]]
        ratio = max(height / most[0], width / most[1])
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        height, width = (((side - 1) // unit + 1) * unit for side, unit in zip((height, width), sides, strict=True))
        before = height * width
    height, width = _cropped((height, width), values)
    return Plan((height, width), _FLOATS * max(before, height * width), _FLOATS)


def plan_best_tiles(height: int, width: int, values: Mapping[str, Any]) -> Plan:
    """GOT-OCR2's, which is InternVL's: scaled to those tiles whose shape is nearest, and whole as one tile more."""
    size, most = dict(_size(values, "size")), values["max_patches"]
    if not values.get("crop_to_patches") or most <= 1:
        return plan_scaled(height, width, values)
    tile, best, rows, columns = size["height"] * size["width"], math.inf, 1, 1
    shapes = [(w, h) for w in range(1, most + 1) for h in range(1, most // w + 1) if w * h >= values["min_patches"]]
    for across, down in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
        apart = abs(width / height - across / down)
        if apart < best or (apart == best and width * height > 0.5 * tile * across * down):
            best, rows, columns = apart, down, across
    tiles = rows * columns + (rows * columns > 1)
    return Plan((rows * size["height"], columns * size["width"]), _FLOATS * tiles * tile, _FLOATS)


def _longest_edge(height: int, width: int, size: Mapping[str, int]) -> tuple[int, int]:
    """The size after Idefics3's `do_resize`: the longer edge as asked for, the other an even number near its share."""
    edge = size.get("longest_edge")
    if not edge:
        return size["height"], size["width"]
    ratio = width / height
    if width >= height:
        height, width = max(1, _even(int(edge / ratio))), edge
    else:
        height, width = edge, max(1, _even(int(edge * ratio)))
    ratio = width / height
    if width >= height and width > _LARGEST_EDGE:
        return max(1, int(_LARGEST_EDGE / ratio)), _LARGEST_EDGE
    if height > width and height > _LARGEST_EDGE:
        return _LARGEST_EDGE, max(1, int(_LARGEST_EDGE * ratio))
    return height, width


def _even(number: int) -> int:
    return number + number % 2


def _scaled(height: int, width: int, values: Mapping[str, Any]) -> tuple[int, int]:
    """The size after `do_resize`."""
    if not values.get("do_resize", True):
        return height, width
    size = dict(_size(values, "size"))
    if size.get("height") and size.get("width"):
        return size["height"], size["width"]
    edge = size.get("shortest_edge")
    if edge is None:  # a form that only its own processor knows
        return height, width
    longer = min(int(edge * max(height, width) / min(height, width)), size.get("longest_edge") or _FAR)
    return (edge, longer) if height <= width else (longer, edge)


def _cropped(scaled: tuple[int, int], values: Mapping[str, Any]) -> tuple[int, int]:
    if not values.get("do_center_crop"):
        return scaled
    crop = dict(_size(values, "crop_size"))
    return crop["height"], crop["width"]


def _size(values: Mapping[str, Any], name: str) -> Mapping[str, int]:
    """As a dict: a single number is a square's side where it is cropped, and else the shorter side."""
    size = values.get(name)
    if isinstance(size, int):
        return {"height": size, "width": size} if name == "crop_size" else {"shortest_edge": size}
    return size if isinstance(size, Mapping) else dict(vars(size))


_EDGES = frozenset({"shortest_edge", "longest_edge"})
_SCALED = ProcessorKind(plan_scaled)
_SQUARED = ProcessorKind(plan_squared)
_TILES = ProcessorKind(plan_tiles)
_PATCHES = ProcessorKind(plan_patches, sizes=(frozenset({"shortest_edge"}), _EDGES), counts_pixels=True)
_FRAMES = ProcessorKind(plan_frames, sizes=(_EDGES,), counts_pixels=True)
_ROWS_OF_TILES = ProcessorKind(
    plan_rows_of_tiles,
    takes=frozenset({
        "do_image_splitting", "do_normalize", "do_pad", "do_rescale", "do_resize", "image_mean", "image_std",
        "max_image_size", "resample", "rescale_factor", "size",
    }),
    sizes=(frozenset({"longest_edge"}),),
    always={"return_row_col_info": True},
    lists=("rows", "cols"),
)  # fmt: skip

_BEST_TILES = ProcessorKind(
    plan_best_tiles,
    takes=frozenset({
        "crop_to_patches", "do_normalize", "do_rescale", "do_resize", "image_mean", "image_std", "max_patches",
        "min_patches", "resample", "rescale_factor", "size",
    }),
    sizes=(),
)  # fmt: skip
_ONE_SIZE = ProcessorKind(
    plan_scaled,
    takes=frozenset({"do_normalize", "do_rescale", "do_resize", "image_mean", "image_std", "resample", "rescale_factor",
                     "size"}),
    sizes=(),
)  # fmt: skip
_ROWS_OF_PATCHES = ProcessorKind(plan_rows_of_patches, sizes=(frozenset({"longest_edge"}),))

# By the class's name, without what says how it computes (Fast, Pil).
KINDS: dict[str, ProcessorKind] = {
    "Glm4vImageProcessor": _FRAMES,
    "Idefics3ImageProcessor": _ROWS_OF_TILES,
    "Gemma3ImageProcessor": _ONE_SIZE,
    "GotOcr2ImageProcessor": _BEST_TILES,
    "PixtralImageProcessor": _ROWS_OF_PATCHES,
    "SmolVLMImageProcessor": _ROWS_OF_TILES,
}
