"""Which blocks each sequence has where layers keep states beside others that keep keys."""

from __future__ import annotations

from collections.abc import Sequence

from quire.platform.kv.group_tables import NO_BLOCK, GroupTables, _Table

# With a prefix cache, a long chunk leaves a state behind it every so many tokens, for others to start from.
_STATE_EVERY = 512


class StateTables(GroupTables):
    """Tables of groups, the last of which has states: a block holds what is left of a sequence behind the last token
    that was computed of the block's run.

    What the next token reads of it is one block, that of the token before it: as of a group with a window of two. So
    blocks are found, given back, shared and copied as those of windows are. But a chunk needs no block for each of its
    places: only for the one that its last token is in. Places between have none, but for states that others may start
    from, which are taken while half of all are free: before the chunk's last place, and now and then.
    """

    @property
    def _group(self) -> int:
        return self._count - 1

    def fits(self, tokens: int, found: Sequence[int]) -> bool:
        # One that is read and one that is written.
        return super().fits(tokens, found) and self._pool.num_free_states >= min(2, self._pool.blocks_for(tokens))

    def _column(self, group: int, found: Sequence[int], start: int, places: int) -> list[int]:
        if group != self._group:
            return super()._column(group, found, start, places)
        column = [*found, *[NO_BLOCK] * (places - len(found))]
        if start and not found:
            column[0] = self._pool.allocate_states(1)[0]  # it comes back from main memory
        if column[-1] == NO_BLOCK:
            column[-1] = self._pool.allocate_states(1)[0]
        first = max(0, start - 1) // self._size  # the column's
        for place in self._useful(start, first + places):
            if column[place - first] == NO_BLOCK:
                column[place - first] = self._pool.allocate_states(1)[0]
        return column

    def _useful(self, start: int, places: int) -> list[int]:
        """Places of a chunk, from token `start` to the end of so many places, behind which others may want a state."""
        if self._pool.index is None:
            return []
        every = max(1, _STATE_EVERY // self._size)
        own = range(start // self._size, places - 1)
        wanted = [place for place in own if place == places - 2 or (place + 1) % every == 0]
        count = self._pool.num_free_states - self._pool.num_states // 2
        return wanted[-count:] if count > 0 else []

    def _has_all(self, table: _Table, end: int) -> bool:
        return super()._has_all(table, end) and table.blocks[self._place_of(end)] != NO_BLOCK

    def _place_of(self, end: int) -> int:
        """Where in a table the state behind token `end` - 1 stands."""
        return (end - 1) // self._size * self._count + self._group

    def _can_take(self, table: _Table, end: int, shared: bool) -> bool:
        place = self._place_of(end)
        states = shared + (place >= len(table.blocks) or table.blocks[place] == NO_BLOCK)
        missing = max(0, self._pool.blocks_for(end) - len(table.blocks) // self._count)
        keys = (missing + shared) * (self._count - 1)
        return keys <= self._pool.num_free and states <= self._pool.num_free_states

    def _of_a_place(self) -> list[int]:
        return self._pool.allocate(self._count - 1) + self._pool.allocate_states(1)

    def _extend(self, table: _Table, start: int, end: int) -> None:
        blocks, keys = table.blocks, self._count - 1
        places = self._pool.blocks_for(end)
        new = self._pool.allocate(max(0, places - len(blocks) // self._count) * keys)
        for at in range(0, len(new), keys):
            blocks += [*new[at : at + keys], NO_BLOCK]
        if blocks[self._place_of(end)] == NO_BLOCK:
            self._put(table, self._place_of(end))
        for place in self._useful(start, places):
            if blocks[place * self._count + self._group] == NO_BLOCK:
                self._put(table, place * self._count + self._group)

    def _put(self, table: _Table, place: int) -> None:
        table.blocks[place] = self._pool.allocate_states(1)[0]
        table.told = min(place, table.told)

    def _lacks(self, group: int, column: Sequence[int], first: int, computed: int) -> bool:
        if group != self._group:
            return super()._lacks(group, column, first, computed)
        return computed > 0 and column[(computed - 1) // self._size] == NO_BLOCK
