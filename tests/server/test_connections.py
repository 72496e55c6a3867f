"""Every connection ends within its time, in every state, and there is a bounded number of them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from quire.config import ServerConfig
from quire.errors import QuireError
from quire.server.http import connection as connections
from quire.server.http.connection import Connection, Times
from quire.server.http.head import take_head
from quire.server.http.listener import SPARE
from quire.server.http.server import HttpServer, listening, room_for
from quire.server.middleware import BodyLimits
from tests.server.api_server import ONE_THREAD, ServerProcess
from tests.server.wire import InThread, message, seconds_open, until_closed

TIME = 0.4  # seconds for everything, where this is what a test is about
PATIENT = 20.0  # where it is not
SLACK = 4.0  # more than that is a connection that does not end
GET = message("GET", "/echo")
BIG = 64 << 20


def application(seconds: float) -> FastAPI:
    """Tells what it was asked. seconds: for a body."""
    app = FastAPI()

    @app.api_route("/echo", methods=["GET", "POST", "PUT", "HEAD", "OPTIONS"])
    async def echo(request: Request) -> Response:
        body = await request.body()
        told = {"body": body.decode(), "headers": [[k, v] for k, v in request.headers.items()]}
        return JSONResponse({**told, "path": request.url.path, "query": request.url.query})

    @app.post("/early")
    async def early() -> Response:
        return PlainTextResponse("no thanks")

    @app.get("/health")
    async def health() -> Response:
        return PlainTextResponse("well")

    @app.get("/big")
    async def big() -> Response:
        return Response(b"x" * BIG)

    @app.get("/stream")
    async def stream(request: Request, parts: int = 3, size: int = 5, seconds: float = 0.0) -> Response:
        async def parts_of() -> AsyncIterator[bytes]:
            for _ in range(parts):
                await asyncio.sleep(seconds)
                yield b"y" * size

        return StreamingResponse(parts_of())

    @app.get("/wait")
    async def wait(request: Request) -> Response:
        app.state.waiting = True
        while (await request.receive())["type"] != "http.disconnect":
            pass
        app.state.waiting = False
        return PlainTextResponse("left")

    app.add_middleware(BodyLimits, most=8 << 20, seconds=seconds)
    return app


def config(seconds: float = TIME, **more: Any) -> ServerConfig:
    times = dict.fromkeys(("header_timeout", "body_timeout", "timeout_keep_alive", "send_timeout"), seconds)
    return ServerConfig(**{"port": 0, **times, **more})


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return application(PATIENT)


@pytest.fixture(scope="module")
def server(app: FastAPI) -> Iterator[InThread]:
    with InThread(app, config(PATIENT)) as server:
        yield server


@pytest.fixture(scope="module")
def hasty() -> Iterator[InThread]:
    """A machine that is busy with other things may well need longer: for tests of what is too late alone."""
    with InThread(application(TIME), config()) as server:
        yield server


def answered(client: socket.socket) -> dict[str, Any]:
    """The body of one whole answer, and nothing of the next."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        part = client.recv(1)
        assert part, head
        head += part
    assert head.startswith(b"HTTP/1.1 200 "), head
    return dict(json.loads(client.recv(length_of(head), socket.MSG_WAITALL)))


def length_of(head: bytes) -> int:
    return int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])


# -- every state has its time --------------------------------------------------------------------------------------


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
        _until(lambda: hasty.connections == 1)
        _until(lambda: hasty.connections == 0)
        assert len(until_closed(client)) < BIG / 2  # what lay in the system's buffers


def test_a_client_that_reads_slowly_gets_everything(app: FastAPI) -> None:
    """What it has not taken counts, not how long it takes."""
    got, seconds = 0, 1.5
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
    seconds = 1.5
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


# -- clients that leave --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [b"", GET, GET * 1000, b"GET /"])
def test_a_client_that_leaves_is_noticed_whatever_it_sent_before(app: FastAPI, server: InThread, more: bytes) -> None:
    with server.connect() as client:
        client.sendall(message("GET", "/wait") + more)
        _until(lambda: getattr(app.state, "waiting", False))
    _until(lambda: not app.state.waiting)


def _until(condition: Any) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("sent", [GET, message("POST", "/echo", "Content-Length: 2", body=b"ab")])
def test_who_says_that_it_sends_no_more_gets_its_answer(server: InThread, sent: bytes) -> None:
    with server.connect() as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert b" 200 OK" in until_closed(client)


# -- what is no request, or two ------------------------------------------------------------------------------------

CHUNKED = "Transfer-Encoding: chunked"
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


# -- bodies --------------------------------------------------------------------------------------------------------


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
        await asyncio.sleep(0.05)
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


