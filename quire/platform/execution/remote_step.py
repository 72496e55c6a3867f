"""A step that a worker in another process was told to make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.platform.execution.wire import unpack_result
from quire.platform.scheduling.plan import StepPlan, StepResult


class RemoteStep:
    """A step that the worker runs. known_there: as `Execution` has it."""

    ready = False

    def __init__(self, plan: StepPlan, number: int, answer: Callable[[int], Any], known_there: bool) -> None:
        """number: of the message that starts it; answer: what answers the message of a number."""
        self.plan = plan
        self.number = number
        self.known_there = known_there
        self._answer = answer
        self._packed: Any = None
        self._error: Exception | None = None

    @property
    def is_answered(self) -> bool:
        return self._packed is not None or self._error is not None

    def result(self) -> StepResult:
        if not self.is_answered:  # it is there once; an interrupt behind that loses nothing
            try:
                self._packed = self._answer(self.number)
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        return unpack_result(self._packed, self.plan)


class WatchedSequences:
    """The sequences of which the engine must see each token before the next one is computed: what is drawn depends on
    more than the logits, there is more to say of a token than its number, or they are pooled. Of all others the worker
    goes on by itself."""

    def __init__(self) -> None:
        self._ids: set[int] = set()

    def take(self, plan: StepPlan) -> None:
        """Hear what a plan says of sequences. Twice is once."""
        for new in plan.new:
            if new.pooling is not None or new.sampling.processors or new.sampling.params.logprobs is not None:
                self._ids.add(new.sequence_id)
        if self._ids:
            self._ids.update(fork.sequence_id for fork in plan.forks if fork.parent_id in self._ids)
            self._ids.difference_update(plan.ended)

    def none_in(self, plan: StepPlan) -> bool:
        """Whether the worker knows all that the step after this plan's needs to know of it."""
        return all(
            chunk.sequence_id not in self._ids and len(chunk.draws) <= 1 and chunk.score is None and not chunk.drafts
            for chunk in plan.chunks
        )
