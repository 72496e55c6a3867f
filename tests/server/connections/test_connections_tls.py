"""Connections: TLS."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from fastapi import FastAPI

from quire.errors import QuireError
from quire.server.http.server import HttpServer
from tests.server.connections.helpers import GET, SLACK, _until, config
from tests.server.wire import InThread, message, seconds_open, until_closed

pytestmark = pytest.mark.slow

PEM = str(Path(__file__).with_name("tls.pem"))  # a key for these tests, and its certificate


@pytest.fixture(scope="module")
def secure(app: FastAPI) -> Iterator[InThread]:
    with InThread(app, config(1.0, ssl_keyfile=PEM, ssl_certfile=PEM, max_connections=20)) as server:
        yield server


def spoken(server: InThread, receive_buffer: int | None = None) -> ssl.SSLSocket:
    context = ssl.create_default_context(cafile=PEM)
    return context.wrap_socket(server.connect(receive_buffer), server_hostname="localhost")


def test_tls_is_http_as_well(secure: InThread) -> None:
    assert secure.url.startswith("https://")
    with spoken(secure) as client:
        for number in range(3):
            client.sendall(message("POST", "/echo", "Content-Length: 1", body=b"%d" % number))
            head, _, body = client.recv(65536).partition(b"\r\n\r\n")
            assert b"200 OK" in head and json.loads(body or client.recv(65536))["body"] == str(number)
        client.sendall(message("GET", "/stream", "Connection: close"))
        assert until_closed(client).endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", GET])
def test_who_does_not_set_up_tls_in_time_is_left(secure: InThread, sent: bytes) -> None:
    with secure.connect() as client:
        client.sendall(sent)
        assert seconds_open(client) < 1.0 + SLACK
    _until(lambda: secure.connections == 0)


@pytest.mark.parametrize("sent", [b"", GET, b"GET /", message("POST", "/early", "Content-Length: 9"), GET + b"\r\n"])
def test_silence_ends_a_connection_with_tls(secure: InThread, sent: bytes) -> None:
    """Though the client never says that it has understood the end."""
    with spoken(secure) as client:
        if sent:
            client.sendall(sent)
        _until(lambda: secure.connections == 1)
        _until(lambda: secure.connections == 0)


def test_a_client_with_tls_that_does_not_read_is_given_up(secure: InThread) -> None:
    with spoken(secure, receive_buffer=4096) as client:
        client.sendall(message("GET", "/big"))
        _until(lambda: secure.connections == 1)
        _until(lambda: secure.connections == 0)


def test_those_who_do_not_set_up_tls_make_room(secure: InThread) -> None:
    stray = [secure.connect() for _ in range(100)]

    def served() -> bool:
        with suppress(OSError), spoken(secure) as client:
            client.sendall(message("GET", "/health", "Connection: close"))
            return b"well" in until_closed(client)
        return False

    _until(served)
    for client in stray:
        client.close()


def test_a_certificate_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "none.pem").write_text("nothing")
    for path in (str(tmp_path / "none.pem"), str(tmp_path / "nowhere.pem")):
        with pytest.raises(QuireError, match="cannot be used"):
            HttpServer(FastAPI(), config(ssl_keyfile=path, ssl_certfile=path))
