"""hf_overrides: fields of config.json that a caller wants to have other values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from quire.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Fields that no configuration class keeps as they are, or that say which class it is.
_READ_BY_US = {
    "architectures", "model_type", "dtype", "torch_dtype", "quantization_config",
    "classifier_from_token", "is_original_qwen3_reranker", "method",
    "is_matryoshka", "matryoshka_dimensions",
}  # fmt: skip
# transformers keeps these in rope_parameters, and does not look at them where a file has that.
_OF_ROPE = ("rope_theta", "rope_scaling")


def overridden(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """config.json's content with other values; of an object, those of its fields. Raises CheckpointError."""
    if "auto_map" in overrides:
        raise CheckpointError("hf_overrides: auto_map names code of a checkpoint's, and none is ever run.")
    merged = dict(raw)
    for name, value in overrides.items():
        old = raw.get(name)
        inner = isinstance(value, Mapping) and isinstance(old, Mapping) and name != "rope_scaling"
        merged[name] = overridden(old, value) if inner else value  # type: ignore[arg-type]
    rope = merged.get("rope_parameters")
    if isinstance(rope, Mapping) and any(name in overrides for name in _OF_ROPE):
        merged["rope_parameters"] = _rope(rope, overrides)
        for name in _OF_ROPE:
            merged.pop(name, None)
    return merged


def _rope(rope: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    if not all(isinstance(value, (str, int, float, list)) for value in rope.values()):
        raise CheckpointError("hf_overrides: this model's layers differ in their rope_parameters: override those.")
    scaling = overrides.get("rope_scaling", rope)
    if scaling is None:
        scaling = {"rope_type": "default"}
    theta = overrides.get("rope_theta", rope.get("rope_theta"))
    return {**scaling, **({} if theta is None else {"rope_theta": theta})}


class OverriddenConfig:
    """A folder with an overridden config.json, for as long as transformers reads it."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._folder = TemporaryDirectory(prefix="quire-config-")
        try:
            text = json.dumps(raw)
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"hf_overrides: must be JSON values ({error}).") from None
        (Path(self._folder.name) / "config.json").write_text(text, encoding="utf-8")

    def __enter__(self) -> Path:
        return Path(self._folder.name)

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()


def check_taken(config: PretrainedConfig, plain: PretrainedConfig, overrides: Mapping[str, Any]) -> None:
    """Raise CheckpointError for an override of a field that this kind of model does not have, or keeps as it was.

    config, plain: as read with and without the overrides.
    """
    for name, value in overrides.items():
        if name in _READ_BY_US or name in _OF_ROPE:
            continue
        if not hasattr(plain, name):
            raise CheckpointError(f"hf_overrides: a {plain.model_type!r} configuration has no {name!r}.")
        inner, before = getattr(config, name), getattr(plain, name)
        if isinstance(value, Mapping) and hasattr(before, "model_type"):
            check_taken(inner, before, value)
        elif not isinstance(value, Mapping) and inner != value:
            raise CheckpointError(f"hf_overrides: {name}={value!r} is taken as {inner!r} by transformers.")
