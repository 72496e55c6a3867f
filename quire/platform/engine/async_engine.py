"""`AsyncEngine`: the engine in a thread of its own, for programs that run on asyncio.

One thread steps and does nothing else. Requests are read (checked, tokenized, their adapters loaded) by a few workers
and come to it through an inbox, on which it sleeps while there is nothing to do; what a step has made goes back to the
event loop in one call. Nobody polls.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from quire.config import EngineConfig
from quire.errors import EngineClosedError, RequestError, SleepingError
from quire.lora import AdapterInfo, LoadReport, LoRARequest
from quire.platform.engine.llm_engine import LLMEngine, PreparedRequest
from quire.platform.engine.stats import EngineStats
from quire.platform.inputs.processor import PromptType
from quire.platform.outputs.outputs import BeamSearchOutput, RequestOutput
from quire.platform.sampling.params import BeamSearchParams, SamplingParams
from quire.platform.scheduling.metrics import StepTimes

logger = logging.getLogger("quire")

# Threads that read requests. Tokenizing a long prompt takes some milliseconds, loading an adapter some hundred.
_READERS = 2

# How long `close` waits for the step that runs when all requests have been aborted.
_LAST_STEP = 5.0  # seconds

_T = TypeVar("_T")

Output = RequestOutput | BeamSearchOutput
_Mail = list[Output] | BaseException


@dataclass(frozen=True)
class EngineRequest:
    """What `LLMEngine.add_request` takes."""

    request_id: str
    prompt: PromptType
    params: SamplingParams | BeamSearchParams
    lora_request: LoRARequest | None = None


class AsyncEngine:
    """Continuous batching for asyncio. All methods but those that say otherwise belong to the loop that called `start`.

    on_step: called in the engine's thread after each step, with its times and its outputs; it
        must be quick.

    Raises what LLMEngine raises for a `config` that cannot be served.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        on_step: Callable[[StepTimes, Sequence[Output]], object] | None = None,
    ) -> None:
        self.llm_engine = LLMEngine(config)
        self._on_step = on_step
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._readers = ThreadPoolExecutor(_READERS, "quire-readers")
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._mail: dict[str, asyncio.Queue[_Mail]] = {}  # by request: where its outputs go
        self._accepted = 0
        self._idle: asyncio.Event | None = None
        self._unloading: list[tuple[int, asyncio.Future[int]]] = []
        self._errands: set[Future[Any]] = set()  # of `_in_thread`
        self._serial = itertools.count()
        self._step_begun: float | None = None
        self._stopped = False
        self._closing = False
        self._falling_asleep = False
        self._bedside = asyncio.Lock()  # one goes to sleep or wakes up at a time
        self._error: BaseException | None = None

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to step; on the event loop that the outputs are to come to."""
        self._loop, self._idle = asyncio.get_running_loop(), asyncio.Event()
        self._idle.set()
        self._thread.start()

    def complaint(self, step_timeout: float) -> str | None:
        """What is wrong with the step loop; None: it is alive. Any thread may call this.

        step_timeout: seconds after which a step counts as stuck.
        """
        if self._error is not None:
            return f"the engine has failed: {type(self._error).__name__}"
        if self._loop is None or self._stopped or not self._thread.is_alive():
            return "the engine does not run"
        begun = self._step_begun
        if begun is not None and time.monotonic() - begun > step_timeout:
            return f"a step has taken over {step_timeout:g} s"
        return None

    @property
    def closing(self) -> bool:
        """Whether it takes no more requests."""
        return self._closing or self._error is not None

    @property
    def num_requests(self) -> int:
        """Those that `close` would wait for."""
        return self._accepted

    @property
    def stuck(self) -> bool:
        """Whether a step goes on after `close`."""
        return self._stopped and self._thread.is_alive()

    @property
    def failed(self) -> bool:
        """Whether the step loop has ended with an error."""
        return self._error is not None

    async def close(self, timeout: float = 0.0) -> None:
        """Take no more requests, let those that run finish for `timeout` seconds, end the rest, and stop.

        The rest get EngineClosedError.
        """
        if self._closing:
            return
        self._closing = True
        if self._idle is not None and not self._idle.is_set() and self._error is None:
            try:
                await asyncio.wait_for(self._idle.wait(), timeout)
            except TimeoutError:
                logger.warning("%d requests have not finished in %g s and are aborted", self._accepted, timeout)
        self._end_all()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, _LAST_STEP)
        self._let_go()

    def stop(self) -> None:
        """`close` at once, for who cannot wait for the event loop."""
        if self._closing:
            return
        self._closing = True
        self._end_all()
        if self._thread.is_alive():
            self._thread.join(_LAST_STEP)
        self._let_go()

    def _end_all(self) -> None:
        self._post(EngineClosedError("the server is shutting down; the request was aborted"))
        self._tell(self._stop)

    def _let_go(self) -> None:
        self._stopped = True
        self._readers.shutdown(wait=False, cancel_futures=True)
        self.llm_engine.close()

    # -- requests -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | BeamSearchParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[Output]:
        """The outputs of one request, as `LLMEngine.step` returns them. Leaving the iteration aborts the request.

        Raises RequestError when it could never be served as given, EngineClosedError when the engine ends before it.
        """
        with self.accepted():
            request = EngineRequest(request_id, prompt, sampling_params, lora_request)
            async with await self.submit([request]) as outputs:
                async for output in outputs:
                    yield output

    @contextmanager
    def accepted(self) -> Iterator[None]:
        """Around all that is done for a request: `close` and `sleep` let it come to its end.

        Raises EngineClosedError, and SleepingError while the engine sleeps."""
        if self._closing:
            raise EngineClosedError("the server is shutting down")
        if self._falling_asleep or self.llm_engine.is_sleeping:
            raise SleepingError("the engine sleeps: wake it up (POST /wake_up) and try again.")
        self._check_runs()
        assert self._idle is not None
        self._accepted += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._accepted -= 1
            if not self._accepted:
                self._idle.set()

    async def submit(self, requests: Sequence[EngineRequest]) -> Outputs:
        """Read requests and queue them, all or none; raises as `generate`. Their outputs come to one iterator.

        Within `accepted`.
        """
        arrivals = await self._read_all(requests)
        try:
            self._check_runs()
            taken = [request.request_id for request in requests if request.request_id in self._mail]
            if taken or len({request.request_id for request in requests}) < len(requests):
                raise RequestError(f"request {(taken or [requests[0].request_id])[0]}: its id is in use")
        except BaseException:
            self._discard(arrivals)
            raise
        mail: asyncio.Queue[_Mail] = asyncio.Queue()
        for arrival in arrivals:
            self._mail[arrival.request_id] = mail
        self._tell(partial(self._admit, arrivals))
        return Outputs(self, {arrival.request_id for arrival in arrivals}, mail)

    def unique_ids(self, name: str, count: int) -> list[str]:
        """Request ids that begin with a name, and that nobody has."""
        number = next(self._serial)
        return [f"{name}-{number}-{place}" for place in range(count)]

    async def on_reader(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run something that takes time where requests are read: off the event loop and off the step loop."""
        return await self._result(self._on_reader(function, *args))

    def abort(self, request_ids: set[str]) -> None:
        """End requests before the next step; unknown and finished ones are passed over."""
        for request_id in request_ids:
            self._mail.pop(request_id, None)
        self._tell(partial(self.llm_engine.abort_request, list(request_ids)))

    def end(self, outputs: Sequence[Output]) -> None:
        """Abort requests, and hand who waits for them these as their last outputs."""
        self._post(list(outputs))
        self.abort({output.request_id for output in outputs})

    def forget(self, request_id: str) -> None:
        """A request's last output has been handed out."""
        self._mail.pop(request_id, None)

    # -- adapters -------------------------------------------------------------------------------------------------

    async def load_lora_adapter(self, name: str, path: str, load_inplace: bool = False) -> LoadReport:
        """As `LLMEngine.load_lora_adapter`, off the event loop and off the step loop. Raises AdapterError."""
        try:
            report = await asyncio.to_thread(self.llm_engine.load_lora_adapter, name, path, load_inplace)
        except RuntimeError:  # its workers take nothing any more
            self._check_runs()
            raise
        self._tell(lambda: None)  # an older version may be free to go
        return report

    async def unload_lora_adapter(self, name: str, timeout: float) -> int | None:
        """Forget an adapter and wait until no request holds it. The bytes that this gave back; None: it is still held
        after `timeout` seconds. Raises AdapterError.
        """
        self._check_runs()  # else nobody would answer
        assert self._loop is not None
        number = self.llm_engine.unload_lora_adapter(name)
        future: asyncio.Future[int] = self._loop.create_future()
        self._tell(lambda: self._unloading.append((number, future)))
        try:
            return await asyncio.wait_for(future, timeout)
        except TimeoutError:
            return None

    def list_lora_adapters(self) -> list[AdapterInfo]:
        """Any thread may call this."""
        return self.llm_engine.list_lora_adapters() if self.llm_engine.adapters is not None else []

    # -- memory ---------------------------------------------------------------------------------------------------

    @property
    def is_sleeping(self) -> bool:
        """Whether requests are refused until `wake_up`."""
        return self._falling_asleep or self.llm_engine.is_sleeping

    async def sleep(self, level: int = 1, timeout: float = 30.0) -> None:
        """As `LLMEngine.sleep`, once the requests that run have finished; new ones get SleepingError from now on.

        Raises RequestError, and serves on, when some have not finished after `timeout` seconds.
        """
        self._check_runs()
        assert self._idle is not None
        async with self._bedside:
            self._falling_asleep = True
            try:
                try:
                    await asyncio.wait_for(self._idle.wait(), timeout)
                except TimeoutError:
                    raise RequestError(
                        f"{self._accepted} requests have not finished in {timeout:g} s: the engine goes on. Try again."
                    ) from None
                await self._in_thread(partial(self.llm_engine.sleep, level))
            finally:
                self._falling_asleep = False

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As `LLMEngine.wake_up`."""
        self._check_runs()
        async with self._bedside:
            await self._in_thread(partial(self.llm_engine.wake_up, tags))

    async def reset_prefix_cache(self) -> bool:
        """As `LLMEngine.reset_prefix_cache`."""
        return await self._in_thread(self.llm_engine.reset_prefix_cache)

    async def _in_thread(self, function: Callable[[], _T]) -> _T:
        """What this gives or raises in the engine's thread, before the next step."""
        self._check_runs()
        done: Future[_T] = Future()
        self._errands.add(done)
        self._tell(partial(_do, function, done))
        if self._stopped:  # since it was looked at: the thread may not have seen this one
            _forsake(done)
        try:
            return await asyncio.wrap_future(done)
        finally:
            self._errands.discard(done)

    def stats(self) -> EngineStats:
        """Any thread may call this."""
        return self.llm_engine.stats()

    # -- on the event loop ----------------------------------------------------------------------------------------

    async def _read_all(self, requests: Sequence[EngineRequest]) -> list[PreparedRequest]:
        futures = [
            self._on_reader(self.llm_engine.read_request, one.request_id, one.prompt, one.params, one.lora_request)
            for one in requests
        ]
        try:
            return [await self._result(future) for future in futures]
        except BaseException:  # one is no good, or nobody waits any more: let go of the others
            for future in futures:
                future.cancel()
                future.add_done_callback(self._discard_read)
            raise

    def _discard_read(self, future: Future[PreparedRequest]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._discard([future.result()])

    def _discard(self, arrivals: Sequence[PreparedRequest]) -> None:
        for arrival in arrivals:
            arrival.discard()
        self._tell(lambda: None)  # their adapters may be free to go

    def _on_reader(self, function: Callable[..., _T], *args: Any) -> Future[_T]:
        self._check_runs()
        return self._readers.submit(function, *args)

    async def _result(self, future: Future[_T]) -> _T:
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self._stopped and future.cancelled():  # not the one who waits, but the readers were stopped
                self._check_runs()
            raise

    def _check_runs(self) -> None:
        if self._error is not None:
            raise EngineClosedError(f"the engine has failed ({type(self._error).__name__}): see its log")
        if self._stopped or self._loop is None:
            raise EngineClosedError("the server is shutting down" if self._stopped else "the engine was not started")

    def _tell(self, message: Callable[[], object]) -> None:
        """Have the engine's thread call this before its next step. Any thread may call this."""
        self._inbox.put(message)
        self.llm_engine.notify()

    def _post(self, mail: _Mail) -> None:
        """Hand outputs to those who wait for them, or an error to all."""
        if isinstance(mail, BaseException):
            for queue in set(self._mail.values()):
                queue.put_nowait(mail)
            return
        batches: dict[int, tuple[asyncio.Queue[_Mail], list[Output]]] = {}
        for output in mail:
            waiting = self._mail.get(output.request_id)
            if waiting is not None:
                batches.setdefault(id(waiting), (waiting, []))[1].append(output)
        for waiting, outputs in batches.values():
            waiting.put_nowait(outputs)

    # -- in the engine's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._open_mail():
                self._step_begun = time.monotonic()
                outputs = self.llm_engine.step()
                self._step_begun = None
                self._report(outputs)
                if outputs:
                    self._send(outputs)
                self._answer_unloadings()
        except BaseException as error:
            logger.critical("the engine has failed", exc_info=True)
            self._error = error
            self._send(EngineClosedError(f"the engine has failed ({type(error).__name__}): see its log"))
        finally:
            self._stopped = True
            for _, future in self._unloading:
                self._call(partial(_give_up, future))
            for errand in list(self._errands):
                _forsake(errand)

    def _report(self, outputs: Sequence[Output]) -> None:
        try:
            if self._on_step is not None:
                self._on_step(self.llm_engine.scheduler.times, outputs)
        except Exception:  # who watches must not stop what is watched
            logger.exception("on_step failed")

    def _open_mail(self) -> bool:
        """Do what the others ask for; while there is nothing to compute, wait for that. False: stop."""
        while not self._stopped:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                if self.llm_engine.has_unfinished_requests():
                    return True
                self.llm_engine.core.settle()  # no step comes that would
                self._answer_unloadings()
                message = self._inbox.get()
            message()
        return False

    def _stop(self) -> None:
        self._stopped = True

    def _admit(self, arrivals: Sequence[PreparedRequest]) -> None:
        for place, arrival in enumerate(arrivals):
            try:
                self.llm_engine.submit(arrival)
            except Exception as error:  # the others of its caller's come to nothing with it
                self.llm_engine.abort_request([other.request_id for other in arrivals[:place]])
                for other in arrivals[place + 1 :]:
                    other.discard()
                self._call(partial(self._fail, arrival.request_id, error))
                return

    def _fail(self, request_id: str, error: Exception) -> None:
        waiting = self._mail.get(request_id)
        if waiting is not None:
            waiting.put_nowait(error)

    def _answer_unloadings(self) -> None:
        if not self._unloading:
            return
        waiting = []
        for number, future in self._unloading:
            freed = self.llm_engine.freed_bytes(number)
            if freed is None and not future.cancelled():
                waiting.append((number, future))
            elif freed is not None:
                self._call(partial(_resolve, future, freed))
        self._unloading = waiting

    def _send(self, mail: _Mail) -> None:
        self._call(partial(self._post, mail))

    def _call(self, function: Callable[[], object]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop is closed: nobody is there to listen
            self._stopped = True


class Outputs:
    """The outputs of some requests, in the order in which steps make them; ends when all have finished.

    Leaving it (`async with`) aborts what has not. Raises EngineClosedError when the engine ends first.
    """

    def __init__(self, engine: AsyncEngine, unfinished: set[str], mail: asyncio.Queue[_Mail]) -> None:
        self._engine = engine
        self._unfinished = unfinished
        self._mail = mail
        self._ready: list[Output] = []  # in reverse

    async def __aenter__(self) -> Outputs:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def close(self) -> int:
        """Abort what has not finished. Returns how many requests that were."""
        unfinished, self._unfinished = self._unfinished, set()
        if unfinished:
            self._engine.abort(unfinished)
        return len(unfinished)

    @property
    def ready(self) -> bool:
        """Whether there are more that need not be waited for."""
        return bool(self._ready) or not self._mail.empty()

    def __aiter__(self) -> Outputs:
        return self

    async def __anext__(self) -> Output:
        while not self._ready:
            if not self._unfinished:
                raise StopAsyncIteration
            mail = await self._mail.get()
            if isinstance(mail, BaseException):
                raise mail
            self._ready = mail[::-1]
        output = self._ready.pop()
        if isinstance(output, BeamSearchOutput) or output.finished:
            self._unfinished.discard(output.request_id)
            self._engine.forget(output.request_id)
        return output


def _do(function: Callable[[], _T], done: Future[_T]) -> None:
    if not done.set_running_or_notify_cancel():  # who asked has gone
        return
    try:
        done.set_result(function())
    except Exception as error:
        done.set_exception(error)


def _forsake(done: Future[Any]) -> None:
    with suppress(InvalidStateError):  # it has its result, or another thread was faster
        done.set_exception(EngineClosedError("the engine has stopped"))


def _give_up(future: asyncio.Future[int]) -> None:
    if not future.done():
        future.set_exception(EngineClosedError("the engine has stopped; the adapter's memory goes with it"))


def _resolve(future: asyncio.Future[int], value: int) -> None:
    if not future.done():
        future.set_result(value)
