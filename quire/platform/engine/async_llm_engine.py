"""`AsyncLLMEngine`: `AsyncEngine` as programs for vLLM call it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.errors import EngineClosedError, RequestError
from quire.lora import LoRARequest
from quire.platform.engine.async_engine import AsyncEngine, EngineRequest
from quire.platform.inputs.plain_tokenizer import full_tokenizer
from quire.platform.inputs.processor import PromptType
from quire.platform.outputs.beams import beams_as_output
from quire.platform.outputs.outputs import BeamSearchOutput, CompletionOutput, RequestOutput
from quire.platform.outputs.pooled import AnyOutput, PoolingRequestOutput
from quire.platform.pooling.params import PoolingParams
from quire.platform.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.platform.sampling.results import Failure

if TYPE_CHECKING:
    from quire.config.engine_args import EngineArgs  # whose making takes a start 20 ms

# How long a step may take before `check_health` says that it is stuck.
_STEP_TIMEOUT = 300.0  # seconds


class AsyncLLMEngine:
    """An engine for asyncio. It begins to step with the first request, on the event loop that this is made from.

    Raises what LLMEngine raises for a `config` that cannot be served.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.engine = AsyncEngine(config)
        self._started = False
        self._last: dict[str, Callable[[], AnyOutput]] = {}  # by request that runs: how it ends when it is aborted
        self._aborted: set[str] = set()

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, start_engine_loop: bool = True, **unused: Any) -> AsyncLLMEngine:
        """An engine of `AsyncEngineArgs` or `EngineArgs`. Raises TypeError for more than these."""
        named = {name for name, value in unused.items() if value is not None and name != "usage_context"}
        if named:
            raise TypeError(f"unknown argument: {', '.join(sorted(named))}")
        return cls(engine_args.create_engine_config())

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams | BeamSearchParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        *,
        trace_headers: None = None,
        priority: int = 0,
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of one request after each step, the last of them `finished`; by default each has all so far.

        Leaving the iteration aborts the request. Raises RequestError when it could never be served as given,
        EngineClosedError when the engine ends first.
        """
        delta = getattr(sampling_params, "output_kind", None) is RequestOutputKind.DELTA
        request = EngineRequest(request_id, prompt, sampling_params, lora_request)
        async for output in self._outputs(request, partial(_aborted, request_id, None), trace_headers, priority):
            shown = self._shown(output)
            last = _without_news(shown) if delta else shown
            self._last[request_id] = partial(_aborted, request_id, last)
            yield shown

    async def encode(
        self,
        prompt: PromptType,
        pooling_params: PoolingParams,
        request_id: str,
        lora_request: LoRARequest | None = None,
        trace_headers: None = None,
        priority: int = 0,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[PoolingRequestOutput]:
        """The one output of a request to a model that pools, as `LLM.encode` returns it.

        tokenization_kwargs: vLLM's; `truncate_prompt_tokens` belongs into pooling_params. Leaving the iteration aborts
        the request; one that is aborted meanwhile has a `failure`. Raises as `generate`.
        """
        if tokenization_kwargs:
            raise RequestError("tokenization_kwargs: give truncate_prompt_tokens in pooling_params")
        request = EngineRequest(request_id, prompt, pooling_params, lora_request)
        async for output in self._outputs(request, partial(_not_pooled, request_id), trace_headers, priority):
            yield output

    async def _outputs(
        self, request: EngineRequest, aborted: Callable[[], AnyOutput], trace_headers: None, priority: int
    ) -> AsyncIterator[Any]:
        """aborted: makes the last output, should it be aborted before it has another."""
        if trace_headers is not None or priority != 0:
            raise RequestError("trace_headers, priority: requests are served in the order in which they came, untraced")
        request_id = request.request_id
        if request_id in self._last:
            raise RequestError(f"request {request_id}: its id is in use")
        await self._start()
        self._last[request_id] = aborted
        try:
            with self.engine.accepted():
                async with await self.engine.submit([request]) as outputs:
                    if request_id in self._aborted:  # while it was read
                        yield aborted()
                        return
                    async for output in outputs:
                        # What was made before it was aborted, and not shown by then, its last output does not have.
                        last = isinstance(output, BeamSearchOutput) or output.finished
                        if last or request_id not in self._aborted:
                            yield output
        finally:
            self._last.pop(request_id, None)
            self._aborted.discard(request_id)

    def _shown(self, output: RequestOutput | BeamSearchOutput) -> RequestOutput:
        if isinstance(output, BeamSearchOutput):
            return beams_as_output(self.engine.llm_engine.tokenizer, output)
        return output

    async def _start(self) -> None:
        if not self._started:
            self._started = True
            await self.engine.start()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests; who iterates over one gets a last output with finish_reason "abort". Others are passed over."""
        ids = {request_id} if isinstance(request_id, str) else set(request_id)
        running = ids & self._last.keys()
        self._aborted |= running
        self.engine.end([self._last[one]() for one in running])

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter before the first request that wants it. Raises AdapterError."""
        await self._start()
        await self.engine.on_reader(self.engine.llm_engine.lora.load_for, lora_request)
        return True

    async def sleep(self, level: int = 1) -> None:
        """Give weights and KV blocks back to the system, once what runs has finished; see `AsyncEngine.sleep`."""
        await self._start()
        await self.engine.sleep(level)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take them again; answers are what they were."""
        await self._start()
        await self.engine.wake_up(tags)

    async def is_sleeping(self) -> bool:
        """Whether requests are refused until `wake_up`."""
        return self.engine.is_sleeping

    async def reset_prefix_cache(self) -> bool:
        """Forget the beginnings of prompts that were computed before. True: it was done."""
        await self._start()
        return await self.engine.reset_prefix_cache()

    async def get_tokenizer(self, lora_request: LoRARequest | None = None) -> Any:
        """The transformers tokenizer; None when skip_tokenizer_init was set."""
        return full_tokenizer(self.engine.llm_engine.tokenizer)

    async def check_health(self) -> None:
        """Raise EngineClosedError, with the reason, where requests would not be served."""
        health_error = self.engine.step_loop.health_error(_STEP_TIMEOUT) if self._started else None
        if health_error is not None:
            raise EngineClosedError(health_error)

    @property
    def is_running(self) -> bool:
        """Whether it steps, or will with the first request."""
        return not self.engine.closing

    @property
    def is_stopped(self) -> bool:
        """Whether it takes no more requests."""
        return self.engine.closing

    @property
    def errored(self) -> bool:
        """Whether its step loop has ended with an error."""
        return self.engine.step_loop.failed

    async def close(self, timeout: float = 0.0) -> None:
        """Let what runs finish for `timeout` seconds, and stop."""
        await self.engine.close(timeout)

    def shutdown(self) -> None:
        """Stop at once; who waits for an answer gets EngineClosedError. To let answers finish: `close`."""
        self.engine.stop()

    shutdown_background_loop = shutdown


def _aborted(request_id: str, last: RequestOutput | None) -> RequestOutput:
    """The last output of a request that was aborted, after what it has shown."""
    if last is None:
        nothing = CompletionOutput(0, "", [], finish_reason="abort")
        return RequestOutput(request_id, None, [], [nothing], True)
    outputs = [one if one.finished() else replace(one, finish_reason="abort") for one in last.outputs]
    return replace(last, outputs=outputs, finished=True)


def _not_pooled(request_id: str) -> PoolingRequestOutput:
    """The output of a request for vectors that was aborted."""
    return PoolingRequestOutput(request_id, None, [], failure=Failure("the request was aborted", by_caller=True))


def _without_news(output: RequestOutput) -> RequestOutput:
    """The same, with nothing in it that has not been shown."""
    outputs = [replace(one, text="", token_ids=[], logprobs=one.logprobs and []) for one in output.outputs]
    return replace(output, outputs=outputs)
