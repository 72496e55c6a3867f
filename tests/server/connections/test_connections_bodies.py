"""Connections: bodies."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import suppress

import pytest
from fastapi import FastAPI

from quire.server.http.connection import Connection, Times
from quire.server.http.head import take_head
from tests.server.connections.helpers import CHUNKED, GET, _until, answered
from tests.server.wire import InThread, message, until_closed

pytestmark = pytest.mark.slow


def test_trailers_are_bounded_and_no_headers(server: InThread) -> None:
    with server.connect() as client:
        trailers = b"X-Request-Id: mine\r\nAuthorization: Bearer key\r\n\r\n"
        client.sendall(message("POST", "/echo", CHUNKED, body=b"3;a=b\r\nabc\r\n0\r\n" + trailers) + GET)
        told = answered(client)
        assert told["body"] == "abc" and {"authorization", "x-request-id"}.isdisjoint(dict(told["headers"]))
        assert answered(client)["body"] == ""
    with server.connect() as client:
        sent = 0
        client.sendall(message("POST", "/echo", CHUNKED, body=b"0\r\n"))
        with pytest.raises(OSError):
            while sent < 16 << 20:
                sent += client.send(b"a:b\r\n" * 1000)
    assert sent < 16 << 20


def test_bodies_in_tiny_chunks_leave_others_their_turn(hasty: InThread) -> None:
    body = b"1\r\na\r\n" * 400_000
    longest, done = 0.0, threading.Event()

    def send() -> None:
        with hasty.connect() as client, suppress(OSError):  # its time may be over
            client.sendall(message("POST", "/early", CHUNKED, body=body))
        done.set()

    threading.Thread(target=send, daemon=True).start()
    with hasty.connect() as client:
        while not done.wait(0.01):
            begun = time.process_time()
            client.sendall(GET)
            answered(client)
            longest = max(longest, time.process_time() - begun)
    assert longest < 1.5


@pytest.mark.parametrize(
    "lines",
    [
        ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA"),
        ("Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="),
        ("Connection: upgrade, keep-alive", "Upgrade: h2c, foo/1"), ("Upgrade: h2c",), ("Connection: Upgrade",),
        ("Upgrade: TLS/1.0", "Connection: keep-alive, Upgrade"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("chunked", [False, True])
def test_an_offer_to_upgrade_is_passed_over(server: InThread, lines: tuple[str, ...], chunked: bool) -> None:
    framing, body = (CHUNKED, b"3\r\nabc\r\n0\r\n\r\n") if chunked else ("Content-Length: 3", b"abc")
    with server.connect() as client:
        for _ in range(2):
            client.sendall(message("POST", "/echo", *lines, framing, body=body))
            assert answered(client)["body"] == "abc"
        client.sendall(message("GET", "/echo", *lines) + GET)
        assert answered(client)["path"] == "/echo"


def test_who_waits_before_sending_is_told_to_go_on(server: InThread) -> None:
    with server.connect() as client:
        client.sendall(message("POST", "/echo", "Content-Length: 3", "Expect: 100-Continue"))
        assert client.recv(1000).startswith(b"HTTP/1.1 100 Continue\r\n\r\n")
        client.sendall(b"abc")
        assert answered(client)["body"] == "abc"
        client.sendall(message("POST", "/early", "Content-Length: 3", "Expect: 100-continue"))
        # What is refused unread is not asked for; and whether what comes next is the body, nobody could tell.
        client.sendall(b"GET" + message("GET", "/smuggled"))
        early = until_closed(client)
        assert early.startswith(b"HTTP/1.1 200 ") and b"connection: close" in early
        assert early.count(b"HTTP/1.1") == 1 and b"smuggled" not in early


def test_a_body_that_goes_wrong_is_no_fault_of_the_server(server: InThread, caplog: pytest.LogCaptureFixture) -> None:
    for first in (b"", b"5\r\nhello\r\n"):
        with server.connect() as client:
            client.sendall(message("POST", "/echo", CHUNKED, body=first))
            time.sleep(0.1)  # so that the application waits for more
            client.sendall(b"x\r\n")
            assert until_closed(client).startswith(b"HTTP/1.1 400 ")
    with server.connect() as client:
        client.sendall(message("POST", "/echo", CHUNKED, body=b"5\r\nhel"))
    _until(lambda: server.connections == 0)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_an_answer_to_a_reset_connection(server: InThread, caplog: pytest.LogCaptureFixture) -> None:
    """The client has just closed: that is seen when the answer ends, as nothing was read meanwhile."""

    async def meanwhile() -> None:
        ends: list[Connection] = []
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as listens:
            there = socket.create_connection(listens.getsockname())
            here, _ = listens.accept()
        here.setblocking(False)
        connection = Connection(FastAPI(), Times(9, 9, 9, 9), lambda work: work.close(), ends.append)
        await loop.connect_accepted_socket(lambda: connection, here)
        there.sendall(message("POST", "/", "Content-Length: 9"))
        await asyncio.sleep(0.05)
        there.close()
        connection.refuse(400, "no")  # in the same turn of the loop
        async with asyncio.timeout(30):
            while not ends:
                await asyncio.sleep(0.01)
        assert ends == [connection]

    asyncio.run(meanwhile())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_body_that_goes_wrong_after_its_answer_has_no_second_one(server: InThread) -> None:
    with server.connect() as client:
        client.sendall(message("POST", "/early", CHUNKED, body=b"1\r\na\r\n"))
        while not (text := client.recv(65536)).endswith(b"no thanks"):
            assert text
        client.sendall(b"x\r\n" + GET)
        assert until_closed(client) == b""


def test_a_header_in_drops_costs_no_more_than_another(server: InThread) -> None:
    """What was looked at once is not looked at for every byte that follows."""

    def spent(remembers: bool) -> float:
        incoming, begun, seen = bytearray(b"GET / HTTP/1.1\r\nA: "), time.thread_time(), 0
        while len(incoming) < 15_000:
            incoming += b"b"
            assert take_head(incoming, seen) is None
            seen = len(incoming) if remembers else 0
        incoming += b"\r\nHost: a\r\n\r\n"
        assert (take_head(incoming, seen) or b"").endswith(b"Host: a\r\n\r\n") and not incoming
        return time.thread_time() - begun

    assert spent(True) < spent(False) / 3
