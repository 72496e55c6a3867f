"""`quire deploy`: an application of replicas started on a cluster of Ray's, watched, and ended."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from quire.distributed.deployment import Deployment
from quire.errors import QuireError

logger = logging.getLogger("quire.distributed")

_LOOK = 2.0  # seconds between two looks at how the application is
_WAYS_OUT = "pip install 'quire-llm[ray]'"


def connect(address: str | None) -> None:
    """Join a cluster: the one that is named, or that runs on this machine; without one, this machine becomes one.

    Nothing of Ray's is sent anywhere. Raises QuireError.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 otherwise: replicas would give way to everything
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise QuireError(f"replicas need Ray Serve ({error.name} is not installed): {_WAYS_OUT}.") from None
    if ray.is_initialized():
        return
    try:
        if address is not None:
            ray.init(address, log_to_driver=False)
            return
        try:
            ray.init("auto", log_to_driver=False)
        except ConnectionError:
            ray.init(include_dashboard=False, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise QuireError(f"no cluster of Ray's at {address or 'this machine'}: {error}") from None


def start(wanted: Deployment) -> str:
    """Start the application, or make a running one of this name what is wanted. Where its first door listens.

    Raises QuireError where it does not come up.
    """
    from ray import serve

    from quire.distributed.serve import application

    serve.start(proxy_location="Disabled")  # doors listen for themselves
    try:
        handle = serve.run(application(wanted), name=wanted.name, route_prefix=None)
    except RuntimeError as error:
        raise QuireError(f"the application did not come up: {error}") from None
    address: str = handle.address.remote().result(timeout_s=60)
    return address


def watch(name: str, ended: Callable[[], bool]) -> None:
    """Until `ended`, or the application has failed: then QuireError."""
    from ray import serve

    last = None
    while not ended():
        status = serve.status().applications.get(name)
        said = "gone" if status is None else str(status.status.value)
        if said != last:
            logger.info("%s: %s", name, said)
            last = said
        if status is None:
            raise QuireError(f"the application {name} has been deleted.")
        if said == "DEPLOY_FAILED":
            raise QuireError(f"the application {name} has failed: {status.message}")
        time.sleep(_LOOK)


def end(name: str) -> None:
    """End the application; requests that run may finish."""
    from ray import serve

    serve.delete(name)
