"""One tiny checkpoint of each architecture that sees, each made once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.utils import logging

from tests.multimodal.open_engine import KINDS, Kind
from tests.multimodal.tiny_vision import build

logging.disable_progress_bar()


@pytest.fixture(scope="module", autouse=True)
def with_one_thread(one_thread: None) -> None:
    """In all of this folder."""


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the kinds' short names; not to be written to."""
    return {kind.name: build(kind.architecture, kind.variant, tmp_path_factory.mktemp(kind.name)) for kind in KINDS}


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture(scope="module")
def path(paths: dict[str, Path], kind: Kind) -> str:
    return str(paths[kind.name])


@pytest.fixture(scope="module")
def llava(paths: dict[str, Path]) -> str:
    return str(paths["llava"])


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What only the garbage collector would find stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
