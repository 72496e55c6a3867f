"""What a caller may ask of a checkpoint's processors by `mm_processor_kwargs`, checked before any work is done."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from quire.errors import RequestError

SIZES = ("size", "crop_size")
_FLAGS = ("crop_to_patches", "do_center_crop", "do_convert_rgb", "do_image_splitting", "do_normalize", "do_pad",
          "do_pan_and_scan", "do_rescale", "do_resize", "do_sample_frames")  # fmt: skip
_COUNTS = ("min_patches", "max_patches", "num_crops")
MOST_TILES = 256
_BY_CHANNEL = ("image_mean", "image_std")

# What pixels may become at most: ordinary ones end below 3, and below 1,300 where they are not rescaled. Far above, a
# tower's arithmetic ends in infinities.
_MOST_PEAK = 4096.0


class Most(NamedTuple):
    """Pixels that may be asked for, and the setting that says so."""

    pixels: int
    name: str


def check_setting(name: str, value: Any, most: Most, sizes: Collection[Collection[str]], counts_pixels: bool) -> None:
    """Raise RequestError for what is no such setting's value, or asks for more pixels than there may be.

    sizes: the forms of `size` beside height and width. counts_pixels: whether `longest_edge` is a number of pixels.
    """
    shown = repr(value)[:100]
    if name in SIZES:
        _check_size(name, value, most, sizes, counts_pixels)
    elif name in _FLAGS:
        if type(value) is not bool:
            raise RequestError(f"mm_processor_kwargs: {name}={shown} must be true or false")
    elif name in ("min_pixels", "max_pixels"):
        if type(value) is not int or not 1 <= value <= most.pixels:
            raise RequestError(f"mm_processor_kwargs: {name}={shown} must be from 1 to {most.name}={most.pixels:,}")
    elif name in _COUNTS:
        if type(value) is not int or not 1 <= value <= MOST_TILES:
            raise RequestError(f"mm_processor_kwargs: {name}={shown} must be from 1 to {MOST_TILES}")
    elif name == "resample":
        if type(value) is not int or not 0 <= value <= 5:
            raise RequestError(f"mm_processor_kwargs: {name}={shown} must be one of Pillow's filters, 0 to 5")
    elif name in _BY_CHANNEL:
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if len(numbers) not in (1, 3) or not all(_is_number(number) for number in numbers):
            raise RequestError(f"mm_processor_kwargs: {name}={shown} must be a number, or one for each channel")
    elif not _is_number(value):
        raise RequestError(f"mm_processor_kwargs: {name}={shown} must be a number")


def _check_size(name: str, value: Any, most: Most, sizes: Collection[Collection[str]], counts_pixels: bool) -> None:
    """A size is work to be done: so large a one as nothing may have is refused."""
    shown = repr(value)[:100]
    allowed: list[Collection[str]] = [{"height", "width"}, *sizes]
    value = {"shortest_edge": value} if type(value) is int else value
    if not isinstance(value, Mapping) or set(value) not in allowed or any(type(v) is not int for v in value.values()):
        forms = " or ".join(str(sorted(keys)) for keys in allowed)
        raise RequestError(f"mm_processor_kwargs: {name} must be a dict of whole numbers with {forms}, not {shown}")
    sides = list(value.values())
    pixels = max(sides) if counts_pixels and "longest_edge" in value else sides[0] * sides[-1]
    if min(sides) < 1 or pixels > most.pixels:
        raise RequestError(f"mm_processor_kwargs: {name}={shown} is more than {most.name}={most.pixels:,}, or none")


def check_counts_pixels(name: str, value: Any) -> None:
    """Raise RequestError for a `size` of lengths, where its edges are the fewest and the most pixels."""
    if name == "size" and isinstance(value, Mapping) and {"height", "width"} & set(value):
        raise RequestError(
            f"mm_processor_kwargs: size={repr(value)[:100]} says lengths, and this processor's says the fewest and the "
            "most pixels: give {'shortest_edge': fewest, 'longest_edge': most}, or min_pixels and max_pixels"
        )


def check_peak(given: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """What pixels become must be a number that a tower can work with.

    values: all settings, those `given` among them. Raises RequestError.
    """
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


def as_floats(name: str, value: Any) -> Any:
    """Numbers of pixels' values as the processor wants them, which takes no whole ones."""
    if name in _BY_CHANNEL and isinstance(value, (list, tuple)):
        return [float(number) for number in value]
    return float(value) if name in (*_BY_CHANNEL, "rescale_factor") else value


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= 1e9  # false for NaN


def _as_list(value: Any, default: float) -> list[float]:
    value = default if value is None else value
    return list(value) if isinstance(value, (list, tuple)) else [value]
