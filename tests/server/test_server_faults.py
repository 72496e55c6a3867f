"""Whatever clients and steps do, the server goes on: nothing leaks, nobody else notices, and its end is orderly."""

from __future__ import annotations

import asyncio
import base64
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from quire.demo import ADAPTERS, adapter_path, picture_path
from quire.platform.scheduling.plan import StepPlan, StepResult
from tests.server.api_server import LocalServer, ServerProcess

COMPLETIONS = "/v1/completions"
BODY_TIMEOUT = HEADER_TIMEOUT = 0.6
LIMIT = 200_000  # bytes of a body
PICTURE = "data:image/png;base64," + base64.b64encode(picture_path().read_bytes()).decode()


@pytest.fixture(scope="module")
def tiny(plain_model: Path) -> Iterator[LocalServer]:
    settings = {"header_timeout": HEADER_TIMEOUT, "body_timeout": BODY_TIMEOUT, "max_request_bytes": LIMIT}
    with LocalServer(small(plain_model), **settings) as server:
        yield server


@pytest.fixture(scope="module")
def bundled() -> Iterator[LocalServer]:
    root = str(adapter_path(ADAPTERS[0]).parent)
    engine = {"enable_lora": True, "num_gpu_blocks_override": 2048}
    with LocalServer(engine, allow_runtime_lora=True, lora_roots=(root,), unload_timeout=0.3) as server:
        yield server


def small(model: Path) -> dict[str, Any]:
    """Arguments of an engine whose tables are checked quickly after every step."""
    return {"model": str(model), "num_gpu_blocks_override": 2048}


def body(prompt: Any = "a", max_tokens: int = 3000, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "return_token_ids": True, **more}


def connect(server: LocalServer | ServerProcess, receive_buffer: int | None = None) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(30)
    connection.connect((host, int(port)))
    return connection


def message(content: bytes | dict[str, Any], path: str = COMPLETIONS, *more: str, length: int | None = None) -> bytes:
    content = content if isinstance(content, bytes) else json.dumps(content).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: here", "Content-Type: application/json", *more]
    if not any(line.startswith("Transfer-Encoding") for line in more):
        lines.append(f"Content-Length: {len(content) if length is None else length}")
    return "\r\n".join([*lines, "", ""]).encode() + content


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:  # closed, with something left that it did not want
        pass
    return b"".join(parts)


def events(lines: Any) -> list[Any]:
    """The events of a stream; its last is [DONE], which is checked and left out."""
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return [json.loads(event) for event in data[:-1]]


def streamed(made: list[Any]) -> list[int]:
    return [token for event in made for choice in event.get("choices", ()) for token in choice.get("token_ids", ())]


def tokens(server: LocalServer, request: dict[str, Any]) -> list[int]:
    with server.http() as http:
        answer = http.post(COMPLETIONS, json=request)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


class InBackground(threading.Thread):
    """A stream that is read by a thread. `begun` is set by its first event."""

    def __init__(self, server: LocalServer | ServerProcess, request: dict[str, Any], path: str = COMPLETIONS) -> None:
        super().__init__(daemon=True)
        self._server, self._request, self._path = server, request, path
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.start()
        assert self.begun.wait(30), self.lines

    def run(self) -> None:
        with (
            self._server.http() as http,
            http.stream("POST", self._path, json={**self._request, "stream": True}) as answer,
        ):
            for line in answer.iter_lines():
                self.lines.append(line)
                self.begun.set()

    def events(self) -> list[Any]:
        self.join(40)
        assert not self.is_alive()
        return events(self.lines)


@contextmanager
def executing(server: LocalServer, replacement: Any) -> Iterator[None]:
    """replacement(execute, plan) runs the engine's steps."""
    runner = server.engine.core.runner
    execute = runner.execute
    runner.execute = lambda plan: replacement(execute, plan)
    try:
        yield
    finally:
        runner.execute = execute


