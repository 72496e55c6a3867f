"""Connections: every state has its time; clients that leave."""

from __future__ import annotations

import socket
import time

import pytest
from fastapi import FastAPI

from quire.server.http import connection as connections
from tests.server.connections.helpers import BIG, GET, PATIENT, SLACK, TIME, _until, answered, config
from tests.server.wire import InThread, message, seconds_open, until_closed

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "sent",
    [
        (), (b"\r\n",), (b"G",), (b"GET /echo HTTP/1.1\r\nHost: he",), (GET,), (GET, b"\r\n"), (GET, b"\r\n\r\n"),
        (GET, b"\r"), (GET, b"\n"), (GET, b"G"), (GET, b"GET /echo HTTP/1.1\r\nHo"),
        (message("POST", "/early", "Content-Length: 1000", body=b"some"),),
        (message("POST", "/early", "Transfer-Encoding: chunked", body=b"5\r\nabc"),),
        (message("POST", "/early", "Content-Length: 1000", "Connection: close", body=b"some"),),
        (message("POST", "/early", "Content-Length: 1000", body=b"some", version="1.0"),),
        (message("POST", "/echo", "Content-Length: 1000", body=b"some"),),
        (message("POST", "/echo", "Transfer-Encoding: chunked", body=b"5\r\nabc"),),
        (message("POST", "/echo", "Transfer-Encoding: chunked", body=b"0\r\nA: b\r\n"),),
        (message("POST", "/echo", "Content-Length: 1000", "Expect: 100-continue"),),
        (message("GET", "/echo", "Connection: Upgrade", "Upgrade: websocket"),),
        (GET + GET + b"GET /echo HT",), (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",),
    ],
)  # fmt: skip
def test_silence_ends_a_connection_in_every_state(hasty: InThread, sent: tuple[bytes, ...]) -> None:
    with hasty.connect() as client:
        for part in sent:
            client.sendall(part)
            time.sleep(0.05)
        assert seconds_open(client) < TIME * 2 + SLACK


@pytest.mark.parametrize(
    ("first", "drops"),
    [
        (b"", b"\r\n"), (b"", b"G"), (GET, b"\r\n"), (GET, b"G"), (GET, b"\r"),
        (GET + b"GET /echo HTTP/1.1\r\nA:", b"b"),
        (message("POST", "/early", "Content-Length: 100000"), b"a"),
        (message("POST", "/echo", "Content-Length: 100000"), b"a"),
        (message("POST", "/early", "Transfer-Encoding: chunked"), b"1\r\na\r\n"),
        (message("POST", "/echo", "Transfer-Encoding: chunked"), b"1\r\na\r\n"),
        (message("POST", "/echo", "Transfer-Encoding: chunked", body=b"5;"), b"a"),
        (message("POST", "/early", "Connection: close", "Content-Length: 100000"), b"a"),
    ],
)  # fmt: skip
def test_drops_end_a_connection_in_every_state(hasty: InThread, first: bytes, drops: bytes) -> None:
    with hasty.connect() as client:
        client.sendall(first)
        assert seconds_open(client, lambda: client.sendall(drops)) < TIME * 2 + connections._LINGER + SLACK


@pytest.mark.parametrize("lines", [(), ("Connection: close",)])
@pytest.mark.parametrize("path", ["/big", "/stream?parts=2000&size=65536"])
def test_a_client_that_does_not_read_is_given_up(hasty: InThread, path: str, lines: tuple[str, ...]) -> None:
    _until(lambda: hasty.connections == 0)
    with hasty.connect(receive_buffer=4096) as client:
        client.sendall(message("GET", path, *lines))
        assert client.recv(1)
        _until(lambda: hasty.connections == 0)
        assert len(until_closed(client)) < BIG / 2  # what lay in the system's buffers


def test_a_client_that_reads_slowly_gets_everything(app: FastAPI) -> None:
    """What it has not taken counts, not how long it takes."""
    got, seconds = 0, 4.0
    with InThread(app, config(PATIENT, send_timeout=seconds)) as server, server.connect(receive_buffer=65536) as client:
        client.sendall(message("GET", "/big", "Connection: close"))
        begun = time.monotonic()
        while part := client.recv(1 << 20):
            got += len(part)
            if time.monotonic() - begun < seconds * 2:
                time.sleep(0.01)
    assert got > BIG


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_long_answer_may_take_its_time(hasty: InThread, version: str) -> None:
    """Between a request and its answer, and between an answer's parts, nothing is due."""
    text = hasty.ask(message("GET", f"/stream?parts=3&seconds={TIME * 1.5}", "Connection: close", version=version))
    assert text.count(b"y") == 15


def test_a_connection_is_kept_for_the_next_request(app: FastAPI) -> None:
    seconds = 4.0
    with InThread(app, config(PATIENT, timeout_keep_alive=seconds)) as server, server.connect() as client:
        for number in range(6):
            client.sendall(b"\r\n" * (number > 2) + message("POST", "/echo", "Content-Length: 1", body=b"%d" % number))
            assert answered(client)["body"] == str(number)
            time.sleep(seconds / 4)


def test_a_body_that_comes_after_its_answer_is_read_past(server: InThread) -> None:
    with server.connect() as client:
        client.sendall(message("POST", "/early", "Content-Length: 3000000"))
        assert b"no thanks" in client.recv(65536)
        client.sendall(b"a" * 3_000_000 + GET)
        assert answered(client)["path"] == "/echo"


@pytest.mark.parametrize("more", [b"", GET, GET * 1000, b"GET /"])
def test_a_client_that_leaves_is_noticed_whatever_it_sent_before(app: FastAPI, server: InThread, more: bytes) -> None:
    with server.connect() as client:
        client.sendall(message("GET", "/wait") + more)
        _until(lambda: getattr(app.state, "waiting", False))
    _until(lambda: not app.state.waiting)


@pytest.mark.parametrize("sent", [GET, message("POST", "/echo", "Content-Length: 2", body=b"ab")])
def test_who_says_that_it_sends_no_more_gets_its_answer(server: InThread, sent: bytes) -> None:
    with server.connect() as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert b" 200 OK" in until_closed(client)
