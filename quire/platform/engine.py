"""The engine: requests in, a step at a time, outputs out."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from quire.config import EngineConfig
from quire.errors import RequestError
from quire.platform.beam import BeamSearchOutput
from quire.platform.detokenizer import Detokenizer
from quire.platform.intake import Intake, PromptType
from quire.platform.loading import load
from quire.platform.outputs import RequestOutput
from quire.platform.plan import Chunk, StepPlan, StepResult
from quire.platform.request import FinishReason, Request, SequenceState
from quire.platform.results import Results
from quire.platform.sampling_params import BeamSearchParams, SamplingParams
from quire.platform.scheduler import Scheduler

logger = logging.getLogger("quire")


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
        self.intake = Intake(parts.limits, parts.tokenizer, parts.eos_ids, self.config.seed)
        self.scheduler = Scheduler(self.config.scheduler, parts.pool)
        self._results = Results(parts.tokenizer)
        self._requests: dict[str, Request] = {}
        self._failed: list[Request] = []

    def add_request(
        self, request_id: str, prompt: PromptType, params: SamplingParams | BeamSearchParams | None = None
    ) -> None:
        """Queue a request: a text, token ids, or a dict with 'prompt' or 'prompt_token_ids' (and 'cache_salt').

        Raises RequestError, before anything is queued, when the request could never be served as given.
        """
        if not isinstance(request_id, str):
            raise RequestError(f"request_id={request_id!r}: must be a string")
        if request_id in self._requests:
            raise RequestError(f"request {request_id}: there is an unfinished request of this id")
        if isinstance(params, BeamSearchParams):
            request = self.intake.beam_request(request_id, prompt, params)
        else:
            request = self.intake.request(request_id, prompt, SamplingParams() if params is None else params)
        detokenizer = None
        if self.tokenizer is not None and request.params.detokenize:
            detokenizer = Detokenizer(self.tokenizer, request.prompt_ids, request.params)
        request.sequences.append(SequenceState(request, 0, detokenizer))
        self._requests[request_id] = request
        self.scheduler.add(request.sequences[0])

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests and free their blocks; unknown or finished ones are passed over. They yield no output."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request, "abort")

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        return len(self._requests)

    def step(self) -> list[RequestOutput | BeamSearchOutput]:
        """Plan, execute, commit; return an output for each request that has something new to show."""
        plan = self.scheduler.plan()
        plan, result = self._execute(plan)
        advanced = self.scheduler.commit(plan, result)
        if self.config.debug:
            self.check_integrity()
        return self._respond(advanced)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all tables of the engine agree with each other."""
        self.scheduler.check_integrity()

    def _execute(self, plan: StepPlan) -> tuple[StepPlan, StepResult]:
        """Run a plan. If it fails, run its chunks one by one, so that only the culprits' requests end."""
        if not plan.chunks:
            return plan, StepResult((), ())
        self.runner.prepare(plan)
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
            try:
                results.append(self.runner.execute(StepPlan([chunk], ())))
                good.append(chunk)
            except Exception as error:
                self._fail(request, error)
        return StepPlan(good, ()), StepResult([r.sampled[0] for r in results], [r.scores[0] for r in results])

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
