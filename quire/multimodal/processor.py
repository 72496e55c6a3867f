"""The checkpoint's own image processor (Hugging Face's, on Pillow) and what a caller may change of its settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from quire.config import MediaConfig
from quire.errors import CheckpointError, RequestError
from quire.multimodal.images import Picture, described
from quire.multimodal.phi3_v import Phi3VImageProcessor
from quire.multimodal.plans import Plan, kind_of
from quire.multimodal.processor_settings import Most, as_floats, check_peak, check_setting

OWN = {"Phi3VImageProcessor": Phi3VImageProcessor}
# What a caller may set, where the checkpoint's processor knows it. The rest is the tower's to decide (patch sizes,
# grids) or the engine's (the form of results).
_SETTINGS = {
    "crop_size", "do_center_crop", "do_image_splitting", "do_normalize", "do_pad", "do_rescale", "do_resize",
    "image_mean", "image_std", "max_image_size", "max_pixels", "min_pixels", "resample", "rescale_factor", "size",
}  # fmt: skip


class ImageProcessor:
    """Pixels to what the model's tower takes. Any number of threads may call it at once.

    settings: of every image, on top of the checkpoint's (`mm_processor_kwargs`); a request's own come on top of those.
    defaults: what the model asks for, whatever the processor's own file says, unless a caller asks otherwise.
    Raises CheckpointError where there is none to load, and RequestError for settings that it does not know.
    """

    def __init__(
        self,
        path: Path,
        config: MediaConfig,
        settings: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        try:
            self._processor = _loaded(path)
        except Exception as error:  # transformers raises all kinds
            raise CheckpointError(f"{path}: its image processor cannot be loaded: {error}") from error
        self._config = config
        self._defaults = defaults
        self._known = {**self._processor.to_dict(), **defaults}
        self._kind = kind_of(self._processor, self._known)
        self._settings: dict[str, Any] = {}
        self._settings = self.settings(settings)
        known = json.dumps(self._known, sort_keys=True, default=repr)
        self._fingerprint = hashlib.sha256(known.encode()).digest()

    def keep(self, given: Mapping[str, Any]) -> None:
        """Have all requests begin with these. Raises RequestError for a wrong one."""
        self._settings = self.settings(given)

    def settings(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The engine's settings with a caller's on top. Raises RequestError for a wrong one."""
        if given is None:
            return self._settings
        if not isinstance(given, Mapping):
            raise RequestError(f"mm_processor_kwargs must be a dict, not {type(given).__name__}")
        known = self.setting_names
        for name, value in given.items():
            if name not in known:
                raise RequestError(
                    f"mm_processor_kwargs: {type(self._processor).__name__} has no setting {str(name)[:40]!r}; it has "
                    f"{', '.join(sorted(known))}"
                )
            self._check_value(name, value)
        settings = {**self._settings, **{name: as_floats(name, value) for name, value in given.items()}}
        if given:
            check_peak(given, {**self.known, **settings})
        return settings

    @property
    def setting_names(self) -> set[str]:
        """What a caller may set."""
        return _setting_names(self._processor) & set(_SETTINGS if self._kind.takes is None else self._kind.takes)

    def _check_value(self, name: str, value: Any) -> None:
        """Raises RequestError for what is no such setting's value, or asks for more than any image may."""
        if name == "max_image_size":
            if value != self._known.get(name):
                raise RequestError(
                    f"mm_processor_kwargs: {name}={repr(value)[:100]}: the model's tower takes "
                    f"{self._known.get(name)} alone"
                )
            return
        check_setting(
            name, value, Most(self._config.max_image_pixels, "max_image_pixels"), self._kind.sizes,
            self._kind.counts_pixels,
        )  # fmt: skip

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
            given = {**self._defaults, **settings}
            found = self._processor(picture.image, return_tensors="pt", **self._kind.always, **given)
        except Exception as error:  # whatever extreme sizes and settings lead to
            raise RequestError(f"the image processor cannot take it: {described(error)}") from None
        lists = {name: torch.tensor(found[name]) for name in self._kind.lists}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)} | lists

    def plan(self, height: int, width: int, settings: Mapping[str, Any]) -> Plan:
        """What an image of this size will be made into. Raises RequestError where that is more than an image may be."""
        values = {**self._known, **settings}
        try:
            plan = self._kind.plan(height, width, values)
        except (TypeError, KeyError, AttributeError, ZeroDivisionError):
            raise RequestError("the image processor cannot take it with these settings of size and crop_size") from None
        if plan.pixels > self._config.max_image_pixels * plan.floats:
            raise RequestError(
                f"with the image processor's settings, {width} x {height} become {plan.pixels:,} pixels on the way, "
                f"and {self._config.max_image_pixels:,} are allowed: cut it to a less extreme shape, or ask for a "
                "smaller size"
            )
        return plan


def _loaded(path: Path) -> Any:
    """The checkpoint's processor. For those that are code in their checkpoints, which is never run, there is `OWN`."""
    from transformers import AutoImageProcessor

    file = path / "preprocessor_config.json"
    told = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    own = OWN.get(str(told.get("image_processor_type"))) if isinstance(told, dict) else None
    if own is not None:
        return own.from_pretrained(path)
    return AutoImageProcessor.from_pretrained(path, local_files_only=True, trust_remote_code=False, **_pil_backend())


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
