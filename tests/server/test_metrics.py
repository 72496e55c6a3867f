"""What is counted of a step together is what would be counted one by one."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Histogram

from quire.server.metrics import StepHistogram

BUCKETS = (0.01, 0.1, 1.0)


@pytest.mark.parametrize("values", [[], [0.01], [0.0, 0.01, 0.05, 0.1, 0.10001, 1.0, 7.0, 0.05], [float("inf"), 1e-9]])
def test_all_at_once_is_one_by_one(values: list[float]) -> None:
    told = []
    for cls in (Histogram, StepHistogram):
        registry = CollectorRegistry()
        histogram = cls("seconds", "Of something.", buckets=BUCKETS, registry=registry)
        for _ in range(2):
            if isinstance(histogram, StepHistogram):
                histogram.observe_all(values)
            else:
                for one in values:
                    histogram.observe(one)
        told.append([(s.name, s.labels, pytest.approx(s.value)) for m in registry.collect() for s in m.samples
                     if not s.name.endswith("_created")])  # fmt: skip
    assert [(n, k, v.expected) for n, k, v in told[0]] == told[1] and len(told[0]) == len(BUCKETS) + 3
