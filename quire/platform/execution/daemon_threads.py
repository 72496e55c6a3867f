"""Threads for work that may hang, which nobody waits for any longer than is said."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

_Work = Callable[[], object]


class DaemonThreads:
    """Carry out what they are given, the first first. Unlike a `ThreadPoolExecutor`'s, they keep no process from
    ending.

    What is given must raise nothing. Threads begin with the first of it.
    """

    def __init__(self, count: int, name: str) -> None:
        self._waiting: SimpleQueue[_Work | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._waiting,), name=f"{name}_{number}", daemon=True)
            for number in range(count)
        ]
        self._begun = False

    def submit(self, do: _Work) -> None:
        """Not from several threads at once."""
        self._waiting.put(do)
        if not self._begun:
            self._begun = True
            for thread in self._threads:
                thread.start()

    def give_up(self) -> None:
        """Forget what has not begun."""
        with suppress(Empty):
            while True:
                self._waiting.get_nowait()

    def end(self, deadline: float = float("inf")) -> bool:
        """End once all is done; wait until then, or until `time.monotonic()` says so. Returns whether they have
        ended."""
        if not self._begun:
            return True
        for _ in self._threads:
            self._waiting.put(None)
        others = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in others:
            left = deadline - time.monotonic()
            thread.join(max(0.0, left) if left < threading.TIMEOUT_MAX else None)
        return not any(thread.is_alive() for thread in others)


def _work(waiting: SimpleQueue[_Work | None]) -> None:
    """It knows no more than the queue: whoever gives work may be forgotten meanwhile."""
    while (do := waiting.get()) is not None:
        do()
        del do
