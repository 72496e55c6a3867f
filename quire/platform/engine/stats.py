"""Numbers about an engine, for whoever watches it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from quire.lora import AdapterRegistry
from quire.platform.kv.connector import ConnectorCounts
from quire.platform.scheduling.request import SequenceState
from quire.platform.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges of this moment, and counts since the engine began.

    running, waiting: sequences that hold blocks, and that do not. arriving: requests whose images are being prepared.
    kv_usage: share of the blocks in use, or of the states where that is more.
    swaps: preemptions whose sequences were kept in main memory.
    prompt_tokens: of requests that began to run. generated_tokens: sampled.
    prefix_queries, prefix_hits: tokens looked for in the prefix cache, and found there.
    drafts, draft_tokens, accepted_tokens: how often a sequence had draft tokens in a step, how many these were, and how
    many of them were drawn.
    encoder_queries, encoder_hits: images whose features were wanted, and were there. media_bytes: of these features.
    adapters_running, adapters_waiting: names of those whose sequences run and wait.
    adapters_loading: whose weights are being read. adapter_hits: by the tier ("device", "host", "disk") where an
    adapter was when a sequence began to run with it. adapter_host_bytes, adapter_device_bytes: what weights take.
    transfers: blocks beside the pool, as the workers told last.
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
    kv_usage: float
    prefix_queries: int
    prefix_hits: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    encoder_queries: int
    encoder_hits: int
    media_bytes: int
    adapters_running: tuple[str, ...]
    adapters_waiting: tuple[str, ...]
    adapters_loading: int
    adapter_hits: Mapping[str, int]
    adapter_host_bytes: int
    adapter_device_bytes: int
    transfers: ConnectorCounts


def engine_stats(scheduler: Scheduler, adapters: AdapterRegistry | None, arriving: int) -> EngineStats:
    """Read from any thread: each number is true, though not all of one moment."""
    on_device = scheduler.adapters.device
    features, pool, drafting = scheduler.encoder.features, scheduler.kv.pool, scheduler.drafting
    return EngineStats(
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        arriving=arriving,
        preemptions=scheduler.num_preemptions,
        swaps=scheduler.num_swaps,
        prompt_tokens=scheduler.prompt_tokens,
        generated_tokens=scheduler.generated_tokens,
        kv_blocks=pool.num_blocks,
        kv_blocks_used=pool.num_blocks - pool.num_free,
        kv_usage=pool.usage,
        prefix_queries=scheduler.kv.prefix_queries,
        prefix_hits=scheduler.kv.prefix_hits,
        drafts=drafting.num_drafts if drafting is not None else 0,
        draft_tokens=drafting.num_draft_tokens if drafting is not None else 0,
        accepted_tokens=drafting.num_accepted_tokens if drafting is not None else 0,
        encoder_queries=features.hits + features.misses,
        encoder_hits=features.hits,
        media_bytes=features.bytes,
        adapters_running=_adapters(scheduler.running),
        adapters_waiting=_adapters(scheduler.waiting),
        adapters_loading=adapters.num_reading if adapters is not None else 0,
        adapter_hits=dict(on_device.hits) if on_device is not None else {},
        adapter_host_bytes=adapters.host_bytes if adapters is not None else 0,
        adapter_device_bytes=on_device.bytes if on_device is not None else 0,
        transfers=scheduler.kv.transfers.counts if scheduler.kv.transfers is not None else ConnectorCounts(),
    )


def _adapters(sequences: Iterable[SequenceState]) -> tuple[str, ...]:
    """Names, each once. The sequences are copied first, in one go: they are another thread's."""
    return tuple(sorted({ref.name for sequence in list(sequences) for ref, _ in sequence.request.adapters}))
