"""What callers give to `LLM`, in its accepted forms -> what settings and the engine take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.errors import RequestError


def prompt_list(prompts: Any) -> list[Any]:
    """One prompt or several -> a list of prompts. A list of numbers is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)) or hasattr(prompts, "tolist"):
        return [prompts]
    if not isinstance(prompts, Sequence):
        raise RequestError(f"prompts must be a text, a list of token ids, a dict or a list of these, not {prompts!r}")
    if prompts and all(isinstance(token, int) for token in prompts):
        return [prompts]
    return list(prompts)


def hosts(names: Sequence[str] | None) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise RequestError(f"allowed_media_domains={names!r}: must be a list of host names.")
    return tuple(names)


def folders(paths: Sequence[str] | None) -> tuple[str, ...] | None:
    if paths is None:
        return None
    if isinstance(paths, (str, bytes)) or not isinstance(paths, Sequence):
        raise RequestError(f"lora_roots={paths!r}: must be a list of folders.")
    return tuple(str(path) for path in paths)


def image_limit(limits: Mapping[str, int] | None) -> int | None:
    if limits is None:
        return None
    if not isinstance(limits, Mapping) or set(limits) - {"image"}:
        raise RequestError(f"limit_mm_per_prompt={limits!r}: must be {{'image': a number}}; no other media are served.")
    return limits.get("image")


def given(**settings: Any) -> dict[str, Any]:
    """Only what the caller set: the defaults of the rest stand in `quire.config`."""
    return {name: value for name, value in settings.items() if value is not None}
