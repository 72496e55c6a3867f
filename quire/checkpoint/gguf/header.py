"""What a GGUF file says of itself, before a tensor of it is read.

The `gguf` package's reader trusts what it reads: lengths, counts and offsets of any size, from which it makes arrays.
And it takes 2 s for a vocabulary of 49,152, of which each token becomes two arrays. Here every number is held
against the file's size before it is used, and arrays of numbers are read at once. Of the package are the sizes of
blocks, the names of kinds, and the floats that blocks mean; tests hold what is read here against what its reader reads.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # which differ in nothing but byte order's being allowed to vary
_STRING, _ARRAY = 8, 9
# Metadata's kinds of values, as numpy calls them.
_SCALARS: Mapping[int, np.dtype[Any]] = {
    number: np.dtype(name)
    for number, name in {
        0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
    }.items()
}  # fmt: skip
_MOST_PAIRS = 1 << 16
_MOST_TENSORS = 1 << 18
_MOST_HEADER = 256 << 20  # bytes: vocabularies of a quarter of a million tokens take 12 MB
_MOST_VALUES = 1 << 24  # in all arrays together
_MOST_NAME = 1 << 16  # bytes of a key; the format's own limit
_MOST_TENSOR_NAME = 256
_MOST_DIMENSIONS = 4
_MOST_SIZE = 1 << 62
_MOST_ALIGNMENT = 1 << 20
_PIECE = 1 << 20  # bytes read at a time
_LENGTH = struct.Struct("<Q")  # of a text


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor in the file. kind: GGML's number. shape: as numpy has it, rows first; its bytes begin at `start`."""

    kind: int
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufHeader:
    """metadata: every pair; arrays of numbers as numpy's, those of texts as lists. size: bytes before the tensors."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    size: int


@dataclass
class _Reader:
    """The file's bytes in order, each held against its size."""

    file: BinaryIO
    size: int
    at: int = 0
    values: int = 0
    _bytes: bytearray = field(default_factory=bytearray)
    _first: int = 0  # of _bytes, the file's byte

    def take(self, count: int, what: str) -> memoryview:
        if count > self.size - self.at:
            raise ValueError(
                f"{what} would take {count:,} bytes from byte {self.at:,} on, and the file has {self.size:,}"
            )
        if self.at + count > _MOST_HEADER:
            raise ValueError(f"{what} ends behind byte {_MOST_HEADER:,}, and no further is read for what is no tensor")
        while self._first + len(self._bytes) < self.at + count:
            wanted = max(_PIECE, self.at + count - self._first - len(self._bytes))
            piece = self.file.read(min(wanted, self.size - self._first - len(self._bytes)))
            if not piece:
                raise ValueError(
                    f"the file ended at byte {self._first + len(self._bytes):,}: it was cut while it was read"
                )
            self._bytes = self._bytes[self.at - self._first :] + bytearray(piece)
            self._first = self.at
        start = self.at - self._first
        self.at += count
        return memoryview(self._bytes)[start : start + count]

    def number(self, form: str, what: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form), what))[0])

    def text(self, what: str, most: int) -> str:
        length = self.number("<Q", f"the length of {what}")
        if length > most:
            raise ValueError(f"{what} would have {length:,} bytes, and at most {most:,} are read")
        return _decoded(self.take(length, what), what)

    def texts(self, count: int, what: str) -> list[str]:
        """So many texts one behind the other. Those that are whole among the bytes that are here already are cut in one
        loop, as vocabularies have hundreds of thousands; every other, and every wrong one, is read by `text`."""
        found: list[str] = []
        while len(found) < count:
            found.append(self.text(what, _MOST_HEADER))
            data, at = self._bytes, self.at - self._first
            end = min(len(data), _MOST_HEADER - self._first)
            while len(found) < count and at + 8 <= end:
                stop = at + 8 + _LENGTH.unpack_from(data, at)[0]
                if stop > end:
                    break
                try:
                    found.append(data[at + 8 : stop].decode())
                except UnicodeDecodeError:
                    break
                at = stop
            self.at = self._first + at
        return found


