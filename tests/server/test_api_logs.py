"""What stands in the server's log: when, what was wrong and with which field; nothing of what a client wrote."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from quire.server.responses.errors import ApiError, remember
from tests.lora.adapter_life import wait_for
from tests.server.api_server import LocalServer, ServerProcess

pytestmark = pytest.mark.usefixtures("one_thread")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
SECRET = "swordfish"


REFUSED: dict[str, tuple[str, dict[str, Any], str | None, str]] = {
    "a number": (COMPLETIONS, {"prompt": SECRET, "temperature": -1}, "temperature", "it is from 0"),
    "a type": (COMPLETIONS, {"prompt": SECRET, "temperature": SECRET}, "temperature", "valid number"),
    "a quoted value": (COMPLETIONS, {"prompt": "a", "stop": ["a", SECRET * 200]}, "stop", "characters"),
    "a cut value": (COMPLETIONS, {"prompt": "a", "stop": [f"it's {SECRET} \"" * 300]}, "stop", "characters"),
    "an unknown field": (CHAT, {"messages": [], "frobnicate": SECRET}, "frobnicate", "no such field"),
    "a long name": (CHAT, {"messages": [], f"{SECRET} \n" * 50: 1}, None, "no such field"),
    "tools": (CHAT, {"messages": [], "tools": [{"name": SECRET}]}, "tools", "must be an object with a name"),
    "a template": (
        CHAT, {"messages": [{"role": SECRET, "content": SECRET}]}, None, "the chat template failed",
    ),
    "an image": (
        CHAT,
        {"messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": f"http://user:{SECRET}@example.org/{SECRET}?key={SECRET}"}}
        ]}]},
        None,
        "image 0",
    ),
    "a model": (CHAT, {"model": SECRET, "messages": []}, "model", "there is no"),
    "too long": (COMPLETIONS, {"prompt": f"{SECRET} " * 2000}, "prompt", "maximum context length is 2048 tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_logged_with_its_field_and_reason(demo: ServerProcess, http: Any, name: str, stream: bool) -> None:
    path, body, field, reason = REFUSED[name]
    request_id = f"refused-{name.replace(' ', '-')}-{stream}"
    response = http.post(path, json={**body, "stream": stream}, headers={"X-Request-Id": request_id})
    assert response.status_code in (400, 404), response.text
    line = demo.line_of(request_id)
    assert f"status={response.status_code}" in line and reason in line and len(line) < 700
    assert field is None or f"field={field}" in line
    if name != "a long name":
        assert SECRET not in line
    else:
        assert line.count(SECRET) <= 7 and "\\n" not in line  # of a name that long the beginning


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"prompt": "' + SECRET.encode() + b'",}', b"\xff"])
def test_a_body_that_is_no_object_is_logged_too(demo: ServerProcess, http: Any, content: bytes) -> None:
    request_id = f"body-{content[:1].hex()}{len(content)}"
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    assert http.post(COMPLETIONS, content=content, headers=headers).status_code == 400
    line = demo.line_of(request_id)
    assert "error=" in line and SECRET not in line


def test_lines_begin_with_date_and_time(demo: ServerProcess, http: Any) -> None:
    http.get("/version", headers={"X-Request-Id": "when"})
    stamp = demo.line_of("when").split(" ")[0]
    passed = datetime.now().astimezone() - datetime.fromisoformat(stamp)
    assert datetime.fromisoformat(stamp).tzinfo is not None and abs(passed.total_seconds()) < 60


def test_probes_are_not_logged(demo: ServerProcess, http: Any) -> None:
    for path in ("/health", "/ready", "/ping", "/metrics"):
        assert http.get(path, headers={"X-Request-Id": f"probe{path.replace('/', '-')}"}).status_code == 200
    http.post("/health", headers={"X-Request-Id": "a-bad-probe"})
    assert "status=405" in demo.line_of("a-bad-probe")
    assert "request_id=probe" not in demo.log


@pytest.fixture(scope="module")
def talkative(chat_model: Path) -> Iterator[Any]:
    engine = {"model": str(chat_model), "max_model_len": 128, "num_gpu_blocks_override": 64}
    with LocalServer(engine, log_probes=True) as server, server.http() as http:
        yield http


def test_probes_are_logged_where_this_is_asked_for(talkative: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "quire.server.access"):
        for path in ("/health", "/ready", "/ping", "/metrics"):
            talkative.get(path)
            # The line is written when the answer has been sent.
            wait_for(lambda line=f"GET {path}": line in [record.message for record in caplog.records])


@pytest.mark.parametrize(
    ("message", "logged"),
    [
        ("temperature='hot' is refused: it's a number", "temperature='...' is refused: it's a number"),
        ("stop[0]='it\\'s \"a\"' has 9 characters", "stop[0]='...' has 9 characters"),
        ('stop="it\'s a"... is refused', "stop='...'... is refused"),
        ("stop='cut off... is refused: for a reason", "stop='...'"),
        ("image 0: https://a:b@c/d?e=f is not read", "image 0: (a URL) is not read"),
        ("image 0: data:image/png;base64,AAAA is no image", "image 0: (a URL) is no image"),
        ("request a: the chat template failed: TypeError: all you wrote", "request a: the chat template failed"),
        ("several\nlines\tof   it", "several lines of it"),
        ("x" * 5000, "x" * 200),
    ],
)
def test_the_log_quotes_nothing(message: str, logged: str) -> None:
    scope: dict[str, Any] = {}
    remember(scope, ApiError(400, message, param=None))
    assert scope["state"]["facts"] == {"field": None, "error": logged}
