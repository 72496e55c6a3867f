"""The HTTP server around an application: its sockets, its beginning and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import stat
from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI

from quire.config import ServerConfig
from quire.errors import QuireError
from quire.server.http.connection import Times
from quire.server.http.descriptors import room_for
from quire.server.http.listener import Listener

logger = logging.getLogger("quire.server")

_BACKLOG = 1024  # connections that the system holds until they are accepted
_TICK = 0.1  # seconds


class HttpServer:
    """Serves an application from `start` to `stop`. address: where it listens, once it does."""

    def __init__(self, app: FastAPI, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._secure = tls(config)
        self._listener: Listener | None = None
        self._life = contextlib.AsyncExitStack()
        self._stopping = False
        self.address = ""

    async def start(self) -> None:
        """Start the application, then listen. Raises QuireError where that is not possible."""
        await self._life.enter_async_context(self._app.router.lifespan_context(self._app))
        config = self._config
        times = Times(config.header_timeout, config.body_timeout, config.timeout_keep_alive, config.send_timeout)
        try:
            sockets = listening(config)
        except BaseException:
            await self._life.aclose()
            raise
        self._listener = Listener(self._app, times, room_for(config.max_connections), self._secure)
        self._listener.start(sockets)
        self.address = self._address(sockets[0])

    def _address(self, first: socket.socket) -> str:
        if self._config.uds is not None:
            return f"unix:{self._config.uds}"
        host, port = first.getsockname()[:2]
        return f"http{'s' * (self._secure is not None)}://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def connections(self) -> int:
        """How many are open."""
        return 0 if self._listener is None else self._listener.connections

    def end(self) -> None:
        """Let `serve` come to its end. May be called from a signal's handler, and from any thread."""
        self._stopping = True

    async def wait(self, failed: Callable[[], bool]) -> None:
        """Until `end` is called, or something has failed."""
        while not (self._stopping or failed()):
            await asyncio.sleep(_TICK)

    async def stop(self, seconds: float) -> None:
        """Close the port, let answers finish for so long, and end the application."""
        if self._listener is not None:
            await self._listener.stop(seconds)
        if self._config.uds is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._config.uds)
        await self._life.aclose()


def tls(config: ServerConfig) -> ssl.SSLContext | None:
    """Raises QuireError for a certificate or a key that cannot be used."""
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
    except (OSError, ValueError) as error:
        raise QuireError(
            f"ssl_certfile={config.ssl_certfile!r}, ssl_keyfile={config.ssl_keyfile!r}: cannot be used ({error})."
        ) from None
    return context


def listening(config: ServerConfig) -> list[socket.socket]:
    """Sockets that listen where the configuration says. Raises QuireError."""
    made: list[socket.socket] = []
    try:
        if config.uds is not None:
            made.append(_unix(config.uds))
        else:
            for family, kind, number, _, address in _addresses(config):
                one = socket.socket(family, kind, number)
                made.append(one)
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                one.bind(address)
        for one in made:
            one.setblocking(False)
            one.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        for one in made:
            one.close()
        where = config.uds or f"{config.host}:{config.port}"
        raise QuireError(f"{where} cannot be listened on ({error}): take another --port or --uds.") from None
    return made


def _addresses(config: ServerConfig) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    found = socket.getaddrinfo(config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    # Port 0 would be another one for each address.
    unique = list(dict.fromkeys(found))[: 1 if config.port == 0 else None]
    return unique  # type: ignore[return-value]


def _unix(path: str) -> socket.socket:
    """At the place of one that nobody listens on any more. Raises OSError, and QuireError where somebody does."""
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if Path(path).exists() and stat.S_ISSOCK(os.stat(path).st_mode):
            try:
                one.connect(path)
            except OSError:
                os.unlink(path)
            else:
                raise QuireError(f"{path}: another server listens there.")
            one.close()
            one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        one.bind(path)
        os.chmod(path, 0o666)  # who may reach it is said by its folder
    except BaseException:
        one.close()
        raise
    return one
