"""A beam search's results: what `beam_search` returns, and the same as `generate` would."""

from __future__ import annotations

from typing import Any

from quire.platform.outputs.completions import named_logprobs
from quire.platform.outputs.detokenizer import Detokenizer
from quire.platform.outputs.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
from quire.platform.outputs.sequence_text import RequestText
from quire.platform.sampling.params import SamplingParams
from quire.platform.scheduling.beam import Hypothesis
from quire.platform.scheduling.request import Request


class BeamMaker:
    """Makes a BeamSearchOutput, once the search is over."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def make(self, request: Request, texts: RequestText, finished: bool) -> BeamSearchOutput | None:
        """After a step; None while the search goes on."""
        if request.beam is None or not finished:
            return None
        return BeamSearchOutput(
            request.request_id,
            [self._beam(hypothesis) for hypothesis in request.beam.ended],
            request.shown_ids,
            request.failure,
            request.prompt,
            request.lora,
        )

    def _beam(self, hypothesis: Hypothesis) -> BeamSearchSequence:
        text = self._tokenizer.decode(hypothesis.token_ids) if self._tokenizer is not None else None
        return BeamSearchSequence(
            tokens=hypothesis.token_ids,
            logprobs=[named_logprobs(self._tokenizer, top) for top in hypothesis.logprobs],
            cum_logprob=hypothesis.cum_logprob,
            text=text,
            finish_reason="length" if hypothesis.stop_reason is None else "stop",
            stop_reason=hypothesis.stop_reason,
        )


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
