"""The servers whose page is tested."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.demo import adapter_path
from tests.browser.proxy import PathProxy
from tests.server.api_server import ONE_THREAD, ServerProcess, adapters
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
    """A tiny random model that writes letters until it is stopped, 16,384 tokens at most."""
    path = make_model(tmp_path_factory.mktemp("endless"), TEMPLATE)
    longer = ("--hf-overrides", '{"max_position_embeddings": 16384}')
    with ServerProcess("--model", str(path), "--served-model-name", "endless", *longer, **ONE_THREAD) as server:
        yield server
