"""A fault in what is told of the engine is no fault of the engine's: who asks for answers gets the same ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.platform.engine.watching import snapshot, steps, watch
from quire.server.events import state
from tests.server.api_server import LocalServer
from tests.server.events.helpers import ROUTE, Asking, read, watching

PROMPT = [60, 61, 62, 63, 64, 65] * 4


@pytest.fixture(scope="module")
def server(plain_model: Path) -> Iterator[LocalServer]:
    with LocalServer({"model": str(plain_model), "num_gpu_blocks_override": 64}) as server:
        yield server


def broken(*given: Any) -> Any:
    raise RuntimeError("a fault of the telling")


@pytest.mark.parametrize(
    ("module", "name"),
    [(watch, "take_snapshot"), (snapshot, "_rows"), (state, "block_maps"), (state, "_adapter"), (state, "_json")],
)
def test_streams_end_and_the_engine_goes_on(
    server: LocalServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: Any, name: str
) -> None:
    if name == "_adapter":
        monkeypatch.setattr(type(server.engine), "list_lora_adapters", lambda self: [None])
    expected = Asking(server, PROMPT, max_tokens=30).result()["choices"]
    with monkeypatch.context() as fault, server.http() as http:
        fault.setattr(module, name, broken)
        for _ in range(2):
            asking = Asking(server, PROMPT, max_tokens=30)
            with http.stream("GET", f"{ROUTE}?rate=10") as answer:
                lines = list(answer.iter_lines())
            assert lines[0] == "event: error"
            error = json.loads(lines[1].removeprefix("data: "))["error"]
            assert error["type"] == "server_error" and "log" in error["message"]
            assert "a fault" not in "".join(lines)  # what it was, only the log says
            assert asking.result()["choices"] == expected
    assert any("could not be told" in record.message for record in caplog.records)
    monkeypatch.undo()
    with server.http() as http, watching(http) as states:
        assert next(states).kv.total == 64
    server.until_idle()
    assert server.engine.step_loop.health_error(60) is None


def test_steps_that_cannot_be_counted(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is told on, and the steps are made."""
    expected = Asking(server, PROMPT, max_tokens=30).result()["choices"]
    monkeypatch.setattr(steps, "_counts", broken)
    with server.http() as http, http.stream("GET", f"{ROUTE}?rate=10") as answer:
        states = read(answer.iter_lines())
        next(states)
        asking = Asking(server, PROMPT, max_tokens=30)
        told = []
        while asking.is_alive():
            told.append(next(states))
        told.append(next(states))
    assert asking.result()["choices"] == expected
    assert told and not any(one.steps for one in told)
    server.until_idle()
