"""`quire quantize`: a checkpoint written anew with fewer bits, which loads as what `quantization` makes of it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import torch

from quire.checkpoint.files import HUB_TEXTS, Checkpoint
from quire.checkpoint.safetensors_writer import Planned, write_tensors, write_text
from quire.checkpoint.weights import StoredWeight, made
from quire.errors import CheckpointError
from quire.models.loader import Prepared, prepare
from quire.models.quantization.kept import settings_of

_LARGEST = 4 << 30  # bytes of a file
_INDEXES = ("*.index.json", "config.json")


@dataclass(frozen=True, slots=True)
class Written:
    """Bytes of the weights, before and after."""

    before: int
    after: int


def keep(path: Path, out: Path, name: str, report: Callable[[int, int], None], load_format: str = "auto") -> Written:
    """Write to `out`, which must not exist, what `quantization=name` makes of the checkpoint in the folder `path`.

    It is there whole or not at all. report: is told how many bytes of how many are written. Raises QuireErrors.
    """
    _check_free(out)
    prepared = prepare(path, load_format, name)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
        try:
            written = _write(prepared, path, making, name, report)
            making.chmod(0o755 & ~_umask())
            _check_free(out)
            making.rename(out)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {error.strerror or error}") from error
    return written


def _check_free(out: Path) -> None:
    if os.path.lexists(out):
        raise CheckpointError(f"{out}: is there already, and nothing is written over: name another folder.")


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _write(prepared: Prepared, path: Path, folder: Path, name: str, report: Callable[[int, int], None]) -> Written:
    for file in sorted(path.iterdir()):
        wanted = any(fnmatch(file.name, one) for one in HUB_TEXTS) and not any(fnmatch(file.name, i) for i in _INDEXES)
        if wanted and file.is_file():
            shutil.copyfile(file, folder / file.name)
    checkpoint = prepared.checkpoint
    weights = {one.name: one for one in prepared.matches.wanted}
    planned = [Planned(one.name, _dtype(one, checkpoint), tuple(one.shape)) for one in weights.values()]
    total, done = sum(one.nbytes for one in planned), 0
    for size in write_tensors(folder, planned, lambda place: made(checkpoint, weights[place]), _LARGEST):
        done += size
        report(done, total)
    dtype = str(prepared.dtype).removeprefix("torch.")
    config = {**prepared.raw, "quantization_config": settings_of(name)}
    if not config.get("dtype") and not config.get("torch_dtype"):
        config["dtype"] = dtype
    write_text(folder / "config.json", json.dumps(config, indent=2))
    stored = {tensor for one in weights.values() for tensor in one.tensors}
    return Written(sum(checkpoint.tensor(tensor).nbytes for tensor in stored), total)


def _dtype(one: StoredWeight, checkpoint: Checkpoint) -> torch.dtype:
    """Of a place: rows' own, else the files'."""
    if one.dtype is not None and not one.dtype.is_floating_point:
        return one.dtype
    return checkpoint.tensor(one.tensors[0]).dtype
