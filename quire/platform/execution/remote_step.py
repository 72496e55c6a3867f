"""A step that a worker in another process was told to make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.platform.execution.wire import unpack_result
from quire.platform.scheduling.plan import StepPlan, StepResult


class RemoteStep:
    """A step that the worker runs. It is not looked past: its tokens come with its answer."""

    known_there = ready = False

    def __init__(self, plan: StepPlan, number: int, answer: Callable[[int], Any]) -> None:
        """number: of the message that starts it; answer: what answers the message of a number."""
        self.plan = plan
        self.number = number
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
