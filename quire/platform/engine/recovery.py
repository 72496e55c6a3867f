"""What becomes of a step that failed."""

from __future__ import annotations

from collections.abc import Callable

from quire.platform.execution.model_runner import ModelRunner
from quire.platform.scheduling.plan import Chunk, StepPlan, StepResult
from quire.platform.scheduling.request import Request
from quire.platform.scheduling.scheduler import Scheduler


class Recovery:
    """Ends the requests that make a step fail, and no others.

    fail: ends a request by an exception.
    """

    def __init__(
        self, scheduler: Scheduler, executor: ModelRunner, fail: Callable[[Request, Exception], object]
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._fail = fail

    def one_by_one(self, plan: StepPlan) -> tuple[StepPlan, StepResult]:
        """Run a plan's chunks again, each in a step of its own, and end the requests of those that fail.

        A step writes the same values to the same slots however often it runs. Returns what could be computed.
        """
        good: list[Chunk] = []
        results: list[StepResult] = []
        for planned in plan.chunks:
            chunk = self._scheduler.as_known(planned)
            request = self._scheduler.request_of(planned.sequence_id)
            if request is None or chunk is None:  # another of its sequences has failed, or it has ended meanwhile
                continue
            shown = {item.digest for item in chunk.media}
            images = [image for image in plan.encode if image.digest in shown]
            try:
                results.append(self._executor.execute(StepPlan([chunk], (), encode=images)).result())
                good.append(chunk)
            except Exception as error:
                self._scheduler.forget_features(image.digest for image in images)
                self._fail(request, error)
        seen = {item.digest for chunk in good for item in chunk.media}
        self._scheduler.forget_features(image.digest for image in plan.encode if image.digest not in seen)
        result = StepResult([r.sampled[0] for r in results], [r.scores[0] for r in results])
        return StepPlan(good, (), encode=plan.encode), result

    def give_up(self, plan: StepPlan, error: Exception) -> None:
        """End all requests of a step that was in flight: what was started behind it reads its tokens."""
        self._scheduler.abandon(plan)
        for chunk in plan.chunks:
            request = self._scheduler.request_of(chunk.sequence_id)
            if request is not None:
                self._fail(request, error)
