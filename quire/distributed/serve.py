"""Replicas on Ray Serve: `quire deploy CONFIG.yaml`, or Ray's own `serve run quire.distributed.serve:build_app`.

Three deployments: `Door` (HTTP), `EngineReplica` (engines, scaled by Ray), `AdapterLedger` (which adapters there are).
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig

from quire.config import ServerConfig
from quire.config.settings import make
from quire.distributed.deployment import END, Deployment, read_deployment
from quire.distributed.door import Door
from quire.distributed.ledger import AdapterLedger
from quire.distributed.replica import EngineReplica, ReplicaOptions
from quire.distributed.router import ReplicaRouter
from quire.distributed.steps import HttpSteps

# Seconds between two looks at the ledger: how long until another is started if it has ended. Replicas refuse requests
# with adapters after `LEASE`.
_WATCHED = 0.5
_QUIET = LoggingConfig(enable_access_log=False)  # calls between deployments; replicas log requests


def build_app(args: Mapping[str, Any]) -> Application:
    """An application for `serve.run`. args: as CONFIG.yaml has them (docs/replicas.md). Raises QuireError."""
    return application(read_deployment(args))


def application(wanted: Deployment) -> Application:
    """The deployments, bound to each other."""
    secret = secrets.token_hex(32)
    ledger = serve.deployment(AdapterLedger).options(
        num_replicas=1,
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0},
        logging_config=_QUIET,
        health_check_period_s=_WATCHED,
    )
    options = ReplicaOptions(wanted.settings, wanted.vllm, secret)
    bound = ledger.bind(HttpSteps(secret))
    config = make(ServerConfig, wanted.settings)
    replicas = _replicas(wanted, config.max_queue).bind(options, bound)
    names = config.served_model_names or (wanted.settings.get("model") or "quire-demo",)
    doors = serve.deployment(Door).options(
        num_replicas=wanted.doors,
        max_replicas_per_node=1,
        graceful_shutdown_timeout_s=wanted.replicas.drain + END,
        logging_config=_QUIET,
        max_ongoing_requests=10_000,
        ray_actor_options={"num_cpus": 0, "resources": dict(wanted.door_resources)},
    )
    return doors.bind(config, names, secret, replicas, bound, wanted.replicas.least == 0, wanted.replicas.drain)


def _replicas(wanted: Deployment, max_queue: int) -> Any:
    """max_queue: requests that may wait for each replica that there may be."""
    of = wanted.replicas
    return serve.deployment(EngineReplica).options(
        autoscaling_config=AutoscalingConfig(
            min_replicas=of.least,
            initial_replicas=of.first,
            max_replicas=of.most,
            target_ongoing_requests=of.target_requests,
            upscale_delay_s=of.upscale_delay,
            downscale_delay_s=of.downscale_delay,
        ),
        max_ongoing_requests=of.most_requests,
        max_queued_requests=max(1, max_queue) * of.most,
        graceful_shutdown_timeout_s=of.drain + END,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=2.0,
        logging_config=_QUIET,
        request_router_config=RequestRouterConfig(request_router_class=ReplicaRouter),
        ray_actor_options={"num_cpus": of.cpus, "num_gpus": of.gpus, "resources": dict(of.resources)},
    )
