"""An engine's numbers as `LLM.get_metrics` returns them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.platform.engine.stats import EngineStats


@dataclass(frozen=True)
class Metric:
    """A number. name: vLLM's, where it has one of the same meaning (these are of sequences); else quire's."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Counter(Metric):
    """A count since the engine began."""

    value: int = 0


@dataclass(frozen=True)
class Gauge(Metric):
    """A number of this moment."""

    value: float = 0.0


def transfer_counters(stats: EngineStats) -> dict[str, int]:
    """What has become of blocks beside the pool, by names that metrics end with."""
    counts = stats.transfers
    return {
        "stored_blocks": counts.stored,
        "stored_bytes": counts.stored_bytes,
        "loaded_blocks": counts.loaded,
        "loaded_bytes": counts.loaded_bytes,
        "refused_blocks": counts.refused,
        "failures": counts.failed,
        "dropped_blocks": counts.dropped,
    }


def metrics_of(stats: EngineStats) -> list[Metric]:
    """All of them."""
    gauges = {
        "vllm:num_requests_running": stats.running,
        "vllm:num_requests_waiting": stats.waiting,
        "vllm:kv_cache_usage_perc": stats.kv_usage,  # a share, for all its name
        "quire_requests_preparing_images": stats.arriving,
        "quire_kv_cache_blocks": stats.kv_blocks,
        "quire_image_feature_bytes": stats.media_bytes,
        "quire_adapters_loading": stats.adapters_loading,
        "quire_kv_transfer_held_bytes": stats.transfers.held_bytes,
    }
    counters = {
        "vllm:num_preemptions": stats.preemptions,
        "vllm:prompt_tokens": stats.prompt_tokens,
        "vllm:generation_tokens": stats.generated_tokens,
        "vllm:prefix_cache_queries": stats.prefix_queries,
        "vllm:prefix_cache_hits": stats.prefix_hits,
        "vllm:spec_decode_num_drafts": stats.drafts,
        "vllm:spec_decode_num_draft_tokens": stats.draft_tokens,
        "vllm:spec_decode_num_accepted_tokens": stats.accepted_tokens,
        "vllm:mm_cache_queries": stats.encoder_queries,
        "vllm:mm_cache_hits": stats.encoder_hits,
        "quire_swaps": stats.swaps,
        **{f"quire_kv_transfer_{name}": value for name, value in transfer_counters(stats).items()},
    }
    tiers = {"device": stats.adapter_device_bytes, "host": stats.adapter_host_bytes}
    return [
        *(Gauge(name, value=float(value)) for name, value in gauges.items()),
        *(Counter(name, value=value) for name, value in counters.items()),
        *(Gauge("quire_adapter_bytes", {"tier": tier}, float(value)) for tier, value in tiers.items()),
        *(Counter("quire_adapter_hits", {"tier": tier}, value) for tier, value in stats.adapter_hits.items()),
    ]
