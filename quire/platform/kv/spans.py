"""Ranges of a prompt whose tokens see one another: each is computed in one step, and found in the cache as a whole."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from quire.types import Span


def uncut(spans: Sequence[Span], end: int) -> int:
    """The last place up to `end` that lies within none of the ranges, which are ascending and apart from each other."""
    place = bisect_right(spans, end, key=lambda span: span[1])
    return min(end, spans[place][0]) if place < len(spans) else end


def uncut_blocks(spans: Sequence[Span], blocks: int, size: int) -> int:
    """How many of a sequence's first `blocks` blocks of `size` tokens end within none of the ranges, all counted."""
    while (end := uncut(spans, blocks * size)) < blocks * size:
        blocks = end // size
    return blocks
