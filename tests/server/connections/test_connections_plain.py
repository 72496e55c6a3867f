"""Heads that are read and written without h11 mean to it what they mean without it."""

from __future__ import annotations

import asyncio
import re
from http import HTTPStatus
from typing import Any

import h11
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.server.http import head as reading
from quire.server.http.exchange import Exchange
from quire.server.http.head import BadRequestError, read_head
from quire.server.http.plain import plain_answer, read_plain

HEAD = b"POST /v1/completions?a=b HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 12\r\n\r\n"

_NAMES = st.sampled_from(
    [b"host", b"Host", b"content-length", b"Content-Length", b"transfer-encoding", b"connection", b"expect", b"x-a",
     b"upgrade", b"te", b"trailer", b"x_a", b"x a", b"", b"content-length ", b" x", b"x\x00", b"http2-settings",
     b"cookie"]
)  # fmt: skip
_VALUES = st.sampled_from(
    [b"x", b"", b" ", b"5", b"05", b"+5", b"-5", b"5, 5", b"5,6", b"9" * 18, b"9" * 19, b"9" * 21, b"0", b"chunked",
     b"keep-alive", b"Keep-Alive", b"close", b"keep-alive, close", b"upgrade", b"100-continue", b"a b", b"a ", b" a",
     b"a\tb", b"\xff", b"a\x00", b"a\x7f", b"h2c", b"1_0", b"\xb2"]
)  # fmt: skip
_SEPARATORS = st.sampled_from([b": ", b":", b":  ", b" : ", b":\t", b"", b":: "])
_LINES = st.lists(st.tuples(_NAMES, _SEPARATORS, _VALUES).map(b"".join), max_size=4)
_METHODS = st.sampled_from([b"GET", b"POST", b"HEAD", b"CONNECT", b"get", b"P OST", b""])
_TARGETS = st.sampled_from(
    [b"/", b"/a?b#c", b"*", b"//x", b"http://h/p", b"/\xff", b"/a b", b"", b"/%0a", b"/\x7f", b"a"]
)
_VERSIONS = st.sampled_from([b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b"http/1.1", b"HTTP/1.1 ", b"HTTP/1.10", b""])


def _facts(head: bytes) -> Any:
    """What was read, or what is said of it."""
    try:
        found = read_head(head)
    except BadRequestError as error:
        return error.status, str(error)
    return (found.method, found.raw_path, found.path, found.query, found.headers, found.version, found.length,
            found.has_body)  # fmt: skip


@settings(max_examples=1500, deadline=None)
@given(_METHODS, _TARGETS, _VERSIONS, st.lists(st.just(b"Host: x"), max_size=2), _LINES)
@example(b"POST", b"/", b"HTTP/1.1", [b"Host: x"], [b"Content-Length: 5", b"Content-Length: 5"])
@example(b"POST", b"/", b"HTTP/1.1", [b"Host: x"], [b"Content-Length: 5", b"Transfer-Encoding: chunked"])
@example(b"GET", b"/", b"HTTP/1.1", [b"Host: x"], [b"Connection: close"])
def test_what_is_read(method: bytes, target: bytes, version: bytes, hosts: list[bytes], lines: list[bytes]) -> None:
    head = b"\r\n".join([b" ".join([method, target, version]), *hosts, *lines, b"", b""])
    with pytest.MonkeyPatch.context() as patch:
        found = _facts(head)
        patch.setattr(reading, "read_plain", lambda head: None)
        assert found == _facts(head)
    if read_plain(head) is not None:  # and h11 would keep the connection, and expects nothing first
        machine = reading.new_machine(head)
        machine.next_event()
        assert machine.our_state is h11.SEND_RESPONSE and not machine.they_are_waiting_for_100_continue
        machine.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
        machine.send(h11.EndOfMessage())
        assert machine.our_state is h11.DONE


def test_what_most_clients_send_is_plain() -> None:
    found = read_head(HEAD)
    assert found.machine is None and (found.path, found.query, found.length) == ("/v1/completions", b"a=b", 12)
    more = b"Accept: */*\r\nAccept-Encoding: gzip, deflate\r\nConnection: keep-alive\r\nAuthorization: Bearer k\r\n"
    assert read_plain(HEAD[:-2] + more + b"\r\n") is not None


