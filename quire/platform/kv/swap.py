"""The blocks of preempted sequences in main memory: who has which. The tensors are the runner's.

On a GPU it takes far less time to fetch a sequence's keys and values back than to compute them anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from quire.platform.kv.windows import count_held

Moves = list[tuple[int, int]]


@dataclass(frozen=True)
class _Kept:
    """What a waiting sequence has here: what the token behind its first `tokens` reads, block by block."""

    tokens: int
    blocks: list[int]


class SwapSpace:
    """The bookkeeping of `num_blocks` blocks in main memory, each as large as one of the pool.

    windows: of each group of layers; 0: it keeps every token.
    num_saved, num_fetched: blocks that were written, and that were read, since the engine began.
    """

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[int] = (0,)) -> None:
        self.num_blocks = num_blocks
        self.num_saved = 0
        self.num_fetched = 0
        self._size = block_size
        self._windows = windows
        self._kept: dict[int, _Kept] = {}  # by sequence
        # A heap: the lowest numbers go first, as the runner takes memory up to the highest only.
        self._free = list(range(num_blocks))
        # No longer needed, but the plan in the making may read or write them. Once it has been issued, whatever a later
        # plan writes there comes after.
        self._spent: list[int] = []
        self._out: Moves = []
        self._in: Moves = []

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._spent)

    def begin_plan(self) -> None:
        """The plan before was issued."""
        for block in self._spent:
            heappush(self._free, block)
        self._spent.clear()

    def save(self, sequence_id: int, blocks: Sequence[int], tokens: int) -> bool:
        """Keep a sequence's first `tokens` tokens, before its blocks are released. False: there is no room, or no need.

        blocks: of the pool, those that hold what the next token reads of these, in their order.
        """
        if not blocks or len(blocks) > len(self._free):
            return False
        hosts = [heappop(self._free) for _ in blocks]
        self._kept[sequence_id] = _Kept(tokens, hosts)
        self._out += zip(blocks, hosts, strict=True)
        self.num_saved += len(hosts)
        return True

    def tokens_of(self, sequence_id: int) -> int:
        """How many of a waiting sequence's tokens need not be computed again."""
        kept = self._kept.get(sequence_id)
        return kept.tokens if kept else 0

    def fetch(self, sequence_id: int, blocks: Sequence[int], found: int) -> None:
        """Bring back what a sequence has here, into the blocks it was given; the first `found` of them need nothing."""
        kept = self._kept.get(sequence_id)
        if kept is not None:
            moves = list(zip(kept.blocks, blocks, strict=False))[found:]
            self._in += moves
            self.num_fetched += len(moves)
            self.drop(sequence_id)

    def drop(self, sequence_id: int) -> None:
        """Forget what a sequence has here, if anything."""
        kept = self._kept.pop(sequence_id, None)
        if kept is not None:
            self._spent += kept.blocks

    def take_moves(self) -> tuple[Moves, Moves]:
        """What the plan in the making writes, (device, host) blocks, and then reads, (host, device) blocks."""
        moves = self._out, self._in
        self._out, self._in = [], []
        return moves

    def check_integrity(self, waiting: Mapping[int, int]) -> None:
        """Raise AssertionError unless each block is free or some waiting sequence's, which has as many as it needs.

        waiting: how many tokens each sequence that waits has, by its id.
        """
        taken = [block for kept in self._kept.values() for block in kept.blocks]
        if sorted(self._free + self._spent + taken) != list(range(self.num_blocks)):
            raise AssertionError("swap space: a block is lost, or has two owners")
        for owner, kept in self._kept.items():
            if kept.tokens > waiting.get(owner, 0):
                raise AssertionError(f"swap space: sequence {owner} does not wait, or not with so many tokens")
            if len(kept.blocks) != count_held(self._windows, kept.tokens, self._size):
                raise AssertionError(f"swap space: sequence {owner} has {len(kept.blocks)} blocks")
