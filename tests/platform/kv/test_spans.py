"""Where a sequence may be cut whose tokens see one another in ranges: against trying every place."""

from __future__ import annotations

import random

import pytest

from quire.platform.kv.block_pool import BlockPool
from quire.platform.kv.manager import KVManager
from quire.platform.kv.prefix_index import PrefixIndex
from quire.platform.kv.spans import uncut, uncut_blocks


def ranges(rng: random.Random) -> list[tuple[int, int]]:
    edges = sorted(rng.sample(range(60), 2 * rng.randint(0, 8)))
    found = list(zip(edges[::2], edges[1::2], strict=True))
    return found + [(edges[-1], edges[-1] + 5) for _ in edges[:1]]  # which begins where the one before it ends


@pytest.mark.parametrize("seed", range(12))
def test_the_last_place_that_cuts_nothing(seed):
    rng = random.Random(seed)
    spans = ranges(rng)
    allowed = [place for place in range(80) if not any(start < place < end for start, end in spans)]
    for end in range(80):
        assert uncut(spans, end) == max(place for place in allowed if place <= end)
    for size in (1, 2, 3, 8):
        for blocks in range(80 // size):
            fitting = [count for count in range(blocks + 1) if count * size in allowed]
            assert uncut_blocks(spans, blocks, size) == max(fitting)


@pytest.mark.parametrize("windows", [(0,), (0, 9)])
@pytest.mark.parametrize("seed", range(3))
def test_a_prefix_hit_cuts_nothing(seed, windows):
    """Of every beginning that is cached, what is found ends in no range, and nothing longer would do."""
    rng = random.Random(seed)
    spans, ids = ranges(rng), list(range(70))
    for length in range(4, 69, 5):
        kv = KVManager(BlockPool(300, 4, PrefixIndex()), windows=windows)
        kv.open(1, b"root", (), spans)
        kv.admit(1, ids[:length], [], 0, length)
        kv.publish(1, ids[:length], 0, length)
        kv.open(2, b"root", (), spans)
        found = kv.tables.places(kv.find_prefix(2, ids, 69))
        assert found == uncut_blocks(spans, length // 4, 4)
