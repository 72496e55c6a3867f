"""The metrics once more under vLLM's names, for dashboards and autoscalers that know these.

A twin means what vLLM says that its metric means; where quire has no such thing there is none. Histograms keep quire's
buckets. Nothing is counted twice: twins are made of the originals when somebody asks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.platform.engine.async_engine import AsyncEngine

# quire's -> vLLM's; the second of two is what older versions call it.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "sequences_running": ("num_requests_running",),
    "sequences_waiting": ("num_requests_waiting",),
    "kv_cache_usage_ratio": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "preemptions": ("num_preemptions",),
    "prompt_tokens": ("prompt_tokens",),
    "generation_tokens": ("generation_tokens",),
    "prefix_cache_queries": ("prefix_cache_queries", "gpu_prefix_cache_queries"),
    "prefix_cache_hits": ("prefix_cache_hits", "gpu_prefix_cache_hits"),
    "drafts": ("spec_decode_num_drafts",),
    "draft_tokens": ("spec_decode_num_draft_tokens",),
    "accepted_draft_tokens": ("spec_decode_num_accepted_tokens",),
    "encoder_cache_queries": ("mm_cache_queries",),
    "encoder_cache_hits": ("mm_cache_hits",),
    "sequences_finished": ("request_success",),
    "time_to_first_token_seconds": ("time_to_first_token_seconds",),
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "request_duration_seconds": ("e2e_request_latency_seconds",),
    "request_queue_seconds": ("request_queue_time_seconds",),
    "request_prefill_seconds": ("request_prefill_time_seconds",),
    "request_decode_seconds": ("request_decode_time_seconds",),
    "request_inference_seconds": ("request_inference_time_seconds",),
    "request_prompt_tokens": ("request_prompt_tokens",),
    "request_generation_tokens": ("request_generation_tokens",),
}
_LABELS = {"reason": "finished_reason"}


class Twins(Collector):
    """prefix: before each name, "vllm:" for vLLM's own. model: the label model_name."""

    def __init__(self, originals: CollectorRegistry, engine: AsyncEngine, prefix: str, model: str) -> None:
        self._originals = originals
        self._engine = engine
        self._prefix = prefix
        self._labels = {"model_name": model, "engine": "0"}

    def collect(self) -> Iterator[Metric]:
        for metric in self._originals.collect():
            for name in _NAMES.get(metric.name.removeprefix("quire_"), ()):
                yield self._twin(metric, self._prefix + name)
        yield self._adapters()
        yield self._cache()

    def _twin(self, metric: Metric, name: str) -> Metric:
        twin = Metric(name, metric.documentation, metric.type)
        for sample in metric.samples:
            labels = {_LABELS.get(label, label): value for label, value in sample.labels.items()}
            twin.add_sample(
                name + sample.name.removeprefix(metric.name), {**self._labels, **labels}, sample.value, sample.timestamp
            )
        return twin

    def _adapters(self) -> Metric:
        """vLLM's gauge whose labels tell and whose value is the time."""
        stats, lora = self._engine.stats(), self._engine.llm_engine.config.lora
        most = lora.max_loras if lora.max_loras is not None else len(self._engine.list_lora_adapters())
        labels = {
            "max_lora": str(most),
            "running_lora_adapters": ",".join(stats.adapters_running),
            "waiting_lora_adapters": ",".join(stats.adapters_waiting),
        }
        info = GaugeMetricFamily(self._prefix + "lora_requests_info", "Adapters in use.", labels=list(labels))
        if lora.enabled:
            info.add_metric(list(labels.values()), time.time())
        return info

    def _cache(self) -> Metric:
        cache = self._engine.llm_engine.config.cache
        labels = {
            "block_size": str(cache.block_size),
            "num_gpu_blocks": str(self._engine.llm_engine.pool.num_blocks),
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "engine": "0",
        }
        info = GaugeMetricFamily(self._prefix + "cache_config_info", "The KV pool's settings.", labels=list(labels))
        info.add_metric(list(labels.values()), 1.0)
        return info
