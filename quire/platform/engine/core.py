"""The engine's core: requests that run, and their steps."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress

from quire.errors import AdapterError, QuireError, RequestError
from quire.platform.engine.interrupts import HeldInterrupt
from quire.platform.engine.lora_admin import LoRAAdmin
from quire.platform.engine.recovery import Recovery, start
from quire.platform.execution.executor import Execution, Executor
from quire.platform.kv.connector import WRITE_SECONDS
from quire.platform.sampling.results import Failure
from quire.platform.scheduling.plan import StepPlan
from quire.platform.scheduling.request import Request, SequenceState
from quire.platform.scheduling.scheduler import Scheduler

logger = logging.getLogger("quire")


class EngineCore:
    """Schedules, executes and commits steps. It knows tokens, no texts.

    On a GPU, and in a process of its own, a step is committed once the next one has been started behind it, where that
    can be planned without knowing its tokens: those that compute never wait for the engine's Python then. Such a step
    is in flight between two calls of `LLMEngine.step`. So are those of a pipeline, each of other sequences: while one
    stage computes one of them, the next has the one before.

    requests: those that run or wait to run, by id. failed: those that have failed since `take_failed`.
    num_ended: how many have ended, in whatever way.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, lora: LoRAAdmin) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.requests: dict[str, Request] = {}
        self._lora = lora
        self._recovery = Recovery(scheduler, executor, self.fail)
        self.failed: list[Request] = []
        self.num_ended = 0
        self._in_flight: deque[Execution] = deque()  # the oldest first
        # Sequences of a step that failed while others ran, and how many of each one's tokens it would have computed:
        # until a step has, each is waited for.
        self._suspects: dict[int, int] = {}
        self._left: StepPlan | None = None  # the last plan, where nothing is left to be done about it
        self._step_interrupted = False  # whether the last step ended by an exception
        self._not_started: StepPlan | None = None  # the plan that was prepared, until it was started too

    # -- requests -------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.requests[request.request_id] = request
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        """End a request and free its blocks."""
        self.scheduler.end(request, "abort")
        self.retire(request)

    def fail(self, request: Request, error: Exception) -> None:
        """End a request that runs, as its caller or the engine is at fault."""
        logger.error("request %s fails: %r", request.request_id, error)
        self.refuse(request, Failure(f"{type(error).__name__}: {error}", by_caller=isinstance(error, RequestError)))

    def refuse(self, request: Request, failure: Failure) -> None:
        """End a request, be it queued or not."""
        self.scheduler.fail(request, failure)
        self.retire(request)
        self.failed.append(request)

    def retire(self, request: Request) -> None:
        """A request has finished: it holds nothing any more. Twice is once."""
        if self.runs(request):
            del self.requests[request.request_id]
            self.num_ended += 1
        self._lora.release(request.arrival)

    def runs(self, request: Request) -> bool:
        """Whether a request has not ended."""
        return self.requests.get(request.request_id) is request

    def take_failed(self) -> list[Request]:
        """The requests that have failed since this was asked last."""
        failed, self.failed = self.failed, []
        return failed

    # -- a step ---------------------------------------------------------------------------------------------------

    def finish_interrupted(self) -> list[SequenceState]:
        """After a step that an exception has cut short: commit what is in flight before anything is planned, as the
        executor may have started something behind it."""
        return self.finish_all() if self._step_interrupted else []

    def schedule(self) -> StepPlan:
        """Plan a step, and have the executor take it in; requests whose adapters have gone for good end.

        An interrupt comes before or after: what the plan moves would be lost between.
        """
        with HeldInterrupt.unless_held():
            self._step_interrupted = True
            self.take_transfers()
            if self._not_started is not None:  # whose images were never encoded
                self.scheduler.forget_features(image.digest for image in self._not_started.encode)
            plan = self.scheduler.plan()
            for request, error in self.scheduler.adapters.take_failed():
                if self.runs(request):
                    self.fail(request, AdapterError(f"request {request.request_id}: {error}"))
            self._not_started = plan
            self._prepare(plan)
        return plan

    def is_idle(self, plan: StepPlan) -> bool:
        """Whether nothing is planned and nothing is in flight."""
        return not plan.chunks and not self._in_flight

    def execute(self, plan: StepPlan) -> Execution | None:
        """Start a plan; None when there is nothing to compute, or it fails."""
        try:
            execution = start(plan, self.executor, self.scheduler) if plan.chunks else None
        except Exception:
            logger.exception("a step failed; its sequences are now run one by one")
            return None
        self._not_started = None
        return execution

    def finish_in_flight(self, plan: StepPlan, execution: Execution | None) -> list[SequenceState]:
        """Leave the step that was started in flight where others may run meanwhile; and commit those that were in
        flight before, so that no more are than may be. Where none was started, the oldest."""
        advanced: list[SequenceState] = []
        if execution is None and not plan.chunks:
            return self._finish_oldest() if self._in_flight else []
        if execution is not None and self.executor.steps_at_once > 1 and not self._suspects:
            self.scheduler.hold(plan)
            self._in_flight.append(execution)
            self._left = plan
            while len(self._in_flight) >= self.executor.steps_at_once or (self._in_flight and self._in_flight[0].ready):
                advanced += self._finish_oldest()
            return advanced
        suspected = bool(self._suspects)
        advanced = self.finish_all()
        if self._suspects and not suspected:  # the step was to go on from what has failed
            self._left = plan
            try:
                with suppress(Exception):
                    if execution is not None:
                        execution.result()
            finally:
                self.scheduler.begin_again(plan)
        return advanced

    def finish_all(self) -> list[SequenceState]:
        """Commit all steps that are in flight."""
        advanced: list[SequenceState] = []
        while self._in_flight:
            advanced += self._finish_oldest()
        return advanced

    def _finish_oldest(self) -> list[SequenceState]:
        if self._suspects:  # an interrupt has come while they began again
            self._begin_again()
            return []
        execution = self._in_flight[0]
        try:
            result = execution.result()  # an interrupt here leaves it in flight
        except Exception as error:
            if self.executor.health_error() is not None:  # nobody is left to run it again
                self._in_flight.popleft()
                self._give_up(execution.plan, error)
                return []
            logger.exception("a step failed; its sequences, and those of steps that run, begin again")
            self._suspects.update({chunk.sequence_id: chunk.known_end for chunk in execution.plan.chunks})
            self._begin_again()
            return []
        self._in_flight.popleft()
        try:
            return self.scheduler.commit(execution.plan, result)
        except Exception as error:
            self._give_up(execution.plan, error)
            return []

    def _give_up(self, plan: StepPlan, error: Exception) -> None:
        logger.error("a step failed, and its requests with it", exc_info=error)
        self._recovery.give_up(plan, error)

    def _begin_again(self) -> None:
        """A step has failed, and those behind it may have gone on from what it has left: let them end, and begin their
        sequences again. Steps are waited for until it has been found which fails."""
        while self._in_flight:
            with suppress(Exception):
                self._in_flight[0].result()  # an interrupt here leaves it in flight
            self.scheduler.begin_again(self._in_flight[0].plan)
            self._in_flight.popleft()

    def commit(self, plan: StepPlan, execution: Execution | None) -> list[SequenceState]:
        """Leave a step in flight, or wait for it and take its tokens. Returns the sequences that got some."""
        advanced: list[SequenceState] = []
        if plan is self._left:
            pass
        elif execution is not None and execution.known_there and not self._suspects:
            self.scheduler.advance_early(plan)
            self._in_flight.append(execution)
        elif plan.chunks:
            advanced = self._wait_and_commit(plan, execution)
            self._clear(plan)
        self._step_interrupted, self._not_started, self._left = False, None, None
        return advanced

    def _clear(self, plan: StepPlan) -> None:
        """A step was waited for: sequences that have come past the place that failed before are not suspected any more,
        and those that have ended."""
        for chunk in plan.chunks if self._suspects else ():
            if chunk.known_end >= self._suspects.get(chunk.sequence_id, 0):
                self._suspects.pop(chunk.sequence_id, None)
        live = {one: end for one, end in self._suspects.items() if self.scheduler.request_of(one) is not None}
        self._suspects = live

    def _wait_and_commit(self, plan: StepPlan, execution: Execution | None) -> list[SequenceState]:
        if execution is not None:
            try:
                result = execution.result()
            except Exception:
                logger.exception("a step failed; its sequences are now run one by one")
            else:
                return self.scheduler.commit(plan, result)
        return self.scheduler.commit(*self._recovery.one_by_one(plan))

    # -- between steps --------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Do what a step does beside computing, where none will come: adapters that were unloaded, and features that
        were evicted, leave the device."""
        plan = self.scheduler.plan_upkeep()
        self._prepare(plan)
        if plan.drop:  # a worker elsewhere is told by the next plan that nobody has these adapters any more
            self._prepare(self.scheduler.plan_upkeep())

    @property
    def is_reading(self) -> bool:
        """Whether some sequence waits for blocks that are read from beside the pool."""
        transfers = self.scheduler.kv.transfers
        return transfers is not None and transfers.is_reading

    def take_transfers(self) -> None:
        """Hear what has become of blocks beside the pool, if it is time."""
        transfers = self.scheduler.kv.transfers
        if transfers is not None and transfers.is_due():
            transfers.reported(self.executor.take_transfers())

    def flush_transfers(self) -> None:
        """Have the worker told of blocks to store, where no step comes that would."""
        transfers = self.scheduler.kv.transfers
        if transfers is not None and transfers.has_news and not self.requests:
            self.settle()

    def finish_transfers(self) -> None:
        """No step will come: have what is to be stored written. Does nothing amid a step."""
        transfers = self.scheduler.kv.transfers
        if transfers is None or self._step_interrupted or self.executor.health_error() is not None:
            return
        try:
            self.flush_transfers()
            transfers.reported(self.executor.take_transfers(WRITE_SECONDS))
        except QuireError:  # the worker has died meanwhile
            logger.warning("KV blocks that were to be stored are lost", exc_info=True)

    def _prepare(self, plan: StepPlan) -> None:
        self.executor.prepare(plan)
        self.scheduler.delivered(plan)
        self._lora.taken_off(plan)
