"""The door of an application of replicas: one HTTP server with the routes, and the bytes, of a single one.

It asks Ray Serve where each request may go, sends it there, and passes on what comes. What concerns all replicas goes
to the ledger (adapters), or to each of them (metrics).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from quire import __version__
from quire.config import ServerConfig
from quire.distributed.door_routes import DoorContext, router
from quire.distributed.forward import Forward
from quire.server.app import surround
from quire.server.http.server import HttpServer
from quire.server.metrics import Metrics
from quire.server.paths import asks_for_page, route_path
from quire.server.responses.errors import install_handlers
from quire.server.routes import page

logger = logging.getLogger("quire.distributed")


class Door:
    """The class of Ray Serve's deployment. `__init__` is done when it listens."""

    async def __init__(  # type: ignore[misc]
        self,
        config: ServerConfig,
        base: Collection[str],
        secret: str,
        replicas: Any,
        ledger: Any,
        may_sleep: bool,
        drain: float,
    ) -> None:
        """base: the base model's names. replicas, ledger: handles. may_sleep: there may be no replica, and requests
        start one. drain: seconds that answers may take at the end.

        Raises QuireError where it cannot listen.
        """
        self._drain = drain
        self._server = HttpServer(door_app(config, Forward(replicas, secret, base), ledger, may_sleep), config)
        await self._server.start()
        logger.info("listening on %s", self._server.address)

    async def address(self) -> str:
        """Where it listens."""
        return self._server.address

    async def __del__(self) -> None:  # Serve's name for the end
        await self._server.stop(self._drain)


def door_app(config: ServerConfig, forward: Forward, ledger: Any, may_sleep: bool) -> FastAPI:
    """The application of a door."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with forward:
            yield

    app = FastAPI(
        title="quire", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan,
        redirect_slashes=False,
    )  # fmt: skip
    app.root_path = config.root_path.rstrip("/")
    app.state.door = DoorContext(config, ledger, forward, may_sleep)
    install_handlers(app)
    app.include_router(router)
    if config.page and config.api_keys:
        app.router.routes.append(page.BareRoot())
        app.mount("/", Page(forward))
    else:
        app.mount("/", forward)
    surround(app, config, Metrics(), access_log=False)  # replicas have the lines
    return app


class Page:
    """Answers who asks for the page, which needs no key: a replica might have to be started for them."""

    def __init__(self, app: ASGIApp) -> None:
        """app: answers all others."""
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not asks_for_page(scope):
            return await self._app(scope, receive, send)
        request, name = Request(scope), route_path(scope).rpartition("/")[2]
        answer = await page.file(name, request) if name else page.index(request)
        await answer(scope, receive, send)
