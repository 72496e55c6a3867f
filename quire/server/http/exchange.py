"""One request and its answer: what ASGI calls receive and send, over one connection."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, MutableMapping
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import Any, Protocol

import h11
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from quire.server.http.gone import EXTENSION
from quire.server.http.head import Head, new_machine
from quire.server.http.plain import plain_answer

logger = logging.getLogger("quire.server")

_AHEAD = 64 << 10  # bytes of a body that are read before the application wants them
_BODYLESS = frozenset({204, 304})
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}


class Wire(Protocol):
    """What an exchange asks of its connection, which is a `Connection`."""

    def write(self, data: bytes) -> None:
        """Send a part of the answer."""
        ...

    async def drained(self) -> None:
        """Wait while the client is behind."""
        ...

    def want_body(self) -> None:
        """Read more of the request's body."""
        ...

    def answered(self) -> None:
        """The exchange is over."""
        ...

    def refuse(self, status: int, message: str) -> None:
        """Answer in place of the application; the connection ends."""
        ...

    def abort(self) -> None:
        """End the connection now."""
        ...


class Exchange:
    """Runs the application for a request, and frames what it sends.

    body_complete: all of the request has come. begun, answered: some, or all, of the answer has been handed on.
    """

    def __init__(self, connection: Wire, head: Head, close: bool) -> None:
        """close: the connection ends with this answer, which says so."""
        self.head = head
        self.body_complete = not head.has_body
        self.answered = False
        self._connection = connection
        self._machine = head.machine  # None: the request was plain, and so is the answer as long as this stays
        self._close = close
        self._body = bytearray()  # what has come of it, and the application has not got
        self._delivered = False  # all of it
        self._news = asyncio.Event()  # of the body, of the client's leaving, of the answer's end
        self._gone = self._left = False  # nobody is there; nobody sends any more
        self._leaving: list[Callable[[], object]] = []  # to be called when one of these is so
        self.begun = False
        self._bodyless = self._chunked = False
        self._due: int | None = None  # bytes of a plain answer of known length that have not been sent
        self._unsent = b""  # the answer's head, which goes with the first of its body
        self._expects = head.machine is not None and head.machine.they_are_waiting_for_100_continue

    # -- from the connection --------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> bool:
        """Take a part of the body. False: there is enough of it for now."""
        if self.answered or self._gone or self._leaving:  # nobody reads it: see `when_gone`
            return True
        self._body += data
        self._news.set()
        return len(self._body) < _AHEAD

    def end_of_body(self) -> None:
        self.body_complete = True
        self._news.set()

    def client_left(self) -> None:
        """The client sends nothing more; it may still read."""
        self._left = True
        self._tell_leaving()

    def client_gone(self) -> None:
        self._gone = True
        self._tell_leaving()

    def _tell_leaving(self) -> None:
        self._news.set()
        leaving, self._leaving = self._leaving, []
        for call in leaving:
            call()

    def close_after(self) -> None:
        """Let the answer be the connection's last."""
        self._close = True

    @property
    def closes(self) -> bool:
        return self._close

    # -- the application's side -----------------------------------------------------------------------------------

    async def run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        """The application's whole work on this request. Whatever it raises ends here."""
        scope["extensions"] = {EXTENSION: self.when_gone}
        try:
            await app(scope, self.receive, self.send)
            if not (self.answered or self._gone):
                if not self._left:
                    raise RuntimeError("the application gave no whole answer")
                self._connection.abort()  # of an answer that nobody waits for
        except asyncio.CancelledError:
            self._connection.abort()
            raise
        except Exception as error:
            if (self._gone or self._left) and isinstance(error, (ClientDisconnect, OSError)):
                self._connection.abort()
                return
            logger.error("a request failed", exc_info=error)
            if self.begun:
                self._connection.abort()
            else:
                self._connection.refuse(500, "an unexpected error; the server's log has it")

    async def receive(self) -> MutableMapping[str, Any]:
        """The next part of the body; once it was whole, waits until the client is gone or has its answer."""
        if self._expects and not (self.begun or self._gone):
            self._expects = False
            if not self.body_complete and not self._body:
                information = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
                self._connection.write(self._h11().send(information) or b"")
        while not (self._gone or self.answered or (self._left and (self._delivered or not self.body_complete))):
            if self._body or (self.body_complete and not self._delivered):
                self._delivered = self.body_complete
                body, self._body = bytes(self._body), bytearray()
                return {"type": "http.request", "body": body, "more_body": not self._delivered}
            self._connection.want_body()
            self._news.clear()
            await self._news.wait()
        return {"type": "http.disconnect"}

    def when_gone(self, call: Callable[[], object]) -> Callable[[], object]:
        """Have this called once the client has left; whoever asks wants no more of the body. What is returned takes it
        back.

        As `receive` would tell, which takes a task that waits for it.
        """
        if self._gone or self._left:
            return asyncio.get_running_loop().call_soon(call).cancel
        self._leaving.append(call)
        self._connection.want_body()  # to see it leave

        def take_back() -> None:
            if call in self._leaving:
                self._leaving.remove(call)

        return take_back

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Frame a part of the answer; waits while the client is behind."""
        if not self._gone:
            await self._connection.drained()
        if self._gone:
            return
        if message["type"] == "http.response.start" and not self.begun:
            self._begin(message["status"], list(message.get("headers", ())))
        elif message["type"] == "http.response.body" and self.begun and not self.answered:
            self._send_body(message.get("body", b""), bool(message.get("more_body", False)))
        else:
            raise RuntimeError(f"{message['type']} has no place here")

    def _h11(self) -> h11.Connection:
        """Its machine, that has read the request."""
        if self._machine is None:
            self._machine = new_machine(self.head.text)
            self._machine.next_event()
        return self._machine

    def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun = True
        self._bodyless = self.head.method == "HEAD" or status in _BODYLESS
        names = [name.lower() for name, _ in headers]
        self._chunked = b"content-length" not in names and self.head.version == "1.1" and not self._bodyless
        if self._expects and not self.body_complete:
            self._close = True  # a client that was not told to go on may send its body, or its next request
        headers.append((b"date", date()))
        head = None
        if self._machine is None and not self._close:
            head = plain_answer(status, headers, [*names, b"date"])
        if head is None:
            if self._close:
                headers.insert(len(headers) - 1, (b"connection", b"close"))
            reason = _PHRASES.get(status, b"")
            head = self._h11().send(h11.Response(status_code=status, headers=headers, reason=reason)) or b""
        elif not self._chunked:
            self._due = int(headers[names.index(b"content-length")][1])
        if b"content-length" in names:
            self._unsent = head  # in one packet with what follows
        else:  # of a stream nobody knows when its first part comes
            self._connection.write(head)

    def _send_body(self, body: bytes, more: bool) -> None:
        parts, self._unsent = [self._unsent], b""
        if body and not self._bodyless:
            # A stream has very many parts: h11 would go through its states for each of them.
            parts.append(b"%x\r\n%b\r\n" % (len(body), body) if self._chunked else self._framed(body))
        if not more:
            parts.append(self._end())
            self.answered = True
            self._body = bytearray()
            self._news.set()
        self._connection.write(b"".join(parts))
        if not more:
            self._close = self._close or (self._machine is not None and self._machine.our_state is not h11.DONE)
            self._connection.answered()

    def _framed(self, body: bytes) -> bytes:
        """A part of a body whose length was said, if it has one."""
        if self._machine is not None:
            return self._machine.send(h11.Data(data=body)) or b""
        assert self._due is not None
        self._due -= len(body)
        if self._due < 0:
            raise h11.LocalProtocolError("Too much data for declared Content-Length")
        return body

    def _end(self) -> bytes:
        if self._machine is not None:
            return self._machine.send(h11.EndOfMessage()) or b""
        if self._due:
            raise h11.LocalProtocolError("Too little data for declared Content-Length")
        return b"0\r\n\r\n" if self._chunked else b""


def date() -> bytes:
    """The time, as headers have it."""
    return _date(int(time.time()))


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()
