"""`quire chat` and `quire complete` against servers that answer anything: one line of error at worst."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import Result
from typer.testing import CliRunner

from quire.cli import remote
from quire.cli.app import app
from quire.cli.conversation import Answer, report
from quire.cli.terminal import note, print_error
from tests.cli.test_run import Terminal

pytestmark = pytest.mark.slow

COMMAND = "\x1b]0;owned\x07\x1b[2J"  # of a terminal's: another title, an empty screen
END: dict[str, Any] = {"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}


def chunk(**given: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": "hi"}, "text": "hi", "finish_reason": None, **given}]}


# What is said to GET /v1/models: (status, type, body).
LISTS: dict[str, tuple[int, str, bytes]] = {
    "page": (200, "text/html", b"<html>"),
    "text": (200, "application/json", b'"abc"'),
    "null": (200, "application/json", b'{"data": null}'),
    "broken": (200, "application/json", b'{"data": ['),
    "deep": (200, "application/json", b"[" * 100_000),
    "no-name": (200, "application/json", b'{"data": [{"id": null}]}'),
    "long": (200, "application/json", b'{"data": ["' + b"\n\na" * 100_000),
    "error": (400, "application/json", json.dumps({"error": {"message": COMMAND}}).encode()),
}

# Events of an answer.
EVENTS: dict[str, list[Any]] = {
    "end-of-other-kind": [chunk(finish_reason={"a": 1})],
    "choices-of-texts": [{"choices": ["a"]}],
    "text-for-event": ["x"],
    "list-for-event": [[1]],
    "content-of-other-kind": [chunk(delta={"content": {"a": 1}}, text=["a"])],
    "error-in-stream": [{"error": {"message": COMMAND}}],
    "nothing": [None],
    "long": ["x" * 100_000],
}

# Events that are odd, and can be read all the same.
READ: dict[str, list[Any]] = {
    "usage-of-texts": [chunk(), {"choices": [END], "usage": {"completion_tokens": "many"}}],
    "usage-as-list": [chunk(), {"choices": [END], "usage": [1]}],
    "no-choices": [{"choices": None}, chunk(), {"choices": [END]}],
    "no-delta": [chunk(), chunk(delta=None, text=None), {"choices": [END]}],
    "markup-as-reason": [chunk(), chunk(delta={}, text="", finish_reason=f"[/foo]{COMMAND}")],
}


class _Hostile(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        good = (200, "application/json", b'{"object": "list", "data": [{"id": "m", "object": "model"}]}')
        self._send(*LISTS.get(self.path.split("/")[1], good))

    def do_POST(self) -> None:
        name = self.path.split("/")[1]
        events = {**EVENTS, **READ}[name]
        self._send(200, "text/event-stream", b"".join(b"data: %s\n\n" % json.dumps(one).encode() for one in events))

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def hostile() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Hostile)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_LONGEST", 90_000)


def command(verb: str, url: str) -> Result:
    return CliRunner().invoke(app, [verb, f"{url}/v1", "-q", "x", "--verbose"])


@pytest.mark.parametrize("name", LISTS)
def test_a_list_of_models_that_is_none_is_one_line(hostile: str, name: str) -> None:
    result = command("chat", f"{hostile}/{name}")
    assert result.exit_code == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "\x1b" not in result.stderr and "\x07" not in result.stderr
    assert name != "long" or "has no end" in result.stderr


@pytest.mark.parametrize("verb", ["chat", "complete"])
@pytest.mark.parametrize("name", EVENTS)
def test_an_answer_that_is_none_is_one_line(hostile: str, verb: str, name: str) -> None:
    result = command(verb, f"{hostile}/{name}")
    assert result.exit_code == 1 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert "\x1b" not in result.stderr and "\x07" not in result.stderr
    assert name != "long" or "has no end" in result.stderr


@pytest.mark.parametrize("verb", ["chat", "complete"])
@pytest.mark.parametrize("name", READ)
def test_an_odd_answer_is_read(hostile: str, verb: str, name: str) -> None:
    result = command(verb, f"{hostile}/{name}")
    assert result.exit_code == 0 and result.stdout == "hi\n"
    assert "\x1b" not in result.stderr


def test_no_message_commands_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    print_error(f"a {COMMAND} b")
    note(f"a {COMMAND} b")
    report(Answer("x", 1, f"[/foo] {COMMAND}", 0.1, None), verbose=True)
    told = capsys.readouterr().err
    assert "\x1b]" not in told and "\x1b[2J" not in told and "\x07" not in told and "[/foo]" in told


def test_an_error_of_a_server_does_not_command_the_terminal(hostile: str) -> None:
    terminal = Terminal("chat", f"{hostile}/error/v1", "-q", "x")
    seen = terminal.read_until("answered 400.*\n")
    assert "\x1b]" not in seen and "\x1b[2J" not in seen and "\x07" not in seen
    assert terminal.end() == 1


def test_long_answers_of_short_events_are_read() -> None:
    """Wherever a part ends: in the middle of an empty line too."""
    parts = [b"data: x", b"\n", b"\n"] * 50_000
    assert sum(map(len, parts)) > 90_000
    assert list(remote._bounded(lambda: iter(parts), by_event=True)()) == parts
