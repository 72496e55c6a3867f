"""modules.json: what sentence-transformers runs, a model and layers that have files in folders beside it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from quire.checkpoint import strict_json
from quire.checkpoint.plain import open_plain
from quire.errors import CheckpointError

MODULES = "modules.json"
_MOST_BYTES = 1 << 20
_MOST_MODULES = 64
_FILES_KEPT = 8


def listed_modules(directory: Path) -> tuple[Mapping[str, Any], ...]:
    """What modules.json lists: the file is read once, as long as it stays the same. Raises CheckpointError."""
    file = directory / MODULES
    try:
        state = file.stat()
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    return _read(file, (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns))


@lru_cache(maxsize=_FILES_KEPT)
def _read(file: Path, state: tuple[int, ...]) -> tuple[Mapping[str, Any], ...]:
    try:
        with open_plain(file) as opened:
            data = opened.read(_MOST_BYTES + 1)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
        modules = strict_json.parse(data.decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read: {error}") from error
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise CheckpointError(f"{file}: must be a list of objects.")
    if len(modules) > _MOST_MODULES:
        raise CheckpointError(f"{file}: lists {len(modules):,} modules, and at most {_MOST_MODULES} are taken.")
    return tuple(modules)


def model_folder(directory: Path) -> Path:
    """Where the model itself lies: the folder, or that of the one module where this is a CLIPModel, which has a folder
    of its own. Raises CheckpointError."""
    if (directory / "config.json").exists() or not (directory / MODULES).exists():
        return directory
    modules = listed_modules(directory)
    if len(modules) != 1 or str(modules[0].get("type")).rpartition(".")[2] != "CLIPModel":
        return directory
    return directory if modules[0].get("path") in (None, "", ".") else module_folder(directory, modules[0]["path"])


def module_folder(directory: Path, name: Any) -> Path:
    """A folder beside the model, and nowhere else: the name is the checkpoint author's. Raises CheckpointError."""
    plain = name.rstrip("/") if isinstance(name, str) else ""
    if not plain or plain.startswith(".") or any(sign in plain for sign in "/\\\0"):
        raise CheckpointError(f"{directory / MODULES}: path={name!r} is not the name of a folder beside it.")
    return directory / plain
