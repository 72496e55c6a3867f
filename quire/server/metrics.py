"""Prometheus metrics. They are only ever fetched; nothing is sent anywhere."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter as Counts
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from quire import __version__
from quire.platform.engine.async_engine import AsyncEngine
from quire.platform.engine.metrics import transfer_counters
from quire.platform.engine.stats import EngineStats
from quire.platform.outputs.outputs import BeamSearchOutput
from quire.platform.outputs.pooled import AnyOutput, PoolingRequestOutput
from quire.platform.scheduling.metrics import RequestMetrics, StepTimes
from quire.server.vllm_metrics import Twins

_FIRST_TOKEN = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_GAP = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5)
_DURATION = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TOKENS = tuple(step * 10**power for power in range(6) for step in (1, 2, 5))
TRANSFERS = {
    "stored_blocks": "KV blocks that were stored beside the pool.",
    "stored_bytes": "Their bytes.",
    "loaded_blocks": "KV blocks that were loaded from there.",
    "loaded_bytes": "Their bytes.",
    "refused_blocks": "KV blocks there that were damaged, or not what they were called.",
    "failures": "Reads and writes there that the system refused.",
    "dropped_blocks": "KV blocks that were not stored, as too many waited.",
}
_FORGET = 0.1  # the weight of the newest request in the mean duration


class StepHistogram(Histogram):
    """Takes all that a step has at once: its streams' gaps, which lie in one bucket or two."""

    def observe_all(self, values: Sequence[float]) -> None:
        """As `observe` of each."""
        if not values:
            return
        self._sum.inc(sum(values))
        for place, count in Counts(bisect_left(self._upper_bounds, one) for one in values).items():
            self._buckets[place].inc(count)


class Metrics:
    """What is counted while requests run, and what is read from the engine when somebody asks."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._twins = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self.registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> StepHistogram:
            return StepHistogram(f"quire_{name}", text, buckets=buckets, registry=self.registry)

        self._first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN)
        self._gap = histogram("inter_token_latency_seconds", "From one token of a sequence to the next.", _GAP)
        self._duration = histogram("request_duration_seconds", "From arrival to the last token.", _DURATION)
        self._queue = histogram("request_queue_seconds", "From arrival until blocks were had.", _DURATION)
        self._prefill = histogram("request_prefill_seconds", "From blocks to the first token.", _DURATION)
        self._decode = histogram("request_decode_seconds", "From the first token to the last.", _DURATION)
        self._inference = histogram("request_inference_seconds", "From blocks to the last token.", _DURATION)
        self._prompt = histogram("request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS)
        self._answer = histogram("request_generation_tokens", "Tokens of a request's answers.", _TOKENS)
        self._finished = Counter(
            "quire_sequences_finished", "Sequences that ended, by finish_reason.", ["reason"], registry=self.registry
        )
        self._answers = Counter(
            "quire_http_requests", "HTTP requests that were answered.", ["route", "status"], registry=self.registry
        )
        self.recent_duration = 1.0  # seconds, of finished requests

    def watch(self, engine: AsyncEngine) -> None:
        """Report the engine's gauges and counts too."""
        self.registry.register(_EngineCollector(engine))

    def twin(self, engine: AsyncEngine, prefix: str, model: str) -> None:
        """Report all of it by vLLM's names too. model: what clients call it."""
        self._twins.register(Twins(self.registry, engine, prefix, model))

    def render(self) -> bytes:
        return generate_latest(self.registry) + generate_latest(self._twins)

    def answered(self, route: str, status: int) -> None:
        self._answers.labels(route, str(status)).inc()

    def aborted(self, requests: int) -> None:
        """Requests whose client has gone, or that came to nothing with another of the same HTTP request."""
        self._finished.labels("abort").inc(requests)

    def on_step(self, times: StepTimes, outputs: Sequence[AnyOutput]) -> None:
        """After each step, in the engine's thread."""
        for histogram, seconds in (
            (self._gap, times.gaps),
            (self._first_token, times.first_tokens),
            (self._queue, times.queued),
        ):
            histogram.observe_all(seconds)
        for output in outputs:
            if isinstance(output, PoolingRequestOutput):
                self._finished.labels("stop" if output.failure is None else "error").inc()
                if output.metrics is not None:
                    self._observe(output.metrics)
                self._prompt.observe(len(output.prompt_token_ids))
            elif isinstance(output, BeamSearchOutput):
                for beam in output.sequences:
                    self._finished.labels(beam.finish_reason or "error").inc()
            elif output.finished:
                for completion in output.outputs:
                    self._finished.labels(completion.finish_reason or "error").inc()
                if output.metrics is not None:
                    self._observe(output.metrics)
                    self._prompt.observe(len(output.prompt_token_ids))
                    self._answer.observe(output.metrics.num_generation_tokens)

    def _observe(self, metrics: RequestMetrics) -> None:
        begun, first, last = metrics.first_scheduled_time, metrics.first_token_time, metrics.last_token_time
        if begun is not None and first is not None and last is not None:
            self._prefill.observe(first - begun)
            self._decode.observe(last - first)
            self._inference.observe(last - begun)
        if metrics.finished_time is not None:
            duration = metrics.finished_time - metrics.arrival_time
            self._duration.observe(duration)
            self.recent_duration += _FORGET * (duration - self.recent_duration)


