"""Which blocks each sequence has, in the order of its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.platform.kv.block_pool import BlockPool
from quire.platform.kv.prefix_index import ELSEWHERE, PrefixIndex
from quire.platform.kv.transfers import WiderIndex

_NO_BLOCKS: Sequence[int] = ()
_NO_COPIES: Sequence[tuple[int, int]] = ()


class BlockTables:
    """The block tables of a model's one group of layers (`KVGroup`).

    A block holds a run of `block_size` tokens for all of the group's layers. All of them are kept, from the first token
    on, as full attention reads them: `GroupTables` serves groups with a window, and several groups.

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

    def copy_table(self, sequence_id: int) -> list[int]:
        """A copy of them."""
        return list(self.blocks(sequence_id))

    def new_blocks(self, sequence_id: int) -> tuple[int, tuple[int, ...]]:
        """What the worker does not know of a table, and its place; it knows that from here on."""
        table, place = self._tables[sequence_id], self._told[sequence_id]
        self._told[sequence_id] = len(table)
        return place, tuple(table[place:])

    def forget_told(self, sequence_id: int) -> None:
        """The worker knows nothing of a table."""
        self._told[sequence_id] = 0

    def find(self, keys: Sequence[bytes], index: PrefixIndex | WiderIndex) -> list[int]:
        """Cached blocks with the longest known beginning of these prefix keys; ELSEWHERE for those that are beside the
        pool."""
        return index.find(keys)

    def index_keys(self, keys: Sequence[bytes], first: int, last: int) -> list[bytes]:
        """By which keys the index knows blocks `first` .. `last` of a sequence, as they stand in a table."""
        return list(keys[first:last])

    def places(self, found: Sequence[int]) -> int:
        """How many blocks of tokens were found."""
        return len(found)

    def fits(self, tokens: int, found: Sequence[int]) -> bool:
        """Whether there are blocks for a sequence of so many tokens that starts from what was found."""
        taken = sum(block == ELSEWHERE or self._pool.references(block) == 0 for block in found)
        return self._pool.blocks_for(tokens) - len(found) + taken <= self._pool.num_free

    def reserve(self, sequence_id: int, start: int, count: int) -> Sequence[tuple[int, int]] | None:
        """Get blocks of its own for a sequence's tokens `start` .. `start + count`.

        A block that another sequence reads is copied before it is written to: returns (from, to) of it. None: there are
        too few blocks.
        """
        table = self._tables[sequence_id]
        missing = -(-(start + count) // self._size) - len(table)
        place, offset = divmod(start, self._size)
        shared = offset > 0 and self._pool.references(table[place]) > 1
        if missing <= 0 and not shared:
            return _NO_COPIES
        missing = max(0, missing)
        if missing + shared > self._pool.num_free:
            return None
        copies = self._copy(table, start, sequence_id) if shared else _NO_COPIES
        if missing:
            table += self._pool.allocate(missing)
        return copies

    def open(self, sequence_id: int, found: Sequence[int], start: int, count: int) -> None:
        """Give a sequence its table, to compute `count` tokens behind the first `start`: the blocks that were found,
        shared, and new ones for the rest."""
        self._pool.share(block for block in found if block != ELSEWHERE)
        table = [*found, *self._pool.allocate(self._pool.blocks_for(start + count) - len(found))]
        for place in [place for place, block in enumerate(found) if block == ELSEWHERE]:
            table[place] = self._pool.allocate(1)[0]
        self._tables[sequence_id] = table
        self._told[sequence_id] = 0

    def held(self, sequence_id: int, tokens: int) -> Sequence[int]:
        """The blocks that hold a sequence's first `tokens` tokens, in their order."""
        return self.blocks(sequence_id)[: self._pool.blocks_for(tokens)]

    def held_of(self, found: Sequence[int], tokens: int) -> int:
        """How many of what `held` returns, the first of them, were found."""
        return len(found)

    def _copy(self, table: list[int], start: int, sequence_id: int) -> Sequence[tuple[int, int]]:
        place = start // self._size
        copy = table[place], self._pool.allocate(1)[0]
        self._pool.release([table[place]])
        table[place] = copy[1]
        self._told[sequence_id] = min(place, self._told[sequence_id])
        return (copy,)

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

    def check_integrity(self, running: Mapping[int, int]) -> None:
        """Raise AssertionError unless the tables are those of the sequences that run, with blocks for their computed
        tokens (running: how many, by id), and the pool agrees with them."""
        if self._tables.keys() != running.keys():
            raise AssertionError("a sequence that waits holds blocks, or one that runs has no table")
        self._pool.check_integrity(self._tables.values())
        for sequence_id, computed in running.items():
            if self._pool.blocks_for(computed) > len(self._tables[sequence_id]):
                raise AssertionError(f"sequence {sequence_id} has computed tokens without a block")
