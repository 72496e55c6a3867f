"""The fixtures of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from quire import LLM
from tests.platform.execution.executors.helpers import KINDS, SMALL, elsewhere, ended, pids_of

# What `sitecustomize` makes of a worker: it fails where a rule says so, instead of its part of a step.
FAILING = """
import os
from importlib.util import find_spec
from importlib.abc import MetaPathFinder
import sys

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "quire.platform.execution.model_runner":
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            execute = module.ModelRunner._execute
            state = {"left": int(os.environ["QUIRE_TEST_FAILURES"])}

            def failing(self, plan, sequences):
                stage, position = map(int, os.environ["QUIRE_TEST_FAILS_AT"].split())
                here = (0 if self._stage is None else self._stage.number) == stage and state["left"]
                if here and any(c.start <= position < c.start + c.length for c in plan.chunks):
                    state["left"] -= 1
                    raise MemoryError("there is none")
                return execute(self, plan, sequences)

            module.ModelRunner._execute = failing

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Finder())
"""


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


@pytest.fixture
def failing(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """failing(stage, position, times): workers of this stage (0: of the only one) that start from here on fail in
    steps that compute this position of some sequence."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(FAILING)

    def fail(stage: int, position: int, times: int) -> None:
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.setenv("QUIRE_TEST_FAILS_AT", f"{stage} {position}")
        monkeypatch.setenv("QUIRE_TEST_FAILURES", str(times))

    return fail
