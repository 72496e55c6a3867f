"""Safety: keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.api_server import LocalServer
from tests.server.safety.helpers import ADMIN, CHAT, COMPLETIONS, KEYS, LOAD, UNLOAD, asked

pytestmark = pytest.mark.slow

ADAPTERS = "/v1/adapters"
# Without a flag that opens them.
CLOSED = (LOAD, UNLOAD, "/sleep", "/wake_up", "/reset_prefix_cache", ADAPTERS, f"{ADAPTERS}/x")
OPEN = {"/health", "/ready", "/ping"}


@pytest.fixture(scope="module")
def governed(plain_model: Path) -> Iterator[LocalServer]:
    """With an admin's key."""
    engine = {"model": str(plain_model), "enable_lora": True}
    with LocalServer(engine, api_keys=KEYS, admin_api_key=ADMIN, allow_runtime_lora=True) as server:
        yield server


def _routes(server: LocalServer) -> list[tuple[str, str]]:
    with server.http() as client:
        document = client.get("/openapi.json", headers={"Authorization": f"Bearer {KEYS[0]}"}).json()
    listed = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    for route in server.app.routes:
        listed |= {(method, route.path) for method in getattr(route, "methods", None) or ()}
    # The engine's events have no end, but where they are asked for wrongly.
    named = {
        "{model:path}": "x",
        "{model}": "x",
        "{name:path}": "x",
        "{name}": "x",
        "/v1/engine/events": "/v1/engine/events?rate=0",
    }
    for name, other in named.items():
        listed = {(method, path.replace(name, other)) for method, path in listed}
    return sorted(listed)


def test_every_route_but_the_probes_needs_a_key(guarded: LocalServer) -> None:
    routes = _routes(guarded)
    assert {"/v1/models", COMPLETIONS, CHAT, "/tokenize", "/metrics", LOAD, "/openapi.json"} <= {p for _, p in routes}
    for method, path in routes:
        if path in OPEN:
            assert asked(guarded, method, path)[0] == 200
            continue
        for key in (None, "wrong", "", "first-key2", "FIRST-KEY", ADMIN):
            status, text = asked(guarded, method, path, key)
            assert status == 401, (method, path, key)
            if method != "HEAD":
                error = json.loads(text)["error"]
                assert error.get("code") == "invalid_api_key" or error["type"] == "authentication_error"
        for key in KEYS:
            assert asked(guarded, method, path, key)[0] not in (401, 403) or path in CLOSED


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "TRACE"])
def test_no_spelling_of_a_path_gets_around_the_key(guarded: LocalServer, method: str) -> None:
    for path in (
        "/v1/models", "/v1/models/", "//v1/models", "/v1//models", "/V1/MODELS", "/./v1/models", "/%2e/v1/models",
        "/health/../v1/models", "/health/%2e%2e/v1/models", "/health%2f..%2fv1/models", "/health/v1/models",
        "/v1/models?/health", "/health;/v1/models", "/v1/models#/health", "/healthy", "/readyz", "/HEALTH", "/",
        "/v1/models%00/health", "/health%00", "/%68ealth/x", "/\\health", "/v1/models\\..\\health",
    ):  # fmt: skip
        assert asked(guarded, method, path)[0] == 401, path


def test_probes_are_open_in_their_usual_spellings_only(guarded: LocalServer) -> None:
    assert asked(guarded, "GET", "/%68ealth")[0] == 200  # the same path
    status, _ = asked(guarded, "GET", "/health/")
    assert status in (307, 404)
    assert asked(guarded, "POST", "/health")[0] == 405


@pytest.mark.parametrize("value", ["Basic first-key", "first-key", "Bearer", "Bearer  ", "Bearer first-key x", "Token"])
def test_other_schemes_are_refused(guarded: LocalServer, value: str) -> None:
    status, text = asked(guarded, "GET", "/v1/models", Authorization=value)
    assert status == 401 and "first-key" not in text


def test_the_scheme_may_be_written_as_one_likes(guarded: LocalServer) -> None:
    assert asked(guarded, "GET", "/v1/models", Authorization="bEARER second-key")[0] == 200


def test_the_admin_key(governed: LocalServer) -> None:
    for path in (LOAD, UNLOAD, LOAD + "/", UNLOAD + "//", "/v1/%6coad_lora_adapter"):
        body = {"lora_name": "x", "lora_path": "/x"} if "oad_lora" in path and "un" not in path else {"lora_name": "x"}
        assert asked(governed, "POST", path, None, body)[0] == 401
        assert asked(governed, "POST", path, "wrong", body)[0] == 401
        status, text = asked(governed, "POST", path, KEYS[1], body)
        assert status == 403 and json.loads(text)["error"]["code"] == "admin_key_needed"
        assert asked(governed, "POST", path, ADMIN, body)[0] in (403, 404, 307)
    assert "--lora-root" in asked(governed, "POST", LOAD, ADMIN, {"lora_name": "x", "lora_path": "/x"})[1]
    for path in ("/v1/models", "/metrics", "/openapi.json"):
        assert asked(governed, "GET", path, ADMIN)[0] == asked(governed, "GET", path, KEYS[0])[0] == 200
        assert asked(governed, "GET", path)[0] == 401


def test_the_admin_key_for_uploads(governed: LocalServer) -> None:
    """Reading the list needs none; a body is not looked at before the key."""
    for path in (ADAPTERS, f"{ADAPTERS}/", f"{ADAPTERS}/x", f"{ADAPTERS}//x", "/v1/%61dapters", f"{ADAPTERS}/org/x"):
        for method in ("POST", "DELETE", "PUT", "PATCH"):
            for key, status in ((KEYS[0], 403), ("wrong", 401), (None, 401)):
                assert asked(governed, method, path, key, b"x" * 1000)[0] == status, (method, path, key)
            assert asked(governed, method, path, ADMIN)[0] in (400, 404, 405), (method, path)
    for key, status in ((KEYS[0], 200), (ADMIN, 200), ("wrong", 401), (None, 401)):
        assert asked(governed, "GET", ADAPTERS, key)[0] == status


@pytest.mark.parametrize("root_path", ["/", "/api", "/api/", "/v1"])
def test_the_admin_key_under_a_root_path(plain_model: Path, root_path: str) -> None:
    engine = {"model": str(plain_model), "enable_lora": True}
    with LocalServer(engine, admin_api_key=ADMIN, allow_runtime_lora=True, root_path=root_path) as server:
        for prefix in ("", root_path, root_path.rstrip("/"), root_path * 2):
            status, _ = asked(server, "POST", prefix + LOAD, "another", {"lora_name": "x", "lora_path": "/x"})
            assert status in (401, 404), prefix
            for method, path in (("POST", ADAPTERS), ("DELETE", f"{ADAPTERS}/x")):
                assert asked(server, method, prefix + path, "another")[0] in (401, 404), (method, prefix)
        assert asked(server, "GET", "/version")[0] == 200
