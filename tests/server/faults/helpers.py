"""What the tests of this folder share."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.demo import ADAPTERS, adapter_path
from tests.server.api_server import LocalServer, ServerProcess

COMPLETIONS = "/v1/completions"
BODY_TIMEOUT = HEADER_TIMEOUT = 0.6
LIMIT = 200_000  # bytes of a body


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
        assert self.begun.wait(60), self.lines

    def run(self) -> None:
        with (
            self._server.http() as http,
            http.stream("POST", self._path, json={**self._request, "stream": True}) as answer,
        ):
            for line in answer.iter_lines():
                self.lines.append(line)
                self.begun.set()

    def events(self) -> list[Any]:
        self.join(120)
        assert not self.is_alive()
        return events(self.lines)


@contextmanager
def executing(server: LocalServer, replacement: Any) -> Iterator[None]:
    """replacement(execute, plan) runs the engine's steps."""
    runner = server.engine.llm_engine.executor.runner
    execute = runner.execute
    runner.execute = lambda plan: replacement(execute, plan)
    try:
        yield
    finally:
        runner.execute = execute


def until(condition: Any, timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


LOADED = tuple(f"a-{name}" for name in ADAPTERS)


def _load(server: LocalServer, name: str, of: str, **more: Any) -> None:
    with server.http() as http:
        given = {"lora_name": name, "lora_path": str(adapter_path(of)), **more}
        answer = http.post("/v1/load_lora_adapter", json=given)
    assert answer.status_code == 200, answer.text


def _load_all(server: LocalServer) -> None:
    for name, of in zip(LOADED, ADAPTERS, strict=True):
        _load(server, name, of, load_inplace=True)
