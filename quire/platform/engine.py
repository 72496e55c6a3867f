"""The engine: requests in, a step at a time, outputs out."""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.config import EngineConfig
from quire.errors import RequestError
from quire.multimodal import Prepared
from quire.platform.beam import BeamSearchOutput
from quire.platform.detokenizer import Detokenizer
from quire.platform.intake import Intake, Prompt, PromptType
from quire.platform.loading import load
from quire.platform.outputs import RequestOutput
from quire.platform.plan import Chunk, StepPlan, StepResult
from quire.platform.request import FinishReason, Media, Request, SequenceState, next_serial
from quire.platform.results import Results
from quire.platform.sampling_params import BeamSearchParams, SamplingParams
from quire.platform.scheduler import Scheduler

logger = logging.getLogger("quire")

# How long a step with nothing to compute waits for an image to be ready.
_PATIENCE = 0.1  # seconds


@dataclass(eq=False)
class _Arrival:
    """A request whose images are being prepared."""

    request_id: str
    prompt: Prompt
    params: SamplingParams | BeamSearchParams
    serial: int = field(default_factory=next_serial)
    time: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class _Again:
    """An image that is prepared once more, as its features were evicted before the request was done with them."""

    request: Request
    media: Media


class LLMEngine:
    """Continuous batching over one block pool. Not thread-safe: one thread adds, aborts and steps.

    Raises UnsupportedModelError, CheckpointError or QuireError when `config` cannot be served.
    """

    def __init__(self, config: EngineConfig | None = None) -> None:
        self.config = config or EngineConfig()
        parts = load(self.config)
        self.path = parts.path
        self.tokenizer = parts.tokenizer
        self.limits = parts.limits
        self.pool = parts.pool
        self.runner = parts.runner
        eyes = parts.eyes
        self._preparer = eyes.preparer if eyes else None
        self.intake = Intake(
            parts.limits, parts.tokenizer, parts.eos_ids, self.config.seed, eyes.sight if eyes else None
        )
        self.scheduler = Scheduler(
            self.config.scheduler, parts.pool, eyes.features if eyes else None, eyes.feature_bytes if eyes else 0
        )
        self._results = Results(parts.tokenizer)
        self._arriving: dict[str, _Arrival] = {}
        self._requests: dict[str, Request] = {}
        self._failed: list[Request] = []

    def add_request(
        self, request_id: str, prompt: PromptType, params: SamplingParams | BeamSearchParams | None = None
    ) -> None:
        """Queue a request: a text, token ids, or a dict with 'prompt' or 'prompt_token_ids' and what belongs to it:
        'multi_modal_data' ({'image': one or a list}), 'mm_processor_kwargs', 'cache_salt'.

        Raises RequestError, before anything is queued, when the request could never be served as given. What is wrong
        inside an image is found out by the workers; such a request ends with finish_reason "error". Images are read
        after this returns: leave arrays and PIL images as they are until the request has ended.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r}: must be a string")
        if request_id in self._requests or request_id in self._arriving:
            raise RequestError(f"request {request_id}: there is an unfinished request of this id")
        params = SamplingParams() if params is None else params
        read = self.intake.read(request_id, prompt, params)
        if not read.images:
            self._start(self.intake.request(request_id, read, params))
            return
        assert self._preparer is not None
        arrival = self._arriving[request_id] = _Arrival(request_id, read, params)
        self._preparer.submit(arrival, read.images, read.settings, room=self.intake.room(read))

    def _start(self, request: Request) -> None:
        detokenizer = None
        if self.tokenizer is not None and request.params.detokenize:
            detokenizer = Detokenizer(self.tokenizer, request.prompt_ids, request.params)
        request.sequences.append(SequenceState(request, 0, detokenizer))
        self._requests[request.request_id] = request
        self.scheduler.add(request.sequences[0])

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests and free their blocks; unknown or finished ones are passed over. They yield no output."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            request, arrival = self._requests.get(request_id), self._arriving.pop(request_id, None)
            if request is not None:
                self._end(request, "abort")
            if arrival is not None and self._preparer is not None:
                self._preparer.cancel(arrival)

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests or self._arriving)

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests) + len(self._arriving)

    def step(self) -> list[RequestOutput | BeamSearchOutput]:
        """Plan, execute, commit; return an output for each request that has something new to show."""
        self._take_prepared(0.0)
        plan = self.scheduler.plan()
        if not plan.chunks and self._preparer is not None:
            self._prepare_again()
            self._take_prepared(_PATIENCE)
        plan, result = self._execute(plan)
        advanced = self.scheduler.commit(plan, result)
        self._prepare_again()
        if self.config.debug:
            self.check_integrity()
        return self._respond(advanced)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all tables of the engine agree with each other."""
        self.scheduler.check_integrity()

    def _take_prepared(self, patience: float) -> None:
        """Queue the requests whose images are ready, waiting at most so many seconds for the first."""
        if self._preparer is None:
            return
        for job, result in self._preparer.done(patience):
            if isinstance(job, _Again):
                self._see_again(job, result)
            elif isinstance(job, _Arrival) and self._arriving.get(job.request_id) is job:
                del self._arriving[job.request_id]
                self._admit(job, result)

    def _admit(self, arrival: _Arrival, images: list[Prepared] | RequestError) -> None:
        try:
            if isinstance(images, RequestError):
                raise RequestError(f"request {arrival.request_id}: {images}")
            request = self.intake.request(arrival.request_id, arrival.prompt, arrival.params, images)
            request.arrival, request.metrics.arrival_time = arrival.serial, arrival.time
            self._start(request)
            return
        except RequestError as reason:
            error = str(reason)
        except Exception as reason:  # a fault of ours: the others that are ready must not be lost with it
            # As text: the record of a traceback would keep the images.
            logger.error("request %s fails:\n%s", arrival.request_id, traceback.format_exc())
            error = f"{type(reason).__name__}: {reason}"
        request = self.intake.unserved(arrival.request_id, arrival.prompt, arrival.params)
        request.metrics.arrival_time = arrival.time
        request.sequences.append(SequenceState(request, 0, None))
        request.sequences[0].finish_reason, request.error = "error", error
        self._failed.append(request)

    def _prepare_again(self) -> None:
        wanted, self.scheduler.wanted = self.scheduler.wanted, []
        for request, media in wanted:
            assert self._preparer is not None
            place = request.media.index(media)
            self._preparer.submit(_Again(request, media), [media.source], media.settings, urgent=True, first=place)

    def _see_again(self, job: _Again, result: list[Prepared] | RequestError) -> None:
        if self._requests.get(job.request.request_id) is not job.request:
            return
        job.media.wanted = False
        if not isinstance(result, RequestError) and result[0].digest == job.media.item.digest:
            job.media.pixels = result[0].pixels
            return
        place = job.request.media.index(job.media)
        what = result if isinstance(result, RequestError) else f"image {place} has changed since it was given"
        self._fail(job.request, RequestError(f"request {job.request.request_id}: {what}"))

    def _execute(self, plan: StepPlan) -> tuple[StepPlan, StepResult]:
        """Run a plan. If it fails, run its chunks one by one, so that only the culprits' requests end."""
        self.runner.prepare(plan)
        if not plan.chunks:
            return plan, StepResult((), ())
        try:
            return plan, self.runner.execute(plan)
        except Exception:
            logger.exception("a step failed; its sequences are now run one by one")
        return self._execute_one_by_one(plan)

    def _execute_one_by_one(self, plan: StepPlan) -> tuple[StepPlan, StepResult]:
        good: list[Chunk] = []
        results: list[StepResult] = []
        for chunk in plan.chunks:
            request = self._request_of(chunk.sequence_id)
            if request is None:  # another of its sequences has failed
                continue
            shown = {item.digest for item in chunk.media}
            images = [image for image in plan.encode if image.digest in shown]
            try:
                results.append(self.runner.execute(StepPlan([chunk], (), encode=images)))
                good.append(chunk)
            except Exception as error:
                self.scheduler.forget_features(image.digest for image in images)
                self._fail(request, error)
        result = StepResult([r.sampled[0] for r in results], [r.scores[0] for r in results])
        return StepPlan(good, (), encode=plan.encode), result

    def _request_of(self, sequence_id: int) -> Request | None:
        requests = self._requests.values()
        return next((r for r in requests if any(s.id == sequence_id for s in r.sequences)), None)

    def _fail(self, request: Request, error: Exception) -> None:
        logger.error("request %s fails: %r", request.request_id, error)
        request.error = f"{type(error).__name__}: {error}"
        self._end(request, "error")
        self._failed.append(request)

    def _end(self, request: Request, reason: FinishReason) -> None:
        for sequence in request.sequences:
            self.scheduler.finish(sequence, reason)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        request.metrics.finished_time = time.monotonic()
        self._requests.pop(request.request_id, None)
        for media in request.media:  # which would count until the garbage collector comes
            media.pixels = None

    def _respond(self, advanced: Iterable[SequenceState]) -> list[RequestOutput | BeamSearchOutput]:
        requests = {request.request_id: request for request in self._failed}
        self._failed.clear()
        for sequence in advanced:
            self._detokenize(sequence)
            requests[sequence.request.request_id] = sequence.request
        outputs = []
        for request in requests.values():
            if request.finished:
                self._forget(request)
            output = self._results.output(request)
            if output is not None:
                outputs.append(output)
        return outputs

    def _detokenize(self, sequence: SequenceState) -> None:
        """Turn a sequence's newest token into text; a stop string may end it."""
        detokenizer = sequence.detokenizer
        if detokenizer is None or sequence.finish_reason == "error":
            return
        if sequence.finish_reason != "stop" or sequence.request.params.include_stop_str_in_output:
            stop = detokenizer.append(sequence.output_ids[-1])
            if stop is not None:
                sequence.finish_reason, sequence.stop_reason = "stop", stop
                self.scheduler.finish(sequence, "stop")
        if sequence.finish_reason is not None:
            detokenizer.finish()
