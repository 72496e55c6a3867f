"""Safety: what is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.demo import adapter_path
from tests.server.api_server import LocalServer, ServerProcess
from tests.server.safety.helpers import ADMIN, CHAT, COMPLETIONS, KEYS, LOAD, UNLOAD, USER, asked

pytestmark = pytest.mark.slow


def test_errors_tell_nothing_of_the_inside(bundled: LocalServer, root: Path) -> None:
    bodies: list[Any] = [
        b"{", b"\xff", {}, {"prompt": None}, {"prompt": {"a": 1}}, {"prompt": "a", "model": "x"}, {"messages": USER},
        {"messages": [{}]}, {"messages": [{"role": 1}]}, {"prompt": "a", "temperature": "hot"}, {"prompt": [-1]},
        {"prompt": "a", "logit_bias": {"x": 1}}, {"prompt": "a", "stop": [""]}, {"lora_name": "x", "lora_path": "x"},
        {"lora_name": "x", "lora_path": str(root)}, {"lora_name": "nobody"}, {"tokens": [10**9]}, {"tokens": "a"},
        {"messages": [{"role": "wizard", "content": "a"}]}, {"messages": USER, "mm_processor_kwargs": {"x": "a"}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:image/png;base64,AAAA"}]}]},
    ]  # fmt: skip
    told = set()
    for path in (COMPLETIONS, CHAT, "/tokenize", "/detokenize", LOAD, UNLOAD, "/v1/models/x", "/nowhere"):
        for body in bodies:
            status, text = asked(bundled, "POST", path, body=body)
            if status != 200:
                told.add(status)
                error = json.loads(text)["error"]
                assert status < 500 and set(error) == {"message", "type", "param", "code"} and error["message"], text
                assert not any(word in text for word in ("Traceback", "0x7", ".py", "site-packages", "/quire/")), text
    assert told >= {400, 404, 405, 422}


def test_a_salt_separates(guarded: LocalServer) -> None:
    def cached(salt: Any) -> int:
        body = {"prompt": [5, 6, 7, 8] * 20, "max_tokens": 1, "cache_salt": salt}
        status, text = asked(guarded, "POST", COMPLETIONS, KEYS[0], body)
        assert status == 200, text
        return int(json.loads(text)["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert [cached("one"), cached("two"), cached(None), cached("One")] == [0, 0, 0, 0]
    assert min(cached("one"), cached("two"), cached(None)) > 0


@pytest.mark.parametrize("salt", ["", 5, ["a"], {"a": 1}, True, "a" * 1025])
def test_a_salt_that_is_none_is_refused(guarded: LocalServer, salt: Any) -> None:
    for path, field in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        status, text = asked(guarded, "POST", path, KEYS[0], {**field, "cache_salt": salt})
        assert status == 400 and json.loads(text)["error"]["param"] == "cache_salt"


def test_request_ids(guarded: LocalServer) -> None:
    with guarded.http(headers={"Authorization": f"Bearer {KEYS[0]}"}) as client:
        for good in ("a", "trace-1:2.3_4", "x" * 128):
            assert client.get("/version", headers={"X-Request-Id": good}).headers["X-Request-Id"] == good
        for bad in ("x" * 129, "a b", "a\tb", "<script>", "é", "a,b", "", '"'):
            given = {"X-Request-Id": bad.encode()}
            answered = client.get("/version", headers={**given}).headers["X-Request-Id"]
            assert answered != bad and len(answered) == 24
        refused = client.get("/version", headers={"Authorization": "x", "X-Request-Id": "mine"})
        assert refused.status_code == 401 and refused.headers["X-Request-Id"] == "mine"
        named = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, "request_id": "my.name"})
        assert named.json()["id"] == "cmpl-my.name"
        bad = client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1, "request_id": "a\nb"})
        assert bad.status_code == 400 and bad.json()["error"]["param"] == "request_id"


SECRET, PROMPT, FORGED = "a-very-secret-key", "the quick brown secret", "FORGED LINE"


@pytest.mark.parametrize("form", ["text", "json"])
def test_logs_and_keys_of_a_process(plain_model: Path, form: str) -> None:
    server = ServerProcess(
        "--model", str(plain_model), "--log-format", form, "--api-key", SECRET, "--admin-api-key", ADMIN,
        "--enable-lora", "--allow-runtime-lora", "--log-level", "debug",
    )  # fmt: skip
    if form == "text":
        server._command.insert(1, "-O")
    with server:  # as text, it runs without assertions
        assert asked(server, "GET", "/v1/models")[0] == asked(server, "GET", "/v1/models", "wrong-secret-key")[0] == 401
        assert asked(server, "GET", "/v1/models", SECRET)[0] == 200
        load = {"lora_name": "x", "lora_path": str(adapter_path("french"))}
        assert [asked(server, "POST", LOAD, key, load)[0] for key in (None, SECRET, ADMIN)] == [401, 403, 403]
        user = f"me\n{FORGED}\u2028{FORGED} \x1b[31m" + "u" * 5000
        body = {"prompt": PROMPT, "max_tokens": 20, "temperature": 0, "user": user}  # a long answer, not one letter
        status, text = asked(server, "POST", COMPLETIONS, SECRET, body)
        assert status == 200
        answer = json.loads(text)["choices"][0]["text"]
        assert asked(server, "POST", COMPLETIONS, SECRET, {**body, "request_id": f"a\n{FORGED}"})[0] == 400
        assert asked(server, "POST", COMPLETIONS, SECRET, {"prompt": PROMPT, "temperature": PROMPT})[0] == 400
        assert asked(server, "POST", COMPLETIONS, SECRET, {"prompt": PROMPT, "model": f"x\n{FORGED}"})[0] == 404
        for path in (f"/a%0a{FORGED.replace(' ', '%20')}%0d%1b[31m", "/a%E2%80%A8b", "/" + "a" * 3000):
            assert asked(server, "GET", path, SECRET)[0] == 404
        asked(server, "GET", "/version", SECRET, **{"X-Request-Id": FORGED})
        assert server.stop() == 0
    log = server.log
    for secret in (SECRET, "wrong-secret-key", ADMIN, PROMPT, answer):
        assert secret not in log, log
    lines = log.split("\n")
    assert not any(line.startswith(FORGED) for line in lines) and "\x1b" not in log and "\r" not in log
    assert max(map(len, lines)) < 2000
    access = [line for line in lines if "/v1/completions" in line]
    assert len(access) == 4
    if form == "json":
        assert all(isinstance(json.loads(line), dict) for line in lines if line)
        assert json.loads(access[0])["user"].startswith("me\n")
    assert "Traceback" not in log
