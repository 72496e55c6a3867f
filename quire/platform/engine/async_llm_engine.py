"""`AsyncLLMEngine`: `AsyncEngine` as programs for vLLM call it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from quire.config import EngineConfig
from quire.errors import EngineClosedError, RequestError
from quire.lora import LoRARequest
from quire.platform.engine.async_engine import AsyncEngine, EngineRequest
from quire.platform.inputs.processor import PromptType
from quire.platform.outputs.beams import beams_as_output
from quire.platform.outputs.outputs import BeamSearchOutput, CompletionOutput, RequestOutput
from quire.platform.sampling.params import BeamSearchParams, RequestOutputKind, SamplingParams

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
        self._last: dict[str, RequestOutput | None] = {}  # by request that runs
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
        if trace_headers is not None or priority != 0:
            raise RequestError("trace_headers, priority: requests are served in the order in which they came, untraced")
        if request_id in self._last:
            raise RequestError(f"request {request_id}: its id is in use")
        await self._start()
        self._last[request_id] = None
        delta = getattr(sampling_params, "output_kind", None) is RequestOutputKind.DELTA
        try:
            with self.engine.accepted():
                request = EngineRequest(request_id, prompt, sampling_params, lora_request)
                async with await self.engine.submit([request]) as outputs:
                    if request_id in self._aborted:  # while it was read
                        yield _aborted(request_id, None)
                        return
                    async for output in outputs:
                        shown = self._shown(output)
                        self._last[request_id] = _without_news(shown) if delta else shown
                        yield shown
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
        self.engine.end([_aborted(one, self._last[one]) for one in running])

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
        return self.engine.llm_engine.tokenizer

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


def _without_news(output: RequestOutput) -> RequestOutput:
    """The same, with nothing in it that has not been shown."""
    outputs = [replace(one, text="", token_ids=[], logprobs=one.logprobs and []) for one in output.outputs]
    return replace(output, outputs=outputs)
