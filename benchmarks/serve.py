"""What HTTP costs: serve.py MODEL [--case throughput|sweep|idle|all] [--rounds N] [--rates R ...] [--out FILE.png]

The server is a process of its own; its clients run in this one, on the same cores, and are as light as they can be.

throughput  the workload of `quire bench` (32 requests) and twice as much, through HTTP (streamed, and not), in turns
            with LLM.generate in this process: ratios of output tokens per second
sweep       requests arriving at random (Poisson) at several rates: p50 and p99 of time to first token and of
            inter-token latency, printed and plotted
idle        200 streams that nobody reads: the server's processor time; and 200 that wait for their turn behind one that
            runs: what they cost it
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from quire import LLM, SamplingParams
from quire.cli.workload import Requests, workload_for

IDLE_STREAMS = 200
SECONDS = 10  # over which idleness is watched
COUNTS = (32, 64)  # requests of `throughput`


@dataclass
class Timing:
    """One streamed request: when it was sent, and when each of its chunks came (seconds)."""

    sent: float
    chunks: list[float] = field(default_factory=list)

    @property
    def first(self) -> float:
        return self.chunks[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.chunks, self.chunks[1:], strict=False)]


class Server:
    """`quire serve` on a free port."""

    def __init__(self, model: str, *flags: str) -> None:
        command = [sys.executable, "-m", "quire.server", model, "--port", "0", "--disable-access-log", *flags]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            found = re.search(r"listening on http://([\d.]+):(\d+)", line)
            if found:
                self.host, self.port = found[1], int(found[2])
                break
        else:
            raise SystemExit("the server did not start")

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait(60)

    def cpu(self) -> float:
        """Seconds of processor time that it has used."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system


def body(token_ids: Sequence[int], wanted: int, salt: str, stream: bool) -> dict[str, Any]:
    return {
        "prompt": list(token_ids),
        "max_tokens": wanted,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
        "return_token_ids": stream,  # so that each token has its event, even one that is half a character
        "cache_salt": salt,
    }


async def post(server: Server, data: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request on a connection of its own."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    text = json.dumps(data).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {server.host}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    )
    writer.write(head.encode() + text)
    await writer.drain()
    return reader, writer


async def complete(server: Server, data: dict[str, Any]) -> Timing:
    """Send a request and read all of its answer."""
    timing = Timing(time.perf_counter())
    reader, writer = await post(server, data)
    done = False
    while piece := await reader.read(1 << 16):
        now = time.perf_counter()
        timing.chunks += [now] * piece.count(b'"index":')
        done = done or b"[DONE]" in piece or b'"usage":{' in piece
    writer.close()
    if not done:
        raise SystemExit("an answer broke off")
    return timing


async def together(server: Server, requests: Requests, salt: str, stream: bool) -> float:
    """Output tokens per second of requests that are sent at once."""
    begin = time.perf_counter()
    await asyncio.gather(*(complete(server, body(ids, wanted, salt, stream)) for ids, wanted in requests))
    return sum(wanted for _, wanted in requests) / (time.perf_counter() - begin)


def generate(llm: LLM, requests: Requests, salt: str) -> float:
    prompts = [{"prompt_token_ids": ids, "cache_salt": salt} for ids, _ in requests]
    params = [SamplingParams(temperature=0, max_tokens=wanted, ignore_eos=True) for _, wanted in requests]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.perf_counter() - begin)


def throughput(model: str, rounds: int) -> None:
    llm = LLM(model)
    with Server(model) as server:
        for count in COUNTS:
            requests = workload_for(llm, count)
            warm = [(ids[:32], 4) for ids, _ in requests]
            generate(llm, warm, "warm")
            asyncio.run(together(server, warm, "warm", True))
            rates: dict[str, list[float]] = {"LLM.generate": [], "HTTP, streamed": [], "HTTP, whole": []}
            for turn in range(rounds):
                salt = f"{count}-{turn}"
                rates["LLM.generate"].append(generate(llm, requests, salt))
                rates["HTTP, streamed"].append(asyncio.run(together(server, requests, salt, True)))
                rates["HTTP, whole"].append(asyncio.run(together(server, requests, salt + "w", False)))
            for name, values in rates.items():
                pairs = [value / base for value, base in zip(values, rates["LLM.generate"], strict=True)]
                print(
                    f"{count:4d} requests  {name:15s} {median(values):7.1f} out tok/s  "
                    f"{median(pairs):.3f} of LLM.generate ({min(pairs):.3f} - {max(pairs):.3f})",
                    flush=True,
                )


