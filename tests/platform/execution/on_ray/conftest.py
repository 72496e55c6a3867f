"""A cluster of two nodes, each of two CPUs, on this machine; and engines whose workers are its actors."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.platform.execution.ray_executor import RayLink
from quire.platform.execution.ray_worker import Introduction
from tests.platform.execution.executors.helpers import SMALL, processes

# Two workers fit one node with a CPU each, and share its memory; with two each they do not.
WHERE = {
    "one node": {"tensor_parallel_size": 2, "ray_worker_cpus": 1},
    "two nodes": {"tensor_parallel_size": 2, "ray_worker_cpus": 2},
    "one worker": {"tensor_parallel_size": 1, "ray_worker_cpus": 1},
    "stages": {"pipeline_parallel_size": 2, "ray_worker_cpus": 2},
    "stages, each of one node": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "ray_worker_cpus": 1},
}

# On a machine that does much else a node is not lost because it is slow, nor a worker ended for others' memory.
UNHURRIED = {
    "RAY_health_check_timeout_ms": "60000",
    "RAY_health_check_failure_threshold": "20",
    "RAY_memory_monitor_refresh_ms": "0",
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """Its address is in RAY_ADDRESS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        for name, value in UNHURRIED.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 2, "object_store_memory": 100 << 20}
        cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        cluster.add_node(**node)
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module", params=WHERE)
def remote(request: pytest.FixtureRequest, cluster: Any, tiny_path: Path) -> Iterator[LLM]:
    """Shared: on a pool so small that sequences are preempted."""
    llm = LLM(str(tiny_path), enable_lora=True, distributed_executor_backend="ray", **WHERE[request.param], **SMALL)
    assert nodes_of(llm) == (1 if request.param in ("one node", "one worker") else 2)
    if "stages," in request.param:
        first, second, *others = (one.node for one in members_of(llm))
        assert first == second and first not in others
    yield llm
    llm.llm_engine.close()
    assert free_cpus() == 4


@pytest.fixture(scope="module")
def local(tiny_path: Path) -> LLM:
    return LLM(str(tiny_path), enable_lora=True, **SMALL)


def nodes_of(llm: LLM) -> int:
    return len({one.node for one in members_of(llm)})


def members_of(llm: LLM) -> list[Introduction]:
    """Of the workers, by rank."""
    link = processes(llm)[0].link
    assert isinstance(link, RayLink)
    return link.crew.members


def free_cpus(seconds: float = 20.0) -> float:
    """Once all are free, or after so many seconds: Ray counts what has ended by and by."""
    import ray

    deadline = time.monotonic() + seconds
    while (found := ray.available_resources().get("CPU", 0)) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    return found
