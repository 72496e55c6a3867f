"""Who owns which KV block: reference counts, and a free list that doubles as the prefix cache's LRU.

A block is *owned* (references > 0), *cached* (no references, but findable by its prefix key) or *free*. The last
two stand in one doubly linked list, threaded through arrays: forgotten blocks at the head, to be taken first;
cached ones behind them, the least recently released first. Every operation is O(1) a block.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from quire.platform.kv.prefix_index import PrefixIndex


class BlockPool:
    """The bookkeeping of `num_blocks` blocks of `block_size` tokens; the tensors are the runner's."""

    def __init__(self, num_blocks: int, block_size: int, index: PrefixIndex | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.index = index
        self.num_free = num_blocks
        self.freed: list[int] | None = None  # a list, in debug runs: blocks forgotten since it was last emptied
        self._references = [0] * num_blocks
        # The list's ends meet in a sentinel that stands behind the last block.
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]

    @property
    def num_owned(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - self.num_free

    def blocks_for(self, tokens: int) -> int:
        """How many blocks so many tokens fill."""
        return -(-tokens // self.block_size)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, cached ones last. The caller has made sure that `num_free` suffices."""
        if count > self.num_free:
            raise AssertionError(f"{count} blocks asked for, {self.num_free} free")
        blocks = []
        for _ in range(count):
            block = self._next[self.num_blocks]
            self._unlink(block)
            if self.index is not None:
                self.index.forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def forget_cached(self) -> None:
        """Make no block findable any more; those that nobody owns are free."""
        for block in [] if self.index is None else self.index.blocks():
            assert self.index is not None
            self.index.forget(block)
            if not self._references[block]:  # to the end where forgotten ones stand
                self._unlink(block)
                self._link(block)

    def share(self, blocks: Iterable[int]) -> None:
        """Add one owner to each block; a cached block is owned again."""
        for block in blocks:
            if self._references[block] == 0:
                self._unlink(block)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Take one owner from each of a sequence's blocks. Its last blocks will be reused before its first."""
        for block in reversed(blocks):
            if self._references[block] <= 0:
                raise AssertionError(f"block {block} released more often than shared")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._link(block)

    def _link(self, block: int) -> None:
        sentinel = self.num_blocks
        if self.index is not None and self.index.holds(block):
            before, after = self._previous[sentinel], sentinel
        else:
            before, after = sentinel, self._next[sentinel]
            if self.freed is not None:
                self.freed.append(block)
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.num_free -= 1

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the tables agree with each other and with the block lists of all owners."""
        held = Counter(block for blocks in owners for block in blocks)
        for block, references in enumerate(self._references):
            _demand(references == held[block], f"block {block}: {references} references, {held[block]} owners")
        free: list[int] = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            _demand(self._previous[self._next[block]] == block, f"free list broken at block {block}")
            _demand(len(free) < self.num_blocks, "free list has a loop")
            free.append(block)
            block = self._next[block]
        _demand(len(free) == self.num_free, f"free list holds {len(free)}, num_free says {self.num_free}")
        _demand(all(self._references[b] == 0 for b in free), "an owned block is in the free list")
        _demand(self._references.count(0) == self.num_free, "a block is neither owned nor in the free list")
        if self.index is not None:
            self.index.check_integrity()


def _demand(condition: bool, message: str) -> None:
    """An assert that `python -O` keeps."""
    if not condition:
        raise AssertionError(message)
