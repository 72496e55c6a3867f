"""Clients that cost as little as they can: http_client.py HOST PORT PATH CONNECTIONS

A file named on standard input has bodies, one JSON object a line. Each connection sends one, reads its answer, and
sends the next that nobody has sent; a line on standard output then has the seconds that all took, and this process's
own of processor time. Until standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_LENGTH = b"\r\ncontent-length: "


class _Client(asyncio.Protocol):
    """One connection. unsent: messages that all connections share; ended: set when this one has its last answer."""

    def __init__(self, unsent: Iterator[bytes]) -> None:
        self._unsent = unsent
        self._got = bytearray()
        self._due = 0  # bytes of the answer, once its head is here
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def _send(self) -> None:
        message = next(self._unsent, None)
        if message is not None:
            self._transport.write(message)
        else:
            self._transport.close()
            self.ended.set_result(None)

    def data_received(self, data: bytes) -> None:
        self._got += data
        if not self._due:
            end = self._got.find(b"\r\n\r\n")
            if end < 0:
                return
            if not self._got.startswith(b"HTTP/1.1 200 "):
                self.ended.set_exception(RuntimeError(bytes(self._got[:500]).decode()))
                self._transport.close()
                return
            place = self._got.index(_LENGTH) + len(_LENGTH)
            self._due = end + 4 + int(self._got[place : self._got.index(b"\r", place)])
        if len(self._got) >= self._due:
            self._got.clear()
            self._due = 0
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(RuntimeError("an answer broke off"))


async def _all(host: str, port: int, messages: list[bytes], connections: int) -> None:
    loop, unsent = asyncio.get_running_loop(), iter(messages)
    clients = [await loop.create_connection(lambda: _Client(unsent), host, port) for _ in range(connections)]
    await asyncio.gather(*(client.ended for _, client in clients))


def main() -> None:
    host, port, path, connections = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    for line in sys.stdin:
        bodies = Path(line.strip()).read_bytes().splitlines()
        head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: "
        messages = [b"%b%d\r\n\r\n%b" % (head.encode(), len(body), body) for body in bodies]
        begin, used = time.perf_counter(), time.process_time()
        asyncio.run(_all(host, port, messages, connections))
        print(json.dumps([time.perf_counter() - begin, time.process_time() - used]), flush=True)


if __name__ == "__main__":
    main()
