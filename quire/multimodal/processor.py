"""The checkpoint's own image processor (Hugging Face's, on Pillow) and what a caller may change of its settings."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.config import MediaConfig
from quire.errors import CheckpointError, RequestError
from quire.multimodal.images import Picture, described

# What a caller may set, where the checkpoint's processor knows it. The rest is the tower's to decide (patch sizes,
# grids) or the engine's (the form of results).
_SETTINGS = {
    "crop_size", "do_center_crop", "do_normalize", "do_pad", "do_rescale", "do_resize", "image_mean", "image_std",
    "max_pixels", "min_pixels", "resample", "rescale_factor", "size",
}  # fmt: skip
_SIZES = ("size", "crop_size")
_FLAGS = ("do_center_crop", "do_normalize", "do_pad", "do_rescale", "do_resize")
_BY_CHANNEL = ("image_mean", "image_std")

# What pixels may become at most: ordinary ones end below 3, and below 1,300 where they are not rescaled. Far above, a
# tower's arithmetic ends in infinities.
_MOST_PEAK = 4096.0
_FLOATS = 4  # times the memory of a pixel that processing takes where it keeps the whole image, as floats
_FAR = 1 << 60


@dataclass(frozen=True, slots=True)
class Plan:
    """What an image will be made into.

    final: (height, width) of it, or of each of its tiles. pixels: what that takes, in decoded pixels' memory.
    """

    final: tuple[int, int]
    pixels: int


class ImageProcessor:
    """Pixels to what the model's tower takes. Any number of threads may call it at once.

    settings: of every image, on top of the checkpoint's (`mm_processor_kwargs`); a request's own come on top of those.
    Raises CheckpointError where there is none to load, and RequestError for settings that it does not know.
    """

    def __init__(self, path: Path, config: MediaConfig, settings: Mapping[str, Any] | None = None) -> None:
        from transformers import AutoImageProcessor

        try:
            self._processor = AutoImageProcessor.from_pretrained(
                path, local_files_only=True, trust_remote_code=False, **_pil_backend()
            )
        except Exception as error:  # transformers raises all kinds
            raise CheckpointError(f"{path}: its image processor cannot be loaded: {error}") from error
        self._config = config
        self._known = dict(self._processor.to_dict())
        self._settings: dict[str, Any] = {}
        self._settings = self.settings(settings)
        known = json.dumps(self._known, sort_keys=True, default=repr)
        self._fingerprint = hashlib.sha256(known.encode()).digest()

    def settings(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The engine's settings with a caller's on top. Raises RequestError for a wrong one."""
        if given is None:
            return self._settings
        if not isinstance(given, Mapping):
            raise RequestError(f"mm_processor_kwargs must be a dict, not {type(given).__name__}")
        known = _setting_names(self._processor) & _SETTINGS
        for name, value in given.items():
            if name not in known:
                raise RequestError(
                    f"mm_processor_kwargs: {type(self._processor).__name__} has no setting {str(name)[:40]!r}; it has "
                    f"{', '.join(sorted(known))}"
                )
            self._check_value(name, value)
        settings = {**self._settings, **{name: _as_floats(name, value) for name, value in given.items()}}
        if given:
            self._check_peak(given, settings)
        return settings

    def _check_value(self, name: str, value: Any) -> None:
        """Raises RequestError for what is no such setting's value, or asks for more than any image may."""
        most, shown = self._config.max_image_pixels, repr(value)[:100]
        if name in _SIZES:
            self._check_size(name, value)
        elif name in _FLAGS:
            if type(value) is not bool:
                raise RequestError(f"mm_processor_kwargs: {name}={shown} must be true or false")
        elif name in ("min_pixels", "max_pixels"):
            if type(value) is not int or not 1 <= value <= most:
                raise RequestError(f"mm_processor_kwargs: {name}={shown} must be from 1 to max_image_pixels={most:,}")
        elif name == "resample":
            if type(value) is not int or not 0 <= value <= 5:
                raise RequestError(f"mm_processor_kwargs: {name}={shown} must be one of Pillow's filters, 0 to 5")
        elif name in _BY_CHANNEL:
            numbers = value if isinstance(value, (list, tuple)) else [value]
            if len(numbers) not in (1, 3) or not all(_is_number(number) for number in numbers):
                raise RequestError(f"mm_processor_kwargs: {name}={shown} must be a number, or one for each channel")
        elif not _is_number(value):
            raise RequestError(f"mm_processor_kwargs: {name}={shown} must be a number")

    def _check_size(self, name: str, value: Any) -> None:
        """A size is work to be done: so large a one as no image may have is refused."""
        most, shown = self._config.max_image_pixels, repr(value)[:100]
        value = {"shortest_edge": value} if type(value) is int else value
        allowed = [{"height", "width"}, {"shortest_edge"}]
        if self._counts_pixels:
            allowed.append({"shortest_edge", "longest_edge"})
        if (
            not isinstance(value, Mapping)
            or set(value) not in allowed
            or any(type(v) is not int for v in value.values())
        ):
            forms = " or ".join(str(sorted(keys)) for keys in allowed)
            raise RequestError(f"mm_processor_kwargs: {name} must be a dict of whole numbers with {forms}, not {shown}")
        sides = list(value.values())
        pixels = max(sides) if "longest_edge" in value else sides[0] * sides[-1]
        if min(sides) < 1 or pixels > most:
            raise RequestError(f"mm_processor_kwargs: {name}={shown} is more than max_image_pixels={most:,}, or none")

    def _check_peak(self, given: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        """What pixels become must be a number that a tower can work with."""
        values = {**self.known, **settings}
        scale = values.get("rescale_factor", 1 / 255) if values.get("do_rescale", True) else 1
        means, spreads = [0.0], [1.0]
        if values.get("do_normalize", True):
            means, spreads = _as_list(values.get("image_mean"), 0.0), _as_list(values.get("image_std"), 1.0)
        peak = 255 * abs(scale) + max(map(abs, means))
        if min(map(abs, spreads)) * _MOST_PEAK < peak:
            named = ", ".join(f"{name}={given[name]!r}" for name in (*_BY_CHANNEL, "rescale_factor") if name in given)
            raise RequestError(
                f"mm_processor_kwargs: {named[:200] or 'do_rescale, do_normalize'} would make values above "
                f"{_MOST_PEAK:g} of pixels, with which no model can work"
            )

    @property
    def _counts_pixels(self) -> bool:
        """Whether the edges in `size` are numbers of pixels, as Qwen2-VL's are, and not lengths."""
        return hasattr(self._processor, "merge_size")

    @property
    def known(self) -> dict[str, Any]:
        """The checkpoint's own settings."""
        return dict(self._known)

    def digest(self, picture: Picture, settings: Mapping[str, Any]) -> bytes:
        """The same for pictures and settings of which the model sees the same."""
        own = json.dumps(settings, sort_keys=True)
        return hashlib.sha256(self._fingerprint + picture.digest + own.encode()).digest()

    def __call__(self, picture: Picture, settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What the model's tower takes of one picture, as a batch of one. Raises RequestError."""
        try:
            found = self._processor(picture.image, return_tensors="pt", **settings)
        except Exception as error:  # whatever extreme sizes and settings lead to
            raise RequestError(f"the image processor cannot take it: {described(error)}") from None
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def plan(self, height: int, width: int, settings: Mapping[str, Any]) -> Plan:
        """What an image of this size will be made into. Raises RequestError where that is more than an image may be."""
        values = {**self._known, **settings}
        try:
            if self._counts_pixels:
                plan = _plan_patches(height, width, values)
            elif values.get("image_grid_pinpoints"):
                plan = _plan_tiles(height, width, values)
            elif values.get("do_pad") and hasattr(self._processor, "pad_to_square"):  # LLaVA's, before all else
                side = max(height, width)
                plan = _plan_scaled(side, side, values)
                plan = Plan(plan.final, max(plan.pixels, side * side))
            else:
                plan = _plan_scaled(height, width, values)
        except (TypeError, KeyError, AttributeError, ZeroDivisionError):
            raise RequestError("the image processor cannot take it with these settings of size and crop_size") from None
        if plan.pixels > self._config.max_image_pixels * (_FLOATS if self._counts_pixels else 1):
            raise RequestError(
                f"with the image processor's settings, {width} x {height} become {plan.pixels:,} pixels on the way, "
                f"and {self._config.max_image_pixels:,} are allowed: cut it to a less extreme shape, or ask for a "
                "smaller size"
            )
        return plan


def _plan_scaled(height: int, width: int, values: Mapping[str, Any]) -> Plan:
    scaled = _scaled(height, width, values)
    return Plan(_cropped(scaled, values), scaled[0] * scaled[1])


def _plan_tiles(height: int, width: int, values: Mapping[str, Any]) -> Plan:
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


def _plan_patches(height: int, width: int, values: Mapping[str, Any]) -> Plan:
    """Qwen2-VL's: both sides become multiples of a group of patches, near its own or within numbers of pixels."""
    if values.get("do_resize", True):
        size = dict(_size(values, "size"))
        least = values.get("min_pixels") or size["shortest_edge"]
        most = values.get("max_pixels") or size["longest_edge"]
        group = values["patch_size"] * values["merge_size"]
        sides = tuple(round(side / group) * group for side in (height, width))
        if sides[0] * sides[1] > most:
            factor = math.sqrt(height * width / most)
            sides = tuple(max(group, math.floor(side / factor / group) * group) for side in (height, width))
        elif sides[0] * sides[1] < least:
            factor = math.sqrt(least / (height * width))
            sides = tuple(math.ceil(side * factor / group) * group for side in (height, width))
        height, width = sides
    return Plan((height, width), _FLOATS * height * width)


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


def _as_floats(name: str, value: Any) -> Any:
    """Numbers of pixels' values as the processor wants them, which takes no whole ones."""
    if name in _BY_CHANNEL and isinstance(value, (list, tuple)):
        return [float(number) for number in value]
    return float(value) if name in (*_BY_CHANNEL, "rescale_factor") else value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= 1e9  # false for NaN


def _as_list(value: Any, default: float) -> list[float]:
    value = default if value is None else value
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _pil_backend() -> dict[str, Any]:
    """Before transformers 5, the same was called otherwise."""
    import transformers

    return {"backend": "pil"} if int(transformers.__version__.split(".")[0]) >= 5 else {"use_fast": False}


def _setting_names(processor: Any) -> set[str]:
    known: set[str] = set()
    kind = getattr(processor, "valid_kwargs", None)
    for one in getattr(kind, "__mro__", (kind,)):
        known |= set(getattr(one, "__annotations__", ()))
    return known or {name for name in vars(processor) if not name.startswith("_")}
