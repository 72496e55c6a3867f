"""Connections: how many."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from typing import Any

import pytest
from fastapi import FastAPI

from quire.server.http.descriptors import SPARE, room_for
from tests.server.api_server import ONE_THREAD, ServerProcess
from tests.server.connections.helpers import GET, PATIENT, SLACK, _until, config
from tests.server.wire import InThread, message

pytestmark = pytest.mark.slow


def test_the_idle_make_room(app: FastAPI) -> None:
    with InThread(app, config(max_connections=10, header_timeout=PATIENT, timeout_keep_alive=PATIENT)) as server:
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
    with InThread(app, config(max_connections=5, body_timeout=PATIENT)) as server:
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
            client = socket.create_connection((host, int(port)), timeout=30)
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
                client.settimeout(30)
                client.connect((host, int(port)))
                client.sendall(GET)
            _until(lambda: told(caplog))
            time.sleep(1.0)  # it does not say so again
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for one in taken:
                os.close(one)
        for client in clients:
            assert client.recv(1000).startswith(b"HTTP/1.1 200 ")
            client.close()
    assert len(told(caplog)) == 1


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one for one in (record.getMessage() for record in caplog.records) if "cannot be accepted" in one]


def test_room_for_connections_is_made_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    now = [200, 4000]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: now.__setitem__(slice(None), limits))
    assert room_for(1000) == 1000 and 1000 < now[0] < 2000
    now[:] = [200, 200]
    assert 8 <= room_for(1000) < 200 and now == [200, 200]
