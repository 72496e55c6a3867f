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
from quire.pooling_types import PoolingSpec
from quire.server.context import IGNORED, ServerContext
from quire.server.metrics import Metrics
from quire.server.middleware import ApiKeys, BodyLimits, RequestLog
from quire.server.responses.errors import DOCUMENTED, DOCUMENTED_ANTHROPIC, install_handlers
from quire.server.routes import (
    adapters,
    chat,
    completions,
    control,
    embeddings,
    events,
    generate,
    info,
    invocations,
    messages,
    page,
    responses,
    scores,
    status,
    tokens,
)
from quire.server.runners import only_generators, only_poolers
from quire.server.served_models import ServedModels
from quire.server.short_way import ShortWay
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
    the application. None: none is uploaded. Raises QuireError for a format of messages that there is not.
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
    _include(app, config.page, engine.llm_engine.pooling)
    asked_most = [completions, chat] if engine.llm_engine.pooling is None else [embeddings, scores]
    lenient = config.unknown_fields == "warn"
    app.add_middleware(ShortWay, api=app, routers=[part.router for part in asked_most], lenient=lenient)
    surround(app, config, metrics, access_log)
    return app


def _include(app: FastAPI, with_page: bool, spec: PoolingSpec | None) -> None:
    """Add the routes, those first that are asked most: each is compared with a request's path until one fits.

    spec: what the model makes of prompts; None: it generates.
    """
    generators, poolers = only_generators(spec), only_poolers(spec)
    asked_most = [(completions, generators), (chat, generators), (embeddings, poolers), (scores, poolers)]
    for part, dependencies in asked_most if spec is None else asked_most[2:] + asked_most[:2]:
        app.include_router(part.router, responses=DOCUMENTED, dependencies=dependencies)
    if with_page:
        app.include_router(page.router)  # before info's: it has the same /, for others than browsers
        app.router.routes.append(page.BareRoot())
    for part in (status, info, tokens, adapters, events, control, invocations):
        app.include_router(part.router, responses=DOCUMENTED)
    for part in (responses, generate):
        app.include_router(part.router, responses=DOCUMENTED, dependencies=generators)
    app.include_router(messages.router, responses=DOCUMENTED_ANTHROPIC, dependencies=generators)


def surround(app: FastAPI, config: ServerConfig, metrics: Metrics, access_log: bool) -> None:
    """What every request passes before its route, be it by the short way or not; from the inside out."""
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
