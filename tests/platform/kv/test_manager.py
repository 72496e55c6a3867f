"""The KV manager alone: sequences are numbers, tokens are lists of ids."""

from __future__ import annotations

import pytest

from quire.platform.kv.block_pool import BlockPool
from quire.platform.kv.manager import KVManager
from quire.platform.kv.prefix_index import PrefixIndex, root_key
from quire.platform.kv.swap import SwapSpace

SIZE = 4
IDS = list(range(10))


def manager(blocks: int = 8, hosts: int = 0) -> KVManager:
    return KVManager(BlockPool(blocks, SIZE, PrefixIndex()), SwapSpace(hosts, SIZE))


def admit(kv: KVManager, sequence: int, ids: list[int] = IDS) -> int:
    """Open a sequence and give it blocks for all its tokens; returns how many need not be computed."""
    kv.open(sequence, root_key())
    found = kv.find_prefix(sequence, ids, len(ids) - 1)
    start = kv.start_of(sequence, found)
    assert kv.fits(len(ids), found)
    kv.admit(sequence, ids, found, start, len(ids) - start)
    return start


def computed(kv: KVManager, sequence: int, ids: list[int] = IDS) -> None:
    kv.publish(sequence, ids, 0, len(ids))


def test_a_prefix_is_found_once_it_is_published() -> None:
    kv = manager()
    assert admit(kv, 1) == 0
    assert kv.find_prefix(1, IDS, len(IDS)) == []
    computed(kv, 1)
    assert admit(kv, 2) == 2 * SIZE, "the full blocks; the last token is computed at any rate"
    assert list(kv.blocks(2)[:2]) == list(kv.blocks(1)[:2]) and kv.blocks(2)[2] != kv.blocks(1)[2]
    assert (kv.prefix_queries, kv.prefix_hits) == (2 * len(IDS), 2 * SIZE)
    kv.check_integrity({1: 10, 2: 10}, {})
    kv.close(1)
    kv.close(2)
    kv.check_integrity({}, {})
    assert kv.pool.num_owned == 0
    kv.open(3, root_key())
    assert len(kv.find_prefix(3, IDS, len(IDS))) == 2, "released, and found as long as nobody needs the room"
    kv.forget_cached()
    assert kv.find_prefix(3, IDS, len(IDS)) == []


def test_reserving_copies_a_shared_block_and_says_when_there_are_too_few() -> None:
    kv = manager(blocks=5)
    admit(kv, 1)
    kv.fork(1, 2)
    assert list(kv.blocks(1)) == list(kv.blocks(2)) and kv.pool.num_free == 2
    assert kv.reserve(2, 10, 1)
    original, copy = kv.blocks(1)[2], kv.blocks(2)[2]
    assert kv.take_copies() == [(original, copy)] and original != copy
    assert kv.take_copies() == []
    assert kv.reserve(1, 10, 2) and kv.take_copies() == [], "nobody else reads it any more"
    assert kv.reserve(1, 12, 1) and kv.pool.num_free == 0
    before = list(kv.blocks(2))
    assert not kv.reserve(2, 12, 1) and list(kv.blocks(2)) == before
    kv.check_integrity({1: 12, 2: 11}, {})


def test_a_preempted_sequence_goes_on_where_it_was() -> None:
    kv = manager(hosts=3)
    admit(kv, 1)
    first = list(kv.blocks(1))
    kv.begin_plan()
    assert kv.preempt(1, 9) and not kv.blocks(1)
    kv.check_integrity({}, {1: 10})
    assert kv.start_of(1, []) == 9
    kv.forget_cached()
    kv.admit(1, IDS, [], 9, 1)
    out, back = kv.swap.take_moves()
    assert [block for block, _ in out] == first and [block for _, block in back] == list(kv.blocks(1))
    assert len(kv.find_prefix(1, IDS, 9)) == 2, "what came back is found too"
    assert not kv.preempt(1, 0), "nothing is kept of a sequence that needs nothing more"
    assert kv.start_of(1, []) == 0
    kv.close(1)
    assert kv.pool.num_owned == 0 and kv.swap.num_free == 3


def test_what_a_worker_does_not_know_of_a_table() -> None:
    kv = manager()
    admit(kv, 1)
    assert kv.new_blocks(1) == (0, tuple(kv.blocks(1))) and kv.new_blocks(1) == (3, ())
    kv.reserve(1, 10, 3)
    assert kv.new_blocks(1) == (3, (kv.blocks(1)[3],))
    kv.fork(1, 2)
    kv.reserve(2, 13, 1)
    assert kv.new_blocks(2) == (0, tuple(kv.blocks(2)))
    kv.fork(2, 3)
    kv.reserve(2, 14, 1)
    assert kv.new_blocks(2) == (3, (kv.blocks(2)[3],)), "the copy stands in the place of what it copies"
    kv.forget_told(1)
    assert kv.new_blocks(1) == (0, tuple(kv.blocks(1)))


@pytest.mark.parametrize("running", [{}, {1: 17}, {1: 10, 2: 1}])
def test_integrity_check_sees_tables_and_sequences_that_disagree(running: dict[int, int]) -> None:
    kv = manager()
    admit(kv, 1)
    kv.check_integrity({1: 10}, {})
    with pytest.raises(AssertionError):
        kv.check_integrity(running, {})


def test_blocks_that_nobody_can_find_come_before_untouched_ones_and_those_before_cached_ones() -> None:
    kv = manager(blocks=9)
    admit(kv, 1)
    computed(kv, 1)  # two full blocks, and one that no key finds
    admit(kv, 2, [20, 21])
    held = list(kv.blocks(1)), list(kv.blocks(2))
    kv.close(1)
    kv.close(2)
    untouched = [block for block in range(9) if block not in held[0] + held[1]]
    order = kv.pool.allocate(9)
    assert order[:2] == [held[1][0], held[0][2]], "the last released first: it is still in a cache"
    assert order[2:7] == untouched, "in the order of their numbers, as pages are committed ahead of them"
    assert order[7:] == [held[0][1], held[0][0]], "what may be found goes last, a sequence's end first"
