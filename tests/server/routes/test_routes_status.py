"""Other routes: health, version, errors, ids."""

from __future__ import annotations

from typing import Any

import pytest

import quire
from tests.server.api_answers import error_of
from tests.server.api_server import ServerProcess
from tests.server.routes.helpers import CHAT, COMPLETIONS, GREEDY, LOAD, UNLOAD, WHO

pytestmark = pytest.mark.usefixtures("one_thread")


def test_health_readiness_version(http: Any) -> None:
    for path in ("/health", "/ready"):
        assert (http.get(path).status_code, http.get(path).json()) == (200, {"status": "ok"})
    assert http.get("/version").json() == {"version": quire.__version__}


def test_what_is_not_there_has_an_error_of_the_same_form(http: Any) -> None:
    for method, path in (("GET", "/nothing"), ("POST", "/v1/nothing"), ("POST", "/nothing"), ("GET", "/docs")):
        response = http.request(method, path)
        assert response.status_code == 404
        error = error_of(response)
        assert error["type"] == "not_found_error" and f"{method} {path}" in error["message"]
    for method, path in (("GET", COMPLETIONS), ("PUT", CHAT), ("POST", "/health"), ("DELETE", "/v1/models/french")):
        response = http.request(method, path)
        assert response.status_code == 405 and error_of(response)["type"] == "invalid_request_error"
        assert response.headers["allow"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"null", b'"a"', b'{"prompt": "a",}', b"\xff"])
def test_a_body_that_is_no_object(http: Any, body: bytes) -> None:
    response = http.post(COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["type"] == "invalid_request_error"


def test_openapi_has_every_route(http: Any) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    routes = {COMPLETIONS, CHAT, LOAD, UNLOAD, "/tokenize", "/detokenize", "/v1/models", "/health", "/metrics"}
    assert routes < set(paths)


@pytest.mark.parametrize("path", ["/health", "/nothing", "/v1/models/nobody"])
def test_a_request_id_comes_back(http: Any, path: str) -> None:
    assert http.get(path, headers={"X-Request-Id": "trace:1.a-B_2"}).headers["x-request-id"] == "trace:1.a-B_2"
    for unfit in ("a b", "a" * 129, "a/b", ""):
        given = http.get(path, headers={"X-Request-Id": unfit}).headers["x-request-id"]
        assert given and given != unfit
    ids = {http.get(path).headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


def test_a_request_id_is_in_the_log(demo: ServerProcess, http: Any) -> None:
    http.post(CHAT, json={"messages": WHO, "user": "somebody", **GREEDY}, headers={"X-Request-Id": "look-for-me"})
    line = demo.line_of("look-for-me")
    assert "POST /v1/chat/completions" in line and "status=200" in line and "user=somebody" in line
    assert "completion_tokens=" in line and "Who" not in line
