"""GGUF files by the byte, for tests: right ones, and ones that no writer would write."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

STRING, ARRAY = 8, 9
_FORMS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def value(kind: int, one: Any) -> bytes:
    """A value with its kind. An array is (its elements' kind, elements)."""
    return struct.pack("<I", kind) + bare(kind, one)


def bare(kind: int, one: Any) -> bytes:
    if kind == STRING:
        return text(one)
    if kind == ARRAY:
        inner, elements = one
        return struct.pack("<IQ", inner, len(elements)) + b"".join(bare(inner, each) for each in elements)
    return struct.pack(_FORMS[kind], one)


def info(name: str | bytes, sizes: Sequence[int], kind: int, offset: int) -> bytes:
    """A tensor's description; sizes as the format has them, columns first."""
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def whole(
    pairs: Mapping[str, bytes] | Sequence[tuple[str | bytes, bytes]] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    alignment: int = 32,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """A file. pairs: keys, and values as `value` writes them. counts: of tensors and pairs, if they are to lie."""
    listed = list(pairs.items()) if isinstance(pairs, Mapping) else list(pairs)
    count = counts or (len(tensors), len(listed))
    head = b"GGUF" + struct.pack("<IQQ", version, *count)
    head += b"".join(text(key) + one for key, one in listed) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data
