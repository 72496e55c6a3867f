"""Whose each block is, in the order of their numbers: made of a snapshot, in any thread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quire.platform.engine.watching.snapshot import EngineSnapshot

# Beside requests' numbers: nobody's; nobody's, but found again by a prompt that begins alike.
FREE, CACHED = 0, 1

MOST_RUNS = 2048


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Blocks of one kind. free, cached, owned: how many of each, exactly.

    runs: (blocks, owner, shared) of neighbours that are alike; the blocks add up to all. owner: FREE, CACHED or the
    number of the oldest request that holds them; shared: how many sequences do. cell: 1; or, where there were more
    than MOST_RUNS runs, so many neighbours (a power of two) are shown as what most of them are.
    """

    free: int
    cached: int
    owned: int
    cell: int
    runs: list[tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class _Owners:
    owners: np.ndarray  # [blocks] int64
    shared: np.ndarray  # [blocks], of some integer type


def block_maps(snapshot: EngineSnapshot) -> tuple[BlockMap, BlockMap | None]:
    """Of the blocks of keys and values; and of those of states, where the model has such layers."""
    shared = _numbers(snapshot.references)
    owners = np.full(len(shared), FREE, dtype=np.int64)
    if snapshot.findable:
        owners[np.array(snapshot.findable, dtype=np.int64)] = CACHED
    for number, table in reversed(snapshot.tables):  # the oldest has the last word
        blocks = np.array(table, dtype=np.int64)
        owners[blocks[blocks >= 0]] = number
    parts = _Owners(owners[snapshot.num_states :], shared[snapshot.num_states :])
    if not snapshot.num_states:
        return _map(parts, snapshot.num_free), None
    states = _Owners(owners[: snapshot.num_states], shared[: snapshot.num_states])
    return _map(parts, snapshot.num_free), _map(states, snapshot.num_free_states)


def _numbers(references: list[int]) -> np.ndarray:
    """[blocks]; by way of bytes, which takes a third of the time, where they are small, as nearly always."""
    try:
        return np.frombuffer(bytes(references), dtype=np.uint8)
    except ValueError:
        return np.array(references, dtype=np.int64)


def _map(part: _Owners, unowned: int) -> BlockMap:
    total = len(part.owners)
    cached = int((part.owners == CACHED).sum())
    cell, shown = 1, part
    starts = _starts(shown)
    if len(starts) > MOST_RUNS:
        while -(-total // cell) > MOST_RUNS:
            cell *= 2
        shown = _coarse(part, cell)
        starts = _starts(shown)
    counts = np.diff(np.append(starts, total))
    runs = list(zip(counts.tolist(), shown.owners[starts].tolist(), shown.shared[starts].tolist(), strict=True))
    return BlockMap(unowned - cached, cached, total - unowned, cell, runs)


def _starts(part: _Owners) -> np.ndarray:
    """The first block of each run."""
    if not len(part.owners):
        return np.zeros(0, dtype=np.int64)
    changes = (part.owners[1:] != part.owners[:-1]) | (part.shared[1:] != part.shared[:-1])
    return np.concatenate(([0], np.flatnonzero(changes) + 1))


def _coarse(part: _Owners, cell: int) -> _Owners:
    """Each cell's blocks as the one in its middle, once they are put in order: what at least half of them are, where
    there is such."""
    owners, shared = part.owners.copy(), part.shared.copy()
    order = np.lexsort((shared, owners, np.arange(len(owners)) // cell))
    for first in range(0, len(owners), cell):
        middle = order[first + min(cell, len(owners) - first) // 2]
        owners[first : first + cell], shared[first : first + cell] = part.owners[middle], part.shared[middle]
    return _Owners(owners, shared)
