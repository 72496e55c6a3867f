"""The short way to the routes that are asked most gives, of every request, what FastAPI's way gives."""

from __future__ import annotations

import json
import logging
import re
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import h11
import pytest
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.short_way import ShortWay
from tests.server.api_server import LocalServer

pytestmark = pytest.mark.usefixtures("one_thread")

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
SURROUNDED: dict[str, Any] = {
    "root_path": "/v1",
    "api_keys": ("a-key",),
    "allowed_origins": ("https://page.example",),
    "unknown_fields": "warn",
    "max_request_bytes": 100_000,
}
_VOLATILE = re.compile(rb'"created":\d+')
_SHORT = {"prompt": "One day", "max_tokens": 3, "temperature": 0}
_TALK = {"messages": [{"role": "user", "content": "a red circle"}], "max_tokens": 3, "temperature": 0}
_TEXT = {"input": "a red circle"}
JSON = ("Content-Type", "application/json")


class _Counting:
    """Stands before FastAPI's routes, and counts what comes to them."""

    def __init__(self, app: ASGIApp, seen: list[str]) -> None:
        self._app, self._seen = app, seen

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._seen.append(scope["path"])
        await self._app(scope, receive, send)


class Pair:
    """Two servers that differ in nothing but the way. long: what went FastAPI's way in the one that has the short."""

    def __init__(self, stack: ExitStack, engine: dict[str, Any], **server: Any) -> None:
        short, plain = (LocalServer({**engine, "num_gpu_blocks_override": 64}, **server) for _ in range(2))
        ways = [one for one in short.app.user_middleware if one.cls is ShortWay]
        assert len(ways) == 1 and short.app.user_middleware[-1] is ways[0]
        plain.app.user_middleware = [one for one in plain.app.user_middleware if one.cls is not ShortWay]
        self.long: list[str] = []
        short.app.user_middleware.append(Middleware(_Counting, seen=self.long))
        self.servers = [stack.enter_context(short), stack.enter_context(plain)]

    def both(self, *parts: bytes, half_close: bool = False) -> tuple[Any, bool]:
        """(the answer that both give, whether the one took the short way)"""
        self.long.clear()
        first, second = (_asked(server.url, parts, half_close) for server in self.servers)
        assert first == second
        return first, not self.long


def _asked(url: str, parts: tuple[bytes, ...], half_close: bool) -> Any:
    """(status, headers, body), as far as they do not tell the time."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 30) as client:
        for part in parts:
            client.sendall(part)
        if half_close:
            client.shutdown(socket.SHUT_WR)
        reader = h11.Connection(h11.CLIENT)
        reader.send(h11.Request(method=parts[0].split(b" ")[0], target="/", headers=[("Host", "x")]))
        reader.send(h11.EndOfMessage())
        response, body = None, b""
        while True:
            event = reader.next_event()
            if event is h11.NEED_DATA:
                reader.receive_data(client.recv(65536))
            elif isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                break
            else:
                assert isinstance(event, h11.InformationalResponse), event
    assert response is not None
    headers = [(name, value) for name, value in response.headers if name != b"date"]
    return response.status_code, headers, _VOLATILE.sub(b"", body)


def message(
    path: str, body: bytes, *headers: tuple[str, str], method: str = "POST", length: bool = True, given: bool = True
) -> bytes:
    """A request. length: it says how long its body is. given: it is JSON, by its header."""
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", "X-Request-Id: one"]
    lines += [f"{name}: {value}" for name, value in [*([JSON] if given else []), *headers]]
    lines += [f"Content-Length: {len(body)}"] if length else []
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def sent(path: str, body: Any, *headers: tuple[str, str], **more: Any) -> bytes:
    return message(path, json.dumps(body).encode(), *headers, **more)


def _chunked(body: bytes) -> bytes:
    return b"".join(b"1\r\n%c\r\n" % one for one in body) + b"0\r\n\r\n"


def good(path: str, plain: dict[str, Any], route: str = "") -> Iterator[bytes]:
    """Requests that the short way serves. route: FastAPI's path."""
    yield sent(path, plain)
    yield sent(f"{path}?a=b", plain)
    yield message(path, b" " + json.dumps(plain, indent=2).encode() + b"\n")
    yield message(path, json.dumps(plain).encode(), ("Content-Type", "Application/JSON; charset=utf-8"), given=False)
    yield message(path, _chunked(json.dumps(plain).encode()), ("Transfer-Encoding", "chunked"), length=False)
    yield sent(path, {**plain, "user": "somebody", "model": None})
    yield sent(path, {**plain, "model": "no-such-model"})
    yield sent(path, {**plain, "request_id": "not\nan id"})
    yield sent(path, {**plain, "request_id": "mine"})
    yield sent(path, {**plain, "cache_salt": "x" * 2000})
    if route != EMBEDDINGS:
        yield sent(path, {**plain, "priority": 7})  # refused
        yield sent(path, {**plain, "session_id": "x", "service_tier": "flex"})  # that change nothing
        yield sent(path, {**plain, "stream": True, "stream_options": {"include_usage": True}})
        yield sent(path, {**plain, "n": 2, "seed": 1, "temperature": 1.0})
        yield sent(path, {**plain, "n": 100_000})
        yield sent(path, {**plain, "temperature": -1})
        yield sent(path, {**plain, "max_tokens": 10**9})
        yield sent(path, {**plain, "response_format": {"type": "nonsense"}})
        yield sent(path, {**plain, "stream": True, "logit_bias": {"99999999": 1.0}})


