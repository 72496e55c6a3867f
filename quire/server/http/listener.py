"""Where connections come in: a bounded number of them, and what is done with one too many."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import logging
import os
import socket
import ssl
from collections.abc import Coroutine, Sequence
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.http.connection import Connection, Times
from quire.server.http.descriptors import SPARE
from quire.server.middleware import OPEN
from quire.server.paths import route_path
from quire.server.responses.errors import ApiError

logger = logging.getLogger("quire.server")

_AT_ONCE = 8  # that are accepted before what they ask is looked at
_SHARE = 32  # this part of the connections goes at once, the longest idle first, when there is no room
_YOUNG = 0.5  # seconds in which a connection is not idle: what it asks may be here, and not yet read
_PAUSE = 0.2  # seconds without accepting, when the process has no file descriptor left
_SELDOM = 60.0  # seconds between two lines about the same thing
_SHUTDOWN = 2.0  # seconds for the end of TLS
_KEEPALIVE = (("TCP_KEEPIDLE", 60), ("TCP_KEEPINTVL", 15), ("TCP_KEEPCNT", 4))  # a client that has lost its network

_FULL = ApiError(503, "there are too many connections: try again later.", headers={"Retry-After": "1"})


class Listener:
    """Accepts connections, and knows those that are open. All of it runs in one event loop.

    With `most` of them, those that have been idle the longest make room. Where all are busy, a new one is told 503,
    unless it asks as a probe does.
    """

    def __init__(self, app: ASGIApp, times: Times, most: int, secure: ssl.SSLContext | None = None) -> None:
        self._app = app
        self._times = times
        self._most = most
        self._secure = secure
        self._loop = asyncio.get_running_loop()
        self._sockets: list[socket.socket] = []
        self._open: dict[Connection, asyncio.Task[None]] = {}  # with what establishes them
        self._one_too_many: set[Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._told: dict[str, tuple[float, int]] = {}

    @property
    def connections(self) -> int:
        return len(self._open)

    def start(self, sockets: Sequence[socket.socket]) -> None:
        """Accept from these, which listen and do not block."""
        self._sockets = list(sockets)
        for one in self._sockets:
            self._loop.add_reader(one, self._accept, one)

    async def stop(self, seconds: float) -> None:
        """Accept no more, let every answer that is being given come to its end, and end those that last longer."""
        for one in self._sockets:
            self._loop.remove_reader(one)
            one.close()
        self._sockets = []
        for connection, opening in list(self._open.items()):
            opening.cancel()
            connection.stop()
        end = self._loop.time() + seconds
        while (self._open or self._tasks) and self._loop.time() < end:
            await asyncio.sleep(0.05)
        if self._tasks:
            logger.error("%d requests are broken off: the time to finish is over", len(self._tasks))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        for connection in list(self._open):
            connection.abort()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- coming in ------------------------------------------------------------------------------------------------

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_AT_ONCE):
            try:
                client, _ = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:  # gone before it was accepted
                continue
            except OSError as error:
                self._pause(listening, error)
                return
            self._admit(client)

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        """No descriptor or no memory is left: those who wait can wait, and the idle make room."""
        self._seldom("connections cannot be accepted (%s)", os.strerror(error.errno or 0))
        self._make_room()
        self._loop.remove_reader(listening)

        def resume() -> None:
            if listening in self._sockets:
                self._loop.add_reader(listening, self._accept, listening)

        self._loop.call_later(_PAUSE, resume)

    def _admit(self, client: socket.socket) -> None:
        client.setblocking(False)
        if client.family != socket.AF_UNIX:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE:
                if hasattr(socket, name):
                    client.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        too_many = len(self._open) >= self._most and not self._make_room()
        if too_many:
            self._seldom("%d connections are open and busy, the most there may be (--max-connections)", self._most)
            if len(self._open) >= self._most + SPARE and not self._make_room(one_too_many=True):
                self._turn_away(client)
                return
        app = _probes_only(self._app) if too_many else self._app
        connection = Connection(app, self._times, self._begin, self._forget, last=too_many)
        if too_many:
            self._one_too_many.add(connection)
        self._open[connection] = self._loop.create_task(self._establish(connection, client))

    async def _establish(self, connection: Connection, client: socket.socket) -> None:
        more: dict[str, Any] = {}
        if self._secure is not None:
            times = {"ssl_handshake_timeout": self._times.header, "ssl_shutdown_timeout": _SHUTDOWN}
            more = {"ssl": self._secure, **times}
        try:
            await self._loop.connect_accepted_socket(lambda: connection, client, **more)
        except BaseException as error:  # no TLS, not in time, or no room for it any more
            self._forget(connection)
            client.close()
            if not isinstance(error, (OSError, asyncio.TimeoutError, asyncio.CancelledError)):
                raise

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _forget(self, connection: Connection) -> None:
        self._open.pop(connection, None)
        self._one_too_many.discard(connection)

    # -- too many -------------------------------------------------------------------------------------------------

    def _make_room(self, one_too_many: bool = False) -> bool:
        """End the connections that have been idle the longest; False: none is."""
        among = self._one_too_many if one_too_many else self._open.keys() - self._one_too_many
        latest = self._loop.time() - (0.0 if one_too_many else _YOUNG)
        idle = [(since, id(one), one) for one in among if (since := one.idle_since) is not None and since <= latest]
        for _, _, connection in heapq.nsmallest(max(1, len(among) // _SHARE), idle):
            self._open[connection].cancel()  # while it is being established, there is nothing else
            connection.abort()
            self._forget(connection)
        return bool(idle)

    def _turn_away(self, client: socket.socket) -> None:
        if self._secure is None:
            content = json.dumps(_FULL.body).encode()
            head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\n"
            head += f"content-length: {len(content)}\r\nconnection: close\r\n\r\n"
            with contextlib.suppress(OSError):
                client.send(head.encode() + content)
        client.close()

    def _seldom(self, line: str, *facts: object) -> None:
        """Log a warning, at most once a minute."""
        now = self._loop.time()
        last, unsaid = self._told.get(line, (-_SELDOM, 0))
        if now - last < _SELDOM:
            self._told[line] = (last, unsaid + 1)
            return
        self._told[line] = (now, 0)
        logger.warning(line, *facts, extra={"unlogged": unsaid} if unsaid else None)


def _probes_only(app: ASGIApp) -> ASGIApp:
    """503 for all but the routes that tell how the server is."""

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path({**scope, "root_path": getattr(app, "root_path", "")})
        await (app if path in OPEN else _FULL.response)(scope, receive, send)

    return limited
