"""Who owns which KV block: reference counts, and free lists that double as the prefix cache's LRU.

A block is *owned* (references > 0), *cached* (no references, but findable by its prefix key) or *free*. The last
two stand in one doubly linked list, threaded through arrays: forgotten blocks at the head, to be taken first;
cached ones behind them, the least recently released first. Every operation is O(1) a block.

Blocks of layers with states are many times as large as those of keys, so there is a number of each. States have the
first numbers, 0 .. num_states, and a list of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import pairwise

from quire.platform.kv.prefix_index import PrefixIndex


class BlockPool:
    """The bookkeeping of `num_blocks` blocks of `block_size` tokens, and of `num_states` states; the tensors are the
    runner's."""

    def __init__(self, num_blocks: int, block_size: int, index: PrefixIndex | None = None, num_states: int = 0) -> None:
        self.num_blocks = num_blocks
        self.num_states = num_states
        self.block_size = block_size
        self.index = index
        self.num_free = num_blocks
        self.num_free_states = num_states
        self.freed: list[int] | None = None  # a list, in debug runs: blocks forgotten since it was last emptied
        total = num_states + num_blocks
        self._references = [0] * total
        # The ends of a list meet in a sentinel; both stand behind the last block.
        self._blocks_end, self._states_end = total, total + 1
        self._next = [*range(1, total + 2), 0]
        self._previous = [0, *range(total + 1)]
        for end, first, last in ((self._blocks_end, num_states, total), (self._states_end, 0, num_states)):
            ring = [end, *range(first, last), end]
            for before, after in pairwise(ring):
                self._next[before], self._previous[after] = after, before

    @property
    def num_owned(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - self.num_free

    @property
    def usage(self) -> float:
        """The share of blocks that are held, or of states where that is more."""
        states = 1 - self.num_free_states / self.num_states if self.num_states else 0.0
        return max(1 - self.num_free / self.num_blocks, states)

    def blocks_for(self, tokens: int) -> int:
        """How many blocks so many tokens fill."""
        return -(-tokens // self.block_size)

    def references(self, block: int) -> int:
        return self._references[block]

    def copy_references(self) -> list[int]:
        """How many sequences hold each block, of states first."""
        return self._references.copy()

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks, cached ones last. The caller has made sure that `num_free` suffices."""
        if count > self.num_free:
            raise AssertionError(f"{count} blocks asked for, {self.num_free} free")
        return self._take(count, self._blocks_end)

    def allocate_states(self, count: int) -> list[int]:
        """The same of states. The caller has made sure that `num_free_states` suffices."""
        if count > self.num_free_states:
            raise AssertionError(f"{count} states asked for, {self.num_free_states} free")
        return self._take(count, self._states_end)

    def _take(self, count: int, end: int) -> list[int]:
        blocks = []
        for _ in range(count):
            block = self._next[end]
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
        sentinel = self._blocks_end if block >= self.num_states else self._states_end
        if self.index is not None and self.index.holds(block):
            before, after = self._previous[sentinel], sentinel
        else:
            before, after = sentinel, self._next[sentinel]
            if self.freed is not None:
                self.freed.append(block)
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self._count_free(block, 1)

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._count_free(block, -1)

    def _count_free(self, block: int, more: int) -> None:
        if block >= self.num_states:
            self.num_free += more
        else:
            self.num_free_states += more

    def check_integrity(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the tables agree with each other and with the block lists of all owners."""
        held = Counter(block for blocks in owners for block in blocks)
        for block, references in enumerate(self._references):
            _demand(references == held[block], f"block {block}: {references} references, {held[block]} owners")
        self._check_free(self._blocks_end, range(self.num_states, len(self._references)), self.num_free)
        self._check_free(self._states_end, range(self.num_states), self.num_free_states)
        if self.index is not None:
            self.index.check_integrity()

    def _check_free(self, end: int, kind: range, count: int) -> None:
        free: list[int] = []
        block = self._next[end]
        while block != end:
            _demand(self._previous[self._next[block]] == block, f"free list broken at block {block}")
            _demand(block in kind and len(free) < len(kind), "free list has a loop, or a block of the other kind")
            free.append(block)
            block = self._next[block]
        _demand(len(free) == count, f"free list holds {len(free)}, its number says {count}")
        _demand(all(self._references[b] == 0 for b in free), "an owned block is in the free list")
        unowned = self._references[kind.start : kind.stop].count(0)
        _demand(unowned == count, "a block is neither owned nor in the free list")


def _demand(condition: bool, message: str) -> None:
    """An assert that `python -O` keeps."""
    if not condition:
        raise AssertionError(message)
