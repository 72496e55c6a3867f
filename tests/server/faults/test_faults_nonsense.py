"""Faults of a server: clients that send nonsense."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.server.api_server import LocalServer
from tests.server.faults.helpers import (
    BODY_TIMEOUT,
    COMPLETIONS,
    HEADER_TIMEOUT,
    LIMIT,
    body,
    connect,
    everything,
    message,
    small,
    tokens,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("chunked", [False, True])
def test_half_a_body_and_silence_is_given_up(tiny: LocalServer, chunked: bool) -> None:
    half = b'{"prompt": "a'
    with connect(tiny) as client:
        begun = time.monotonic()
        if chunked:
            client.sendall(message(b"%x\r\n%s\r\n" % (len(half), half), COMPLETIONS, "Transfer-Encoding: chunked"))
        else:
            client.sendall(message(half, length=500))
        answer = everything(client)  # it is closed, too: what came later would be taken for a request
        taken = time.monotonic() - begun
    assert answer.startswith(b"HTTP/1.1 408 ") and b"invalid_request_error" in answer
    assert BODY_TIMEOUT * 0.9 < taken < BODY_TIMEOUT + 20


def test_a_body_that_drips_is_given_up(tiny: LocalServer) -> None:
    with connect(tiny) as client:
        begun = time.monotonic()
        client.sendall(message(b"", length=10_000))
        client.settimeout(0.05)
        answer = b""
        while not answer and time.monotonic() < begun + 30:
            client.sendall(b" ")
            with suppress(TimeoutError):
                answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 408 ")


BAD = {
    "nested": b"[" * 10_000_000,
    "nested in a field": b'{"prompt": "a", "user": ' + b'{"a":' * 2_000_000,
    "nested, but closed": b'{"prompt": "a", "logit_bias": ' + b"[" * 900 + b"]" * 900 + b"}",
    "cut off": b'{"prompt": "a"',
    "empty": b"",
    "null": b"null",
    "a list": b"[]",
    "not UTF-8": b'{"prompt": "\xff\xfe"}',
    "half a pair": b'{"prompt": "\\ud800"}',
    "half a pair as a field": b'{"prompt": "a", "\\udfff": 1}',
    "half a pair as an id": b'{"prompt": "a", "request_id": "\\ud800"}',
    "half a pair in bad_words": b'{"prompt": "a", "bad_words": ["\\ud800"]}',
    "half a pair in logit_bias": b'{"prompt": "a", "logit_bias": {"\\ud800": 1}}',
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinite": b'{"prompt": "a", "top_p": 1e999}',
    "NaN as a bias": b'{"prompt": "a", "logit_bias": {"5": NaN}}',
    "a huge number": b'{"prompt": "a", "max_tokens": ' + b"9" * 4000 + b"}",
    "a number that Python will not read": b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    "a huge token": b'{"prompt": [1, ' + b"9" * 4000 + b"]}",
    "a huge seed": b'{"prompt": "a", "seed": ' + b"9" * 40 + b"}",
    "a huge logit_bias": b'{"prompt": "a", "logit_bias": {"' + b"9" * 5000 + b'": 1}}',
}


@pytest.mark.parametrize("case", BAD)
def test_bodies_that_are_no_good(chat: LocalServer, case: str) -> None:
    with chat.http() as http:
        begun = time.process_time()  # the server's is this process's, and other processes do not count
        answer = http.post(COMPLETIONS, content=BAD[case], headers={"Content-Type": "application/json"})
        assert time.process_time() - begun < 3
        assert answer.status_code == 400, answer.text
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.content) < 3000 and "Traceback" not in answer.text
    chat.until_idle()


@pytest.fixture(scope="module")
def chat(chat_model: Path) -> Iterator[LocalServer]:
    with LocalServer(small(chat_model)) as server:
        yield server


@pytest.mark.parametrize(
    "given",
    [
        '{"messages": [{"role": "user", "content": "\\ud800"}]}',
        '{"messages": [{"role": "\\ud800", "content": "a", "name": "\\ud800"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "\\ud800"}]}]}',
        '{"messages": [{"role": "user", "content": "a"}], "request_id": "a\\nb"}',
        '{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"messages": []}}',
    ],
)
def test_messages_that_are_no_good(chat: LocalServer, given: str) -> None:
    with chat.http() as http:
        answer = http.post("/v1/chat/completions", content=given, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    chat.until_idle()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_what_json_readers_differ_about(bundled: LocalServer, path: str) -> None:
    deep = "[" * 900 + "]" * 900
    for given, complaint in (
        ('{"messages": [{"role": "\\ud800", "content": "a"}]}', "no JSON"),
        ('{"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"x": ' + deep + "}}", "recursion"),
    ):
        with bundled.http() as http:
            answer = http.post(path, content=given, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400 and complaint in answer.json()["error"]["message"], answer.text


def test_the_last_of_two_equal_names_counts(tiny: LocalServer) -> None:
    given = b'{"max_tokens": 5, "return_token_ids": true, "prompt": "a", "max_tokens": 2}'
    with tiny.http() as http:
        answer = http.post(COMPLETIONS, content=given, headers={"Content-Type": "application/json"})
    assert len(answer.json()["choices"][0]["token_ids"]) == 2


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "x"])
def test_other_content_types_are_refused(tiny: LocalServer, kind: str) -> None:
    with tiny.http() as http:
        answer = http.post(COMPLETIONS, content=json.dumps(body()), headers={"Content-Type": kind})
    assert answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"


def test_bodies_over_the_limit_are_413(tiny: LocalServer) -> None:
    part = b" " * 10_000

    def endless() -> Iterator[bytes]:
        for _ in range(LIMIT // len(part) + 2):
            yield part

    headers = {"Content-Type": "application/json"}
    with tiny.http() as http:
        assert http.post(COMPLETIONS, content=endless(), headers=headers).status_code == 413
        assert http.post(COMPLETIONS, content=b" " * (LIMIT + 1), headers=headers).status_code == 413
        answer = http.post(COMPLETIONS, content=json.dumps(body(max_tokens=1)).ljust(LIMIT), headers=headers)
        assert answer.status_code == 200, answer.text
    with connect(tiny) as client:  # what is announced is enough
        client.sendall(message(b"{", length=10**15))
        assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
    tiny.until_idle()


def test_lengths_that_lie(tiny: LocalServer) -> None:
    whole = json.dumps(body(max_tokens=1)).encode()
    with connect(tiny) as client:  # too short: the rest is no request
        client.sendall(message(whole, length=len(whole) - 1))
        answer = everything(client)
    assert answer.startswith(b"HTTP/1.1 400 ") and b" 200 " not in answer
    for line in ("Content-Length: 5", "Transfer-Encoding: chunked"):  # two lengths: what proxies disagree about
        with connect(tiny) as client:
            text = message(whole, length=len(whole)).replace(b"Host: here", b"Host: here\r\n" + line.encode())
            client.sendall(text)
            assert everything(client).startswith(b"HTTP/1.1 400 ")
    tiny.until_idle()


def test_connections_without_an_end_of_header_are_closed_and_disturb_nobody(tiny: LocalServer) -> None:
    clients = [connect(tiny) for _ in range(100)]
    begun = time.monotonic()
    for number, client in enumerate(clients):
        client.sendall(b"" if number % 3 == 0 else b"POST /v1/completions HTTP/1.1\r\nHost: he")
    assert len(tokens(tiny, body(max_tokens=3))) == 3
    assert time.monotonic() - begun < HEADER_TIMEOUT + 20
    for client in clients:
        assert everything(client) == b""
        client.close()
    assert time.monotonic() - begun < HEADER_TIMEOUT + 20


def test_a_second_header_has_a_time_limit_too(tiny: LocalServer) -> None:
    with connect(tiny) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: here\r\n\r\n")
        assert b"200 OK" in client.recv(65536)
        client.sendall(b"GET /version HTTP/1.1\r\nHo")
        begun = time.monotonic()
        assert b"200 OK" not in everything(client)
        assert time.monotonic() - begun < HEADER_TIMEOUT + 20


def test_an_endless_header_is_cut_off(tiny: LocalServer) -> None:
    for line in (b"a" * 1000, b"a: " + b"b" * 997 + b"\r\n"):
        with connect(tiny) as client:
            sent = 0
            try:
                client.sendall(b"GET /health HTTP/1.1\r\nX: ")
                while sent < 8 << 20:
                    sent += client.send(line)
                answer = everything(client)
            except (BrokenPipeError, ConnectionResetError):
                answer = b""
            assert sent < 8 << 20 and b"200 OK" not in answer
