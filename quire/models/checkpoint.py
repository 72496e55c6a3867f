"""A checkpoint's files: where they are, and their tensors.

Only safetensors (https://huggingface.co/docs/safetensors) is read. Pickles are never opened.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# All that a text model needs. A pinned revision reaches every one of them: they come in one snapshot.
HUB_TEXTS = ("*.json", "*.jinja", "*.txt", "*.model")
HUB_FILES = (*HUB_TEXTS, "*.safetensors")
HUB_SKIPPED = ("*/*", "consolidated*", "*.fp16.safetensors", "*.fp32.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_LFS_POINTER = b"version https://git-lfs"


def resolve_checkpoint(
    model: str | os.PathLike[str], revision: str | None = None, files: Sequence[str] = HUB_FILES
) -> Path:
    """Return the local directory of a model: itself, or the hub's snapshot of `model`'s `files` at `revision`.

    A hub id is fetched once and then served from the cache; with HF_HUB_OFFLINE=1, from the cache only.
    Whatever looks like a path is never sent to the hub. Raises CheckpointError.
    """
    name = os.fspath(model)
    # os.path's answer is no, where Path's may be an OSError: a name that is too long is no directory.
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):
        if revision is not None:
            raise CheckpointError(f"{name!r} is a directory, which has no revision {revision!r}; leave revision out.")
        return path
    if name and os.path.exists(path):
        raise CheckpointError(f"{name!r} is a file; give the directory that holds config.json and the weights.")
    if _looks_like_path(name):
        raise CheckpointError(f"{name!r}: there is no such directory.")
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=list(files), ignore_patterns=list(HUB_SKIPPED)
            )
        )
    except Exception as error:  # the hub's, the network's or the disk's
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"{name!r}{at} is neither a directory here nor to be had from the Hugging Face hub: "
            f"{type(error).__name__}: {error}"
        ) from error


def _looks_like_path(name: str) -> bool:
    """A hub id is `name` or `owner/name`; whatever is shaped otherwise was meant as a path."""
    parts = name.split("/")
    return name.startswith((".", "~")) or "\\" in name or len(parts) > 2 or not all(part.strip() for part in parts)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a checkpoint's file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object.")
    return value


class Checkpoint:
    """The tensors of a directory's safetensors files, by name. Raises CheckpointError throughout."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[Path, Any] = {}
        self._home: dict[str, Path] = {}
        self._raw: dict[Path, _RawFile] = {}
        for path in self._weight_files():
            for name in self._open(path):
                if name in self._home:
                    raise CheckpointError(f"{path}: {name!r} is also in {self._home[name].name}.")
                self._home[name] = path

    def names(self) -> Iterator[str]:
        return iter(self._home)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as stored: a view of the file's memory map, whose pages are read when first touched."""
        path = self._home[name]
        try:
            return self._files[path].get_tensor(name)
        except Exception as error:  # SafetensorError, or torch's for a dtype that it does not have
            raise CheckpointError(f"{path}: {name!r} cannot be read: {error}") from error

    def read(self, name: str, out: torch.Tensor, first: int = 0) -> None:
        """Read into `out`, contiguous and of the stored dtype, the tensor's elements from number `first` on.

        From the file as it was opened, whatever has its name by now. Any number of threads may call this at once.
        """
        path = self._home[name]
        target: memoryview = out.view(-1).view(torch.uint8).numpy().data
        raw = self._raw[path]
        at = raw.starts[name] + first * out.element_size()
        try:
            while target:
                count = raw.read(target, at)
                if not count:
                    raise CheckpointError(f"{path}: ended before {name!r} did: it was cut while it was read.")
                target, at = target[count:], at + count
        except OSError as error:
            raise CheckpointError(f"{path}: {name!r} cannot be read: {error}") from error

    def file_of(self, name: str) -> str:
        return self._home[name].name

    def _open(self, path: Path) -> list[str]:
        try:
            file = safe_open(path, framework="pt", device="cpu")
            names = list(file.keys())
            self._files[path], self._raw[path] = file, _RawFile(path)
            if self._raw[path].starts.keys() != set(names):
                raise ValueError("it was replaced while it was opened")
            return names
        except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{path}: is damaged or no safetensors file: {error}{_hint(path)}") from error

    def _weight_files(self) -> list[Path]:
        if (self.directory / SINGLE).exists():
            return [self.directory / SINGLE]
        if (self.directory / INDEX).exists():
            return self._shards(self.directory / INDEX)
        pickles = sorted(path.name for pattern in _PICKLES for path in self.directory.glob(pattern))
        found = (
            f" (there is {', '.join(pickles[:3])}: a pickle, which can run code and is never opened)" if pickles else ""
        )
        raise CheckpointError(
            f"{self.directory}: neither {SINGLE} nor {INDEX} is there{found}. To convert a "
            "checkpoint that you trust: AutoModelForCausalLM.from_pretrained(path)"
            ".save_pretrained(path, safe_serialization=True), or the hub's https://huggingface.co/spaces/safetensors/convert"
        )

    def _shards(self, index: Path) -> list[Path]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: has no 'weight_map'.")
        for file in weight_map.values():
            # A plain name only: the index is the checkpoint author's, and must not point elsewhere on this
            # machine.
            if not isinstance(file, str) or not file.endswith(".safetensors") or "/" in file or "\\" in file:
                raise CheckpointError(f"{index}: {file!r} is not the name of a safetensors file beside it.")
        for file in set(weight_map.values()):
            if not os.path.isfile(self.directory / file):
                raise CheckpointError(f"{index}: {file!r} is not there.")
        shards = [self.directory / file for file in sorted(set(weight_map.values()))]
        held = {(name, path.name) for path in shards for name in self._open(path)}
        absent = sorted(set(weight_map.items()) - held)
        if absent:
            raise CheckpointError(f"{index}: {listed([f'{n} in {f}' for n, f in absent])} named there, but not found.")
        return shards


class _RawFile:
    """A safetensors file open for reading, and where its tensors start; safe_open, which checks it, does not say."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=0)
        self._lock = threading.Lock()
        size = int.from_bytes(self._file.read(8), "little")
        header = json.loads(self._file.read(size))
        header.pop("__metadata__", None)
        self.starts = {name: 8 + size + int(entry["data_offsets"][0]) for name, entry in header.items()}

    def read(self, target: memoryview, at: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [target], at)
        with self._lock:  # Windows has one place in the file for all threads
            self._file.seek(at)
            return self._file.readinto(target) or 0


def _hint(path: Path) -> str:
    try:
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
    except OSError:  # a directory: the error at hand says enough
        return ""
    return " (it is a git-lfs pointer: run `git lfs pull`)" if start == _LFS_POINTER else ""


def listed(names: list[str], most: int = 10) -> str:
    """The first names and how many there are: "3 (a, b, c)"."""
    more = ", ..." if len(names) > most else ""
    return f"{len(names)} ({', '.join(names[:most])}{more})"
