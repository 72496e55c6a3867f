"""Which blocks each sequence has where groups of layers keep different parts of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.platform.kv.block_pool import BlockPool
from quire.platform.kv.prefix_index import ELSEWHERE, PrefixIndex
from quire.platform.kv.transfers import WiderIndex
from quire.platform.kv.windows import STATE_WINDOW, Footprint, first_place
from quire.types import STATE

# In a table, where a group has no block: what stood there has left its window.
NO_BLOCK = -1

_NO_BLOCKS: Sequence[int] = ()


class _Table:
    """A sequence's blocks, those of one place behind the other: of group 0 .. G - 1 for the first tokens, then again
    for the next.

    told: how many of them the worker knows. firsts: of each group, its first place that has a block.
    due: from this token on, some block has left a window.
    """

    __slots__ = ("blocks", "due", "firsts", "told")

    def __init__(self, blocks: list[int], firsts: list[int], due: float) -> None:
        self.blocks = blocks
        self.firsts = firsts
        self.due = due
        self.told = 0

    def held(self) -> list[int]:
        return [block for block in self.blocks if block != NO_BLOCK]


class GroupTables:
    """The block tables of groups of layers, some of which see a window of a sequence's tokens only, from a pool that
    serves all groups. It is asked as `BlockTables` is.

    A block holds a run of `block_size` tokens for one group's layers. All groups get a block for the same tokens at the
    same time, and copy it at the same time. A group with a window gives back those that hold nothing which the next
    token reads.

    windows: of each group, 0: it keeps every token. `StateTables` serves a group with states beside them.
    """

    def __init__(self, pool: BlockPool, windows: Sequence[int]) -> None:
        self._pool = pool
        self._size = pool.block_size
        self._windows = tuple(STATE_WINDOW if window == STATE else window for window in windows)
        self._count = len(windows)
        self._full = [group for group, window in enumerate(self._windows) if not window]
        self._bounded = [(group, window) for group, window in enumerate(self._windows) if window]
        # What a group's prefix keys end with: the first's are those of a model with one group.
        self._suffixes = [group.to_bytes(2) if group else b"" for group in range(self._count)]
        self._footprint = Footprint(pool.num_blocks, pool.block_size, windows)
        self._tables: dict[int, _Table] = {}

    def blocks(self, sequence_id: int) -> Sequence[int]:
        """A sequence's blocks, of all groups, in the order of its tokens; none while it waits."""
        table = self._tables.get(sequence_id)
        return _NO_BLOCKS if table is None else table.held()

    def copy_table(self, sequence_id: int) -> list[int]:
        """A copy of its table, NO_BLOCK where a group has none: sifting takes long."""
        table = self._tables.get(sequence_id)
        return [] if table is None else table.blocks.copy()

    def new_blocks(self, sequence_id: int) -> tuple[int, tuple[int, ...]]:
        """What the worker does not know of a table, and its place; it knows that from here on.

        It need not know what was given back: no token reads that any more.
        """
        table = self._tables[sequence_id]
        place, table.told = table.told, len(table.blocks)
        return place, tuple(table.blocks[place:])

    def forget_told(self, sequence_id: int) -> None:
        """The worker knows nothing of a table."""
        self._tables[sequence_id].told = 0

    # -- a sequence that waits ------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes], index: PrefixIndex | WiderIndex) -> list[int]:
        """Cached blocks of the longest beginning with these prefix keys that a sequence can go on from, as they stand
        in a table: of a group with a window, those of the last window alone. ELSEWHERE for those beside the pool."""
        end = len(keys)
        columns: dict[int, list[int]] = {}
        for group in self._full:
            suffix = self._suffixes[group]
            columns[group] = index.find([key + suffix for key in keys[:end]])
            end = len(columns[group])
        end = self._last_with_windows(keys, end, index)
        found = [NO_BLOCK] * (end * self._count)
        for group in self._full:
            found[group :: self._count] = columns[group][:end]
        for group, window in self._bounded:
            first = first_place(window, end * self._size, self._size)
            column = index.find([key + self._suffixes[group] for key in keys[first:end]])
            found[first * self._count + group :: self._count] = column
        return found

    def index_keys(self, keys: Sequence[bytes], first: int, last: int) -> list[bytes]:
        """By which keys the index knows blocks `first` .. `last` of a sequence, as they stand in a table."""
        return [key + suffix for key in keys[first:last] for suffix in self._suffixes]

    def _last_with_windows(self, keys: Sequence[bytes], end: int, index: PrefixIndex | WiderIndex) -> int:
        """How many blocks, up to `end`, have the whole window before their end cached in every group."""
        while end:
            missing = self._missing_before(keys, end, index)
            if missing is None:
                break
            end = missing  # all that end behind it have it in their windows, as those looked at so far had
        return end

    def _missing_before(self, keys: Sequence[bytes], end: int, index: PrefixIndex | WiderIndex) -> int | None:
        """The last place that some group has not cached, among those that a token behind `end` blocks reads."""
        last = None
        for group, window in self._bounded:
            suffix = self._suffixes[group]
            for place in range(end - 1, first_place(window, end * self._size, self._size) - 1, -1):
                if index.block_of(keys[place] + suffix) is None:
                    last = place if last is None else min(last, place)
                    break
        return last

    def places(self, found: Sequence[int]) -> int:
        """How many blocks of tokens were found."""
        return len(found) // self._count

    def fits(self, tokens: int, found: Sequence[int]) -> bool:
        """Whether there are blocks for a sequence of so many tokens that starts from what was found."""
        return self._needed(tokens, found) <= self._pool.num_free

    def _needed(self, tokens: int, found: Sequence[int]) -> int:
        """How many free blocks a sequence of so many tokens takes at most at a time, from what was found on."""
        new = self._pool.blocks_for(tokens) - self.places(found)
        needed = 0
        for group, span in enumerate(self._footprint.spans):
            own = [block for block in found[group :: self._count] if block != NO_BLOCK]
            count = new + sum(block == ELSEWHERE or self._pool.references(block) == 0 for block in own)
            needed += count if span is None else min(count, span)
        return needed

    def open(self, sequence_id: int, found: Sequence[int], start: int, count: int) -> None:
        """Give a sequence its table, to compute `count` tokens behind the first `start`: the blocks that were found,
        shared, and new ones for the rest of what these read and write."""
        places = self._pool.blocks_for(start + count)
        blocks = [NO_BLOCK] * (places * self._count)
        firsts = [first_place(window, start, self._size) for window in self._windows]
        columns = [found[first * self._count + group :: self._count] for group, first in enumerate(firsts)]
        for column in columns:  # all before any is taken, which might be one of them
            self._pool.share(block for block in column if block != ELSEWHERE)
        for group, (first, column) in enumerate(zip(firsts, columns, strict=True)):
            blocks[first * self._count + group :: self._count] = self._column(group, column, start, places - first)
        self._tables[sequence_id] = _Table(blocks, firsts, self._due(firsts))

    def _column(self, group: int, found: Sequence[int], start: int, places: int) -> list[int]:
        """The first blocks of a group, of so many places, for a sequence that goes on behind token `start`."""
        column = [*found, *self._pool.allocate(places - len(found))]
        for place in [place for place, block in enumerate(found) if block == ELSEWHERE]:
            column[place] = self._pool.allocate(1)[0]
        return column

    def held(self, sequence_id: int, tokens: int) -> list[int]:
        """The blocks that hold what the token behind a sequence's first `tokens` reads, in their order."""
        blocks, places = self._tables[sequence_id].blocks, self._pool.blocks_for(tokens)
        firsts = [first_place(window, tokens, self._size) for window in self._windows]
        return [
            blocks[place * self._count + group]
            for place in range(min(firsts), places)
            for group, first in enumerate(firsts)
            if first <= place
        ]

    def held_of(self, found: Sequence[int], tokens: int) -> int:
        """How many of what `held` returns, the first of them, were found."""
        places = self.places(found)
        firsts = [first_place(window, tokens, self._size) for window in self._windows]
        return sum(max(0, places - first) for first in firsts)

    # -- a sequence that runs -------------------------------------------------------------------------------------

    def reserve(self, sequence_id: int, start: int, count: int) -> list[tuple[int, int]] | None:
        """Get blocks of its own for a sequence's tokens `start` .. `start + count`, once it has given back those that
        token `start` does not read any more.

        A block that another sequence reads is copied before it is written to: returns (from, to) of those to copy
        first. None: there are too few.
        """
        table, end = self._tables[sequence_id], start + count
        if start >= table.due:
            self._give_back(table, start)
        shared = self._is_shared(table, start)
        if not shared and self._has_all(table, end):
            return []
        if not self._can_take(table, end, shared):
            return None
        copies = self._copy(table, start) if shared else []
        self._extend(table, start, end)
        return copies

    def _has_all(self, table: _Table, end: int) -> bool:
        """Whether there are blocks for all tokens up to `end`."""
        return self._pool.blocks_for(end) * self._count <= len(table.blocks)

    def _can_take(self, table: _Table, end: int, shared: bool) -> bool:
        """Whether there are free blocks for these, and for copies of those of one place where they are shared."""
        missing = max(0, self._pool.blocks_for(end) * self._count - len(table.blocks))
        return missing + shared * self._count <= self._pool.num_free

    def _give_back(self, table: _Table, start: int) -> None:
        gone: list[int] = []
        for group, window in self._bounded:
            before, first = table.firsts[group], first_place(window, start, self._size)
            gone += range(before * self._count + group, first * self._count + group, self._count)
            table.firsts[group] = first
        gone.sort()
        self._pool.release([block for place in gone if (block := table.blocks[place]) != NO_BLOCK])
        for place in gone:
            table.blocks[place] = NO_BLOCK
        table.due = self._due(table.firsts)

    def _due(self, firsts: Sequence[int]) -> float:
        """The first token that does not read all blocks from these places on."""
        dues = [(firsts[group] + 1) * self._size + window - 1 for group, window in self._bounded]
        return min(dues, default=float("inf"))

    def _is_shared(self, table: _Table, start: int) -> bool:
        """Whether the block that token `start` goes to is another's too. The first group's says it for all."""
        place, offset = divmod(start, self._size)
        return offset > 0 and self._pool.references(table.blocks[place * self._count]) > 1

    def _copy(self, table: _Table, start: int) -> list[tuple[int, int]]:
        """Have blocks of its own in the place of token `start`: (from, to)."""
        first = start // self._size * self._count
        places = slice(first, first + self._count)
        shared, own = table.blocks[places], self._of_a_place()
        self._pool.release(shared)
        table.blocks[places] = own
        table.told = min(first, table.told)
        return list(zip(shared, own, strict=True))

    def _of_a_place(self) -> list[int]:
        """A new block of each group."""
        return self._pool.allocate(self._count)

    def _extend(self, table: _Table, start: int, end: int) -> None:
        """Add the blocks of all tokens up to `end`."""
        table.blocks += self._pool.allocate(max(0, self._pool.blocks_for(end) * self._count - len(table.blocks)))

    def publish(self, sequence_id: int, keys: Sequence[bytes], first: int, last: int) -> None:
        """Make blocks `first` .. `last` of a sequence findable by their keys: those that it still has."""
        index = self._pool.index
        assert index is not None
        blocks = self._tables[sequence_id].blocks
        for place in range(first, last):
            for group, suffix in enumerate(self._suffixes):
                block = blocks[place * self._count + group]
                if block != NO_BLOCK:
                    index.publish(keys[place] + suffix, block)

    # -- both -----------------------------------------------------------------------------------------------------

    def fork(self, parent: int, child: int) -> None:
        """Let another sequence share all of a sequence's blocks, until one of the two writes."""
        table = self._tables[parent]
        self._pool.share(table.held())
        self._tables[child] = _Table(list(table.blocks), list(table.firsts), table.due)

    def close(self, sequence_id: int) -> None:
        """Give a sequence's blocks back, if it has any."""
        table = self._tables.pop(sequence_id, None)
        if table is not None:
            self._pool.release(table.held())

    def check_integrity(self, running: Mapping[int, int]) -> None:
        """Raise AssertionError unless the tables are those of the sequences that run and have blocks for all that is
        read of the tokens that are computed (running: their number, by id), and the pool agrees with them."""
        if self._tables.keys() != running.keys():
            raise AssertionError("a sequence that waits holds blocks, or one that runs has no table")
        self._pool.check_integrity([table.held() for table in self._tables.values()])
        for sequence_id, computed in running.items():
            self._check_table(sequence_id, self._tables[sequence_id], computed)

    def _check_table(self, sequence_id: int, table: _Table, computed: int) -> None:
        columns = [table.blocks[group :: self._count] for group in range(self._count)]
        places = self._pool.blocks_for(computed)
        if any(len(column) < places for column in columns) or len(set(map(len, columns))) > 1:
            raise AssertionError(f"sequence {sequence_id} has computed tokens without a block")
        for group, (column, first) in enumerate(zip(columns, table.firsts, strict=True)):
            window = self._windows[group]
            if self._lacks(group, column, first, computed) or set(column[:first]) - {NO_BLOCK}:
                raise AssertionError(f"sequence {sequence_id}: blocks behind its windows, or none within")
            if first > first_place(window, computed, self._size):
                raise AssertionError(f"sequence {sequence_id} has given back what its next token reads")
        partial = places - 1
        if computed % self._size and len({self._pool.references(column[partial]) for column in columns}) > 1:
            raise AssertionError(f"sequence {sequence_id}: its groups share its last block with different sequences")

    def _lacks(self, group: int, column: Sequence[int], first: int, computed: int) -> bool:
        """Whether a group has no block where it must have one, from its first place on."""
        return NO_BLOCK in column[first:]