class _EngineCollector(Collector):
    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        build = GaugeMetricFamily("quire_build_info", "The version that runs.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        for name, text, value in (
            ("sequences_running", "Sequences that hold KV blocks.", stats.running),
            ("sequences_waiting", "Sequences that wait for KV blocks.", stats.waiting),
            ("requests_preparing_images", "Requests whose images are being prepared.", stats.arriving),
            ("kv_cache_usage_ratio", "Share of the KV blocks in use, or of the states.", stats.kv_usage),
            ("kv_cache_blocks", "KV blocks in the pool.", stats.kv_blocks),
            ("image_feature_bytes", "Features of images that are kept.", stats.media_bytes),
            ("adapters_loading", "Adapters whose files are being read.", stats.adapters_loading),
            ("kv_transfer_held_bytes", "KV blocks that are kept beside the pool.", stats.transfers.held_bytes),
        ):
            yield GaugeMetricFamily(f"quire_{name}", text, value)
        for name, text, value in (
            ("preemptions", "Sequences that lost their blocks for a while.", stats.preemptions),
            ("swaps", "Preemptions of sequences that were kept in main memory, not recomputed.", stats.swaps),
            ("prompt_tokens", "Tokens of prompts that began to run.", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated.", stats.generated_tokens),
            ("prefix_cache_queries", "Tokens looked for in the prefix cache.", stats.prefix_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_hits),
            ("drafts", "Times that a sequence had draft tokens in a step.", stats.drafts),
            ("draft_tokens", "Draft tokens that were computed.", stats.draft_tokens),
            ("accepted_draft_tokens", "Draft tokens that were drawn, too.", stats.accepted_tokens),
            ("encoder_cache_queries", "Images whose features were wanted.", stats.encoder_queries),
            ("encoder_cache_hits", "Images whose features were there.", stats.encoder_hits),
        ):
            yield CounterMetricFamily(f"quire_{name}", text, value)
        for name, value in transfer_counters(stats).items():
            yield CounterMetricFamily(f"quire_kv_transfer_{name}", TRANSFERS[name], value)
        yield from self._adapters(stats)

    def _adapters(self, stats: EngineStats) -> Iterator[Metric]:
        adapters = self._engine.list_lora_adapters()
        hits = CounterMetricFamily(
            "quire_adapter_hits", "Sequences that began to run, by the tier that had their adapter.", labels=["tier"]
        )
        for tier, count in stats.adapter_hits.items():
            hits.add_metric([tier], count)
        taken = GaugeMetricFamily("quire_adapter_bytes", "Bytes of adapters' weights, by tier.", labels=["tier"])
        taken.add_metric(["device"], stats.adapter_device_bytes)
        taken.add_metric(["host"], stats.adapter_host_bytes)
        number = GaugeMetricFamily("quire_adapters", "Loaded adapters, by the nearest tier.", labels=["tier"])
        for tier in ("device", "host", "disk"):
            number.add_metric([tier], sum(info.tier == tier for info in adapters))
        resident = GaugeMetricFamily(
            "quire_adapter_tier", "1 for the nearest tier that has an adapter's weights.", labels=["adapter", "tier"]
        )
        requests = GaugeMetricFamily("quire_adapter_requests", "Unfinished requests, by adapter.", labels=["adapter"])
        for info in adapters:
            resident.add_metric([info.name, info.tier], 1)
            requests.add_metric([info.name], info.requests)
        yield from (hits, taken, number, resident, requests)
