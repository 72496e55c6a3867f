"""Safety: what web pages may change, of other sites and of sites whose name was made to stand for this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import Request

from quire.config import ServerConfig
from quire.server.origins import check_origin
from quire.server.responses.errors import ApiError
from tests.server.api_server import LocalServer
from tests.server.safety.helpers import LOAD, UNLOAD, asked

REBOUND = {"Host": "evil.example:8000", "Origin": "http://evil.example:8000", "Sec-Fetch-Site": "same-origin"}


def _passes(config: ServerConfig, headers: dict[str, str]) -> bool:
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    try:
        check_origin(Request({"type": "http", "method": "POST", "path": "/", "headers": raw}), config)
    except ApiError as error:
        assert error.status == 403 and "--allowed-origins" in error.message
        return False
    return True


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8000", "localhost", "LOCALHOST.:8000", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "[::1]",
        "a.localhost:8000", "192.168.1.7:8000",
    ],
)  # fmt: skip
def test_a_page_of_this_machine_s_own_names_is_let_in(host: str) -> None:
    page = {"Host": host, "Origin": f"http://{host}", "Sec-Fetch-Site": "same-origin"}
    assert _passes(ServerConfig(), page)
    assert _passes(ServerConfig(), {"Host": host, "Origin": f"http://{host}"})  # of an older browser


@pytest.mark.parametrize(
    "host",
    [
        "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "127.0.0.1@evil.example",
        "[::1].evil.example", "evillocalhost", "", "[::1", "a b",
    ],
)  # fmt: skip
def test_a_name_that_strangers_answer_for_is_refused(host: str) -> None:
    page = {"Host": host, "Origin": f"http://{host}"}
    assert not _passes(ServerConfig(), page)
    assert not _passes(ServerConfig(), {**page, "Sec-Fetch-Site": "same-origin"})
    assert not _passes(ServerConfig(), {**page, "Sec-Fetch-Site": "same-origin", "X-Forwarded-Host": "localhost"})
    assert _passes(ServerConfig(), {"Host": host})  # no browser


@pytest.mark.parametrize(
    "settings",
    [
        {"api_keys": ("key",)}, {"admin_api_key": "key"}, {"allowed_origins": ("*",)}, {"root_path": "/quire"},
        {"allowed_origins": (REBOUND["Origin"],)}, {"host": "0.0.0.0"}, {"host": "::"}, {"uds": "/run/quire"},
    ],
    ids=str,
)  # fmt: skip
def test_servers_that_others_reach_look_at_no_host(settings: dict[str, object]) -> None:
    assert _passes(ServerConfig(**settings), REBOUND)  # type: ignore[arg-type]


def test_the_name_that_it_listens_on_is_its_own() -> None:
    page = {"Host": "ip6-localhost:8000", "Origin": "http://ip6-localhost:8000"}
    assert _passes(ServerConfig(host="ip6-localhost"), page)


def test_a_proxy_that_asks_by_address_is_let_in() -> None:
    page = {"Host": "127.0.0.1:8000", "Origin": "https://models.example", "Sec-Fetch-Site": "same-origin"}
    assert _passes(ServerConfig(), page)


@pytest.fixture(scope="module")
def keyless(root: Path) -> Iterator[LocalServer]:
    engine = {"enable_lora": True, "lora_roots": (str(root),), "num_gpu_blocks_override": 1024}
    with LocalServer(engine, allow_runtime_lora=True, enable_admin_routes=True, lora_roots=(str(root),)) as server:
        yield server


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [REBOUND, {"Origin": "https://b.example", "Sec-Fetch-Site": "cross-site"}], ids=["rebound", "other site"]
)
def test_no_route_that_changes_something_listens_to_it(keyless: LocalServer, root: Path, page: dict[str, str]) -> None:
    assert asked(keyless, "POST", LOAD, body={"lora_name": "kept", "lora_path": str(root / "good")})[0] == 200
    load, unload = {"lora_name": "x", "lora_path": str(root / "good")}, {"lora_name": "kept"}
    for method, path, body in (
        ("POST", LOAD, load), ("POST", UNLOAD, unload), ("DELETE", "/v1/adapters/kept", None),
        ("POST", "/v1/adapters", b""), ("POST", "/sleep", None), ("POST", "/wake_up", None),
        ("POST", "/reset_prefix_cache", None),
    ):  # fmt: skip
        status, text = asked(keyless, method, path, body=body, **page)
        assert status == 403 and "web page" in text, (path, text)
    assert [info.name for info in keyless.engine.list_lora_adapters()] == ["kept"]
    assert not keyless.engine.is_sleeping
    assert (
        asked(keyless, "DELETE", "/v1/adapters/kept", Host="localhost:8000", Origin="http://localhost:8000")[0] == 200
    )
