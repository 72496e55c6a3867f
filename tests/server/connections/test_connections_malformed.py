"""Connections: what is no request, or two."""

from __future__ import annotations

import json

import pytest

from tests.server.connections.helpers import CHUNKED, answered
from tests.server.wire import InThread, message

pytestmark = pytest.mark.slow

MALFORMED = {
    "two lengths": message("POST", "/echo", "Content-Length: 2", "Content-Length: 3", body=b"abc"),
    "the same length twice": message("POST", "/echo", "Content-Length: 2", "Content-Length: 2", body=b"ab"),
    "lengths in a list": message("POST", "/echo", "Content-Length: 2, 3", body=b"abc"),
    "a length with a sign": message("POST", "/echo", "Content-Length: +2", body=b"ab"),
    "a negative length": message("POST", "/echo", "Content-Length: -2", body=b"ab"),
    "a length of very many digits": message("POST", "/echo", "Content-Length: " + "9" * 5000, body=b"ab"),
    "a length in hex": message("POST", "/echo", "Content-Length: 0x2", body=b"ab"),
    "a length and chunks": message("POST", "/echo", "Content-Length: 5", CHUNKED, body=b"0\r\n\r\n"),
    "chunks and a length": message("POST", "/echo", CHUNKED, "Content-Length: 5", body=b"0\r\n\r\n"),
    "chunks twice": message("POST", "/echo", CHUNKED, CHUNKED, body=b"0\r\n\r\n"),
    "another coding": message("POST", "/echo", "Transfer-Encoding: gzip, chunked", body=b"0\r\n\r\n"),
    "identity": message("POST", "/echo", "Transfer-Encoding: identity", body=b""),
    "xchunked": message("POST", "/echo", "Transfer-Encoding: xchunked", body=b"0\r\n\r\n"),
    "chunks in HTTP/1.0": message("POST", "/echo", CHUNKED, body=b"0\r\n\r\n", version="1.0"),
    "space before a colon": message("POST", "/echo", "Content-Length : 2", body=b"ab"),
    "a folded line": message("GET", "/echo", "A: b", " c"),
    "a fold at once": message("GET", "/echo", " A: b"),
    "LF alone": b"GET /echo HTTP/1.1\nHost: a\n\n",
    "LF alone in a header": b"GET /echo HTTP/1.1\r\nHost: a\nA: b\r\n\r\n",
    "CR alone": message("GET", "/echo", "A: b\rC: d"),
    "NUL": message("GET", "/echo", "A: b\0c"),
    "NUL in the target": message("GET", "/ec\0ho"),
    "a name without value": message("GET", "/echo", "Accept"),
    "an empty name": message("GET", "/echo", ": b"),
    "no host": b"GET /echo HTTP/1.1\r\n\r\n",
    "two hosts": message("GET", "/echo", "Host: there"),
    "no version": b"GET /echo\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/9.9": message("GET", "/echo", version="9.9"),
    "http": b"GET /echo http/1.1\r\nHost: a\r\n\r\n",
    "spaces": b"GET  /echo  HTTP/1.1\r\nHost: a\r\n\r\n",
    "CONNECT": b"CONNECT here:80 HTTP/1.1\r\nHost: here:80\r\n\r\n",
    "a target without slash": message("GET", "echo"),
    "all of GET": message("GET", "*"),
    "another scheme": message("GET", "ftp://here/echo"),
    "what was not expected": message("POST", "/echo", "Expect: the-worst", "Content-Length: 1", body=b"a"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"a" * 600 + b"\r\n\r\n",
    "a chunk's size is none": message("POST", "/echo", CHUNKED, body=b"x\r\n\r\n0\r\n\r\n"),
    "a chunk's size is negative": message("POST", "/echo", CHUNKED, body=b"-1\r\n\r\n0\r\n\r\n"),
    "a chunk is longer than it says": message("POST", "/echo", CHUNKED, body=b"1\r\nab\r\n0\r\n\r\n"),
    "a chunk's size ends with LF": message("POST", "/echo", CHUNKED, body=b"1\na\n0\n\n"),
    "a huge chunk": message("POST", "/echo", CHUNKED, body=b"f" * 40 + b"\r\na"),
    "many fields": message("GET", "/echo", *["a: b"] * 200),
    "a long field": message("GET", "/echo", "A: " + "b" * 70_000),
    "a long target": message("GET", "/" + "b" * 70_000),
    "a long extension": message("POST", "/echo", CHUNKED, body=b"1;" + b"b" * 70_000),
    "long trailers": message("POST", "/echo", CHUNKED, body=b"0\r\n" + b"a: b\r\n" * 12_000),
    "a trailer that is none": message("POST", "/echo", CHUNKED, body=b"0\r\nabc\r\n\r\n"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_malformed_is_refused_and_ends_the_connection(server: InThread, case: str) -> None:
    """A second request behind it is never served: nobody knows where it begins."""
    try:
        text = server.ask(MALFORMED[case] + message("GET", "/smuggled"))
    except ConnectionError:  # it was cut off while it was still sending
        text = b"HTTP/1.1 4"
    assert text[:10] in (b"HTTP/1.1 4", b"HTTP/1.1 5"), text
    assert text.count(b"HTTP/1.1") == 1 and b"smuggled" not in text and b" 200 " not in text
    if b"\r\n\r\n" in text:
        head, _, body = text.partition(b"\r\n\r\n")
        assert b"connection: close" in head and json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("http://elsewhere/echo?a=b", "/echo", "a=b"), ("HTTP://u:p@elsewhere:99/echo", "/echo", ""),
        ("/echo?x=/y#z", "/echo", "x=/y"), ("/echo?", "/echo", ""), ("/%65cho", "/echo", ""),
    ],
)  # fmt: skip
def test_targets(server: InThread, target: str, path: str, query: str) -> None:
    with server.connect() as client:
        client.sendall(message("GET", target))
        told = answered(client)
    assert (told["path"], told["query"]) == (path, query)


def test_options_of_the_whole_server_is_no_error_of_it(server: InThread) -> None:
    assert server.ask(message("OPTIONS", "*", "Connection: close")).startswith(b"HTTP/1.1 404 ")
