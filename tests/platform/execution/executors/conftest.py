"""The fixtures of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM
from tests.platform.execution.executors.helpers import SMALL, ended, pid_of


@pytest.fixture(scope="module")
def remote(tiny_path: Path) -> Iterator[LLM]:
    """Shared: on a pool so small that sequences are preempted."""
    llm = LLM(str(tiny_path), executor="process", enable_lora=True, **SMALL)
    yield llm
    llm.llm_engine.close()
    assert ended(pid_of(llm))


@pytest.fixture(scope="module")
def local(tiny_path: Path) -> LLM:
    return LLM(str(tiny_path), enable_lora=True, **SMALL)
