"""What it costs to be watched: events.py [MODEL] [--streams 32] [--pages 3] [--rate 10] [--rounds 8] [--tokens 96]

A server answers as many streams at once while nobody watches, and while so many read GET /v1/engine/events, in turns:
first one way, then the other, then the other way round. Printed are the ratio of output tokens a second of each two
neighbours (target: a median of 0.99 or more), and that of the server's processor time. Readers of events are in this
process, as the streams' clients are, and draw nothing; all share the server's cores. MODEL: a directory or hub id; that
of `benchmarks/cpu.py`, 254 M parameters in bf16 at random, unless it is given.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from cpu import make_llama
from serve import Server, together

TARGET = 0.99
PROMPT = (32, 128)  # tokens, at random
WARM = 4  # tokens of the streams that come first, and are not counted

Requests = list[tuple[list[int], int]]


class Page:
    """Reads the engine's events until it is closed. events, bytes: what has come."""

    def __init__(self, server: Server, rate: float) -> None:
        self.events = self.bytes = 0
        self._server = server
        self._rate = rate

    async def read(self) -> None:
        reader, writer = await asyncio.open_connection(self._server.host, self._server.port)
        writer.write(f"GET /v1/engine/events?rate={self._rate:g} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
        try:
            while piece := await reader.read(1 << 16):
                self.events += piece.count(b"event: state")
                self.bytes += len(piece)
        finally:
            writer.close()


async def round_of(server: Server, requests: Requests, salt: str, pages: list[Page]) -> tuple[float, float]:
    """(output tokens a second, seconds of the server's processor time), while these pages are open."""
    reading = [asyncio.ensure_future(page.read()) for page in pages]
    while not all(page.events for page in pages):
        await asyncio.sleep(0.01)
    before = server.cpu()
    rate = await together(server, requests, salt, True)
    used = server.cpu() - before
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    return rate, used


def draw(streams: int, tokens: int) -> Requests:
    rng = random.Random(0)
    return [([rng.randrange(10, 200) for _ in range(rng.randint(*PROMPT))], tokens) for _ in range(streams)]


def measure(server: Server, arguments: argparse.Namespace) -> float:
    """Prints each pair; returns the median ratio."""
    requests = draw(arguments.streams, arguments.tokens)
    asyncio.run(together(server, [(ids, WARM) for ids, _ in requests], "warm", True))
    ratios, costs, told, size = [], [], 0, 0
    for turn in range(arguments.rounds):
        found: dict[bool, tuple[float, float]] = {}
        for watched in (False, True) if turn % 2 == 0 else (True, False):
            pages = [Page(server, arguments.rate) for _ in range(arguments.pages if watched else 0)]
            found[watched] = asyncio.run(round_of(server, requests, f"{turn}-{watched}", pages))
            told += sum(page.events for page in pages)
            size += sum(page.bytes for page in pages)
        ratios.append(found[True][0] / found[False][0])
        costs.append(found[True][1] / found[False][1])
        print(
            f"{found[False][0]:7.1f} out tok/s, watched {found[True][0]:7.1f}: {ratios[-1]:.4f}; "
            f"processor time {costs[-1]:.4f}",
            flush=True,
        )
    print(f"{arguments.streams} streams, {arguments.pages} pages at {arguments.rate:g} a second", end="")
    print(f": {told} events of {size // max(1, told):,} bytes")
    print(f"watched / not: {median(ratios):.4f} ({min(ratios):.4f} - {max(ratios):.4f}; target {TARGET})", end="")
    print(f"; processor time {median(costs):.4f}")
    return median(ratios)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a directory or hub id; made at random unless it is given")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--pages", type=int, default=3)
    parser.add_argument("--rate", type=float, default=10, help="events a second")
    parser.add_argument("--rounds", type=int, default=8, help="pairs")
    parser.add_argument("--tokens", type=int, default=96, help="of each stream's answer")
    arguments = parser.parse_args()
    with ExitStack() as held:
        model = arguments.model
        if model is None:
            model = str(make_llama(Path(held.enter_context(tempfile.TemporaryDirectory())) / "llama"))
        ratio = measure(held.enter_context(Server(model)), arguments)
    sys.exit(0 if ratio >= TARGET else 1)


if __name__ == "__main__":
    main()
