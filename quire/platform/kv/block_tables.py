"""Which blocks each sequence has, in the order of its tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from quire.platform.kv.block_pool import BlockPool

_NO_BLOCKS: Sequence[int] = ()


class BlockTables:
    """The block tables of one group of layers (`KVGroup`), from a pool that serves all groups.

    A block holds a run of `block_size` tokens for all of the group's layers. Which blocks a sequence needs is the
    group's to say. This one keeps all of them, from the first token on, as full attention reads them; a group with a
    window would give back those that have left it.

    Sequences are known by their ids; one has a table here while it runs.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._size = pool.block_size
        self._tables: dict[int, list[int]] = {}
        self._told: dict[int, int] = {}  # how many of the first blocks in a table the worker knows

    def blocks(self, sequence_id: int) -> Sequence[int]:
        """A sequence's blocks, in the order of its tokens; none while it waits."""
        return self._tables.get(sequence_id, _NO_BLOCKS)

    def new_blocks(self, sequence_id: int) -> tuple[int, tuple[int, ...]]:
        """What the worker does not know of a table, and its place; it knows that from here on."""
        table, place = self._tables[sequence_id], self._told[sequence_id]
        self._told[sequence_id] = len(table)
        return place, tuple(table[place:])

    def forget_told(self, sequence_id: int) -> None:
        """The worker knows nothing of a table."""
        self._told[sequence_id] = 0

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Cached blocks with the longest known beginning of these prefix keys."""
        return [] if self._pool.index is None else self._pool.index.find(keys)

    def missing(self, sequence_id: int, start: int, count: int) -> int:
        """How many blocks more a sequence needs to write tokens `start` .. `start + count`.

        A block that another sequence reads is copied before it is written to, and so counts too.
        """
        table = self._tables[sequence_id]
        missing = max(0, -(-(start + count) // self._size) - len(table))
        return missing + 1 if self._is_shared(table, start) else missing

    def _is_shared(self, table: Sequence[int], start: int) -> bool:
        place, offset = divmod(start, self._size)
        return offset > 0 and self._pool.references(table[place]) > 1

    def open(self, sequence_id: int, found: Sequence[int], tokens: int) -> None:
        """Give a sequence its table: the blocks that were found, shared, and new ones for the rest of its tokens."""
        self._pool.share(found)
        self._tables[sequence_id] = [*found, *self._pool.allocate(self._pool.blocks_for(tokens) - len(found))]
        self._told[sequence_id] = 0

    def extend(self, sequence_id: int, start: int, count: int) -> tuple[int, int] | None:
        """Add the blocks that `missing` has counted; returns (from, to) of a block to copy first, if there is one."""
        table = self._tables[sequence_id]
        copy = None
        if self._is_shared(table, start):
            place = start // self._size
            copy = table[place], self._pool.allocate(1)[0]
            self._pool.release([table[place]])
            table[place] = copy[1]
            self._told[sequence_id] = min(place, self._told[sequence_id])
        table += self._pool.allocate(self._pool.blocks_for(start + count) - len(table))
        return copy

    def publish(self, sequence_id: int, keys: Sequence[bytes], first: int, last: int) -> None:
        """Make blocks `first` .. `last` of a sequence findable by their keys."""
        index = self._pool.index
        assert index is not None
        table = self._tables[sequence_id]
        for place in range(first, last):
            index.publish(keys[place], table[place])

    def fork(self, parent: int, child: int) -> None:
        """Let another sequence share all of a sequence's blocks, until one of the two writes."""
        table = self._tables[parent]
        self._pool.share(table)
        self._tables[child] = list(table)
        self._told[child] = 0

    def close(self, sequence_id: int) -> None:
        """Give a sequence's blocks back, if it has any."""
        table = self._tables.pop(sequence_id, None)
        self._told.pop(sequence_id, None)
        if table is not None:
            self._pool.release(table)

    def check_integrity(self, running: Collection[int]) -> None:
        """Raise AssertionError unless the tables are those of the sequences that run, and the pool agrees with them."""
        if self._tables.keys() != set(running):
            raise AssertionError("a sequence that waits holds blocks, or one that runs has no table")
        self._pool.check_integrity(self._tables.values())
