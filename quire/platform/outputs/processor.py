"""From a request's state to what its caller gets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from quire.platform.outputs.detokenizer import Detokenizer, decode_token
from quire.platform.outputs.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Logprob,
    RequestOutput,
)
from quire.platform.outputs.stop_strings import StopStrings
from quire.platform.sampling.params import RequestOutputKind, SamplingParams
from quire.platform.sampling.results import TopLogprobs
from quire.platform.scheduling.beam import BeamGroup, Hypothesis
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


class _SequenceText:
    """What has become of one sequence's tokens: their text, and what of it was handed out.

    sent: tokens and characters, of a request that streams what is new.
    """

    __slots__ = ("_detokenizer", "_taken", "sent")

    def __init__(self, detokenizer: Detokenizer | None) -> None:
        self._detokenizer = detokenizer
        self._taken = 0  # tokens that the detokenizer has, or need not have
        self.sent = (0, 0)

    def take(self, sequence: SequenceState) -> str | None:
        """Turn the sequence's new tokens into text. Returns the stop string that ends it, if there is one."""
        detokenizer = self._detokenizer
        if detokenizer is None or sequence.finish_reason == "error":
            return None
        tokens = sequence.output_ids
        end = len(tokens)
        if sequence.finish_reason == "stop" and not sequence.request.params.include_stop_str_in_output:
            end -= 1  # the token that ends it is not shown
        stop = None
        while self._taken < end and stop is None:
            stop = detokenizer.append(tokens[self._taken])
            self._taken += 1
        if stop is not None or sequence.finish_reason is not None:
            detokenizer.finish()
        return stop

    def emittable(self, finished: bool) -> str:
        """The text that nothing can take back."""
        return self._detokenizer.emittable(finished) if self._detokenizer is not None else ""


class _RequestText:
    """The texts of one request's sequences.

    prompt: how the text of each begins: behind the prompt's. A sequence that forks from another takes in their common
    tokens once more, so that it does not matter when it does.
    """

    __slots__ = ("_prompt", "_sequences")

    def __init__(self, prompt: Detokenizer | None) -> None:
        self._prompt = prompt
        self._sequences: dict[int, _SequenceText] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is made text."""
        return self._prompt is None

    def of(self, sequence: SequenceState) -> _SequenceText:
        text = self._sequences.get(sequence.id)
        if text is None:
            text = _SequenceText(self._prompt.fork() if self._prompt is not None else None)
            self._sequences[sequence.id] = text
        return text


class OutputProcessor:
    """Turns what the scheduler knows of a request into what its caller gets.

    It reads requests and changes none. What belongs to text is kept here, from `add` until the last output or
    `discard`, by the request's number of arrival: an id may be used again before the last output of its former bearer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, _RequestText] = {}

    def add(self, request: Request, stops: StopStrings | None = None) -> None:
        """Expect a request's tokens. stops: its stop strings, prepared, if they have been."""
        detokenizer = None
        if self.tokenizer is not None and request.params.detokenize:
            detokenizer = Detokenizer(self.tokenizer, request.prompt_ids, request.params, stops)
        self._texts[request.arrival] = _RequestText(detokenizer)

    def discard(self, request: Request) -> None:
        """Forget a request that has no more outputs."""
        self._texts.pop(request.arrival, None)

    def take(self, sequence: SequenceState) -> str | None:
        """Turn a sequence's new tokens into text. Returns the stop string that the text has reached, if any: the
        scheduler is to end the sequence."""
        texts = self._texts[sequence.request.arrival]
        return None if texts.is_empty else texts.of(sequence).take(sequence)

    def output(self, request: Request) -> RequestOutput | BeamSearchOutput | None:
        """The request's output after a step; None while a FINAL_ONLY request or a beam search goes on."""
        output = self._output(request)
        if request.finished:
            self.discard(request)
        return output

    def _output(self, request: Request) -> RequestOutput | BeamSearchOutput | None:
        kind = request.params.output_kind
        finished = request.finished
        texts = self._texts.get(request.arrival) or _RequestText(None)  # it may end before it begins
        if request.beam is not None:
            return self._beams(request, request.beam) if finished else None
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return None
        scores = None
        started = kind is RequestOutputKind.DELTA and any(texts.of(s).sent != (0, 0) for s in request.sequences)
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
            outputs=self._completions(request, texts, kind),
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

    def _completions(self, request: Request, texts: _RequestText, kind: RequestOutputKind) -> list[CompletionOutput]:
        made = [self._completion(sequence, texts.of(sequence), kind) for sequence in request.sequences]
        if not request.params.greedy or request.params.n == 1:
            return made
        (one,) = made  # nothing is drawn, so all n are equal: one was computed
        return [_copied(one, index) for index in range(request.params.n)]

    def _completion(self, sequence: SequenceState, shown: _SequenceText, kind: RequestOutputKind) -> CompletionOutput:
        tokens, logprobs = sequence.output_ids, sequence.logprobs
        finished = sequence.finish_reason is not None
        text = shown.emittable(finished)
        first = 0
        if kind is RequestOutputKind.DELTA:
            first, characters = shown.sent
            shown.sent = (len(tokens), len(text))
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
