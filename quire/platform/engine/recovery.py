"""What becomes of a step that failed."""

from __future__ import annotations

from collections.abc import Callable

from quire.platform.execution.executor import Execution, Executor
from quire.platform.scheduling.plan import Chunk, StepPlan, StepResult
from quire.platform.scheduling.request import Request
from quire.platform.scheduling.scheduler import Scheduler


def start(plan: StepPlan, executor: Executor, scheduler: Scheduler) -> Execution:
    """Start a plan that the executor has taken in; the pixels of the images that it encodes go beside it."""
    for image in plan.encode:
        executor.take_pixels(image.digest, scheduler.encoder.pixels[image.digest].inputs)
    return executor.execute(plan)


class Recovery:
    """Ends the requests that make a step fail, and no others.

    fail: ends a request by an exception.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, fail: Callable[[Request, Exception], object]) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._fail = fail

    def one_by_one(self, plan: StepPlan) -> tuple[StepPlan, StepResult]:
        """Run a plan's chunks again, each in a step of its own, and end the requests of those that fail.

        A step writes the same values to the same slots however often it runs. Returns what could be computed.
        """
        good: list[Chunk] = []
        results: list[StepResult] = []
        seen: set[bytes] = set()  # images that were encoded
        for planned in plan.chunks:
            alone = self._scheduler.alone(planned, plan)
            request = self._scheduler.request_of(planned.sequence_id)
            if request is None or alone is None:  # another of its sequences has failed, or it has ended meanwhile
                continue
            try:
                self._executor.prepare(alone)
                results.append(start(alone, self._executor, self._scheduler).result())
                good += alone.chunks
                seen.update(image.digest for image in alone.encode)
            except Exception as error:
                self._scheduler.forget_features(image.digest for image in alone.encode)
                self._fail(request, error)
        self._scheduler.forget_features(image.digest for image in plan.encode if image.digest not in seen)
        pooled = tuple(r.pooled[0] if r.pooled else None for r in results)
        result = StepResult(
            tuple(r.sampled[0] for r in results),
            tuple(r.scores[0] for r in results),
            pooled if any(one is not None for one in pooled) else (),
        )
        return StepPlan(tuple(good), encode=plan.encode), result

    def give_up(self, plan: StepPlan, error: Exception) -> None:
        """End all requests of a step that was in flight and cannot be computed again: nobody is left to do so, or what
        came of it cannot be taken."""
        self._scheduler.abandon(plan)
        for chunk in plan.chunks:
            request = self._scheduler.request_of(chunk.sequence_id)
            if request is not None:
                self._fail(request, error)