def other(path: str, plain: dict[str, Any]) -> Iterator[bytes]:
    """Requests that FastAPI looks at."""
    text = json.dumps(plain).encode()
    for body in (b"", b"null", b"[]", b"7", b'"text"', b"{", text + b"x", b"\xff", b"\x00", b'{"a": NaN}', b"[" * 500):
        yield message(path, body)
    for value in ([], 7, {}, [{"a": 1}], "x" * 70_000, "\ud800", [1.5] * 9):
        yield sent(path, {name: value for name in plain})
        yield sent(path, {**plain, "user": value})
    for kind in ("text/plain", "application/vnd.api+json", "application/jsonx", "multipart/form-data", "", "json"):
        yield message(path, text, ("Content-Type", kind), given=False)
    yield message(path, text, given=False)
    yield message(path, text, ("Content-Type", "text/plain"), JSON, given=False)
    yield message(path, text, ("Content-Encoding", "gzip"))
    yield sent(path, {**plain, "user": "x" * 70_000})
    yield sent(path, {**plain, "user": "x" * 200_000})
    yield message(path, b"x" * 70_000)
    yield message(path, _chunked(b" " * 66_000 + text), ("Transfer-Encoding", "chunked"), length=False)
    for place in (f"{path}/", f"/{path}", f"{path}%0A", f"{path}%2F", path.upper(), f"{path}/more"):
        yield sent(place, plain)
    for method in ("GET", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD"):
        yield sent(path, plain, method=method)


@pytest.fixture(scope="module")
def generators() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, {})


@pytest.fixture(scope="module")
def embedders() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, {"runner": "pooling", "convert": "embed"})


@pytest.fixture(scope="module")
def surrounded() -> Iterator[Pair]:
    with ExitStack() as stack:
        yield Pair(stack, {}, **SURROUNDED)


@pytest.mark.parametrize(("path", "plain"), [(COMPLETIONS, _SHORT), (CHAT, _TALK)])
def test_of_generators(generators: Pair, path: str, plain: dict[str, Any]) -> None:
    answers = [generators.both(one) for one in good(path, plain)]
    assert all(short for _, short in answers)
    assert {status for (status, _, _), _ in answers} >= {200, 400, 404}
    for one in other(path, plain):
        generators.both(one)


def test_what_is_not_plain_goes_the_long_way(generators: Pair) -> None:
    ways = {one: generators.both(one)[1] for one in other(COMPLETIONS, _SHORT)}
    served = [one for one, short in ways.items() if short]  # fields that any of these values fits
    assert all(b'"user": "' in one or b'"prompt": "\\ud800"' in one or b"gzip" in one for one in served), served


