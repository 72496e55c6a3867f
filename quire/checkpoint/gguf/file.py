"""One GGUF model: its file, or all files of a split one."""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from quire.checkpoint.gguf.header import GgufHeader, GgufTensor, read_gguf_header
from quire.checkpoint.plain import open_plain
from quire.errors import CheckpointError, UnsupportedModelError

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MOST_FLOATS = 1 << 20
_F32 = 0
# Architectures in which layers without heads of keys have something else.
_SOME_ATTEND = frozenset({"granitehybrid"})
_LAYER = re.compile(r"blk\.(\d+)\.")
_MOST_LAYERS = 1024
_TOKENIZER = "tokenizer."  # its keys begin so
Stamp = tuple[int, int, int, int]  # a file as it is now: device, number, bytes, time of its last change


@dataclass(frozen=True)
class GgufFile:
    """What the files say: the first one's metadata, the tensors by name, and which file each is in.

    asked: the architecture's keys that somebody has read the value of, and the tensors; `keys` refuses the others.
    """

    paths: Sequence[Path]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    places: Mapping[str, Path]
    asked: set[str] = field(default_factory=set, compare=False, repr=False)

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

    def says(self, key: str) -> bool:
        """Whether the architecture's key is there."""
        return f"{self.architecture}.{key}" in self.metadata

    def value(self, key: str) -> Any:
        """What the architecture's key says, without marking it as read; numbers that were shortened to 32 bits as they
        were before. None: it is not there."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if isinstance(value, np.ndarray):
            value = value.tolist()
        return [_shortened(one) for one in value] if isinstance(value, list) else _shortened(value)

    def get(self, key: str, default: Any = None) -> Any:
        """The same, of whatever kind it is, and `default` for a key that is not there."""
        self.asked.add(key)
        return self.value(key) if self.says(key) else default

    def number(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from `least` on. default: for a key that is not there; None: it must be. Raises
        CheckpointError for what is none, UnsupportedModelError for an array that says different ones by layer."""
        return self._number(key, self.get(key, default), least)

    def real(self, key: str, default: float | None = None) -> float:
        """A finite number. Raises as `number` does."""
        value = self._one(key, self.get(key, default))
        if type(value) not in (int, float) or not math.isfinite(value):
            self._refuse(key, value, "must be a number")
        return float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """A truth value. Raises as `number` does."""
        value = self._one(key, self.get(key, default))
        if type(value) is not bool:
            self._refuse(key, value, "must be true or false")
        return bool(value)

    def _number(self, key: str, value: Any, least: int = 1) -> int:
        value = self._one(key, value)
        if type(value) is not int or not least <= value <= 1 << 31:
            self._refuse(key, value, f"must be a whole number from {least} on")
        return int(value)

    def _one(self, key: str, value: Any) -> Any:
        """An array says a number for each layer; where all are one, that is it."""
        if isinstance(value, list):
            if not value or any(one != value[0] for one in value):
                raise UnsupportedModelError(
                    f"{self.name}: {self.architecture}.{key} differs between layers, and the class that serves it has "
                    "one number for all."
                )
            return value[0]
        return value

    def _refuse(self, key: str, value: Any, needed: str) -> NoReturn:
        key = f"{self.architecture}.{key}"
        if value is None:
            raise CheckpointError(f"{self.name}: has no {key}, which a model of this kind needs: it {needed}.")
        raise CheckpointError(f"{self.name}: {key} is {repr(value)[:60]}: it {needed}.")

    def has(self, name: str) -> bool:
        """Whether a tensor is there; of a layer's, in the first."""
        return name in self.tensors or f"blk.0.{name}" in self.tensors

    def floats(self, name: str) -> list[float]:
        """The numbers of a small tensor, which must be of 32 bits each. Raises CheckpointError."""
        self.asked.add(name)
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

    @cached_property
    def layers(self) -> int:
        """How many are computed: those behind them, which guess further tokens, are counted among the blocks.

        Raises CheckpointError where the tensors are of more layers, or of fewer.
        """
        count, guesses = self.number("block_count"), self.number("nextn_predict_layers", 0, least=0)
        there = {int(found[1]) for found in map(_LAYER.match, self.tensors) if found}
        what = f"{self.name}: {self.architecture}.block_count is {count:,}"
        if guesses >= count or count > _MOST_LAYERS:
            raise CheckpointError(f"{what}, of which {guesses:,} guess tokens; up to {_MOST_LAYERS:,} are read.")
        behind = max(there, default=0)
        if behind >= count:
            raise CheckpointError(f"{what}, and there are tensors of a layer {behind:,}: layers would be left out.")
        missing = next((one for one in range(count - guesses) if one not in there), None)
        if missing is not None:
            raise CheckpointError(f"{what}, and there is no tensor of layer {missing:,}.")
        return count - guesses

    @property
    def heads(self) -> tuple[int, int]:
        """Of queries, and of keys, in layers that have any."""
        count = self._number("attention.head_count", self.value("attention.head_count"))
        groups = self.value("attention.head_count_kv") if self.says("attention.head_count_kv") else count
        if isinstance(groups, list) and self.architecture in _SOME_ATTEND:
            groups = [one for one in groups if one != 0]
        return count, self._number("attention.head_count_kv", groups)

    @cached_property
    def head_dim(self) -> int:
        """Of a head of keys, as the projections have it. Raises CheckpointError where a key says another."""
        heads, groups = self.heads
        first = next((one for one in range(self.layers) if f"blk.{one}.attn_q.weight" in self.tensors), None)
        if first is not None:
            rows = self.tensors[f"blk.{first}.attn_q.weight"].shape[0]
        else:
            rows, heads = self.rows("attn_qkv.weight"), heads + 2 * groups
        said = self.value("attention.key_length") if self.says("attention.key_length") else rows // heads
        size = self._number("attention.key_length", said)
        if rows != size * heads:
            raise CheckpointError(
                f"{self.name}: a projection has {rows:,} rows, which are not those of {heads:,} heads"
                + (
                    f" of {self.architecture}.attention.key_length, {size:,}."
                    if self.says("attention.key_length")
                    else "."
                )
            )
        return size

    @property
    def dense_layers(self) -> int:
        """How many of the first layers have no experts, whatever the key says: some files have it wrong."""
        layers = self.layers
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
    split, total = metadata.get("split.count", 1), metadata.get("split.tensors.count", len(tensors))
    if type(split) is not int or type(total) is not int:
        raise CheckpointError(f"{path}: split.count and split.tensors.count must be whole numbers.")
    if split not in (0, len(paths)):
        raise CheckpointError(f"{path}: is a part of {split}, and its name does not end as -00001-of-{split:05}.gguf.")
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
    said = str(metadata.get("split.no"))[:20], str(metadata.get("split.count"))[:20]
    if said != (str(number), str(count)):
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
