"""An engine without its weights and blocks: their memory is given back, and taken again when it wakes up.

Names and levels are vLLM's. Its first level keeps the weights in main memory; here both read them again from the
checkpoint's files, which a CPU's weights would have to leave anyway. Adapters stay: they take what they weigh, and
their files may be gone.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from quire.errors import RequestError, SleepingError
from quire.platform.execution.executor import Executor

logger = logging.getLogger("quire")

_WEIGHTS, _BLOCKS = "weights", "kv_cache"  # vLLM's tags
_PARTS = (_WEIGHTS, _BLOCKS)
_ADVICE = "wake_up() first"


class Sleep:
    """Whether the executor has the weights and the KV blocks in memory.

    `sleep` and `wake_up` belong to the thread that steps; any may use the others.
    """

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._lock = threading.Lock()
        self._users = 0  # that read the weights off the step loop
        self._asleep: frozenset[str] = frozenset()

    @property
    def is_sleeping(self) -> bool:
        return bool(self._asleep)

    def check_awake(self) -> None:
        """Raise SleepingError while it sleeps."""
        if self._asleep:
            raise SleepingError(f"the engine sleeps: {_ADVICE}.")

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Around what reads the weights off the step loop. Raises SleepingError."""
        with self._lock:
            self.check_awake()
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1

    def sleep(self, level: int) -> bool:
        """Give weights and blocks back; the caller has seen to it that nothing runs. False: it slept already.

        Raises RequestError for another level than 1 and 2, and while an adapter is being loaded; CheckpointError,
        and stays awake, where the weights could not be read again.
        """
        if isinstance(level, bool) or level not in (1, 2):
            raise RequestError(f"level={level!r}: is 1 or 2 (which do the same here: weights are read again).")
        if self._asleep:
            return False
        self._executor.check_memory()
        with self._lock:
            if self._users:
                raise RequestError("an adapter is being loaded, which takes the weights: try again when it is there.")
            self._asleep = frozenset(_PARTS)
        self._executor.give_memory_back()
        logger.info("the engine sleeps: weights and KV blocks are given back")
        return True

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take weights and blocks again, or what `tags` name of them; the engine sleeps until both are there.

        Raises RequestError for other tags, and CheckpointError where the weights cannot be read or are others now: it
        goes on sleeping then.
        """
        wanted = _PARTS if tags is None else tuple(tags)
        unknown = set(wanted) - set(_PARTS)
        if unknown:
            raise RequestError(f"tags={sorted(map(str, unknown))!r}: are among {', '.join(_PARTS)}.")
        if _WEIGHTS in wanted and _WEIGHTS in self._asleep:
            self._executor.read_weights()
            self._asleep -= {_WEIGHTS}
        if _BLOCKS in wanted and _BLOCKS in self._asleep:
            self._executor.take_blocks()
            self._asleep -= {_BLOCKS}
        logger.info("the engine %s", "sleeps on, but for a part of it" if self._asleep else "is awake")
