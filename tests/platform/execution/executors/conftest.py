"""The fixtures of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM
from tests.platform.execution.executors.helpers import KINDS, SMALL, elsewhere, ended, pids_of


@pytest.fixture(scope="module", params=KINDS)
def remote(request: pytest.FixtureRequest, tiny_path: Path) -> Iterator[LLM]:
    """Shared: on a pool so small that sequences are preempted."""
    with elsewhere(request.param) as settings:
        llm = LLM(str(tiny_path), enable_lora=True, **settings, **SMALL)
    yield llm
    pids = pids_of(llm)
    llm.llm_engine.close()
    assert all(ended(pid) for pid in pids)


@pytest.fixture(scope="module")
def local(tiny_path: Path) -> LLM:
    return LLM(str(tiny_path), enable_lora=True, **SMALL)
