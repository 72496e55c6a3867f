"""What Ray costs: replicas.py MODEL [--rounds N] [--streams N]

One server (`quire serve`), and one replica behind a door (`quire deploy`), with as many threads each, in turns: output
tokens per second of requests that are sent at once and streamed, and time to the first token of one request at a time.
Needs quire-llm[ray]. The clients run in this process, on the same cores.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parent))

from serve import Server, body, complete, together

from quire import LLM
from quire.cli.workload import Requests, workload_for
from quire.distributed import deploy
from quire.distributed.deployment import Deployment, read_deployment


@dataclass
class Door:
    """Where the door listens; `serve.Server` to clients. plan: what was deployed."""

    host: str
    port: int
    plan: Deployment


def deployed(model: str, threads: int) -> Door:
    """One replica on a cluster of this machine."""
    import ray

    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"})
    ray.init("local", num_cpus=threads, include_dashboard=False, log_to_driver=False)
    replicas = {"min": 1, "max": 1, "cpus": threads}
    plan = read_deployment({"model": model, "port": 0, "disable_access_log": True, "deploy": {"replicas": replicas}})
    address = urlsplit(deploy.start(plan))
    assert address.hostname is not None and address.port is not None
    return Door(address.hostname, address.port, plan)


async def first_token(server: Any, requests: Requests, salt: str) -> float:
    """Milliseconds, the median of requests one after the other."""
    found = [(await complete(server, body(ids[:32], 2, salt, True))).first for ids, _ in requests]
    return 1000 * median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(options.threads)
    llm = LLM(options.model)
    requests = workload_for(llm, options.streams)
    del llm
    door = deployed(options.model, options.threads)
    with Server(options.model) as server:
        rates: dict[str, list[float]] = {"one server": [], "a replica": []}
        firsts: dict[str, list[float]] = {"one server": [], "a replica": []}
        for turn in range(options.rounds + 1):  # the first is not counted
            for name, where in (("one server", server), ("a replica", door)):
                salt = f"{name}-{turn}"
                rate = asyncio.run(together(where, requests, salt, True))  # type: ignore[arg-type]
                first = asyncio.run(first_token(where, requests, f"first-{salt}"))
                if turn:
                    rates[name].append(rate)
                    firsts[name].append(first)
                    print(f"{name:10s} {rate:7.1f} out tok/s, first token after {first:6.1f} ms", flush=True)
    pairs = [one / base for one, base in zip(rates["a replica"], rates["one server"], strict=True)]
    later = [one - base for one, base in zip(firsts["a replica"], firsts["one server"], strict=True)]
    print(
        f"{options.streams} streams: a replica / one server {median(pairs):.3f} ({min(pairs):.3f} - {max(pairs):.3f})"
    )
    print(f"first token: {median(later):+.1f} ms ({min(later):+.1f} - {max(later):+.1f})")
    deploy.end(door.plan)


if __name__ == "__main__":
    main()
