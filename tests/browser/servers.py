"""The servers whose page is tested."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire.demo import adapter_path
from tests.browser.proxy import PathProxy
from tests.server.api_server import ONE_THREAD, LocalServer, ServerProcess, adapters
from tests.server.fixtures import TEMPLATE, make_model

KEY, ADMIN_KEY, PATH = "an-api-key", "an-admin-key", "/under/here"


@pytest.fixture(scope="session")
def demo() -> Iterator[ServerProcess]:
    """The bundled model with its two adapters; further ones may be loaded."""
    flags = adapters(adapter_path("french").parent)
    with ServerProcess(*flags, "--num-gpu-blocks-override", "512", **ONE_THREAD) as server:
        yield server


@pytest.fixture(scope="session")
def keyed() -> Iterator[ServerProcess]:
    """The same, behind keys and under a path."""
    keys = ("--api-key", KEY, "--admin-api-key", ADMIN_KEY, "--root-path", PATH)
    with ServerProcess(*adapters(adapter_path("french").parent), *keys, **ONE_THREAD) as server:
        yield server


@pytest.fixture
def proxy(keyed: ServerProcess) -> Iterator[PathProxy]:
    """What `keyed` stands behind. The page asks for nothing outside of its path."""
    with PathProxy(keyed.url, PATH) as proxy:
        yield proxy
        assert not proxy.outside


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A tiny random model that, greedily, writes letters until it is stopped: 16,384 tokens at most, of 4 at once."""
    path = make_model(tmp_path_factory.mktemp("endless"), TEMPLATE)
    flags = ["--hf-overrides", '{"max_position_embeddings": 16384}', "--num-gpu-blocks-override", "4096"]
    flags += ["--override-generation-config", '{"temperature": 0}', "--max-num-seqs", "4"]
    with ServerProcess("--model", str(path), "--served-model-name", "endless", *flags, **ONE_THREAD) as server:
        yield server


@pytest.fixture(scope="session")
def held(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Such a model in this process, whose engine a test can hold (`stepping`): what is to be seen stays, however long
    the browser takes."""
    path = make_model(tmp_path_factory.mktemp("held"), TEMPLATE)
    engine = {"model": str(path), "num_gpu_blocks_override": 4096, "max_num_seqs": 4}
    with LocalServer(engine) as server:
        yield server


def engine_state(server: ServerProcess) -> dict[str, Any]:
    """What the engine's events say now."""
    with server.http() as client, client.stream("GET", "/v1/engine/events") as events:
        return next(
            json.loads(line.removeprefix("data: ")) for line in events.iter_lines() if line.startswith("data: ")
        )


def until_idle(server: ServerProcess, timeout: float = 60) -> None:
    """Wait until nothing runs or waits, and nobody owns a block."""
    end = time.monotonic() + timeout
    while (state := engine_state(server))["requests"] or any(pool["owned"] for pool in state["pools"]):
        assert time.monotonic() < end, f"requests that still run: {state['requests']}"
