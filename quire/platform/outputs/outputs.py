"""What a request gives back: vLLM's names and meanings, as plain data.

Token ids, counts and texts are copies: nothing here changes after it has been handed out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from quire.lora import LoRARequest
from quire.platform.outputs.messages.message import Message
from quire.platform.sampling.results import Failure
from quire.platform.scheduling.metrics import RequestMetrics
from quire.platform.scheduling.request import FinishReason


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural-log probability by the model itself, before penalties and temperature."""

    logprob: float
    rank: int | None = None  # 1 is the most likely; equally likely tokens are ranked by token id
    decoded_token: str | None = None  # None with detokenize=False or without a tokenizer
    token_bytes: bytes | None = None  # the token's own, which may be a part of a letter; None where decoded_token is


# By token id: the chosen token first, then the most likely ones.
TokenLogprobs = Mapping[int, Logprob]


@dataclass(slots=True)  # not frozen: a step makes one for each of its streams, in a third of the time
class CompletionOutput:
    """One sequence of a request.

    index: 0 to n - 1.
    text: the generated text; with RequestOutputKind.DELTA what is new since the last output.
    token_ids: the generated tokens (with DELTA the new ones), end token included.
    cumulative_logprob: sum of the generated tokens' log-probabilities; None when logprobs were not asked for.
    logprobs: one mapping for each of token_ids, or None.
    finish_reason: None while running; "stop" (end token, stop token or stop string), "length" (max_tokens or
        the model's length), "abort" (by the caller), "error" (stop_reason says which).
    stop_reason: the stop string or stop token id that ended it; None for the model's end token; the message
        for finish_reason "error".
    message: of `LLM.chat`: what the text says, reasoning and calls of tools told apart from the content.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    message: Message | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)  # not frozen: a step makes one for each of its streams, in a third of the time
class RequestOutput:
    """A request and what it has generated.

    prompt: its text, None when token ids were given.  outputs: `n` CompletionOutputs, by index.
    prompt_logprobs: one mapping for each prompt token, None for the first (nothing precedes it); None when
        not asked for.  finished: all outputs have.  num_cached_tokens: as in RequestMetrics.
    lora_request: the adapter that it ran with.  failure: why it ended with finish_reason "error".
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: Sequence[int]
    outputs: Sequence[CompletionOutput]
    finished: bool
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    metrics: RequestMetrics | None = field(default=None, repr=False)
    num_cached_tokens: int | None = None
    lora_request: LoRARequest | None = None
    failure: Failure | None = None


@dataclass
class BeamSearchSequence:
    """One result. tokens: prompt and output; cum_logprob: the sum over the output; text: of all tokens."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The results of one prompt, best first.

    prompt: its text, None when token ids were given. lora_request: the adapter that it ran with. failure: why the
    search ended early, if it did.
    """

    request_id: str
    sequences: list[BeamSearchSequence]
    prompt_token_ids: Sequence[int] = ()
    failure: Failure | None = None
    prompt: str | None = None
    lora_request: LoRARequest | None = None

    @property
    def error(self) -> str | None:
        return None if self.failure is None else self.failure.message


Output = RequestOutput | BeamSearchOutput
