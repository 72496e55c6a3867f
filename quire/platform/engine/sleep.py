"""An engine without its weights and blocks: their memory is given back, and taken again when it wakes up.

Names and levels are vLLM's. Its first level keeps the weights in main memory; here both read them again from the
checkpoint's files, which a CPU's weights would have to leave anyway. Adapters stay: they take what they weigh, and
their files may be gone.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from quire import huge_pages
from quire.checkpoint.files import Checkpoint
from quire.errors import CheckpointError, QuireError, RequestError, SleepingError
from quire.models.base import CausalLM
from quire.models.loader import fill_again
from quire.platform.execution.model_runner import ModelRunner

logger = logging.getLogger("quire")

_WEIGHTS, _BLOCKS = "weights", "kv_cache"  # vLLM's tags
_PARTS = (_WEIGHTS, _BLOCKS)
_ADVICE = "wake_up() first"


class Sleep:
    """Whether the weights of a model, read from `path`, and its runner's blocks are in memory.

    `sleep` and `wake_up` belong to the thread that steps; any may use the others.
    """

    def __init__(self, model: CausalLM, runner: ModelRunner, path: Path, load_format: str) -> None:
        self._model = model
        self._runner = runner
        self._path = path
        self._load_format = load_format
        self._lock = threading.Lock()
        self._users = 0  # that read the weights off the step loop
        self._asleep: frozenset[str] = frozenset()
        self._checkpoint: Checkpoint | None = None
        self._take: dict[str, Callable[[], None]] = {}
        self._size = 0  # bytes of the weights

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
        weights = self._blocks_of_weights()
        if not all(map(huge_pages.can_release, weights)):
            raise QuireError("this system takes no memory back from a process that goes on: end the engine instead.")
        checkpoint = Checkpoint(self._path, self._load_format)
        self._check_same(checkpoint)
        with self._lock:
            if self._users:
                raise RequestError("an adapter is being loaded, which takes the weights: try again when it is there.")
            self._asleep = frozenset(_PARTS)
        self._checkpoint = checkpoint
        self._size = sum(one.untyped_storage().nbytes() for one in weights)
        self._take = {
            _BLOCKS: self._runner.release_cache(),
            _WEIGHTS: _all([huge_pages.release(one) for one in weights]),
        }
        self._runner.forget_recordings()
        gc.collect()
        if self._runner.device.type == "cuda":
            torch.cuda.empty_cache()
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
            self._read_weights()
        if _BLOCKS in wanted and _BLOCKS in self._asleep:
            self._take[_BLOCKS]()
            self._asleep -= {_BLOCKS}
        logger.info("the engine %s", "sleeps on, but for a part of it" if self._asleep else "is awake")

    def _read_weights(self) -> None:
        checkpoint = self._checkpoint
        assert checkpoint is not None
        self._check_same(checkpoint)
        available = huge_pages.available_bytes(self._runner.device)
        if self._size > available:
            raise CheckpointError(
                f"{self._path}: the weights take {self._size:,} bytes, and {available:,} are available: free some."
            )
        self._take[_WEIGHTS]()
        fill_again(self._model, checkpoint)
        self._checkpoint = None
        self._asleep -= {_WEIGHTS}

    def _check_same(self, checkpoint: Checkpoint) -> None:
        if checkpoint.stamp() != self._model.read_from:
            raise CheckpointError(
                f"{self._path}: its files have changed since the engine read them, and it would wake up as another "
                "model: load that in an engine of its own."
            )

    def _blocks_of_weights(self) -> list[torch.Tensor]:
        """One tensor for each block of memory that weights lie in."""
        return list({one.untyped_storage().data_ptr(): one for one in self._model.parameters() if one.numel()}.values())


def _all(functions: list[Callable[[], None]]) -> Callable[[], None]:
    def run() -> None:
        for function in functions:
            function()

    return run
