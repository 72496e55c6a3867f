"""Which replica is best for a request.

Each adapter, and within it each beginning of prompts, has an order of replicas of its own (rendezvous hashing, Thaler
and Ravishankar 1998): what one of them has in its cache and on its device is asked for there again. It is used as long
as it has not much more to do than the others (bounded loads, Mirrokni et al. 2018); then the next in the order is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from quire.distributed.hints import tag_of

_UNEVEN = 1.25  # how many times the mean a replica may have to do
_SPREAD = 4  # requests that a replica may have in any case
_FEW = 4  # an adapter lives on this part of all replicas first: one of so many


def ranked(replicas: Sequence[str], hints: Mapping[str, Any], running: Mapping[str, int]) -> list[list[str]]:
    """The replicas in ranks, the best first; all of one rank are as good.

    running: requests that each has. `avoid` among the hints: replicas that come into question
    where there are no others. Without hints, and where all that are wanted have too much to do: the least loaded.
    """
    if not replicas:
        return []
    replicas = [name for name in replicas if name not in hints.get("avoid", ())] or replicas
    by_load: dict[int, list[str]] = {}
    for name in replicas:
        by_load.setdefault(running.get(name, 0), []).append(name)
    least_loaded = [by_load[load] for load in sorted(by_load)]
    kept = [name for name in replicas if tag_of(name) == hints.get("tag")]
    key = f"{hints.get('adapter')}\0{hints.get('prefix')}" if "prefix" in hints else hints.get("adapter")
    if key is None:
        return [kept, *least_loaded] if kept else least_loaded
    total = sum(running.get(name, 0) for name in replicas)
    most = max(_SPREAD, ceil(_UNEVEN * (total + 1) / len(replicas)))
    wanted = [name for name in _order(replicas, hints.get("adapter"), key) if running.get(name, 0) < most]
    return [kept, *([name] for name in wanted), *least_loaded] if kept else [[one] for one in wanted] + least_loaded


def _order(replicas: Sequence[str], adapter: Any, key: Any) -> list[str]:
    """Replicas by their rank for an adapter: a few that it lives on, and of these first who has this beginning."""
    if adapter is None:
        return sorted(replicas, key=lambda name: _score(name, key), reverse=True)
    few = max(1, ceil(len(replicas) / _FEW))
    by_adapter = sorted(replicas, key=lambda name: _score(name, adapter), reverse=True)
    return sorted(by_adapter[:few], key=lambda name: _score(name, key), reverse=True) + by_adapter[few:]


def _score(replica: str, key: Any) -> bytes:
    return hashlib.sha256(f"{replica}\0{key}".encode()).digest()
