"""Connections: answers."""

from __future__ import annotations

import pytest

from tests.server.connections.helpers import GET, answered, length_of
from tests.server.wire import InThread, message

pytestmark = pytest.mark.slow


def test_streams_are_chunked_for_those_alone_who_know_chunks(server: InThread) -> None:
    new = server.ask(message("GET", "/stream", "Connection: close"))
    assert b"transfer-encoding: chunked" in new.lower() and new.endswith(b"0\r\n\r\n")
    for lines in ((), ("Connection: keep-alive",)):
        head, _, body = server.ask(message("GET", "/stream", *lines, version="1.0")).partition(b"\r\n\r\n")
        assert body == b"y" * 15
        assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
    assert server.ask(b"GET /echo HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 OK")


def test_head_has_no_body(server: InThread) -> None:
    with server.connect() as client:
        client.sendall(message("HEAD", "/echo"))
        head = client.recv(65536)
        assert b"200 OK" in head and head.endswith(b"\r\n\r\n") and length_of(head) > 0
        client.sendall(GET)
        assert answered(client)["path"] == "/echo"


def test_pipelined_requests_are_answered_in_order(server: InThread) -> None:
    posts = [message("POST", "/echo", "Content-Length: 3", body=b"%03d" % n) for n in range(50)]
    text = server.ask(b"".join(posts) + message("GET", "/echo", "Connection: close"))
    assert [part[:3] for part in text.split(b'{"body":"')[1:]] == [b"%03d" % n for n in range(50)] + [b'","']
    drops = b"".join([*posts[:2], message("POST", "/echo", "Content-Length: 1", "Connection: close", body=b"a")])
    assert server.ask(*[drops[i : i + 1] for i in range(len(drops))]).count(b"200 OK") == 3
