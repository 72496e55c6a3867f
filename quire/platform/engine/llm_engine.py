"""The engine: requests in, a step at a time, outputs out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.errors import RequestError
from quire.lora import AdapterInfo, LoadReport, LoRARequest
from quire.multimodal import FeatureCache, MediaByUuid, ProcessedImage
from quire.platform.engine.builder import load
from quire.platform.engine.core import EngineCore
from quire.platform.engine.drafts import drafting_of
from quire.platform.engine.lora_admin import LoRAAdmin
from quire.platform.engine.media_arrivals import MediaArrivals
from quire.platform.engine.sleep import Sleep
from quire.platform.engine.stats import EngineStats, engine_stats
from quire.platform.engine.watching.steps import StepRecorder
from quire.platform.inputs.prepared import PreparedRequest
from quire.platform.inputs.processor import InputProcessor, PromptType
from quire.platform.kv.manager import KVManager
from quire.platform.outputs.pooled import AnyOutput
from quire.platform.outputs.processor import OutputProcessor
from quire.platform.pooling.params import PoolingParams
from quire.platform.sampling.logits_processors import load_plugins
from quire.platform.sampling.params import BeamSearchParams, SamplingParams
from quire.platform.scheduling.request import SequenceState, next_serial
from quire.platform.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from quire.config.engine_args import EngineArgs  # whose making takes a start 20 ms

logger = logging.getLogger("quire")

AnyParams = SamplingParams | BeamSearchParams | PoolingParams

# How long a step with nothing to compute waits for an image or an adapter to be ready, of which it is told.
_POLL_SECONDS = 0.1
_READ_SECONDS = 0.004  # the same for blocks from beside the pool, as a worker in another process tells nobody of them


class LLMEngine:
    """Continuous batching over one block pool: a facade before what does the work.

    Not thread-safe: one thread adds, aborts and steps, and others may call only what says so.

    notify: lets a step that waits (for an image, say) return; any thread may call it. recorder: what steps are
    written down by, while somebody watches. pooling: what the model makes of prompts; None: it generates.

    Raises UnsupportedModelError, CheckpointError or QuireError when `config` cannot be served.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self._wakeup = threading.Event()  # set when a step that waits may find something to do
        self.notify = self._wakeup.set
        self.recorder: StepRecorder | None = None
        plugins = load_plugins(self.config.logits_processors, check=self.config.debug)  # a fault shows at once
        parts = load(self.config, self.notify)
        self.path = parts.path
        self.tokenizer = parts.tokenizer
        self.limits = parts.limits
        self.pool = parts.pool
        self.executor = parts.executor
        self.adapters = parts.adapters
        self.pooling = parts.executor.facts.pooling
        vision = parts.vision
        self.scheduler = Scheduler(
            self.config.scheduler,
            KVManager(parts.pool, parts.swap, parts.windows, parts.transfers),
            vision.features if vision else FeatureCache(self.config.media.feature_bytes if parts.rows_spec else 0),
            parts.executor.facts.feature_bytes,
            parts.adapter_budget,
            drafting_of(self.config.scheduler.speculative_config, parts.windows, self.limits.vocab_size),
            parts.executor.steps_at_once,
        )
        self._sleep = Sleep(parts.executor)
        self.lora = LoRAAdmin(parts.adapters, self.config, self._sleep)
        self.input_processor = InputProcessor(
            parts.limits,
            parts.tokenizer,
            parts.eos_ids,
            self.config.seed,
            vision.image_spec if vision else None,
            plugins,
            parts.executor.remote_grammars(),
            parts.rows_spec,
            self.pooling,
        )
        self.output_processor = OutputProcessor(parts.tokenizer)
        self.core = EngineCore(self.scheduler, parts.executor, self.lora)
        self.media = MediaArrivals(
            vision.preprocessor if vision else None,
            self.input_processor,
            self.core,
            self._start,
            MediaByUuid(self.config.media.pixel_bytes),
        )

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: object = None) -> LLMEngine:
        """An engine of `EngineArgs`. usage_context: vLLM's, for statistics that quire does not send."""
        return cls(engine_args.create_engine_config())

    # -- requests -------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: AnyParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> None:
        """Queue a request: a text, token ids, or a dict with 'prompt' or 'prompt_token_ids' and what belongs to it:
        'multi_modal_data' ({'image': one or a list}), 'mm_processor_kwargs', 'cache_salt'. lora_request: the adapter,
        or the mixture of adapters, that it runs with; one that is not loaded yet is loaded first, from its path.

        Raises RequestError, before anything is queued, when the request could never be served as given. What is wrong
        inside an image is found out by the workers; such a request ends with finish_reason "error". Images are read
        after this returns: leave arrays and PIL images as they are until the request has ended.
        """
        self.submit(self.read_request(request_id, prompt, params, lora_request))

    def read_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: AnyParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PreparedRequest:
        """The first half of `add_request`, which takes the time: any thread may call this. Raises RequestError."""
        begun = time.monotonic()
        self._sleep.check_awake()
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r}: must be a string")
        if params is None:
            params = SamplingParams() if self.pooling is None else PoolingParams()
        serial = next_serial()
        read = self.input_processor.read(request_id, prompt, params)
        if lora_request is None and self.pooling is not None and self.pooling.headless:
            raise RequestError(
                f"request {request_id}: this checkpoint has no head that gives classes: name an adapter that brings one"
            )
        if lora_request is not None:
            read = replace(read, adapters=self.lora.hold(serial, request_id, lora_request), lora=lora_request)
        return PreparedRequest(request_id, read, params, serial, begun, partial(self.lora.release, serial))

    def submit(self, prepared: PreparedRequest) -> None:
        """The second half: queue what was read. Raises RequestError while another request of its id is unfinished."""
        request_id = prepared.request_id
        try:
            self._sleep.check_awake()
            if request_id in self.core.requests or request_id in self.media.waiting:
                raise RequestError(f"request {request_id}: there is an unfinished request of this id")
            if prepared.prompt.images:
                self.media.add(prepared)
            else:
                self._start(prepared)
        except BaseException:
            prepared.discard()
            raise

    def _start(self, prepared: PreparedRequest, images: Sequence[ProcessedImage] = ()) -> None:
        """Queue a request whose images are ready. Raises RequestError."""
        request = self.input_processor.request(prepared, images)
        self.output_processor.add(request, prepared.prompt.stops)
        self.core.add(request)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests and free their blocks; unknown or finished ones are passed over. They yield no output."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            request = self.core.requests.get(request_id)
            if request is not None:
                self.core.abort(request)
                self.output_processor.discard(request)
            self.media.cancel(request_id)

    def has_unfinished_requests(self) -> bool:
        return bool(self.core.requests or self.media.waiting)

    def get_num_unfinished_requests(self) -> int:
        return len(self.core.requests) + len(self.media.waiting)

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self) -> list[AnyOutput]:
        """Plan, execute, commit; return an output for each request that has something new to show."""
        recorder = self.recorder
        if recorder is not None:
            recorder.begin()
        outputs = self._respond(self.core.finish_interrupted())
        self.media.take_ready()
        plan = self.core.schedule()
        if recorder is not None:
            recorder.planned(plan, self.scheduler)
        if self.core.is_idle(plan):
            self._wait_for_arrivals()
        execution = self.core.execute(plan)
        outputs += self._respond(self.core.finish_in_flight(plan, execution))
        outputs += self._respond(self.core.commit(plan, execution))
        self.media.reprocess(self.scheduler.encoder.take_images_to_reprocess())
        self.core.flush_transfers()
        if recorder is not None:
            recorder.end()
        if self.config.debug:
            self.check_integrity()
        return outputs

    def _wait_for_arrivals(self) -> None:
        """Nothing can be computed before an image, an adapter or blocks from beside the pool are ready."""
        self.media.reprocess(self.scheduler.encoder.take_images_to_reprocess())
        self.media.take_ready()
        reading = self.core.is_reading
        if (reading or self.media.is_busy or self.lora.is_reading) and not self.core.failed:
            self._wakeup.wait(_READ_SECONDS if reading else _POLL_SECONDS)
            self._wakeup.clear()  # not before: a call since the last step must not be slept over
            self.media.take_ready()

    def _respond(self, advanced: Sequence[SequenceState]) -> list[AnyOutput]:
        """The outputs of requests that have failed, and of those whose sequences have advanced."""
        if not advanced and not self.core.failed:
            return []
        requests = dict.fromkeys(self.core.take_failed())
        for sequence in advanced:
            request = sequence.request
            requests[request] = None
            if sequence.finish_reason == "error":  # its siblings go on to their own ends
                continue
            try:
                stop = self.output_processor.take(sequence)
                if stop is not None:
                    self.scheduler.stop_at(sequence, stop, self.output_processor.tokens_taken(sequence))
            except Exception as error:  # the others go on
                logger.exception("request %s", request.request_id)
                self.core.fail(request, error)
        outputs = []
        for request in requests:
            finished = request.finished
            if finished:
                self.core.retire(request)
            output = self.output_processor.output(request, finished)
            if output is not None:
                outputs.append(output)
        self.core.take_failed()  # by their text: they are among the outputs
        return outputs

    # -- adapters -------------------------------------------------------------------------------------------------

    def load_lora_adapter(
        self, name: str, path: str, load_inplace: bool = False, pinned: bool = False, lora_int_id: int | None = None
    ) -> LoadReport:
        """Load an adapter from a folder and let `name` stand for it. Any thread may call this, while others step.

        load_inplace: for a name that is taken. Requests that run finish on the version that they began with, new ones
        get the new. pinned: it stays in memory. Raises AdapterError: an adapter binds completely, or is refused.
        """
        return self.lora.load(name, path, load_inplace, pinned, lora_int_id)

    def unload_lora_adapter(self, name: str) -> int:
        """Forget an adapter: new requests cannot name it, and its memory goes once the last that holds it has ended.

        Returns a number for `freed_bytes`. Any thread may call this. Raises AdapterError.
        """
        return self.lora.unload(name)

    def freed_bytes(self, unloading: int, timeout: float = 0.0) -> int | None:
        """The bytes that an unloading gave back; None while requests hold it. Steps make progress, waiting does not."""
        return self.lora.freed_bytes(unloading, timeout)

    def pin_lora_adapter(self, name: str, pinned: bool = True) -> None:
        """Keep an adapter in memory, or no longer. Raises AdapterError."""
        self.lora.pin(name, pinned)

    def list_lora_adapters(self) -> list[AdapterInfo]:
        """All that are loaded. Raises AdapterError where none are served."""
        return [info for info, _ in self.lora.loaded()]

    # -- memory ---------------------------------------------------------------------------------------------------

    @property
    def is_sleeping(self) -> bool:
        """Any thread may ask."""
        return self._sleep.is_sleeping

    def sleep(self, level: int = 1) -> None:
        """Give back the memory of weights, KV blocks and images' features until `wake_up`; adapters stay.

        level: 1 or 2, vLLM's; both read the weights again. Meanwhile requests and adapters are refused with
        SleepingError. Raises RequestError while there are unfinished requests, or an adapter is being loaded, and
        CheckpointError where the weights could not be read again: it stays awake then.
        """
        unfinished = {request.arrival for request in self.core.requests.values()}
        unfinished |= {prepared.serial for prepared in self.media.waiting.values()}
        waiting = len(unfinished.union(self.lora.holders))  # some were read, and are not submitted yet
        if waiting:
            raise RequestError(f"{waiting} requests have not finished: let them, or abort them, before sleep().")
        if self.lora.is_reading:
            raise RequestError("an adapter is being read: try again when it is there.")
        self.core.finish_all()  # of requests that were aborted meanwhile
        self.core.flush_transfers()
        if self._sleep.sleep(level):
            self.scheduler.forget_cached()
            self.core.settle()

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Read the weights again and take the blocks' memory, or, of `tags`, "weights" and "kv_cache" alone.

        Raises CheckpointError where the files are gone or were changed, or memory does not suffice: it sleeps on then.
        """
        self._sleep.wake_up(tags)

    def reset_prefix_cache(self) -> bool:
        """Forget which blocks hold which beginnings of prompts; running requests keep theirs. True: it was done."""
        self.scheduler.kv.forget_cached()
        return True

    # -- for whoever watches --------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Gauges of this moment, and counts since the engine began. Any thread may call this."""
        return engine_stats(self.scheduler, self.adapters, len(self.media.waiting))

    def check_integrity(self) -> None:
        """Raise AssertionError unless all tables of the engine agree with each other."""
        self.scheduler.check_integrity()
        self.lora.check_integrity()
        self.output_processor.check_integrity(self.core.requests.values(), self.core.failed)

    def close(self) -> None:
        """Stop the workers; for when no step will come. KV blocks that are to be stored are written first."""
        self.core.finish_transfers()
        self.media.close()
        self.lora.close()
        self.executor.close()
