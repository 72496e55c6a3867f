"""The benchmarks that need a cluster of Ray's, at their smallest."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire.demo import model_path
from tests.benchmarks.benchmarks import imported
from tests.benchmarks.conftest import Call
from tests.platform.execution.on_ray.conftest import UNHURRIED

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(autouse=True)
def a_cluster_of_its_own(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What the benchmarks set and start is undone."""
    import ray

    for name, value in {**UNHURRIED, "RAY_ADDRESS": ""}.items():
        monkeypatch.setenv(name, value)
    for name in ("OMP_NUM_THREADS", "RAY_worker_niceness"):
        monkeypatch.setenv(name, "1")
    yield
    ray.shutdown()


def test_executor_on_ray(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    with imported("executor") as executor:
        call(executor, "--streams", 2, "--steps", 2, "--turns", 4, "--ray")
        shown = capsys.readouterr().out
        assert all(f"{kind} " in shown for kind in executor.RAY_KINDS)


def test_replicas(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    with imported("replicas") as replicas:
        call(replicas, model_path(), "--rounds", 1, "--streams", 2, "--threads", 1)
    shown = capsys.readouterr().out
    assert "2 streams: a replica / one server" in shown and "first token: " in shown
