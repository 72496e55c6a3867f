"""The fixtures of this folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.demo import adapter_path
from tests.server.api_server import LocalServer
from tests.server.safety.helpers import KEYS


@pytest.fixture(scope="module")
def guarded(plain_model: Path) -> Iterator[LocalServer]:
    with LocalServer({"model": str(plain_model)}, api_keys=KEYS) as server:
        yield server


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that adapters may be loaded from, with a good one in it."""
    path = tmp_path_factory.mktemp("root")
    shutil.copytree(adapter_path("french"), path / "good")
    return path


@pytest.fixture(scope="module")
def bundled(root: Path) -> Iterator[LocalServer]:
    engine = {"enable_lora": True, "lora_roots": (str(root),), "num_gpu_blocks_override": 1024}
    with LocalServer(engine, allow_runtime_lora=True, lora_roots=(str(root),)) as server:
        yield server
