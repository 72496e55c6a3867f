"""The HTTP server in a thread, around any application, and clients that speak to it byte by byte."""

from __future__ import annotations

import asyncio
import re
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI

from quire.config import ServerConfig
from quire.server.http.server import HttpServer


class InThread:
    """An application, served from a thread of this process. Use as a context manager."""

    def __init__(self, app: FastAPI, config: ServerConfig, start: float = 60.0) -> None:
        self._server = HttpServer(app, config)
        self._start = start
        self.url = ""

    def __enter__(self) -> InThread:
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        end = time.monotonic() + self._start
        while not self._server.address:
            assert self._thread.is_alive() and time.monotonic() < end, "the server did not start"
            time.sleep(0.005)
        self.url = self._server.address
        return self

    async def _serve(self) -> None:
        await self._server.start()
        await self._server.wait(lambda: False)
        await self._server.stop(3)

    def __exit__(self, *error: object) -> None:
        self._server.end()
        self._thread.join(60)
        assert not self._thread.is_alive(), "the server did not end"

    @property
    def connections(self) -> int:
        return self._server.connections

    def connect(self, receive_buffer: int | None = None) -> socket.socket:
        """A connection of 30 seconds' patience."""
        host, port = re.sub("https?://", "", self.url).rsplit(":", 1)
        connection = socket.socket()
        if receive_buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(30)
        connection.connect((host, int(port)))
        return connection

    def ask(self, *parts: bytes) -> bytes:
        """Send these, and read all that comes until the server closes."""
        with self.connect() as client:
            for part in parts:
                client.sendall(part)
            return until_closed(client)


def until_closed(client: socket.socket) -> bytes:
    """All that comes until the server ends the connection, in whatever way."""
    parts = []
    try:
        while part := client.recv(65536):
            parts.append(part)
    except (ConnectionResetError, BrokenPipeError):
        pass
    return b"".join(parts)


def seconds_open(client: socket.socket, sending: Callable[[], Any] | None = None, every: float = 0.05) -> float:
    """How long the server keeps a connection, on which something is sent all the time."""
    begun = time.monotonic()
    client.settimeout(every)
    while time.monotonic() - begun < 40:
        try:
            if sending is not None:
                sending()
            if not client.recv(65536):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - begun


def message(method: str, path: str, *lines: str, body: bytes = b"", version: str = "1.1") -> bytes:
    """A request as it is on the wire; without any header but these and Host."""
    return "\r\n".join([f"{method} {path} HTTP/{version}", "Host: here", *lines, "", ""]).encode() + body
