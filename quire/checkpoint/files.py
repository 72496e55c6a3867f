"""A checkpoint's files: where they are, and their tensors.

Safetensors (https://huggingface.co/docs/safetensors), or where there are none, torch's pytorch_model.bin, whose pickle
this process never opens (`quire.checkpoint.pickled`).
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from quire.checkpoint import smollm2, strict_json
from quire.checkpoint.gguf.folder import SUFFIX, gguf_folder, only_model
from quire.checkpoint.hub import Hub as Hub
from quire.checkpoint.hub import fetch_gguf, is_gguf_of_hub
from quire.checkpoint.modules import MODULES, listed_modules, model_folder
from quire.checkpoint.pickled import open_pickles
from quire.checkpoint.plain import open_plain as open_plain  # which others import from here
from quire.checkpoint.safetensors_header import read_header
from quire.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLED_INDEX = "pytorch_model.bin.index.json"
PICKLED = "pytorch_model.bin"
# All that a text model needs. A pinned revision reaches every one of them: they come in one snapshot.
HUB_TEXTS = ("*.json", "*.jinja", "*.txt", "*.model")
HUB_FILES = (*HUB_TEXTS, "*.safetensors")
HUB_PICKLED = (*HUB_TEXTS, PICKLED, "pytorch_model-*-of-*.bin")
HUB_SKIPPED = ("*/*", "consolidated*", "*.fp16.safetensors", "*.fp32.safetensors")
_OTHERS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.gguf", "*.h5", "*.msgpack", "*.index.json")
_FOLDER = re.compile(r"\w[\w.-]*")  # with no sign that means more in a pattern of names
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LFS_POINTER = b"version https://git-lfs"
_MOST_JSON = 64 << 20  # bytes
_HUB = Hub()


def resolve_checkpoint(
    model: str | os.PathLike[str],
    revision: str | None = None,
    files: Sequence[str] = HUB_FILES,
    hub: Hub = _HUB,
) -> Path:
    """Return the local directory of a model: itself, or the hub's snapshot of `model`'s `files` at `revision`.

    A hub id is fetched once and then served from the cache; with HF_HUB_OFFLINE=1, from the cache only.
    A GGUF file, here or on the hub (owner/repository:file.gguf), stands for the folder that is made of it. Whatever
    looks like a path is never sent to the hub; `smollm2` is in a package. Raises CheckpointError.
    """
    name = os.fspath(model)
    # os.path's answer is no, where Path's may be an OSError: a name that is too long is no directory.
    path = Path(os.path.expanduser(name))
    if name and os.path.isdir(path):
        if revision is not None:
            raise CheckpointError(f"{name!r} is a directory, which has no revision {revision!r}; leave revision out.")
        alone = None if (path / "config.json").exists() else only_model(path)
        return path if alone is None else gguf_folder(alone)
    if name and os.path.exists(path):
        return _of_file(path, name, revision)
    if is_gguf_of_hub(name):
        return gguf_folder(fetch_gguf(name, revision, hub))
    if _looks_like_path(name):
        raise CheckpointError(f"{name!r}: there is no such directory.")
    if name == smollm2.NAME:
        if revision is not None:
            raise CheckpointError(f"{name!r} comes from a package, which has no revision {revision!r}; leave it out.")
        return smollm2.checkpoint_folder()
    if os.environ.get("VLLM_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise CheckpointError(
            f"{name!r}: VLLM_USE_MODELSCOPE is set, and models come from the Hugging Face hub or a directory alone."
        )
    return _snapshot(name, revision, files, HUB_SKIPPED, hub)


def _snapshot(name: str, revision: str | None, files: Sequence[str], skipped: Sequence[str], hub: Hub) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name,
                revision=revision,
                allow_patterns=list(files),
                ignore_patterns=list(skipped),
                cache_dir=os.path.expanduser(hub.folder) if hub.folder else None,
                token=hub.token,
            )
        )
    except Exception as error:  # the hub's, the network's or the disk's
        at = f" at revision {revision!r}" if revision else ""
        raise CheckpointError(
            f"{name!r}{at} is neither a directory here nor to be had from the Hugging Face hub: "
            f"{type(error).__name__}: {error}"
        ) from error


def _of_file(path: Path, name: str, revision: str | None) -> Path:
    """The folder that stands for a GGUF file."""
    if path.suffix.lower() != SUFFIX:
        raise CheckpointError(
            f"{name!r} is a file; give the directory that holds config.json and the weights, or a {SUFFIX} file."
        )
    if revision is not None:
        raise CheckpointError(f"{name!r} is a file, which has no revision {revision!r}; leave revision out.")
    return gguf_folder(path)


def resolve_weights(
    model: str | os.PathLike[str],
    revision: str | None = None,
    load_format: str = "auto",
    hub: Hub = _HUB,
) -> Path:
    """As `resolve_checkpoint`, for a whole model. Of the hub's files .bin ones are fetched where `load_format` asks for
    them ("pt"), or where there are no others ("auto"), and sentence-transformers' modules, which lie in folders.
    Raises CheckpointError."""
    path = resolve_checkpoint(model, revision, HUB_PICKLED if load_format == "pt" else HUB_FILES, hub)
    name = os.fspath(model)
    if os.path.exists(os.path.expanduser(name)) or is_gguf_of_hub(name):
        return model_folder(path)
    commit = path.name if _COMMIT.fullmatch(path.name) else revision  # the same, wherever a branch points by now
    if load_format == "auto" and not (path / SINGLE).exists() and not (path / INDEX).exists():
        path = resolve_checkpoint(model, commit, HUB_PICKLED, hub)
    folders = _folders_beside(path)
    if folders:
        texts = HUB_TEXTS if model_folder(path) != path else ("config.json",)  # a whole model, or a layer
        patterns = [f"{folder}/{file}" for folder in folders for file in (*texts, SINGLE, PICKLED)]
        path = _snapshot(name, commit, patterns, (), hub)
    return model_folder(path)


def _folders_beside(path: Path) -> list[str]:
    """Those in which sentence-transformers' modules have their files; names that are others are refused later."""
    if not (path / MODULES).exists():
        return []
    names = [str(one.get("path")).rstrip("/") for one in listed_modules(path)]
    return [name for name in names if _FOLDER.fullmatch(name)]


