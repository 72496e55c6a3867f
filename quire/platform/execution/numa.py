"""Which processors go to which of several processes: each has some of one NUMA node's, or whole nodes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def nodes(root: Path = _NODES) -> list[list[int]]:
    """The processors that this process may use, by node; one node where the system does not tell."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    found = []
    for folder in sorted(root.glob("node[0-9]*"), key=lambda path: int(path.name.removeprefix("node"))):
        with suppress(OSError, ValueError):
            own = set(_numbers((folder / "cpulist").read_text())).intersection(allowed)
            if own:
                found.append(sorted(own))
    return found if sum(map(len, found)) == len(allowed) else [allowed]


def _numbers(text: str) -> list[int]:
    """Of a list such as 0-3,8: [0, 1, 2, 3, 8]."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def processors_for(size: int, by_node: Sequence[Sequence[int]] | None = None) -> list[tuple[int, ...]]:
    """Each of `size` processes' processors; empty ones where there are fewer than processes: all may use all then.

    by_node: `nodes()`. Shares are equal, as the slowest process keeps the others waiting; none has parts of two nodes
    where processes and nodes go into each other.
    """
    by_node = nodes() if by_node is None else by_node
    if len(by_node) > 1 and size % len(by_node) == 0 and all(len(own) >= size // len(by_node) for own in by_node):
        each = size // len(by_node)
        return [part for own in by_node for part in processors_for(each, [own])]
    numbers = [number for own in by_node for number in own]
    if len(numbers) < size:
        return [()] * size
    ends = [len(numbers) * rank // size for rank in range(size + 1)]
    return [tuple(numbers[first:end]) for first, end in pairwise(ends)]
