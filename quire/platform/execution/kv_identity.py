"""What a block's bits depend on beside its key: the model, the code, the machine, and how blocks are laid out."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import quire
from quire import kernels
from quire.config import EngineConfig
from quire.errors import CheckpointError
from quire.kernels.exchange import Columns
from quire.layers.shards import Shard
from quire.layers.stages import Stage
from quire.models.base import CausalLM
from quire.types import KVSpec

_FORMAT = 1  # of what is hashed here, and of what `PoolBlocks` packs
_PIECE_BYTES = 8 << 20
_PACKAGES = ("numpy", "torch", "transformers", "Pillow", "torchvision")  # the last two make what towers see of pictures
# Files whose bytes say what is computed. Those of weights are named by what was read.
_CONFIGURATION = "config.json"


def identity(config: EngineConfig, path: Path, model: CausalLM, spec: KVSpec, max_model_len: int) -> str:
    """A digest, hexadecimal: blocks of two engines with the same one have the same bits under the same keys. It says
    what this process has read and computes with; where several compute one model together, see `of_all`.

    It covers the bytes of the checkpoint's files, which takes a second for a gigabyte or two. Raises CheckpointError
    where these have changed since they were read.
    """
    settings = config.model
    parts = [
        ("format", _FORMAT),
        ("weights", _weights(path, model)),
        ("config", _file_digest(path / _CONFIGURATION) if (path / _CONFIGURATION).is_file() else ""),
        ("overrides", repr(sorted(settings.hf_overrides.items(), key=str))),
        ("model", f"{type(model).__module__}.{type(model).__qualname__}", _code(type(model))),
        ("dtype", str(model.dtype), settings.quantization, settings.model_impl, settings.load_format),
        ("purpose", settings.runner, settings.conversion, repr(sorted(settings.pooler_config.items(), key=str))),
        ("length", max_model_len),
        ("layout", repr(spec), repr(spec.groups), config.cache.block_size),
        ("shards", config.tensor_parallel_size),
        ("code", quire.__version__, _package(next(model.parameters()).is_cuda)),
        ("packages", *(f"{name} {_version(name)}" for name in _PACKAGES), sys.version),
        ("machine", *_machine(next(model.parameters())), settings.exact_products),
    ]
    return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()


def of_all(identity: str, shard: Shard | None, stage: Stage | None) -> str:
    """Of all workers that compute one model together, made of each one's own: all get the same, as each has its part of
    every block. Every one of them must call this. A worker that has read other weights than before, on a machine of its
    own, changes it for all: else its parts would stand beside older ones of the others.
    """
    if shard is not None:
        told = _bytes_of(identity)[None]
        whole = shard.exchange.gather(told, Columns([[told.shape[1]] * shard.size]))
        identity = hashlib.sha256(b"of all" + whole.numpy().tobytes()).hexdigest()
    if stage is not None:
        digests = [one.numpy().tobytes() for one in stage.pipe.gather(_bytes_of(identity))]
        identity = hashlib.sha256(b"of all stages" + b"".join(digests)).hexdigest()
    return identity


def _bytes_of(identity: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(identity), dtype=torch.uint8)


def _weights(path: Path, model: CausalLM) -> list[tuple[str, str]]:
    """(name, digest) of each file that the weights were read from."""
    stamps = {stamp[:1] + stamp[1:] for stamp in model.read_from}
    found: dict[tuple[str, int, int, int], Path] = {}
    for file in _near(path):
        stamp = _stamp(file)
        if stamp in stamps:
            found[stamp] = file
    if len(found) != len(stamps):
        raise CheckpointError(f"{path}: its files have changed since they were read: start the engine again.")
    files = [found[stamp] for stamp in sorted(stamps)]
    with ThreadPoolExecutor(min(8, len(files) or 1)) as pool:
        digests = list(pool.map(_file_digest, files))
    if [_stamp(file) for file in files] != sorted(stamps):
        raise CheckpointError(f"{path}: its files have changed while they were looked at: start the engine again.")
    return [(file.name, digest) for file, digest in zip(files, digests, strict=True)]


def _near(path: Path) -> Iterator[Path]:
    """The files of a folder and of those in it."""
    for entry in sorted(path.iterdir()):
        if entry.is_dir():
            yield from sorted(one for one in entry.iterdir() if one.is_file())
        elif entry.is_file():
            yield entry


def _stamp(file: Path) -> tuple[str, int, int, int]:
    """As `Checkpoint.stamp` has it."""
    status = file.stat()
    return file.name, status.st_ino, status.st_size, status.st_mtime_ns


def _file_digest(file: Path) -> str:
    hashed = hashlib.sha256()
    piece = bytearray(_PIECE_BYTES)
    with open(file, "rb", buffering=0) as opened:
        while count := opened.readinto(piece):
            hashed.update(memoryview(piece)[:count])
    return hashed.hexdigest()


def _package(with_cuda: bool) -> str:
    """quire's own code, kernels included: what was changed since its version was named counts too.

    with_cuda: the GPU's kernels compute.
    """
    root = Path(quire.__file__).parent
    files: set[Path] = {*root.rglob("*.py"), *root.rglob("*.so")}
    for name in ("_C", "_cuda") if with_cuda else ("_C",):
        extension = find_spec(f"quire.kernels.{name}")  # not what happens to be imported: each process finds the same
        if extension is not None and extension.origin:
            files.add(Path(extension.origin))  # of an editable installation, it lies elsewhere
    return _digest_of((str(file.name), _file_digest(file)) for file in sorted(files))


def _code(model: type[Any]) -> str:
    """The files of a model's classes, which may be a package's of its own."""
    files = []
    for one in model.__mro__:
        source = inspect.getsourcefile(one) if one.__module__ not in ("builtins", "abc", "typing") else None
        if source is not None and not one.__module__.startswith(("torch.", "quire.")):
            files.append((one.__module__, _file_digest(Path(source))))
    return _digest_of(files)


def _digest_of(parts: Iterable[object]) -> str:
    return hashlib.sha256(repr(list(parts)).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _machine(weight: torch.Tensor) -> list[str]:
    """The back end and what it runs on: instruction sets and GPUs add in orders of their own, and torch's functions,
    which towers use, differ by processor."""
    backend = kernels.backend_of(weight)
    told = [backend.__name__, platform.machine(), torch.backends.cpu.get_cpu_capability(), _processor()]
    isa = getattr(kernels.backend(), "isa", None)
    told += [isa() if isa is not None else "", os.environ.get("QUIRE_KERNELS", "")]
    if weight.is_cuda:
        properties = torch.cuda.get_device_properties(weight.device)
        told += [properties.name, f"{properties.major}.{properties.minor}", str(torch.version.cuda)]
    return told


def _processor() -> str:
    """Vendor, family, model: what /proc/cpuinfo says of the first."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            first = file.read().partition("\n\n")[0]
    except OSError:
        return platform.processor()
    kept = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in kept)
