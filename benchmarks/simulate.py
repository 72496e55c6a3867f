"""What routing does to many replicas with many adapters: a simulation in virtual time.

    python benchmarks/simulate.py [--replicas 1 10 100] [--requests 100] [--adapters 100000] [--zipf 1.0] [--load 0.7]
                                  [--rules random hash ...] [--seed 0] [--json]

Each replica is quire's own scheduler, block pool, prefix index and account of adapters (`simulated.py`); steps and
reading adapters take the time of a model of one H100 with a Llama 3 8B, fitted to the figures of docs/gpu.md. Requests
come at random (Poisson), to `--load` of what one replica does alone when its adapters are there; there are
`--requests` for each replica. Each has an adapter by Zipf's law, one of the adapter's eight beginnings of 256 tokens,
128 tokens of its own, and an answer of 64 in the mean (geometric). The first third warms up: times, tokens and loads
are not counted there, and hits are. Loads are unfinished requests: of the replica that has the most, over the mean.

Rules: random; round_robin; least_loaded (fewest unfinished requests); residency (of those that have the adapter in
memory, the least loaded); residency_prefix (of these, one that has its beginning in the pool); hash (consistent
hashing). The last three leave a replica that has over 1.25 x the mean to do, and 4 at least, for the least loaded, or
the next on the ring. Routers know all loads, adapters and beginnings at once: real ones know less.

What takes time: some 62 tokens a request, each planned and committed by the scheduler, which makes 1,000 to 1,800
requests in a second of a core's time of an AMD EPYC (Zen 5). Memory: a replica's blocks with their keys, some 9 MB once
all are taken; of a request that has ended, 48 bytes are kept. 10^6 requests (`--replicas 100 --requests 10000`) take
some 20 minutes and 1.2 GB by each rule, with the modules of quire/platform/kv and scheduling compiled by mypyc, which
takes a third of the time off and changes no figure. Tokens a second include the end, when replicas run empty: compare
them among runs of the same size.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from hashlib import sha256
from heapq import heappop, heappush
from math import ceil
from typing import Any

import numpy as np
from simulated import H100, Profile, Replica, make_request, reference

from quire.platform.kv.prefix_index import KeyChain, root_key

SYSTEM, OWN, ANSWER = 256, 128, 64  # tokens
BEGINNINGS = 8  # of each adapter
UNEVEN, SPREAD = 1.25, 4
RING = 64  # places of a replica
CAPACITY_REQUESTS = 1000
WARM = 3  # one in so many requests warms up


@dataclass
class Workload:
    """Requests by their number: when each comes (s), with which adapter and which of its beginnings, and how long its
    answer is."""

    times: np.ndarray
    adapters: np.ndarray
    beginnings: np.ndarray
    answers: np.ndarray

    @classmethod
    def of(cls, count: int, rate: float, adapters: int, zipf: float, seed: int) -> Workload:
        """rate: requests a second."""
        rng = np.random.default_rng(seed)
        weights = np.arange(1, adapters + 1, dtype=np.float64) ** -zipf
        ranks = np.searchsorted(np.cumsum(weights) / weights.sum(), rng.random(count)) + 1
        answers = np.minimum(rng.geometric(1 / ANSWER, count), 8 * ANSWER)
        times = np.cumsum(rng.exponential(1 / rate, count))
        return cls(times, np.minimum(ranks, adapters), rng.integers(0, BEGINNINGS, count), answers)

    def prompt(self, number: int) -> list[int]:
        """One of the adapter's beginnings, and tokens that no other request has."""
        return [*_beginning(int(self.beginnings[number])), 1000 + number, *range(OWN - 1)]


def _beginning(number: int) -> list[int]:
    return [number, *range(SYSTEM - 1)]


@dataclass
class Fleet:
    """Replicas, and what a router knows: unfinished requests of each, and where adapters are in memory."""

    replicas: list[Replica]
    loads: np.ndarray
    unfinished: int = 0  # the sum of loads
    homes: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    turn: int = 0
    ring: list[tuple[bytes, int]] = field(default_factory=list)
    keys: dict[tuple[int, int], bytes] = field(default_factory=dict)  # the last of an adapter's beginning

    def most(self) -> int:
        """What a replica may have to do that is chosen for what it has."""
        return max(SPREAD, ceil(UNEVEN * (self.unfinished + 1) / len(self.replicas)))

    def key(self, adapter: int, beginning: int) -> bytes:
        if (adapter, beginning) not in self.keys:
            size = self.replicas[0].profile.block_size
            chain = KeyChain(root_key(adapters=((reference(adapter), 1.0),)))
            self.keys[adapter, beginning] = chain.extend(_beginning(beginning), SYSTEM, size)[-1]
        return self.keys[adapter, beginning]

    def has_beginning(self, place: int, adapter: int, beginning: int) -> bool:
        index = self.replicas[place].kv.pool.index
        return index is not None and index.block_of(self.key(adapter, beginning)) is not None


