"""The checkpoint's own image processor (Hugging Face's, on Pillow) and what a caller may change of its settings."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from quire.config import MediaConfig
from quire.errors import CheckpointError, RequestError
from quire.multimodal.images import Picture

# Settings that say where and in which form results come: the engine's to choose.
_OURS = {"return_tensors", "device", "data_format", "input_data_format", "disable_grouping", "do_convert_rgb"}

Inputs = Mapping[str, torch.Tensor]


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
        known = _setting_names(self._processor) - _OURS
        for name, value in given.items():
            if name not in known:
                raise RequestError(
                    f"mm_processor_kwargs: {type(self._processor).__name__} has no setting {name!r}; it has "
                    f"{', '.join(sorted(known))}"
                )
            self._check_value(name, value)
        return {**self._settings, **given}

    def _check_value(self, name: str, value: Any) -> None:
        """A size is work to be done: so large a one as no image may have is refused."""
        values = list(value.values()) if isinstance(value, Mapping) else value
        values = values if isinstance(values, (list, tuple)) else [values]
        numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        sides = math.prod(max(1, n) for n in numbers) if isinstance(value, Mapping) and "height" in value else 1
        most = self._config.max_image_pixels
        if any(abs(n) > most or math.isnan(n) for n in numbers) or sides > most:
            raise RequestError(f"mm_processor_kwargs: {name}={value!r} is more than max_image_pixels={most:,}")

    def digest(self, picture: Picture, settings: Mapping[str, Any]) -> bytes:
        """The same for pictures and settings of which the model sees the same."""
        own = json.dumps(settings, sort_keys=True, default=repr)
        return hashlib.sha256(self._fingerprint + picture.digest + own.encode()).digest()

    def __call__(self, picture: Picture, settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What the model's tower takes of one picture, as a batch of one. Raises RequestError."""
        self._check_stretch(picture, settings)
        try:
            found = self._processor(picture.image, return_tensors="pt", **settings)
        except Exception as error:  # whatever extreme sizes and settings lead to
            words = " ".join(str(error).split())[:200]
            raise RequestError(f"the image processor cannot take it: {type(error).__name__}: {words}") from None
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def _check_stretch(self, picture: Picture, settings: Mapping[str, Any]) -> None:
        """Scaling the shorter side to a length makes a very long image very large."""
        size = settings.get("size", getattr(self._processor, "size", None))
        edge = _edge(size)
        width, height = picture.image.size
        if edge is None or not settings.get("do_resize", getattr(self._processor, "do_resize", True)):
            return
        pixels = edge * edge * max(width, height) // min(width, height)
        if pixels > self._config.max_image_pixels:
            raise RequestError(
                f"scaled to {edge} pixels on its shorter side, {width} x {height} become {pixels:,}, and "
                f"{self._config.max_image_pixels:,} are allowed: cut it to a less extreme shape"
            )


def _edge(size: Any) -> int | None:
    """The length that the shorter side is scaled to, where that alone is said."""
    if isinstance(size, int):
        return size
    if isinstance(size, Mapping):
        edge, other = size.get("shortest_edge"), size.get("longest_edge") or size.get("height")
    else:
        edge = getattr(size, "shortest_edge", None)
        other = getattr(size, "longest_edge", None) or getattr(size, "height", None)
    return edge if isinstance(edge, int) and other is None else None


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
