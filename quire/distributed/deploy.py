"""`quire deploy`: an application of replicas started on a cluster of Ray's, watched, and ended."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from quire.distributed.deployment import END, Deployment
from quire.errors import QuireError

logger = logging.getLogger("quire.distributed")

_LOOK = 2.0  # seconds between two looks at how the application is
_WAYS_OUT = "pip install 'quire-llm[ray]'"


def connect(address: str | None, stays: bool) -> None:
    """Join a cluster: the one that is named, or that runs on this machine; without one, this machine becomes one, as
    long as this process lives.

    stays: what is done there is to outlive this process. Nothing of Ray's is sent anywhere. Raises QuireError.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15 otherwise: replicas would give way to everything
    try:
        import ray
        import ray.serve
    except ImportError as error:
        raise QuireError(f"replicas need Ray Serve ({error.name} is not installed): {_WAYS_OUT}.") from None
    try:
        ray.init(address or "auto", log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        if address is not None or not isinstance(error, ConnectionError):
            raise QuireError(f"no cluster of Ray's at {address or 'this machine'}: {error}") from None
        if stays:
            raise QuireError(
                "no cluster of Ray's runs on this machine, and one that this command started would end with it: "
                "`ray start --head` starts one, or --address names one."
            ) from None
        ray.init("local", include_dashboard=False, log_to_driver=False)


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


@contextmanager
def until_signal() -> Iterator[threading.Event]:
    """Set by SIGINT and SIGTERM, of which Ray has handlers of its own; a second one ends the program at once."""
    came = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if came.is_set():
            os._exit(1)
        came.set()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def watch(name: str, ended: threading.Event) -> None:
    """Until `ended`. Raises QuireError once the application has failed, or is gone."""
    from ray import serve

    last = None
    while not ended.is_set():
        status = serve.status().applications.get(name)
        said = "gone" if status is None else str(status.status.value)
        if said != last:
            logger.info("%s: %s", name, said)
            last = said
        if status is None:
            raise QuireError(f"the application {name} has been deleted.")
        if said == "DEPLOY_FAILED":
            raise QuireError(f"the application {name} has failed: {status.message}")
        ended.wait(_LOOK)


def end(wanted: Deployment) -> None:
    """End the application; requests that run may finish, for `drain` seconds. Raises QuireError where it stays."""
    from ray import serve

    logger.info("%s ends: requests that run may finish for up to %g s", wanted.name, wanted.replicas.drain)
    due = time.monotonic() + wanted.replicas.drain + END
    while True:
        with suppress(TimeoutError):  # of Ray's own patience
            serve.delete(wanted.name)
        if wanted.name not in serve.status().applications:
            return
        if time.monotonic() > due:
            raise QuireError(f"the application {wanted.name} has not ended; `ray status` shows the cluster.")
