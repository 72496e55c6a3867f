"""The fixtures of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.api_server import LocalServer
from tests.server.uploads.helpers import ADAPTERS, MOST, names_of, stored


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """The bundled model, whose adapters can be changed over HTTP; uploads may have a MiB."""
    engine = {"enable_lora": True, "num_gpu_blocks_override": 1024}
    limits = {"max_adapter_upload_bytes": MOST, "adapter_store_bytes": 4 * MOST, "body_timeout": 20.0}
    with LocalServer(engine, allow_runtime_lora=True, **limits) as server:
        yield server


@pytest.fixture
def http(server: LocalServer) -> Iterator[Any]:
    """At the end of a test every adapter is unloaded, and every file must be gone."""
    with server.http() as http:
        yield http
        for name in names_of(http):
            assert http.delete(f"{ADAPTERS}/{name}").status_code == 200
        server.until_idle()
        assert stored(server) == []
        assert http.get(ADAPTERS).json()["uploads"]["stored_bytes"] == 0
