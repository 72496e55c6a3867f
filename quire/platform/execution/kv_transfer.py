"""Blocks written to a connector and read from it, by threads of their own, so that no step waits for a disk.

A plan's stores are copied out of the pool before anything else is done to it, and written later; what it fetches is
read into memory of its own, and copied into the pool by the plan that loads it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch

from quire import huge_pages
from quire.config import kv_transfer as settings
from quire.errors import QuireError
from quire.platform.execution.daemon_threads import DaemonThreads
from quire.platform.execution.pool_blocks import PoolBlocks
from quire.platform.kv.connector import (
    WRITE_SECONDS,
    BlockLayout,
    Fetch,
    KVConnector,
    TransferReport,
    Transfers,
)
from quire.platform.kv.disk import DiskConnector
from quire.platform.kv.disk_reader import DiskReader
from quire.plugins import PluginGroup

logger = logging.getLogger("quire")

PLUGINS = PluginGroup("quire.kv_connectors", "kv_transfer_config", "module:Class", "KV connectors")


_READERS = 2  # threads: half of a block's time is its checksum
_PARTS = 2  # of a job, that are read at once
# Memory that is there before a job comes, as far as a pool needs it: on a virtual machine its first pages take longer
# than what is read into them.
_SPARE_BYTES = 64 << 20
_LEAST_AVAILABLE = 1 << 30  # others need it more where less is left
_CLOSE_SECONDS = 2.0  # for what has begun to be read or written, and may hang, beside WRITE_SECONDS


_News = Callable[[], tuple[Sequence[bytes], Sequence[bytes]]]


class _Read:
    """A job's blocks: rows [keys, bytes] uint8, of which those are there that `there` says; memory: theirs, and perhaps
    more. parts: not done yet."""

    def __init__(self, fetch: Fetch, memory: torch.Tensor, bytes_a_block: int) -> None:
        self.fetch = fetch
        self.memory = memory
        self.rows = memory[: len(fetch.keys) * bytes_a_block].view(len(fetch.keys), bytes_a_block)
        self.there = [False] * len(fetch.keys)
        self.parts = _PARTS
        self.given_up = False


class KVTransfer:
    """Carries out what plans say of blocks beside the pool.

    blocks: the pool's. most_storing: bytes that wait to be written; what comes beyond is dropped.

    told: called when what a plan fetches has been read.
    """

    def __init__(self, connector: KVConnector, blocks: PoolBlocks, most_storing: int) -> None:
        self.told: Callable[[], object] = _nobody
        self._connector = connector
        self._blocks = blocks
        self._most_storing = most_storing
        self._reader = DaemonThreads(_READERS, "quire-kv-read")
        self._writer = DaemonThreads(1, "quire-kv-write")
        # Where nobody calls `close`, they end with this object, and a program's end waits for what is to be written.
        self._end = weakref.finalize(self, _end, self._reader, self._writer, connector, WRITE_SECONDS)
        self._reads: dict[int, _Read] = {}
        self._lock = threading.Lock()  # of all below
        self._fetched: list[tuple[int, tuple[bool, ...]]] = []
        self._news: _News | None = getattr(connector, "news", None)
        self._stored: list[bytes] = list(connector.held())
        self._removed: list[bytes] = []
        self._spare: torch.Tensor | None = None
        self._storing = 0  # bytes
        self._dropped = self._failed = self._loaded = 0
        self._warned = False
        if self._stored or self._news is not None:
            self._reader.submit(partial(_logged, partial(_make_spare, weakref.ref(self), blocks.nbytes)))

    # -- in a step ------------------------------------------------------------------------------------------------

    def store(self, transfers: Transfers) -> None:
        """Copy the blocks that are to be written, as they are now, as far as there is room; and begin to read."""
        for fetch in transfers.fetch:
            try:
                memory = self._memory(len(fetch.keys) * self._blocks.bytes_a_block)
                read = self._reads[fetch.job] = _Read(fetch, memory, self._blocks.bytes_a_block)
            except QuireError as error:  # there is no memory for it: the blocks are computed
                self._fail("reading", error)
                with self._lock:
                    self._fetched.append((fetch.job, (False,) * len(fetch.keys)))
                self.told()
                continue
            for part in range(_PARTS):
                self._reader.submit(partial(_logged, partial(self._read, read, range(part, len(fetch.keys), _PARTS))))
        if not transfers.store:
            return
        with self._lock:
            room = max(0, self._most_storing - self._storing) // self._blocks.bytes_a_block
            taken = transfers.store[:room]
            left = transfers.store[room:]
            self._storing += len(taken) * self._blocks.bytes_a_block
            self._dropped += len(left)
            self._removed += [key for key, _ in left]
        if taken:
            packed, ready = self._to_host(self._blocks.gather([block for _, block in taken]))
            self._writer.submit(partial(_logged, partial(self._write, [key for key, _ in taken], packed, ready)))

    def _to_host(self, packed: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        """In main memory, once what comes with it has returned."""
        if packed.device.type == "cpu":
            return packed, lambda: None
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        host.copy_(packed, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return host, copied.synchronize

    def load(self, transfers: Transfers) -> None:
        """Copy what was read into the pool, and let go of what nobody needs any more."""
        for job in dict.fromkeys(job for job, _, _ in transfers.load):
            read = self._reads[job]
            moves = [(place, block) for own, place, block in transfers.load if own == job]
            if not all(read.there[place] for place, _ in moves):
                raise AssertionError(f"job {job}: a block is to be loaded that was not read")
            places = [place for place, _ in moves]
            rows = read.rows[: len(moves)] if places == list(range(len(moves))) else read.rows[places]
            self._blocks.scatter(rows.to(self._blocks.device), [block for _, block in moves])
            self._loaded += len(moves)
        for job in transfers.forget:
            read_before = self._reads.pop(job, None)
            if read_before is not None:
                read_before.given_up = True
                if not read_before.parts:  # else a thread may write there yet
                    self.keep_spare(read_before.memory)

    def _memory(self, size: int) -> torch.Tensor:
        """So many bytes or more. Raises QuireError."""
        with self._lock:
            spare = self._spare
            if spare is not None and size <= len(spare):
                self._spare = None
                return spare
        return huge_pages.allocate(size)

    def keep_spare(self, memory: torch.Tensor) -> None:
        """Keep memory that nobody needs for the next job, if it has the size for that."""
        with self._lock:
            if self._spare is None and len(memory) == min(_SPARE_BYTES, self._blocks.nbytes):
                self._spare = memory

    # -- in threads of their own ----------------------------------------------------------------------------------

    def _read(self, read: _Read, places: range) -> None:
        """Read some of a job's blocks; the last part tells."""
        keys = read.fetch.keys
        try:
            rows = read.rows.numpy()
            for place in places:
                if read.given_up:
                    break
                read.there[place] = self._connector.read(keys[place], memoryview(rows[place]))
                if not read.there[place]:
                    self._missed([keys[place]])
        except Exception as error:  # a package's connector: the blocks are computed
            self._fail("reading", error)
            self._missed([keys[place] for place in places if not read.there[place]])
        with self._lock:
            read.parts -= 1
            if read.parts:
                return
            self._fetched.append((read.fetch.job, tuple(read.there)))
        self.told()

    def _missed(self, keys: Sequence[bytes]) -> None:
        """What was to be read and is not there: told at once, as it may be there again before the job ends."""
        if self._news is None:
            with self._lock:
                self._stored = [key for key in self._stored if key not in keys]
                self._removed += keys

    def _write(self, keys: Sequence[bytes], packed: torch.Tensor, ready: Callable[[], object]) -> None:
        stored: list[bytes] = []
        removed: set[bytes] = set()
        try:
            ready()
            blocks = packed.numpy()
            for place, key in enumerate(keys):
                there, gone = self._connector.write(key, memoryview(blocks[place]))
                removed.update(gone)
                if there:
                    stored.append(key)
                    removed.discard(key)
                else:
                    removed.add(key)
        except Exception as error:
            self._fail("writing", error)
            removed.update(set(keys).difference(stored))
        with self._lock:
            self._storing -= packed.nbytes
            self._stored = [key for key in (*self._stored, *stored) if key not in removed]
            self._removed += removed

    def _fail(self, doing: str, error: Exception) -> None:
        with self._lock:
            self._failed += 1
            warned, self._warned = self._warned, True
        if not warned:
            logger.warning(
                "kv_transfer_config: %s KV blocks has failed, and the engine goes on without: %r", doing, error
            )

    # -- whoever asks ---------------------------------------------------------------------------------------------

    def report(self, seconds: float = 0.0) -> TransferReport:
        """What has happened since this was asked last; before, wait until all is written, so many seconds at most."""
        end = time.monotonic() + seconds
        while self._storing and time.monotonic() < end:
            time.sleep(0.002)
        counts = self._connector.counts()
        with self._lock:
            fetched, stored, removed = self._fetched, self._stored, self._removed
            self._fetched, self._stored, self._removed = [], [], []
            counts = replace(
                counts,
                loaded=self._loaded,
                loaded_bytes=self._loaded * self._blocks.bytes_a_block,
                failed=counts.failed + self._failed,
                dropped=self._dropped,
            )
        # After what was fetched: what a job has missed is told with it, or before.
        appeared, gone = self._news() if self._news is not None else ((), ())
        return TransferReport(tuple(fetched), (*stored, *appeared), (*removed, *gone), counts)

    def close(self) -> None:
        """End the threads; what waits to be written is given up. Where one hangs, it is left alone after a while, with
        a warning; the connector is closed behind it then, so that what it writes stays this engine's."""
        for read in self._reads.values():
            read.given_up = True
        self._writer.give_up()
        if self._end.detach() is None:  # it was closed before
            return
        if _end(self._reader, self._writer, self._connector, _CLOSE_SECONDS):
            self._connector.close()
        else:
            behind = partial(_close_behind, self._reader, self._writer, self._connector)
            threading.Thread(target=behind, name="quire-kv-close", daemon=True).start()


