"""What the tests of this folder share."""

from __future__ import annotations

from quire import (
    SamplingParams,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
