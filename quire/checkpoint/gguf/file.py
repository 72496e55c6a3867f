"""One GGUF model: its file, or all files of a split one."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.checkpoint.gguf.header import GgufHeader, GgufTensor, read_gguf_header
from quire.checkpoint.plain import open_plain
from quire.errors import CheckpointError

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_FLOATS = 1 << 20
_F32 = 0
_TOKENIZER = "tokenizer."  # its keys begin so
Stamp = tuple[int, int, int, int]  # a file as it is now: device, number, bytes, time of its last change


@dataclass(frozen=True)
class GgufFile:
    """What the files say: the first one's metadata, the tensors by name, and which file each is in."""

    paths: Sequence[Path]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    places: Mapping[str, Path]

    @property
    def name(self) -> str:
        """For messages."""
        return str(self.paths[0])

    @property
    def architecture(self) -> str:
        found = self.metadata.get("general.architecture")
        if not isinstance(found, str):
            raise CheckpointError(f"{self.name}: general.architecture, which says what model it is, is not there.")
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """The value of the architecture's key; numbers that were shortened to 32 bits as they were before.

        Raises CheckpointError for a value that is no number, text, truth value or array of these.
        """
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, list):
            return [_shortened(one) for one in value]
        return _shortened(value)

    def need(self, key: str) -> Any:
        """The same for a key that must be there. Raises CheckpointError."""
        if f"{self.architecture}.{key}" not in self.metadata:
            raise CheckpointError(f"{self.name}: has no {self.architecture}.{key}, which a model of this kind needs.")
        return self.get(key)

    def number(self, key: str, default: int | None = None) -> int:
        """A whole number from 1 on. Raises CheckpointError."""
        value = self.need(key) if default is None else self.get(key, default)
        if type(value) is not int or not 1 <= value <= 1 << 31:
            shown = str(value)[:60]
            raise CheckpointError(f"{self.name}: {self.architecture}.{key} is {shown}: it must be a number from 1 on.")
        return value

    def has(self, name: str) -> bool:
        """Whether a tensor is there; of a layer's, in the first."""
        return name in self.tensors or f"blk.0.{name}" in self.tensors

    def floats(self, name: str) -> list[float]:
        """The numbers of a small tensor, which must be of 32 bits each. Raises CheckpointError."""
        tensor = self.tensors[name]
        if tensor.kind != _F32 or tensor.nbytes > 4 * _MOST_FLOATS:
            raise CheckpointError(f"{self.places[name]}: {name} must be some numbers of kind F32.")
        try:
            with open_plain(self.places[name]) as file:
                file.seek(tensor.start)
                data = file.read(tensor.nbytes)
        except OSError as error:
            raise CheckpointError(f"{self.places[name]}: cannot be read: {error.strerror or error}") from error
        if len(data) != tensor.nbytes:
            raise CheckpointError(f"{self.places[name]}: ended before {name} did: it was cut while it was read.")
        return [_shortened(one) for one in struct.unpack(f"<{len(data) // 4}f", data)]

    @property
    def heads(self) -> tuple[int, int]:
        """Of queries, and of keys."""
        count = self.number("attention.head_count")
        return count, self.number("attention.head_count_kv", count)

    @property
    def head_dim(self) -> int:
        """Of a head of keys; where no key says it, as the projections have it."""
        heads, groups = self.heads
        if "blk.0.attn_q.weight" in self.tensors:
            size = self.rows("attn_q.weight") // heads
        elif "blk.0.attn_qkv.weight" in self.tensors:
            size = self.rows("attn_qkv.weight") // (heads + 2 * groups)
        else:
            size = self.number("embedding_length") // heads
        return self.number("attention.key_length", max(1, size))

    @property
    def dense_layers(self) -> int:
        """How many of the first layers have no experts, whatever the key says: some files have it wrong."""
        layers = self.number("block_count")
        return next((one for one in range(layers) if f"blk.{one}.ffn_gate_inp.weight" in self.tensors), layers)

    def rows(self, name: str) -> int:
        """Of a tensor of the first layer. Raises CheckpointError where it is not there."""
        tensor = self.tensors.get(f"blk.0.{name}")
        if tensor is None:
            raise CheckpointError(f"{self.name}: has no tensor blk.0.{name}, which a model of this kind needs.")
        return tensor.shape[0]