def _make_spare(transfer: weakref.ref[KVTransfer], pool_bytes: int) -> None:
    if huge_pages.available_bytes() < _LEAST_AVAILABLE:
        return
    memory = huge_pages.allocate(min(_SPARE_BYTES, pool_bytes))
    huge_pages.populate(memory, 0, len(memory))
    kept = transfer()
    if kept is not None:
        kept.keep_spare(memory)


def _nobody() -> None:
    pass


def _end(reader: DaemonThreads, writer: DaemonThreads, connector: KVConnector, seconds: float) -> bool:
    """Whether the threads have ended, within so many seconds: nothing more is read, and all that waits is written."""
    deadline = time.monotonic() + seconds
    reader.give_up()
    ended = [writer.end(deadline), reader.end(deadline)]
    if not all(ended):
        logger.warning(
            "kv_transfer_config: %s: reading or writing KV blocks has not ended within %g s, and is not waited for any "
            "longer",
            connector,
            seconds,
        )
    return all(ended)


def _close_behind(reader: DaemonThreads, writer: DaemonThreads, connector: KVConnector) -> None:
    writer.end()
    reader.end()
    connector.close()


def _logged(do: Callable[[], None]) -> None:
    try:
        do()
    except BaseException:
        logger.exception("a thread that moves KV blocks has failed")


def make(config: settings.KVTransferConfig, blocks: PoolBlocks, identity: str, rank: int, size: int) -> KVTransfer:
    """What moves blocks as the settings say. Raises QuireError for a connector that is unknown or cannot be made."""
    own = config.connector == settings.DISK
    told = {"path": config.path, "max_bytes": config.max_bytes} if own else dict(config.extra)
    layout = BlockLayout(identity, blocks.bytes_a_block, rank, size, told)
    kind: Callable[[BlockLayout], KVConnector]
    if own:
        kind = DiskReader if config.role == settings.CONSUMER else DiskConnector
    else:
        kind = PLUGINS.load(config.connector, (settings.DISK,))
    try:
        connector = kind(layout)
    except QuireError:
        raise
    except Exception as error:
        raise QuireError(f"kv_transfer_config: {config.connector!r} cannot be made: {error!r}") from error
    return KVTransfer(connector, blocks, config.max_storing_bytes)
