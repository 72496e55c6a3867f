"""What the engine remembers of a request: its prompt and parameters, and the sequences that continue it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, Literal

import numpy as np

from quire.lora import AdapterMix, LoRARequest
from quire.multimodal import Pixels
from quire.platform.sampling.logits_processors.chain import Chain
from quire.platform.sampling.params import SamplingParams
from quire.platform.sampling.results import Failure, Sampled, TopLogprobs
from quire.platform.sampling.sampling_input import SamplingInput, SamplingState
from quire.platform.scheduling.beam import BeamGroup, Candidate
from quire.platform.scheduling.metrics import RequestMetrics
from quire.platform.scheduling.plan import PENDING_TOKEN, Draw
from quire.types import AdapterUse, PlaceholderRange

FinishReason = Literal["stop", "length", "abort", "error"]

_serial = count()


@dataclass(eq=False, slots=True)
class MediaInput:
    """An image of a request.

    pixels: what to encode; None once its features have been seen, and while it is prepared again (`wanted`).
    source, settings: from which it can be prepared again, should its features have been evicted.
    """

    item: PlaceholderRange
    pixels: Pixels | None
    source: Any
    settings: Mapping[str, Any]
    wanted: bool = False

    def restore(self, pixels: Pixels | None) -> None:
        """It has been prepared again. pixels: None where that came to nothing."""
        self.wanted = False
        self.pixels = pixels


def next_serial() -> int:
    """A number for whatever arrives: larger ones came later."""
    return next(_serial)


@dataclass(eq=False)
class Request:
    """One request, from its arrival until its last sequence has finished.

    max_tokens: `params.max_tokens`, cut to what the model's length and the pool allow.
    stop_ids: the tokens that end a sequence; eos_ids: those among them that end it without being named a reason.
    prefix_root: the root of the request's prefix keys.
    processors: what changes its logits; empty: nothing does.
    media: the prompt's images, in their order; prompt_ids has their placeholders.
    rotary: in models with `mrope`, what the prompt's tokens turn by, [3, prompt] int64; None: their positions.
        rotary_end: what the first token behind them turns by.
    salt: separates its cached blocks and image features from those of other salts.
    adapters: the versions that it runs with, held until it ends (`holds_adapters`); lora: how the caller named them.
    prompt_scores: one entry a prompt token whose logprobs are wanted and known; the first token has none.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    max_tokens: int
    seeds: tuple[int, ...]  # one for each of the n sequences
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    prefix_root: bytes
    beam: BeamGroup | None = None
    processors: Chain = ()
    media: list[MediaInput] = field(default_factory=list)
    rotary: np.ndarray | None = None
    rotary_end: int = 0
    adapters: AdapterUse = ()
    holds_adapters: bool = False
    lora: LoRARequest | None = None
    salt: str | None = None
    sequences: list[SequenceState] = field(default_factory=list)
    prompt_scores: list[TopLogprobs | None] = field(default_factory=lambda: [None])
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival_time=time.monotonic()))
    failure: Failure | None = None
    arrival: int = field(default_factory=next_serial)

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def begin(self) -> SequenceState:
        """Its first sequence."""
        self.sequences.append(SequenceState(self, 0))
        return self.sequences[0]

    def end(self) -> None:
        """All its sequences have finished."""
        self.metrics.finished_time = time.monotonic()
        for media in self.media:  # whose pixels would count until the garbage collector comes
            media.pixels = None

    @cached_property
    def shown_ids(self) -> list[int]:
        """The prompt's tokens for its outputs: one copy for all of them, as a stream has many."""
        return list(self.prompt_ids)

    @cached_property
    def sampling(self) -> SamplingInput:
        """How its tokens are drawn, as plans say it."""
        return SamplingInput(self.params, self.processors)

    @property
    def owner(self) -> AdapterMix:
        """Its adapters, as plans name them."""
        return tuple((ref.uid, weight) for ref, weight in self.adapters)

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of prompt tokens are still wanted."""
        return self.params.prompt_logprobs is not None and len(self.prompt_scores) < len(self.prompt_ids)

    def media_in(self, start: int, end: int) -> list[MediaInput]:
        """The images whose placeholders are among the tokens start .. end, whole or in part."""
        return [media for media in self.media if media.item.offset < end and start < media.item.end]

    def rotary_of(self, start: int, end: int) -> np.ndarray | None:
        """What tokens start .. end turn by, [3, tokens]: the prompt's, and then one further for each token."""
        if self.rotary is None:
            return None
        length = self.rotary.shape[1]
        beyond = np.arange(max(start, length), max(end, length)) - length + self.rotary_end
        return np.concatenate((self.rotary[:, start:end], np.broadcast_to(beyond, (3, len(beyond)))), axis=1)