def _looks_like_path(name: str) -> bool:
    """A hub id is `name` or `owner/name`; whatever is shaped otherwise was meant as a path."""
    parts = name.split("/")
    return name.startswith((".", "~")) or "\\" in name or len(parts) > 2 or not all(part.strip() for part in parts)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a checkpoint's file. Raises CheckpointError, for a key that is there twice too."""
    try:
        with open_plain(path) as file:
            data = file.read(_MOST_JSON + 1)
        if len(data) > _MOST_JSON:
            raise CheckpointError(f"{path}: has more than {_MOST_JSON:,} bytes, and so many are read of a JSON file.")
        value = strict_json.parse(data.decode("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(value).__name__}, not an object.")
    return value


class Checkpoint:
    """The tensors of a directory's files, by name. Raises CheckpointError throughout.

    load_format: "safetensors"; "pt", torch's .bin files; or "auto", the first of these that is there.
    """

    def __init__(self, directory: Path, load_format: str = "auto") -> None:
        self.directory = directory
        self._files: dict[Path, Any] = {}
        self._home: dict[str, Path] = {}
        self._raw: dict[Path, _RawFile] = {}
        for path in self._weight_files(load_format):
            for name in self._open(path):
                if name in self._home:
                    raise CheckpointError(f"{path}: {name!r} is also in {self._home[name].name}.")
                self._home[name] = path

    def names(self) -> Iterator[str]:
        return iter(self._home)

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as stored: a view of the file's memory map, whose pages are read when first touched.

        Of a .bin file it may have any strides."""
        path = self._home[name]
        try:
            tensor: torch.Tensor = self._files[path].get_tensor(name)
            return tensor
        except Exception as error:  # SafetensorError, or torch's for a dtype that it does not have
            raise CheckpointError(f"{path}: {name!r} cannot be read: {error}") from error

    def read(self, name: str, out: torch.Tensor, first: int = 0) -> None:
        """Read into `out`, contiguous and of the stored dtype, a contiguous tensor's elements from number `first` on.

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

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every tensor, by name; none of them is read."""
        return {name: self._raw[path].shapes[name] for name, path in self._home.items()}

    def file_of(self, name: str) -> str:
        return self._home[name].name

    def stamp(self) -> tuple[tuple[str, int, int, int], ...]:
        """What tells these files, as they are now, from others: name, inode, size and time of the last change."""
        stats = {path.name: raw.status() for path, raw in self._raw.items()}
        return tuple((name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for name, stat in sorted(stats.items()))

    def _open(self, path: Path) -> list[str]:
        if path in self._files:
            return list(self._files[path].keys())
        try:
            raw = _RawFile.of_safetensors(path)  # first: it reads the header alone, and looks closer
            file = safe_open(path, framework="pt", device="cpu")
            names = list(file.keys())
            self._files[path], self._raw[path] = file, raw
            if self._raw[path].starts.keys() != set(names):
                raise ValueError("it was replaced while it was opened")
            return names
        except (SafetensorError, OSError, ValueError, LookupError, TypeError) as error:
            raise CheckpointError(f"{path}: is damaged or no safetensors file: {error}{_hint(path)}") from error

    def _open_pickles(self, paths: Sequence[Path]) -> None:
        """Several at once: they need a process."""
        files = []
        for path in paths:
            if hint := _hint(path):
                raise CheckpointError(f"{path}: is no file of weights{hint}.")
            try:
                files.append(open_plain(path))
            except OSError as error:
                raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
        for path, file in zip(paths, open_pickles(paths, files), strict=True):
            self._files[path], self._raw[path] = file, _RawFile(file.file, file.starts, file.shapes, file.origin)

    def _weight_files(self, load_format: str) -> list[Path]:
        if load_format != "pt":
            if (self.directory / SINGLE).exists():
                return [self.directory / SINGLE]
            if (self.directory / INDEX).exists():
                return self._shards(self.directory / INDEX, ".safetensors")
        if load_format != "safetensors":
            if (self.directory / PICKLED).exists():
                self._open_pickles([self.directory / PICKLED])
                return [self.directory / PICKLED]
            if (self.directory / PICKLED_INDEX).exists():
                return self._shards(self.directory / PICKLED_INDEX, ".bin")
        raise CheckpointError(f"{self.directory}: {self._nothing_found(load_format)}")

    def _nothing_found(self, load_format: str) -> str:
        wanted = {"pt": (PICKLED, PICKLED_INDEX), "safetensors": (SINGLE, INDEX)}
        names = wanted.get(load_format, (SINGLE, INDEX, PICKLED, PICKLED_INDEX))
        others = sorted(path.name for pattern in _OTHERS for path in self.directory.glob(pattern))
        found = f" There is {', '.join(others[:3])}:" if others else ""
        if others and load_format != "auto" and any(name in others for name in (SINGLE, INDEX, PICKLED, PICKLED_INDEX)):
            found += f" load_format={load_format!r} does not read that; 'auto' does."
        elif others:
            found += (
                " weights of another name or kind. To convert a checkpoint that you trust: "
                "AutoModelForCausalLM.from_pretrained(path).save_pretrained(path)."
            )
        return f"none of {', '.join(names)} is there.{found}"

    def _shards(self, index: Path, suffix: str) -> list[Path]:
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: has no 'weight_map'.")
        for file in weight_map.values():
            # A plain name only: the index is the checkpoint author's, and must not point elsewhere on this
            # machine.
            if not isinstance(file, str) or not file.endswith(suffix) or "/" in file or "\\" in file:
                raise CheckpointError(f"{index}: {file!r} is not the name of a {suffix} file beside it.")
        for file in set(weight_map.values()):
            if not os.path.isfile(self.directory / file):
                raise CheckpointError(f"{index}: {file!r} is not there.")
        shards = [self.directory / file for file in sorted(set(weight_map.values()))]
        if suffix == ".bin":
            self._open_pickles(shards)
        held = {(name, path.name) for path in shards for name in self._open(path)}
        absent = sorted(set(weight_map.items()) - held)
        if absent:
            raise CheckpointError(f"{index}: {listed([f'{n} in {f}' for n, f in absent])} named there, but not found.")
        return shards


class _RawFile:
    """A file open for reading, where its tensors start, and their shapes. origin: what it may be a copy of."""

    def __init__(
        self,
        file: FileIO | BufferedReader,
        starts: Mapping[str, int],
        shapes: Mapping[str, tuple[int, ...]],
        origin: BufferedReader | None = None,
    ) -> None:
        self._file = file
        self._origin = origin or file
        self._lock = threading.Lock()
        self.starts = starts
        self.shapes = shapes

    @classmethod
    def of_safetensors(cls, path: Path) -> _RawFile:
        """safe_open does not say where the tensors start. Raises ValueError and OSError."""
        file = open_plain(path)
        entries = read_header(file, os.fstat(file.fileno()).st_size)
        starts = {name: entry.start for name, entry in entries.items()}
        return cls(file, starts, {name: entry.shape for name, entry in entries.items()})

    def status(self) -> os.stat_result:
        return os.fstat(self._origin.fileno())

    def read(self, target: memoryview, at: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [target], at)
        with self._lock:  # Windows has one place in the file for all threads
            self._file.seek(at)
            return self._file.readinto(target) or 0


def _hint(path: Path) -> str:
    try:
        with open_plain(path) as file:
            start = file.read(len(_LFS_POINTER))
    except OSError:  # a directory, a pipe: the error at hand says enough
        return ""
    return " (it is a git-lfs pointer: run `git lfs pull`)" if start == _LFS_POINTER else ""


def listed(names: list[str], most: int = 10) -> str:
    """The first names and how many there are: "3 (a, b, c)"."""
    more = ", ..." if len(names) > most else ""
    return f"{len(names)} ({', '.join(names[:most])}{more})"
