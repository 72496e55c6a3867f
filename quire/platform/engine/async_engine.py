"""`AsyncEngine`: the engine in a thread of its own, for programs that run on asyncio.

One thread steps and does nothing else (`StepLoop`). Requests are read (checked, tokenized, their adapters loaded) by a
few workers and come to it as messages; what a step has made goes back to the event loop in one call. Nobody polls.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from quire.config import EngineConfig
from quire.errors import EngineClosedError, RequestError, SleepingError
from quire.lora import AdapterInfo, LoadReport, LoRARequest
from quire.platform.engine.adapter_loading import AdapterLoading
from quire.platform.engine.llm_engine import AnyParams, LLMEngine
from quire.platform.engine.output_stream import OutputQueues, Outputs
from quire.platform.engine.stats import EngineStats
from quire.platform.engine.step_loop import Delivery, StepLoop
from quire.platform.engine.watching.watch import EngineWatch
from quire.platform.inputs.prepared import PreparedRequest
from quire.platform.inputs.processor import PromptType
from quire.platform.outputs.pooled import AnyOutput
from quire.platform.pooling.params import PoolingParams
from quire.platform.sampling.params import SamplingParams
from quire.platform.scheduling.metrics import StepTimes

logger = logging.getLogger("quire")

# Threads that read requests. Tokenizing a long prompt takes some milliseconds, loading an adapter some hundred.
_READERS = 2

# And of those that compile grammars first, which gives way to steps and may take seconds: other requests do not wait
# for them.
_SHAPE_READERS = 2

# Requests that are read in one go: handing one over takes longer than reading a short text.
_PIECE = 8

# Characters of the texts, or token ids, that pool and are read faster than handed over at all.
_SHORT = 2048
_LEAST_SHORT = 32  # what a text counts at least

# How long `close` waits for the step that runs when all requests have been aborted.
_LAST_STEP = 5.0  # seconds

_PLAIN = frozenset({"prompt", "prompt_token_ids", "cache_salt"})

_T = TypeVar("_T")


@dataclass(frozen=True)
class EngineRequest:
    """What `LLMEngine.add_request` takes."""

    request_id: str
    prompt: PromptType
    params: AnyParams
    lora_request: LoRARequest | None = None


class AsyncEngine:
    """Continuous batching for asyncio. All methods but those that say otherwise belong to the loop that called `start`.

    on_step: called in the engine's thread after each step, with its times and its outputs; it
        must be quick.

    llm_engine: the engine. step_loop: its thread, which tells whether it is alive. loading: of adapters, in two steps.
    watch: for who looks at it.

    Raises what LLMEngine raises for a `config` that cannot be served.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        on_step: Callable[[StepTimes, Sequence[AnyOutput]], object] | None = None,
    ) -> None:
        self.llm_engine = LLMEngine(config)
        self.step_loop = StepLoop(self.llm_engine, on_step, self._deliver)
        self.loading = AdapterLoading(self.llm_engine.lora, self.step_loop)
        self.watch = EngineWatch(self.llm_engine, self.step_loop)
        self._readers = ThreadPoolExecutor(_READERS, "quire-readers")
        self._shape_readers = ThreadPoolExecutor(_SHAPE_READERS, "quire-shape-readers")
        self._output_queues = OutputQueues()
        self._accepted = 0
        self._idle: asyncio.Event | None = None
        self._id_numbers = itertools.count()
        self._closing = False
        self._falling_asleep = False
        self._sleep_lock = asyncio.Lock()  # one goes to sleep or wakes up at a time

    # -- life -----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to step; on the event loop that the outputs are to come to."""
        self._idle = asyncio.Event()
        self._idle.set()
        self.step_loop.start()

    @property
    def closing(self) -> bool:
        """Whether it takes no more requests."""
        return self._closing or self.step_loop.failed

    @property
    def num_requests(self) -> int:
        """Those that `close` would wait for."""
        return self._accepted

    async def close(self, timeout: float = 0.0) -> None:
        """Take no more requests, let those that run finish for `timeout` seconds, end the rest, and stop.

        The rest get EngineClosedError.
        """
        if self._closing:
            return
        self._closing = True
        self.watch.close()
        if self._idle is not None and not self._idle.is_set() and not self.step_loop.failed:
            try:
                await asyncio.wait_for(self._idle.wait(), timeout)
            except TimeoutError:
                logger.warning("%d requests have not finished in %g s and are aborted", self._accepted, timeout)
        self._end_all()
        await asyncio.to_thread(self.step_loop.join, _LAST_STEP)
        self._release()

    def stop(self) -> None:
        """`close` at once, for who cannot wait for the event loop."""
        if self._closing:
            return
        self._closing = True
        self._end_all()
        self.step_loop.join(_LAST_STEP)
        self._release()

    def _end_all(self) -> None:
        self._output_queues.fail_all(EngineClosedError("the server is shutting down; the request was aborted"))
        self.step_loop.end()

    def _release(self) -> None:
        self.step_loop.close()
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._shape_readers.shutdown(wait=False, cancel_futures=True)
        self.llm_engine.close()

    # -- requests -------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt: PromptType,
        params: AnyParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
    ) -> AsyncIterator[Any]:
        """The outputs of one request, as `LLMEngine.step` returns them; of PoolingParams there is one. Leaving the
        iteration aborts the request.

        Raises RequestError when it could never be served as given, EngineClosedError when the engine ends before it.
        """
        with self.accepted():
            request = EngineRequest(request_id, prompt, params, lora_request)
            async with await self.submit([request]) as outputs:
                async for output in outputs:
                    yield output

    @contextmanager
    def accepted(self) -> Iterator[None]:
        """Around all that is done for a request: `close` and `sleep` let it come to its end.

        Raises EngineClosedError, and SleepingError while the engine sleeps."""
        if self._closing:
            raise EngineClosedError("the server is shutting down")
        if self.is_sleeping:
            raise SleepingError("the engine sleeps: wake it up (POST /wake_up) and try again.")
        self.step_loop.check_runs()
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
        prepared = await self._read_all(requests)
        request_ids = {request.request_id for request in requests}
        try:
            self.step_loop.check_runs()
            taken = [request.request_id for request in requests if request.request_id in self._output_queues]
            if taken or len(request_ids) < len(requests):
                raise RequestError(f"request {(taken or [requests[0].request_id])[0]}: its id is in use")
        except BaseException:
            self._discard(prepared)
            raise
        outputs = self._output_queues.open(request_ids, self.abort)
        self.step_loop.tell(partial(self._queue, prepared))
        return outputs

    def unique_ids(self, name: str, count: int) -> list[str]:
        """Request ids that begin with a name, and that nobody has."""
        number = next(self._id_numbers)
        return [f"{name}-{number}-{place}" for place in range(count)]

    async def on_reader(self, function: Callable[..., _T], *args: Any) -> _T:
        """Run something that takes time where requests are read: off the event loop and off the step loop."""
        return await self._read_result(self._read(self._readers, function, *args))

    def abort(self, request_ids: set[str]) -> None:
        """End requests before the next step; unknown and finished ones are passed over."""
        for request_id in request_ids:
            self._output_queues.forget(request_id)
        self.step_loop.tell(partial(self.llm_engine.abort_request, list(request_ids)))

    def end(self, outputs: Sequence[AnyOutput]) -> None:
        """Abort requests, and hand who waits for them these as their last outputs."""
        self._output_queues.deliver(outputs)
        self.abort({output.request_id for output in outputs})

    async def _read_all(self, requests: Sequence[EngineRequest]) -> list[PreparedRequest]:
        if _are_short(requests):
            self.step_loop.check_runs()
            return self._read_piece(requests)
        readers = self._shape_readers if any(_is_shaped(one.params) for one in requests) else self._readers
        pieces = [requests[start : start + _PIECE] for start in range(0, len(requests), _PIECE)]
        futures = [self._read(readers, self._read_piece, piece) for piece in pieces]
        try:
            return [one for future in futures for one in await self._read_result(future)]
        except BaseException:  # one is no good, or nobody waits any more: let go of the others
            for future in futures:
                future.cancel()
                future.add_done_callback(self._discard_read)
            raise

    def _read_piece(self, requests: Sequence[EngineRequest]) -> list[PreparedRequest]:
        """On a reader, unless they are short: all or none."""
        read: list[PreparedRequest] = []
        try:
            for one in requests:
                read.append(self.llm_engine.read_request(one.request_id, one.prompt, one.params, one.lora_request))
        except BaseException:
            self._discard(read)
            raise
        return read

    def _discard_read(self, future: Future[list[PreparedRequest]]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._discard(future.result())

    def _discard(self, requests: Sequence[PreparedRequest]) -> None:
        for prepared in requests:
            prepared.discard()
        self.step_loop.notify()  # their adapters may be free to go

    def _read(self, readers: ThreadPoolExecutor, function: Callable[..., _T], *args: Any) -> Future[_T]:
        self.step_loop.check_runs()
        return readers.submit(function, *args)

    async def _read_result(self, future: Future[_T]) -> _T:
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if self.step_loop.stopped and future.cancelled():  # not who waits was cancelled: the readers were stopped
                self.step_loop.check_runs()
            raise

    def _queue(self, requests: Sequence[PreparedRequest]) -> None:
        """In the engine's thread: queue what was read, all or none."""
        for place, prepared in enumerate(requests):
            try:
                self.llm_engine.submit(prepared)
            except Exception as error:  # the others of its caller's come to nothing with it
                self.llm_engine.abort_request([other.request_id for other in requests[:place]])
                for other in requests[place + 1 :]:
                    other.discard()
                self.step_loop.post(partial(self._output_queues.fail, prepared.request_id, error))
                return

    def _deliver(self, delivery: Delivery) -> None:
        if isinstance(delivery, BaseException):
            self._output_queues.fail_all(delivery)
            self.watch.close()
        else:
            self._output_queues.deliver(delivery)

    # -- adapters -------------------------------------------------------------------------------------------------

    async def load_lora_adapter(
        self, name: str, path: str, load_inplace: bool = False, gone: Callable[[], object] | None = None
    ) -> LoadReport:
        """As `LLMEngine.load_lora_adapter`, off the event loop and off the step loop. Raises AdapterError.

        gone: called, in any thread, once nobody needs its files any more.
        """
        return self.loading.publish(await self.loading.stage(name, path, load_inplace), gone)

    async def unload_lora_adapter(self, name: str, timeout: float) -> int | None:
        """Forget an adapter and wait until no request holds it. The bytes that this gave back; None: it is still held
        after `timeout` seconds. Raises AdapterError.
        """
        self.step_loop.check_runs()  # else nobody would answer
        freed = self.step_loop.freed(self.llm_engine.unload_lora_adapter(name))
        try:
            return await asyncio.wait_for(freed, timeout)
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
        self.step_loop.check_runs()
        assert self._idle is not None
        async with self._sleep_lock:
            self._falling_asleep = True
            try:
                try:
                    await asyncio.wait_for(self._idle.wait(), timeout)
                except TimeoutError:
                    raise RequestError(
                        f"{self._accepted} requests have not finished in {timeout:g} s: the engine goes on. Try again."
                    ) from None
                await self.step_loop.call(partial(self.llm_engine.sleep, level))
            finally:
                self._falling_asleep = False

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """As `LLMEngine.wake_up`."""
        self.step_loop.check_runs()
        async with self._sleep_lock:
            await self.step_loop.call(partial(self.llm_engine.wake_up, tags))

    async def reset_prefix_cache(self) -> bool:
        """As `LLMEngine.reset_prefix_cache`."""
        return await self.step_loop.call(self.llm_engine.reset_prefix_cache)

    def stats(self) -> EngineStats:
        """Any thread may call this."""
        return self.llm_engine.stats()


def _are_short(requests: Sequence[EngineRequest]) -> bool:
    """Whether reading them is but the tokens of a short text: nothing is loaded, fetched or compiled for them."""
    left = _SHORT
    for one in requests:
        prompt = one.prompt
        if not isinstance(one.params, PoolingParams) or one.lora_request is not None or not isinstance(prompt, dict):
            return False
        given: Any = prompt.get("prompt", prompt.get("prompt_token_ids"))
        if not isinstance(given, (str, list)) or not prompt.keys() <= _PLAIN:
            return False
        left -= max(len(given), _LEAST_SHORT)
        if left < 0:
            return False
    return True


def _is_shaped(params: AnyParams) -> bool:
    """Whether grammars, or the vocabulary that they are compiled over, are wanted."""
    if isinstance(params, PoolingParams):
        return False
    thinks = isinstance(params, SamplingParams) and params.thinking_token_budget is not None
    return thinks or params.structured_outputs is not None
