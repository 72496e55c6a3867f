"""What the last steps did, written down while somebody watches."""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import NamedTuple

from quire.platform.scheduling.plan import StepPlan
from quire.platform.scheduling.scheduler import Scheduler

logger = logging.getLogger("quire")

_KEPT = 64  # steps


class StepRecord(NamedTuple):
    """One step. number: 1, 2, ...; ended: by `time.monotonic()`; seconds: from planning to the commit.

    prompt_tokens, answer_tokens: computed, of prompts and behind them. media: images, videos and sounds that were
    encoded. adapters: different ones that sequences of this step ran with.

    On a GPU a step is planned while the one before is computed, whose end it waits for: over several steps the sums
    are right.
    """

    number: int
    ended: float
    seconds: float
    prompt_tokens: int
    answer_tokens: int
    sequences: int
    media: int
    adapters: int


class StepRecorder:
    """Writes steps down, in the thread that steps. No fault of it harms a step: it writes nothing more then."""

    def __init__(self) -> None:
        self._records: deque[StepRecord] = deque(maxlen=_KEPT)
        self._begun = 0.0
        self._planned: tuple[int, int, int, int, int] | None = None
        self._number = 0
        self._broken = False

    def begin(self) -> None:
        """A step begins."""
        self._begun = time.monotonic()
        self._planned = None

    def planned(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """This is what it is going to compute."""
        if self._broken or not plan.chunks:
            return
        try:
            self._planned = _counts(plan, scheduler)
        except Exception:
            self._broken = True
            logger.exception("steps are not shown to who watches any more")

    def end(self) -> None:
        """It is done, and its tokens are taken."""
        if self._planned is not None:
            self._number += 1
            now = time.monotonic()
            self._records.append(StepRecord(self._number, now, now - self._begun, *self._planned))

    def records(self) -> tuple[StepRecord, ...]:
        """The last ones, the oldest first."""
        return tuple(self._records)


def _counts(plan: StepPlan, scheduler: Scheduler) -> tuple[int, int, int, int, int]:
    prompt = total = 0
    adapters: set[int] = set()
    for chunk in plan.chunks:
        total += chunk.length
        request = scheduler.request_of(chunk.sequence_id)
        if request is None:
            continue
        left = len(request.prompt_ids) - chunk.start
        if left > 0:
            prompt += min(left, chunk.length)
        if request.adapters:
            adapters.update(ref.uid for ref, _ in request.adapters)
    return prompt, total - prompt, len(plan.chunks), len(plan.encode), len(adapters)