def _shortened(value: Any) -> Any:
    """1e-5 as a number of 32 bits is 9.99999974e-06: the shortest that becomes it is meant."""
    return float(str(np.float32(value))) if isinstance(value, float) and np.isfinite(np.float32(value)) else value


# Of the model that was opened last, what `open_tensors` needs. One alone, as only a start asks twice.
_last: dict[tuple[Stamp, ...], GgufFile] = {}


def open_tensors(path: Path) -> GgufFile:
    """As `open_gguf`, with no key of the tokenizer's. Of files that were opened last and have not changed, what was
    read then: a start makes the configuration of the header first, and needs the tensors afterwards."""
    paths = parts_of(path)
    try:
        found = _last.get(tuple(_stamp(one.stat()) for one in paths))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    if found is None:
        return _without_tokenizer(open_gguf(path))
    now = dict(zip(found.paths, paths, strict=True))  # a link may have led there
    return replace(found, paths=tuple(paths), places={name: now[one] for name, one in found.places.items()})


def _without_tokenizer(file: GgufFile) -> GgufFile:
    """Its lists of texts are most of what a header takes."""
    return replace(file, metadata={key: one for key, one in file.metadata.items() if not key.startswith(_TOKENIZER)})


def _stamp(stat: os.stat_result) -> Stamp:
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def open_gguf(path: Path) -> GgufFile:
    """Read the headers of a model's files. path: of the only one, or of any of a split model's.

    Raises CheckpointError for what is no GGUF file, for a damaged one, and for parts that are missing or of another
    model.
    """
    paths = parts_of(path)
    metadata: Mapping[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    places: dict[str, Path] = {}
    stamps: list[Stamp] = []
    for number, one in enumerate(paths):
        header, stamp = _header(one)
        stamps.append(stamp)
        if number == 0:
            metadata = header.metadata
        if len(paths) > 1:
            _check_part(one, header.metadata, number, len(paths))
        twice = next((name for name in header.tensors if name in tensors), None)
        if twice is not None:
            raise CheckpointError(f"{one}: {twice[:80]!r} is also in {places[twice].name}.")
        tensors.update(header.tensors)
        places.update(dict.fromkeys(header.tensors, one))
    split = metadata.get("split.count", 1)
    if split not in (0, len(paths)):
        raise CheckpointError(f"{path}: is a part of {split}, and its name does not end as -00001-of-{split:05}.gguf.")
    total = metadata.get("split.tensors.count", len(tensors))
    if len(paths) > 1 and total != len(tensors):
        raise CheckpointError(
            f"{path}: the parts hold {len(tensors):,} tensors together, and the first says {total:,}."
        )
    if not tensors:
        raise CheckpointError(
            f"{path}: holds no tensors: it is a vocabulary, or the first part of a split model alone."
        )
    file = GgufFile(tuple(paths), metadata, tensors, places)
    _last.clear()
    _last[tuple(stamps)] = _without_tokenizer(file)
    return file


def parts_of(path: Path) -> list[Path]:
    """All files of a model, of which `path` is one. Raises CheckpointError for one that is not there."""
    found = _PART.fullmatch(path.name)
    if found is None:
        return [path]
    stem, count = found[1], int(found[3])
    if not 1 <= int(found[2]) <= count:
        raise CheckpointError(f"{path}: there is no part {int(found[2])} of {count}.")
    paths = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [one.name for one in paths if not os.path.isfile(one)]
    if missing:
        raise CheckpointError(f"{path}: is a part of {count}, of which {len(missing)} are not there: {missing[0]}, ...")
    return paths


def _check_part(path: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    said = metadata.get("split.no"), metadata.get("split.count")
    if said != (number, count):
        raise CheckpointError(f"{path}: says that it is part {said[0]} of {said[1]} (from 0), not {number} of {count}.")


def _header(path: Path) -> tuple[GgufHeader, Stamp]:
    try:
        with open_plain(path) as file:
            stat = os.fstat(file.fileno())
            return read_gguf_header(file, stat.st_size), _stamp(stat)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is damaged or no GGUF file: {error}.") from error
