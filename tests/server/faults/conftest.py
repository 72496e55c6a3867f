"""The fixtures of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.demo import ADAPTERS, adapter_path
from tests.server.api_server import LocalServer
from tests.server.faults.helpers import BODY_TIMEOUT, HEADER_TIMEOUT, LIMIT, small


@pytest.fixture(scope="module")
def tiny(plain_model: Path) -> Iterator[LocalServer]:
    settings = {"header_timeout": HEADER_TIMEOUT, "body_timeout": BODY_TIMEOUT, "max_request_bytes": LIMIT}
    with LocalServer(small(plain_model), **settings) as server:
        yield server


@pytest.fixture(scope="module")
def bundled() -> Iterator[LocalServer]:
    root = str(adapter_path(ADAPTERS[0]).parent)
    engine = {"enable_lora": True, "num_gpu_blocks_override": 2048}
    with LocalServer(engine, allow_runtime_lora=True, lora_roots=(root,), unload_timeout=0.3) as server:
        yield server
