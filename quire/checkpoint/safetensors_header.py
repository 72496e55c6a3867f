"""What a safetensors file (https://huggingface.co/docs/safetensors) says of itself, before a tensor of it is read.

The `safetensors` package checks the layout too, but not for keys that are there twice, and not before it has taken the
whole file where it is given bytes. Here the header alone is read, from a file of any size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeGuard

from quire.checkpoint import strict_json

# The format's dtypes: torch's name for each, and the bits of an element.
DTYPES: Mapping[str, tuple[str, int]] = {
    "BOOL": ("bool", 8), "U8": ("uint8", 8), "I8": ("int8", 8), "U16": ("uint16", 16), "I16": ("int16", 16),
    "U32": ("uint32", 32), "I32": ("int32", 32), "U64": ("uint64", 64), "I64": ("int64", 64),
    "F16": ("float16", 16), "BF16": ("bfloat16", 16), "F32": ("float32", 32), "F64": ("float64", 64),
    "C64": ("complex64", 64), "F4": ("float4_e2m1fn_x2", 4), "F6_E2M3": ("float6_e2m3", 6),
    "F6_E3M2": ("float6_e3m2", 6), "F8_E5M2": ("float8_e5m2", 8), "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8), "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
}  # fmt: skip
_MOST_HEADER = 32 << 20  # bytes: a quarter of a million tensors
_MOST_SIZE = 1 << 62
_MOST_DIMENSIONS = 16


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in the file. dtype: as torch calls it; its elements begin at byte `start` of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_header(file: BinaryIO, size: int) -> dict[str, Entry]:
    """The tensors of an open file of `size` bytes, by name. Raises ValueError, which says what is wrong, and OSError.

    Every byte behind the header belongs to exactly one tensor, as the format asks.
    """
    start = file.read(8)
    if len(start) < 8:
        raise ValueError("it has no header")
    length = int.from_bytes(start, "little")
    if not 2 <= length <= size - 8:
        raise ValueError(f"its header would take {length:,} bytes, and the file has {size:,}")
    if length > _MOST_HEADER:
        raise ValueError(f"its header takes {length:,} bytes, and at most {_MOST_HEADER:,} are read")
    text = file.read(length)
    if not text.startswith(b"{"):
        raise ValueError("its header is no JSON object")
    try:
        header = strict_json.parse(text)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    header.pop("__metadata__", None)
    entries = {name: _entry(name, one, 8 + length) for name, one in header.items()}
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != end:
            raise ValueError(f"{name[:80]!r} begins at byte {entry.start:,}, and the tensor before it ends at {end:,}")
        end = entry.start + entry.nbytes
    if end != size:
        raise ValueError(f"its tensors end at byte {end:,}, and the file at {size:,}")
    return entries


def _entry(name: str, one: Any, begin: int) -> Entry:
    if not isinstance(one, dict):
        raise ValueError(f"{name[:80]!r} is described by {type(one).__name__}, not by an object")
    dtype, shape, offsets = one.get("dtype"), one.get("shape"), one.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(f"{name[:80]!r} is of dtype {str(dtype)[:40]!r}, which is unknown")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise ValueError(f"{name[:80]!r}: shape and data_offsets must be lists of whole numbers")
    known, width = DTYPES[dtype]
    bits = math.prod(shape) * width
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        raise ValueError(
            f"{name[:80]!r} has {offsets[1] - offsets[0]:,} bytes, and its shape {shape} as {dtype} takes {bits // 8:,}"
        )
    return Entry(known, tuple(shape), begin + offsets[0], bits // 8)


def _are_sizes(value: Any) -> TypeGuard[list[int]]:
    return (
        isinstance(value, list)
        and len(value) <= _MOST_DIMENSIONS
        and all(type(one) is int and 0 <= one <= _MOST_SIZE for one in value)
    )
