"""The benchmarks that need a cluster of Ray's, at their smallest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.benchmarks import imported
from tests.benchmarks.conftest import Call
from tests.platform.execution.on_ray.conftest import UNHURRIED

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the benchmarks set is undone."""
    for name, value in {**UNHURRIED, "RAY_ADDRESS": ""}.items():
        monkeypatch.setenv(name, value)
    for name in ("OMP_NUM_THREADS", "RAY_worker_niceness"):
        monkeypatch.setenv(name, "1")


def test_executor_on_ray(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    with imported("executor") as executor:
        call(executor, "--streams", 2, "--steps", 2, "--turns", 4, "--ray")
        shown = capsys.readouterr().out
        assert all(f"{kind} " in shown for kind in executor.RAY_KINDS)


def test_replicas(llama: Path, call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    import ray

    with imported("replicas") as replicas:
        try:
            call(replicas, llama, "--rounds", 1, "--streams", 2, "--threads", 1)
        finally:
            ray.shutdown()
    shown = capsys.readouterr().out
    assert "2 streams: a replica / one server" in shown and "first token: " in shown
