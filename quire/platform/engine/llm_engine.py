"""The engine: requests in, a step at a time, outputs out."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from quire.config import EngineConfig
from quire.config.engine_args import EngineArgs
from quire.errors import AdapterError, ContextLengthError, QuireError, RequestError
from quire.lora import AdapterInfo, AdapterRegistry, LoadReport, LoRARequest
from quire.multimodal import NoRoomError, ProcessedImage
from quire.platform.engine.builder import load, resolve_adapter
from quire.platform.engine.sleep import Sleep
from quire.platform.engine.stats import EngineStats, engine_stats
from quire.platform.execution.model_runner import Execution
from quire.platform.inputs.processor import InputProcessor, ProcessedPrompt, PromptType
from quire.platform.kv.manager import KVManager
from quire.platform.kv.prefix_index import feature_variant
from quire.platform.outputs.outputs import BeamSearchOutput, RequestOutput
from quire.platform.outputs.processor import OutputProcessor
from quire.platform.outputs.stop_strings import StopStrings
from quire.platform.sampling.params import BeamSearchParams, SamplingParams
from quire.platform.sampling.results import Failure
from quire.platform.scheduling.metrics import StepTimes
from quire.platform.scheduling.plan import Chunk, StepPlan, StepResult
from quire.platform.scheduling.request import MediaInput, Request, SequenceState, next_serial
from quire.platform.scheduling.scheduler import Scheduler

logger = logging.getLogger("quire")

# How long a step with nothing to compute waits for an image or an adapter to be ready.
_PATIENCE = 0.1  # seconds


@dataclass(eq=False)
class PreparedRequest:
    """A request that was read: checked as far as it can be before its images are looked at, its text made tokens.

    It holds its adapters: it must be given to `LLMEngine.submit`, or to `discard`.
    """

    request_id: str
    prompt: ProcessedPrompt
    params: SamplingParams | BeamSearchParams
    serial: int
    time: float


@dataclass(eq=False)
class ReprocessJob:
    """An image that is prepared once more, as its features were evicted before the request was done with them."""

    request: Request
    media: MediaInput


class LLMEngine:
    """Continuous batching over one block pool. Not thread-safe: one thread adds, aborts and steps, and others may call
    only what says so.

    Raises UnsupportedModelError, CheckpointError or QuireError when `config` cannot be served.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        self._bell = threading.Event()  # rung when a step that waits may find something to do
        parts = load(self.config, self._bell.set)
        self.path = parts.path
        self.tokenizer = parts.tokenizer
        self.limits = parts.limits
        self.pool = parts.pool
        self.runner = parts.runner
        self._sleep = Sleep(parts.runner.model, parts.runner, parts.path, self.config.model.load_format)
        eyes = parts.eyes
        self._preparer = eyes.preparer if eyes else None
        self.intake = InputProcessor(
            parts.limits, parts.tokenizer, parts.eos_ids, self.config.seed, eyes.sight if eyes else None
        )
        self.adapters = parts.adapters
        self.scheduler = Scheduler(
            self.config.scheduler,
            KVManager(parts.pool, parts.swap),
            eyes.features if eyes else None,
            eyes.feature_bytes if eyes else 0,
            parts.residency,
        )
        self._results = OutputProcessor(parts.tokenizer)
        self._reading = threading.Lock()  # while a request takes hold of its adapters, or lets go of them
        self._read: set[PreparedRequest] = set()  # that hold adapters and are not submitted yet
        self._arriving: dict[str, PreparedRequest] = {}
        self._requests: dict[str, Request] = {}
        self._failed: list[Request] = []
        self._flight: Execution | None = None  # a step that runs while the next is planned
        self._broken_off = False  # whether the last call of `step` ended by an exception

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs, usage_context: object = None) -> LLMEngine:
        """An engine of `EngineArgs`. usage_context: vLLM's, for statistics that quire does not send."""
        return cls(engine_args.create_engine_config())

    def add_request(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | BeamSearchParams | None = None,
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
        params: SamplingParams | BeamSearchParams | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PreparedRequest:
        """The first half of `add_request`, which takes the time: any thread may call this. Raises RequestError."""
        begun = time.monotonic()
        self._sleep.check_awake()
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r}: must be a string")
        params = SamplingParams() if params is None else params
        serial = next_serial()
        read = self.intake.read(request_id, prompt, params)
        if lora_request is None:
            return PreparedRequest(request_id, read, params, serial, begun)
        self._load_adapters(request_id, lora_request)
        with self._reading:
            arrival = PreparedRequest(
                request_id, self._with_adapters(request_id, read, lora_request), params, serial, begun
            )
            self._read.add(arrival)
        return arrival

    def submit(self, arrival: PreparedRequest) -> None:
        """The second half: queue what was read. Raises RequestError while another request of its id is unfinished."""
        request_id, read = arrival.request_id, arrival.prompt
        try:
            self._sleep.check_awake()
            if request_id in self._requests or request_id in self._arriving:
                raise RequestError(f"request {request_id}: there is an unfinished request of this id")
            if not read.images:
                self._start(self._request_of(arrival), read.stops)
            else:
                assert self._preparer is not None
                variant = feature_variant(read.adapters, read.salt)
                self._preparer.submit(arrival, read.images, read.settings, room=self.intake.room(read), variant=variant)
                self._arriving[request_id] = arrival
            self._read.discard(arrival)
        except BaseException:
            self.discard(arrival)
            raise

    def discard(self, arrival: PreparedRequest) -> None:
        """Let go of a request that was read and will not be submitted. Any thread may call this."""
        with self._reading:
            self._read.discard(arrival)
            self._release_adapters(arrival.prompt)

    def wake(self) -> None:
        """Let a step that waits for an image or an adapter return. Any thread may call this."""
        self._bell.set()

    def _load_adapters(self, request_id: str, wanted: LoRARequest) -> None:
        """Have what a request names loaded."""
        if not isinstance(wanted, LoRARequest):
            raise RequestError(f"request {request_id}: lora_request must be a LoRARequest, not {wanted!r}")
        if self.adapters is None:
            raise RequestError(f"request {request_id}: lora_request was given, and enable_lora is not set")
        try:
            self.load_for(wanted)
        except QuireError as error:
            raise RequestError(f"request {request_id}: {error}") from error

    def _with_adapters(self, request_id: str, prompt: ProcessedPrompt, wanted: LoRARequest) -> ProcessedPrompt:
        """The prompt with the versions that it runs with, held from here on."""
        try:
            return replace(prompt, adapters=self._library().acquire(wanted), lora=wanted)
        except QuireError as error:
            raise RequestError(f"request {request_id}: {error}") from error

    def _release_adapters(self, prompt: ProcessedPrompt) -> None:
        if self.adapters is not None and prompt.adapters:
            self.adapters.release(prompt.adapters)

    def load_for(self, wanted: LoRARequest) -> None:
        """Load what a request names by its path, unless it is loaded and the request does not want it loaded again.

        Any thread may call this.
        """
        if wanted.load_inplace and wanted.lora_path is not None:
            self.load_lora_adapter(wanted.lora_name, wanted.lora_path, True, lora_int_id=wanted.lora_int_id)
        with self._sleep.awake():
            self._library().ensure(wanted, self._adapter_folder)

    def _adapter_folder(self, path: str) -> Path:
        return resolve_adapter(path, self.config.lora, self.config.model)

    def check_mixture(self, wanted: LoRARequest) -> None:
        """Whether a mixture's adapters are there and can be mixed. Any thread may call this. Raises QuireError."""
        library = self._library()
        with self._reading:
            library.release(library.acquire(wanted))

    def load_lora_adapter(
        self, name: str, path: str, load_inplace: bool = False, pinned: bool = False, lora_int_id: int | None = None
    ) -> LoadReport:
        """Load an adapter from a folder and let `name` stand for it. Any thread may call this, while others step.

        load_inplace: for a name that is taken. Requests that run finish on the version that they began with, new ones
        get the new. pinned: it stays in memory. Raises AdapterError: an adapter binds completely, or is refused.
        """
        with self._sleep.awake():
            return self._library().load(name, self._adapter_folder(path), load_inplace, pinned, lora_int_id, path)

    def unload_lora_adapter(self, name: str) -> int:
        """Forget an adapter: new requests cannot name it, and its memory goes once the last that holds it has ended.

        Returns a number for `freed_bytes`. Any thread may call this. Raises AdapterError.
        """
        return self._library().unload(name)

    def freed_bytes(self, unloading: int, timeout: float = 0.0) -> int | None:
        """The bytes that an unloading gave back; None while requests hold it. Steps make progress, waiting does not."""
        return self._library().freed(unloading, timeout)

    def pin_lora_adapter(self, name: str, pinned: bool = True) -> None:
        """Keep an adapter in memory, or no longer. Raises AdapterError."""
        self._library().pin(name, pinned)

    def list_lora_adapters(self) -> list[AdapterInfo]:
        return self._library().loaded()

    def _library(self) -> AdapterRegistry:
        if self.adapters is None:
            raise AdapterError("no adapters are served: enable_lora is not set.")
        return self.adapters

    def settle_adapters(self) -> None:
        """Do what a step does about adapters, where none will come: free those that were unloaded."""
        if self.adapters is not None:
            self._prepare(self.scheduler.plan_upkeep())

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
        waiting = self.get_num_unfinished_requests() + len(self._read)
        if waiting:
            raise RequestError(f"{waiting} requests have not finished: let them, or abort them, before sleep().")
        if self.adapters is not None and self.adapters.reading:
            raise RequestError("an adapter is being read: try again when it is there.")
        self._land()  # of requests that were aborted while it flew
        if self._sleep.sleep(level):
            self.scheduler.forget_cached()
            self._prepare(self.scheduler.plan_upkeep())

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Read the weights again and take the blocks' memory, or, of `tags`, "weights" and "kv_cache" alone.

        Raises CheckpointError where the files are gone or were changed, or memory does not suffice: it sleeps on then.
        """
        self._sleep.wake_up(tags)

    def reset_prefix_cache(self) -> bool:
        """Forget which blocks hold which beginnings of prompts; running requests keep theirs. True: it was done."""
        self.scheduler.kv.forget_cached()
        return True

    def _start(self, request: Request, stops: StopStrings | None) -> None:
        self._results.add(request, stops)
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests and free their blocks; unknown or finished ones are passed over. They yield no output."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            request, arrival = self._requests.get(request_id), self._arriving.pop(request_id, None)
            if request is not None:
                self.scheduler.end(request, "abort")
                self._results.discard(request)
                self._forget(request)
            if arrival is not None and self._preparer is not None:
                self._preparer.cancel(arrival)
                self._release_adapters(arrival.prompt)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests or self._arriving)

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests) + len(self._arriving)

    @property
    def num_arriving(self) -> int:
        """Requests whose images are being prepared."""
        return len(self._arriving)

    @property
    def times(self) -> StepTimes:
        """Of the last step."""
        return self.scheduler.times

    def stats(self) -> EngineStats:
        """Gauges of this moment, and counts since the engine began. Any thread may call this."""
        return engine_stats(self.scheduler, self.adapters, len(self._arriving))

    def close(self) -> None:
        """Stop the workers; for when no step will come."""
        if self._preparer is not None:
            self._preparer.close()
        if self.adapters is not None:
            self.adapters.close()

    def step(self) -> list[RequestOutput | BeamSearchOutput]:
        """Plan, execute, commit; return an output for each request that has something new to show.

        On a GPU a step is committed once the next one has been started behind it, where that can be planned without
        knowing its tokens: the GPU never waits for Python then.
        """
        outputs: list[RequestOutput | BeamSearchOutput] = []
        if self._broken_off:  # what flies must land first: the runner may have started something behind it
            outputs += self._respond(self._land())
        self._broken_off = True
        self._take_prepared()
        plan = self.scheduler.plan()
        self._fail_without_adapters()
        if not plan.chunks and self._flight is None:
            self._wait()
        self._prepare(plan)
        execution = self._begin(plan)
        outputs += self._respond(self._land())
        advanced: list[SequenceState] = []
        if execution is not None and execution.known_there:
            self.scheduler.advance_early(plan)
            self._flight = execution
        elif plan.chunks:
            advanced = self.scheduler.commit(*self._finish(plan, execution))
        self._prepare_again()
        if self.config.debug:
            self.check_integrity()
        outputs += self._respond(advanced)
        self._broken_off = False
        return outputs

    def check_integrity(self) -> None:
        """Raise AssertionError unless all tables of the engine agree with each other."""
        self.scheduler.check_integrity()
        if self.adapters is not None:
            running = [request.adapters for request in self._requests.values() if request.holds_adapters]
            failed = [request.adapters for request in self._failed if request.holds_adapters]
            with self._reading:
                arriving = [arrival.prompt.adapters for arrival in (*self._arriving.values(), *self._read)]
                self.adapters.check_integrity([*running, *failed, *arriving])

    def _wait(self) -> None:
        """Nothing can be computed before an image or an adapter is ready."""
        if self._preparer is not None:
            self._prepare_again()
            self._take_prepared()
        coming = (self._preparer is not None and self._preparer.busy) or (
            self.adapters is not None and self.adapters.reading
        )
        if coming and not self._failed:
            self._bell.wait(_PATIENCE)
            self._bell.clear()  # not before: what rang since the last step must not be slept over
            self._take_prepared()

    def _fail_without_adapters(self) -> None:
        """End the requests whose adapters have gone for good."""
        for request, error in self.scheduler.take_failed():
            if request.request_id in self._requests:
                self._fail(request, AdapterError(f"request {request.request_id}: {error}"))

    def _take_prepared(self) -> None:
        """Queue the requests whose images are ready."""
        if self._preparer is None:
            return
        for job, result in self._preparer.done():
            if isinstance(job, ReprocessJob):
                self._see_again(job, result)
            elif isinstance(job, PreparedRequest) and self._arriving.get(job.request_id) is job:
                del self._arriving[job.request_id]
                self._admit(job, result)

    def _request_of(self, arrival: PreparedRequest, images: Sequence[ProcessedImage] = ()) -> Request:
        request = self.intake.request(arrival.request_id, arrival.prompt, arrival.params, images)
        request.arrived(arrival.serial, arrival.time)
        return request

    def _admit(self, arrival: PreparedRequest, images: list[ProcessedImage] | RequestError) -> None:
        try:
            if isinstance(images, NoRoomError):
                limit = self.intake.limits.max_model_len
                raise ContextLengthError(
                    limit, limit - images.room + images.tokens, request_id=arrival.request_id, at_least=True,
                    hint=f": {images}",
                )  # fmt: skip
            if isinstance(images, RequestError):
                raise RequestError(f"request {arrival.request_id}: {images}")
            self._start(self._request_of(arrival, images), arrival.prompt.stops)
            return
        except RequestError as reason:
            failure = Failure(str(reason), by_caller=True, code=getattr(reason, "code", None))
        except Exception as reason:  # a fault of ours: the others that are ready must not be lost with it
            # As text: the record of a traceback would keep the images.
            logger.error("request %s fails:\n%s", arrival.request_id, traceback.format_exc())
            failure = Failure(f"{type(reason).__name__}: {reason}", by_caller=False)
        request = self.intake.unserved(arrival.request_id, arrival.prompt, arrival.params)
        request.arrived(arrival.serial, arrival.time)
        self.scheduler.fail(request, failure)
        self._failed.append(request)

    def _prepare_again(self) -> None:
        for request, media in self.scheduler.take_images_to_reprocess():
            assert self._preparer is not None
            place = request.media.index(media)
            variant = feature_variant(request.adapters, request.salt)
            again = ReprocessJob(request, media)
            self._preparer.submit(again, [media.source], media.settings, urgent=True, first=place, variant=variant)

    def _see_again(self, job: ReprocessJob, result: list[ProcessedImage] | RequestError) -> None:
        if self._requests.get(job.request.request_id) is not job.request:
            return
        if not isinstance(result, RequestError) and result[0].digest == job.media.item.digest:
            job.media.restore(result[0].pixels)
            return
        job.media.restore(None)
        place = job.request.media.index(job.media)
        what = result if isinstance(result, RequestError) else f"image {place} has changed since it was given"
        self._fail(job.request, RequestError(f"request {job.request.request_id}: {what}"))

    def _begin(self, plan: StepPlan) -> Execution | None:
        """Start a plan; None when there is nothing to start, or it fails."""
        try:
            return self.runner.execute(plan) if plan.chunks else None
        except Exception:
            logger.exception("a step failed; its sequences are now run one by one")
            return None

    def _finish(self, plan: StepPlan, execution: Execution | None) -> tuple[StepPlan, StepResult]:
        """Wait for a plan. If it failed, run its chunks one by one, so that only the culprits' requests end."""
        if execution is not None:
            try:
                return plan, execution.result()
            except Exception:
                logger.exception("a step failed; its sequences are now run one by one")
        return self._execute_one_by_one(plan)

    def _land(self) -> list[SequenceState]:
        """Commit the step that was counted ahead, if there is one.

        It cannot be run again: what was started behind it reads its tokens.
        """
        flight = self._flight
        if flight is None:
            return []
        try:
            result = flight.result()  # an interrupt here leaves it flying
            self._flight = None
            return self.scheduler.commit(flight.plan, result)
        except Exception as error:
            self._flight = None
            logger.exception("a step failed, and its requests with it")
            self.scheduler.abandon(flight.plan)
            for chunk in flight.plan.chunks:
                request = self._owner_of(chunk.sequence_id)
                if request is not None:
                    self._fail(request, error)
            return []

    def _prepare(self, plan: StepPlan) -> None:
        self.runner.prepare(plan)
        if self.adapters is not None and plan.drop:
            self.adapters.unclaim(uid for uid in plan.drop if uid not in plan.install)

    def _execute_one_by_one(self, plan: StepPlan) -> tuple[StepPlan, StepResult]:
        good: list[Chunk] = []
        results: list[StepResult] = []
        for planned in plan.chunks:
            request = self._owner_of(planned.sequence_id)
            chunk = self.scheduler.as_known(planned)
            if request is None or chunk is None:  # another of its sequences has failed, or it has ended meanwhile
                continue
            shown = {item.digest for item in chunk.media}
            images = [image for image in plan.encode if image.digest in shown]
            try:
                results.append(self.runner.execute(StepPlan([chunk], (), encode=images)).result())
                good.append(chunk)
            except Exception as error:
                self.scheduler.forget_features(image.digest for image in images)
                self._fail(request, error)
        seen = {item.digest for chunk in good for item in chunk.media}
        self.scheduler.forget_features(image.digest for image in plan.encode if image.digest not in seen)
        result = StepResult([r.sampled[0] for r in results], [r.scores[0] for r in results])
        return StepPlan(good, (), encode=plan.encode), result

    def _owner_of(self, sequence_id: int) -> Request | None:
        requests = self._requests.values()
        return next((r for r in requests if any(s.id == sequence_id for s in r.sequences)), None)

    def _fail(self, request: Request, error: Exception) -> None:
        logger.error("request %s fails: %r", request.request_id, error)
        failure = Failure(f"{type(error).__name__}: {error}", by_caller=isinstance(error, RequestError))
        self.scheduler.fail(request, failure)
        self._forget(request)
        self._failed.append(request)

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        held = request.release_adapters()
        if held and self.adapters is not None:
            self.adapters.release(held)

    def _respond(self, advanced: Iterable[SequenceState]) -> list[RequestOutput | BeamSearchOutput]:
        requests = {request.request_id: request for request in self._failed}
        self._failed.clear()
        for sequence in advanced:
            if sequence.request.failure is None:
                self._guarded(sequence.request, partial(self._detokenize, sequence))
            requests[sequence.request.request_id] = sequence.request
        outputs = []
        for request in requests.values():
            if request.finished:
                self._forget(request)
            output = self._results.output(request)
            if output is not None:
                outputs.append(output)
        self._failed.clear()
        return outputs

    def _guarded(self, request: Request, work: Callable[[], None]) -> None:
        """Do something for one request; if it fails, the others go on."""
        try:
            work()
        except Exception as error:
            logger.exception("request %s", request.request_id)
            self._fail(request, error)

    def _detokenize(self, sequence: SequenceState) -> None:
        """Turn a sequence's newest token into text; a stop string may end it."""
        stop = self._results.take(sequence)
        if stop is not None:
            self.scheduler.stop_at(sequence, stop)
