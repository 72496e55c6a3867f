"""Numbers about an engine, for whoever watches it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.platform.engine.llm_engine import LLMEngine
    from quire.platform.scheduling.request import SequenceState


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds that came to their end in a step, one for each sequence or request that they are of.

    gaps: from a sequence's last token to the next. first_tokens: from a request's arrival to its first token.
    queued: from its arrival until it had blocks.
    """

    gaps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)
    queued: list[float] = field(default_factory=list)

    def clear(self) -> None:
        for times in (self.gaps, self.first_tokens, self.queued):
            times.clear()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges of this moment, and counts since the engine began.

    running, waiting: sequences that hold blocks, and that do not. arriving: requests whose images are being prepared.
    swaps: preemptions whose sequences were kept in main memory.
    prompt_tokens: of requests that began to run. generated_tokens: sampled.
    prefix_queries, prefix_hits: tokens looked for in the prefix cache, and found there.
    encoder_queries, encoder_hits: images whose features were wanted, and were there. media_bytes: of these features.
    adapters_running, adapters_waiting: names of those whose sequences run and wait.
    adapters_loading: whose weights are being read. adapter_hits: by the tier ("device", "host", "disk") where an
    adapter was when a sequence began to run with it. adapter_host_bytes, adapter_device_bytes: what weights take.
    """

    running: int
    waiting: int
    arriving: int
    preemptions: int
    swaps: int
    prompt_tokens: int
    generated_tokens: int
    kv_blocks: int
    kv_blocks_used: int
    prefix_queries: int
    prefix_hits: int
    encoder_queries: int
    encoder_hits: int
    media_bytes: int
    adapters_running: tuple[str, ...]
    adapters_waiting: tuple[str, ...]
    adapters_loading: int
    adapter_hits: Mapping[str, int]
    adapter_host_bytes: int
    adapter_device_bytes: int

    @classmethod
    def of(cls, engine: LLMEngine) -> EngineStats:
        """Read from any thread: each number is true, though not all of one moment."""
        scheduler, library = engine.scheduler, engine.adapters
        residency, features, pool = scheduler.residency, scheduler.features, engine.pool
        return cls(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            arriving=engine.num_arriving,
            preemptions=scheduler.num_preemptions,
            swaps=scheduler.num_swaps,
            prompt_tokens=scheduler.prompt_tokens,
            generated_tokens=scheduler.generated_tokens,
            kv_blocks=pool.num_blocks,
            kv_blocks_used=pool.num_blocks - pool.num_free,
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
            encoder_queries=features.hits + features.misses,
            encoder_hits=features.hits,
            media_bytes=features.bytes,
            adapters_running=_adapters(scheduler.running),
            adapters_waiting=_adapters(scheduler.waiting),
            adapters_loading=library.num_reading if library is not None else 0,
            adapter_hits=dict(residency.hits) if residency is not None else {},
            adapter_host_bytes=library.host_bytes if library is not None else 0,
            adapter_device_bytes=residency.bytes if residency is not None else 0,
        )


def _adapters(sequences: Iterable[SequenceState]) -> tuple[str, ...]:
    """Names, each once. The sequences are copied first, in one go: they are another thread's."""
    return tuple(sorted({ref.name for sequence in list(sequences) for ref, _ in sequence.request.adapters}))
