"""What the engine remembers of a request: its prompt and parameters, and the sequences that continue it.

Everybody may read what is here, and only scheduling changes it, by the methods that are named as transitions.

A request is *new*, *queued* once it has its first sequence, and *finished* when all of its sequences are. A sequence is
*waiting*, *running* while it holds blocks, or *finished*: `admit` leads from waiting to running, `preempt` back, and
`finish` to the end from either.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import count
from typing import Literal

import numpy as np

from quire.lora import AdapterMix, LoRARequest
from quire.platform.sampling.logits_processors.chain import Chain
from quire.platform.sampling.params import SamplingParams
from quire.platform.sampling.results import Failure, Sampled, TopLogprobs
from quire.platform.sampling.sampling_input import SamplingInput
from quire.platform.scheduling.beam import BeamGroup, Candidate
from quire.platform.scheduling.media_input import MediaInput as MediaInput  # which others import from here
from quire.platform.scheduling.metrics import RequestMetrics
from quire.platform.scheduling.plan import PENDING_TOKEN, Chunk, NewSequence
from quire.pooling_types import PoolingInput
from quire.types import AdapterUse, Span

FinishReason = Literal["stop", "length", "abort", "error"]

_serial = count()


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
    sees: ranges of the prompt whose tokens see one another, later ones too: ascending, apart; none without media.
    salt: separates its cached blocks and image features from those of other salts.
    adapters: the versions that it runs with, held until it ends; lora: how the caller named them.
    prompt_scores: one entry a prompt token whose logprobs are wanted and known; the first token has none.
    pooling: what is made of its prompt's hidden states, in the place of tokens; None: it generates. pooled: that, as
        far as it is known: rows of numbers.
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
    sees: tuple[Span, ...] = ()
    adapters: AdapterUse = ()
    lora: LoRARequest | None = None
    salt: str | None = None
    sequences: list[SequenceState] = field(default_factory=list)
    prompt_scores: list[TopLogprobs | None] = field(default_factory=lambda: [None])
    metrics: RequestMetrics = field(default_factory=lambda: RequestMetrics(arrival_time=time.monotonic()))
    pooling: PoolingInput | None = None
    pooled: list[np.ndarray] = field(default_factory=list)
    failure: Failure | None = None
    arrival: int = field(default_factory=next_serial)

    # -- transitions ----------------------------------------------------------------------------------------------

    def begin(self) -> SequenceState:
        """From new to queued: its first sequence, which waits."""
        assert not self.sequences
        self.sequences.append(SequenceState(self, 0))
        return self.sequences[0]

    def scheduled(self, now: float, cached: int) -> float | None:
        """A sequence of it was admitted, with `cached` tokens in the cache. Seconds in the queue, the first time."""
        metrics = self.metrics
        if metrics.first_scheduled_time is not None:
            return None
        metrics.first_scheduled_time = now
        metrics.time_in_queue = now - metrics.arrival_time
        metrics.num_cached_tokens = cached
        return metrics.time_in_queue

    def take_scores(self, scores: Sequence[TopLogprobs]) -> None:
        """The logprobs of its next prompt tokens are known."""
        self.prompt_scores.extend(scores)

    def take_pooled(self, chunk: Chunk, rows: np.ndarray) -> bool:
        """A step has pooled some of its prompt. True: that was the last of it."""
        if not chunk.start:  # it may begin anew, when its blocks were taken
            self.pooled.clear()
        self.pooled.append(rows)
        return chunk.end == len(self.prompt_ids)

    def stamp(self, now: float) -> float | None:
        """One of its sequences got a token now: seconds since its arrival, if it is the first of all."""
        metrics = self.metrics
        metrics.last_token_time = now
        if metrics.first_token_time is not None:
            return None
        metrics.first_token_time = now
        return now - metrics.arrival_time

    def fail(self, failure: Failure) -> None:
        """It ends by an error; its sequences are finished by the scheduler."""
        self.failure = failure

    def keep(self, beams: Sequence[SequenceState]) -> None:
        """Forget all beams but these: a long search must not remember every one it ever had."""
        self.sequences = list(beams)

    def end(self) -> None:
        """From queued to finished: all its sequences are."""
        self.metrics.finished_time = time.monotonic()
        for media in self.media:  # whose pixels would count until the garbage collector comes
            media.pixels = None

    # -- what may be asked ----------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return None not in [sequence.finish_reason for sequence in self.sequences]

    @cached_property
    def shown_ids(self) -> list[int]:
        """The prompt's tokens for its outputs: one copy for all of them, as a stream has many."""
        return list(self.prompt_ids)

    @cached_property
    def sampling(self) -> SamplingInput:
        """How its tokens are drawn, as plans say it."""
        return SamplingInput(self.params, self.processors)

    @cached_property
    def adapter_mix(self) -> AdapterMix:
        """Its adapters, as plans name them."""
        return tuple((ref.uid, weight) for ref, weight in self.adapters)

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of prompt tokens are still wanted."""
        return self.params.prompt_logprobs is not None and len(self.prompt_scores) < len(self.prompt_ids)

    def media_in(self, start: int, end: int) -> list[MediaInput]:
        """The images whose placeholders are among the tokens start .. end, whole or in part."""
        return [media for media in self.media if media.item.offset < end and start < media.item.end]


class SequenceState:
    """One continuation of a request's prompt.

    token_ids: prompt and output; output_ids: the output alone, the same numbers once more.
    num_computed: tokens whose keys and values are in the cache. The scheduler lets it chase len(token_ids).
    held: digests of the images whose features this sequence needs for what it computes now.
    running: whether it holds blocks. worker_tokens: how many of its first tokens the worker knows.
    passed_by: how many sequences with adapters were admitted before it while it waited for its own.
    token_time: when it got its last token, by `time.monotonic()`.
    pending: its last token is being drawn by a step that runs, and PENDING_TOKEN stands for it.
    candidates: beam search only: the step's result, kept until the siblings have theirs.
    """

    __slots__ = (
        "candidates",
        "cumulative_logprob",
        "finish_reason",
        "held",
        "id",
        "index",
        "logprobs",
        "num_computed",
        "order",
        "output_ids",
        "passed_by",
        "pending",
        "request",
        "running",
        "seeds",
        "stop_reason",
        "token_ids",
        "token_time",
        "worker_tokens",
    )

    def __init__(self, request: Request, index: int) -> None:
        self.id = next(_serial)
        self.request = request
        self.index = index
        self.order = (request.arrival, index)
        self.token_ids = list(request.prompt_ids)
        self.output_ids: list[int] = []
        self.num_computed = 0
        self.held: list[bytes] = []
        self.running = False
        self.token_time: float | None = None
        self.passed_by = 0
        self.pending = False
        self.candidates: TopLogprobs | None = None
        self.logprobs: list[TopLogprobs] = []
        self.cumulative_logprob = 0.0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.worker_tokens = 0
        self.seeds = (request.seeds[index % len(request.seeds)],)  # beams draw nothing and share the one seed

    # -- transitions ----------------------------------------------------------------------------------------------

    def admit(self, num_computed: int) -> None:
        """From waiting to running: it has blocks, and these hold its first `num_computed` tokens."""
        self.running = True
        self.num_computed = num_computed

    def preempt(self) -> None:
        """From running to waiting: its blocks are gone, and nothing of it is computed."""
        self.leave()
        self.request.metrics.num_preemptions += 1

    def leave(self) -> None:
        """Running no more: its blocks are gone."""
        self.running = False
        self.num_computed = 0

    def passed(self) -> None:
        """It waits for its adapters, and another with adapters was admitted before it."""
        self.passed_by += 1

    def advance(self, tokens: int) -> None:
        """A step has computed so many more of its tokens, or will have before whatever is planned from here on."""
        self.num_computed += tokens

    def told(self, tokens: int) -> None:
        """The worker knows so many of its first tokens."""
        self.worker_tokens = tokens

    def append_pending(self) -> None:
        """Go on as if the token were known that a running step draws."""
        self.pending = True
        self.token_ids.append(PENDING_TOKEN)
        self.output_ids.append(PENDING_TOKEN)

    def drop_pending(self) -> None:
        """The token that it waits for has come, or never will."""
        if self.pending:
            self.pending = False
            self.token_ids.pop()
            self.output_ids.pop()

    def append(self, sampled: Sampled) -> int:
        """Take a sampled token: it goes on, or is finished if that is the last one, or if there is none. Returns how
        many tokens it has taken: those that must come behind that one as well."""
        if self.pending:
            self.drop_pending()
        if sampled.error is not None:
            self.request.fail(sampled.error)
            self.finish_reason = "error"
            return 0
        length = len(self.token_ids)
        self._take(sampled.token_id, sampled.logprobs)
        if sampled.forced or sampled.ends:
            self._take_forced(sampled)
        return len(self.token_ids) - length

    def _take(self, token: int, logprobs: TopLogprobs | None) -> None:
        self.token_ids.append(token)
        self.output_ids.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
            self.cumulative_logprob += logprobs.chosen
        if token in self.request.stop_ids and len(self.output_ids) >= self.request.params.min_tokens:
            self.finish_reason = "stop"
            self.stop_reason = None if token in self.request.eos_ids else token
        elif len(self.output_ids) >= self.request.max_tokens:
            self.finish_reason = "length"

    def _take_forced(self, sampled: Sampled) -> None:
        """Tokens that must come behind a sampled one, as far as the sequence goes."""
        params = self.request.params
        for token in sampled.forced:
            if self.finish_reason is not None:
                return
            self._take(token, None if params.logprobs is None else TopLogprobs.certain(token, params.logprobs))
        if sampled.ends:  # by a token that does not end others, perhaps, or as the last one that it may have
            self.finish_reason = "stop"

    def offer(self, candidates: TopLogprobs | None) -> None:
        """A beam's step is done; it takes no token before its siblings' are."""
        self.candidates = candidates

    def append_candidate(self, candidate: Candidate) -> None:
        """A beam goes on with the candidate that was chosen for it."""
        self.candidates = None
        self.token_ids.append(candidate.token_id)
        self.output_ids.append(candidate.token_id)
        self.logprobs.append(candidate.top)
        self.cumulative_logprob = candidate.cum_logprob

    def stamp(self, now: float) -> float | None:
        """It got a token now: seconds since the one before, None for its first."""
        before, self.token_time = self.token_time, now
        return None if before is None else now - before

    def fork(self, index: int) -> SequenceState:
        """Another sequence of its request, which waits, with the same tokens and history; it owns no blocks yet."""
        child = SequenceState(self.request, index)
        child.token_ids = list(self.token_ids)
        child.output_ids = list(self.output_ids)
        child.logprobs = list(self.logprobs)
        child.token_time = self.token_time
        child.cumulative_logprob = self.cumulative_logprob
        self.request.sequences.append(child)
        return child

    def finish(self, reason: FinishReason) -> None:
        """From waiting or running to finished; the first reason stays."""
        self.drop_pending()
        self.finish_reason = self.finish_reason or reason

    def stop_at(self, stop: str, count: int | None = None) -> None:
        """Its text has reached a stop string, before any other end, with `count` generated tokens; None: all."""
        self.finish_reason, self.stop_reason = "stop", stop
        if count is not None and count < len(self.output_ids):
            del self.token_ids[count - len(self.output_ids) :], self.output_ids[count:], self.logprobs[count:]
            self.cumulative_logprob = reduce(lambda total, one: total + one.chosen, self.logprobs, 0.0)

    # -- what may be asked ----------------------------------------------------------------------------------------

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def most_cached(self) -> int:
        """How many of its tokens may come from the prefix cache: at least one is left to compute."""
        if self.request.pooling is not None and self.request.pooling.reads_all:
            return 0
        most = len(self.token_ids) - 1
        if self.request.scores_prompt:
            most = min(most, len(self.request.prompt_scores) - 1)  # a score needs its token's forward pass
        return most

    @property
    def last_pending(self) -> bool:
        """Whether the token that it waits for will be its last at any rate."""
        return self.pending and len(self.output_ids) >= self.request.max_tokens

    def draws(self) -> tuple[int, ...]:
        """The seeds of what to sample once all tokens are computed: n where the request forks, one afterwards."""
        if self.request.pooling is not None:
            return ()
        return self.seeds if self.output_ids or len(self.request.sequences) > 1 else self.request.seeds

    def introduce(self) -> NewSequence:
        """All that a worker must know of it but its blocks and a pending token."""
        request = self.request
        return NewSequence(
            self.id,
            tuple(self.token_ids[: len(self.token_ids) - self.pending]),
            len(request.prompt_ids),
            request.sampling,
            request.adapter_mix,
            tuple(media.item for media in request.media),
            None if request.rotary is None else request.rotary.tobytes(),
            request.rotary_end,
            request.sees,
            request.pooling,
        )
