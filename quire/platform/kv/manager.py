"""Who has which blocks of keys and values: found by prefix, reserved, published, copied, kept in main memory, released.

Blocks and sequences are numbers here, tokens are lists of ids and counts: this room knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.platform.kv.block_pool import BlockPool
from quire.platform.kv.block_tables import BlockTables
from quire.platform.kv.group_tables import GroupTables
from quire.platform.kv.prefix_index import ELSEWHERE, KeyChain, PrefixIndex
from quire.platform.kv.spans import uncut_blocks
from quire.platform.kv.state_tables import StateTables
from quire.platform.kv.swap import Moves, SwapSpace
from quire.platform.kv.transfers import TransferAccount, WiderIndex
from quire.platform.kv.windows import Footprint
from quire.types import STATE, PlaceholderRange, Span


class KVManager:
    """The blocks of all sequences.

    windows: of each group of the model's layers (`KVSpec.group_windows`); 0: it keeps every token. All groups take from
    the same pool.
    tables: of sequences. most_at_once: tokens that a chunk may have.

    A sequence is opened once, admitted and preempted any number of times, and closed.
    prefix_queries, prefix_hits: tokens that were looked for in the prefix cache, and that were found there.
    transfers: blocks beside the pool; None: nothing keeps any.
    """

    def __init__(
        self,
        pool: BlockPool,
        swap: SwapSpace | None = None,
        windows: Sequence[int] = (0,),
        transfers: TransferAccount | None = None,
    ) -> None:
        self.pool = pool
        self.swap = SwapSpace(0, pool.block_size, windows) if swap is None else swap
        self.tables = _tables(pool, windows)
        self.transfers = transfers
        self.windows = tuple(windows)
        self.most_at_once = Footprint(pool.num_blocks, pool.block_size, windows).most_at_once
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._size = pool.block_size
        self._caches = pool.index is not None
        self._chains: dict[int, KeyChain] = {}
        self._copies: Moves = []

    def open(
        self, sequence_id: int, root: bytes, media: Sequence[PlaceholderRange] = (), spans: Sequence[Span] = ()
    ) -> None:
        """A sequence arrives. root: of its prefix keys; media: its images, whose digests these cover; spans: ranges of
        its tokens that see one another."""
        self._chains[sequence_id] = KeyChain(root, media, spans)

    def blocks(self, sequence_id: int) -> Sequence[int]:
        """A sequence's blocks, in the order of its tokens; none while it waits."""
        return self.tables.blocks(sequence_id)

    def new_blocks(self, sequence_id: int) -> tuple[int, tuple[int, ...]]:
        """The blocks of a sequence that the worker does not know, and the place of the first; it knows them from here
        on."""
        return self.tables.new_blocks(sequence_id)

    def forget_told(self, sequence_id: int) -> None:
        """The worker knows none of a sequence's blocks."""
        self.tables.forget_told(sequence_id)

    def keys(self, sequence_id: int) -> Sequence[bytes]:
        """The prefix keys that were computed for a sequence's full blocks."""
        return self._chains[sequence_id].keys

    # -- a sequence that waits ------------------------------------------------------------------------------------

    def find_prefix(self, sequence_id: int, token_ids: Sequence[int], most: int) -> list[int]:
        """Cached blocks that a sequence can start from, of its first `most` tokens; they end in no range of tokens that
        see one another. ELSEWHERE stands for blocks that were read for it from beside the pool."""
        index = self.pool.index
        if index is None:
            return []
        there = () if self.transfers is None else self.transfers.there(sequence_id)
        return self._find(sequence_id, token_ids, most, WiderIndex(index, there) if there else index)

    def waits(self, sequence_id: int, token_ids: Sequence[int], most: int) -> bool:
        """Whether a sequence waits for blocks that are read for it, among those of its first `most` tokens."""
        if self.transfers is None or self.swap.tokens_of(sequence_id):
            return False
        return self.transfers.waits(sequence_id, lambda: self._beside(sequence_id, token_ids, most))

    def _beside(self, sequence_id: int, token_ids: Sequence[int], most: int) -> list[bytes]:
        """Keys of blocks that a sequence can start from, which are not in the pool and are beside it."""
        assert self.pool.index is not None and self.transfers is not None
        found = self._find(sequence_id, token_ids, most, WiderIndex(self.pool.index, self.transfers.held))
        return [key for key, block in self._named(sequence_id, found, found) if block == ELSEWHERE]

    def _named(self, sequence_id: int, found: Sequence[int], blocks: Sequence[int]) -> list[tuple[bytes, int]]:
        """(key, block) in the places of those that were found elsewhere; blocks: of the table."""
        keys = self.tables.index_keys(self._chains[sequence_id].keys, 0, self.tables.places(found))
        return [(key, block) for key, own, block in zip(keys, found, blocks, strict=False) if own == ELSEWHERE]

    def _find(
        self, sequence_id: int, token_ids: Sequence[int], most: int, index: PrefixIndex | WiderIndex
    ) -> list[int]:
        chain = self._chains[sequence_id]
        keys, places = chain.extend(token_ids, most, self._size), most // self._size
        if not chain.spans:
            return self.tables.find(keys[:places], index)
        while True:
            found = self.tables.find(keys[: uncut_blocks(chain.spans, places, self._size)], index)
            places = self.tables.places(found)
            if uncut_blocks(chain.spans, places, self._size) == places:
                return found

    def fits(self, tokens: int, found: Sequence[int]) -> bool:
        """Whether there are blocks for so many tokens, the first of which are in blocks that were found."""
        return self.tables.fits(tokens, found)

    def start_of(self, sequence_id: int, found: Sequence[int]) -> int:
        """How many of a sequence's tokens need not be computed: they are in the cache, or in main memory."""
        return max(self.tables.places(found) * self._size, self.swap.tokens_of(sequence_id))

    def admit(self, sequence_id: int, token_ids: Sequence[int], found: Sequence[int], start: int, count: int) -> None:
        """Give a sequence blocks for `count` tokens behind the `start` ones that need not be computed."""
        self.tables.open(sequence_id, found, start, count)
        if self.swap.tokens_of(sequence_id):
            self.swap.fetch(sequence_id, self.tables.held(sequence_id, start), self.tables.held_of(found, start))
        if not self._caches:
            return
        # What comes back from main memory is there before any chunk reads it.
        keys = self._chains[sequence_id].extend(token_ids, start, self._size)
        places = self.tables.places(found)
        self.tables.publish(sequence_id, keys, places, start // self._size)
        if self.transfers is not None:
            loaded = self._named(sequence_id, found, self.tables.copy_table(sequence_id))
            self.transfers.load(sequence_id, loaded)
            assert self.pool.index is not None
            for key, block in loaded:
                self.pool.index.publish(key, block)
        self.prefix_queries += len(token_ids)
        self.prefix_hits += places * self._size

    # -- a sequence that runs -------------------------------------------------------------------------------------

    def reserve(self, sequence_id: int, start: int, count: int) -> bool:
        """Get blocks of its own for a sequence's tokens `start` .. `start + count`. False: there are too few."""
        copies = self.tables.reserve(sequence_id, start, count)
        if copies is None:
            return False
        if copies:
            self._copies += copies
        return True

    def publish(self, sequence_id: int, token_ids: Sequence[int], start: int, end: int) -> None:
        """Make the blocks findable that the tokens `start` .. `end` have filled."""
        first, last = start // self._size, end // self._size
        if first < last and self._caches:
            keys = self._chains[sequence_id].extend(token_ids, end, self._size)
            self.tables.publish(sequence_id, keys, first, last)
            if self.transfers is not None and self.pool.index is not None:
                self.transfers.store(self.tables.index_keys(keys, first, last), self.pool.index)

    def preempt(self, sequence_id: int, computed: int) -> bool:
        """Take a sequence's blocks. True: what they hold of its `computed` tokens goes to main memory, else it is lost,
        but for what the prefix index still knows."""
        saved = self.swap.save(sequence_id, self.tables.held(sequence_id, computed), computed)
        self.tables.close(sequence_id)
        return saved

    # -- both -----------------------------------------------------------------------------------------------------

    def fork(self, parent: int, child: int) -> None:
        """A sequence branches off another: they share all blocks, if the parent runs, until one of the two writes."""
        self._chains[child] = self._chains[parent].fork()
        if self.tables.blocks(parent):
            self.tables.fork(parent, child)

    def close(self, sequence_id: int) -> None:
        """A sequence has ended: nothing is kept of it but what the prefix index knows."""
        self.tables.close(sequence_id)
        self.swap.drop(sequence_id)
        if self.transfers is not None:
            self.transfers.drop(sequence_id)
        del self._chains[sequence_id]

    # -- plans ----------------------------------------------------------------------------------------------------

    def begin_plan(self) -> None:
        """The plan before was issued."""
        self.swap.begin_plan()

    def take_copies(self) -> Moves:
        """(from, to): blocks that the plan in the making copies before its chunks are computed."""
        copies, self._copies = self._copies, []
        return copies

    def take_poison(self) -> list[int]:
        """In debug runs, blocks that hold nothing any more since the last call, to be overwritten with NaN."""
        freed = self.pool.freed
        if freed is None:
            return []
        blocks = {block for block in freed if self.pool.references(block) == 0}
        freed.clear()
        return sorted(b for b in blocks if self.pool.index is None or not self.pool.index.holds(b))

    def forget_cached(self) -> None:
        """Make no block findable any more; running sequences keep theirs. What is beside the pool stays."""
        if self.transfers is not None:
            self.transfers.forget_unsent()
        self.pool.forget_cached()

    def check_integrity(self, running: Mapping[int, int], waiting: Mapping[int, int]) -> None:
        """Raise AssertionError unless all tables agree.

        running: how many tokens are computed of each sequence that runs, by its id. waiting: how many tokens each has
        that waits.
        """
        self.tables.check_integrity(running)
        self.swap.check_integrity(waiting)
        if self.transfers is not None:
            self.transfers.check_integrity(waiting)
        if self._chains.keys() != running.keys() | waiting.keys():
            raise AssertionError("a sequence that has ended has prefix keys, or one that goes on has none")


def _tables(pool: BlockPool, windows: Sequence[int]) -> BlockTables | GroupTables:
    if tuple(windows) == (0,):
        return BlockTables(pool)
    return StateTables(pool, windows) if STATE in windows else GroupTables(pool, windows)
