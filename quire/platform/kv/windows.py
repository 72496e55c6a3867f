"""What layers with a window keep of a sequence, and how many blocks that makes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from quire.types import STATE

# What a token reads of a group with states is what the one before it has left: as with a window of these two.
STATE_WINDOW = 2
# A chunk may take so much of the pool in the groups that have a window, as 1 / this.
_SHARE_OF_A_CHUNK = 4


def first_place(window: int, tokens: int, block_size: int) -> int:
    """The first place in a block table that the token behind `tokens` others reads. window: as of `AttentionSpec`, or
    STATE."""
    if window == STATE:
        window = STATE_WINDOW
    return max(0, tokens + 1 - window) // block_size if window else 0


def count_held(windows: Sequence[int], tokens: int, block_size: int) -> int:
    """How many blocks hold what the token behind `tokens` others reads, in groups of these windows."""
    places = -(-tokens // block_size)
    return sum(places - first_place(window, tokens, block_size) for window in windows)


def used_slots(windows: Sequence[int], tokens: int, block_size: int) -> int:
    """How many slots of a sequence's blocks hold something, in groups of these windows, that the token behind `tokens`
    others may read."""
    return sum(tokens - first_place(one, tokens, block_size) * block_size for one in windows if one != STATE)


class Footprint:
    """How many blocks of a pool a sequence takes at most, over all groups of layers that keep keys.

    windows: of each group; 0: it keeps every token. STATE, which is the last, is left out.
    most_at_once: tokens that a chunk may have. While it is computed, a group with a window holds all of the chunk and
    the window before it; so chunks are kept to a part of the pool, and a prompt longer than the pool can be served.
    spans: of each group, the blocks that it holds at most, whatever the sequence's length; None: there is no such
    number.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[int] = (0,)) -> None:
        self.num_blocks = num_blocks
        self.windows = tuple(window for window in windows if window != STATE)
        self._size = block_size
        self.most_at_once = self._most_at_once()
        self.spans = [self._span(window, self.most_at_once) if window else None for window in self.windows]

    def _span(self, window: int, chunk: int) -> int:
        """Over how many blocks a chunk and the window of its first token spread at most."""
        return (window - 1 + chunk + self._size - 2) // self._size + 1

    def _most_at_once(self) -> int:
        bounded = [window for window in self.windows if window]
        pool = max(1, self.num_blocks * self._size)
        if not bounded:
            return pool

        def taken(chunk: int) -> int:
            return sum(self._span(window, chunk) for window in bounded)

        return bisect_right(range(1, pool + 1), max(taken(1), self.num_blocks // _SHARE_OF_A_CHUNK), key=taken)

    def blocks(self, tokens: int) -> int:
        """Of a sequence of so many tokens, when it holds the most."""
        places = -(-tokens // self._size)
        return sum(places if span is None else min(places, span) for span in self.spans)

    def longest(self, most: int) -> int:
        """The tokens of the longest sequence that fits the pool; at least `most` where any does."""
        return bisect_right(range(max(most, self.num_blocks * self._size) + 1), self.num_blocks, key=self.blocks) - 1
