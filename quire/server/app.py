"""The FastAPI application over one engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from quire import __version__
from quire.config import ServerConfig
from quire.platform.engine.async_engine import AsyncEngine
from quire.platform.outputs.messages.message_format import formats_of
from quire.server.context import IGNORED, ServerContext
from quire.server.metrics import Metrics
from quire.server.middleware import ApiKeys, BodyLimits, RequestLog
from quire.server.responses.errors import DOCUMENTED, DOCUMENTED_ANTHROPIC, install_handlers
from quire.server.routes import (
    adapters,
    chat,
    completions,
    control,
    events,
    generate,
    info,
    invocations,
    messages,
    page,
    responses,
    status,
    tokens,
)
from quire.server.served_models import ServedModels
from quire.server.uploads.store import AdapterStore


def create_app(
    engine: AsyncEngine,
    config: ServerConfig,
    metrics: Metrics,
    store: AdapterStore | None,
    access_log: bool = True,
) -> FastAPI:
    """All routes. The engine starts and, if nobody has closed it, ends with the application.

    store: where uploaded adapters go (`adapter_store`), of which the engine may read adapters; it opens and closes with
    the application. None: adapters are not changed over HTTP. Raises QuireError for a format of messages that there is
    not.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        if store is not None:
            await store.open()
        await engine.start()
        try:
            yield
            await engine.close()
        finally:
            if store is not None:
                await store.close()

    # No pages of documentation: they would fetch their scripts from elsewhere. /openapi.json is there.
    app = FastAPI(
        title="quire", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan, redirect_slashes=False
    )
    app.root_path = config.root_path.rstrip("/")  # with a slash at its end, starlette finds nothing under it
    metrics.watch(engine)
    served = ServedModels(engine, config, store)
    if config.metrics_prefix:
        metrics.twin(engine, config.metrics_prefix, served.names[0])
    format = formats_of(
        engine.llm_engine.tokenizer,
        config.chat_template,
        tool_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
    )
    app.state.context = ServerContext(engine, config, served, metrics, format)
    install_handlers(app)
    if config.page:
        app.include_router(page.router)  # before info's: it has the same /, for others than browsers
        app.router.routes.append(page.BareRoot())
    for part in (status, info, completions, chat, responses, tokens, adapters, events, control, generate, invocations):
        app.include_router(part.router, responses=DOCUMENTED)
    app.include_router(messages.router, responses=DOCUMENTED_ANTHROPIC)
    _surround(app, config, metrics, access_log)
    return app


def _surround(app: FastAPI, config: ServerConfig, metrics: Metrics, access_log: bool) -> None:
    """What every request passes before its route, from the inside out."""
    app.add_middleware(
        BodyLimits,
        most=config.max_request_bytes,
        upload=config.max_adapter_upload_bytes,
        seconds=config.body_timeout,
    )
    app.add_middleware(ApiKeys, keys=config.api_keys, admin_key=config.admin_api_key, page=config.page)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Request-Id", IGNORED],
        )
    app.add_middleware(RequestLog, metrics=metrics, lines=access_log, probes=config.log_probes)