_ANSWERS = st.lists(
    st.tuples(
        st.sampled_from([b"content-length", b"Content-Type", b"x-a", b"connection", b"x a", b"transfer-encoding", b""]),
        st.sampled_from(
            [b"5", b"text/plain", b"a b", b"a\r\nb: c", b"a\n", b"", b" a", b"close", b"5x", b"\xe9", b"7"]
        ),
    ),
    max_size=4,
)


@settings(max_examples=1500, deadline=None)
@given(st.sampled_from([200, 204, 304, 400, 404, 429, 500, 503, 101, 599]), _ANSWERS)
@example(200, [(b"x-a", b"a\r\nb: c")])
@example(200, [(b"content-length", b"5"), (b"content-length", b"5")])
def test_what_is_written(status: int, fields: list[tuple[bytes, bytes]]) -> None:
    written = plain_answer(status, fields, [name.lower() for name, _ in fields])
    if written is None:
        return
    machine = reading.new_machine(HEAD)
    machine.next_event()
    phrase = HTTPStatus(status).phrase.encode()
    assert written == machine.send(h11.Response(status_code=status, headers=fields, reason=phrase))


def test_answers_of_routes_are_plain() -> None:
    fields = [(b"content-length", b"12"), (b"content-type", b"application/json"), (b"x-request-id", b"a1")]
    assert plain_answer(200, fields, [name for name, _ in fields]) is not None
    assert b"Transfer-Encoding: chunked" in (plain_answer(200, fields[1:], [b"content-type", b"x-request-id"]) or b"")
    for bad in (b"a\r\nb: c", b"a\nb", b"a\x00", b" a"):
        assert plain_answer(200, [(b"x-a", bad)], [b"x-a"]) is None


class _Wire:
    """A connection that keeps what is written. ended: how, where not by an answer."""

    def __init__(self) -> None:
        self.written, self.ended = b"", ""

    def write(self, data: bytes) -> None:
        self.written += data

    async def drained(self) -> None: ...

    def want_body(self) -> None: ...

    def answered(self) -> None: ...

    def refuse(self, status: int, message: str) -> None:
        self.ended = "refused"

    def abort(self) -> None:
        self.ended = "aborted"


@pytest.mark.parametrize(("length", "body"), [(3, b"abcd"), (3, b"ab"), (0, b"a"), (1, b"")])
@pytest.mark.parametrize("plain", [True, False])
def test_an_answer_of_another_length_than_it_says_ends_the_connection(plain: bool, length: int, body: bytes) -> None:
    """Else its rest, or the next answer's beginning, would be taken for the other."""
    wire = _Wire()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % length)]})
        await send({"type": "http.response.body", "body": body})

    head = read_head(HEAD if plain else HEAD[:-2] + b"X-A:\r\n\r\n")
    assert (head.machine is None) == plain
    asyncio.run(Exchange(wire, head, close=False).run(app, {}))
    assert wire.ended == "aborted" and b"abc" not in wire.written


def test_an_answer_that_ends_a_connection_says_so_to_plain_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    for machine in (None, reading.new_machine(HEAD)):
        if machine is not None:
            monkeypatch.setattr(reading, "read_plain", lambda head: None)
        for close, status in ((True, 200), (False, 204), (False, 304), (False, 200)):
            wire = _Wire()

            async def app(scope: Any, receive: Any, send: Any, status: int = status) -> None:
                await send({"type": "http.response.start", "status": status, "headers": [(b"x-a", b"b")]})
                await send({"type": "http.response.body", "body": b"" if status != 200 else b"abc"})

            exchange = Exchange(wire, read_head(HEAD), close)
            asyncio.run(exchange.run(app, {}))
            assert exchange.closes == close and exchange.answered
            written.append(re.sub(rb"date: .*?\r\n", b"", wire.written))
    assert written[:4] == written[4:] and b"connection: close" in written[0] and b"connection" not in written[3]
