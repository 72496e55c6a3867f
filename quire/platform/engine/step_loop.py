"""`StepLoop`: an engine's own thread, which steps and does nothing else."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from quire.errors import EngineClosedError
from quire.platform.engine.llm_engine import LLMEngine
from quire.platform.outputs.pooled import AnyOutput
from quire.platform.scheduling.metrics import StepTimes

logger = logging.getLogger("quire")

_T = TypeVar("_T")

Delivery = list[AnyOutput] | BaseException  # a step's outputs, or what ended the engine


class StepLoop:
    """Steps an engine while it has requests, and sleeps on its inbox while it has none. Nobody polls.

    Whatever others want of the engine is a message: a function that is called in its thread before the next step. What
    a step has made goes back to the event loop in one call.

    on_step: called in the engine's thread after each step, with its times and its outputs. deliver: called on the event
    loop, with the outputs or the error. error: what has ended the loop, if it has failed. stopped: it takes no more
    messages.
    """

    def __init__(
        self,
        engine: LLMEngine,
        on_step: Callable[[StepTimes, Sequence[AnyOutput]], object] | None,
        deliver: Callable[[Delivery], None],
    ) -> None:
        self.error: BaseException | None = None
        self.stopped = False
        self._engine = engine
        self._on_step = on_step
        self._deliver = deliver
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._unloading: list[tuple[int, asyncio.Future[int]]] = []  # adapters that somebody waits to be freed
        self._calls: set[Future[Any]] = set()  # of `call`
        self._step_begun: float | None = None

    # -- any thread -----------------------------------------------------------------------------------------------

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self.error is not None

    @property
    def stuck(self) -> bool:
        """Whether a step goes on after all was stopped."""
        return self.stopped and self._thread.is_alive()

    def health_error(self, step_timeout: float) -> str | None:
        """What is wrong with it; None: it is alive. step_timeout: seconds after which a step counts as stuck."""
        if self.error is not None:
            return f"the engine has failed: {type(self.error).__name__}"
        if self._event_loop is None or self.stopped or not self._thread.is_alive():
            return "the engine does not run"
        begun = self._step_begun
        if begun is not None and time.monotonic() - begun > step_timeout:
            return f"a step has taken over {step_timeout:g} s"
        return self._engine.executor.health_error()

    def check_runs(self) -> None:
        """Raise EngineClosedError unless it takes messages."""
        if self.error is not None:
            raise EngineClosedError(f"the engine has failed ({type(self.error).__name__}): see its log")
        if self.stopped or self._event_loop is None:
            raise EngineClosedError("the server is shutting down" if self.stopped else "the engine was not started")

    def tell(self, message: Callable[[], object]) -> None:
        """Have the engine's thread call this before its next step."""
        self._inbox.put(message)
        self._engine.notify()

    def notify(self) -> None:
        """Have it look whether adapters are free to go."""
        self.tell(lambda: None)

    def end(self) -> None:
        """Let it end after the step that runs."""
        self.tell(self.close)

    def close(self) -> None:
        """Take no more messages, whether it has ended or is stuck."""
        self.stopped = True

    def join(self, timeout: float) -> None:
        """Wait for its end, so many seconds at most."""
        if self._thread.is_alive():
            self._thread.join(timeout)

    # -- on the event loop ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to step; on the event loop that the outputs are to come to."""
        self._event_loop = asyncio.get_running_loop()
        self._thread.start()

    async def call(self, function: Callable[[], _T]) -> _T:
        """What this gives or raises in the engine's thread, before the next step."""
        self.check_runs()
        done: Future[_T] = Future()
        self._calls.add(done)
        self.tell(partial(_do, function, done))
        if self.stopped:  # since it was looked at: the thread may not have seen this one
            _fail_stopped(done)
        try:
            return await asyncio.wrap_future(done)
        finally:
            self._calls.discard(done)

    def freed(self, unloading: int) -> asyncio.Future[int]:
        """The bytes that an unloading gives back, once no request holds the adapter."""
        assert self._event_loop is not None
        future: asyncio.Future[int] = self._event_loop.create_future()
        self.tell(lambda: self._unloading.append((unloading, future)))
        return future

    # -- in the engine's thread -----------------------------------------------------------------------------------

    def post(self, function: Callable[[], object]) -> None:
        """Have the event loop call this."""
        assert self._event_loop is not None
        try:
            self._event_loop.call_soon_threadsafe(function)
        except RuntimeError:  # it is closed: nobody is there to listen
            self.stopped = True

    def _run(self) -> None:
        try:
            while self._take_messages():
                self._step_begun = time.monotonic()
                outputs = self._engine.step()
                self._step_begun = None
                self._report(outputs)
                if outputs:
                    self.post(partial(self._deliver, outputs))
                self._answer_unloadings()
        except BaseException as error:
            logger.critical("the engine has failed", exc_info=True)
            self.error = error
            closed = EngineClosedError(f"the engine has failed ({type(error).__name__}): see its log")
            self.post(partial(self._deliver, closed))
        finally:
            self.stopped = True
            for _, future in self._unloading:
                self.post(partial(_give_up, future))
            for call in list(self._calls):
                _fail_stopped(call)

    def _take_messages(self) -> bool:
        """Do what the others ask for; while there is nothing to compute, wait for that. False: stop."""
        while not self.stopped:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                if self._engine.has_unfinished_requests():
                    return True
                self._engine.core.settle()  # no step comes that would
                self._answer_unloadings()
                message = self._inbox.get()
            message()
        return False

    def _report(self, outputs: Sequence[AnyOutput]) -> None:
        try:
            if self._on_step is not None:
                self._on_step(self._engine.scheduler.times, outputs)
        except Exception:  # who watches must not stop what is watched
            logger.exception("on_step failed")

    def _answer_unloadings(self) -> None:
        if not self._unloading:
            return
        waiting = []
        for number, future in self._unloading:
            freed = self._engine.freed_bytes(number)
            if freed is None and not future.cancelled():
                waiting.append((number, future))
            elif freed is not None:
                self.post(partial(_resolve, future, freed))
        self._unloading = waiting


def _do(function: Callable[[], _T], done: Future[_T]) -> None:
    if not done.set_running_or_notify_cancel():  # who asked has gone
        return
    try:
        done.set_result(function())
    except Exception as error:
        done.set_exception(error)


def _fail_stopped(done: Future[Any]) -> None:
    with suppress(InvalidStateError):  # it has its result, or another thread was faster
        done.set_exception(EngineClosedError("the engine has stopped"))


def _give_up(future: asyncio.Future[int]) -> None:
    if not future.done():
        future.set_exception(EngineClosedError("the engine has stopped; the adapter's memory goes with it"))


def _resolve(future: asyncio.Future[int], value: int) -> None:
    if not future.done():
        future.set_result(value)