def until(condition: Any, timeout: float = 20.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


# -- clients that leave --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["in mid-stream", "before the first token", "before the answer"])
def test_a_client_that_hangs_up_is_aborted_within_one_step(tiny: LocalServer, when: str) -> None:
    begun: list[float] = []

    def slow(execute: Any, plan: StepPlan) -> StepResult:
        begun.append(time.monotonic())
        time.sleep(0.2)
        return execute(plan)

    with executing(tiny, slow), connect(tiny) as client:
        client.sendall(message(body(stream=when != "before the answer")))
        if when == "in mid-stream":
            assert b"data: " in client.recv(65536) + client.recv(65536)
        until(lambda: begun)
        client.close()
        closed = time.monotonic()
        tiny.until_idle()
        assert sum(at > closed for at in begun) <= 1
    assert not tiny.engine.core.scheduler.running


def test_half_a_body_and_a_hang_up_leave_nothing(tiny: LocalServer) -> None:
    for length in (0, 1, 20):
        with connect(tiny) as client:
            client.sendall(message(json.dumps(body()).encode()[:length], length=500))
    assert len(tokens(tiny, body(max_tokens=3))) == 3
    tiny.until_idle()


# -- clients that send nonsense ------------------------------------------------------------------------------------


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
    assert BODY_TIMEOUT * 0.9 < taken < BODY_TIMEOUT + 3


def test_a_body_that_drips_is_given_up(tiny: LocalServer) -> None:
    with connect(tiny) as client:
        begun = time.monotonic()
        client.sendall(message(b"", length=10_000))
        client.settimeout(0.05)
        answer = b""
        while not answer and time.monotonic() < begun + 10:
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
    assert time.monotonic() - begun < HEADER_TIMEOUT + 2
    for client in clients:
        assert everything(client) == b""
        client.close()
    assert time.monotonic() - begun < HEADER_TIMEOUT + 5


def test_a_second_header_has_a_time_limit_too(tiny: LocalServer) -> None:
    with connect(tiny) as client:
        client.sendall(b"GET /version HTTP/1.1\r\nHost: here\r\n\r\n")
        assert b"200 OK" in client.recv(65536)
        client.sendall(b"GET /version HTTP/1.1\r\nHo")
        begun = time.monotonic()
        assert b"200 OK" not in everything(client)
        assert time.monotonic() - begun < HEADER_TIMEOUT + 3


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


# -- steps that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_exception_ends_its_own_request_and_no_other(tiny: LocalServer, stream: bool) -> None:
    victim = [7, 7, 7]
    others = [body([10 + n, 20, 30], 60, temperature=n % 2, seed=n) for n in range(4)]
    alone = [tokens(tiny, other) for other in others]
    engine = tiny.engine.core

    def failing(execute: Any, plan: StepPlan) -> StepResult:
        for chunk in plan.chunks:
            request = engine._owner_of(chunk.sequence_id)
            if request is not None and list(request.prompt_ids) == victim and chunk.start >= 8:
                raise RuntimeError("secret at 0x7f00deadbeef")
        return execute(plan)

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=tiny.url, timeout=60) as http:
            asked = [*others[:2], body(victim, 60, stream=stream), *others[2:]]
            return await asyncio.gather(*(http.post(COMPLETIONS, json=one) for one in asked))

    with executing(tiny, failing):
        answers = asyncio.run(run())
    failed = answers.pop(2)
    assert [answer.json()["choices"][0]["token_ids"] for answer in answers] == alone
    assert "0x7f" not in failed.text and "secret" not in failed.text
    if stream:
        made = events(failed.text.splitlines())
        assert failed.status_code == 200 and len(streamed(made)) > 3
        assert made[-1]["error"]["type"] == "server_error"
    else:
        assert failed.status_code == 500 and failed.json()["error"]["type"] == "server_error"
    tiny.until_idle()


