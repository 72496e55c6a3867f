"""The metrics of several replicas as one text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector


def summed(texts: Mapping[str, str]) -> bytes:
    """In Prometheus' format: each replica's samples with a label `replica`, and their sums over all without it.

    texts: by the replicas' names.
    """
    registry = CollectorRegistry()
    registry.register(_Summed(texts))
    return generate_latest(registry)


class _Summed(Collector):
    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts

    def collect(self) -> Iterator[Metric]:
        found: dict[str, Metric] = {}
        sums: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for replica, text in self._texts.items():
            for family in text_string_to_metric_families(text):
                metric = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                of_family = sums.setdefault(family.name, {})
                for sample in family.samples:
                    key = (sample.name, tuple(sample.labels.items()))
                    of_family[key] = of_family.get(key, 0.0) + sample.value
                    metric.add_sample(sample.name, {**sample.labels, "replica": replica}, sample.value)
        for name, metric in found.items():
            for (sample_name, labels), value in sums[name].items():
                metric.add_sample(sample_name, dict(labels), value)
            yield metric
