"""A request's completions: what `generate` returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from quire.platform.outputs.detokenizer import decode_token, token_bytes
from quire.platform.outputs.outputs import CompletionOutput, Logprob, RequestOutput
from quire.platform.outputs.sequence_text import RequestText, SequenceText
from quire.platform.sampling.params import RequestOutputKind
from quire.platform.sampling.results import TopLogprobs
from quire.platform.scheduling.request import Request, SequenceState


def named_logprobs(tokenizer: Any, top: TopLogprobs) -> dict[int, Logprob]:
    """Logprobs by token id, with the tokens' texts and bytes."""
    if not tokenizer:
        return {token: Logprob(value, rank) for token, value, rank in top.ranked()}
    return {
        token: Logprob(value, rank, decode_token(tokenizer, token), token_bytes(tokenizer, token))
        for token, value, rank in top.ranked()
    }


class CompletionMaker:
    """Makes a RequestOutput: all so far, what is new, or all at the end, as the request's `output_kind` says."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def make(self, request: Request, texts: RequestText, finished: bool) -> RequestOutput:
        """After a step."""
        kind = request.params.output_kind
        scores = None
        if request.params.prompt_logprobs is not None:
            started = kind is RequestOutputKind.DELTA and any(texts.of(s).sent != (0, 0) for s in request.sequences)
            scores = None if started else self._prompt_logprobs(request)
        metrics = request.metrics.copy()
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

    def _completions(self, request: Request, texts: RequestText, kind: RequestOutputKind) -> list[CompletionOutput]:
        made = [self._completion(sequence, texts.of(sequence), kind) for sequence in request.sequences]
        if request.params.n == 1 or not request.params.greedy:
            return made
        (one,) = made  # nothing is drawn, so all n are equal: one was computed
        return [_copied(one, index) for index in range(request.params.n)]

    def _completion(self, sequence: SequenceState, shown: SequenceText, kind: RequestOutputKind) -> CompletionOutput:
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
            logprobs=[named_logprobs(self._tokenizer, top) for top in logprobs[first:]] if wants_logprobs else None,
            finish_reason=sequence.finish_reason,
            stop_reason=str(sequence.request.failure) if sequence.finish_reason == "error" else sequence.stop_reason,
        )

    def _prompt_logprobs(self, request: Request) -> Sequence[dict[int, Logprob] | None]:
        return [None if top is None else named_logprobs(self._tokenizer, top) for top in request.prompt_scores]


def _copied(output: CompletionOutput, index: int) -> CompletionOutput:
    """The same as another choice, with lists of its own."""
    logprobs = None if output.logprobs is None else list(output.logprobs)
    return dataclasses.replace(output, index=index, token_ids=list(output.token_ids), logprobs=logprobs)