@pytest.mark.parametrize("path", [EMBEDDINGS, "/pooling", "/v1/score", "/rerank", "/v2/rerank"])
def test_of_embedders(embedders: Pair, path: str) -> None:
    plain = {
        "/v1/score": {"text_1": "a circle", "text_2": ["a", "b"]},
        "/rerank": {"query": "a", "documents": ["b", "a"]},
    }.get(path.replace("/v2", ""), _TEXT)
    answers = [embedders.both(one) for one in good(path, plain, EMBEDDINGS)]
    assert [short for _, short in answers] == [True] * len(answers)
    assert {status for (status, _, _), _ in answers} == {200, 400, 404}
    for one in other(path, plain) if path in (EMBEDDINGS, "/rerank") else ():
        embedders.both(one)


def test_routes_of_the_other_kind_are_fastapis(embedders: Pair, generators: Pair) -> None:
    assert embedders.both(sent(COMPLETIONS, _SHORT)) == (embedders.both(message(COMPLETIONS, b""))[0], False)
    (status, _, _), short = generators.both(sent(EMBEDDINGS, _TEXT))
    assert (status, short) == (400, False)


def test_keys_origins_limits_and_root_paths(surrounded: Pair) -> None:
    key, page = ("Authorization", "Bearer a-key"), ("Origin", "https://page.example")
    answers = {
        (status, short)
        for path in (COMPLETIONS, "/v1" + COMPLETIONS, "/v1/v1" + COMPLETIONS, "/other" + COMPLETIONS)
        for headers in ((), (key,), (key, page), (("x-api-key", "wrong"),), (key, ("Origin", "https://other.example")))
        for (status, _, _), short in [surrounded.both(sent(path, {**_SHORT, "no_such_field": 1}, *headers))]
    }
    assert answers == {(200, True), (401, True), (404, False)}
    with_key = [message("/v1" + COMPLETIONS, b"{}" * size, key) for size in (60_000, 20_000)]
    too_long = message(
        "/v1" + COMPLETIONS, _chunked(b" " * 101_000), key, ("Transfer-Encoding", "chunked"), length=False
    )
    for one in (*with_key, too_long, sent("/v1" + COMPLETIONS, {**_SHORT, "unknown": 1, "max_tokens": "x"}, key)):
        (status, _, _), _ = surrounded.both(one)
        assert status in (400, 413)


def test_bodies_in_parts_and_clients_that_wait_or_leave(generators: Pair) -> None:
    head, _, body = sent(COMPLETIONS, _SHORT).partition(b"\r\n\r\n")
    (status, _, _), short = generators.both(head + b"\r\n\r\n", body[:5], body[5:])
    assert (status, short) == (200, True)
    waits = head + b"\r\nExpect: 100-continue\r\n\r\n"
    assert generators.both(waits + body)[0][0] == 200
    bad = sent(COMPLETIONS, {**_SHORT, "temperature": -1})  # an answer that is there at once
    assert generators.both(bad, half_close=True)[0][0] == 400


def test_metrics_and_the_log_name_the_route(caplog: pytest.LogCaptureFixture) -> None:
    named = ("request_id", "status", "error", "model", "completion_tokens")
    with ExitStack() as stack, caplog.at_level("INFO", "quire.server.access"):
        pair = Pair(stack, {})
        assert [pair.both(one)[1] for one in (sent(COMPLETIONS, _SHORT), message(COMPLETIONS, b"{"))] == [True, False]
        end = time.monotonic() + 20
        counted: list[dict[tuple[str, str], float]] = []
        while (len(_lines(caplog)) < 4 or sum(map(len, counted)) < 4) and time.monotonic() < end:  # behind the answers
            time.sleep(0.01)
            counted = [_counted(server) for server in pair.servers]
    assert counted == [{(COMPLETIONS, "200"): 1, (COMPLETIONS, "400"): 1}] * 2
    facts = [str({name: vars(one).get(name) for name in named}) for one in _lines(caplog)]
    assert sorted(Counter(facts).values()) == [2, 2]  # the same of both


def _lines(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [one for one in caplog.records if one.name == "quire.server.access"]


def _counted(server: LocalServer) -> dict[tuple[str, str], float]:
    found = re.findall(
        r'quire_http_requests_total\{route="(.*?)",status="(\d+)"\} (\S+)', server.metrics.render().decode()
    )
    return {(route, status): float(count) for route, status, count in found}