@pytest.mark.parametrize("part", ["plan", "commit"])
def test_a_fault_of_the_engine_ends_everything_at_once(plain_model: Path, part: str) -> None:
    with LocalServer(small(plain_model)) as server, server.http() as http:
        streams = [InBackground(server, body([n + 5])) for n in range(3)]
        whole: list[httpx.Response] = []
        waiting = threading.Thread(target=lambda: whole.append(http.post(COMPLETIONS, json=body([40]))))
        waiting.start()
        until(lambda: server.engine.core.get_num_unfinished_requests() == 4)
        setattr(server.engine.core.scheduler, part, lambda *_: 1 / 0)
        for stream in streams:
            made = stream.events()
            assert streamed(made) and made[-1]["error"]["code"] == "engine_unavailable"
        waiting.join(20)
        assert whole[0].status_code == 503
        with server.http() as more:
            assert more.get("/health").status_code == more.get("/ready").status_code == 503
            refused = more.post(COMPLETIONS, json=body())
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_unavailable"
        assert server.app.state.context.sequences == 0


FAILING = """
from quire.platform.scheduling.scheduler import Scheduler
from quire.cli.app import app

commit, steps = Scheduler.commit, []

def failing(*args):
    steps.append(1)
    if len(steps) > 100:
        raise RuntimeError("a fault")
    return commit(*args)

Scheduler.commit = failing
import runpy
runpy.run_module("quire.server", run_name="__main__")
"""


def test_a_process_whose_engine_fails_ends_with_exit_code_1(plain_model: Path) -> None:
    server = ServerProcess("--model", str(plain_model))
    server._command[1:3] = ["-c", FAILING]
    with server:
        made = InBackground(server, body()).events()
        assert len(streamed(made)) > 50 and made[-1]["error"]["type"] == "service_unavailable_error"
        assert server.process.wait(20) == 1
    assert "a fault" in server.log


def test_health_tells_of_a_step_that_hangs(plain_model: Path) -> None:
    hang = threading.Event()

    def hanging(execute: Any, plan: StepPlan) -> StepResult:
        assert hang.wait(20)
        return execute(plan)

    with LocalServer(small(plain_model), step_timeout=0.2) as server, server.http() as http:
        assert http.get("/health").status_code == 200
        with executing(server, hanging):
            thread = threading.Thread(target=lambda: tokens(server, body(max_tokens=3)))
            thread.start()
            until(lambda: http.get("/health").status_code == 503)
            assert "over 0.2 s" in http.get("/health").json()["error"]["message"]
            assert http.get("/v1/models").status_code == http.get("/metrics").status_code == 200
            hang.set()
            thread.join(20)
        until(lambda: http.get("/health").status_code == 200)
        server.until_idle()


# -- crowds --------------------------------------------------------------------------------------------------------


def test_a_slow_reader_gets_everything_and_slows_nobody(tiny: LocalServer) -> None:
    slow, quick = body([9], 300, n=4, temperature=1, seed=3, logprobs=20), body([11], 50)
    with tiny.http() as http:
        expected = [choice["token_ids"] for choice in http.post(COMPLETIONS, json=slow).json()["choices"]]
    with connect(tiny, receive_buffer=4096) as client:
        client.sendall(message({**slow, "stream": True}, COMPLETIONS, "Connection: close"))
        until(lambda: tiny.engine.core.has_unfinished_requests())
        assert len(tokens(tiny, quick)) == 50
        until(lambda: not tiny.engine.core.has_unfinished_requests())  # computed, and not read
        received = everything(client)
    assert len(received) > 500_000
    lines = [line for line in received.partition(b"\r\n\r\n")[2].decode().splitlines() if line.startswith("data: ")]
    choices = [choice for event in events(lines) for choice in event["choices"]]
    for index in range(4):
        assert [token for c in choices if c["index"] == index for token in c["token_ids"]] == expected[index]
    tiny.until_idle()


