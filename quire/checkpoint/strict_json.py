"""JSON in which nothing is said twice.

Of a key that an object has twice, Python keeps the last, other readers the first: whoever checked the file saw another
one than who reads it.
"""

from __future__ import annotations

import json
from typing import Any


def parse(data: bytes | str) -> Any:
    """The value of a JSON text. Raises ValueError (for a key that is there twice, too) and RecursionError."""
    return json.loads(data, object_pairs_hook=_object)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return found