def read_gguf_header(file: BinaryIO, size: int) -> GgufHeader:
    """The metadata and the tensors of an open file of `size` bytes. Raises ValueError, which says what is wrong, and
    OSError.

    No key and no tensor is there twice; no two tensors share a byte; each begins where the file's alignment asks, and
    ends within the file.
    """
    reader = _Reader(file, size)
    if size < 4 or bytes(reader.take(4, "its first bytes")) != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    version = reader.number("<I", "the version")
    if version not in _VERSIONS:
        raise ValueError(_other_version(version))
    tensors, pairs = reader.number("<Q", "the number of tensors"), reader.number("<Q", "the number of keys")
    for count, most, what in ((pairs, _MOST_PAIRS, "keys"), (tensors, _MOST_TENSORS, "tensors")):
        if count > most:
            raise ValueError(f"it would have {count:,} {what}, and at most {most:,} are read")
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = reader.text("a key", _MOST_NAME)
        if key in metadata:
            raise ValueError(f"the key {key[:80]!r} is there twice")
        metadata[key] = _value(reader, reader.number("<I", f"the kind of {key[:80]!r}"), key)
    infos = [_tensor_info(reader) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 8 <= alignment <= _MOST_ALIGNMENT or alignment & (alignment - 1):
        raise ValueError(f"general.alignment is {str(alignment)[:40]}: it must be a power of two from 8 on")
    begin = -(-reader.at // alignment) * alignment
    return GgufHeader(metadata, _placed(infos, begin, size, alignment), begin)


def _other_version(version: int) -> str:
    if version & 0xFFFF == 0:
        return "it is of the other byte order (big-endian), and such files are not read; convert it on this machine"
    return f"it is of version {version}, and {', '.join(map(str, _VERSIONS))} are read; convert the model anew"


def _decoded(data: memoryview, what: str) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{what} is not UTF-8") from None


def _value(reader: _Reader, kind: int, key: str) -> Any:
    what = f"the value of {key[:80]!r}"
    if kind == _STRING:
        return reader.text(what, _MOST_HEADER)
    if kind == _ARRAY:
        return _array(reader, key)
    if kind not in _SCALARS:
        raise ValueError(f"{what} is of kind {kind}, which is unknown")
    dtype = _SCALARS[kind]
    data = reader.take(dtype.itemsize, what)
    return _checked(np.frombuffer(data, dtype), what).item()


def _checked(values: np.ndarray, what: str) -> np.ndarray:
    """Truth values are 0 and 1: numpy would take other bytes for true, and other readers for other numbers."""
    if values.dtype == np.bool_ and values.size and values.view(np.uint8).max() > 1:
        raise ValueError(f"{what} is no truth value")
    return values


def _array(reader: _Reader, key: str) -> Any:
    what = f"the array {key[:80]!r}"
    kind, count = reader.number("<I", f"the kind of {what}"), reader.number("<Q", f"the length of {what}")
    if kind != _STRING and kind not in _SCALARS:
        nested = (
            "arrays, and nested ones are not read" if kind == _ARRAY else f"values of kind {kind}, which is unknown"
        )
        raise ValueError(f"{what} is of {nested}")
    reader.values += count
    if reader.values > _MOST_VALUES:
        raise ValueError(
            f"with {what} there would be {reader.values:,} values in arrays, and {_MOST_VALUES:,} are read"
        )
    if kind == _STRING:
        least = 8 * count
        if least > reader.size - reader.at:
            raise ValueError(f"{what} would have {count:,} texts, and the file ends before")
        return reader.texts(count, f"a text of {what}")
    dtype = _SCALARS[kind]
    return _checked(np.frombuffer(bytes(reader.take(count * dtype.itemsize, what)), dtype), what)


def _tensor_info(reader: _Reader) -> tuple[str, int, tuple[int, ...], int]:
    """(name, kind, shape with rows first, offset)"""
    name = reader.text("a tensor's name", _MOST_TENSOR_NAME)
    what = f"tensor {name[:80]!r}"
    dimensions = reader.number("<I", f"the number of dimensions of {what}")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise ValueError(f"{what} has {dimensions:,} dimensions, and 1 to {_MOST_DIMENSIONS} are read")
    sizes = struct.unpack(f"<{dimensions}Q", reader.take(8 * dimensions, f"the shape of {what}"))
    if not all(0 < one <= _MOST_SIZE for one in sizes):
        raise ValueError(f"{what} has the shape {sizes}, and each number must be 1 or more")
    kind = reader.number("<I", f"the kind of {what}")
    return name, kind, tuple(reversed(sizes)), reader.number("<Q", f"the offset of {what}")


def block_of(kind: int) -> tuple[int, int]:
    """(columns, bytes) of a block of GGML's kind number `kind`. Raises ValueError for one that is unknown."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        columns, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (ValueError, KeyError):
        raise ValueError(f"is of kind {kind}, which is unknown") from None
    return columns, size


def kind_name(kind: int) -> str:
    """What GGML calls its kind number `kind`: "Q4_K"."""
    from gguf.constants import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(kind).name)
    except ValueError:
        return f"number {kind}"


def _placed(
    infos: list[tuple[str, int, tuple[int, ...], int]], begin: int, size: int, alignment: int
) -> dict[str, GgufTensor]:
    """The tensors by name, each within the file and apart from the others."""
    found: dict[str, GgufTensor] = {}
    for name, kind, shape, offset in infos:
        what = f"tensor {name[:80]!r}"
        if name in found:
            raise ValueError(f"{what} is there twice")
        try:
            columns, block = block_of(kind)
        except ValueError as error:
            raise ValueError(f"{what} {error}") from None
        if shape[-1] % columns:
            raise ValueError(f"{what} has rows of {shape[-1]:,}, and {kind_name(kind)} has blocks of {columns}")
        nbytes = math.prod(shape) // columns * block
        if offset % alignment:
            raise ValueError(f"{what} begins at byte {offset:,} of the data, no multiple of the alignment {alignment}")
        if offset > size or begin + offset + nbytes > size:
            raise ValueError(
                f"{what} would take {nbytes:,} bytes from byte {begin + offset:,} on, and the file has {size:,}: it "
                "was cut, or is damaged"
            )
        found[name] = GgufTensor(kind, shape, begin + offset, nbytes)
    end, before = begin, ""
    for name, tensor in sorted(found.items(), key=lambda item: item[1].start):
        if tensor.start < end:
            raise ValueError(f"the tensors {before[:80]!r} and {name[:80]!r} share bytes")
        end, before = tensor.start + tensor.nbytes, name
    return found