def test_the_queue_is_bounded(plain_model: Path) -> None:
    gate = threading.Event()

    def gated(execute: Any, plan: StepPlan) -> StepResult:
        assert gate.wait(20)
        return execute(plan)

    with (
        LocalServer({**small(plain_model), "max_num_seqs": 2}, max_queue=1) as server,
        server.http() as http,
        executing(server, gated),
    ):
        answers: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda: answers.append(tokens(server, body(max_tokens=4)))) for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        until(lambda: server.app.state.context.sequences == 2)
        for request in (body(n=2, temperature=1), body(["a", "b"]), body(n=1, best_of=2, temperature=1)):
            full = http.post(COMPLETIONS, json=request)
            assert full.status_code == 429 and full.json()["error"]["type"] == "rate_limit_error"
            assert 1 <= int(full.headers["Retry-After"]) <= 60
        assert http.get("/health").status_code == 200
        gate.set()
        for thread in threads:
            thread.join(20)
        assert len(answers) == 2
        assert http.post(COMPLETIONS, json=body(["a", "b", "c"], 2)).status_code == 200
        server.until_idle()


def test_fifty_requests_cancelled_at_random_moments(bundled: LocalServer) -> None:
    """Texts, images, adapters, mixtures of streamed and not; one that is not cancelled is as it was alone."""
    chance = random.Random(5)
    image = {"type": "image_url", "image_url": {"url": PICTURE}}
    quiet = body("Once upon a time", 40)
    alone = tokens(bundled, quiet)

    def one(number: int) -> tuple[str, dict[str, Any]]:
        model = chance.choice(["quire-demo", *LOADED])
        stream = number % 2 == 0
        if number % 3 == 0:
            return COMPLETIONS, {**body("One day", 300, ignore_eos=True, stream=stream), "model": model}
        content = [image, {"type": "text", "text": f"What do you see, {number}?"}]
        more = {"max_tokens": 300, "ignore_eos": True, "stream": stream, "model": model}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **more}

    async def run() -> tuple[int, httpx.Response]:
        async with httpx.AsyncClient(base_url=bundled.url, timeout=60) as http:

            async def cancelled(number: int) -> bool:
                await asyncio.sleep(chance.uniform(0, 1.0))
                path, request = one(number)
                try:
                    await asyncio.wait_for(http.post(path, json=request), chance.uniform(0.001, 0.8))
                except TimeoutError:
                    return True
                return False

            lasting = asyncio.create_task(http.post(COMPLETIONS, json=quiet))
            gone = await asyncio.gather(*(cancelled(number) for number in range(50)))
            return sum(gone), await lasting

    _load_all(bundled)
    gone, lasting = asyncio.run(run())
    assert gone > 25
    assert lasting.json()["choices"][0]["token_ids"] == alone
    bundled.until_idle()
    assert all(info.requests == 0 for info in bundled.engine.list_lora_adapters())
    assert tokens(bundled, quiet) == alone


# -- adapters that come and go -------------------------------------------------------------------------------------

LOADED = tuple(f"a-{name}" for name in ADAPTERS)


def _load(server: LocalServer, name: str, of: str, **more: Any) -> None:
    with server.http() as http:
        given = {"lora_name": name, "lora_path": str(adapter_path(of)), **more}
        answer = http.post("/v1/load_lora_adapter", json=given)
    assert answer.status_code == 200, answer.text


def _load_all(server: LocalServer) -> None:
    for name, of in zip(LOADED, ADAPTERS, strict=True):
        _load(server, name, of, load_inplace=True)


PROMPT = "<|user|>There is a green star. What color is the star?<|end|><|assistant|>"


def _slowly(execute: Any, plan: StepPlan) -> StepResult:
    time.sleep(0.01)
    return execute(plan)


def test_unloading_waits_for_the_streams_of_an_adapter(bundled: LocalServer) -> None:
    _load_all(bundled)
    name = LOADED[0]
    request = body(PROMPT, 120, model=name, ignore_eos=True)
    alone = tokens(bundled, request)
    with bundled.http() as http, executing(bundled, _slowly):
        streams = [InBackground(bundled, request) for _ in range(3)]
        first = http.post("/v1/unload_lora_adapter", json={"lora_name": name})
        assert first.json()["draining"] is True and first.json()["freed_bytes"] is None  # after unload_timeout
        assert http.post(COMPLETIONS, json=request).status_code == 404  # nobody else gets it
        assert [streamed(stream.events()) for stream in streams] == [alone] * 3
    bundled.until_idle()
    _load(bundled, name, ADAPTERS[0])
    assert tokens(bundled, request) == alone
    with bundled.http() as http:
        again = http.post("/v1/unload_lora_adapter", json={"lora_name": name}).json()
    assert again["draining"] is False and again["freed_bytes"] > 0


