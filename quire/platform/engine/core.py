"""The engine's core: requests that run, and their steps."""

from __future__ import annotations

import logging

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

    On a GPU a step is committed once the next one has been started behind it, where that can be planned without knowing
    its tokens: the GPU never waits for Python then. Such a step is in flight between two calls of `LLMEngine.step`.

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
        self._in_flight: Execution | None = None
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
        return self.finish_in_flight() if self._step_interrupted else []

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
            for request, error in self.scheduler.take_failed():
                if self.runs(request):
                    self.fail(request, AdapterError(f"request {request.request_id}: {error}"))
            self._not_started = plan
            self._prepare(plan)
        return plan

    def is_idle(self, plan: StepPlan) -> bool:
        """Whether nothing is planned and nothing is in flight."""
        return not plan.chunks and self._in_flight is None

    def execute(self, plan: StepPlan) -> Execution | None:
        """Start a plan; None when there is nothing to compute, or it fails."""
        try:
            execution = start(plan, self.executor, self.scheduler) if plan.chunks else None
        except Exception:
            logger.exception("a step failed; its sequences are now run one by one")
            return None
        self._not_started = None
        return execution

    def finish_in_flight(self) -> list[SequenceState]:
        """Commit the step that was in flight, if there is one. It cannot be run again if it has failed."""
        execution = self._in_flight
        if execution is None:
            return []
        try:
            result = execution.result()  # an interrupt here leaves it in flight
            self._in_flight = None
            return self.scheduler.commit(execution.plan, result)
        except Exception as error:
            self._in_flight = None
            logger.exception("a step failed, and its requests with it")
            self._recovery.give_up(execution.plan, error)
            return []

    def commit(self, plan: StepPlan, execution: Execution | None) -> list[SequenceState]:
        """Leave a step in flight, or wait for it and take its tokens. Returns the sequences that got some."""
        advanced: list[SequenceState] = []
        if execution is not None and execution.known_there:
            self.scheduler.advance_early(plan)
            self._in_flight = execution
        elif plan.chunks:
            advanced = self._wait_and_commit(plan, execution)
        self._step_interrupted, self._not_started = False, None
        return advanced

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
