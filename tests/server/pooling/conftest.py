"""Servers of models that pool, and the same models without a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.demo import ADAPTERS, adapter_path
from tests.server.api_server import LocalServer, ServerProcess
from tests.server.pooling.helpers import engine, make_bert


@pytest.fixture(scope="session")
def embedder() -> Iterator[ServerProcess]:
    """`quire serve` of the bundled model as an embedder, with its adapters."""
    with ServerProcess("--runner", "pooling", "--convert", "embed", OMP_NUM_THREADS="1") as server:
        yield server


@pytest.fixture(scope="module")
def http(embedder: ServerProcess) -> Iterator[Any]:
    with embedder.http() as client:
        yield client


@pytest.fixture(scope="session")
def llm() -> LLM:
    """The same without a server."""
    llm = LLM(runner="pooling", convert="embed", enable_lora=True, num_gpu_blocks_override=1024)
    for name in ADAPTERS:
        llm.load_lora_adapter(name, str(adapter_path(name)))
    return llm


@pytest.fixture(scope="session")
def pair_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder."""
    return make_bert(tmp_path_factory.mktemp("pairs"), ["relevance"])


@pytest.fixture(scope="session")
def pairs(pair_model: Path) -> Iterator[LocalServer]:
    with LocalServer(engine(model=str(pair_model))) as server:
        yield server
        server.until_idle()


@pytest.fixture(scope="session")
def class_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tells three classes apart."""
    return make_bert(tmp_path_factory.mktemp("classes"), ["bad", "fair", "good"])


@pytest.fixture(scope="session")
def classes(class_model: Path) -> Iterator[LocalServer]:
    with LocalServer(engine(model=str(class_model))) as server:
        yield server
        server.until_idle()
