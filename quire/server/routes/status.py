"""What the server says about itself: /v1/models, /health, /ready, /version, /metrics."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from quire import __version__
from quire.server.context import context_of
from quire.server.responses.errors import ApiError

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> JSONResponse:
    """The base model, its adapters and mixtures."""
    return JSONResponse({"object": "list", "data": context_of(request).served.models()})


@router.get("/v1/models/{model:path}")
async def model(model: str, request: Request) -> JSONResponse:
    """One of them."""
    for entry in context_of(request).served.models():
        if entry["id"] == model:
            return JSONResponse(entry)
    raise ApiError(404, f"model: there is no {model[:200]!r} here.", "model", "model_not_found")


@router.get("/health")
async def health(request: Request) -> JSONResponse:
    """200 while the step loop is alive; 503 when it has failed, stopped, or sticks in a step."""
    context = context_of(request)
    health_error = context.engine.step_loop.health_error(context.config.step_timeout)
    if health_error is not None:
        raise ApiError(503, health_error, code="unhealthy")
    return JSONResponse({"status": "ok"})


@router.get("/ping")
@router.post("/ping", include_in_schema=False)
async def ping(request: Request) -> JSONResponse:
    """The same as /health, under the name by which SageMaker asks; POST too."""
    return await health(request)


@router.get("/ready")
async def ready(request: Request) -> JSONResponse:
    """200 while requests are taken; 503 during shutdown, asleep and when unhealthy."""
    context = context_of(request)
    if context.engine.closing:
        raise ApiError(503, "the server is shutting down", code="not_ready")
    if context.engine.is_sleeping:
        raise ApiError(503, "the engine sleeps (POST /wake_up)", code="not_ready")
    return await health(request)


@router.get("/version")
async def version() -> JSONResponse:
    """quire's version."""
    return JSONResponse({"version": __version__})


@router.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    context = context_of(request)
    return Response(await asyncio.to_thread(context.metrics.render), media_type=CONTENT_TYPE_LATEST)
