"""Which combinations of a test's parameters are tried with every change, and which are `slow`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import combinations
from zlib import crc32

import pytest

FEW = 24  # combinations that are all tried
_ELSEWHERE = ("emulated", "gpu", "slow", "browser", "ray")  # tests that `make test` does not run

Pair = tuple[str, int, str, int]


def mark_products(items: list[pytest.Item]) -> None:
    """Of a test with many combinations of three parameters or more, enough stay that any two values of two parameters
    meet in one of them: a mistake that needs three certain values at once is left to `make test-all`."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        elsewhere = any(item.get_closest_marker(name) for name in _ELSEWHERE)
        if isinstance(item, pytest.Function) and not elsewhere and len(_params(item)) > 2:
            tests[item.nodeid.partition("[")[0]].append(item)
    for combined in tests.values():
        if len(combined) > FEW:
            _mark_others(combined)


def _mark_others(combined: list[pytest.Function]) -> None:
    """Take those that have the most new pairs, then those that have fewer, until no pair is left."""
    # In an order without order, as neighbours have most of their pairs in common.
    left = sorted(combined, key=lambda item: crc32(item.nodeid.encode()))
    pairs = {item: frozenset(_pairs(item)) for item in left}
    met: set[Pair] = set()
    for least in range(max(map(len, pairs.values())), 0, -1):
        others = []
        for item in left:
            if len(pairs[item] - met) >= least:
                met |= pairs[item]
            else:
                others.append(item)
        left = others
    for item in left:
        item.add_marker(pytest.mark.slow)


def _params(item: pytest.Function) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _pairs(item: pytest.Function) -> Iterator[Pair]:
    """The values are known by their objects, which all combinations share: not all can be compared."""
    values = sorted((name, id(value)) for name, value in _params(item).items())
    for (one, first), (other, second) in combinations(values, 2):
        yield one, first, other, second
