"""The fixtures of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.api_server import LocalServer
from tests.server.safety.helpers import KEYS


@pytest.fixture(scope="module")
def guarded(plain_model: Path) -> Iterator[LocalServer]:
    with LocalServer({"model": str(plain_model)}, api_keys=KEYS) as server:
        yield server


@pytest.fixture(scope="module")
def bundled(root: Path) -> Iterator[LocalServer]:
    engine = {"enable_lora": True, "lora_roots": (str(root),), "num_gpu_blocks_override": 1024}
    engine["media_fetch_timeout"] = 120.0  # an address that is followed takes that long
    with LocalServer(engine, allow_runtime_lora=True, lora_roots=(str(root),)) as server:
        yield server
