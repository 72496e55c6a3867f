"""The sampling that holds where a request says nothing: a checkpoint's recommendation, or what the user says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.config.start import GENERATION_FILE, RequestDefaults

_FIELDS = frozenset({"temperature", "top_p", "top_k", "min_p", "repetition_penalty"})


def default_sampling(path: Path, defaults: RequestDefaults) -> dict[str, Any]:
    """Arguments of `SamplingParams`. path: the checkpoint's."""
    folder = {"auto": path, "vllm": None}.get(defaults.generation_config, Path(defaults.generation_config))
    return {**(_recommended(folder) if folder is not None else {}), **defaults.override_generation_config}


def _recommended(folder: Path) -> dict[str, Any]:
    """What a folder's generation_config.json recommends; nothing without one."""
    try:
        recommended = json.loads((folder / GENERATION_FILE).read_text())
    except (OSError, ValueError):
        return {}
    wanted = {name: value for name, value in recommended.items() if name in _FIELDS and value is not None}
    if recommended.get("max_new_tokens"):
        wanted["max_tokens"] = recommended["max_new_tokens"]
    return wanted
