"""Where blocks are kept beside the pool: what a connector is, what plans say of it, and what it reports.

A block is found by its prefix key, which covers all that its bits depend on but the model and the machine: of these
there is the `BlockLayout`'s identity. Nothing here knows what bytes mean.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

WRITE_SECONDS = 8.0  # that the end of an engine waits for what is to be written, at most


@dataclass(frozen=True)
class BlockLayout:
    """What a connector is made with.

    identity: a digest, hexadecimal, of all that bits depend on beside keys: weights, dtype, back end, version. Blocks
    of another identity must never be found. block_bytes: of a block. rank, size: the worker's place among those that
    compute one model, each with its own part of every block; identity is the same for all of them. settings:
    `kv_connector_extra_config`.
    """

    identity: str
    block_bytes: int
    rank: int
    size: int
    settings: Mapping[str, Any]


class KVConnector(Protocol):
    """Keeps blocks by their keys. A worker makes one of a `BlockLayout`, and asks it from threads of its own: several
    read at once, and one writes. Nothing may be raised for what a disk or a network does: what cannot be read is not
    there.

    An implementation answers a key with the very bytes that were written under it, of the same identity, or with
    nothing. One to which others write as well may have `news()` besides: (keys that can be read, keys that can no
    longer) since it was asked last, without waiting for anything; any thread may ask. It alone says what is gone then,
    what `read` did not find among it: told before `read` returns.
    """

    def held(self) -> Iterable[bytes]:
        """The keys that are there. Once, before anything else."""
        ...

    def read(self, key: bytes, into: memoryview) -> bool:
        """Read a block into `block_bytes` bytes. False: it is not there, or not what was written; `into` is of no use
        then."""
        ...

    def write(self, key: bytes, block: memoryview) -> tuple[bool, Sequence[bytes]]:
        """Keep a block. Returns whether it is there now, and the keys of those that had to go."""
        ...

    def counts(self) -> ConnectorCounts:
        """Any thread may ask."""
        ...

    def close(self) -> None:
        """Nothing is read or written any more. Where a read or a write hangs at the end, this is called once that has
        returned, from a thread of its own, or never."""
        ...


@dataclass(frozen=True, slots=True)
class ConnectorCounts:
    """Since the worker began. stored, loaded: blocks that were written, and that came into the pool; their bytes.
    refused: files that were damaged, or not what their name says. failed: reads and writes that the system refused.
    dropped: blocks that were not written as too many waited. held_bytes: what is kept now.
    """

    stored: int = 0
    loaded: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    refused: int = 0
    failed: int = 0
    dropped: int = 0
    held_bytes: int = 0

    def __add__(self, other: ConnectorCounts) -> ConnectorCounts:
        return ConnectorCounts(*(getattr(self, one.name) + getattr(other, one.name) for one in fields(self)))


class Fetch(NamedTuple):
    """Blocks to read, off the steps. job: its number, by which plans name what was read."""

    job: int
    keys: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Transfers:
    """What a plan says of blocks beside the pool.

    store: (key, block) to copy before any block is touched, to be written later. fetch: what to begin to read. load:
    (job, place among its keys, block) to copy into the pool, before any block is copied from. forget: jobs whose blocks
    are not needed any more, then.
    """

    store: tuple[tuple[bytes, int], ...] = ()
    fetch: tuple[Fetch, ...] = ()
    load: tuple[tuple[int, int, int], ...] = ()
    forget: tuple[int, ...] = ()


class TransferReport(NamedTuple):
    """What has happened since the last report. fetched: jobs that are done, and which of their keys were there.
    stored, removed: keys that can be read from now on, and that can no longer."""

    fetched: tuple[tuple[int, tuple[bool, ...]], ...] = ()
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    counts: ConnectorCounts = ConnectorCounts()


class MergedReports:
    """The reports of several workers, each with a part of every block, as one: a block is there when all parts are."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._fetched: dict[int, dict[int, tuple[bool, ...]]] = {}  # by job and worker
        self._held: dict[bytes, set[int]] = {}

    def merge(self, reports: Sequence[TransferReport]) -> TransferReport:
        """reports: one of each worker."""
        stored, removed = [], []
        for worker, report in enumerate(reports):
            for job, there in report.fetched:
                self._fetched.setdefault(job, {})[worker] = there
            for key in report.removed:
                removed.append(key)
                if holders := self._held.pop(key, set()) - {worker}:
                    self._held[key] = holders
            for key in report.stored:
                holders = self._held.setdefault(key, set())
                holders.add(worker)
                if len(holders) == self._size:
                    stored.append(key)
        done = [job for job, parts in self._fetched.items() if len(parts) == self._size]
        fetched = [(job, tuple(map(all, zip(*self._fetched.pop(job).values(), strict=True)))) for job in done]
        counts = sum((report.counts for report in reports), ConnectorCounts())
        return TransferReport(tuple(fetched), tuple(stored), tuple(removed), counts)
