"""The kinds of media that a model takes: their processors, and settings that a caller gives for all of them at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from quire.errors import RequestError
from quire.types import MediaKind

# By these names, as Hugging Face's processors have them, a setting is that of one kind alone.
_NESTED: dict[str, MediaKind] = {"images_kwargs": "image", "videos_kwargs": "video", "audio_kwargs": "audio"}


class Configurable(Protocol):
    """A processor of one kind, and what a caller may set of it."""

    @property
    def setting_names(self) -> set[str]: ...

    def keep(self, given: Mapping[str, Any]) -> None:
        """Have all requests begin with these. Raises RequestError for a wrong one."""

    def settings(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """The engine's settings with a caller's on top. Raises RequestError for a wrong one."""


class MediaSettings:
    """What callers may set by `mm_processor_kwargs`: each name goes to the processors that know it.

    processors: of each kind that is taken, the images' first.
    """

    def __init__(self, processors: Mapping[MediaKind, Configurable]) -> None:
        self._processors = processors

    def keep(self, given: Mapping[str, Any]) -> None:
        """Have all requests begin with these. Raises RequestError for a wrong one."""
        split = split_settings(given, self._processors)
        for kind, processor in self._processors.items():
            processor.keep(split[kind])

    def __call__(self, given: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The images' settings, and under the other kinds' names theirs. Raises RequestError for a wrong one."""
        split = split_settings(given, self._processors)
        found = {kind: processor.settings(split[kind]) for kind, processor in self._processors.items()}
        images = found.pop("image", {})
        return {**images, **{str(kind): settings for kind, settings in found.items()}}


def split_settings(
    given: Mapping[str, Any] | None, processors: Mapping[MediaKind, Configurable]
) -> dict[MediaKind, dict[str, Any]]:
    """Which processor gets which of the settings. Raises RequestError for what none of them knows."""
    if given is not None and not isinstance(given, Mapping):
        raise RequestError(f"mm_processor_kwargs must be a dict, not {type(given).__name__}")
    split: dict[MediaKind, dict[str, Any]] = {kind: {} for kind in processors}
    for name, value in (given or {}).items():
        if name in _NESTED:
            kind = _NESTED[name]
            if kind not in processors or not isinstance(value, Mapping):
                raise RequestError(f"mm_processor_kwargs: {name} must be a dict, of a kind that this model takes")
            split[kind].update(value)
            continue
        knowing = [kind for kind, processor in processors.items() if name in processor.setting_names]
        for kind in knowing or [next(iter(processors))]:  # the first of them says what it has instead
            split[kind][name] = value
    return split
