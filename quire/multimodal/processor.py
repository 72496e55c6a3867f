"""The checkpoint's own image processor (Hugging Face's, on Pillow) and what a caller may change of its settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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

_FAR = 1 << 60


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
        self._settings: dict[str, Any] = {}
        self._settings = self.settings(settings)
        known = json.dumps(self._processor.to_dict(), sort_keys=True, default=repr)
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
        return {**self._settings, **given}

    def _check_value(self, name: str, value: Any) -> None:
        """A size is work to be done: so large a one as no image may have is refused."""
        most, shown = self._config.max_image_pixels, repr(value)[:100]
        if name in _SIZES:
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
                raise RequestError(
                    f"mm_processor_kwargs: {name} must be a dict of whole numbers with {forms}, not {shown}"
                )
            sides = list(value.values())
            pixels = max(sides) if "longest_edge" in value else sides[0] * sides[-1]
            if min(sides) < 1 or pixels > most:
                raise RequestError(
                    f"mm_processor_kwargs: {name}={shown} is more than max_image_pixels={most:,}, or none"
                )
            return
        numbers = value if isinstance(value, (list, tuple)) and name in ("image_mean", "image_std") else [value]
        if len(numbers) > 4 or not all(v is None or isinstance(v, (bool, int, float)) for v in numbers):
            raise RequestError(f"mm_processor_kwargs: {name}={shown} must be a number or a flag (means: one a channel)")
        if any(v is not None and not abs(v) <= most for v in numbers):
            raise RequestError(f"mm_processor_kwargs: {name}={shown} is more than max_image_pixels={most:,}")

    @property
    def _counts_pixels(self) -> bool:
        """Whether the edges in `size` are numbers of pixels, as Qwen2-VL's are, and not lengths."""
        return hasattr(self._processor, "merge_size")

    @property
    def known(self) -> dict[str, Any]:
        """The checkpoint's own settings."""
        return dict(self._processor.to_dict())

    def digest(self, picture: Picture, settings: Mapping[str, Any]) -> bytes:
        """The same for pictures and settings of which the model sees the same."""
        own = json.dumps(settings, sort_keys=True)
        return hashlib.sha256(self._fingerprint + picture.digest + own.encode()).digest()

    def __call__(self, picture: Picture, settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What the model's tower takes of one picture, as a batch of one. Raises RequestError."""
        self._check_stretch(picture, settings)
        try:
            found = self._processor(picture.image, return_tensors="pt", **settings)
        except Exception as error:  # whatever extreme sizes and settings lead to
            raise RequestError(f"the image processor cannot take it: {described(error)}") from None
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def _check_stretch(self, picture: Picture, settings: Mapping[str, Any]) -> None:
        """Scaling the shorter side to a length makes a very long image very large."""
        edge, longest = _edges(settings.get("size", getattr(self._processor, "size", None)))
        width, height = picture.image.size
        if (
            edge is None
            or self._counts_pixels
            or not settings.get("do_resize", getattr(self._processor, "do_resize", True))
        ):
            return
        pixels = edge * min(edge * max(width, height) // min(width, height), longest or _FAR)
        if pixels > self._config.max_image_pixels:
            raise RequestError(
                f"scaled to {edge} pixels on its shorter side, {width} x {height} become {pixels:,}, and "
                f"{self._config.max_image_pixels:,} are allowed: cut it to a less extreme shape"
            )


def _edges(size: Any) -> tuple[int | None, int | None]:
    """The lengths that the shorter side is scaled to, and the longer one at most, where those are said."""
    if isinstance(size, int):
        return size, None
    named = size if isinstance(size, Mapping) else vars(size) if hasattr(size, "__dict__") else {}
    return named.get("shortest_edge"), named.get("longest_edge")


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
