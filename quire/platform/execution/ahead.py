"""Pages of a CPU's pool, committed while the engine is idle, a little ahead of the blocks that were used so far.

The first write to a huge page waits until the system has found and zeroed it, and on a virtual machine until its host
has done the same: measured, 64 MB take 5 ms in the one case and 130 ms in the other, of which a step would be so much
longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from queue import SimpleQueue
from weakref import ReferenceType, ref

import torch

from quire import huge_pages

AHEAD_BYTES = 512 << 20  # committed and not used yet, at most, of all tensors together
# Nothing is committed ahead where less is left than this: others need it more.
LEAST_AVAILABLE = 1 << 30
# The engine is idle when it was so long since the last step, in seconds.
QUIET_SECONDS = 0.1


class PagesAhead:
    """A thread that commits pages of `tensors` [blocks, ...], which `huge_pages.allocate` has made, in the order of the
    blocks' numbers, in which a pool takes those that were never used. Contents stay what they are.

    first: the first block that anybody will use. A step is what runs inside `with`. The thread ends with `close`, with
    this object, and where the system cannot do it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], first: int = 0) -> None:
        self._tensors = [(tensor, tensor[0].nbytes) for tensor in tensors]
        self._blocks = min(map(len, tensors))
        self._first = first
        # With a page of each tensor that is begun and not needed to its end.
        room = AHEAD_BYTES - huge_pages.SIZE * len(tensors)
        self._room = max(0, room // sum(size for _, size in self._tensors))  # blocks
        self._span = max(1, huge_pages.SIZE // max(size for _, size in self._tensors))  # blocks of a piece
        self._used = first  # behind the last block that was ever used
        self._place = (first, 0)  # the next piece: first block, tensor
        self._paused = self._closed = False
        self._running = 0  # steps
        self._count = threading.Lock()  # of them
        self._idle_since = time.monotonic()
        self._lock = threading.Lock()  # held while pages are committed; by no step
        wake: SimpleQueue[bool] = SimpleQueue()  # may be put to from a destructor
        self._wake = wake
        self._thread = threading.Thread(
            target=_serve, args=(ref(self, lambda _: wake.put(False)), wake), name="quire-pages", daemon=True
        )
        self._thread.start()
        wake.put(True)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def take(self, blocks: Iterable[Sequence[int]]) -> None:
        """Blocks that the next step may write to."""
        used = max((max(some) for some in blocks if some), default=-1) + 1
        if used > self._used:
            self._used = used
            if self._wake.empty():
                self._wake.put(True)

    def __enter__(self) -> None:
        with self._count:
            self._running += 1

    def __exit__(self, *exception: object) -> None:
        self._idle_since = time.monotonic()
        with self._count:
            self._running -= 1

    def pause(self) -> None:
        """Commit nothing from here on; what was, the caller gives back."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Go on, as if no block had ever been used."""
        with self._lock:
            self._paused = False
            self._used, self._place = self._first, (self._first, 0)
        self._wake.put(True)

    def close(self) -> None:
        """End the thread."""
        with self._lock:
            self._closed = True
        self._wake.put(False)
        if self._thread is not threading.current_thread():
            self._thread.join()

    def advance(self) -> float | None:
        """Commit the next piece if the engine is idle: the seconds until there may be more to do; None: nothing is left
        to do for now."""
        with self._lock:
            if self._closed or self._paused:
                return None
            if self._running or time.monotonic() - self._idle_since < QUIET_SECONDS:
                return QUIET_SECONDS
            end = min(self._used + self._room, self._blocks)
            block, number = self._place
            if block < self._used:  # steps have come by themselves; not back, as most of the page may be there
                block, number = self._used, 0
            if block >= end or huge_pages.available_bytes() < LEAST_AVAILABLE:
                return None
            tensor, size = self._tensors[number]
            last = min(block + self._span, end)
            if not huge_pages.populate(tensor, block * size, last * size):
                self._closed = True
                self._wake.put(False)
                return None
            number += 1
            self._place = (block, number) if number < len(self._tensors) else (last, 0)
            return 0.0


def _serve(pages: ReferenceType[PagesAhead], wake: SimpleQueue[bool]) -> None:
    """Holds the object while it commits a piece and never while it waits, so that it ends when its owner lets go."""
    while wake.get():
        wait: float | None = 0.0
        while wait is not None:
            time.sleep(wait)
            found = pages()
            if found is None:
                return
            wait = found.advance()
            del found