# -- answers -------------------------------------------------------------------------------------------------------


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


# -- how many ------------------------------------------------------------------------------------------------------


def test_the_idle_make_room(app: FastAPI) -> None:
    with InThread(app, config(max_connections=10, header_timeout=20, timeout_keep_alive=20)) as server:
        idle = [server.connect() for _ in range(100)]
        for number, client in enumerate(idle):
            client.sendall((b"", b"GET /", b"\r\n")[number % 3])
        _until(lambda: b"200 OK" in server.ask(message("GET", "/echo", "Connection: close")))
        assert sum(_is_open(client) for client in idle) <= 10 + SPARE
        for client in idle:
            client.close()


def _is_open(client: socket.socket) -> bool:
    client.settimeout(0.01)
    try:
        return bool(client.recv(1))
    except TimeoutError:
        return True
    except OSError:
        return False


def test_where_all_are_busy_probes_are_answered_and_others_told(app: FastAPI) -> None:
    with InThread(app, config(max_connections=5, body_timeout=20)) as server:
        busy = [server.connect() for _ in range(5)]
        for client in busy:
            client.sendall(message("GET", "/wait"))
        stray = [server.connect() for _ in range(50)]  # idle, beyond the limit
        _until(lambda: b"503" in server.ask(GET))
        begun = time.monotonic()
        for _ in range(5):
            refused = server.ask(GET)
            assert refused.startswith(b"HTTP/1.1 503 ") and b"connection: close" in refused.lower(), refused
            assert b"retry-after: 1" in refused and b"server_error" not in refused
            assert b"well" in server.ask(message("GET", "/health"))
        assert time.monotonic() - begun < SLACK
        for client in [*stray, *busy]:
            client.close()
        _until(lambda: b"200 OK" in server.ask(message("GET", "/echo", "Connection: close")))


def test_few_file_descriptors(plain_model: Any) -> None:
    """The limit of connections follows, and what is left over is enough for everything else."""
    limited = ["bash", "-c", 'ulimit -n 128; exec "$@"', "bash"]
    server = ServerProcess("--model", str(plain_model), **ONE_THREAD)
    server._command[:0] = limited
    with server:
        held = []
        for number in range(150):
            host, port = server.url.removeprefix("http://").split(":")
            client = socket.create_connection((host, int(port)), timeout=10)
            if number % 2:
                client.sendall(message("GET", "/health"))
                assert client.recv(1000)
                client.sendall(b"\r\n")
            held.append(client)
        with server.http() as http:
            assert http.get("/health").status_code == 200
        for client in held:
            client.close()
        assert server.stop() == 0
    assert len(server.log) < 20_000 and "ulimit" in server.log
    assert "Traceback" not in server.log


def test_without_any_descriptor_left_the_server_waits_and_says_so_once(
    app: FastAPI, caplog: pytest.LogCaptureFixture
) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with InThread(app, config(PATIENT, max_connections=50)) as server:
        clients = [socket.socket() for _ in range(4)]
        host, port = server.url.removeprefix("http://").split(":")
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
        taken = []
        try:
            with suppress(OSError):
                while True:
                    taken.append(os.dup(clients[0].fileno()))
            for client in clients:
                client.settimeout(10)
                client.connect((host, int(port)))
                client.sendall(GET)
            time.sleep(1.0)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for one in taken:
                os.close(one)
        for client in clients:
            assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
            client.close()
    told = [record for record in caplog.records if "cannot be accepted" in record.getMessage()]
    assert len(told) == 1


def test_room_for_connections_is_made_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    now = [200, 4000]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: now.__setitem__(slice(None), limits))
    assert room_for(1000) == 1000 and 1000 < now[0] < 2000
    now[:] = [200, 200]
    assert 8 <= room_for(1000) < 200 and now == [200, 200]


# -- where it listens ----------------------------------------------------------------------------------------------


def test_a_unix_socket_is_taken_over_from_the_dead_alone(app: FastAPI, tmp_path: Any) -> None:
    path = str(tmp_path / "socket")
    for one in listening(config(uds=path)):
        one.close()  # and leaves its file
    with InThread(app, config(PATIENT, uds=path)) as server:
        assert server.url == f"unix:{path}"
        for _ in range(2):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(path)
                client.sendall(GET)
                assert answered(client)["path"] == "/echo"
        with pytest.raises(QuireError, match="another server"):
            listening(config(uds=path))
    assert not os.path.exists(path)


def test_an_address_that_cannot_be_had() -> None:
    with pytest.raises(QuireError, match="take another"):
        listening(config(host="192.0.2.1", port=1))


# -- TLS -----------------------------------------------------------------------------------------------------------

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
