"""Which replica a request goes to: `placement.py` at Ray Serve's joint for that (`RequestRouterConfig`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from quire.distributed.placement import ranked


class ReplicaRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types where it is not installed
    """Chooses by hints (`hints.py`). What it counts is what the door whose handle it serves has sent."""

    def initialize_state(self, **given: Any) -> None:
        self._running: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks: Serve takes the first of them in which one has room."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        args = pending_request.args if pending_request is not None else ()
        hints = args[0] if args and isinstance(args[0], Mapping) else {}
        return [[by_name[name] for name in rank] for rank in ranked(list(by_name), hints, self._running)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        self._running[replica_id.unique_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._running[replica_id.unique_id] -= 1
        if self._running[replica_id.unique_id] <= 0:
            del self._running[replica_id.unique_id]
