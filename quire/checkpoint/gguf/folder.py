"""A GGUF model as a folder like any other checkpoint's: config.json, the tokenizer's files, and links to its files.

Made once, in the user's cache, of what the file's header says; the weights stay where they are. So configuration,
tokenizer, chat template and recommended sampling go the way of every other model.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire import __version__
from quire.checkpoint.caches import cache_folder
from quire.checkpoint.gguf.file import GgufFile, open_gguf, parts_of
from quire.errors import CheckpointError

SUFFIX = ".gguf"
_FORM = 2  # of what is written; another number has it written anew, as another version of quire has
# Recommendations for sampling.
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip

logger = logging.getLogger("quire")


@dataclass(frozen=True)
class Source:
    """What is known of a file from elsewhere. sampling: recommendations, by generation_config.json's names, where the
    file says nothing; digest: its SHA-256 as records of Python packages have it (base64 for URLs, without padding),
    which is checked when the folder is made; way_out: what to do where it is another one."""

    sampling: Mapping[str, float] = field(default_factory=dict)
    digest: str | None = None
    way_out: str = "fetch it again"


_UNKNOWN = Source()


def gguf_folder(path: Path, source: Source = _UNKNOWN) -> Path:
    """The folder of a model. path: of its file, or of any of a split model's. Raises CheckpointError, and
    UnsupportedModelError for a family that is not read."""
    paths = [Path(os.path.abspath(one)) for one in parts_of(path)]
    try:
        folder = cache_folder() / "gguf" / f"{paths[0].stem[:60]}-{_key(paths, source)}"
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if (folder / "config.json").exists():
        return folder
    _check(paths[0], source)
    file = open_gguf(paths[0])
    try:
        folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        making = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    except OSError as error:
        logger.warning("%s: cannot be written (%s): what is made of %s is made anew each time", folder, error, path)
        return _temporary(file, source)
    try:
        _write(file, making, source)
        _move(making, folder)
        _tidy(folder.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def only_model(directory: Path) -> Path | None:
    """The GGUF model of a folder that has no other weights: its file, or the first of a split one; None: none is there.

    Raises CheckpointError where there are several.
    """
    found = sorted(one for one in directory.glob(f"*{SUFFIX}") if not one.name.startswith("mmproj"))
    models = {tuple(parts_of(one)) for one in found}
    if len(models) > 1:
        names = ", ".join(sorted(parts[0].name for parts in models)[:5])
        raise CheckpointError(f"{directory}: has several GGUF models: {names}; give the path of one.")
    return found[0] if found else None


def _check(path: Path, source: Source) -> None:
    if source.digest is None:
        return
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if base64.urlsafe_b64encode(found).decode().rstrip("=") != source.digest:
        raise CheckpointError(f"{path}: is damaged, its SHA-256 is another than recorded: {source.way_out}")


def _key(paths: Sequence[Path], source: Source) -> str:
    """What tells these files, as they are now, from all others, and what is known of them."""
    stats = [(str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino) for path in paths if (stat := path.stat())]
    known = [sorted(source.sampling.items()), source.digest]
    return hashlib.sha256(json.dumps([__version__, _FORM, stats, known]).encode()).hexdigest()[:16]


def _temporary(file: GgufFile, source: Source) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="quire-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _write(file, folder, source)
    return folder


def _write(file: GgufFile, folder: Path, source: Source) -> None:
    from quire.checkpoint.gguf.config import config_of  # only here: most checkpoints are no such file
    from quire.checkpoint.gguf.tokenizer import has_tokenizer, write_tokenizer

    config = config_of(file)
    try:
        if has_tokenizer(file):
            write_tokenizer(file, folder)
        else:
            logger.warning("%s: brings no tokenizer", file.name)
        for path in file.paths:
            (folder / path.name).symlink_to(path)
        _write_json(folder / "generation_config.json", {**source.sampling, **_generation(file)})
        _write_json(folder / "config.json", config)  # the last: it says that all is there
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written: {error.strerror or error}") from error


def _generation(file: GgufFile) -> dict[str, Any]:
    """Which tokens end an answer, and how to sample, as far as the file says it."""
    from quire.checkpoint.gguf.tokenizer import ends_of

    found: dict[str, Any] = {"eos_token_id": ends_of(file) or None}
    for key, name in _SAMPLING.items():
        value = file.metadata.get(f"general.sampling.{key}")
        if value is None:
            continue
        if type(value) not in (int, float) or not math.isfinite(value):
            raise CheckpointError(f"{file.name}: general.sampling.{key} is {repr(value)[:60]}: it must be a number.")
        found[name] = value
    return found


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _move(making: Path, folder: Path) -> None:
    try:
        making.rename(folder)
    except OSError as error:
        if not (folder / "config.json").exists():  # else another process was faster
            raise CheckpointError(f"{folder}: cannot be written: {error.strerror or error}; remove it") from error


def _tidy(parent: Path) -> None:
    """Folders of files that are not there any more."""
    with contextlib.suppress(OSError):
        for folder in parent.iterdir():
            links = list(folder.glob(f"*{SUFFIX}"))
            if links and not all(one.exists() for one in links):
                shutil.rmtree(folder, ignore_errors=True)