class SequenceState:
    """One continuation of a request's prompt. The scheduler moves it; nobody else touches its blocks.

    token_ids: prompt and output; output_ids: the output alone, the same numbers once more.
    num_computed: tokens whose keys and values are in the cache. The scheduler lets it chase len(token_ids).
    held: digests of the images whose features this sequence needs for what it computes now.
    keys: prefix keys of the blocks that are or were full; they outlive a preemption, since the tokens do.
    passed_by: how many sequences with adapters were admitted before it while it waited for its own.
    token_time: when it got its last token, by `time.monotonic()`.
    expects: its last token is being drawn by a step that runs, and NOT_YET_KNOWN stands for it.
    pending: beam search only: the step's result, kept until the siblings have theirs.
    """

    __slots__ = (
        "block_ids",
        "cumulative_logprob",
        "draw",
        "expects",
        "finish_reason",
        "held",
        "id",
        "index",
        "keys",
        "logprobs",
        "num_computed",
        "order",
        "output_ids",
        "passed_by",
        "pending",
        "request",
        "running",
        "stop_reason",
        "token_ids",
        "token_time",
    )

    def __init__(self, request: Request, index: int) -> None:
        self.id = next(_serial)
        self.request = request
        self.index = index
        self.order = (request.arrival, index)
        self.token_ids = list(request.prompt_ids)
        self.output_ids: list[int] = []
        self.num_computed = 0
        self.block_ids: list[int] = []
        self.keys: list[bytes] = []
        self.held: list[bytes] = []
        self.running = False
        self.token_time: float | None = None
        self.passed_by = 0
        self.expects = False
        self.pending: TopLogprobs | None = None
        self.logprobs: list[TopLogprobs] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.draw = self._make_draw()

    def _make_draw(self) -> Draw:
        request = self.request
        seed = request.seeds[self.index % len(request.seeds)]  # beams draw nothing and share the one seed
        return Draw(SamplingState(request.sampling, self.output_ids), seed)

    def fork(self, index: int) -> SequenceState:
        """A new sequence with the same tokens and history; it owns no blocks yet."""
        child = SequenceState(self.request, index)
        child.token_ids = list(self.token_ids)
        child.output_ids = list(self.output_ids)
        child.keys = list(self.keys)
        child.logprobs = list(self.logprobs)
        child.token_time = self.token_time
        child.cumulative_logprob = self.cumulative_logprob
        child.draw = child._make_draw()
        return child

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    def draws(self) -> tuple[Draw, ...]:
        """What to sample once all tokens are computed: n tokens where the request forks, one afterwards."""
        if self.output_ids or len(self.request.sequences) > 1:
            return (self.draw,)
        return tuple(dataclasses.replace(self.draw, seed=seed) for seed in self.request.seeds)

    def append_pending(self) -> None:
        """Go on as if the token were known that a running step draws."""
        self.expects = True
        self.token_ids.append(PENDING_TOKEN)
        self.output_ids.append(PENDING_TOKEN)

    @property
    def expects_last(self) -> bool:
        """Whether what it expects will be its last token at any rate."""
        return self.expects and len(self.output_ids) >= self.request.max_tokens

    def drop_pending(self) -> None:
        """The token that it expects has come, or never will."""
        if self.expects:
            self.expects = False
            self.token_ids.pop()
            self.output_ids.pop()

    def append_candidate(self, candidate: Candidate) -> None:
        """Go on as a beam search has chosen."""
        self.pending = None
        self.token_ids.append(candidate.token_id)
        self.output_ids.append(candidate.token_id)
        self.logprobs.append(candidate.top)
        self.cumulative_logprob = candidate.cum_logprob

    def stop_at(self, stop: str) -> None:
        """Its text has reached a stop string, which counts before any other end."""
        self.finish_reason, self.stop_reason = "stop", stop

    def append(self, sampled: Sampled) -> None:
        """Take a sampled token, and finish if it is the last one."""
        self.drop_pending()
        if sampled.error is not None:
            self.request.failure = sampled.error
            self.finish_reason = "error"
            return
        token = sampled.token_id
        self.token_ids.append(token)
        self.output_ids.append(token)
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)
            self.cumulative_logprob += sampled.logprobs.chosen
        if token in self.request.stop_ids and len(self.output_ids) >= self.request.params.min_tokens:
            self.finish_reason = "stop"
            self.stop_reason = None if token in self.request.eos_ids else token
        elif len(self.output_ids) >= self.request.max_tokens:
            self.finish_reason = "length"
