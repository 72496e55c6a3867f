from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from quire.distributed import changes, ledger, participant
from tests.platform.execution.on_ray.conftest import UNHURRIED


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times for a test."""
    for module in (changes, ledger):
        monkeypatch.setattr(module, "LEASE", 0.3)
    for module in (ledger, participant):
        monkeypatch.setattr(module, "BEAT", 0.02)
    monkeypatch.setattr(ledger, "_SILENT", 0.1)
    monkeypatch.setattr(ledger, "_POLL", 0.005)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes, as processes of this machine."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**UNHURRIED, "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}.items():
            patch.setenv(name, value)
        import ray
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 3, "object_store_memory": 100 << 20}
        made = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
        made.add_node(**node)
        ray.init(address=made.address, log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()
