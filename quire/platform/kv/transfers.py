"""Blocks beside the pool, as the scheduler sees them: which keys are there, what is being read, what is to be stored.

A sequence that waits may have blocks that the pool has not and the connector has. It is asked once; these are read by
the worker off the steps, the sequence waits for them while others pass, and the plan that admits it copies them into
the blocks that it is given.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from itertools import count

from quire.platform.kv.connector import ConnectorCounts, Fetch, TransferReport, Transfers
from quire.platform.kv.prefix_index import ELSEWHERE, PrefixIndex

# A sequence that has waited so long for what is read is computed.
PATIENCE_SECONDS = 10.0
# Between two looks at what was stored, where nothing is waited for.
_LOOK_SECONDS = 0.5


@dataclass
class _Job:
    """Blocks that are read for a sequence. there: the places of those that were, by key; None: it goes on."""

    number: int
    keys: tuple[bytes, ...]
    there: dict[bytes, int] | None = None


@dataclass
class _Wait:
    """A sequence that was asked. job: its own. until: it is computed then. behind: another's job, which reads the same
    or takes the room."""

    until: float
    job: _Job | None = None
    behind: int | None = None
    done: bool = field(default=False)


class TransferAccount:
    """min_blocks: fewer are not worth reading. most_loading: blocks that are read and not in the pool, at most. stores:
    whether blocks of the pool are stored.

    held: keys that can be read, as far as the worker has told. counts: the worker's.
    """

    def __init__(self, min_blocks: int, most_loading: int, stores: bool = True) -> None:
        self.held: set[bytes] = set()
        self.counts = ConnectorCounts()
        self._min_blocks = min_blocks
        self._most_loading = most_loading
        self._stores = stores
        self._numbers = count(1)
        self._waits: dict[int, _Wait] = {}  # by sequence
        self._jobs: dict[int, _Job] = {}  # that were not forgotten, by number
        self._hanging: set[int] = set()  # jobs that took too long, until they are done
        self._sent: set[bytes] = set()  # to be stored, and not known to be held
        self._store: list[tuple[bytes, int]] = []
        self._fetch: list[Fetch] = []
        self._load: list[tuple[int, int, int]] = []
        self._forget: list[int] = []
        self._looked = 0.0

    # -- a sequence that waits ------------------------------------------------------------------------------------

    def waits(self, sequence_id: int, wanted: Callable[[], Sequence[bytes]]) -> bool:
        """Whether a sequence waits for what is read. wanted: the keys beyond the pool's that the connector has."""
        wait = self._waits.get(sequence_id)
        if wait is None:
            wait = self._waits[sequence_id] = _Wait(time.monotonic() + PATIENCE_SECONDS)
        if wait.done:
            return False
        if wait.job is not None and wait.job.there is not None:
            wait.done = True
        elif time.monotonic() > wait.until:
            if wait.job is not None:
                self._hanging.add(wait.job.number)
            self._drop(wait)
            wait.done = True
        elif self._hanging and wait.job is None:  # nobody waits in vain again
            wait.done = True
        elif wait.job is None and wait.behind not in self._jobs:
            self._ask(wait, wanted())
        return not wait.done

    def _ask(self, wait: _Wait, keys: Sequence[bytes]) -> None:
        keys = tuple(keys[: self._most_loading])
        if len(keys) < self._min_blocks:
            wait.done = True
            return
        wanted = set(keys)
        loading = 0
        for job in self._jobs.values():
            loading += len(job.keys)
            if wanted.intersection(job.keys):
                wait.behind = job.number
                return
        if loading + len(keys) > self._most_loading:
            wait.behind = min(self._jobs)
            return
        wait.job = _Job(next(self._numbers), keys)
        self._jobs[wait.job.number] = wait.job
        self._fetch.append(Fetch(wait.job.number, keys))

    def there(self, sequence_id: int) -> Container[bytes]:
        """Keys of the blocks that were read for a sequence."""
        wait = self._waits.get(sequence_id)
        return () if wait is None or wait.job is None or wait.job.there is None else wait.job.there

    def load(self, sequence_id: int, blocks: Sequence[tuple[bytes, int]]) -> None:
        """A sequence is admitted: (key, block) of those that were read and that it takes. It is asked anew when it
        waits again."""
        wait = self._waits.get(sequence_id)
        if wait is None:
            return
        if blocks:
            assert wait.job is not None and wait.job.there is not None
            self._load += [(wait.job.number, wait.job.there[key], block) for key, block in blocks]
        self.drop(sequence_id)

    def drop(self, sequence_id: int) -> None:
        """A sequence needs nothing that is read for it."""
        wait = self._waits.pop(sequence_id, None)
        if wait is not None:
            self._drop(wait)

    def _drop(self, wait: _Wait) -> None:
        if wait.job is not None:
            del self._jobs[wait.job.number]
            self._forget.append(wait.job.number)
            wait.job = None

    # -- blocks of the pool ---------------------------------------------------------------------------------------

    def store(self, keys: Sequence[bytes], index: PrefixIndex) -> None:
        """These blocks can be found in the pool now: they are stored unless they are, or are about to be."""
        for key in keys if self._stores else ():
            if key not in self.held and key not in self._sent:
                block = index.block_of(key)
                if block is not None:
                    self._sent.add(key)
                    self._store.append((key, block))

    def forget_unsent(self) -> None:
        """What blocks hold is going: nothing is stored of them that no plan has named."""
        self._sent.difference_update(key for key, _ in self._store)
        self._store.clear()

    # -- plans and reports ----------------------------------------------------------------------------------------

    @property
    def is_reading(self) -> bool:
        """Whether some sequence waits for what is read."""
        return any(job.there is None for job in self._jobs.values())

    @property
    def has_news(self) -> bool:
        """Whether a plan has something to say to the worker."""
        return bool(self._store or self._fetch or self._load or self._forget)

    def is_due(self) -> bool:
        """Whether to ask the worker what has happened."""
        if self.is_reading:
            return True
        now = time.monotonic()
        if now - self._looked < _LOOK_SECONDS:
            return False
        self._looked = now
        return True

    def take(self) -> Transfers | None:
        """What the plan in the making says."""
        if not self.has_news:
            return None
        new = set(fetch.job for fetch in self._fetch)
        gone = new.intersection(self._forget)  # asked for and given up in one plan
        self._hanging -= gone
        transfers = Transfers(
            tuple(self._store),
            tuple(fetch for fetch in self._fetch if fetch.job not in gone),
            tuple(self._load),
            tuple(job for job in self._forget if job not in gone),
        )
        for news in (self._store, self._fetch, self._load, self._forget):
            news.clear()
        return None if transfers == Transfers() else transfers

    def reported(self, report: TransferReport) -> None:
        """The worker has told."""
        self.held.difference_update(report.removed)
        self.held.update(report.stored)
        self._sent.difference_update(report.stored, report.removed)
        self.counts = report.counts
        for number, there in report.fetched:
            self._hanging.discard(number)
            job = self._jobs.get(number)
            if job is not None:
                job.there = {key: at for at, (key, ok) in enumerate(zip(job.keys, there, strict=True)) if ok}

    def check_integrity(self, waiting: Container[int]) -> None:
        """Raise AssertionError unless each job is one waiting sequence's. waiting: ids of these."""
        jobs = [wait.job.number for wait in self._waits.values() if wait.job is not None]
        if sorted(jobs) != sorted(self._jobs):
            raise AssertionError("blocks are read for nobody, or twice")
        if any(sequence_id not in waiting for sequence_id in self._waits):
            raise AssertionError("blocks are read for a sequence that does not wait")
        if sum(len(job.keys) for job in self._jobs.values()) > self._most_loading:
            raise AssertionError("more blocks are read than there is room for")


class WiderIndex:
    """A pool's index with keys that are elsewhere beside it; asked as `PrefixIndex` is."""

    def __init__(self, index: PrefixIndex, elsewhere: Container[bytes]) -> None:
        self._index = index
        self._elsewhere = elsewhere

    def block_of(self, key: bytes) -> int | None:
        """As PrefixIndex's; ELSEWHERE for what the pool has not."""
        block = self._index.block_of(key)
        return ELSEWHERE if block is None and key in self._elsewhere else block

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """As PrefixIndex's."""
        blocks = []
        for key in keys:
            block = self.block_of(key)
            if block is None:
                break
            blocks.append(block)
        return blocks
