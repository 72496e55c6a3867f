"""What a request gives back: vLLM's names and meanings, as plain data.

Token ids, counts and texts are copies: nothing here changes after it has been handed out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from quire.platform.sampling.results import Failure

if TYPE_CHECKING:
    from quire.lora import LoRARequest

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural-log probability by the model itself, before penalties and temperature."""

    logprob: float
    rank: int | None = None  # 1 is the most likely; equally likely tokens are ranked by token id
    decoded_token: str | None = None  # None with detokenize=False or without a tokenizer


# By token id: the chosen token first, then the most likely ones.
TokenLogprobs = Mapping[int, Logprob]


@dataclass(frozen=True, slots=True)
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
    """

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Where a request's time went. Times are seconds of `time.monotonic()`: only their differences mean
    anything.

    None: it has not happened (yet).
    time_in_queue: first_scheduled_time - arrival_time.
    num_preemptions: how often the request lost its blocks for a while.
    num_cached_tokens: prompt tokens that were found in the prefix cache instead of computed.
    num_generation_tokens: of all its sequences, once it has finished.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    time_in_queue: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_generation_tokens: int = 0


@dataclass(frozen=True, slots=True)
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