def at_random(fleet: Fleet, adapter: int, beginning: int) -> int:
    return fleet.rng.randrange(len(fleet.replicas))


def round_robin(fleet: Fleet, adapter: int, beginning: int) -> int:
    fleet.turn += 1
    return fleet.turn % len(fleet.replicas)


def least_loaded(fleet: Fleet, adapter: int, beginning: int) -> int:
    least = np.flatnonzero(fleet.loads == fleet.loads.min())
    return int(least[fleet.rng.randrange(len(least))])


def residency(fleet: Fleet, adapter: int, beginning: int) -> int:
    most = fleet.most()
    there = [place for place in fleet.homes[adapter] if fleet.loads[place] < most]
    return min(there, key=fleet.loads.__getitem__) if there else least_loaded(fleet, adapter, beginning)


def residency_prefix(fleet: Fleet, adapter: int, beginning: int) -> int:
    most = fleet.most()
    there = [place for place in fleet.homes[adapter] if fleet.loads[place] < most]
    begun = [place for place in there if fleet.has_beginning(place, adapter, beginning)]
    return min(begun or there, key=fleet.loads.__getitem__) if there else least_loaded(fleet, adapter, beginning)


def by_hash(fleet: Fleet, adapter: int, beginning: int) -> int:
    if not fleet.ring:
        places = [(place, point) for place in range(len(fleet.replicas)) for point in range(RING)]
        fleet.ring = sorted((sha256(repr(("replica", *one)).encode()).digest(), one[0]) for one in places)
    most = fleet.most()
    first = bisect_left(fleet.ring, (sha256(b"adapter %d" % adapter).digest(), 0))
    for step in range(len(fleet.ring)):
        place = fleet.ring[(first + step) % len(fleet.ring)][1]
        if fleet.loads[place] < most:
            return place
    return least_loaded(fleet, adapter, beginning)


RULES: dict[str, Callable[[Fleet, int, int], int]] = {
    "random": at_random,
    "round_robin": round_robin,
    "least_loaded": least_loaded,
    "residency": residency,
    "residency_prefix": residency_prefix,
    "hash": by_hash,
}


