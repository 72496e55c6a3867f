"""Sleeping, waking up and the prefix cache over HTTP: who may, what happens to requests, and that nothing is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.api_server import LocalServer

pytestmark = pytest.mark.slow

ROUTES = ("/sleep", "/wake_up", "/reset_prefix_cache")
KEY, ADMIN = "the-key", "the-admin-key"


@pytest.fixture(scope="module")
def server(plain_model: Path) -> Iterator[LocalServer]:
    engine = {"model": str(plain_model), "enable_lora": True, "num_gpu_blocks_override": 256}
    with LocalServer(engine, enable_admin_routes=True, allow_runtime_lora=True) as server:
        yield server


def complete(http: Any, prompt: str = "abc", **fields: Any) -> Any:
    body = {"model": "x", "prompt": prompt, "max_tokens": 8, "temperature": 0, **fields}
    return http.post("/v1/completions", json=body)


def model_of(http: Any) -> str:
    return str(http.get("/v1/models").json()["data"][0]["id"])


def text_of(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_closed_unless_they_are_opened(plain_model: Path) -> None:
    keys = {"api_keys": (KEY,), "admin_api_key": ADMIN}
    with LocalServer({"model": str(plain_model)}, **keys) as server, server.http() as http:
        for route in ROUTES:
            assert http.post(route).status_code == 401
            assert http.post(route, headers={"Authorization": f"Bearer {KEY}"}).json()["error"]["code"] == (
                "admin_key_needed"
            )
            refused = http.post(route, headers={"Authorization": f"Bearer {ADMIN}"})
            assert refused.status_code == 403 and "--enable-admin-routes" in refused.text
        assert http.get("/is_sleeping").status_code == 401
        state = http.get("/is_sleeping", headers={"Authorization": f"Bearer {KEY}"})
        assert state.json() == {"is_sleeping": False}


def test_it_ends_asleep_as_it_would_awake(plain_model: Path) -> None:
    with LocalServer({"model": str(plain_model)}, enable_admin_routes=True) as server, server.http() as http:
        assert http.post("/sleep?level=2").json() == {"status": "sleeping"}


def test_asleep(server: LocalServer) -> None:
    with server.http() as http:
        name = model_of(http)
        before = text_of(complete(http, model=name))
        for wrong in ("level=3", "level=x"):
            assert http.post(f"/sleep?{wrong}").status_code == 400
        assert http.post("/sleep?level=1").json() == {"status": "sleeping"}
        assert http.post("/sleep").status_code == 200
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
        assert (http.get("/health").status_code, http.get("/ready").status_code) == (200, 503)
        assert "quire" in http.get("/metrics").text
        chat = {"model": name, "messages": [{"role": "user", "content": "a"}]}
        loading = {"lora_name": "a", "lora_path": "/nowhere"}
        for path, body in (
            ("/v1/completions", {"model": name, "prompt": "a"}),
            ("/v1/completions", {"model": name, "prompt": "a", "stream": True}),
            ("/v1/chat/completions", chat),
            ("/v1/load_lora_adapter", loading),
        ):
            refused = http.post(path, json=body)
            if path == "/v1/chat/completions" and refused.status_code == 400:
                continue  # this model has no chat template
            assert refused.status_code == 503, (path, refused.text)
            assert refused.json()["error"]["code"] == "engine_sleeping" and "wake" in refused.text
            assert refused.headers["Retry-After"]
        assert http.post("/reset_prefix_cache").status_code == 200
        assert http.post("/wake_up?tags=weights").json() == {"status": "sleeping"}
        assert complete(http, model=name).status_code == 503
        assert http.post("/wake_up?tags=nonsense").status_code == 400
        assert http.post("/wake_up?tags=kv_cache").json() == {"status": "awake"}
        assert http.post("/wake_up").json() == {"status": "awake"}
        assert http.get("/ready").status_code == 200
        assert text_of(complete(http, model=name)) == before
    server.until_idle()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_what_runs_is_finished_first(server: LocalServer) -> None:
    """New requests are refused from the moment that sleep is asked for."""
    with server.http() as http, server.http() as other, server.http() as third:
        fields = {"model": model_of(http), "max_tokens": 20, "ignore_eos": True}
        alone = text_of(complete(http, **fields))
        answers: dict[str, Any] = {}
        with server.held() as gate:
            running = threading.Thread(target=lambda: answers.update(text=complete(other, **fields)))
            running.start()
            until(server.engine.llm_engine.has_unfinished_requests)
            asked = threading.Thread(target=lambda: answers.update(sleep=http.post("/sleep")))
            asked.start()
            until(lambda: server.engine.is_sleeping)
            assert complete(third, **fields).status_code == 503
            assert not answers
            gate.set()
            running.join()
            asked.join()
        assert text_of(answers["text"]) == alone and answers["sleep"].status_code == 200
        assert http.post("/wake_up").status_code == 200
        assert text_of(complete(http, **fields)) == alone
    server.until_idle()


def test_what_runs_too_long(plain_model: Path) -> None:
    engine = {"model": str(plain_model), "num_gpu_blocks_override": 256}
    with (
        LocalServer(engine, enable_admin_routes=True, unload_timeout=0.2) as server,
        server.http() as http,
        server.http() as other,
    ):
        fields = {"model": model_of(http), "max_tokens": 20, "ignore_eos": True}
        answers: list[Any] = []
        with server.held() as gate:
            running = threading.Thread(target=lambda: answers.append(complete(other, **fields)))
            running.start()
            until(server.engine.llm_engine.has_unfinished_requests)
            refused = http.post("/sleep")
            assert refused.status_code == 409 and "1 requests have not finished in 0.2 s" in refused.text
            assert not server.engine.is_sleeping and not answers
            gate.set()
            running.join()
        assert text_of(answers[0]) == text_of(complete(http, **fields))  # it serves on
        server.until_idle()
        assert http.post("/sleep").status_code == 200


def test_many_at_once(server: LocalServer) -> None:
    """Sleeping and waking up again and again while others ask: every answer is right, or a 503."""
    with server.http() as http:
        name = model_of(http)
        expected = text_of(complete(http, model=name))
        answers: list[Any] = []
        stop = threading.Event()

        def ask() -> None:
            with server.http() as client:
                while not stop.is_set():
                    answers.append(complete(client, model=name))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for _ in range(8):
            assert http.post("/sleep").status_code == 200
            time.sleep(0.02)
            assert http.post("/wake_up").status_code == 200
            time.sleep(0.05)
        stop.set()
        for thread in threads:
            thread.join()
        assert {answer.status_code for answer in answers} <= {200, 503}
        assert {text_of(answer) for answer in answers if answer.status_code == 200} == {expected}
    server.until_idle()


def test_the_prefix_cache(server: LocalServer) -> None:
    with server.http() as http:
        name, prompt = model_of(http), "the red circle rolls to the lake " * 4

        def cached() -> int:
            answer = complete(http, prompt, model=name)
            details = answer.json()["usage"]["prompt_tokens_details"]
            return int(details["cached_tokens"]) if details else 0

        cached()
        assert cached() > 0
        assert http.post("/reset_prefix_cache").json() == {"status": "reset"}
        assert cached() == 0
    server.until_idle()