async def arriving(server: Server, requests: Requests, rate: float, salt: str) -> list[Timing]:
    """Requests that arrive at random, so many a second."""
    draw = random.Random(salt)
    tasks = []
    for ids, wanted in requests:
        tasks.append(asyncio.ensure_future(complete(server, body(ids, wanted, salt, True))))
        await asyncio.sleep(draw.expovariate(rate))
    return await asyncio.gather(*tasks)


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def sweep(model: str, rates: Sequence[float], count: int, out: Path) -> None:
    rows = []
    llm = LLM(model)  # says which token ids a prompt of text may have
    drawn = {rate: workload_for(llm, count, int(rate * 100)) for rate in rates}
    warm = workload_for(llm, 4, 1, output=(4, 4))
    del llm
    with Server(model) as server:
        asyncio.run(together(server, warm, "warm", True))
        for rate, requests in drawn.items():
            begin = time.perf_counter()
            timings = asyncio.run(arriving(server, requests, rate, f"sweep-{rate}"))
            seconds = time.perf_counter() - begin
            firsts = [timing.first for timing in timings]
            gaps = [gap for timing in timings for gap in timing.gaps]
            tokens = sum(wanted for _, wanted in requests)
            row = (rate, *(1000 * percentile(v, s) for v in (firsts, gaps) for s in (0.5, 0.99)), tokens / seconds)
            rows.append(row)
            print(
                f"{rate:5.2f} requests/s  first token p50 {row[1]:7.0f} p99 {row[2]:7.0f} ms  "
                f"inter-token p50 {row[3]:6.1f} p99 {row[4]:6.1f} ms  {row[5]:6.1f} out tok/s",
                flush=True,
            )
    plot(rows, out, model)


def plot(rows: Sequence[tuple[float, ...]], out: Path, model: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for axis, title, columns in ((axes[0], "time to first token", (1, 2)), (axes[1], "inter-token latency", (3, 4))):
        for column, name in zip(columns, ("p50", "p99"), strict=True):
            axis.plot([row[0] for row in rows], [row[column] for row in rows], marker="o", label=name)
        axis.set(title=title, xlabel="requests a second (Poisson)", ylabel="ms", yscale="log")
        axis.grid(True, which="both", alpha=0.3)
        axis.legend()
    figure.suptitle(f"quire serve, {Path(model).name}: 32 - 256 prompt and 32 - 128 output tokens a request")
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    print(f"plotted to {out}")


async def stalled(server: Server, streams: int, tokens: int) -> float:
    """The server's processor time, as a share of one core, while nobody reads what it has streamed."""
    opened = [await post(server, body([11, 12, 13 + place % 50], tokens, "idle", True)) for place in range(streams)]
    while True:  # until nothing is computed any more
        before = server.cpu()
        await asyncio.sleep(1.0)
        if server.cpu() - before < 0.05:
            break
    before = server.cpu()
    await asyncio.sleep(SECONDS)
    used = (server.cpu() - before) / SECONDS
    for _, writer in opened:
        writer.close()
    return used


async def behind(server: Server, streams: int, tokens: int) -> tuple[float, float]:
    """(tokens a second of one stream alone, and of one behind which so many others wait)"""
    rates = []
    for waiting in (0, streams):
        running = asyncio.ensure_future(complete(server, body([11, 12], tokens, f"behind-{waiting}", True)))
        await asyncio.sleep(0.2)
        others = [await post(server, body([13], tokens, "wait", True)) for _ in range(waiting)]
        timing = await running
        rates.append((len(timing.chunks) - 1) / (timing.chunks[-1] - timing.chunks[0]))
        for _, writer in others:
            writer.close()
        await asyncio.sleep(0.5)
    return rates[0], rates[1]


def idle(model: str, rounds: int) -> None:
    with Server(model) as server:
        used = asyncio.run(stalled(server, IDLE_STREAMS, 64))
        print(f"{IDLE_STREAMS} idle streams: {100 * used:.2f} % of one core", flush=True)
    with Server(model, "--max-num-seqs", "1") as server:
        pairs = [asyncio.run(behind(server, IDLE_STREAMS, 128)) for _ in range(rounds)]
        slower = median(1 - after / before for before, after in pairs)
        print(f"one stream with {IDLE_STREAMS} waiting behind it: {100 * slower:.2f} % slower than alone")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory or hub id")
    parser.add_argument("--case", choices=("throughput", "sweep", "idle", "all"), default="all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.5, 1, 2, 3, 4, 6])
    parser.add_argument("--requests", type=int, default=60, help="of each rate of the sweep")
    parser.add_argument("--out", type=Path, default=Path("serve.png"))
    arguments = parser.parse_args()
    if arguments.case in ("throughput", "all"):
        throughput(arguments.model, arguments.rounds)
    if arguments.case in ("sweep", "all"):
        sweep(arguments.model, arguments.rates, arguments.requests, arguments.out)
    if arguments.case in ("idle", "all"):
        idle(arguments.model, arguments.rounds)


if __name__ == "__main__":
    main()
