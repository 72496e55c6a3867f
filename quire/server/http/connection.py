"""One connection, from the first byte to its end: in every state it has so much time, and no more."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from typing import Any, cast

import h11
from starlette.types import ASGIApp

from quire.server.http.exchange import Exchange, date
from quire.server.http.head import BadRequestError, read_head, take_head
from quire.server.responses.errors import ApiError

access = logging.getLogger("quire.server.access")

_SLICE = 16 << 10  # bytes that h11 gets at once
_TURN = 128  # events of one connection before the others have their turn
_PIPELINED = 64 << 10  # bytes of later requests; with more, the connection ends after the answer
_SILENCE = 1.0  # seconds without a byte of a body that nobody wants any more
_LINGER = 5.0  # seconds for the last bytes to go, and for the client to close
_MOMENT = 2.0  # seconds for the header of a connection that is one too many
_UNWANTED = 2 << 20  # bytes that are read after the last answer
_LEAST = 32 << 10  # bytes that a client which is behind must take in `send_timeout` seconds


@dataclass(frozen=True)
class Times:
    """Seconds: for a header, for a body, between two requests, and for a client to take 32 KiB that wait for it."""

    header: float
    body: float
    keep_alive: float
    send: float


class _State(Enum):
    WAITING = "no byte of a request is here"
    HEADER = "some of a request's header is here"
    SERVING = "the application has the request"
    DRAINING = "it is answered, and its body is still coming"
    CLOSING = "the last answer is on its way"


class Connection(asyncio.Protocol):
    """Reads requests, one after the other, and lets an `Exchange` answer each.

    begin_task: starts the application's work. gone: called with this connection when it has ended. last: it is for one
    request, and its client has but a moment for that.
    """

    def __init__(
        self,
        app: ASGIApp,
        times: Times,
        begin_task: Callable[[Coroutine[Any, Any, None]], None],
        gone: Callable[[Connection], None],
        last: bool = False,
    ) -> None:
        self._app = app
        self._times = times
        self._begin_task = begin_task
        self._gone = gone
        self._last = last
        self._loop = asyncio.get_running_loop()
        self._state = _State.WAITING
        self._since = self._loop.time()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._incoming = bytearray()
        self._seen = 0  # bytes of it that hold no whole header
        self._exchange: Exchange | None = None
        self._due = 0  # bytes of a body of known length that h11 has not got
        self._full = False  # of the body is as much here as the application wants for now
        self._turn_due = False
        self._behind: asyncio.Event | None = None  # set when the client has taken what was written
        self._written = self._seen_taken = self._unwanted = 0  # bytes

    # -- the listener's side --------------------------------------------------------------------------------------

    @property
    def idle_since(self) -> float | None:
        """The loop's time from which on nothing has been computed or sent for this client; None: something is."""
        return None if self._state in (_State.SERVING, _State.CLOSING) else self._since

    def stop(self) -> None:
        """End, after the answer that is being given."""
        self._last = True
        if self._state is _State.SERVING and self._exchange is not None:
            self._exchange.close_after()
        else:
            self._end()

    def abort(self) -> None:
        """End now."""
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio's side -------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is of another class
        self._enter(_State.WAITING, min(self._times.header, _MOMENT) if self._last else self._times.header)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for timer in (self._timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        if self._exchange is not None:
            self._exchange.client_gone()
        if self._behind is not None:
            self._behind.set()
        self._incoming.clear()
        self._gone(self)

    def data_received(self, data: bytes) -> None:
        if self._state is _State.CLOSING:  # read for nobody: unread, it would break the answer off
            self._unwanted += len(data)
            self._arm(min(_SILENCE, self._left(_LINGER)) if self._unwanted < _UNWANTED else 0.0)
            return
        self._incoming += data
        if self._state is _State.DRAINING:
            self._arm(min(_SILENCE, self._left(self._times.body)))
        if not self._turn_due:
            self._process()

    def eof_received(self) -> bool:
        """The client sends nothing more. It counts as gone; but an answer that is there at once it can have."""
        exchange = self._exchange
        if self._state is not _State.SERVING or exchange is None:
            self._end()
            return False
        exchange.close_after()
        exchange.client_left()
        return not self._is_secure

    def pause_writing(self) -> None:
        self._behind = asyncio.Event()
        self._watch_stall()

    def resume_writing(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
        if self._behind is not None:
            self._behind.set()
            self._behind = None
        if self._state is _State.WAITING:  # since the answer's end, but the client could not know
            self._enter(_State.WAITING, self._times.keep_alive)

    # -- the exchange's side --------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._transport is not None and data and self._state is not _State.CLOSING:
            self._written += len(data)
            self._transport.write(data)

    async def drained(self) -> None:
        """Wait while the client is behind."""
        if self._behind is not None:
            await self._behind.wait()

    def want_body(self) -> None:
        self._full = False
        self._read_on()

    def answered(self) -> None:
        """The exchange is over: on to the next, when the rest of this request has come, or to the end."""
        exchange = self._exchange
        assert exchange is not None
        self._full = False
        if exchange.closes or self._last:
            self._end()
            return
        if exchange.body_complete:
            # While the client is behind, its time for the next request has not begun.
            self._enter(_State.WAITING, self._times.keep_alive if self._behind is None else None)
        else:
            self._enter(_State.DRAINING, _SILENCE)
        self._read_on()
        if self._incoming and not self._turn_due:
            self._process()

    def refuse(self, status: int, message: str) -> None:
        """Answer what is no request, or in place of the application; the connection ends."""
        exchange = self._exchange
        if self._state is _State.CLOSING:
            return
        if self._state is _State.SERVING and exchange is not None:
            if exchange.begun:
                self.abort()
                return
            exchange.client_gone()
        elif self._state is _State.DRAINING:  # it has its answer
            self._end(unread=True)
            return
        content = json.dumps(ApiError(status, message).body).encode()
        lines = [
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
            "content-type: application/json",
            f"content-length: {len(content)}",
            f"date: {date().decode()}",
            "connection: close",
        ]
        self.write("\r\n".join([*lines, "", ""]).encode() + content)
        access.info("a malformed request", extra={"status": status, "error": message})
        self._end(unread=True)

    # -- requests out of bytes ------------------------------------------------------------------------------------

    def _process(self) -> None:
        """Read on in what has come, but not for longer than a turn: others wait."""
        try:
            for _ in range(_TURN):
                if not self._step():
                    return
        except BadRequestError as error:
            self.refuse(error.status, str(error))
            return
        self._turn_due = True
        self._pause()
        self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn_due = False
        self._read_on()
        self._process()

    def _step(self) -> bool:
        """Read one thing. False: there is no more to be read now. Raises BadRequestError."""
        if self._transport is None or self._state is _State.CLOSING:
            return False
        if self._state in (_State.WAITING, _State.HEADER):
            return self._step_head()
        assert self._exchange is not None
        if not self._exchange.body_complete:
            return self._step_body(self._exchange)
        # The next request waits for this one's answer. It is read all the same, to see the client leave.
        if len(self._incoming) > _PIPELINED or self._exchange.closes:
            self._exchange.close_after()
            self._incoming.clear()
        return False

    def _step_head(self) -> bool:
        text = take_head(self._incoming, self._seen)
        self._seen = len(self._incoming) if text is None else 0
        if text is None:
            if self._incoming and self._state is _State.WAITING:
                # A connection's first header has its time from the connection's first moment on.
                fresh = self._exchange is None
                self._enter(_State.HEADER, self._left(self._times.header) if fresh else self._times.header)
            return False
        head = read_head(text)
        self._due = head.length or 0
        self._exchange = Exchange(self, head, self._last)
        self._enter(_State.SERVING, None)
        assert self._transport is not None
        server, client = (self._transport.get_extra_info(name) for name in ("sockname", "peername"))
        scope = head.scope(self._is_secure, _address(server), _address(client))
        self._begin_task(self._exchange.run(self._app, scope))
        return bool(self._incoming)

    def _step_plain_body(self, exchange: Exchange) -> bool:
        part = bytes(self._incoming[: min(self._due, _SLICE * 8)])
        del self._incoming[: len(part)]
        self._due -= len(part)
        if part and not exchange.feed(part):
            self._full = True
            self._pause()
        if not self._due:
            self._end_of_body(exchange)
        return bool(self._incoming)

    def _end_of_body(self, exchange: Exchange) -> None:
        exchange.end_of_body()
        if self._state is _State.DRAINING:
            self._enter(_State.WAITING, self._times.keep_alive)

    def _step_body(self, exchange: Exchange) -> bool:
        machine = exchange.head.machine
        if machine is None:
            return self._step_plain_body(exchange)
        try:
            event = machine.next_event()
            if event is h11.NEED_DATA and self._incoming:
                known = exchange.head.length is not None
                part = bytes(self._incoming[: min(self._due, _SLICE * 8) if known else _SLICE])
                del self._incoming[: len(part)]
                self._due -= len(part) if known else 0
                machine.receive_data(part)
                return True
        except h11.RemoteProtocolError:
            raise BadRequestError(
                400, "the body's chunks are malformed, or what stands between them is too long."
            ) from None
        if isinstance(event, h11.Data):
            if not exchange.feed(bytes(event.data)):
                self._full = True
                self._pause()
            return True
        if isinstance(event, h11.EndOfMessage):  # its trailers are nobody's headers
            self._incoming[:0] = machine.trailing_data[0]
            self._end_of_body(exchange)
            return bool(self._incoming)
        return False

    # -- reading, time and the end --------------------------------------------------------------------------------

    @property
    def _is_secure(self) -> bool:
        return self._transport is not None and self._transport.get_extra_info("sslcontext") is not None

    def _pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def _read_on(self) -> None:
        if self._transport is not None and not (self._full or self._turn_due or self._transport.is_closing()):
            self._transport.resume_reading()

    def _enter(self, state: _State, seconds: float | None) -> None:
        self._state = state
        if state is not _State.HEADER:
            self._since = self._loop.time()
        self._arm(seconds)

    def _arm(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._loop.call_later(seconds, self._on_time)

    def _left(self, seconds: float) -> float:
        return max(0.0, self._since + seconds - self._loop.time())

    def _on_time(self) -> None:
        if self._state is not _State.CLOSING:
            self._end()
        elif self._behind is not None or (self._progress(1) and self._left(self._times.send) > 0):
            self._arm(_LINGER)  # it still takes what was written for it
        else:
            self.abort()

    def _end(self, unread: bool = False) -> None:
        """Close, when all is sent. unread: the client may be sending; closed at once, it would lose the answer."""
        if self._transport is None or self._state is _State.CLOSING:
            return
        exchange = self._exchange
        unread = unread or bool(self._incoming) or (exchange is not None and not exchange.body_complete)
        unread = unread and self._transport.can_write_eof()
        self._incoming.clear()
        self._enter(_State.CLOSING, _SILENCE if unread else _LINGER)
        if unread:
            if not self._transport.get_write_buffer_size():  # else the answer itself says where it ends
                try:
                    self._transport.write_eof()
                except OSError:  # the client was faster
                    self.abort()
                    return
            self._full = self._turn_due = False
            self._read_on()
        else:
            self._transport.close()

    def _watch_stall(self) -> None:
        self._progress(0)
        self._stall_timer = self._loop.call_later(self._times.send, self._on_stall)

    def _on_stall(self) -> None:
        if self._progress(_LEAST):
            self._watch_stall()
        else:
            self.abort()

    def _progress(self, least: int) -> bool:
        """Whether the client has taken so many bytes since this was asked before."""
        if self._transport is None:
            return False
        taken = self._written - self._transport.get_write_buffer_size()
        before, self._seen_taken = self._seen_taken, taken
        return taken - before >= least


def _address(name: Any) -> tuple[str, int] | None:
    """ASGI's form of a socket's name; None for Unix sockets."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) and len(name) >= 2 else None