def test_a_reload_in_place_leaves_streams_on_their_version(bundled: LocalServer) -> None:
    _load_all(bundled)
    french, shout = (body(PROMPT, 120, model=name, ignore_eos=True) for name in LOADED)
    alone = [tokens(bundled, french), tokens(bundled, shout)]
    assert alone[0] != alone[1]
    with executing(bundled, _slowly):
        streams = [InBackground(bundled, french) for _ in range(2)]
        _load(bundled, LOADED[0], "shout", load_inplace=True)
        assert any(stream.is_alive() for stream in streams)
        assert tokens(bundled, french) == alone[1]
        assert [streamed(stream.events()) for stream in streams] == [alone[0]] * 2
    bundled.until_idle()


# -- the end -------------------------------------------------------------------------------------------------------


def _refuses(server: ServerProcess) -> bool:
    try:
        connect(server).close()
    except ConnectionRefusedError:
        return True
    return False


def test_sigterm_lets_streams_finish(plain_model: Path) -> None:
    with ServerProcess("--model", str(plain_model), "--shutdown-timeout", "30") as server:
        streams = [InBackground(server, body([n + 5], 1500)) for n in range(2)]
        server.process.send_signal(signal.SIGTERM)
        until(lambda: _refuses(server))
        assert all(stream.is_alive() for stream in streams)
        for stream in streams:
            made = stream.events()
            assert len(streamed(made)) == 1500 and made[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(20) == 0
    assert "Traceback" not in server.log


def test_sigterm_ends_streams_that_take_too_long(plain_model: Path) -> None:
    with ServerProcess("--model", str(plain_model), "--shutdown-timeout", "0.3") as server:
        streams = [InBackground(server, body([n + 5], 4000)) for n in range(8)]
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        for stream in streams:
            made = stream.events()
            assert made[-1]["error"]["code"] == "engine_unavailable"
            assert 0 < len(streamed(made)) < 4000
        assert server.process.wait(20) == 0
        assert time.monotonic() - begun < 10
    assert "Traceback" not in server.log


def test_a_second_signal_ends_it_at_once(plain_model: Path) -> None:
    with ServerProcess("--model", str(plain_model), "--shutdown-timeout", "60") as server:
        streams = [connect(server) for _ in range(8)]  # which nobody reads
        for stream in streams:
            stream.sendall(message(body(max_tokens=4000, stream=True)))
            assert stream.recv(1000)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: _refuses(server))
        until(lambda: "8 requests may finish for up to 60 s; a second Ctrl-C (or SIGTERM) ends" in server.log)
        begun = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(20)
        assert time.monotonic() - begun < 5
        assert code in (0, 1, -signal.SIGTERM)
        for stream in streams:
            stream.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
@pytest.mark.parametrize("seconds", [0.0, 0.7])
def test_it_says_at_once_what_it_loads_and_a_signal_ends_that(number: int, code: int, seconds: float) -> None:
    """Wherever the imports are: some libraries pass an exception over that comes in the middle of them."""
    command = [sys.executable, "-m", "quire", "serve", "--port", "0", "--log-format", "json"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children would ignore it
    try:
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["message"] == "loading the bundled model"
        time.sleep(seconds)
        process.send_signal(number)
        assert process.wait(20) == code
        assert "Traceback" not in process.stderr.read()


def test_it_says_what_it_loads_before_torch_is_imported() -> None:
    command = [sys.executable, "-X", "importtime", "-m", "quire", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        before = ""
        while "loading the bundled model" not in before:
            line = process.stderr.readline()
            assert line, before[-3000:]
            before += line
        process.kill()
    assert re.search(r"\| +typer\b", before) and not re.search(r"\| +torch\b", before)