class Simulation:
    """Requests to their ends, by one rule."""

    def __init__(self, profile: Profile, replicas: int, rule: str, workload: Workload) -> None:
        self.workload = workload
        self.fleet = Fleet([Replica(profile) for _ in range(replicas)], np.zeros(replicas, dtype=np.int64))
        self.first_tokens = np.full(len(workload.times), np.nan)
        self.ends = np.full(len(workload.times), np.nan)
        self.now = 0.0
        self._first_counted = len(workload.times) // WARM
        self._route = RULES[rule]
        self._events: list[tuple[float, int, int]] = []  # time, number, replica
        self._count = 0
        self._uneven = 0.0  # the highest load over the mean, added up over the requests that count
        self._due = [0] * replicas  # the number of each one's event; others of it are void

    def run(self) -> None:
        for number, at in enumerate(self.workload.times):
            self._until(float(at))
            self._arrive(number)
        self._until(float("inf"))

    def _arrive(self, number: int) -> None:
        adapter, fleet = int(self.workload.adapters[number]), self.fleet
        place = self._route(fleet, adapter, int(self.workload.beginnings[number]))
        fleet.homes[adapter].add(place)
        fleet.loads[place] += 1
        fleet.unfinished += 1
        if number >= self._first_counted:
            self._uneven += int(fleet.loads.max()) * len(fleet.replicas) / fleet.unfinished
        answer = int(self.workload.answers[number])
        fleet.replicas[place].add(make_request(number, self.workload.prompt(number), answer, adapter))
        if fleet.replicas[place].plan is None:
            self._begin(place)

    def _until(self, end: float) -> None:
        while self._events and self._events[0][0] <= end:
            self.now, number, place = heappop(self._events)
            if self._due[place] != number:
                continue
            if self.fleet.replicas[place].plan is not None:
                self._finish(place)
            self._begin(place)
        self.now = end if end < float("inf") else self.now

    def _begin(self, place: int) -> None:
        replica = self.fleet.replicas[place]
        end = replica.begin(self.now) if replica.scheduler.has_work else None
        for uid in replica.tiers.gone:
            self.fleet.homes[uid].discard(place)
        replica.tiers.gone.clear()
        if end is None and replica.scheduler.has_work:
            end = replica.tiers.next_ready()  # it waits for an adapter
        self._count += 1
        self._due[place] = self._count
        if end is not None:
            heappush(self._events, (end, self._count, place))

    def _finish(self, place: int) -> None:
        for sequence in self.fleet.replicas[place].finish():
            if len(sequence.output_ids) == 1:
                self.first_tokens[int(sequence.request.request_id)] = self.now
            if sequence.finish_reason is not None:
                self.ends[int(sequence.request.request_id)] = self.now
                self.fleet.loads[place] -= 1
                self.fleet.unfinished -= 1
                sequence.request.sequences.clear()  # else they are a circle, and nothing looks for circles here

    def figures(self) -> dict[str, float]:
        """Of the requests that came after the first third."""
        work, replicas = self.workload, self.fleet.replicas
        assert not np.isnan(self.ends).any() and not self.fleet.loads.any() and not self.fleet.unfinished
        counted = slice(self._first_counted, None)
        waits = (self.first_tokens - work.times)[counted]
        hits = {tier: sum(one.budget.hits[tier] for one in replicas) for tier in ("device", "host", "disk")}
        span = self.ends.max() - work.times[counted][0]
        return {
            "tokens_a_second": float(work.answers[counted].sum() / span / len(replicas)),
            "first_token_median": float(np.median(waits)),
            "first_token_p99": float(np.quantile(waits, 0.99)),
            **{tier: hits[tier] / sum(hits.values()) for tier in hits},
            "prefix_hits": sum(one.kv.prefix_hits for one in replicas) / sum(one.kv.prefix_queries for one in replicas),
            "imbalance": self._uneven / len(waits),
        }


def capacity(profile: Profile, requests: int, seed: int) -> float:
    """Requests a second of one replica that always has enough to do, with 32 adapters that are there at once."""
    work = Workload.of(requests, 1e9, 32, 1.0, seed)
    simulation = Simulation(replace(profile, fetch=0.0, install=0.0), 1, "random", work)
    simulation.run()
    return requests / float(simulation.ends.max())


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    rate = args.load * capacity(H100, CAPACITY_REQUESTS, args.seed)
    for replicas in args.replicas:
        work = Workload.of(replicas * args.requests, rate * replicas, args.adapters, args.zipf, args.seed)
        for rule in args.rules:
            begun = time.perf_counter()
            simulation = Simulation(H100, replicas, rule, work)
            simulation.run()
            seconds = time.perf_counter() - begun
            yield {"replicas": replicas, "rule": rule, "rate": rate, **simulation.figures(), "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 10, 100])
    parser.add_argument("--requests", type=int, default=100, help="for each replica")
    parser.add_argument("--adapters", type=int, default=100_000)
    parser.add_argument("--zipf", type=float, default=1.0, help="the exponent of adapters' popularity")
    parser.add_argument("--load", type=float, default=0.7, help="of what a replica does when its adapters are there")
    parser.add_argument("--rules", nargs="+", choices=list(RULES), default=list(RULES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="one line for each case")
    args = parser.parse_args()
    gc.disable()  # it would look at all blocks of all replicas again and again; `_finish` leaves no circles
    if not args.json:
        print(
            f"{'replicas':>8} {'rule':<17}{'tokens/s':>9} {'first token, ms':>16} {'p99':>7}  adapter on device, host, "
            f"store {'prefix':>7} {'max/mean':>9} {'took':>7}"
        )
    for case in cases(args):
        if args.json:
            print(json.dumps(case), flush=True)
            continue
        tiers = " ".join(f"{100 * case[tier]:>8.1f} %" for tier in ("device", "host", "disk"))
        print(
            f"{case['replicas']:>8} {case['rule']:<17}{case['tokens_a_second']:>9.0f} "
            f"{1e3 * case['first_token_median']:>16.0f} {1e3 * case['first_token_p99']:>7.0f} {tiers} "
            f"{100 * case['prefix_hits']:>7.1f} % {case['imbalance']:>9.2f} {case['seconds']:>6.1f}s",
            flush=True,
        )


if __name__ == "__main__":
    main()
