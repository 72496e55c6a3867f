"""`EngineWatch`: an engine that steps in a thread of its own, for who looks at it from the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from quire.platform.engine.llm_engine import LLMEngine
from quire.platform.engine.step_loop import StepLoop
from quire.platform.engine.watching.snapshot import EngineSnapshot, take_snapshot
from quire.platform.engine.watching.steps import StepRecorder


class EngineWatch:
    """Snapshots for whoever asks, and nothing at all while nobody does: a step looks at one attribute.

    All of it belongs to the event loop.

    began: when the engine was there, by `time.monotonic()`. ended: it takes no more requests, or has failed; on_end is
    called then.
    """

    def __init__(self, engine: LLMEngine, step_loop: StepLoop) -> None:
        self.began = time.monotonic()
        self.ended = False
        self.on_end: Callable[[], None] = lambda: None
        self._engine = engine
        self._step_loop = step_loop

    def begin(self) -> None:
        """Somebody watches from now on: steps are written down."""
        self._engine.recorder = StepRecorder()

    def end(self) -> None:
        """Nobody watches any more."""
        self._engine.recorder = None

    async def snapshot(self) -> EngineSnapshot:
        """The engine as it is before its next step. Raises EngineClosedError, and whatever goes wrong."""
        recorder = self._engine.recorder
        assert recorder is not None
        return await self._step_loop.call(partial(take_snapshot, self._engine, recorder))

    def close(self) -> None:
        """The engine ends."""
        self.ended = True
        self.on_end()
