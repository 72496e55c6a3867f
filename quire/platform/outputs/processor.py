"""From a request's state to what its caller gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from quire.platform.outputs.detokenizer import Detokenizer, decode_token
from quire.platform.outputs.outputs import CompletionOutput, Logprob, RequestOutput
from quire.platform.sampling.params import RequestOutputKind, SamplingParams
from quire.platform.sampling.results import TopLogprobs
from quire.platform.scheduling.beam import BeamGroup, BeamSearchOutput, BeamSearchSequence, Hypothesis
from quire.platform.scheduling.request import Request, SequenceState


def beams_as_output(tokenizer: Any, output: BeamSearchOutput) -> RequestOutput:
    """A beam search's result as `generate` returns it: its sequences, without the prompt, best first."""
    prompt_ids = output.prompt_token_ids
    completions = []
    for index, beam in enumerate(output.sequences):
        detokenizer = Detokenizer(tokenizer, prompt_ids, SamplingParams())
        tokens = beam.tokens[len(prompt_ids) :]
        for token in tokens:
            detokenizer.append(token)
        detokenizer.finish()
        completions.append(
            CompletionOutput(
                index=index,
                text=detokenizer.text,
                token_ids=tokens,
                cumulative_logprob=beam.cum_logprob,
                logprobs=beam.logprobs,
                finish_reason="stop" if beam.finish_reason == "stop" else "length",
                stop_reason=beam.stop_reason,
            )
        )
    if output.failure is not None and not completions:
        completions = [CompletionOutput(0, "", [], finish_reason="error", stop_reason=str(output.failure))]
    return RequestOutput(
        request_id=output.request_id,
        prompt=output.prompt,
        prompt_token_ids=prompt_ids,
        outputs=completions,
        finished=True,
        lora_request=output.lora_request,
        failure=output.failure,
    )


class OutputProcessor:
    """Makes outputs."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def output(self, request: Request) -> RequestOutput | BeamSearchOutput | None:
        """The request's output after a step; None while a FINAL_ONLY request or a beam search goes on."""
        kind = request.params.output_kind
        finished = request.finished
        if request.beam is not None:
            return self._beams(request, request.beam) if finished else None
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        scores = None
        started = kind is RequestOutputKind.DELTA and any(s.sent != (0, 0) for s in request.sequences)
        if request.params.prompt_logprobs is not None and not started:
            scores = self._prompt_logprobs(request)
        metrics = dataclasses.replace(request.metrics)
        if finished:
            metrics.num_generation_tokens = sum(len(sequence.output_ids) for sequence in request.sequences)
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.shown_ids,
            prompt_logprobs=scores,
            outputs=self._completions(request, kind),
            finished=finished,
            metrics=metrics,
            num_cached_tokens=request.metrics.num_cached_tokens,
            lora_request=request.lora,
            failure=request.failure,
        )

    def _beams(self, request: Request, group: BeamGroup) -> BeamSearchOutput:
        return BeamSearchOutput(
            request.request_id,
            [self._beam(h) for h in group.ended],
            request.shown_ids,
            request.failure,
            request.prompt,
            request.lora,
        )

    def _completions(self, request: Request, kind: RequestOutputKind) -> list[CompletionOutput]:
        made = [self._completion(sequence, kind) for sequence in request.sequences]
        if not request.params.greedy or request.params.n == 1:
            return made
        (one,) = made  # nothing is drawn, so all n are equal: one was computed
        return [_copied(one, index) for index in range(request.params.n)]

    def _completion(self, sequence: SequenceState, kind: RequestOutputKind) -> CompletionOutput:
        tokens, logprobs = sequence.output_ids, sequence.logprobs
        finished = sequence.finish_reason is not None
        text = sequence.detokenizer.emittable(finished) if sequence.detokenizer else ""
        first = 0
        if kind is RequestOutputKind.DELTA:
            first, characters = sequence.sent
            sequence.sent = (len(tokens), len(text))
            text = text[characters:]
        wants_logprobs = sequence.request.params.logprobs is not None
        return CompletionOutput(
            index=sequence.index,
            text=text,
            token_ids=tokens[first:],
            cumulative_logprob=sequence.cumulative_logprob if wants_logprobs else None,
            logprobs=[self._logprobs(t) for t in logprobs[first:]] if wants_logprobs else None,
            finish_reason=sequence.finish_reason,
            stop_reason=str(sequence.request.failure) if sequence.finish_reason == "error" else sequence.stop_reason,
        )

    def _prompt_logprobs(self, request: Request) -> Sequence[dict[int, Logprob] | None]:
        return [None if top is None else self._logprobs(top) for top in request.prompt_scores]

    def _logprobs(self, top: TopLogprobs) -> dict[int, Logprob]:
        return {
            token: Logprob(value, rank, decode_token(self.tokenizer, token) if self.tokenizer else None)
            for token, value, rank in top.ranked()
        }

    def _beam(self, hypothesis: Hypothesis) -> BeamSearchSequence:
        text = self.tokenizer.decode(hypothesis.token_ids) if self.tokenizer is not None else None
        return BeamSearchSequence(
            tokens=hypothesis.token_ids,
            logprobs=[self._logprobs(top) for top in hypothesis.logprobs],
            cum_logprob=hypothesis.cum_logprob,
            text=text,
            finish_reason="length" if hypothesis.stop_reason is None else "stop",
            stop_reason=hypothesis.stop_reason,
        )


def _copied(output: CompletionOutput, index: int) -> CompletionOutput:
    """The same as another choice, with lists of its own."""
    logprobs = None if output.logprobs is None else list(output.logprobs)
    return dataclasses.replace(output, index=index, token_ids=list(output.token_ids), logprobs=logprobs)
